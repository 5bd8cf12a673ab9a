"""ImageFolder: torchvision's samples, in one call a batch where the transform is a recipe."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from support.jpegs import CODECS, WAYS, decoding_by, running
from torch import nn
from torch.utils.data import Subset, default_collate
from torchvision import datasets, transforms as v1
from torchvision.transforms import v2

import spdl_torch
from spdl_torch.data import mix
from spdl_torch.data.folder import CollatedSamples, ImageFolder
from spdl_torch.errors import DecodeError
from spdl_torch.io import image_loader
from spdl_torch.loader.differences import path_of_difference

SIZES = [(75, 100), (100, 75), (60, 60), (30, 90), (20, 20), (300, 200)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two classes of photographs, JPEG and PNG, large and small."""
    root = tmp_path_factory.mktemp("folder")
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (root / label).mkdir()
        for place, (height, width) in enumerate(SIZES):
            coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
            photo = coarse.resize((width, height), Image.Resampling.BICUBIC)
            photo.save(root / label / f"{place}.{'png' if place == 2 else 'jpg'}")
    return root


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def invert(image):
    """A user's own function on whatever the transform before it gives."""
    return ImageOps.invert(image) if isinstance(image, Image.Image) else -image


V1_FLOAT = [v1.ToTensor(), v1.Normalize(MEAN, STD)]
V2_FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
V1_TRAIN = [v1.RandomResizedCrop(48), v1.RandomHorizontalFlip()]
V2_TRAIN = [v2.RandomResizedCrop(48, antialias=True), v2.RandomHorizontalFlip(0.3)]

# Recipes whose every step runs on the whole batch.
BATCHED = {
    "train, v1": v1.Compose([*V1_TRAIN, *V1_FLOAT]),
    "train, v2": v2.Compose([*V2_TRAIN, *V2_FLOAT]),
    "train, v2, tensor first": v2.Compose([v2.PILToTensor(), *V2_TRAIN, *V2_FLOAT[1:]]),
    "train without flip": v1.Compose([v1.RandomResizedCrop((40, 56), (0.3, 1)), *V1_FLOAT]),
    "validation, v1": v1.Compose([v1.Resize(64), v1.CenterCrop(48), *V1_FLOAT]),
    "validation, v2": v2.Compose([v2.Resize([64]), v2.CenterCrop([48]), *V2_FLOAT]),
    "crop larger than resize": v1.Compose([v1.Resize(41), v1.CenterCrop((64, 51)), *V1_FLOAT]),
    "max_size": v1.Compose([v1.Resize(40, max_size=50), v1.CenterCrop(48), *V1_FLOAT]),
    "fixed size": v1.Compose([v1.Resize((40, 56)), v1.RandomHorizontalFlip(), *V1_FLOAT]),
    "uint8": v1.Compose([*V1_TRAIN, v1.PILToTensor()]),
    "to half": v1.Compose([*V1_TRAIN, v1.PILToTensor(), v1.ConvertImageDtype(torch.float16)]),
    "nested": v1.Compose([v1.Compose(V1_TRAIN), v1.Compose(V1_FLOAT)]),
    "sequential": nn.Sequential(*V1_TRAIN, v2.PILToTensor()),
}
# Recipes that end sample by sample, and transforms that are not a recipe at all.
UNBATCHED = {
    "erasing": v1.Compose([*V1_TRAIN, *V1_FLOAT, v1.RandomErasing()]),
    "v2 class kept": v2.Compose([*V2_TRAIN, *V2_FLOAT, v2.RandomErasing()]),
    "own function after": v1.Compose([*V1_TRAIN, invert, *V1_FLOAT]),
    "own function before": v1.Compose([invert, *V1_TRAIN, *V1_FLOAT]),
    "colours": v1.Compose([*V1_TRAIN, v1.ColorJitter(0.4), *V1_FLOAT]),
    "nearest": v1.Compose([v1.Resize((9, 9), v1.InterpolationMode.NEAREST), *V1_FLOAT]),
    "bicubic": v1.Compose([v1.RandomResizedCrop(48, interpolation=3), *V1_FLOAT]),
    "rotation": v1.Compose([v1.RandomRotation(20), v1.Resize((40, 40)), *V1_FLOAT]),
    "sizes vary": v1.Compose([v1.Resize(40), *V1_FLOAT]),
    "only ToTensor": v1.ToTensor(),
}
EVERY = {**BATCHED, **UNBATCHED}


def seeded(load):
    """The samples that ``load`` gives from seed 0, and the generator's state behind them."""
    torch.manual_seed(0)
    return load(), torch.get_rng_state()


def assert_same(samples, others):
    """To the bit."""
    assert path_of_difference(list(samples), list(others)) is None


@pytest.mark.parametrize("name", EVERY)
def test_samples_are_those_of_torchvision(root, name):
    """Same seed, same classes, crops and flips as torchvision's folder; pixels within a level."""
    ours, theirs = ImageFolder(root, EVERY[name]), datasets.ImageFolder(root, EVERY[name])
    assert (ours.samples, ours.classes) == (theirs.samples, theirs.classes)
    assert ours.targets == theirs.targets
    samples, state = seeded(lambda: [ours[i] for i in range(len(ours))])
    expected, expected_state = seeded(lambda: [theirs[i] for i in range(len(theirs))])
    assert torch.equal(state, expected_state)
    level = {torch.uint8: 1.01}.get(samples[0][0].dtype, 1.01 / 255 / min(STD))
    for (image, target), (other, other_target) in zip(samples, expected, strict=True):
        assert (target, image.dtype, image.shape) == (other_target, other.dtype, other.shape)
        difference = (image.float() - other.float()).abs()
        # One level, which ColorJitter may stretch, and two on single pixels.
        assert (difference <= (2 if name == "colours" else 1) * level).float().mean() >= 0.999
        assert difference.max() <= 4 * level


@pytest.mark.parametrize("name", EVERY)
def test_getitems_equals_getitem(root, name):
    """One by one or all at once: same bits, and the generator is left in the same state. A loader
    may take .collated instead of stacking; where samples are made one by one there is none."""
    dataset = ImageFolder(root, EVERY[name])
    indices = [3, 0, 7, 7, 11, 2]
    single, state = seeded(lambda: [dataset[i] for i in indices])
    subset = Subset(pickle.loads(pickle.dumps(dataset)) if name in BATCHED else dataset, indices)
    together, state_together = seeded(lambda: subset.__getitems__(range(len(indices))))
    assert_same(together, single)
    assert torch.equal(state, state_together)
    assert dataset.__getitems__([]) == []
    assert len(dataset.__getitems__(np.array([3, 0]))) == 2
    if name in UNBATCHED:
        assert isinstance(together, CollatedSamples)
        assert together.collated is None or name == "sizes vary"
        return
    images, targets = default_collate(list(together))
    assert torch.equal(together.collated[0], images)
    assert torch.equal(together.collated[1], targets)
    assert together.collated[1].dtype == torch.int64
    assert not images.is_floating_point() or together.collated[0].is_contiguous()


def test_loader_says_what_the_transform_gets(root):
    """With image_loader recipes stay recipes, and other transforms get uint8 tensors; a loader of
    the user's own is called for every file, and nothing is batched."""
    seen = []
    dataset = ImageFolder(root, lambda image: seen.append(image) or image, loader=image_loader)
    assert dataset[0][0].dtype == torch.uint8
    assert seen[0].shape[0] == 3
    recipe = BATCHED["validation, v1"]
    expected = ImageFolder(root, recipe).__getitems__([0, 1])
    assert_same(ImageFolder(root, recipe, loader=image_loader).__getitems__([0, 1]), expected)
    theirs = datasets.ImageFolder(root, recipe)
    samples = ImageFolder(root, recipe, loader=datasets.folder.pil_loader).__getitems__([0, 5])
    assert samples.collated is None
    assert_same(samples, [theirs[0], theirs[5]])


def test_target_transform_and_own_getitem_count_in_batches(root):
    """One by one and together; the transform that counts is the one at the time of loading."""

    class WithPath(ImageFolder):
        def __getitem__(self, index):
            return (*super().__getitem__(index), self.samples[index][0])

    recipe = BATCHED["validation, v1"]
    dataset = ImageFolder(root, recipe, target_transform=lambda t: t + 40)
    assert [target for _, target in dataset.__getitems__([0, 6])] == [40, 41]
    assert dataset[6][1] == 41
    assert [len(sample) for sample in WithPath(root, recipe).__getitems__([0, 6])] == [3, 3]
    dataset = ImageFolder(root, recipe)
    dataset.transform = BATCHED["uint8"]
    assert dataset.__getitems__([0, 1]).collated[0].dtype == torch.uint8


@pytest.mark.parametrize(("size", "ratio"), [((1, 400), (4, 5)), ((400, 1), (0.2, 0.25))])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_box_without_a_pixel_is_black_as_pillows(tmp_path, size, ratio, suffix):
    """Where no box of such a shape fits into a picture, torchvision takes one of no rows."""
    (tmp_path / "thin").mkdir()
    Image.new("RGB", size, (200, 10, 10)).save(tmp_path / "thin" / f"1.{suffix}")
    transform = v1.Compose([v1.RandomResizedCrop(8, ratio=ratio), v1.PILToTensor()])
    expected, target = datasets.ImageFolder(tmp_path, transform)[0]
    assert not expected.any()
    for codec in CODECS:
        dataset = ImageFolder(tmp_path, transform)
        with decoding_by(codec):
            assert_same([dataset[0], *dataset.__getitems__([0, 0])], [(expected, target)] * 3)


RANDOM = ["train, v1", "train, v2", "train without flip", "fixed size", "uint8", "sequential"]


def test_report_names_the_command_where_nothing_is_compiled(root):
    """Where the kernel runs in Python, and there alone: not where it does not run."""
    recipe = BATCHED["train, v1"]
    for way in WAYS:
        with running(way):
            remarks = ImageFolder(root, recipe).loading_remarks()
            others = ImageFolder(root, recipe, loader=str), ImageFolder(root)
        assert ("build-kernel" in "".join(remarks)) == (way == "eager")
        assert not any(each.loading_remarks() for each in others)


def images_of(dataset, sampler, batch_size, seed=3):
    options = {"num_workers": 2, "isolation": "thread", "seed": seed}
    loader = spdl_torch.DataLoader(dataset, batch_size, sampler=sampler, **options)
    return torch.cat([images for images, _ in loader])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*RANDOM, "erasing", "own function before"])
def test_batches_have_the_bits_of_single_samples(root, name, way):
    """Each sample draws from its own stream: in whole batches, of a mixture, and one by one."""
    folder = ImageFolder(root, EVERY[name])
    mixture = mix({"a": folder, "b": ImageFolder(root, EVERY[name])}, {"a": 2, "b": 1}, stop="all")
    assert mixture.__getitems__ is not None
    for dataset, sampler in ((folder, None), (mixture, mixture.sampler())):
        with running("eager"):
            singles = images_of(dataset, sampler, 1)
        with running(way):
            assert torch.equal(images_of(dataset, sampler, 1), singles)
            assert torch.equal(images_of(dataset, sampler, 5), singles)
            assert not torch.equal(images_of(dataset, sampler, 5, seed=4), singles)


def test_bad_file_is_named(root, tmp_path):
    """A truncated file raises DecodeError with its path, alone and in a batch. Normalize before
    ToTensor is the user's mistake, and torchvision's own error."""
    (tmp_path / "cat").mkdir()
    good = (root / "cat" / "0.jpg").read_bytes()
    (tmp_path / "cat" / "bad.jpg").write_bytes(good[:-200])
    (tmp_path / "cat" / "good.jpg").write_bytes(good)
    for transform in (BATCHED["train, v1"], UNBATCHED["rotation"]):
        dataset = ImageFolder(tmp_path, transform)
        for load in (lambda it: it[0], lambda it: it.__getitems__([1, 0])):
            with pytest.raises(DecodeError, match=r"cat/bad\.jpg: .*truncated"):
                load(dataset)
    transform = v1.Compose([*V1_TRAIN, v1.Normalize(MEAN, STD), v1.ToTensor()])
    with pytest.raises(TypeError, match="should be"):
        ImageFolder(root, transform)[0]
