"""Check that batches on the device equal those of torch's DataLoader, moved by the loop."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

from ..data.loader.dataloader import DataLoader
from ..io._image.geometry import Crop
from ..io._image.images import load_image_batch
from ..io._transfer.transfer import Transfer, cuda_config
from .races import num_wrong

if TYPE_CHECKING:
    from torch import Tensor

    from ..io._transfer.transfer import CUDAConfig
    from .gpu import Gpu
    from .sheet import Sheet


def check_batches(gpu: Gpu, sheet: Sheet, device: str = "cuda") -> None:
    """Check tensors of every common dtype and layout, in one batch: they are there, and equal."""
    image = torch.rand(2, 3, 40, 48)
    given: dict[str, Tensor] = {
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "permuted": image.permute(3, 1, 0, 2),
        "holes": image[..., ::3],
        "expanded": image[:1].expand(5, 3, 40, 48),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "conjugate": torch.rand(4, dtype=torch.complex64).conj(),
        "large": torch.arange(1 << 20),
    }
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float64):
        given[str(dtype)] = torch.arange(100).to(dtype)
    transfer = Transfer(device)  # kept: freeing one waits for its copies
    received = transfer.stage(given).receive()
    wrong = 0
    for name, tensor in given.items():
        expected, found = tensor.to(received[name].device, copy=True), received[name]
        wrong += not (_arrived(gpu, expected, found) and expected.stride() == found.stride())
    sheet.at_most("batch_equals_to", wrong, 0)


def check_loaders(gpu: Gpu, sheet: Sheet, device: str = "cuda") -> None:
    """Check the loader's batches, of threads and of processes: they are there, and torch's."""
    data = TensorDataset(torch.arange(96_000.0).view(96, 1000), torch.arange(96))
    expected = list(TorchLoader(data, batch_size=10))
    options: dict[str, Any]
    for name, options in (
        ("0_workers", {"num_workers": 0}),
        ("4_threads", {"num_workers": 4, "isolation": "thread"}),
        ("2_processes", {"num_workers": 2, "isolation": "process"}),
    ):
        found = list(DataLoader(data, batch_size=10, device=device, **options))
        wrong = abs(len(found) - len(expected))
        for batch, other in zip(found, expected, strict=False):
            pairs = zip(other, batch, strict=True)
            wrong += not all(_arrived(gpu, one, two) for one, two in pairs)
        sheet.at_most(f"loader_equals_torchs_{name}", wrong, 0)


def check_nvjpeg(sheet: Sheet, device_index: int = 0) -> None:
    """Check JPEGs decoded on the GPU against the CPU's, in levels of 255: each picture whole; then
    cropped and flipped, the worst of a few resized singly and of many resized together.
    """
    pictures, config = made_pictures(), cuda_config(device_index)
    try:
        levels = _levels_apart([*pictures.values()], config)
    except RuntimeError as error:
        if "needs nvJPEG" not in str(error):
            raise
        sheet.skip("nvjpeg", "no nvJPEG here")
        return
    for name, value in zip(pictures, levels, strict=True):
        sheet.at_most(f"nvjpeg_{name}", value, 2)
    for name, times in (("crop", 1), ("crop_together", 3)):
        levels = _levels_apart([*pictures.values()] * times, config, crop=_flipped_middle)
        sheet.at_most(f"nvjpeg_{name}", max(levels), 2)


def check_nvjpeg_race(
    gpu: Gpu, sheet: Sheet, device_index: int = 0, *, num_batches: int = 100
) -> None:
    """Drop batches of nvJPEG's while late kernels read them: every one is the first one's."""
    pictures, config = [*made_pictures().values()], cuda_config(device_index)
    options: dict[str, Any] = {"width": 160, "height": 128, "device_config": config}
    sources = [[pictures[number % len(pictures)]] * 4 for number in range(num_batches)]
    from ..io._image.nvjpeg import load_image_batch_nvjpeg

    try:
        firsts = [load_image_batch_nvjpeg(each, **options).cpu() for each in sources[:6]]
    except RuntimeError as error:
        if "needs nvJPEG" not in str(error):
            raise
        sheet.skip("race_nvjpeg", "no nvJPEG here")
        return
    expected = [float(first.sum(dtype=torch.float64)) for first in firsts]
    batches = (load_image_batch_nvjpeg(each, **options) for each in sources)
    wrong = num_wrong(gpu, batches, [expected[number % 6] for number in range(num_batches)])
    sheet.at_most("race_nvjpeg", wrong, 0)


def _levels_apart(sources: list[bytes], config: CUDAConfig, **options: Any) -> list[float]:
    """Return by how much the GPU's pictures differ from the CPU's, on average."""
    from ..io._image.nvjpeg import load_image_batch_nvjpeg

    options = {"width": 160, "height": 128, **options}
    batch = load_image_batch_nvjpeg(sources, device_config=config, **options)
    expected = load_image_batch(sources, **options).permute(0, 3, 1, 2)
    levels = (batch.cpu().int() - expected.int()).abs().float().mean(dim=(1, 2, 3))
    return [float(value) for value in levels]


def _flipped_middle(height: int, width: int) -> Crop:
    return Crop(height // 8, width // 4, height // 2, width // 2, flip=True)


def made_pictures() -> dict[str, bytes]:
    """Return a picture in the kinds of JPEG that decoders treat differently, and as a PNG."""
    from PIL import Image

    gradient = Image.radial_gradient("L").resize((320, 240))
    colours = Image.merge("RGB", [gradient, gradient.rotate(90), gradient.rotate(45)])
    kinds: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "common": (colours, "JPEG", {}),
        "full_colours": (colours, "JPEG", {"subsampling": 0}),
        "progressive": (colours, "JPEG", {"progressive": True}),
        "gray": (gradient, "JPEG", {}),
        "cmyk": (colours.convert("CMYK"), "JPEG", {}),
        "png": (colours, "PNG", {}),
    }
    found = {}
    for name, (image, form, options) in kinds.items():
        image.save(
            file := io.BytesIO(), form, **({"quality": 95} if form == "JPEG" else {}), **options
        )
        found[name] = file.getvalue()
    return found


def _arrived(gpu: Gpu, expected: Tensor, found: Tensor) -> bool:
    is_there = found.nbytes == 0 or gpu.index_of(found) is not None
    return is_there and same(expected, found)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, wherever they are, have one type and equal values."""
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
