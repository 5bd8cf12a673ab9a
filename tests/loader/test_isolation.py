"""``isolation="process"``: what the loop gets is what threads would have given it, in shared memory
and in messages of any size."""

import io
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.data
from support.at_call import AtCall, TooLate
from support.datasets import Coded, Crashing, Images, Made
from support.gates import PATIENCE_SECONDS, num_fds, until
from support.inside import num_ready
from support.isolated import bits, isolated, mapped_slabs, nothing_left, num_mapped_slabs, served
from support.loaders import torch_loader
from support.readings import shown
from torch.utils.data import Dataset, Subset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchvision import tv_tensors

from spdl_torch import DataLoader
from spdl_torch.errors import UnsupportedOptionError
from spdl_torch.io import batch_storage
from spdl_torch.loader import opening
from spdl_torch.loader.backends.processes.wire import LONG_BYTES, File, Wire, socket_pair
from spdl_torch.loader.fetching.collating import LARGE_BYTES

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="counts children and descriptors")


def large(length):
    """Samples for shared memory, in which each number is the sample's."""
    return Made(lambda index: torch.full((20_000,), float(index)), length)


def image_or_error(index):
    """Sample 5 fails, and says why."""
    if index == 5:
        raise Coded(index, "here")
    return Images()[index]


def test_batches_stay_right_when_the_loop_keeps_all_of_them():
    """A slab is not written again while anything views it; beyond some, batches are copied."""
    loader = isolated(large(60), 2)
    kept, batches = [], iter(loader)
    kept.extend(next(batches) for _ in range(25))
    assert "batches were copied out of shared memory" in shown(loader.report())
    kept.extend(batches)
    assert [batch[:, 0].tolist() for batch in kept] == [[2.0 * n, 2.0 * n + 1] for n in range(30)]
    assert all((batch == batch[:, :1]).all() for batch in kept)
    assert 0 < num_mapped_slabs() <= 4 + 2 * 8 + 4  # waiting, kept of each child, one a job


def test_batch_is_the_loops_own():
    """It may be changed in place, kept in part, and is as large as it says. Labels that are kept do
    not keep the images."""
    batches = iter(isolated(large(20), 2, num_workers=1))
    first = next(batches)
    first.mul_(2).add_(1)
    part = first[1, :5]
    assert first.untyped_storage().nbytes() == first.nbytes
    del first
    for number, batch in enumerate(batches, 1):
        assert batch[0, 0] == 2 * number
    assert part.tolist() == [3.0] * 5
    del part, batch
    labels = [batch["index"] for batch in isolated(Images(12), 4)]
    assert torch.cat(labels).tolist() == list(range(12))
    assert not num_mapped_slabs()


def test_descriptors_and_slabs_are_flat_over_epochs(monkeypatch):
    """Persistent children need no more with each; and those of a closed loader are freed, though
    its iterator is kept, and what a thread has unpacked ahead of the loop."""
    monkeypatch.setattr("spdl_torch.loader.backends.processes.hearing._MOST_UNPACKING_NS", 0)
    loader = isolated(Images(), 4, persistent_workers=True)
    list(loader)
    without_slabs = num_fds() - num_mapped_slabs()
    for _ in range(20):
        list(loader)
    assert num_fds() - num_mapped_slabs() == without_slabs
    assert num_mapped_slabs() <= 2 * (4 + 2)  # of each child that once made all that is under way
    next(batches := iter(loader))
    until(lambda: num_ready(batches))
    loader.close()
    assert not num_mapped_slabs()


class LateOpened:
    """A sample; unpickled it is there once the worker has begun the one after it."""

    begun = torch.zeros(6).share_memory_()

    def __init__(self, index):
        self.index = index
        self.begun[index] = 1

    def __setstate__(self, attributes):
        vars(self).update(attributes)
        until(lambda: self.begun[self.index + 1 :][:1].all())


def test_worker_has_its_next_job_while_the_loop_unpacks_a_batch():
    """However long that takes, the worker need not wait for it."""
    dataset = Made(LateOpened, len(LateOpened.begun))
    LateOpened.begun.zero_()
    loader = isolated(dataset, None, num_workers=1, prefetch_factor=1)
    assert [sample.index for sample in loader] == list(range(len(dataset)))


def test_epoch_that_was_left_does_not_reach_the_next_one():
    """What was under way is dropped when it comes, and its slab is free again."""
    begun, may_end = (multiprocessing.get_context("fork").Semaphore(0) for _ in range(2))

    def drawn(index):
        return torch.rand(1).repeat(20_000)

    def held(index):
        """The second one waits."""
        begun.release()
        assert index != 1 or may_end.acquire(timeout=PATIENCE_SECONDS)
        return drawn(index)

    options = {"batch_size": None, "num_workers": 1, "seed": 2, "persistent_workers": True}
    loader = isolated(Made(held, 3), **options)
    for epoch in range(12):
        batches = iter(loader)
        if epoch:
            may_end.release()  # that of the epoch before
        found = [next(batches)]
        for _ in range(2):
            assert begun.acquire(timeout=PATIENCE_SECONDS)
    may_end.release()
    found += batches
    plain = DataLoader(Made(drawn, 3), isolation="thread", **options)
    expected = [list(plain) for _ in range(12)][-1]
    assert list(map(bits, found)) == list(map(bits, expected))
    assert num_mapped_slabs() <= 6


def test_error_has_the_childs_traceback_as_a_note(backends):
    """Without the loader's own frames; also where the trainer moves batches to a device, which is
    told of the death of a child, too."""
    batches = iter(isolated(Made(image_or_error, 12), 4, device="cuda"))
    assert next(batches)["index"].tolist() == [0, 1, 2, 3]
    with pytest.raises(Coded, match=r"\(5, 'here'\)") as caught:
        next(batches)
    heading, first, *rest = caught.value.__notes__[-1].splitlines()
    assert heading.startswith("raised in the worker process (pid")
    assert "datasets.py" in first
    assert 'raise Coded(index, "here")' in "\n".join(rest)
    assert next(batches)["index"].tolist() == [8, 9, 10, 11]
    with pytest.raises(RuntimeError, match="ended by itself with exit code 3"):
        list(isolated(Crashing("exit"), 1, num_workers=1, device="cuda"))


def test_batch_of_very_many_numbers_comes_beside_tensors():
    """The numbers are collated elsewhere, and lie behind the tensors, which come after them."""
    batch = LARGE_BYTES // 8  # of 64 bits
    numbered = Made(lambda index: (index, torch.full((4,), index)), 3 * batch)
    batches = list(map(bits, isolated(numbered, batch, num_workers=1)))
    assert batches == list(map(bits, DataLoader(numbered, batch)))


def beside(held, index):
    return index


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": Made(partial(beside, [int, lambda x: x]), 4)},
        {"dataset": Subset(Made(partial(beside, io.FileIO(os.devnull)), 4), [0])},
        {"dataset": Images(), "worker_init_fn": lambda _: None},
    ],
)
def test_unpicklable_part_is_an_error(options):
    """Pickle's own, which names it, with what to do; no process is left, and none was started. A
    forked one needs no pickle."""
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)) as raised:
        iter(served(**options))
    assert raised.value.__notes__[-1].endswith("pickles nothing.")
    assert len(list(isolated(**options))) == len(options["dataset"])


def test_unpicklable_index_is_an_error_where_another_thread_receives(monkeypatch):
    """In its place, at once, though the workers have nothing to say meanwhile. A thread receives
    what takes long to unpack, from the second epoch on: a loop that waits for its device need not
    do it."""
    monkeypatch.setattr("spdl_torch.loader.backends.processes.hearing._MOST_UNPACKING_NS", 0)
    indices = [0] * 8
    options = {"sampler": indices, "num_workers": 1, "prefetch_factor": 1}
    loader = isolated([0], None, timeout=PATIENCE_SECONDS, **options)
    batches = iter(loader)
    assert not [each for each in threading.enumerate() if each.name == "spdl-receive"]
    assert len(list(batches)) == 8
    indices[:] = 0, lambda: 0, 0
    batches = iter(loader)
    assert [each for each in threading.enumerate() if each.name == "spdl-receive"]
    assert next(batches) == 0
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        next(batches)
    assert list(batches) == [0]


class Unreadable:
    """Is pickled, and cannot be unpickled."""

    def __len__(self):
        return 4

    def __reduce__(self):
        return refuse, ()


def refuse():
    raise ValueError("this file is not mounted here")


def test_dataset_that_the_child_cannot_open_is_an_error():
    """With the reason; after it the epoch is over."""
    batches = iter(served(Unreadable()))
    with pytest.raises(RuntimeError, match="could not be set up: ValueError: this file is not"):
        next(batches)
    assert next(batches, None) is None


def settings(_index):
    """The environment, the rank and the default dtype of the process."""
    distributed = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else os.environ.get("RANK")
    return os.environ.get("SPDL_TORCH_TEST"), rank and int(rank), torch.get_default_dtype()


@pytest.mark.parametrize("make", [isolated, served])
def test_settings_are_the_trainers(monkeypatch, tmp_path, make):
    """As they are now, and not when a fork server was started. Datasets that share themselves out
    find the rank in the process group, which a forked child knows, or in the environment."""
    monkeypatch.setenv("SPDL_TORCH_TEST", "one")
    monkeypatch.delenv("RANK", raising=False)
    assert list(make(Made(settings, 1), None, num_workers=1, collate_fn=tuple)) == [
        ("one", None, torch.float32)
    ]
    monkeypatch.setenv("SPDL_TORCH_TEST", "two")
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    torch.set_default_dtype(torch.float64)
    try:
        assert list(make(Made(settings, 1), None, num_workers=1, collate_fn=tuple)) == [
            ("two", 0, torch.float64)
        ]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.distributed.destroy_process_group()


def counted(counter, shared, index):
    """Counts the samples in a value, and writes into a tensor."""
    with counter.get_lock():
        counter.value += 1
    shared.fill_(1)
    return index


def test_shared_values_of_multiprocessing_pass():
    """As they do to torch's workers: they are pickled while the process is started, and stay
    shared."""
    context = multiprocessing.get_context("forkserver")
    counter, shared = context.Value("i", 7), torch.zeros(3).share_memory_()
    data = Made(partial(counted, counter, shared), 4)
    loader = isolated(data, 2, multiprocessing_context=context)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert (counter.value, shared.tolist()) == (11, [1.0] * 3)


def test_log_of_the_child_is_the_trainers(caplog):
    """Records of our loggers in the child reach the trainer's handlers, also where the loop ends
    or is closed before it has read them."""
    log = logging.getLogger("spdl_torch.data").warning
    loader = isolated(Made(lambda index: log("sample %d", index), 6), 2, collate_fn=list)
    for end in (list, lambda _: loader.close()):
        caplog.clear()
        batches = iter(loader)
        until(lambda: loader.snapshot().stages[0].tasks.num_tasks == 6)
        end(batches)
        assert {f"sample {index}" for index in range(6)} == {*caplog.messages}


def test_torchs_own_processes_load_where_there_are_none_of_ours(monkeypatch, caplog):
    """As on Windows: the batches, and one line in the log that says what is missing."""
    monkeypatch.setattr(opening, "has_processes", False)
    opening._say_whose_processes.cache_clear()
    loader = isolated(list(range(10)), 4, persistent_workers=True)
    for _ in range(2):
        batches = iter(loader)
        assert type(batches) is _MultiProcessingDataLoaderIter
        assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    loader.close()
    (line,) = [each for each in caplog.messages if "Windows" in each]
    assert "without states within an epoch, statistics of the workers" in line
    # What those cannot is refused at iter(); threads and no workers are as everywhere.
    resumed = isolated(list(range(4)), num_workers=1)
    resumed.load_state_dict(resumed.state_dict())
    with pytest.raises(UnsupportedOptionError, match="a state that was loaded has no effect"):
        iter(resumed)
    with pytest.raises(UnsupportedOptionError, match='on_error="skip" has no effect on Windows'):
        iter(isolated(list(range(4)), num_workers=1, on_error="skip"))
    for options in ({"num_workers": 0}, {"num_workers": 1, "isolation": "thread"}):
        assert len(list(DataLoader(list(range(4)), on_error="skip", **options))) == 4


MIB = 1 << 20


def values(folder):
    """Large and small tensors and arrays of every form."""
    big, array = torch.rand(4, 3, 100, 100), np.arange(MIB // 2, dtype=np.float32).reshape(512, -1)
    memory_map = np.memmap(folder / "map", np.uint8, "w+", shape=2 * MIB)
    memory_map[-3:] = 7
    dense = torch.arange(36.0).reshape(6, 6)
    read_only = {
        "small": np.frombuffer(bytes(range(12)), np.uint8),
        "large": np.frombuffer(bytes(400_000), np.float32),
        "transposed": np.frombuffer(bytes(range(48)), np.int32).reshape(3, 4).T,
        "moments": np.frombuffer(bytes(range(64)), "M8[ns]"),
    }
    return {
        "channels last": big.to(memory_format=torch.channels_last),
        "with holes": big[:, :, ::2],
        "expanded": torch.tensor(3.0).expand(300, 300),
        "part of a larger one": torch.rand(3, 300, 300)[1],
        "empty": torch.zeros(0, 3),
        "complex, conjugated": torch.rand(300, 300, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.rand(300, 300)),
        "subclass": tv_tensors.Image(torch.randint(0, 255, (3, 300, 300), dtype=torch.uint8)),
        "sparse, not coalesced": torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
        "sparse csr": dense.to_sparse_csr(),
        "sparse bsc": dense.to_sparse_bsc((2, 3)),
        "array, Fortran's": np.asfortranarray(array),
        "array, reversed": array[::-1],
        "memory map": memory_map,
        **{f"read-only, {name}": array for name, array in read_only.items()},
    }


def facts_of(value, name):
    """What is to be the same as from torch's worker; holes need not be sent."""
    if isinstance(value, np.ndarray):
        order = value.flags.c_contiguous, value.flags.f_contiguous, value.flags.writeable
        return type(value), value.dtype, value.shape, order, value.tobytes()
    is_sparse = value.layout is not torch.strided
    layout = value.layout, value.is_sparse and value.is_coalesced()
    strides = None if is_sparse or name == "with holes" else value.stride()
    dense = value.detach().to_dense().resolve_conj().as_subclass(torch.Tensor)
    content = dense.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return type(value), value.dtype, value.shape, value.requires_grad, layout, strides, content


@pytest.mark.filterwarnings("ignore:Sparse")
def test_values_come_as_from_torchs_workers(tmp_path):
    """On their way to a worker, in its dataset, and on their way back, in a batch: types, forms,
    values, and whether they can be written. Nothing is left for ``torch.load`` to check."""
    given = values(tmp_path)
    options = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    options["collate_fn"] = torch.nn.Identity()  # which can be pickled
    ours, theirs = (
        {name: facts_of(value, name) for name, value in zip(given, loader, strict=True)}
        for loader in (
            make([*given.values()], None, **options) for make in (isolated, torch_loader)
        )
    )
    assert [name for name in given if ours[name] != theirs[name]] == []
    assert not getattr(torch._utils, "_sparse_tensors_to_validate", [])


def same_ones(parts, _):
    """Which of these arrays and tensors are one object or have one memory."""
    memories = [
        part.untyped_storage().data_ptr() if isinstance(part, torch.Tensor) else id(part)
        for part in parts
    ]
    pairs = itertools.combinations(enumerate(memories), 2)
    return [[n, m] for (n, a), (m, b) in pairs if a == b]


def test_what_is_one_in_the_trainers_dataset_is_one_in_the_workers():
    """As with torch."""
    array, tensor = np.zeros(MIB), torch.zeros(MIB // 2)
    parts = array, array, tensor, tensor, torch.ones(3)
    dataset = Made(partial(same_ones, parts), 1)
    (ours,), (theirs,) = (
        list(make(dataset, None, num_workers=1, multiprocessing_context="forkserver"))
        for make in (isolated, torch_loader)
    )
    assert ours == theirs
    assert ours == [[0, 1], [2, 3]]


def parts_of(index):
    """Some parts of any size: tensors, arrays, texts."""
    draws = random.Random(index)
    sizes = [draws.randrange(2 * LARGE_BYTES) for _ in range(draws.randrange(6))]
    kinds = [
        lambda size: torch.full((size,), index % 99, dtype=torch.uint8),
        lambda size: np.full(size // 2, index % 99, dtype=np.int16),
        lambda size: chr(index % 99) * size,
    ]
    return [draws.choice(kinds)(size) for size in sizes]


def content_of(batch):
    return [(type(part), np.asarray(part).dtype, bytes(np.asarray(part))) for part in batch]


@pytest.mark.parametrize("has_memfd", [True, False])
def test_batches_of_any_sizes_pass_and_stay(has_memfd, monkeypatch):
    """Through the same slabs, one after the other, some of them kept, or a view of a view; also
    where slabs are nameless files, as on macOS. One that is too small is replaced."""
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    kept, most = [], 0
    loader = isolated(Made(parts_of, 100), None, num_workers=1, collate_fn=list)
    for index, batch in enumerate(loader):
        assert content_of(batch) == content_of(parts_of(index))
        if index % 3 == 0:
            views = [part[1:][::2] for part in batch]
            kept = [*kept[-3:], (views, content_of(views))]
        for views, content in kept:
            assert content_of(views) == content
        most = max(most, num_mapped_slabs() if has_memfd else 1)
    assert 0 < most <= 4 + 2 + 3  # kept, the loop's and under way


class Keeping(Dataset):
    """A batch is made in its slab, and a part of some is kept; of three one fails after that. With
    it is told how many slabs its process has."""

    def __init__(self):
        self.kept = []

    def __len__(self):
        return 90

    def __getitems__(self, indices):
        (index,) = indices
        made = batch_storage().tensor((1, LARGE_BYTES)).fill_(index)
        if index % 3 == 0:
            raise KeyError(index)
        if index % 3 == 1:
            self.kept = [*self.kept[-2:], (index, made[0, :9])]
        assert all((part == number).all() for number, part in self.kept)
        return [(made[0], len(mapped_slabs()))]


def test_slab_that_the_child_views_is_not_written_again():
    """A dataset may keep samples that were made in it; and a batch that gets no further gives its
    slab back."""
    batches, most = iter(isolated(Keeping(), 1, num_workers=1)), 0
    for index in range(90):
        if index % 3 == 0:
            with pytest.raises(KeyError, match=str(index)):
                next(batches)
            continue
        made, num_slabs = next(batches)
        assert bytes(made.numpy()) == bytes([index]) * LARGE_BYTES
        most = max(most, num_slabs.item())
    assert 3 < most <= 3 + 2 + 3


@pytest.mark.parametrize("size", [6_300, 25_000])
def test_child_has_its_jobs_and_sends_its_batches_while_the_loop_is_away(size):
    """All of them, however large: of 31 KB each, of which a socket takes a few, or more than one
    takes at all. Batches are as large as their jobs, and pickled: their texts do not go through
    shared memory."""
    batches = [list(range(10**6 + n, 10**6 + n + size)) for n in range(20)]
    options = {"num_workers": 1, "prefetch_factor": 16, "collate_fn": list}
    texts = Made(str)
    texts.__getitems__ = lambda indices: [*map(str, indices)]
    loader = DataLoader(texts, batch_sampler=batches, **options)
    rest = iter(loader)
    until(lambda: loader.snapshot().stages[1].tasks.num_tasks == 16)
    assert list(rest) == [[str(index) for index in batch] for batch in batches]


def test_messages_of_any_size_come_in_order_with_their_own_files(tmp_path):
    """Though nobody reads meanwhile: more than a socket takes is sent, in parts, as it is read. An
    end with something unread, as of a child that is killed, is the end."""
    (ours, theirs), draws, sent, found = map(Wire, socket_pair()), random.Random(0), [], []
    for number in range(60):
        files = []
        if draws.random() < 0.3:
            files = [File(os.open(tmp_path / str(number), os.O_CREAT | os.O_RDWR))]
        size = draws.choice([0, 1, 70, LONG_BYTES, LONG_BYTES + 1, 100_000])
        sent.append((bytes([number]) * size, [os.fstat(file).st_ino for file in files]))
        ours.send(sent[-1][0], *files)
    while len(found) < len(sent):
        theirs.read()
        for content, files in iter(theirs.next, None):
            found.append((bytes(content), [os.fstat(file).st_ino for file in files]))
        ours.flush()
    assert found == sent
    ours.send(b"a job")
    theirs.close()
    ours.read()
    assert ours.next() is None
    assert ours.is_over
    ours.close()


@pytest.mark.usefixtures("_too_late")
def test_signal_costs_no_descriptor_and_is_not_taken_for_the_other_sides_end():
    """Wherever it comes as messages come and go, one with a file: what its handler raises is
    raised, though it is an OSError."""
    for place in itertools.count(1):
        opened, (ours, theirs) = num_fds(), map(Wire, socket_pair())
        ours.send(bytes(2 * LONG_BYTES))
        came = False
        try:
            with AtCall(place, signal.SIGUSR1) as at_call:
                theirs.read()
                theirs.send(b"an answer")
        except TooLate:
            came = True
        ours.close()
        theirs.close()
        assert num_fds() == opened, at_call.where
        assert came == (at_call.where is not None), at_call.where
        if not came:
            break
    assert place > 4


def test_rest_of_a_message_comes_after_a_timeout(monkeypatch):
    """A child that is stopped in the middle of one costs neither the loop its timeout nor the
    batch."""
    (reads, writes), trainer, flush = os.pipe(), os.getpid(), Wire.flush

    def stopping(wire):
        if os.getpid() != trainer and wire.unsent:
            content, _ = wire.unsent[0]
            wire.unsent[0] = content[wire.socket.send(content[:9]) :], ()
            os.read(reads, 1)
        flush(wire)

    monkeypatch.setattr(Wire, "flush", stopping)
    batches = iter(isolated([0, 1, 2, 3], num_workers=1, timeout=0.5))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.5 seconds"):
        next(batches)
    os.write(writes, b"12345678")
    assert [batch.item() for batch in batches] == [0, 1, 2, 3]
    os.close(reads)
    os.close(writes)


def test_indices_that_cannot_be_sent_cost_no_memory():
    """The slabs that would have been reported free with them are reported all the same."""
    order = [[threading.Lock()] if number % 2 and number > 4 else [number] for number in range(80)]
    batches = iter(isolated(Images(80), batch_sampler=order, num_workers=1, prefetch_factor=2))
    found, num_errors, most = [], 0, 0
    while True:
        try:
            found.append(next(batches)["index"].item())
            most = max(most, num_mapped_slabs())
        except TypeError:
            num_errors += 1
        except StopIteration:
            break
    assert (found, num_errors) == ([0, 1, 2, 3, *range(4, 80, 2)], 38)
    assert most <= 4
