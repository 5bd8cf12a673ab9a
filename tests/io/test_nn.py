"""Images of bytes become floats inside the model, with torchvision's values."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torchvision.transforms import v2

from spdl_torch.nn import ToFloat

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def every_byte(num_images=2, num_channels=3):
    """Images in which each channel has every value."""
    one = torch.arange(256, dtype=torch.uint8).view(16, 16)
    return torch.stack([one.roll(k).expand(num_channels, 16, 16) for k in range(num_images)])


def torchvisions(images, mean=MEAN, std=STD, dtype=torch.float32):
    """The values of the transforms that users know, computed in float32 as for a model."""
    steps = [v2.ToDtype(torch.float32, scale=True)]
    if mean is not None:
        steps.append(v2.Normalize(mean, std))
    return v2.Compose(steps)(images).to(dtype)


ULP = {torch.float32: 1e-6, torch.float64: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
STATISTICS = [(None, None), (MEAN, STD), ([0.5], [0.25])]


@given(st.sampled_from([None, *ULP]), st.booleans(), st.booleans(), st.sampled_from(STATISTICS))
def test_values_are_torchvisions(dtype, is_dense, is_rows, statistics):
    """In every type, from every layout, into channels_last memory; to the last bit without a mean,
    where there is one multiplication in both."""
    images = every_byte() if is_dense else every_byte(4)[::2, :, 1:, ::3]
    images = images.contiguous(memory_format=torch.channels_last) if is_rows else images
    mean, std = statistics
    expected = torchvisions(images, mean, std, dtype or torch.float32)
    before = images.clone()
    found = ToFloat(mean, std, dtype=dtype)(images)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.is_contiguous(memory_format=torch.channels_last)
    if mean is None and found.dtype is not torch.float64:
        assert torch.equal(found, v2.ToDtype(found.dtype, scale=True)(images))
    torch.testing.assert_close(found, expected, rtol=ULP[found.dtype], atol=1e-6)
    assert torch.equal(images, before)


def test_result_has_autocasts_type_when_none_is_given():
    """As the convolution after it would make it; a type that is given stays."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ToFloat(MEAN, STD)(every_byte()).dtype is torch.bfloat16
        assert ToFloat(MEAN, STD, dtype=torch.float32)(every_byte()).dtype is torch.float32
    assert ToFloat(MEAN, STD)(every_byte()).dtype is torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run slower")
def test_compiled_model_has_the_same_values():
    """In one graph, in and out of autocast, in training."""
    model = nn.Sequential(ToFloat(MEAN, STD), nn.Conv2d(3, 2, 3))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    images = every_byte()
    torch.testing.assert_close(compiled(images), model(images))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(images), model(images))
    compiled(images).sum().backward()
    assert model[1].weight.grad is not None


@pytest.mark.parametrize(
    "cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double, lambda m: m.to(torch.float16)]
)
def test_values_stay_when_the_model_is_cast(cast):
    """A cast is meant for weights; it would take most of the digits of the mean."""
    model = nn.Sequential(ToFloat(MEAN, STD), nn.Conv2d(3, 2, 3))
    expected = model[0](every_byte())
    cast(model)
    assert model[1].weight.dtype is not torch.float32
    assert torch.equal(model[0](every_byte()), expected)
    assert torch.equal(copy.deepcopy(model)[0](every_byte()), expected)


def test_constants_follow_the_model():
    """To another device, and from one without memory."""
    with torch.device("meta"):
        model = ToFloat(MEAN, STD)
    expected = ToFloat(MEAN, STD)(every_byte())
    assert torch.equal(model.to_empty(device="cpu")(every_byte()), expected)
    assert model.to("meta")(every_byte().to("meta")).shape == expected.shape
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    # Checkpoints, of a model with and one without it, do not know it.
    assert (model.state_dict(), [*model.parameters()]) == ({}, [])


def test_what_would_train_on_other_pixels_is_refused():
    """A mean or spread alone, and images of floats, which are most likely scaled already."""
    for given_alone in ((MEAN, None), (None, STD)):
        with pytest.raises(ValueError, match="mean and std, or neither"):
            ToFloat(*given_alone)
    with pytest.raises(TypeError, match=r"uint8, got torch\.float32\. Leave ToTensor"):
        ToFloat(MEAN, STD)(torch.rand(2, 3, 4, 4))


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_torchvisions_on_the_device(dtype):
    """By one kernel."""
    images, model = every_byte().cuda(), ToFloat(MEAN, STD, dtype=dtype).cuda()
    model(images)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = model(images)
        torch.cuda.synchronize()
    assert sum("elementwise" in event.key for event in profile.key_averages()) == 1
    expected = torchvisions(every_byte(), dtype=dtype)
    torch.testing.assert_close(found.cpu(), expected, rtol=ULP[dtype], atol=1e-6)
    assert found.is_contiguous(memory_format=torch.channels_last)
