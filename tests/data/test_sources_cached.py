"""Sources with a cache: the same items, and each byte read once on a machine."""

import asyncio
import gzip
import io
import os
import pickle
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import av
import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_cached import forked
from test_sources_indexed import write_shard
from test_sources_tar import keys, shard_of

from spdl_torch import PipelineDataset
from spdl_torch.data.sources import FileList, Files, TarShards
from spdl_torch.errors import DecodeError
from spdl_torch.io import (
    Reader,
    decode_image,
    load_clip,
    load_image_batch,
    load_npy,
    uniform_frames,
)
from spdl_torch.io._cache.blocks import CachedBlocks
from spdl_torch.io._cache.store import Store
from spdl_torch.pipeline import PipelineBuilder


class Counting(fsspec.AbstractFileSystem):
    """A store in which every byte that is read is counted."""

    protocol = "counting"
    files = {}  # noqa: RUF012 - set by the tests
    num_read = 0

    def _open(self, path, mode="rb", **options):
        cls = type(self)
        path = self._strip_protocol(path)
        if path not in cls.files:
            raise FileNotFoundError(path)

        class Counted(io.BytesIO):
            def read(self, size=-1):
                content = super().read(size)
                cls.num_read += len(content)
                return content

        return Counted(cls.files[path])


@pytest.fixture
def store_of():
    """A function that makes these files the store's; and nothing has been read of them."""
    fsspec.register_implementation("counting", Counting, clobber=True)

    def fill(files):
        Counting.files, Counting.num_read = files, 0

    yield fill
    Counting.files = {}


# --- a large file, block by block ------------------------------------------------------------


class Unseekable(io.BytesIO):
    """As a file of a web server."""

    def seekable(self):
        return False

    def seek(self, *args):
        raise io.UnsupportedOperation("no")


@settings(max_examples=60)
@given(data=st.data())
def test_file_in_blocks_reads_as_the_file(tmp_path_factory, data):
    """From any place to any other, with any of the blocks kept; again, without its origin."""
    content = random.Random(0).randbytes(data.draw(st.sampled_from([0, 1, 15, 16, 17, 48, 70])))
    origin = data.draw(st.sampled_from([io.BytesIO, Unseekable]))
    store = Store(str(tmp_path_factory.mktemp("store")))
    place = st.integers(0, 80)
    moves = data.draw(st.lists(st.tuples(place, place), max_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spdl_torch.io._cache.blocks._BLOCK_BYTES", 16)
        for open_origin in (lambda: origin(content), lambda: pytest.fail("opened")):
            with io.BufferedReader(CachedBlocks(store, "name", 7, open_origin), 5) as file:
                for first, size in moves:
                    file.seek(first)
                    assert file.read(size) == content[first : first + size]
        with CachedBlocks(store, "name", 8, lambda: origin(content)) as file:
            assert file.read() == content
            with pytest.raises(io.UnsupportedOperation, match="length is not known"):
                file.seek(0, io.SEEK_END)


# --- shards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "gzip", "index"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_remote_shards_are_read_once(store_of, tmp_path, kind, place):
    """By the first epoch; then nothing of the store is asked for, by other programs with the folder
    neither, and the samples are the same."""
    content = {"a": shard_of(0, 9), "b": shard_of(9, 9)}
    files = {f"bucket/{name}.tar": tar for name, tar in content.items()}
    for name, tar in content.items():
        index = write_shard(tmp_path / f"{name}.tar", tar)
        files[f"bucket/{name}.index.json"] = index
    if kind == "gzip":
        files = {name: gzip.compress(tar) for name, tar in files.items()}
    store_of(files)
    cache = tmp_path / "cache" if place == "disk" else "memory"
    urls = ["counting://bucket/a.tar", "counting://bucket/b.tar"]
    options = {"cache": cache, "index": kind == "index", "retries": 0}
    source = TarShards(urls, **options)
    expected = list(TarShards(urls, index=False))
    Counting.num_read = 0
    ranks = [source.shard(rank, 3) for rank in range(3)]
    assert sorted(key for rank in ranks for key in keys(rank)) == keys(expected)
    size = sum(len(content) for name, content in files.items() if name.endswith(".tar"))
    assert Counting.num_read == size
    if kind == "index":
        assert [source[number] for number in range(18)] == expected
    assert list(source) == expected
    if place == "disk":
        assert list(TarShards(urls, **options).shuffle(0)) != expected
        assert list(TarShards(urls, **options)) == expected
    assert Counting.num_read <= size + len(files) * 10_000 * (kind == "index")  # the index again
    assert "holds 100% of the items" in source.loading_remarks()[0]


@pytest.mark.parametrize("indexed", [False, True])
def test_local_shard_that_changed_is_read_anew(tmp_path, indexed):
    """By size and modification time; with a version it is taken to stay."""
    path = tmp_path / "a.tar"
    write_shard(path, shard_of(0, 4))

    def read(**options):
        return keys(TarShards(path, cache=tmp_path / "c", index=indexed, **options))

    before = keys(TarShards(path))
    assert read() == read(version=1) == before
    write_shard(path, shard_of(5, 4))
    after = keys(TarShards(path))
    assert read() == after != before
    if indexed:  # of the new tar, which the version denies
        with pytest.raises(DecodeError, match="not as the index says"):
            read(version=1)
    else:
        assert read(version=1) == before


def test_report_of_a_pipeline_has_the_hits(tmp_path):
    """Those of this process, as in the report of a loader."""
    write_shard(tmp_path / "a.tar", shard_of(0, 4))
    source = TarShards(tmp_path / "a.tar", cache=tmp_path / "c")
    dataset = PipelineDataset(PipelineBuilder().add_source(source).add_sink())
    for _ in range(2):
        assert len(list(dataset)) == 4
    (remark,) = (r for r in dataset.report().verdict.remarks if "The cache in" in r)
    assert "holds 100% of the items" in remark
    assert "This process found 1 of 2 there" in remark


# --- files -----------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """Four images, and a list of them."""
    names = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(names):
        noise = np.random.default_rng(number).integers(0, 256, (9, 8, 3), np.uint8)
        path = tmp_path / "images" / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noise).save(path)
    (tmp_path / "list.txt").write_text("\n".join(names))
    return tmp_path


def blank(*paths):
    """Files that have lost their contents, and do not show it."""
    for path in paths:
        there = os.stat(path)
        Path(path).write_bytes(bytes(there.st_size))
        os.utime(path, ns=(there.st_atime_ns, there.st_mtime_ns))


@pytest.mark.parametrize("make", ["Files", "FileList"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_files_are_read_once(tree, make, place):
    """By whichever function of ``spdl_torch.io`` reads them; others open them as they are."""
    options = {"cache": "memory" if place == "memory" else tree / "cache"}
    if make == "Files":
        source, plain = (Files(tree / "images", **each) for each in (options, {}))
    else:
        source, plain = (
            FileList(tree / "list.txt", prefix=tree / "images", **each) for each in (options, {})
        )
    assert list(source) == list(plain)
    assert all(isinstance(item, str) for item in source)
    contents = [Path(item).read_bytes() for item in plain]
    images = [decode_image(item) for item in plain]
    builder = PipelineBuilder().add_source(source.shuffle(0)).pipe(decode_image, concurrency=2)
    assert len(list(PipelineDataset(builder.add_sink()))) == 4
    blank(*plain)
    assert all(map(torch.equal, map(decode_image, source), images))
    batch = load_image_batch(list(source), height=9, width=8)
    assert torch.equal(batch.permute(0, 3, 1, 2), torch.stack(images))
    reader = Reader(keep_path=True)
    assert [reader(item) for item in source] == [*zip(plain, contents, strict=True)]
    assert asyncio.run(reader.aread(source[2])) == (plain[2], contents[2])
    assert "holds 100% of the items" in source.loading_remarks()[0]
    assert not any(Path(source[0]).read_bytes())


def test_arrays_and_videos_are_read_through_the_cache(tmp_path):
    """Their loaders open files by other ways than images."""
    np.save(tmp_path / "0.npy", np.arange(5))
    with av.open(str(tmp_path / "1.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for number in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 40 * number, np.uint8), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    array, video = Files(tmp_path, suffixes={".npy", ".mp4"}, cache=tmp_path / "cache")
    expected = load_clip(str(video), uniform_frames(3)).frames
    for _ in range(2):
        assert load_npy(array).tolist() == [0, 1, 2, 3, 4]
        assert torch.equal(load_clip(video, uniform_frames(3)).frames, expected)
        blank(array, video)


def content_of(path):
    """What a stage in another process makes of a path."""
    return Reader()(path)


def test_path_crosses_processes_with_its_cache(tree):
    """Every one of them opens the cache once."""
    source = Files(tree / "images", cache=tree / "cache")
    contents = [item.content() for item in source]
    blank(*source)
    with ProcessPoolExecutor(1, mp_context=forked) as executor:
        assert list(executor.map(content_of, source)) == contents
    items = [pickle.loads(pickle.dumps(source[number])) for number in (0, 1)]
    assert len({id(item._reader) for item in items}) == 1
    copy = pickle.loads(pickle.dumps(source))
    assert [item.content() for item in copy] == contents


def test_full_cache_changes_nothing(tree):
    """Files that do not fit are read from where they are."""
    size = sum(path.stat().st_size for path in (tree / "images").iterdir())
    source = Files(tree / "images", cache=tree / "cache", max_bytes=size // 2)
    for _ in range(2):
        contents = [item.content() for item in source]
        assert contents == [Path(item).read_bytes() for item in source]
    (kept,) = (tree / "cache").rglob("data")
    assert 0 < kept.stat().st_size <= size // 2


@pytest.mark.parametrize("make", [TarShards, Files])
def test_bad_cache_is_refused(tree, make):
    """At once, as by a reader."""
    with pytest.raises(TypeError, match='cache must be "memory" or the path of a folder, got 3'):
        make(tree / "list.txt", cache=3)
