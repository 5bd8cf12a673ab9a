"""cached: a sample is made once on a machine, and what is found is whole and not stale."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
from collections import UserDict, namedtuple
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as transforms
from PIL import Image
from support import warm
from support.at_call import TooLate, handled
from support.datasets import Made as MadeBy, Sized
from support.forks import fork, found_in_fork, found_in_forks
from support.gates import PATIENCE_SECONDS, in_thread, result_of, switching, until
from support.inside import kept_by, placement_of
from support.readings import shown
from support.tars import keys, shard_of, write_shard
from torch.utils.data import Subset

import spdl_torch
from spdl_torch import ImageFolder
from spdl_torch.data import cached, caching as caching_module, mix
from spdl_torch.data.sources import TarShards
from spdl_torch.io import image_loader
from spdl_torch.io._cache import memory, store as store_module
from spdl_torch.io._cache.store import Store
from spdl_torch.loader.differences import path_of_difference

forked = multiprocessing.get_context("fork")

Pair = namedtuple("Pair", "image label")
NUM_KILLED = 40


def content_of(number, size=1000):
    return random.Random(number).randbytes(size)


class Made(Sized):
    """Samples that are counted when they are made."""

    thread_safe = True

    def __init__(self, length, offset=0):
        super().__init__(length)
        self.offset, self.num_made = offset, [0]

    def __getitem__(self, index):
        self.num_made[0] += 1
        return Pair(torch.arange(6).reshape(2, 3) + index + self.offset, index)


def is_same(one, two):
    """Whether two samples are equal, as the cache compares them."""
    return path_of_difference(one, two, loosely=True) is None


SAMPLES = [
    torch.arange(6, dtype=torch.uint8).reshape(1, 2, 3),
    torch.rand(3, 4, 5).permute(1, 2, 0),
    torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.tensor(True),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.empty((2, 0, 3), dtype=torch.uint16),
    torch.tensor([1 + 2j]),
    torch.rand(3, requires_grad=True),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    {"a": [1, 2.5, None, "text"], "b": (b"bytes", np.float32(3))},
    Pair(torch.tensor([float("nan")]), 7),
    Image.new("RGB", (3, 2), (1, 2, 3)),
    torch.rand(4, 4)[:, ::2],  # and others with gaps
    torch.arange(10)[::2],
    torch.arange(3).expand(4, 3),
    np.arange(10)[::-1],
    np.arange(12).reshape(3, 4)[:, :2],
    np.broadcast_to(np.arange(3), (4, 3)),
    np.zeros(3, "i4, f8")["f1"],
]


@dataclass
class Labelled:
    image: torch.Tensor


class Opaque:
    """It knows when it was made, and has no ``__eq__``."""

    def __init__(self):
        self.made = object()


KEYS = itertools.cycle([("a", "b"), ("b", "a")])
MADE_ANEW = [
    lambda: Labelled(torch.arange(3)),
    lambda: UserDict(image=torch.arange(3)),  # as a tokenizer's BatchEncoding
    lambda: torch.eye(3).to_sparse(),
    lambda: np.array([[1, "a"], "".join("bc")], dtype=object),
    lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    lambda: torch.tensor([1j, 2]).conj(),
    lambda: {**dict.fromkeys(next(KEYS), 1), "more": Opaque()},  # as sets have another order
]


@pytest.mark.parametrize("place", ["memory", "full"])
@pytest.mark.parametrize("sample", [*SAMPLES, *MADE_ANEW])
def test_sample_comes_back_bit_for_bit(sample, place, tmp_path):
    """Its shape and type, too, also where it is made anew each time. It can be written to."""
    make = sample if callable(sample) else lambda: sample
    options = {"cache": tmp_path, "max_bytes": 1} if place == "full" else {}
    kept = cached(MadeBy(lambda _: make(), 2), version=1, **options)
    for number in range(3):
        found = kept[0]
        assert is_same(found, make())
        if isinstance(sample, torch.Tensor):
            assert found.requires_grad == sample.requires_grad
        if isinstance(sample, torch.Tensor | np.ndarray) and number and not options:
            (found.detach() if isinstance(sample, torch.Tensor) else found)[...] = 0


def kill_after(num_bytes, program):
    """Fork a program, which gets a pipe, and kill it when it has written so many bytes there."""
    reading, writing = os.pipe()
    pid = fork(lambda: program(writing))
    while num_bytes:
        num_bytes -= len(os.read(reading, num_bytes))
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    os.close(reading)
    os.close(writing)


def test_kill_while_the_cache_is_written_leaves_no_bad_item(tmp_path):
    """Of processes that fill one store, one after the other; what was there stays."""

    def fill(seed, writing):
        store = Store(str(tmp_path))
        for number in random.Random(seed).sample(range(NUM_KILLED), NUM_KILLED):
            os.write(writing, b".")
            store.put(number, content_of(number, 200_000))
        signal.pause()

    most = 0
    for seed in range(15):
        kill_after(random.Random(seed).randrange(1, NUM_KILLED), partial(fill, seed))
        store = Store(str(tmp_path))
        found = {number: store.get(number) for number in range(NUM_KILLED)}
        kept = {number: content for number, content in found.items() if content is not None}
        assert all(content == content_of(n, 200_000) for n, content in kept.items())
        assert len(kept) >= most
        most = len(kept)
    assert most > 20


def test_full_disk_stops_the_cache_and_not_the_training(tmp_path, caplog):
    """Kept samples are found, the rest are made; all are right, and the log says so once. In a
    process whose files may have 30 kB: as a full disk, with a real error of the system."""

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        dataset = Made(50)
        kept = cached(Subset(dataset, range(50)), tmp_path, version=1)
        for _ in range(3):
            assert [sample.label for sample in kept] == list(range(50))
        has_room = [kept_by(kept).put(0, b"x" * 20_000) for _ in range(3)][-1]
        return dataset.num_made[0], has_room, [each.getMessage() for each in caplog.records]

    num_made, has_room, (line,) = found_in_fork(full)
    assert 50 <= num_made < 150
    assert not has_room
    assert re.match(r"cache /.*: full; other samples", line)


def bytes_in(folder):
    return sum(Path(folder, name).stat().st_size for name in ("data", "index"))


@pytest.mark.parametrize("limit", ["max_bytes", "free"])
def test_limit_is_kept_and_logged_once(limit, tmp_path, caplog, monkeypatch):
    """That of ``max_bytes``, or a free share of the disk; the log says once that it is full."""
    options, most = {"max_bytes": 10_000}, 10_000
    if limit == "free":
        monkeypatch.setattr(store_module, "_SPARE_SHARE", 1)
        monkeypatch.setattr(store_module, "_MOST_SPARE_BYTES", 1 << 80)
        options, most = {}, 0
    dataset = Made(100)
    kept = cached(dataset, tmp_path, version=1, **options)
    for _ in range(2):
        assert [sample.label for sample in kept] == list(range(100))
    assert most // 2 <= bytes_in(kept_by(kept).folder) <= most
    (record,) = caplog.records
    assert ": full; other samples" in record.message
    assert 100 < dataset.num_made[0] <= 200 + 2  # two are made twice, to compare


def test_earlier_versions_make_room_for_the_present_one(tmp_path):
    """The oldest that no program uses, and only of the same dataset, and only beyond the limit."""
    other = kept_by(cached(Made(3), tmp_path, version=1)).folder
    one, two = [kept_by(filled(tmp_path, version)).folder for version in ("one", "two")]
    gc.collect()
    os.utime(Path(one, "alive"), (1, 1))
    used = [filled(tmp_path, "used")]
    size = bytes_in(kept_by(used[0]).folder)
    used.append(filled(tmp_path, "three", size * 7 // 2))
    assert [os.path.isdir(folder) for folder in (one, two)] == [False, True]
    used.append(filled(tmp_path, "four", size * 3 // 2))
    assert [os.path.isdir(folder) for folder in (one, two)] == [False, False]
    assert all(map(os.path.isdir, (other, *(kept_by(kept).folder for kept in used))))


def filled(folder, version, most=None):
    kept = cached(Made(50), folder, version=version, max_bytes=most)
    assert [sample.label for sample in kept] == [*range(50)]
    return kept


@pytest.mark.parametrize("gone", ["data", "index", "*"])
def test_what_somebody_removed_is_made_again(gone, tmp_path, caplog):
    """A file or all of them, by a program that removes old ones: nothing is turned off."""
    list(cached(Made(5), tmp_path, version=1))
    dataset = Made(5)
    before = cached(dataset, tmp_path, version=1)
    own = Path(kept_by(before).folder)
    for path in own.glob(gone):
        path.unlink()
    if gone == "*":
        own.rmdir()
    for kept in (before, cached(Made(5), tmp_path, version=1)):
        for _ in range(2):
            assert [sample.label for sample in kept] == [*range(5)]
    assert not caplog.records


@pytest.mark.parametrize(("programs", "threads"), [(3, 1), (1, 3), (2, 3)])
def test_sample_is_made_once_where_several_ask_for_it(programs, threads, tmp_path, monkeypatch):
    """Threads or programs, which all begin with the same sample."""
    barrier = forked.Barrier(programs)

    def make(index):
        with open(tmp_path / "made", "ab", buffering=0) as file:
            file.write(bytes([index]))
        return index

    kept = cached(MadeBy(make, 100), tmp_path / "cache", version=1)
    monkeypatch.setattr(caching_module, "_NUM_COMPARED", 0)  # nothing is made to compare it

    def hold(writing):  # the first sample is about to be made, for ever
        kept.dataset = MadeBy(lambda _: os.write(writing, b".") and signal.pause(), len(kept))
        kept[0]

    def read():
        with ThreadPoolExecutor(threads) as pool, switching():
            barrier.wait()
            return [*pool.map(list, [kept] * threads)]

    kill_after(1, hold)
    assert found_in_forks(*[read] * programs) == [[[*range(100)]] * threads] * programs
    made = (tmp_path / "made").read_bytes()
    assert set(made) == set(range(100))
    if 1 in (threads, programs):
        assert len(made) == 100


def test_other_version_or_dataset_finds_nothing(tmp_path):
    """Samples of another version, length, class or part are other samples. Without a version, the
    first samples of the process show what has changed, or is random: a cache would freeze it."""
    list(cached(Made(10), tmp_path, version=1))
    for dataset, version in ((Made(10), 2), (Made(11), 1)):
        list(cached(dataset, tmp_path, version=version))
        assert dataset.num_made[0] == len(dataset) + 2
    folds = [cached(Subset(range(10), fold), tmp_path, version=1) for fold in ([0, 1], [2, 3])]
    assert [list(fold) for fold in (*folds, *folds)] == [[0, 1], [2, 3]] * 2
    with pytest.raises(ValueError, match=r"sample 3 in .* is not what the dataset makes now"):
        cached(Made(10, offset=1), tmp_path, version=1)[3]
    with pytest.raises(ValueError, match="sample 0 is not the same when it is made twice"):
        cached(MadeBy(lambda _: torch.rand(3), 4))[0]


def random_part(sample):
    """Augmentation: after the cache."""
    return sample.image + torch.rand(2, 3), sample.label


@pytest.mark.parametrize(("workers", "where"), [(0, "auto"), (2, "thread"), (2, "process")])
def test_epochs_have_the_bits_of_no_cache(workers, where, tmp_path):
    """The first, which fills the cache, and the second, which reads it, wherever workers live."""
    plain = MadeBy(lambda index: random_part(Made(20)[index]), 20)
    expected = spdl_torch.DataLoader(plain, batch_size=4, shuffle=False, seed=3)
    kept = cached(Made(20), tmp_path, version=1, transform=random_part)
    loader = spdl_torch.DataLoader(kept, 4, num_workers=workers, isolation=where, seed=3)
    found = []
    for _ in range(3):
        assert all(map(is_same, list(expected), list(loader)))
        assert loader.report().stats.data == loader.snapshot().data
        found.append(tuple(loader.snapshot().data.values()))
    assert found == [(0, 20), (20, 0), (20, 0)]  # of each epoch, over all workers
    assert "cache: found 20, missing 0" in shown(loader.report())
    assert "The cache is in" in shown(loader.report())


def test_cache_loads_on_threads_when_the_dataset_may():
    """With transforms of torchvision, or none."""
    silent, flip = Made(3), transforms.RandomHorizontalFlip()
    silent.thread_safe = None
    given = (Made(3), None, 0), (Made(3), flip, 0), (Made(3), random_part, 1), (silent, None, 1)
    for dataset, transform, num_processes in given:
        kept = cached(dataset, transform=transform)
        placement = placement_of(spdl_torch.DataLoader(kept, num_workers=1))
        assert placement.num_processes == num_processes


@pytest.fixture
def folder(tmp_path):
    """Six photographs in two classes."""
    for number in range(6):
        path = tmp_path / "images" / f"class_{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (12, 10, 3), np.uint8)
        Image.fromarray(noise).save(path)
    return str(tmp_path / "images")


TO_FLOAT = transforms.ToDtype(torch.float32, scale=True)
CROPS = transforms.Compose([transforms.RandomResizedCrop(6), transforms.ToImage(), TO_FLOAT])


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("memory", {"transform": CROPS}),
        ("disk", {"transform": CROPS}),
        ("disk", {"transform": transforms.Resize((5, 5)), "loader": image_loader}),
        ("disk", {"transform": lambda image: int(np.asarray(image).sum())}),
    ],
)
def test_image_folder_reads_each_file_once(folder, place, options, tmp_path):
    """The same bits as without a cache; and, with a version, without the files."""
    cache = place if place == "memory" else tmp_path / "cache"
    plain, kept = (
        spdl_torch.DataLoader(ImageFolder(folder, **options, **more), batch_size=4, seed=1)
        for more in ({}, {"cache": cache, "version": 1})
    )
    assert path_of_difference(list(plain), list(kept)) is None
    expected = list(plain)
    os.rename(folder, folder + "-gone")
    assert path_of_difference(expected, list(kept)) is None
    assert "This process found " in shown(kept.report())


@pytest.mark.parametrize("how", ["encoded", "decoded"])
def test_file_that_changed_is_read_anew(folder, tmp_path, how):
    """Its size or its modification time is another, in this process and in the next. One that is
    damaged is named as without a cache."""

    def make():
        if how == "encoded":
            options = {"transform": transforms.Resize((5, 5)), "loader": image_loader}
            return ImageFolder(folder, cache=tmp_path / "cache", **options)
        inner = ImageFolder(folder, transforms.Resize((5, 5)), loader=image_loader)
        return cached(Subset(inner, range(6)), tmp_path / "cache")

    kept = make()
    before = [image for image, _ in kept]
    path = Path(folder, "class_0", "2.png")
    size = path.stat().st_size
    Image.new("RGB", (12, 10), (9, 9, 9)).save(path)
    path.write_bytes(path.read_bytes().ljust(size, b"\0"))
    os.utime(path, ns=(1, 1))
    for dataset in (kept, make()):
        after = [image for image, _ in dataset]
        same = [is_same(*images) for images in zip(before, after, strict=True)]
        assert same == [True, False, True, True, True, True]
        assert (after[1] == 9).all()
    path.write_bytes(b"no image")
    os.utime(path, ns=(1, 1))
    for _ in range(2):
        with pytest.raises(spdl_torch.DecodeError, match=r"class_0/2\.png: cannot identify"):
            kept[1]


def shards(number):
    """Two samples in a shard with an index, by a relative path."""
    write_shard("a.tar", shard_of(2 * number, 2))
    return TarShards("a.tar", index=True)


def images(number):
    """Two photographs, by a relative path."""
    Path("root", "a").mkdir(parents=True)
    for place in range(2):
        Image.new("RGB", (8, 8), (number, place, 0)).save(f"root/a/{place}.bmp")
    return ImageFolder("root")


def caches_of(dataset, folder, version):
    """What keeps its samples, one way or another."""
    kept = [cached(each, folder, version=version) for each in (dataset, Subset(dataset, [0, 1]))]
    if isinstance(dataset, ImageFolder):
        return [*kept, ImageFolder("root", cache=folder, version=version)]
    return [*kept, TarShards("a.tar", cache=folder)]


@pytest.mark.parametrize(("make", "version"), [(shards, 1), (images, 1), (images, None)])
def test_relative_paths_are_others_in_another_folder(tmp_path, monkeypatch, make, version):
    """Though size and time are the same, or nobody looks."""
    for number, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        dataset = make(number)
        for path in Path().rglob("*.*"):
            os.utime(path, ns=(1, 1))
        expected = [dataset[index] for index in range(len(dataset))]
        for _ in range(2):
            for kept in caches_of(dataset, tmp_path / "cache", version):
                assert all(map(is_same, kept, expected))


def test_objects_are_others_with_other_options_of_the_store(tmp_path):
    """Another endpoint has another bucket of that name; here each is a folder."""
    for region, first in [("east", 0), ("west", 2)]:
        (tmp_path / region).mkdir()
        write_shard(tmp_path / region / "a.tar", shard_of(first, 2))
    for _ in range(2):
        for region in ("east", "west"):
            place = {"path": str(tmp_path / region), "target_protocol": "file"}
            options = {"index": True, "storage_options": place}
            kept = cached(TarShards("dir://a.tar", **options), tmp_path / "cache", version=1)
            assert keys(kept) == keys(TarShards(tmp_path / region / "a.tar"))
            copies = TarShards("dir://a.tar", **options, cache=tmp_path / "copies")
            assert keys(copies) == keys(kept)
            half = TarShards("dir://a.tar", **options).shard(1, 2)
            assert keys(cached(half, tmp_path / "cache", version=1)) == keys(half)


def rank_folders(environ, store):
    """The folders of two caches of a program that has these variables."""
    # By one thread: several whose first calculation comes at once may each find the pool of
    # torch's threads, which a fork makes new, half made ("Invalid thread pool!").
    torch.set_num_threads(1)
    os.environ.update(environ)
    if "MY_RANK" in environ:  # and nothing else says that this is a rank
        options = {"rank": int(environ["MY_RANK"]), "world_size": 2, "store": store}
        torch.distributed.init_process_group("gloo", **options)
        # One that ends while the other still joins closes its connections, and the other fails.
        store.set(f"has joined: {options['rank']}", "")
        store.wait([f"has joined: {rank}" for rank in range(2)])
    return [kept_by(cached(list(range(length)))).folder for length in (3, 4)]


@pytest.mark.parametrize(
    ("shared", "first", "second", "is_one"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {"RANK": "0"}, {"RANK": "1"}, True),
        ({"MASTER_ADDR": "a", "RANK": "0"}, {"MASTER_PORT": "1"}, {"MASTER_PORT": "2"}, False),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            {"SLURM_PROCID": "0"},
            {"SLURM_PROCID": "1"},
            True,
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
            {"SLURM_STEP_ID": "0"},
            {"SLURM_STEP_ID": "1"},
            False,
        ),
        ({}, {"MY_RANK": "0"}, {"MY_RANK": "1"}, True),
        ({}, {}, {}, False),
    ],
    ids=["torchrun", "two ports", "slurm", "two steps", "process group", "alone"],
)
def test_ranks_of_a_training_share_one_memory(shared, first, second, is_one, tmp_path):
    """Two programs, with the variables of a launcher. Each of a rank's caches is another one."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    makers = [partial(rank_folders, shared | own, store) for own in (first, second)]
    ones, twos = found_in_forks(*makers)
    assert (ones == twos) is is_one
    assert len({*ones, *twos}) == (2 if is_one else 4)


def test_caches_in_memory_have_one_limit_together(monkeypatch, tmp_path):
    """What one has, another has not; a container's limit counts, as tuning reads it."""
    free = memory.Limits(num_cores=1, memory_bytes=400_000)
    monkeypatch.setattr(memory.Limits, "of_this_machine", lambda: free)
    monkeypatch.setattr(memory, "_SHARED_MEMORY", str(tmp_path))  # others have caches, too
    stores = [kept_by(cached([torch.zeros(1000)] * 100)) for _ in range(3)]
    for number in range(100):
        for store in stores:
            store.put(number, bytes(4000))
    assert 150_000 < sum(store.num_bytes for store in stores) <= 200_000
    assert all(store.num_bytes > 20_000 for store in stores)
    assert 250_000 < memory.memory_limit() < 310_000  # with what they hold


HOLDS_MEMORY = """
import signal, sys
from spdl_torch.io._cache import memory

print(memory.memory_folder(sys.argv[1]), flush=True)
if sys.argv[2] == "False":
    signal.pause()
"""
"""A program with a cache in memory, which ends as it should, or is killed."""


@pytest.mark.parametrize("ends", [True, False])
def test_memory_is_free_when_the_last_process_has_ended(ends):
    """However it ends; a folder that another process holds stays."""
    name = f"test-{os.getpid()}-{ends}"
    shared = memory.memory_folder(f"{name}-shared")
    for each in (name, f"{name}-shared"):
        with warm.start(["-c", HOLDS_MEMORY, each, ends]) as program:
            folder = program.stdout.readline().strip()
            if not ends:
                program.kill()
            assert program.wait(timeout=PATIENCE_SECONDS) == (0 if ends else -signal.SIGKILL)
        memory.memory_folder(f"{name}-shared")  # as the next program does
        assert os.path.isdir(folder) is (folder == shared)


def below_a_lost_disk(path):
    (path / "scratch").symlink_to(path / "absent" / "place")
    return path / "scratch" / "kept"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda path: cached([1], below_a_lost_disk(path), version=1), OSError, "scratch"),
        (lambda path: cached(iter([1])), TypeError, "expected a map-style dataset, got list_iter"),
        (lambda path: cached(mix({"a": [1]})), TypeError, "mixture .* Cache its sources"),
        (lambda path: cached([1], path), ValueError, "version is needed for a list on disk"),
        (lambda path: cached([1])[1], IndexError, "index 1 is out of range for 1 samples"),
        (
            lambda path: ImageFolder(path, loader=len, cache="memory"),
            *(spdl_torch.UnsupportedOptionError, "a loader of your own reads by"),
        ),
        (lambda path: cached([open])[0] and cached([lambda: 0])[0], TypeError, "cannot be kept"),
    ],
)
def test_bad_cache_is_refused(call, error, message, tmp_path):
    """With the argument, and what would be right."""
    with pytest.raises(error, match=message):
        call(tmp_path)


def test_forked_child_waits_for_no_thread_that_it_has_not_got(tmp_path):
    """One of the parent's makes what the child asks for; once it has ended, the child goes on."""
    store, begun, may_end = Store(str(tmp_path)), threading.Event(), threading.Event()

    def make():
        with store.making(1):
            begun.set()
            may_end.wait(PATIENCE_SECONDS)

    ends = in_thread(make)
    begun.wait(PATIENCE_SECONDS)
    pid = fork(store.making(1).__enter__)
    may_end.set()
    result_of(ends)
    until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid)


def test_spawned_ranks_share_one_memory(monkeypatch):
    """With the address of the group, and no rank yet. Others have their own."""
    folders = []
    for port in ("1", "1", "2"):
        monkeypatch.setenv("MASTER_PORT", port)
        with ProcessPoolExecutor(1, mp_context=forked) as pool:
            folders.append(pool.submit(rank_folders, {}, None).result())
    assert folders[0] == folders[1] != folders[2]


def test_samples_that_read_each_other_through_the_cache_are_made(tmp_path):
    """By two threads, of which each makes what the other one waits for."""
    barriers = [threading.Barrier(2, timeout=PATIENCE_SECONDS)] * 2

    def make(index):
        if barriers:
            barriers.pop().wait()
            kept[1 - index]
        return index

    kept = cached(MadeBy(make, 2), tmp_path, version=1)
    ends = [in_thread(kept.__getitem__, index) for index in range(2)]
    assert [result_of(end) for end in ends] == [0, 1]


def test_time_limit_ends_the_wait_for_another_process(tmp_path):
    """What a signal's handler raises then reaches the caller, also if it is an OSError."""

    def too_late(*_):
        raise TooLate

    store, (reading, writing) = Store(str(tmp_path)), os.pipe()

    def hold():
        with store.making(1):
            os.write(writing, b".")
            signal.pause()

    holder = forked.Process(target=hold)
    holder.start()
    os.read(reading, 1)
    try:
        with handled(too_late, signal.SIGALRM):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(TooLate), store.making(1):
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        holder.kill()
        holder.join()


def test_rows_take_two_files_and_little_more_than_their_bytes(tmp_path):
    """However many there are, and however many processes write them."""
    number = 1000

    def put_rows(store, first):
        return all(store.put(n, content_of(n, 300)) for n in range(first, 4 * number, 4))

    for _ in range(2):
        store = Store(str(tmp_path))
        assert found_in_forks(*(partial(put_rows, store, n) for n in range(4))) == [True] * 4
    assert len([*tmp_path.iterdir()]) == 2
    assert bytes_in(tmp_path) <= 2 * 4 * number * 340
    again = Store(str(tmp_path))
    assert all(again.get(each) == content_of(each, 300) for each in range(0, 4 * number, 7))


def test_others_go_on_behind_what_a_killed_one_left(tmp_path):
    """Half a content, half a record: neither is found. An empty one is not missing."""
    assert Store(str(tmp_path)).put(1, b"one")
    for name in ("data", "index"):
        with open(tmp_path / name, "ab") as half:
            half.write(b"half of it")
    store = Store(str(tmp_path))
    assert store.put(2, b"two")
    assert store.put(4, b"")
    found = [Store(str(tmp_path)).get(key) for key in (1, 2, 3, 4)]
    assert found == [b"one", b"two", None, b""]
