"""Shards with an index: any sample at random, equal shares of ranks, and no damage unnoticed."""

import gzip
import io
import json
import re
import tarfile

import pytest
from hypothesis import example, given, settings, strategies as st
from support.tars import FORMATS, keys, shard_of, tar_of, write_shard, write_shards
from test_sources_tar import ALL, contents, names

from spdl_torch.autotune import PerfParams
from spdl_torch.data import mix
from spdl_torch.data.sources import ListSource, TarShards, as_source
from spdl_torch.data.sources._index import scan_tar
from spdl_torch.errors import DecodeError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five shards of 7, 0, 3, 7 and 1 samples."""
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=25)
@given(st.lists(st.tuples(names, st.one_of(contents, st.sampled_from("125"))), max_size=8))
@example([("a.x", b"1"), ("a" * 120 + "/b.x", b"2"), ("a/é.x", b"3"), ("README", b""), ("d", "5")])
def test_random_reads_equal_reads_from_the_front(tmp_path_factory, kind, files):
    """In tars by other programs too: long names, folders, links, files of no sample between."""
    try:
        archive = tar_of(files, kind)
    except (ValueError, UnicodeError):
        return  # a name that ustar cannot hold
    path = tmp_path_factory.mktemp("any") / "a.tar"
    write_shard(path, archive)
    try:
        expected = list(TarShards(path, index=False))
    except DecodeError:  # two fields of one name
        with pytest.raises(DecodeError, match="more than one"):
            list(TarShards(path))
        return
    found = TarShards(path)
    assert [found[place] for place in range(len(found))] == expected
    assert [found[-place - 1] for place in range(len(found))] == expected[::-1]
    assert list(found) == expected
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        kept = [tar.extractfile(m).read() for m in tar if m.isreg()]
    assert all(content in kept for sample in found for content in [*sample.values()][2:])


def test_samples_are_read_at_random_behind_urls(folder, memory):
    """By a request for each sample; the index is asked for, not looked for."""
    for path in folder.iterdir():
        memory.pipe(f"/indexed/{path.name}", path.read_bytes())
    with pytest.raises(TypeError, match="index=True"):
        len(TarShards("memory://indexed/*.tar"))
    found = TarShards("memory://indexed/*.tar", index=True)
    assert [found[place]["__key__"] for place in range(len(found))] == ALL
    part = found.shard(1, 2).shard(0, 2)  # which has positions of its own
    assert keys(part) == keys(TarShards(folder / "*.tar").shard(1, 2).shard(0, 2))
    assert [part[place] for place in (*range(len(part)), -1)] == [*part, [*part][-1]]
    for place in (len(part), -len(part) - 1):
        with pytest.raises(IndexError, match=f"below {len(part)}, got {place}"):
            part[place]
    with pytest.raises(TypeError, match=r"before shuffle\(\), or ListSource"):
        found.shuffle(0)[0]
    chain = TarShards("simplecache::memory://indexed/0.tar", index=True)
    assert [chain[place]["__key__"] for place in (6, 2)] == [ALL[6], ALL[2]]
    memory.rm("/indexed/3.index.json")
    with pytest.raises(FileNotFoundError, match=r"3\.index\.json"):
        TarShards("memory://indexed/*.tar", index=True)


def test_source_without_an_index_is_read_from_the_front(tmp_path, capsys):
    """It has no length, and says what would give it one; one shard without an index is enough."""
    write_shard(tmp_path / "0.tar", shard_of(0, 9))
    (tmp_path / "1.tar").write_bytes(shard_of(9, 9))
    source = TarShards(tmp_path / "*.tar")
    assert keys(source) == ALL
    assert source
    PerfParams.estimate(source)
    assert "bytes in flight" in capsys.readouterr().out
    for call in (len, lambda it: it[0]):
        with pytest.raises(TypeError, match=r"without an index.*prepare --index FOLDER"):
            call(source)
    with pytest.raises(FileNotFoundError, match=r"1\.index\.json"):
        TarShards(tmp_path / "*.tar", index=True)
    assert not TarShards(tmp_path / "0.tar").shard(9, 10)


SHARD = shard_of(0, 4)


@settings(max_examples=60)
@given(place=st.integers(0, len(SHARD.rstrip(b"\0")) - 1), change=st.integers(1, 255))
def test_damaged_byte_is_an_error_or_changes_nothing(tmp_path_factory, place, change):
    """Never another content: the sample is as it was, or the error names shard and sample."""
    path = tmp_path_factory.mktemp("damaged") / "a.tar"
    write_shard(path, SHARD)
    expected = list(TarShards(path))
    damaged = bytearray(SHARD)
    damaged[place] ^= change
    path.write_bytes(damaged)
    num_bad = 0
    for number, sample in enumerate(expected):
        try:
            assert TarShards(path)[number] == sample
        except DecodeError:
            num_bad += 1
            with pytest.raises(DecodeError, match=re.escape(str(path))):
                TarShards(path)[number]
    assert num_bad <= 1
    found = list(TarShards(path, on_error="skip"))
    assert found == expected[: len(found)]


@pytest.mark.parametrize("buffer_size", [1, 4, 1000])
def test_shuffled_pass_goes_on_anywhere_without_what_came_before(tmp_path, buffer_size):
    """Nobody reads that again: it has been damaged meanwhile."""
    for number in range(3):
        write_shard(tmp_path / f"{number}.tar", shard_of(6 * number, 6))
    source = TarShards(tmp_path / "*.tar").shuffle(seed=5, buffer_size=buffer_size).shard(1, 2)
    whole = list(source)
    first, damaged = whole[0], tmp_path / whole[0]["__url__"]
    damaged.write_bytes(damaged.read_bytes().replace(first["jpg"], first["jpg"][::-1], 1))
    with pytest.raises(DecodeError, match="another checksum"):
        list(source)
    for start in range(1, len(whole) + 1):
        assert list(source.iterate(start)) == whole[start:]


def test_tar_that_is_not_the_indexs_is_refused(tmp_path):
    """By a checksum, with shard, sample, file and what to do, or by its size: it was written anew,
    or cut short. ``index=False`` reads it; a limit is as without."""
    path = tmp_path / "a.tar"
    write_shard(path, SHARD)
    with pytest.raises(DecodeError, match="sample 0 has more than max_sample_bytes=900"):
        TarShards(path, max_sample_bytes=900)[0]
    changed = SHARD.replace(b"jpg 2", b"jpg 9", 1)
    for content, message in (
        (changed, r"a\.tar: sample 2, at byte \d+, .*'000002\.jpg' has another .*--verify"),
        (SHARD[:-512], f"has {len(SHARD) - 512} bytes.*one with {len(SHARD)}"),
    ):
        path.write_bytes(content)
        with pytest.raises(DecodeError, match=message):
            list(TarShards(path))
        assert len(list(TarShards(path, index=False))) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=2), "expected format"),
        (lambda index: index["samples"].pop("key"), "values each"),
        (lambda index: index["files"]["crc32"].pop(0), "as many values as num_files says"),
    ],
)
def test_damaged_index_is_named(tmp_path, change, message):
    """At once, with what to do."""
    index = json.loads(write_shard(tmp_path / "a.tar", SHARD))
    change(index)
    (tmp_path / "a.index.json").write_text(json.dumps(index))
    with pytest.raises(DecodeError, match=rf"a\.index\.json: .*{message}.*write it anew"):
        TarShards(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(gzip.compress(SHARD))
    with pytest.raises(ValueError, match="the tar is compressed"):  # no sample is read by itself
        scan_tar(str(tmp_path / "a.tar"))


@pytest.mark.parametrize("shuffle", [False, True])
def test_damaged_shard_that_is_skipped_is_resumed_at_any_sample(tmp_path, shuffle):
    """Alone, and in a mixture that reads it again and again: samples that never come do not count,
    though the index counts them."""
    for number in range(3):
        write_shard(tmp_path / f"{number}.tar", shard_of(6 * number, 6))
    damaged = tmp_path / "1.tar"
    damaged.write_bytes(damaged.read_bytes().replace(b"jpg 8", b"gpj 8", 1))
    source = TarShards(tmp_path / "*.tar", index=True, on_error="skip")
    source = source.shuffle(seed=5) if shuffle else source
    found = keys(source)
    assert len(found) == 14 < len(source)
    mixed = mix({"a": source, "b": as_source(ListSource(range(30)))}, stop="all", shuffle=False)
    epoch = [*map(str, mixed)]
    assert len(epoch) == 60
    for start in range(len(epoch) + 1):
        assert keys(source.iterate(start)) == found[start:]
        assert [*map(str, mixed.iterate(start))] == epoch[start:]
