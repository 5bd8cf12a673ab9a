"""Sources with numbered items and streams: order, parts, epochs, and what files they find."""

import copy
import os
import pickle
import random
import re
from itertools import chain, islice, product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.datasets import IndexStream, Made, ShuffledSource
from support.tars import SIZES, write_shards

from spdl_torch.data.sources import Files, ListSource, Parquet, TarShards, as_source
from spdl_torch.errors import UnsupportedOptionError

sizes = st.integers(0, 60)
counts = st.integers(1, 9)
seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 10**6)


class Countdown:
    """An iterable without numbers or length."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def rows_in(root):
    """Parquet files of as many rows as the shards have samples, some in several row groups."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    keys, path = iter(map(str, range(18))), root / "4.parquet"
    for number, size in enumerate(SIZES if not path.exists() else ()):
        table = pa.table({"__key__": pa.array([*islice(keys, size)], pa.string())})
        pq.write_table(table, root / f"{number}.parquet", row_group_size=3)
    return Parquet(root / "*.parquet")


KINDS = {
    "list": lambda root: as_source(range(18)),
    "stream": lambda root: as_source(Countdown(18)),
    "shards": lambda root: TarShards(root / "*.tar", index=False),
    "shards with an index": lambda root: TarShards(root / "*.tar"),
    "rows": rows_in,
}
KNOWS_ITS_LENGTH = {"list", "shards with an index", "rows"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of shards, with an index for whoever takes it."""
    return write_shards(tmp_path_factory.mktemp("shards"))


def source_of(kind, root, seed=None, epoch=0):
    """A source of 18 items, shuffled by the seed if there is one."""
    source = KINDS[kind](root)
    if seed is not None:
        source = source.shuffle(seed) if kind == "list" else source.shuffle(seed, 4)
    source.set_epoch(epoch)
    return source


def numbers_of(source):
    return [int(item["__key__"]) if isinstance(item, dict) else item for item in source]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 4), st.none() | seeds, st.integers(0, 9))
def test_parts_are_the_whole(root, kind, ranks, workers, seed, epoch):
    """Each item is in one part, and in one part of that; of equal length where that is known."""
    source = source_of(kind, root, seed, epoch)
    everything, lengths = [], []
    for rank in range(ranks):
        part = source.shard(rank, ranks)
        parts = [part.shard(worker, workers) for worker in range(workers)]
        own = [numbers_of(each) for each in parts]
        assert sorted(chain(*own)) == sorted(numbers_of(part))
        everything += chain(*own)
        lengths.append(len(numbers_of(part)))
        if kind in KNOWS_ITS_LENGTH:
            assert [len(part), *map(len, parts)] == [lengths[-1], *map(len, own)]
    assert sorted(everything) == [*range(18)]
    if kind in KNOWS_ITS_LENGTH:
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)


@given(sizes, counts, seeds, epochs)
def test_part_of_a_list_has_the_order_of_the_whole_or_keeps_its_items(size, count, seed, epoch):
    """Every count-th item of it; with shard() before shuffle(), the same items every epoch."""
    source = as_source(range(size))
    whole = source.shuffle(seed)
    whole.set_epoch(epoch)
    for index in range(count):
        assert list(whole.shard(index, count)) == list(whole)[index::count]
        part = source.shard(index, count).shuffle(seed)
        part.set_epoch(epoch)
        assert sorted(part) == list(range(size))[index::count]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(st.integers(1, 9), st.none() | seeds, st.integers(0, 20))
def test_iteration_starts_anywhere(root, kind, count, seed, start):
    """iterate(start) is what iteration gives without its first items, in parts, shuffled or not."""
    part = source_of(kind, root, seed).shard(count - 1, count)
    assert numbers_of(part.iterate(start)) == numbers_of(part)[start:]


@pytest.mark.parametrize("kind", KINDS)
def test_order_is_that_of_seed_and_epoch(root, kind):
    """The same for the same ones, in copies and pickles too; a running iterator keeps its own."""
    orders = []
    for seed, epoch in product(range(3), repeat=2):
        source = source_of(kind, root, seed, epoch)
        begun, running = source.iterate(), source.iterate()
        first = numbers_of(islice(running, 1))
        orders.append(tuple(numbers_of(source)))
        for twin in (copy.copy(source), pickle.loads(pickle.dumps(source))):
            assert twin.epoch == epoch
            assert tuple(numbers_of(twin)) == orders[-1]
        source.set_epoch(epoch + 1)
        assert numbers_of(source) != list(orders[-1])
        assert (*first, *numbers_of(running)) == tuple(numbers_of(begun)) == orders[-1]
    assert len(set(orders)) == len(orders)
    assert all(sorted(order) == [*range(18)] for order in orders)


@pytest.mark.parametrize("kind", KINDS)
def test_epoch_is_not_shared_when_a_source_is_derived(root, kind):
    """shard() and shuffle() leave the source as it was, and set_epoch() moves one source alone."""
    source = source_of(kind, root)
    shuffled = source.shuffle(1)
    part = shuffled.shard(0, 2)
    before = numbers_of(part)
    shuffled.set_epoch(3)
    assert (source.epoch, shuffled.epoch, part.epoch) == (0, 3, 0)
    assert numbers_of(source) == [*range(18)]
    assert numbers_of(part) == before
    assert shuffled.shard(0, 2).epoch == 3


def test_generators_of_the_trainer_are_untouched_when_sources_shuffle():
    """Neither torch's nor Python's random numbers depend on whether a source drew some; nor does
    the order on torch.set_default_device()."""
    states = torch.get_rng_state(), random.getstate()
    expected = list(as_source(range(100)).shuffle(0))
    list(as_source(Countdown(100)).shuffle(0, 8))
    with torch.device("meta"):
        assert list(as_source(range(100)).shuffle(0)) == expected
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize("shuffled", [False, True])
@given(sizes, counts, seeds, st.data())
def test_item_is_reached_by_its_position(shuffled, size, count, seed, data):
    """source[position], from either end, and slices of any step agree with iteration."""
    whole = as_source(range(size))
    part = (whole.shuffle(seed) if shuffled else whole).shard(count - 1, count)
    order = list(part)
    for position in range(-len(order), len(order)):
        assert part[position] == order[position]
    cut = data.draw(st.slices(len(order)))
    assert part[cut] == order[cut]
    assert part[::-1] == order[::-1]
    for outside in (len(order), -len(order) - 1):
        with pytest.raises(IndexError, match=f"position must be below {len(order)}, got {outside}"):
            part[outside]
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        part[::0]


@pytest.mark.parametrize("buffer_size", [1, 2, 7, 1000])
def test_stream_is_shuffled_within_its_buffer(buffer_size):
    """Nothing is lost, nothing comes earlier than the buffer allows, and a buffer mixes."""
    order = list(as_source(Countdown(500)).shuffle(0, buffer_size))
    assert sorted(order) == list(range(500))
    assert all(item <= 2 * (place + buffer_size) for place, item in enumerate(order))
    assert (order != list(range(500))) == (buffer_size > 1)


def test_items_are_taken_when_they_are_handed_out():
    """A dataset as a source is asked for one item after the other, from the start position; of a
    shuffled stream a hundred wait before the first one, not the whole buffer."""
    asked = []
    dataset = Made(lambda index: asked.append(index) or index, 10_000)
    assert list(islice(as_source(dataset).iterate(9_000), 2)) == asked == [9000, 9001]
    asked.clear()
    source = as_source(lambda: (asked.append(n) or n for n in range(5000)))
    next(iter(source.shuffle(0, 4000)))
    assert len(asked) == 101


def test_length_and_epoch_are_those_of_the_iterable():
    """Samplers have both, so that they shuffle anew; a generator function has none, and is called
    anew. torch's iterable datasets have a [number] that only raises: with a length they are no
    lists either."""
    source = as_source(lambda: (number for number in range(4)))
    assert list(source) == list(source) == [0, 1, 2, 3]
    assert [len(as_source(ShuffledSource(7)).shard(i, 3)) for i in range(3)] == [3, 2, 2]
    source, sampler = as_source(ShuffledSource(30)), ShuffledSource(30)
    for each in (source, sampler):
        each.set_epoch(10)
    assert list(source) == list(sampler)
    source = as_source(IndexStream(5))
    assert not isinstance(source, ListSource)
    assert (list(source.shard(1, 2)), len(source)) == ([1, 3], 5)
    with pytest.raises(TypeError, match="has no len"):
        len(as_source(Countdown(7)))


def test_what_is_no_source_is_refused():
    """With a word on what to pass instead, where it has no lasting order."""
    with pytest.raises(TypeError, match=r"a set has no lasting order\. Pass the function that"):
        as_source({"a"})
    with pytest.raises(TypeError, match="expected an iterable or a function that returns one, got"):
        as_source(5)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_checked(root, kind):
    """Where they are given: places, counts and epochs, and a buffer that would do nothing."""
    source = source_of(kind, root)
    for index, count in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=rf"index must be in 0..count-1, got index {index}"):
            source.shard(index, count)
    with pytest.raises(ValueError, match="epoch must be >= 0, got -1"):
        source.set_epoch(-1)
    with pytest.raises(ValueError, match="start must be >= 0, got -1"):
        source.iterate(-1)
    for wrong in ("1", 1.5, None, True):
        in_turn = source.set_epoch, source.iterate, source.shuffle, lambda n: source.shard(n, 2)
        for call in in_turn:
            with pytest.raises(TypeError, match=rf"must be an int, got {re.escape(repr(wrong))}"):
                call(wrong)
    number = "None" if kind == "list" else ">= 1 or None"
    with pytest.raises((UnsupportedOptionError, ValueError), match=f"size must be {number}, got 0"):
        source.shuffle(0, 0)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A few files in folders, which is the current folder."""
    for name in ("b/2.jpg", "b/10.JPG", "a/1.jpg", "a/x/deep.jpg", "a/notes.txt", "top.jpg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (tmp_path / "a" / ".hidden.jpg").write_bytes(b"")
    (tmp_path / "c.jpg").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "options", "expected"),
    [
        ("*/*.jpg", {}, ["a/1.jpg", "b/2.jpg"]),
        ("**/*.jpg", {}, ["a/1.jpg", "a/x/deep.jpg", "b/2.jpg", "top.jpg"]),
        ("*.jpg", {}, ["top.jpg"]),
        ("a", {}, ["a/1.jpg", "a/notes.txt"]),
        ("a", {"recursive": True}, ["a/1.jpg", "a/notes.txt", "a/x/deep.jpg"]),
        ("b", {"suffixes": {".jpg"}}, ["b/10.JPG", "b/2.jpg"]),
        (["b/2.jpg", "a/1.jpg", "*/2.jpg"], {}, ["a/1.jpg", "b/2.jpg"]),
        ("b/[0-9].jpg", {}, ["b/2.jpg"]),
    ],
)
def test_files_are_found_sorted_and_once(tree, patterns, options, expected):
    """By paths, folders and globs; folders and hidden names are not files. A file of exactly that
    name comes before the meaning as a pattern."""
    assert list(Files(patterns, **options)) == expected
    (tree / "b" / "[x].jpg").write_bytes(b"")
    assert list(Files("b/[x].jpg")) == ["b/[x].jpg"]
    with pytest.raises(TypeError, match=r"suffixes must be a collection of them, got '.jpg'"):
        Files("a", suffixes=".jpg")


def test_pattern_without_a_file_is_an_error(tree):
    """It names the pattern, even beside patterns that match."""
    with pytest.raises(FileNotFoundError, match=r"no file matches 'b/\*.png'"):
        Files(["top.jpg", "b/*.png"])
    with pytest.raises(FileNotFoundError, match=r"no file with an ending of \.gif matches 'a'"):
        Files("a", suffixes=[".gif"])


def test_each_folder_is_read_once_when_links_lead_in_circles(tree):
    """Folders that only a link leads to are read, too."""
    os.symlink(tree, tree / "a" / "up")
    found = sorted(os.path.realpath(name) for name in Files("a", recursive=True))
    names = ("a/1.jpg", "a/notes.txt", "a/x/deep.jpg", "b/10.JPG", "b/2.jpg", "top.jpg")
    assert found == [os.path.realpath(tree / name) for name in names]


@pytest.mark.parametrize("protocol", ["memory://", "file://"])
def test_files_are_found_behind_urls(tree, memory, protocol):
    """Globs, folders and single files; what comes back are URLs again."""
    folder = f"file://{tree}" if protocol == "file://" else "memory://data"
    for name in ("b/2.jpg", "b/10.JPG", "a/1.jpg", "a/x/deep.jpg"):
        memory.pipe(f"/data/{name}", b"")
    found = list(Files(f"{folder}/b"))
    assert [os.path.basename(name) for name in found] == ["10.JPG", "2.jpg"]
    assert all(name.startswith(protocol) for name in found)
    assert list(Files(f"{folder}/b/*")) == found
    assert list(Files(f"{folder}/b/2.jpg")) == found[1:]
    assert len(Files(f"{folder}/a", recursive=True, suffixes=[".jpg"])) >= 2
    with pytest.raises(FileNotFoundError, match="no file matches"):
        Files(f"{folder}/b/*.png")
