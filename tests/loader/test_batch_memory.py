"""Batches for a device are made in pinned memory: nothing is packed, nothing is overwritten."""

import gc
import mmap
import multiprocessing
import os
import weakref

import numpy as np
import pytest
import torch
from _datasets import Made
from _lazy_device import backends, machine
from _loader_helpers import ThreadLoader as DataLoader
from _videos import KINDS, write_video
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torchvision import transforms

from spdl_torch import ImageFolder, PipelineDataset
from spdl_torch.io import batch_storage, load_clip_batch, uniform_frames
from spdl_torch.io._storage import room_in_batch
from spdl_torch.io._transfer import transfer
from spdl_torch.io._transfer.batch_memory import BatchMemory
from spdl_torch.io._transfer.region import LimitedLocker, PageLocker, Region
from spdl_torch.io._transfer.slabs import SMALL_BYTES
from spdl_torch.io._transfer.transfer import Transfer
from spdl_torch.loader.backends import transfer_stage
from spdl_torch.loader.backends.processes import processes
from spdl_torch.loader.backends.processes.shared_memory import Slab
from spdl_torch.pipeline import PipelineBuilder

__all__ = ["backends"]

FORKED = {"multiprocessing_context": "fork"}


class Locker(PageLocker):
    """Locks pages, and knows what is locked."""

    def __init__(self, most_bytes=1 << 40):
        self.most_bytes = most_bytes
        self.locked = {}
        self.peak = 0

    def lock_pages(self, address, num_bytes):
        if sum(self.locked.values()) + num_bytes > self.most_bytes:
            return False
        self.locked[address] = num_bytes
        self.peak = max(self.peak, sum(self.locked.values()))
        return True

    def unlock_pages(self, address):
        del self.locked[address]

    def lend(self, owner, region, give_back):
        weakref.finalize(owner, give_back).atexit = False


def made(memory, sizes):
    """The tensors of a batch, None where there was no room."""
    memory.begin()
    tensors = [memory.room(size) for size in sizes]
    memory.end()
    return tensors


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 3)),
        max_size=20,
    ),
)
def test_batches_that_are_held_never_share_memory(most_pieces, steps):
    """Whatever their sizes and the order in which they go; pieces are as few as was said, and when
    all is gone nothing is locked."""
    locker = Locker()
    memory, held = BatchMemory(locker, most_pieces), []
    for value, (sizes, place) in enumerate(steps):
        del held[place : place + 1]
        for tensor in made(memory, [number * SMALL_BYTES for number in sizes]):
            held += [] if tensor is None else [(tensor.fill_(value), value)]
        tensor = None
        assert len(locker.locked) <= most_pieces
        assert all((each[::4096] == number).all() for each, number in held)
    del memory, held
    gc.collect()
    assert locker.locked == {}


def test_nothing_is_made_where_no_memory_can_be_locked():
    """It is packed as other tensors are."""
    memory = BatchMemory(Locker(most_bytes=0), 4)
    assert [made(memory, [SMALL_BYTES]) for _ in range(2)] == [[None]] * 2


def test_piece_is_free_once_its_copy_is_done(backends):
    """For whoever needs one, if the transfer has not looked yet; but not while it is copied."""
    staging = Transfer("cuda", num_slabs=2)
    memory = staging.batch_memory(1)
    staged = staging.stage(made(memory, [SMALL_BYTES])[0].fill_(7))
    assert made(memory, [SMALL_BYTES]) == [None]
    staged.synchronize()
    (again,) = made(memory, [SMALL_BYTES])
    again.fill_(0)
    assert staged.receive().unique().tolist() == [7]


def frames(index):
    """A sample with two large tensors, an array, and what is not a tensor."""
    rng = np.random.default_rng(index)
    clip = torch.from_numpy(rng.integers(0, 256, (2, 64, 65, 3), dtype=np.uint8))
    flow = rng.random((3, 64, 64), dtype=np.float32)
    return {"clip": clip, "flow": flow, "mask": flow > 0.5, "index": index, "name": str(index)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A few pictures in two classes."""
    path = tmp_path_factory.mktemp("pictures")
    for number in range(12):
        (path / str(number % 2)).mkdir(exist_ok=True)
        gray = Image.radial_gradient("L").rotate(30 * number)
        Image.merge("RGB", [gray, gray.rotate(90), gray]).save(
            path / str(number % 2) / f"{number}.jpg"
        )
    return path


def pictures(folder):
    """Through the batch kernel, as bytes."""
    steps = transforms.RandomResizedCrop(160), transforms.PILToTensor()
    return ImageFolder(folder, transforms.Compose(steps))


def floats(folder):
    """Through the batch kernel, and what makes normalised floats of its bytes."""
    steps = transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.2] * 3)
    return ImageFolder(folder, transforms.Compose([transforms.RandomResizedCrop(160), *steps]))


class Clips(Dataset):
    """Clips of a few videos, a batch of them in one call."""

    kinds = ("b-frames", "no b-frames")

    @classmethod
    def video(cls, number):
        return write_video(KINDS[cls.kinds[number % 2]])

    def __len__(self):
        return 12

    def __getitems__(self, indices):
        sources = [self.video(index) for index in indices]
        size = {"width": 64, "height": 48}
        clips = load_clip_batch(sources, uniform_frames(3), **size, storage=batch_storage())
        return list(zip(clips.frames.unbind(), clips.timestamps.unbind(), indices, strict=True))


def rows(_):
    """Rows of large tensors."""
    numbers = torch.arange(12 * 20_000, dtype=torch.float32).view(12, 20_000)
    return Subset(TensorDataset(numbers, numbers.to(torch.int16), torch.arange(12)), range(12))


DATA = {
    "collate": lambda _: Made(frames, 12),
    "kernel": pictures,
    "floats": floats,
    "clips": lambda _: Clips(),
    "rows": rows,
}
WHOLE = ("kernel", "floats", "clips")
"""Those whose batches have one large tensor, which is made as one."""


def epoch(dataset, num_workers, device, epochs=2, **options):
    """Batches of as many epochs, and the sizes in bytes of the tensors that this process packed."""
    packed, alone = [], transfer.copy_alone
    options |= {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = DataLoader(dataset, 4, seed=1, device=device, **options)

    def noting(target, source):
        packed.append(source.nbytes)
        alone(target, source)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transfer, "copy_alone", noting)
        batches = [list(loader) for _ in range(epochs)]
    return batches, packed


def same(one, other):
    """Whether batches are equal, their layouts too."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and (one.dtype, one.stride()) == (
            other.dtype,
            other.stride(),
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(
    ("kind", "num_workers"), [*((kind, 2) for kind in DATA), ("collate", 0), ("kernel", 0)]
)
def test_large_tensors_are_not_copied_before_the_wire(backends, folder, kind, num_workers):
    """They leave from where they were made; from the second batch on, that is, as the first one's
    second tensor finds no room. Values are those without a device."""
    dataset = DATA[kind](folder)
    batches, packed = epoch(dataset, num_workers, "cuda")
    expected, _ = epoch(dataset, num_workers, None)
    assert same(batches, expected)
    large = [size for size in packed if size >= SMALL_BYTES]
    assert len(large) <= (0 if kind in WHOLE else 2 * max(1, num_workers))
    assert backends[0].copy_sizes


@pytest.fixture
def copied_by_children(monkeypatch):
    """How many large tensors children copy to where the trainer sees them."""
    copied, write = multiprocessing.Value("q", 0), Slab.write

    def counting(slab, offset, content):
        copied.value += content.nbytes >= SMALL_BYTES
        write(slab, offset, content)

    monkeypatch.setattr(Slab, "write", counting)
    return copied


@pytest.mark.skipif(not hasattr(os, "fork"), reason="counts in a forked child")
@pytest.mark.parametrize("kind", [*DATA, "not locked"])
def test_large_tensors_of_processes_leave_from_where_the_child_made_them(
    backends, folder, kind, copied_by_children, monkeypatch
):
    """In shared memory, which neither the child copies them to, but for the first batch, whose
    second tensor finds no room; nor the trainer from. Where it may lock no memory it packs every
    one."""
    is_locked = kind != "not locked"
    if not is_locked:
        monkeypatch.setattr(LimitedLocker, "lock_pages", lambda *_: False)
    dataset = DATA[kind if is_locked else "collate"](folder)
    batches, packed = epoch(dataset, 1, "cuda", isolation="process", **FORKED)
    assert same(batches, epoch(dataset, 1, None)[0])
    num_packed = sum(size >= SMALL_BYTES for size in packed)
    num_large = sum(size >= SMALL_BYTES for backend in backends for size in backend.copy_sizes)
    assert num_large >= 6
    assert num_packed == (0 if is_locked else num_large)
    # The first batch's tensors move together; the kernel's batch has only one that is large.
    assert copied_by_children.value == (0 if kind in WHOLE else 2)


def test_loop_gets_no_view_of_the_memory_of_a_collate_function_of_its_own(backends, folder):
    """From an array in pinned memory the loop could begin copies that nobody waits for."""
    loader = DataLoader(pictures(folder), 4, num_workers=2, device="cuda", collate_fn=as_arrays)
    for batch in loader:
        assert not any(machine().is_locked(array.ctypes.data) for array in batch)


def as_arrays(samples):
    """Views of what the dataset made."""
    return [image.numpy() for image, _ in samples]


def test_memory_is_offered_to_the_thread_that_makes_the_batch_alone(backends, folder):
    """Not to the trainer's own calls, while it holds a batch or after."""
    for _ in DataLoader(pictures(folder), 4, num_workers=0, device="cuda"):
        assert room_in_batch(1 << 20) is None


@pytest.fixture
def one_intra_op_thread():
    """Without workers the loop's thread makes the batches, with torch's team of threads. Where
    other programs have the cores, each tensor would wait until all of the team have had a turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Sizes(Dataset):
    """Tensors of many sizes, two to a sample."""

    def __init__(self, count):
        self.sizes = np.random.default_rng(0).integers(1 << 16, 1 << 19, count).tolist()

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        size = self.sizes[index]
        large = torch.full((size,), index % 251, dtype=torch.uint8)
        return large, large[: 1 << 16]


BOUNDS = pytest.mark.parametrize(
    ("most", "options"),
    [
        (2 + 3, {"num_workers": 0}),
        (2 * 2 + 3, {"num_workers": 2}),
        (2 * 2 + 3 + 2, {"num_workers": 2, "isolation": "process", **FORKED}),
    ],
)


@BOUNDS
def test_all_pinned_memory_of_a_loader_is_bounded(one_intra_op_thread, backends, most, options):
    """Pieces, slabs, and the shared memory of all processes together: in batches of the largest
    size, three more than can be outstanding, and one for each process; flat over 400 sizes."""
    data = Sizes(400)
    largest = max(data.sizes) + (1 << 16)
    bound = most * (largest * 9 // 8 + SMALL_BYTES)
    for index, (large, small) in enumerate(DataLoader(data, 1, device="cuda", **options)):
        assert large.shape == (1, data.sizes[index])
        assert (large[:, ::997] == index % 251).all()
        assert (small[:, ::997] == index % 251).all()
        assert 0 < sum(machine().locked.values()) <= bound


@pytest.mark.parametrize("most", [0, 2])
def test_slabs_of_all_processes_share_one_bound(backends, most, monkeypatch):
    """Those beyond it are packed; batches are the same, and nothing stays locked."""
    monkeypatch.setattr(processes, "most_regions", lambda *_: most)
    monkeypatch.setattr(transfer_stage, "most_regions", lambda *_: most)
    locked, lock = [], LimitedLocker.lock_pages

    def noting(locker, address, num_bytes):
        is_locked = lock(locker, address, num_bytes)
        locked.append(len(locker._permits))
        return is_locked

    monkeypatch.setattr(LimitedLocker, "lock_pages", noting)
    data = Sizes(24)
    options = {"num_workers": 2, "isolation": "process", "prefetch_factor": 4, **FORKED}
    for index, (large, _) in enumerate(DataLoader(data, 1, device="cuda", **options)):
        assert (large[:, ::997] == index % 251).all()
    assert locked
    assert max(locked) <= max(0, most - 1)


def test_region_is_locked_once_there_is_room():
    """And not asked for again by a system that has refused."""
    locker = Locker()
    limited = LimitedLocker(locker, 1)
    first, second = (Region(mmap.mmap(-1, 4096), limited) for _ in range(2))
    assert (first.is_locked, second.is_locked) == (True, False)
    del first
    second.lock()
    assert second.is_locked
    assert len(locker.locked) == 1
    limited.grow(2)
    limited.grow(1)
    assert Region(mmap.mmap(-1, 4096), limited).is_locked
    refusing = Locker(most_bytes=0)
    limited = LimitedLocker(refusing, 2)
    region = Region(mmap.mmap(-1, 4096), limited)
    refusing.most_bytes = 1 << 20
    region.lock()
    assert not region.is_locked


def clips_of(numbers):
    """A batch of clips in the memory that the pipeline offers."""
    sources = [Clips.video(number) for number in numbers]
    frames = load_clip_batch(sources, uniform_frames(3), width=64, storage=batch_storage()).frames
    return {"frames": frames, "numbers": torch.tensor(numbers)}


def frames_of(number):
    """A sample of a few frames."""
    return torch.full((2, 64, 65, 3), number, dtype=torch.uint8)


PIPELINES = {
    "own op": lambda: PipelineBuilder().add_source(range(12)).aggregate(4).pipe(clips_of),
    "collate": lambda: (
        PipelineBuilder().add_source(range(12)).pipe(frames_of).aggregate(4).pipe(default_collate)
    ),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_batches_of_a_pipeline_are_not_copied_before_the_wire(backends, kind, monkeypatch):
    """As those of a loader; values and names of stages are those without a device."""
    packed, alone = [], transfer.copy_alone

    def noting(target, source):
        packed.append(source.nbytes)
        alone(target, source)

    monkeypatch.setattr(transfer, "copy_alone", noting)
    builder = PIPELINES[kind]().add_sink(2)
    datasets = PipelineDataset(builder, device="cuda"), PipelineDataset(builder)
    assert same(*map(list, datasets))
    names = [[stage.name for stage in dataset.snapshot().stages] for dataset in datasets]
    assert names[0][: len(names[1])] == names[1]
    assert not any(size >= SMALL_BYTES for size in packed)


def test_op_before_the_last_collates_into_memory_of_its_own(backends):
    """Later ops could keep views of it, from which the loop might begin copies."""
    builder = PipelineBuilder().add_source(range(8)).pipe(frames_of).aggregate(4)
    builder = builder.pipe(default_collate).pipe(torch.Tensor.numpy).add_sink(2)
    arrays = list(PipelineDataset(builder, device="cuda"))
    assert not any(machine().is_locked(array.ctypes.data) for array in arrays)
