"""Tar archives and shards: the standard library is the oracle, damage is named, parts are exact."""

import bz2
import contextlib
import gzip
import io
import logging
import lzma
import tarfile
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st
from support.tars import FORMATS, SIZES, Pipe, keys, shard_of, tar_of

from spdl_torch.data.sources import TarShards
from spdl_torch.errors import DecodeError
from spdl_torch.io import iter_tarfile
from spdl_torch.io._tar import TarReader

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300)
# Of these the standard library itself removes or changes slashes.
names = names.filter(lambda name: not name.startswith("/") and not name.endswith("/"))
contents = st.binary(max_size=1500)
COMPRESS = gzip.compress, bz2.compress, lzma.compress


def tarfile_reads(archive):
    """The files of an archive as the standard library sees them."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return [(m.name, tar.extractfile(m).read()) for m in tar if m.isreg()]


@pytest.mark.parametrize("kind", FORMATS)
@given(st.lists(st.tuples(names, contents | st.sampled_from("123456")), max_size=6))
@example([("a" * 99 + "/" + "b" * 99, b"x"), ("é" * 60, b""), ("d/" * 140 + "e", b"y" * 512)])
@example([(f"{number}.jpg", b"jpg" * 99) for number in range(50)])
def test_files_are_those_of_the_standard_library(kind, files):
    """Names and contents, in order, in the three formats that are written today; folders, links and
    devices are no files. Decompressed where the content says so, also where it cannot seek."""
    try:
        archive = tar_of(files, kind)
    except (ValueError, UnicodeError):
        return  # a name that ustar cannot hold
    expected = tarfile_reads(archive)
    for pack in (bytes, *COMPRESS):
        packed = pack(archive)
        assert list(iter_tarfile(packed)) == expected
        assert list(iter_tarfile(io.BufferedReader(Pipe(packed)))) == expected
    reader = TarReader(io.BytesIO(archive), "x")
    assert list(iter(reader.advance, None)) == [(n, len(c)) for n, c in expected]


ARCHIVE = tar_of([("d/0001.jpg", b"a" * 700), ("d/0001.cls", b"7"), ("é" * 200, b"c" * 1024)])
END = len(ARCHIVE.rstrip(b"\0")) // 512 * 512 + 512  # where the end marker begins


@pytest.mark.parametrize("skip", [False, True], ids=["read", "skipped"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_archive_that_was_cut_short_is_a_decode_error(pack, skip):
    """At every byte: there is no cut, not even between two files, that goes unnoticed."""

    def walk(reader, found):
        while (member := reader.advance()) is not None:
            if not skip:
                reader.content()
            found.append(member[0])

    packed = pack(ARCHIVE)
    whole = [name for name, _ in tarfile_reads(ARCHIVE)]
    for cut in range(0, END if pack is bytes else len(packed), 1 if pack is gzip.compress else 37):
        found = []
        with pytest.raises(DecodeError, match=r"shard-1\.tar: .* \(at byte"):
            walk(TarReader(io.BytesIO(packed[:cut]), "shard-1.tar"), found)
        assert found == whole[: len(found)]


@pytest.mark.parametrize("compress", COMPRESS)
@given(st.data(), st.integers(1, 255))
def test_damaged_byte_is_a_decode_error(compress, data, change):
    """Checksums find every one that matters."""
    damaged = bytearray(compress(ARCHIVE))
    damaged[data.draw(st.integers(10, len(damaged) - 1))] ^= change
    with contextlib.suppress(DecodeError):
        assert list(iter_tarfile(bytes(damaged))) == tarfile_reads(ARCHIVE)


def header(name=b"x", size=b"00000000010\0", kind=b"0"):
    """A header with a true checksum, whatever it says."""
    block = bytearray(512)
    block[: len(name)], block[124:136], block[156:157] = name, size, kind
    block[257:265] = b"ustar\00000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (b"", "ends without the two empty blocks"),
        (b"PK\3\4" * 200, "not a tar archive"),
        (header(size=b"77777777777\0"), "'x' claims 8589934591 bytes; the limit is 1000"),
        (header(size=b"\x80" + b"\xff" * 11), "'x' claims 309485009821345068724781055 bytes"),
        (header(size=b"0000000009x\0"), "not a tar archive"),
        (header(kind=b"L", size=b"77777777777\0"), "a name claims 8589934591 bytes"),
        (header(kind=b"x") + b"99999 a=b\n".ljust(512, b"\0"), "a damaged extended header"),
        (
            header(kind=b"x", size=b"00000000013\0") + b"11 size=-1\n".ljust(512, b"\0") + header(),
            "a damaged size, '-1'",
        ),
        (header(kind=b"S"), "'x' is a sparse file"),
        (b"\x1f\x8b" + b"junk" * 9, "cannot be decompressed"),
    ],
)
def test_hostile_header_is_refused(archive, message):
    """Before memory is taken for what it claims."""
    with pytest.raises(DecodeError, match=message):
        list(iter_tarfile(archive, max_member_bytes=1000))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_error_of_the_file_is_not_taken_for_damage(pack):
    """A lost connection stays the OSError it is, below a decompressor too."""

    class Lost(Pipe):
        def readinto(self, buffer):
            if self._file.tell() > 1000:
                raise ConnectionResetError("lost")
            return super().readinto(buffer[:500])

    archive = ARCHIVE if pack is bytes else gzip.compress(ARCHIVE, compresslevel=0)
    with pytest.raises(ConnectionResetError, match="lost"):
        list(iter_tarfile(io.BufferedReader(Lost(archive))))


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Five shards of 7, 0, 3, 7 and 1 samples in the current folder."""
    monkeypatch.chdir(tmp_path)
    for number, size in enumerate(SIZES):
        Path(f"train-{number:03d}.tar").write_bytes(shard_of(sum(SIZES[:number]), size))
    return "train-{000..004}.tar"


ALL = [f"{n:06d}" for n in range(18)]


def test_members_with_one_key_are_one_sample(tmp_path):
    """WebDataset's layout: the name up to the first dot of its last part, fields in lower case."""
    path = tmp_path / "a.tar"
    files = [
        ("README", b"no dot"),
        ("__meta__/x.json", b"of WebDataset"),
        ("a.b/0001.JPG", b"1"),
        ("a.b/0001.seg.png", b"2"),
        ("a.b", "5"),
        ("a.b/0002.jpg", b"3"),
        ("a.b/._0002.jpg", b"of macOS"),
        ("a.b/0002.cls", b""),
        ("./0001.jpg", b"4"),
    ]
    path.write_bytes(tar_of(files))
    url = str(path)
    expected = [
        {"__key__": "a.b/0001", "__url__": url, "jpg": b"1", "seg.png": b"2"},
        {"__key__": "a.b/0002", "__url__": url, "jpg": b"3", "cls": b""},
        {"__key__": "./0001", "__url__": url, "jpg": b"4"},
    ]
    assert list(TarShards(path)) == expected


def test_shards_are_named_in_many_ways(shards):
    """Braces, globs, lists, paths; order as given, what a glob finds sorted."""
    for urls in (shards, "train-*.tar", [Path("train-000.tar"), "train-00{1..4}.tar"]):
        assert TarShards(urls).urls == tuple(f"train-00{n}.tar" for n in range(5))
        assert keys(TarShards(urls)) == ALL
    for pattern, expected in (
        ("a{8..10}", ["a8", "a9", "a10"]),
        ("{a,b}-{08..09}.tar", ["a-08.tar", "a-09.tar", "b-08.tar", "b-09.tar"]),
        ("s3://b/{000..001}.tar", ["s3://b/000.tar", "s3://b/001.tar"]),
        ("plain{x}", ["plain{x}"]),
    ):
        assert TarShards(pattern, index=False).urls == tuple(expected)  # as a shell does it
    assert TarShards(["train-003.tar", "train-000.tar"]).urls[0] == "train-003.tar"
    assert repr(TarShards("train-003.tar")) == "<TarShards of 1 shard>"
    assert repr(TarShards(["train-003.tar"] * 2)) == "<TarShards of 2 shards>"


def test_shards_are_refused_when_their_names_make_no_sense(shards):
    """At once, not while training."""
    with pytest.raises(ValueError, match="at least one shard, got none"):
        TarShards("train-{5..4}.tar")
    with pytest.raises(FileNotFoundError, match=r"no file matches 'nothing-\*\.tar'"):
        TarShards("nothing-*.tar")
    with pytest.raises(TypeError, match="TarShards: max_sample_bytes must be an int, got '1 GB'"):
        TarShards(shards, max_sample_bytes="1 GB")


def test_parts_have_shards_of_their_own_or_take_turns(shards):
    """No shard is read by two parts where there are enough; else samples are dealt evenly: 14 of
    two shards to 4 parts in groups of two. The order of shards is shuffled where a buffer of one
    item shuffles no samples, too."""
    parts = [{sample["__url__"] for sample in TarShards(shards).shard(i, 5)} for i in range(5)]
    assert parts == [{f"train-00{i}.tar"} if i != 1 else set() for i in range(5)]
    source = TarShards(["train-000.tar", "train-003.tar"])
    parts = [keys(source.shard(index, 4)) for index in range(4)]
    assert sorted(map(len, parts)) == [3, 3, 4, 4]
    assert all(len({int(key) // 10 for key in part}) == 1 for part in parts)
    assert sorted(len(keys(source.shard(index, 3))) for index in range(3)) == [4, 5, 5]
    urls = [sample["__url__"] for sample in TarShards(shards).shuffle(7, 1)]
    assert urls != sorted(urls)


def test_damaged_shard_is_named_or_skipped_on_request(shards, caplog):
    """With the byte, after the samples before it. Where its rest is left out, the log
    says so; a missing shard is still an error."""
    path = Path("train-003.tar")
    path.write_bytes(path.read_bytes()[:7000])
    samples = iter(TarShards(shards))
    assert keys(islice(samples, 12)) == ALL[:12]
    with pytest.raises(DecodeError, match=r"train-003\.tar: cut short: '000012.jpg' needs"):
        list(samples)
    source = TarShards(shards, on_error="skip")
    with caplog.at_level(logging.WARNING):
        found = keys(source)
    assert found == [*ALL[:12], "000017"]
    assert "rest of a shard was skipped: train-003.tar: cut short" in caplog.text
    assert sorted(key for index in range(8) for key in keys(source.shard(index, 8))) == found
    assert keys(source.iterate(11)) == found[11:]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"train-003\.tar"):
        list(source)


def test_sample_with_two_fields_of_one_name_or_beyond_the_limit_is_refused(tmp_path):
    """Nothing is silently replaced; one large member, or many that belong together."""
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of([("1.jpg", b"a"), ("1.JPG", b"b")]))
    with pytest.raises(DecodeError, match=r"a\.tar: sample '1' has more than one 'jpg'"):
        list(TarShards(path))
    path.write_bytes(tar_of((f"1.f{n}", bytes(400)) for n in range(9)))
    with pytest.raises(DecodeError, match="sample '1' has more than max_sample_bytes=2000"):
        list(TarShards(path, max_sample_bytes=2000))
    with pytest.raises(DecodeError, match=r"'1\.f0' claims 400 bytes; the limit is 300"):
        list(TarShards(path, max_sample_bytes=300))


def test_a_tar_without_its_end_still_has_its_last_sample(tmp_path):
    """tarfile delivers it, too; then comes the error."""
    path = tmp_path / "shard.tar"
    whole = tar_of((f"{number}.txt", b"hello") for number in range(3))[: 3 * 1024]
    path.write_bytes(whole)
    kept = TarShards(path, on_error="skip", index=False)
    assert keys(kept) == ["0", "1", "2"]
    samples, got = iter(TarShards(path, index=False)), []
    with pytest.raises(DecodeError, match="ends without the two empty blocks"):
        got.extend(sample["__key__"] for sample in samples)
    assert got == ["0", "1", "2"]
    path.write_bytes(whole[:-512])  # within the last file
    assert keys(kept) == ["0", "1"]
