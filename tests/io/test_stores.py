"""Stores as users have them, http and S3: each read ends in data, or in an error that names it."""

import contextlib
import gzip
import io
import os
import pickle
import random
import re
import resource
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import fsspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.datasets import Made
from support.forks import fork, found_in_fork, found_in_forks
from support.gates import until
from support.stores import HttpStore, HubStore, S3Store
from support.tars import tar_of, write_shard
from support.videos import KINDS, write_video

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.data import mix
from spdl_torch.data.sources import Files, ListSource, Parquet, TarShards
from spdl_torch.errors import DecodeError, SourceChangedError
from spdl_torch.io import Reader, load_npy, load_video
from spdl_torch.io._remote import RetryPolicy
from spdl_torch.io._resuming import Opened, _Resuming, open_resuming
from spdl_torch.observe import Cause, recording, report_of_file
from spdl_torch.pipeline import PipelineBuilder

ONCE = RetryPolicy(0)
MIB = 1 << 20


def shard_of(num_samples, size=1000, first=0):
    """A tar of numbered samples, each of one byte repeated."""
    numbers = range(first, first + num_samples)
    return tar_of((f"{number:04d}.bin", bytes([number % 251]) * size) for number in numbers)


def npy_of(number):
    content = io.BytesIO()
    np.save(content, np.full((), number))
    return content.getvalue()


def numbers_of(samples):
    samples = list(samples)
    for sample in samples:
        assert set(sample["bin"]) == {int(sample["__key__"]) % 251}
    return [int(sample["__key__"]) for sample in samples]


def file_systems(store):
    """All of its kind."""
    return list(fsspec.get_filesystem_class(store.protocol)._cache.values())


def close_connections(store):
    """Those of all file systems of its kind, which are forgotten."""
    for system in file_systems(store):
        session = getattr(system, "_s3", None) or getattr(system, "_session", None)
        if session is not None:
            fsspec.asyn.sync(system.loop, session.close)
        type(system).clear_instance_cache()


@pytest.fixture
def web():
    pytest.importorskip("aiohttp", reason="http:// needs aiohttp: pip install spdl-torch[remote]")
    with contextlib.closing(HttpStore()) as store:
        yield store
        close_connections(store)


@pytest.fixture(scope="module")
def bucket_of_module():
    pytest.importorskip("s3fs", reason="s3:// needs s3fs: pip install spdl-torch[remote]")
    pytest.importorskip("moto.server", reason="a server of S3 needs moto and flask: group `test`")
    with contextlib.closing(S3Store()) as store:
        yield store
        close_connections(store)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    """Between attempts."""
    monkeypatch.setattr("spdl_torch.io._remote._BACKOFF_SECONDS", 0)


@pytest.fixture
def bucket(bucket_of_module, monkeypatch):
    """An S3 store, of which nobody but us repeats what fails."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    yield bucket_of_module
    bucket_of_module.faults, bucket_of_module.requests = [], []
    for system in file_systems(bucket_of_module):  # to make a client takes half a second
        system.invalidate_cache()


@pytest.fixture(params=["web", "bucket"])
def place(request):
    return request.getfixturevalue(request.param)


def put_shards(place, num_shards, size, folder=None):
    """Shards of so many samples each, with an index where there is a folder; return their URLs."""
    for number in range(num_shards):
        place.put(f"{number}.tar", content := shard_of(size, first=size * number))
        if folder is not None:
            place.put(f"{number}.index.json", write_shard(folder / f"{number}.tar", content))
    return [place.url(f"{number}.tar") for number in range(num_shards)]


def reader_of(options, **others):
    return Reader(storage_options=options, **others)


def text_of(error):
    return "".join(traceback.format_exception_only(error))


def copies_in(folder):
    """What is kept there, once no thread fetches what comes next any more."""
    until(lambda: not any("spdl-shards" in each.name for each in threading.enumerate()))
    return [*folder.rglob("*.tar")]


def test_object_is_read_in_one_request(place):
    """Its size is not asked for first, and a large one is not read in parts."""
    place.put("a.bin", content := bytes(range(256)) * 8)
    options = place.options and {**place.options, "default_block_size": 100}
    assert reader_of(options)(place.url("a.bin")) == content
    assert [(method, wanted) for method, _, wanted in place.requests] == [("GET", None)]


def test_store_that_fails_now_and_then_is_read(place):
    """503, connections that are lost before and in the middle of the answer: an object, and every
    sample of a shard once, in order, also of a compressed one."""
    pack = gzip.compress if place.protocol == "http" else bytes
    place.put("a.tar", content := pack(shard_of(99)))
    place.faults = ["busy", "drop", "cut"]
    assert reader_of(place.options)(place.url("a.tar")) == content
    place.faults += ["busy", "drop", "cut", "ok", "cut"]
    assert numbers_of(TarShards(place.url("a.tar"), storage_options=place.options)) == [*range(99)]
    assert len(place.faults) <= 2


def test_array_and_video_are_read_when_their_store_fails_now_and_then(web):
    """As their bytes are."""
    for load, content in ((load_npy, npy_of(7)), (load_video, write_video(KINDS["b-frames"]))):
        web.put("a", content)
        web.faults = ["cut", "busy", "drop"]
        assert np.array_equal(load(web.url("a")), load(content))
        assert web.faults == []


@pytest.mark.parametrize(
    "server", [{}, {"ranges": False}, {"etags": False}, {"says_size_of_ranges": False}], ids=str
)
def test_shard_goes_on_where_it_was_when_a_connection_was_lost(server, web):
    """By a range; a server that answers none is read from the front, past what is known. One that
    says ``Content-Range: bytes 500-999/*`` says nothing of a change."""
    web.put("a.tar", content := shard_of(2000))
    vars(web).update(server)
    web.faults = ["cut"] * 3
    source = TarShards(web.url("a.tar"))
    assert numbers_of(source) == [*range(2000)]
    starts = [int(wanted[6:-1]) for _, _, wanted in web.requests[1:]]
    assert 0 < starts[0] <= len(content) // 2
    assert starts == sorted(starts)


def test_object_that_a_web_server_compresses_goes_on_where_it_was(web):
    """Ranges are of what it sends, which does not say where a byte of the object is."""
    web.put("a.bin", content := random.Random(0).randbytes(3 * MIB))
    web.compresses, web.faults = True, ["cut"]
    with open_resuming(web.url("a.bin"), RetryPolicy(1)) as file:
        assert file.read() == content
    first, ranged, again = [wanted for _, _, wanted in web.requests]
    assert (first, again) == (None, None)
    assert int(ranged[6:-1]) > 0


def test_loader_reads_a_store_that_this_process_has_read(place):
    """In children, where connections and event loop of the parent are of no use."""
    for number in range(8):
        place.put(f"{number}.txt", b"%d" % number)
    read = Reader(storage_options=place.options)
    dataset = Made(lambda number: int(read(place.url(f"{number}.txt"))), 8)
    assert dataset[3] == 3
    loader = DataLoader(dataset, 4, num_workers=2, isolation="process")
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Failing(io.BytesIO):
    limit = 0

    def read(self, size=-1):
        if self.tell() >= self.limit:
            raise ConnectionResetError("lost")
        return super().read(min(size, self.limit - self.tell()))


@given(
    content=st.binary(max_size=300),
    limits=st.lists(st.integers(0, 300), max_size=8),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 320)), max_size=8),
)
def test_file_that_fails_is_as_one_that_does_not(content, limits, steps):
    """Whatever is read and sought, and wherever it fails: the bytes are the same."""
    limits = limits.copy()

    def open_at(offset, again):
        file = Failing(content)
        file.limit = offset + (limits.pop() if limits else 400)
        file.seek(offset)
        return Opened(file, {"size": len(content)})

    plain, resuming = io.BytesIO(content), _Resuming(open_at, "x", RetryPolicy())
    with io.BufferedReader(resuming, 16) as file:
        for seeks, number in steps:
            if seeks:
                assert file.seek(number) == plain.seek(number)
            else:
                assert file.read(number) == plain.read(number)
        assert file.read() == plain.read()


def errors_of_reading(url, options, *other_ways, **others):
    """The errors of each way to read: whole, and from front to back; each has the URL."""
    read, shards = reader_of(options, **others), partial(TarShards, storage_options=options)
    for way in (lambda: read(url), lambda: list(shards(url, index=False, **others)), *other_ways):
        with pytest.raises(Exception, match=re.escape(url)) as caught:
            way()
        yield caught.value


@pytest.mark.parametrize("fault", ["busy", "drop", "cut"])
def test_store_is_named_when_it_always_fails(fault, place, tmp_path, monkeypatch):
    """With the number of attempts, also for a sample."""
    monkeypatch.setattr("spdl_torch.io._remote.time.sleep", lambda seconds: None)
    (url,) = put_shards(place, 1, 9, tmp_path)
    indexed = TarShards(url, index=True, retries=1, storage_options=place.options)
    assert numbers_of([indexed[3]]) == [3]
    # Half of what is left each time would come to a tar's end.
    then = "drop" if fault == "cut" else fault
    place.faults, num_before = [fault, *[then] * 1000], place.num_gets
    for error in errors_of_reading(url, place.options, lambda: indexed[3], retries=1):
        assert f"reading {url!r} failed after 2 attempts" in text_of(error)
        num_gets = place.num_gets - num_before
        assert num_gets == 2 if fault == "busy" else num_gets >= 2
        num_before = place.num_gets


def test_missing_object_is_named(place):
    """At once, as a FileNotFoundError."""
    for error in errors_of_reading(place.url("none.tar"), place.options):
        assert isinstance(error, FileNotFoundError)


@pytest.mark.parametrize("have", ["wrong", "none", "anonymous"])
def test_store_is_named_when_it_refuses_the_credentials(have, bucket):
    """After one attempt; credentials are never shown."""
    bucket.put("a.bin", b"content")
    options = dict(bucket.options)
    if have != "wrong":
        del options["key"], options["secret"]
        options["anon"] = have == "anonymous"
    url = bucket.url("a.bin")
    with bucket.checking_credentials():
        errors = [*errors_of_reading(url, options)]
        if have != "anonymous":  # moto fails in listing for nobody
            with pytest.raises(Exception, match=re.escape("s3://bucket/*.bin")) as caught:
                Files(bucket.url("*.bin"), storage_options=options)
            errors.append(caught.value)
    for error in errors:
        assert "failed after 1 attempt" in text_of(error)
        assert bucket.options["secret"] not in "".join(traceback.format_exception(error))


def test_shard_is_opened_again_when_its_answer_does_not_come(place):
    """The time is the file system's own."""
    place.put("a.tar", shard_of(9))
    place.faults = ["hang"]
    options = place.limit_seconds(0.3)
    shards = TarShards(place.url("a.tar"), retries=99, storage_options=options)
    assert numbers_of(shards) == [*range(9)]
    assert place.faults == []


def test_object_is_the_new_one_when_it_changed_between_two_reads(place):
    """Longer and shorter ones, also where a listing, which is in order, still has the old one."""
    reader = reader_of(place.options)
    for name in ("a.tar", "a.bin"):
        place.put(name, b"the first")
    for number in (9, 5, 700):
        if isinstance(place, S3Store):
            found = list(Files(place.url("*"), storage_options=place.options))
            assert found == sorted({*found, place.url("a.bin"), place.url("a.tar")})
        place.put("a.bin", b"%d" % number * number)
        place.put("a.tar", shard_of(number, first=number))
        assert reader(place.url("a.bin")) == b"%d" % number * number
        shards = TarShards(place.url("a.tar"), storage_options=place.options)
        assert numbers_of(shards) == [*range(number, 2 * number)]


@pytest.mark.parametrize("etags", [True, False])
@pytest.mark.parametrize("content", [shard_of(2900, size=2000), b"x"], ids=["longer", "short"])
def test_shard_that_changes_while_a_web_server_sends_it_is_an_error(etags, content, web):
    """Nothing of the new one is yielded after the connection was lost, also if it ends before."""
    web.put("a.tar", shard_of(3000))
    web.etags = etags
    web.faults = ["cut", lambda: web.put("a.tar", content)]
    found = []
    with pytest.raises(SourceChangedError, match=rf"{web.url('a.tar')}: changed while it was"):
        found.extend(sample for sample in TarShards(web.url("a.tar")))
    assert all(len(sample["bin"]) == 1000 for sample in found)


@pytest.mark.parametrize("size", [10, 2000])
def test_shard_that_changes_between_two_blocks_is_an_error(size, bucket):
    """S3 gets each block on the condition that the object is the same."""
    bucket.put("a.tar", shard_of(2000))
    options = {**bucket.options, "default_block_size": MIB // 2}
    samples = iter(TarShards(bucket.url("a.tar"), storage_options=options))
    found = [next(samples)]
    bucket.put("a.tar", shard_of(2000, size=size))
    with pytest.raises(SourceChangedError, match=r"s3://bucket/a\.tar: changed while it was read"):
        found.extend(samples)
    assert 0 < len(found) < 2000
    assert all(len(sample["bin"]) == 1000 for sample in found)


@pytest.mark.parametrize(("size", "etags"), [(10, True), (5 * MIB, False), (5 * MIB, True)])
def test_file_that_changes_between_two_ranges_is_an_error(size, etags, web):
    """The ranges of one file are of one version, by its ETag or else by its date."""
    web.put("a.bin", bytes(4 * MIB))
    web.etags = etags
    web.dates["/bucket/a.bin"] = "Wed, 21 Oct 2015 07:28:00 GMT"
    options = {"block_size": 1 << 14}
    with open_resuming(web.url("a.bin"), ONCE, options, seekable=True) as file:
        assert file.read(10) == bytes(10)
        web.put("a.bin", b"x" * size)
        web.dates["/bucket/a.bin"] = "Thu, 22 Oct 2015 07:28:00 GMT"
        file.seek(3 * MIB)
        with pytest.raises(SourceChangedError, match=r"/a\.bin: changed while it was read"):
            file.read(10)


def parquet_of(numbers, size):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"n": numbers}), file := io.BytesIO(), row_group_size=size, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", [Parquet, TarShards])
def test_local_file_that_is_written_to_while_it_is_read_is_an_error(kind, tmp_path):
    """Of a Parquet, nothing new comes before it; one that is removed is read as it was."""
    path, number = tmp_path / "a.file", 2000

    def write(first):
        rows = range(first, first + number)
        made = shard_of(number, first=first) if kind is TarShards else parquet_of(rows, 100)
        path.write_bytes(made)

    write(0)
    items = kind(path).iterate()
    found = [next(items)]
    write(5000)
    os.utime(path, (1, 1))
    with pytest.raises(SourceChangedError, match=r"a\.file: changed"):
        found.extend(items)
    assert kind is TarShards or [each["n"] for each in found] == [*range(len(found))]
    items = kind(path).iterate()
    next(items)
    path.unlink()
    assert len([*items]) == number - 1


def put_rows(web, first=0):
    """Write 400 rows in four groups as ``a.parquet``."""
    web.put("a.parquet", parquet_of(range(first, first + 400), 100))
    return web.url("a.parquet")


def test_parquet_of_a_busy_server_is_asked_again(web):
    """However often it refuses; fsspec says that the file is not found. The last error says why."""
    url, web.faulty = put_rows(web), {"GET", "HEAD"}
    web.faults[:] = ["busy"] * 4
    source = Parquet(url)
    web.faults[:] = ["busy"] * 4
    assert [row["n"] for row in source] == [*range(400)]
    assert not web.faults
    web.faults[:] = ["busy"] * 4
    with pytest.raises(Exception, match=r"503(.|\n)*a\.parquet' failed after 2 attempts"):
        Parquet(url, retries=1)
    web.faults[:] = ["busy"] * 4
    assert [*Files(url)] == [url]
    for kind in (Parquet, Files):
        with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
            kind(web.url("none.parquet"))


@pytest.mark.parametrize("place", ["tags", "dates", "path"])
def test_parquet_that_was_replaced_by_one_of_its_size_is_an_error(web, tmp_path, place):
    """By the version that the server gives, strong tags or dates; of a path, by its time."""
    web.etags = place == "tags"
    path = tmp_path / "a.parquet"
    url = path if place == "path" else web.url("a.parquet")

    def put(first, date):
        put_rows(web, first)
        web.dates["/bucket/a.parquet"] = f"Wed, {date} Oct 2015 07:28:00 GMT"
        path.write_bytes(web.files["/bucket/a.parquet"])
        os.utime(path, (date, date))

    put(0, 21)
    source = Parquet(url)
    kept, late = (Parquet(url, cache=tmp_path / name) for name in ("kept", "late"))
    assert source[0]["n"] == kept[0]["n"] == 0
    put(1000, 22)
    for read in (lambda: source[150], lambda: list(source), lambda: late[0], lambda: list(late)):
        with pytest.raises(SourceChangedError, match=r"a\.parquet.*: changed"):
            read()
    if place != "path":
        assert kept[150]["n"] == 150
    assert Parquet(url, cache=tmp_path / "kept")[0]["n"] == 1000


def test_parquet_of_hugging_faces_hub_is_found_shuffled_and_kept(tmp_path, monkeypatch):
    """By its own client, which asks a server here as it asks the hub."""
    hub_client = pytest.importorskip("huggingface_hub", reason="hf:// needs huggingface_hub")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with contextlib.closing(HubStore()) as hub, contextlib.ExitStack() as ends:
        ends.callback(hub_client.close_session)  # its connections stay open
        for number in range(3):
            numbers = range(10 * number, 10 * number + 10)
            hub.put(f"data/train-{number}.parquet", parquet_of(numbers, 5))
        options = {"endpoint": hub.address, "token": False, "skip_instance_cache": True}
        files = "hf://datasets/owner/name/**/*.parquet"
        source = Parquet(files, storage_options=options, cache=tmp_path)
        assert [row["n"] for row in source.iterate(7)] == [*range(7, 30)]
        hub.files.clear()
        assert sorted(row["n"] for row in source.shuffle(1)) == [*range(30)]
        with pytest.raises(FileNotFoundError, match=r"no file matches 'hf://"):
            Parquet(files, storage_options=options)


def test_shard_is_downloaded_once_by_all_processes_of_a_machine(bucket, tmp_path):
    """While one does so, the others wait; later passes and programs find the copy."""
    bucket.put("a.tar", shard_of(300))
    bucket.faults, bucket.requests = ["cut"], []

    def source():
        return TarShards(bucket.url("a.tar"), storage_options=bucket.options, cache=tmp_path)

    assert found_in_forks(*[lambda: numbers_of(source())] * 4) == [[*range(300)]] * 4
    num_gets = bucket.num_gets
    assert num_gets <= 2 + (bucket.faults == [])
    again = source()
    assert numbers_of(again) == numbers_of(again) == [*range(300)]
    assert bucket.num_gets == num_gets


def test_copies_of_shards_have_a_limit(web, tmp_path):
    """The one that was opened longest ago goes before another comes: no disk needs more."""
    urls, size, before = put_shards(web, 4, 50), len(shard_of(50)), []
    options = {"cache": tmp_path, "max_bytes": 5 * size // 2, "ahead": 0}
    web.faults = [lambda: before.append(len([*tmp_path.rglob("*.tar")]))] * 4
    source = TarShards(urls, **options)
    assert numbers_of(source) == [*range(200)]
    assert before == [0, 1, 1, 1]
    assert len(copies_in(tmp_path)) == 2
    assert source.loading_counts()["shards/removed"] == 2
    for opened, num_new in (([2, 1], 1), ([2, 3], 1), ([3], 0), ([0], 1)):
        num_gets = web.num_gets
        numbers = numbers_of(TarShards([urls[each] for each in opened], **options))
        assert numbers == [50 * each + place for each in opened for place in range(50)]
        assert web.num_gets == num_gets + num_new


@pytest.mark.parametrize("is_indexed", [False, True])
def test_next_shards_are_there_before_they_are_needed(web, tmp_path, is_indexed):
    """Two, by default; what is fetched when the iteration ends is its last."""
    urls = put_shards(web, 6, 20, tmp_path)
    there = tmp_path / "kept" / "shards"
    source = TarShards(urls, cache=tmp_path / "kept", index=is_indexed)
    samples = iter(source)
    first = numbers_of([next(samples)])
    until(lambda: len([*there.glob("*.tar")]) == 3)
    num_gets = web.num_gets
    first += numbers_of(islice(samples, 20))
    until(lambda: len([*there.glob("*.tar")]) == 4)
    assert web.num_gets == num_gets + 1
    samples.close()
    assert len(copies_in(there)) == 4
    assert [*first, *numbers_of(source.iterate(21))] == [*range(120)]
    assert len([*there.iterdir()]) == 6
    again = TarShards(urls, cache=tmp_path / "kept", index=is_indexed)
    assert numbers_of(again) == [*range(120)]
    assert len(copies_in(there)) == 6
    counts = again.loading_counts()  # of the shards that are read, not of those that come next
    assert (counts["shards/found"], counts["shards/awaited"]) == (6, 0)


def test_download_ahead_ends_with_the_iteration(web, tmp_path):
    """In the middle of a shard, of which nothing stays that is found."""
    web.put("0.tar", shard_of(20))
    samples = iter(TarShards([web.url("0.tar"), "/dev/zero"], cache=tmp_path))  # has no end
    assert numbers_of(islice(samples, 1)) == [0]
    until(lambda: any(each.stat().st_size for each in tmp_path.rglob("*.part")))
    samples.close()
    assert len(copies_in(tmp_path)) == 1


def test_options_of_copies_are_checked():
    """When the source is made."""
    for options, message in (
        ({"cache": "x", "ahead": -1}, "ahead must be >= 0, got -1"),
        ({"max_bytes": 5}, "max_bytes=5 is for copies"),
        ({"cache": "x", "max_bytes": 0}, "max_bytes must be >= 1 or None, got 0"),
        ({"cache": "memory"}, "cache must be a folder on a local disk .*, got 'memory'"),
        ({"cache": "s3://bucket/kept"}, "cache must be a folder on a local disk .*, got 's3://"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            TarShards("s3://bucket/a.tar", **options)


def test_shard_that_cannot_be_downloaded_leaves_nothing_that_is_found(web, tmp_path):
    """The error has its name, and comes when it is its turn, after all samples before it."""
    web.put("0.tar", shard_of(20))
    web.put("1.tar", shard_of(3000))
    samples = iter(TarShards([web.url("0.tar"), web.url("none.tar")], cache=tmp_path))
    assert numbers_of(islice(samples, 20)) == [*range(20)]
    with pytest.raises(FileNotFoundError, match=r"none\.tar"):
        next(samples)
    web.faults = ["cut", "busy"]
    with pytest.raises(Exception, match=r"1\.tar"):
        list(TarShards(web.url("1.tar"), cache=tmp_path, retries=0))
    assert len([*tmp_path.rglob("*.tar")]) == 1
    assert not any(each.stat().st_size for each in tmp_path.rglob("*.part"))


def test_shard_whose_download_was_killed_is_downloaded_anew(web, tmp_path):
    """What is not whole has another name."""
    web.put("a.tar", content := shard_of(3000))
    web.faults = ["hang"]
    pid = fork(lambda: list(TarShards(web.url("a.tar"), cache=tmp_path)))
    until(lambda: web.num_gets > 0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (part,) = (tmp_path / "shards").iterdir()
    assert part.suffix == ".part"
    part.write_bytes(2 * content[:-9])
    assert numbers_of(TarShards(web.url("a.tar"), cache=tmp_path)) == [*range(3000)]
    assert [each.read_bytes() for each in copies_in(tmp_path)] == [content]


def test_shards_are_read_from_where_they_are_when_the_disk_is_full(web, tmp_path, caplog):
    """With one warning, and once each; in a process of its own, where files may have few bytes."""
    urls = put_shards(web, 3, 300)

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        source = TarShards(urls, cache=tmp_path / "kept", ahead=0)
        numbers = numbers_of(source)
        sizes = [each.stat().st_size for each in (tmp_path / "kept").rglob("*.*")]
        return numbers, sizes, [record.getMessage() for record in caplog.records]

    numbers, sizes, (line,) = found_in_fork(full)
    assert (numbers, sizes) == ([*range(900)], [0])
    assert re.fullmatch(r".*/0\.tar: File too large: no more shards are kept in .*kept\.", line)
    assert web.num_gets == 4


def test_copy_of_a_local_shard_is_another_when_the_shard_is(tmp_path):
    """By its size and time; and with its index it is read at random."""
    path = tmp_path / "a.tar"
    for first in (0, 7):
        write_shard(path, shard_of(50, first=first))
        os.utime(path, (first, first))
        source = TarShards(path, cache=tmp_path / "kept")
        assert numbers_of([source[-1], *source]) == [first + 49, *range(first, first + 50)]


@pytest.mark.parametrize("etags", [True, False])
def test_copy_of_a_shard_that_was_replaced_by_one_of_its_size_is_another(web, tmp_path, etags):
    """By the version that the store gives; where it gives none, only by the size."""
    web.etags = etags
    url, others = web.url("a.tar"), tmp_path / "others"
    for number in range(3):
        web.put("a.tar", shard_of(9, first=number))
        web.dates["/bucket/a.tar"] = f"Wed, 2{number} Oct 2015 07:28:00 GMT"
        source = TarShards(url, cache=tmp_path / "kept")
        num_gets = web.num_gets
        for _ in range(2):
            assert numbers_of(source) == [*range(number, number + 9)]
        assert web.num_gets == num_gets + 1
    web.dates.clear()
    for number in range(2):
        web.put("a.tar", shard_of(9, first=number))
        first = number if etags else 0
        assert numbers_of(TarShards(url, cache=others)) == [*range(first, first + 9)]


@pytest.mark.parametrize("is_indexed", [False, True])
def test_error_names_the_copy_that_is_damaged(web, tmp_path, is_indexed):
    """And the shard; where the copy is removed, it is downloaded anew."""
    urls = put_shards(web, 1, 9, tmp_path)
    source = TarShards(urls, cache=tmp_path / "kept", index=is_indexed)
    assert numbers_of(source) == [*range(9)]
    (copy,) = copies_in(tmp_path / "kept")
    copy.write_bytes(copy.read_bytes().replace(b"0003", b"\xff003"))
    with pytest.raises(DecodeError, match=r"/0\.tar \(copied to .*kept\): "):
        list(source)
    copy.unlink()
    assert numbers_of(source) == [*range(9)]


@pytest.mark.parametrize("left", [0, 512, 5000])
@pytest.mark.parametrize("shuffle", [False, True])
def test_cut_shard_of_a_server_is_damage_by_its_index(web, tmp_path, left, shuffle):
    """Which is skipped on request, with a line in the log."""
    urls = put_shards(web, 3, 9, tmp_path)
    web.put("1.tar", shard_of(9, first=9)[:left])
    source, skipping = (TarShards(urls, index=True, on_error=each) for each in ("raise", "skip"))
    with pytest.raises(DecodeError, match=r"1\.tar"):
        source[17]
    if shuffle:
        source, skipping = source.shuffle(1), skipping.shuffle(1)
    with pytest.raises(DecodeError, match=r"1\.tar"):
        list(source)
    found = numbers_of(skipping)
    assert {*range(9), *range(18, 27)} <= {*found} <= {*range(27)}
    assert len(set(found)) == len(found) < 27


def test_shard_that_was_replaced_before_it_was_downloaded_is_an_error(web, tmp_path):
    """Nothing of the new one gets the name of the old one's copy."""
    source = TarShards(put_shards(web, 2, 9), cache=tmp_path, max_bytes=1, ahead=0)
    assert len(list(source)) == 18
    web.put("0.tar", shard_of(9, first=5))
    with pytest.raises(SourceChangedError, match=r"0\.tar: changed"):
        list(source)
    assert numbers_of(TarShards(web.url("0.tar"), cache=tmp_path)) == [*range(5, 14)]


def test_copies_make_room_while_others_do(tmp_path):
    """Threads of which each removes what another one has just made or opened."""
    for number in range(8):
        (tmp_path / f"{number}.tar").write_bytes(shard_of(20, first=20 * number))
    limit = 3 * len(shard_of(20)) // 2

    def read(number):
        urls = [tmp_path / f"{(number + each) % 8}.tar" for each in range(8)]
        return sorted(numbers_of(TarShards(urls, cache=tmp_path / "kept", max_bytes=limit)))

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(read, range(8))] == [[*range(160)]] * 8
    assert len(copies_in(tmp_path / "kept")) == 1


def test_files_of_urls_are_kept(web, tmp_path):
    """Read once on the machine, by our readers and by others; names are as without a cache."""
    contents = {web.url(f"{number}.npy"): npy_of(number) for number in range(8)}
    for number, content in enumerate(contents.values()):
        web.put(f"{number}.npy", content)
    urls = [*contents]
    source, other = Files(urls, cache=tmp_path, ahead=3), Files(urls, cache=tmp_path)
    web.requests = []
    assert list(source) == list(source.shard(0, 1)) == list(other) == urls
    for shuffled in (source, source.shuffle(seed=3)):
        numbers = [int(load_npy(name)) for name in shuffled]
        assert numbers == [urls.index(name) for name in shuffled]
    with source[-6].open() as opened:
        assert Reader()(source[2]) == opened.read() == contents[urls[2]]
    assert len(copies_in(tmp_path)) == 8
    num_gets = web.num_gets
    sent = pickle.dumps(list(source))
    found = found_in_fork(lambda: [Reader()(name) for name in pickle.loads(sent)])
    assert found == [*contents.values()]
    assert web.num_gets == num_gets == len(urls)
    downloaded = [each.loading_counts()["shards/bytes"] for each in (source, other)]
    assert sum(downloaded) == sum(map(len, contents.values()))


def test_kept_files_go_on_where_they_make_room(web, tmp_path):
    """One that is open stays; one that has gone is downloaded again; the next ones come ahead."""
    for number in range(6):
        web.put(f"{number}.npy", npy_of(number))
    urls = [web.url(f"{number}.npy") for number in range(6)]
    source = Files(urls, cache=tmp_path, max_bytes=2.5 * len(npy_of(0)), ahead=0)
    with source[0].open() as opened:
        assert [int(load_npy(name)) for name in source] == [*range(6)]
        assert opened.read() == npy_of(0)
    assert source.loading_counts()["shards/removed"] == 4
    num_gets = web.num_gets
    assert int(load_npy(source[0])) == 0
    assert web.num_gets > num_gets
    there = tmp_path / "ahead" / "shards"
    names = iter(Files(urls, cache=tmp_path / "ahead"))
    assert next(names) == urls[0]
    until(lambda: len([*there.glob("*.tar")]) == 2)
    names.close()
    with pytest.raises(ValueError, match=r"cache= keeps files of URLs, got '.*\.py'.*file:///"):
        Files(__file__, cache=tmp_path)
    with pytest.raises(ValueError, match=r"Files: max_bytes=5 is for copies\. Pass cache=FOLDER"):
        Files(urls, max_bytes=5)


@pytest.mark.parametrize("way", ["threads", "processes", "pipeline"])
def test_report_counts_the_shards_that_were_there_and_those_awaited(web, tmp_path, way):
    """And the bytes that came: in figures over all workers, in a remark of this process."""
    size = len(shard_of(20))
    urls = put_shards(web, 3, 20, tmp_path)
    source = TarShards(urls, cache=tmp_path / "kept", index=True, ahead=0)
    assert source.loading_remarks() == ()
    if way == "pipeline":
        loader, num_opened = PipelineDataset(PipelineBuilder().add_source(source).add_sink()), 3
    else:
        where = {"isolation": "thread" if way == "threads" else "process"}
        loader = DataLoader(source, 20, num_workers=2, collate_fn=list, **where)
        num_opened = 60
    assert len(list(loader)) == (60 if way == "pipeline" else 3)
    counts = dict(loader.snapshot().data)
    assert counts.pop("shards/wait_ms") >= 0
    assert counts.pop("shards/bytes") == 3 * size
    assert counts.pop("shards/removed") == 0
    assert counts["shards/found"] + counts["shards/awaited"] == num_opened
    assert 3 <= counts["shards/awaited"] <= 6  # two workers may wait for the same one
    remarks = [each for each in loader.report().verdict.remarks if "opened a shard in" in each]
    told = f"Of the {num_opened} times that this process opened a shard in"
    assert [each.startswith(told) for each in remarks] == [True] * (way != "processes")


@pytest.mark.parametrize("kind", ["mixture", "list"])
def test_shards_in_another_source_are_counted_once(web, tmp_path, kind):
    """In a pipeline, and in a loader of it."""
    source = TarShards(put_shards(web, 2, 20, tmp_path), cache=tmp_path / "kept", index=True)
    made = mix({"a": source, "b": source}, stop="all") if kind == "mixture" else ListSource(source)
    dataset = PipelineDataset(PipelineBuilder().add_source(made).pipe(dict).add_sink())
    for loader in (dataset, DataLoader(dataset, batch_size=None)):
        before = source.loading_counts()
        list(loader)
        counts = {name: count - before[name] for name, count in source.loading_counts().items()}
        assert loader.snapshot().data == counts
        assert counts["shards/found"] > 0
        assert sum("opened a shard in" in each for each in loader.report().verdict.remarks) == 1


@pytest.mark.parametrize("way", ["threads", "pipeline"])
def test_waits_for_downloads_are_the_verdict_live_and_of_a_file(web, tmp_path, way, monkeypatch):
    """Also over a second epoch, which finds the shards. Threads that wait for one shard are all
    counted. The server answers once the wait for it is most of the time, and that long enough for
    a verdict."""
    monkeypatch.setattr("spdl_torch.observe.verdict.causes.SHORT_SECONDS", 0.4)
    urls = put_shards(web, 2, 20, tmp_path)
    source = TarShards(urls, cache=tmp_path / "kept", index=True, ahead=0)
    if way == "threads":
        source = Parquet(put_rows(web), cache=tmp_path / "kept")
        loader = DataLoader(source, 25, collate_fn=list, num_workers=4, isolation="thread")
    else:
        loader = PipelineDataset(PipelineBuilder().add_source(source).pipe(dict).add_sink())

    def answer_late():
        asked = loader.snapshot().elapsed
        until(lambda: loader.snapshot().elapsed > 4 * asked + 0.6)

    web.faults = [answer_late]
    with recording(loader, tmp_path / "run.db"):
        list(loader)
        live = loader.report().verdict
        list(loader)
    stored = report_of_file(tmp_path / "run.db").verdict
    for verdict in (live, stored):
        assert verdict.cause is Cause.DOWNLOAD, verdict
        assert "waits for shards to be downloaded" in verdict.finding
        assert "a larger ahead=" in verdict.action
    assert (live.stage, live.action) == (stored.stage, stored.action)


def test_web_server_is_held_back_by_the_reader(web):
    """What is not read yet stays in the socket: the system's own buffers take up to 36 MB."""
    web.put("a.tar", content := shard_of(80, size=MIB))
    samples = iter(TarShards(web.url("a.tar")))
    first = next(samples)
    assert web.reader_waits.wait(30)
    assert web.num_bytes_sent < len(content) // 2
    assert numbers_of([first, *samples]) == [*range(80)]
    assert web.num_bytes_sent == len(content)


def test_object_store_is_asked_for_a_block_at_a_time(bucket):
    """8 MiB and what is wanted at the moment, neither fsspec's 50 MiB nor the whole."""
    bucket.put("a.tar", content := shard_of(24, size=MIB))
    bucket.requests = []
    num_read = 0
    for sample in TarShards(bucket.url("a.tar"), storage_options=bucket.options):
        num_read += len(sample["bin"])
        ranges = [wanted for _, _, wanted in bucket.requests if wanted]
        asked = int(ranges[-1].rpartition("-")[2]) + 1
        assert asked <= num_read + 11 * MIB
    assert asked == len(content)
    assert len(ranges) <= 4
