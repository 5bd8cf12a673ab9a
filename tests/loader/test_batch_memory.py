"""Batches for a device are made in pinned memory: nothing is packed, nothing is overwritten."""

import functools
import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from support.datasets import Made
from support.lazy_device import machine
from support.loaders import ThreadLoader as DataLoader
from torch.utils.data import Subset, TensorDataset, default_collate
from torchvision import transforms

from spdl_torch import ImageFolder, PipelineDataset
from spdl_torch.io import batch_storage
from spdl_torch.io._storage import room_in_batch
from spdl_torch.io._transfer import transfer
from spdl_torch.io._transfer.slabs import SMALL_BYTES
from spdl_torch.loader.backends.processes.shared_memory import Slab
from spdl_torch.pipeline import PipelineBuilder

FORKED = {"multiprocessing_context": "fork"}


def made(memory, sizes):
    """The tensors of a batch, None where there was no room."""
    memory.begin()
    tensors = [memory.room(size) for size in sizes]
    memory.end()
    return tensors


def test_bound_holds_after_the_system_has_refused(backends):
    """Also with the pieces that were lent then, when the next epoch asks the system again."""
    memory = transfer.Transfer("cuda").batch_memory(3)
    held = [made(memory, [SMALL_BYTES]) for _ in range(2)]
    machine().is_refusing = True
    held.append(made(memory, [SMALL_BYTES]))
    machine().is_refusing = False
    memory.grow(3)
    held += [made(memory, [SMALL_BYTES]) for _ in range(3)]
    assert [batch == [None] for batch in held] == [False, False, True, False, True, True]


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 3)),
        max_size=20,
    ),
)
def test_batches_that_are_held_never_share_memory(backends, most_pieces, steps):
    """Whatever their sizes and the order in which they go; pieces are as few as was said."""
    memory, held = transfer.Transfer("cuda").batch_memory(most_pieces), []
    for value, (sizes, place) in enumerate(steps):
        del held[place : place + 1]
        for tensor in made(memory, [number * SMALL_BYTES for number in sizes]):
            held += [] if tensor is None else [(tensor.fill_(value), value)]
        tensor = None
        assert len({number for _, number in held}) <= most_pieces
        assert all((each[::4096] == number).all() for each, number in held)


def test_piece_is_free_once_its_copy_is_done(backends):
    """For whoever needs one, if the transfer has not looked yet; but not while it is copied."""
    staging = transfer.Transfer("cuda", num_slabs=2)
    memory = staging.batch_memory(1)
    staged = staging.stage(made(memory, [SMALL_BYTES])[0].fill_(7))
    assert made(memory, [SMALL_BYTES]) == [None]
    staged.synchronize()
    (again,) = made(memory, [SMALL_BYTES])
    again.fill_(0)
    assert staged.receive().unique().tolist() == [7]


def test_larger_piece_takes_the_place_of_one_after_the_system_has_refused(backends):
    """It has given memory back for it, so that the system is asked again."""
    staging = transfer.Transfer("cuda", num_slabs=2)
    memory = staging.batch_memory(2)
    staged = staging.stage(made(memory, [SMALL_BYTES])[0])
    machine().is_refusing = True
    assert made(memory, [SMALL_BYTES]) == [None]
    machine().is_refusing = False
    assert made(memory, [SMALL_BYTES]) == [None]  # nobody asks again before
    staged.synchronize()
    assert made(memory, [2 * SMALL_BYTES]) != [None]


def frames(index):
    """A sample with two large tensors, an array and a number."""
    rng = np.random.default_rng(index)
    clip = torch.from_numpy(rng.integers(0, 256, (2, 64, 65, 3), dtype=np.uint8))
    flow = rng.random((3, 64, 64), dtype=np.float32)
    return {"clip": clip, "flow": flow, "mask": flow > 0.5, "index": index}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A few pictures in two classes."""
    path = tmp_path_factory.mktemp("pictures")
    for number in range(12):
        (path / str(number % 2)).mkdir(exist_ok=True)
        gray = Image.radial_gradient("L").rotate(30 * number)
        picture = Image.merge("RGB", [gray, gray.rotate(90), gray])
        picture.save(path / str(number % 2) / f"{number}.jpg")
    return path


def pictures(folder):
    """Through the batch kernel, and what makes normalised floats of its bytes."""
    steps = transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.2] * 3)
    return ImageFolder(folder, transforms.Compose([transforms.RandomResizedCrop(160), *steps]))


def rows(_):
    """Rows of large tensors."""
    numbers = torch.arange(12 * 20_000, dtype=torch.float32).view(12, 20_000)
    return Subset(TensorDataset(numbers, numbers.to(torch.int16), torch.arange(12)), range(12))


DATA = {"collate": lambda _: Made(frames, 12), "kernel": pictures, "rows": rows}


@pytest.fixture
def packed(monkeypatch):
    """The sizes in bytes of the tensors that this process has packed."""
    found, alone = [], transfer.slabs.copy_alone

    def noting(target, source):
        found.append(source.nbytes)
        alone(target, source)

    monkeypatch.setattr(transfer.slabs, "copy_alone", noting)
    return found


def epochs(dataset, device=None, *, num_workers, **options):
    """The batches of two epochs."""
    options |= {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = DataLoader(dataset, 4, seed=1, device=device, **options)
    return [list(loader) for _ in range(2)]


equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0, check_stride=True)
"""Assert that batches are equal, their layouts too."""


@pytest.fixture
def copied_by_children(monkeypatch):
    """How many large tensors children copy to where the trainer sees them."""
    copied, write = multiprocessing.Value("q", 0), Slab.write

    def counting(slab, offset, content):
        copied.value += content.nbytes >= SMALL_BYTES
        write(slab, offset, content)

    monkeypatch.setattr(Slab, "write", counting)
    return copied


IN_PROCESS = {"num_workers": 1, "isolation": "process", **FORKED}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind in DATA for options in ({"num_workers": 2}, IN_PROCESS)]
    + [(kind, {"num_workers": 0}) for kind in ("collate", "kernel")],
)
def test_large_tensors_are_not_copied_before_the_wire(
    backends, folder, kind, options, packed, copied_by_children
):
    """They leave from where they were made: those of a process from shared memory, to which its
    child has not copied them either. But for a worker's first batch, whose second tensor finds no
    room. Values are those without a device."""
    dataset = DATA[kind](folder)
    equal(epochs(dataset, "cuda", **options), epochs(dataset, num_workers=0))
    num_packed, num_first = sum(size >= SMALL_BYTES for size in packed), 2 * (kind != "kernel")
    is_process = options is IN_PROCESS
    assert num_packed <= (0 if is_process else num_first * max(1, options["num_workers"]))
    assert copied_by_children.value == num_first * is_process
    assert sum(size >= SMALL_BYTES for backend in backends for size in backend.copy_sizes) >= 6


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


def clips_of(numbers):
    """A batch of clips in the memory that the pipeline offers."""
    return batch_storage().tensor((len(numbers), 3, 64, 48, 3)).fill_(numbers[0])


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
def test_batches_of_a_pipeline_are_not_copied_before_the_wire(backends, kind, packed):
    """As those of a loader; values and names of stages are those without a device."""
    builder = PIPELINES[kind]().add_sink(2)
    datasets = PipelineDataset(builder, device="cuda"), PipelineDataset(builder)
    equal(*map(list, datasets))
    names = [[stage.name for stage in dataset.snapshot().stages] for dataset in datasets]
    assert names[0][: len(names[1])] == names[1]
    assert not any(size >= SMALL_BYTES for size in packed)


def test_op_before_the_last_collates_into_memory_of_its_own(backends):
    """Later ops could keep views of it, from which the loop might begin copies."""
    builder = PipelineBuilder().add_source(range(8)).pipe(frames_of).aggregate(4)
    builder = builder.pipe(default_collate).pipe(torch.Tensor.numpy).add_sink(2)
    arrays = list(PipelineDataset(builder, device="cuda"))
    assert not any(machine().is_locked(array.ctypes.data) for array in arrays)
