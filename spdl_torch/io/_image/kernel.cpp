// The functions of kernel.py as operators of torch, which calls them without the GIL: the same
// arguments, results and bits. kernel.py says what they do, and why; see extension.py.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

using at::Generator;
using at::Tensor;
using Pair = std::tuple<int64_t, int64_t>;
using Box = std::tuple<int64_t, int64_t, int64_t, int64_t>;
using FlippedBox = std::tuple<int64_t, int64_t, int64_t, int64_t, bool>;

std::vector<Tensor> read_files(const std::vector<std::string>& paths) {
  std::vector<Tensor> files;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    const int64_t num_bytes = file.tellg();  // -1: it cannot be opened
    TORCH_CHECK(num_bytes > 0, path, " is empty or cannot be read");
    const Tensor data = at::empty({num_bytes}, at::kByte);
    file.seekg(0).read(static_cast<char*>(data.mutable_data_ptr()), num_bytes);
    TORCH_CHECK(file, path, " cannot be read");
    files.push_back(data);
  }
  return files;
}

// decoder: an operator that takes bytes, 3 for RGB and, if it would turn the picture, false.
Tensor decode(const c10::OperatorHandle& decoder, const Tensor& data) {
  torch::jit::Stack stack{data, 3};
  if (decoder.schema().arguments().size() == 3) {
    stack.emplace_back(false);
  }
  decoder.callBoxed(stack);
  return stack.at(0).toTensor();
}

void fill_batch(
    const std::vector<Tensor>& data,
    const std::vector<Pair>& sizes,
    const std::vector<Box>& boxes,
    const std::vector<Pair>& resized,
    const std::vector<Pair>& windows,
    const c10::List<bool>& flips,
    const Tensor& batch,
    const std::string& decoder_name) {
  std::optional<c10::OperatorHandle> decoder;
  if (!decoder_name.empty()) {
    decoder = c10::Dispatcher::singleton().findSchemaOrThrow(decoder_name.c_str(), "");
  }
  const int64_t height = batch.size(2), width = batch.size(3);
  for (size_t i = 0; i < data.size(); ++i) {
    const Tensor image = data[i].dim() == 1 ? decode(decoder.value(), data[i]) : data[i];
    TORCH_CHECK(
        image.dim() == 3 && Pair(image.size(1), image.size(2)) == sizes.at(i),
        "the decoded size is not the size in the header");
    const auto [top, left, box_height, box_width] = boxes.at(i);
    const auto [new_height, new_width] = resized.at(i);
    const auto [y, x] = windows.at(i);
    const Tensor crop =
        image.narrow(1, top, box_height).narrow(2, left, box_width).unsqueeze(0);
    Tensor place = batch.narrow(0, i, 1);
    if (box_height == 0 || box_width == 0) {
      place.zero_();
    } else if (y == 0 && x == 0 && new_height == height && new_width == width) {
      at::_upsample_bilinear2d_aa_out(place, crop, {height, width}, false);
    } else {
      const Tensor whole = at::_upsample_bilinear2d_aa(crop, {new_height, new_width}, false);
      const int64_t from_y = std::max<int64_t>(y, 0), from_x = std::max<int64_t>(x, 0);
      const int64_t to_y = std::max<int64_t>(-y, 0), to_x = std::max<int64_t>(-x, 0);
      const int64_t rows = std::min(new_height - from_y, height - to_y);
      const int64_t columns = std::min(new_width - from_x, width - to_x);
      if (rows < height || columns < width) {
        place.zero_();
      }
      place.narrow(2, to_y, rows).narrow(3, to_x, columns)
          .copy_(whole.narrow(2, from_y, rows).narrow(3, from_x, columns));
    }
    if (flips.get(i)) {
      place.copy_(place.flip(3));
    }
  }
}

std::vector<FlippedBox> draw_boxes(
    const std::vector<Pair>& sizes,
    const std::tuple<double, double>& scale,
    const std::tuple<double, double>& log_ratio,
    double flip,
    const std::optional<std::vector<Generator>>& generators,
    const std::vector<int64_t>& seeds) {
  const auto [low, high] = scale;
  const auto [log_low, log_high] = log_ratio;
  const Tensor number = at::empty({1});
  std::vector<FlippedBox> boxes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::optional<Generator> generator;
    if (generators.has_value()) {
      generator = generators->at(seeds.empty() ? i : 0);
    }
    if (!seeds.empty()) {
      generator->set_current_seed(seeds.at(i));
    }
    const auto below = [&](int64_t end) {
      return at::randint(0, end, {1}, generator).item<int64_t>();
    };
    const auto [height, width] = sizes[i];
    int64_t top = 0, left = 0, box_height = 0, box_width = 0;
    for (int trial = 0; trial < 10; ++trial) {
      const double area = height * width * number.uniform_(low, high, generator).item<double>();
      const double ratio = number.uniform_(log_low, log_high, generator).exp_().item<double>();
      const auto columns = static_cast<int64_t>(std::nearbyint(std::sqrt(area * ratio)));
      const auto rows = static_cast<int64_t>(std::nearbyint(std::sqrt(area / ratio)));
      if (0 < columns && columns <= width && 0 < rows && rows <= height) {
        box_height = rows;
        box_width = columns;
        top = below(height - rows + 1);
        left = below(width - columns + 1);
        break;
      }
    }
    const bool is_flipped =
        flip >= 0 && number.uniform_(0, 1, generator).item<double>() < flip;
    boxes.emplace_back(top, left, box_height, box_width, is_flipped);
  }
  return boxes;
}

}  // namespace

TORCH_LIBRARY(spdl_torch_images, library) {
  library.def("_read_files", read_files);
  library.def("_fill_batch", fill_batch);
  library.def("_draw_boxes", draw_boxes);
}
