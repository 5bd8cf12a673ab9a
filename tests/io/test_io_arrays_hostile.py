"""Arrays that are damaged or meant to do harm: refused, or read as numpy reads them."""

import io
import struct

import numpy as np
import pytest
import torch
from support.arrays import (
    NPY,
    SIZES_IN_ZIP64,
    SMOOTH,
    ZIP64,
    archive,
    both_codecs,
    codec,
    deflated,
    little_memory,
    saved,
)

from spdl_torch.errors import DecodeError
from spdl_torch.io import load_npy, load_npz

__all__ = ["codec"]


def npy(text, data=b"", version=1):
    encoded = text.encode()
    length = len(encoded).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + encoded + data


def header(descr="'<i4'", fortran_order="False", shape="(2,)"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran_order}, 'shape': {shape}, }}\n"


HUGE = "9" * 4000
BAD_NPY = {
    "empty": (b"", "not an npy file: EOF"),
    "cut in the data": (NPY[:-1], r"int32 of shape \(20, 30\) takes 2400 bytes, got 2399"),
    "pickle": (b"\x80\x04\x95rest and more", "the magic string is not correct"),
    "version 4": (npy(header(), bytes(8), version=4), r"version \(4, 0\) is not known"),
    "long header": (npy(header() + " " * 10_000, bytes(8)), "Header info length .* is large"),
    "endless header": (npy("", version=2)[:8] + b"\xff" * 30, "not an npy file: EOF"),
    "a call": (npy("__import__('os').getcwd()"), "not an npy file: malformed node"),
    "nested": (npy("(" * 9000), "not an npy file: "),
    "not UTF-8 in version 3": (npy("\xff", version=3)[:12] + b"\xff\xff", "can't decode byte"),
    "key missing": (npy("{'descr': '<i4', 'shape': (2,)}"), "does not contain the correct keys"),
    "objects": (saved(np.save, np.array([{}, None])), "dtype object is stored as a pickle"),
    "no dtype": (npy(header(descr="'nonsense'")), "descr is not a valid dtype"),
    "dtype of no bytes": (npy(header(descr="'|V0'", shape="(9,)")), "cannot have the dtype"),
    "order": (npy(header(fortran_order="1"), bytes(8)), "fortran_order is not a valid bool"),
    "negative": (npy(header(shape="(-1,)"), bytes(8)), "no array has shape"),
    "product wraps to 0": (npy(header(shape=f"({2**32}, {2**32})")), "no array has shape"),
    "digits": (npy(header(shape=f"({HUGE}, {HUGE})")), "no array has shape"),
    "huge beside 0": (npy(header(shape=f"(0, {2**62}, {2**62})")), "no array has shape"),
}


@pytest.mark.parametrize("what", BAD_NPY)
def test_load_npy_refuses(what, tmp_path):
    """Whatever is wrong is a DecodeError that names the source and says what; twice, if asked."""
    content, message = BAD_NPY[what]
    path = tmp_path / "bad.npy"
    path.write_bytes(content)
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    for source in (content, content, bytearray(content), tensor, path):
        name = r".*bad\.npy" if source is path else "<bytes>"
        with pytest.raises(DecodeError, match=rf"^{name}: .*{message}"):
            load_npy(source)


def test_load_npy_names_what_is_no_source(tmp_path):
    """A missing file stays an OSError; what cannot be a source at all is a TypeError."""
    with pytest.raises(FileNotFoundError, match="missing"):
        load_npy(tmp_path / "missing.npy")
    for source, message in (
        (3, "an array source must be a path, .* got int"),
        (io.StringIO("text"), "an array source must be a path, .* got str"),
        (memoryview(NPY)[::2], "must be contiguous"),
        (np.zeros((4, 4), "u1")[:, 1], "must be contiguous"),
    ):
        with pytest.raises(TypeError, match=message):
            load_npy(source)


HONEST = {
    "stored": archive({}),
    "deflated": archive({"method": 8}),
    "zip64 in the header": archive({"header": SIZES_IN_ZIP64}),
    "zip64 in both": archive(SIZES_IN_ZIP64),
    "another field before zip64": archive(
        {"header": {**SIZES_IN_ZIP64, "extra": struct.pack("<2HL", 7, 4, 0) + ZIP64}}
    ),
    "sizes behind": archive({"flags": 8, "header": {"crc": 0, "num_stored": 0, "num_bytes": 0}}),
    "UTF-8": archive({"name": "ä.npy".encode(), "flags": 1 << 11}),
    "code page 437": archive({"name": b"\x84.npy"}),
    "folders": archive({"name": b"a/b../..c..npy"}),
    "without suffix": archive({"name": b"a"}),
}


@both_codecs
@pytest.mark.parametrize("form", HONEST)
def test_load_npz_takes_every_honest_form(form):
    """Zip64 fields, sizes after the data and folders in names are read as numpy does."""
    expected, loaded = np.load(io.BytesIO(HONEST[form])), load_npz(HONEST[form], verify=True)
    assert loaded.files == expected.files
    assert np.array_equal(loaded[expected.files[0]], SMOOTH)


GOOD = archive({})
LOCATOR = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
BAD_NPZ = {
    "empty": (b"", "not a zip archive"),
    "truncated": (GOOD[:-1], "not a zip archive"),
    "bytes behind": (GOOD + b"x", "not a zip archive"),
    "bytes before": (b"x" + GOOD, "with other bytes put before or between"),
    "too many members": (archive({}, count=2), "directory is truncated|do not fit"),
    "too few members": (archive({}, {"name": b"b.npy"}, count=1), "more than the 1 members"),
    "encrypted": (archive({"flags": 1}), "member 'a' is encrypted"),
    "directory damaged": (GOOD.replace(b"PK\1\2", b"PK\1\3"), "directory is damaged"),
    "same name": (archive({}, {}), "two members are named 'a'"),
    "same place": (archive({}, {"name": b"b.npy", "offset": 0}), "begin at the same place"),
    "offset": (archive({"offset": 10**6}), "a member begins after the last one"),
    "zip64 field short": (
        archive({"offset": 2**32 - 1, "extra": struct.pack("<2HL", 1, 4, 0)}),
        "zip64 field is too short",
    ),
    "zip64 record missing": (archive({}, count=0xFFFF, end64=LOCATOR), "not where it should be"),
    "zip64 record damaged": (
        archive({}, start=2**32 - 1, end64=b"x" * 56 + LOCATOR),
        "not where it should be|put before or between",
    ),
    "zip64 record lies": (b"x" * 56 + LOCATOR + archive(count=0xFFFF), "64 end record is missing"),
}


@pytest.mark.parametrize("what", BAD_NPZ)
def test_load_npz_refuses(what, tmp_path):
    """A directory that is damaged, ambiguous or a trap is refused before anything is loaded."""
    content, message = BAD_NPZ[what]
    with pytest.raises(DecodeError, match=rf"^<bytes>: .*({message})"):
        load_npz(content)
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(DecodeError, match=rf"bad\.npz: .*({message})"):
        load_npz(path)


SECOND = 30 + len(b"good.npy") + len(NPY)
"""Where the second member begins, below."""
BOMB = deflated(bytes(1 << 20))
BAD_MEMBER = {
    "pickle": ({"content": b"\x80\x04\x95rest"}, "not an npy file"),
    "bytes behind": ({"content": NPY + b"x"}, "1 bytes follow its array"),
    "more than is there": ({"method": 8, "num_bytes": 10**5}, "inflates to 2528|truncated"),
    "more than there can be": ({"method": 8, "num_bytes": 10**9}, "never inflate to the 10{9} th"),
    "Zstandard": ({"method": 93}, r"compressed by method 93; .* anew by numpy\.savez"),
    "two sizes": ({"num_bytes": 10}, "stored, but has two sizes"),
    "other name": ({"header": {"name": b"b.npy"}}, "missing or has another name"),
    "beyond the end": ({"num_stored": 10**6, "num_bytes": 10**6}, "overlaps with what follows"),
    "no header": ({"offset": SECOND + 1}, "missing or has another name"),
    "header outside": ({"data": b"", "num_stored": 0, "offset": SECOND + 20}, "header overlaps"),
    "damaged": ({"method": 8, "data": deflated(NPY)[::-1]}, "damaged|inflates"),
    "checksum": ({"method": 8, "crc": 1}, "its checksum is wrong"),
    "more than said": ({"method": 8, "data": BOMB, "num_bytes": 1000}, "more than the 1000 bytes"),
}


@both_codecs
@pytest.mark.parametrize("what", BAD_MEMBER)
def test_npz_file_refuses_a_member(what):
    """A member that is damaged, lies about itself or overlaps is refused; others are not."""
    fields, message = BAD_MEMBER[what]
    loaded = load_npz(archive({"name": b"good.npy"}, fields))
    with pytest.raises(DecodeError, match=rf"^<bytes>: member 'a': .*({message})"):
        loaded["a"]
    assert np.array_equal(loaded["good"], SMOOTH)


def test_npz_file_refuses_members_that_overlap():
    """A member whose data holds another member is refused: so are bombs of shared data made."""
    inner, place = archive({"name": b"b.npy"})[: 30 + 5 + len(NPY)], 30 + 5 + len(NPY)
    loaded = load_npz(archive({"content": NPY + inner}, {"name": b"b.npy", "offset": place}))
    with pytest.raises(DecodeError, match="member 'a': its data overlaps with what follows it"):
        loaded["a"]


def test_npz_file_verifies_stored_data_when_asked():
    """A changed byte in stored data is noticed with verify=True, and is data otherwise."""
    content = bytearray(archive({}))
    content[30 + 5 + 128] ^= 1
    assert load_npz(content)["a"][0, 0] == 1
    with pytest.raises(DecodeError, match="member 'a': its checksum is wrong"):
        load_npz(content, verify=True)["a"]


def test_load_npz_bounds_what_is_inflated():
    """The declared sizes of all deflated members together are bounded; stored ones cost nothing."""
    named, total = {"a": SMOOTH, "b": SMOOTH}, 2 * len(NPY)
    content = saved(np.savez_compressed, **named)
    assert len(load_npz(content, max_uncompressed_bytes=total)) == 2
    assert len(load_npz(saved(np.savez, **named), max_uncompressed_bytes=0)) == 2
    for most, error, message in (
        (total - 1, DecodeError, f"take {total} bytes, .*max_uncompressed_bytes={total - 1}"),
        (-1, ValueError, "max_uncompressed_bytes must be >= 0, got -1"),
    ):
        with pytest.raises(error, match=message):
            load_npz(content, max_uncompressed_bytes=most)


@both_codecs
def test_zip_bomb_takes_no_memory():
    """Neither a declared size nor what is really there makes us take more than was allowed."""
    for bomb in (
        {"method": 8, "data": BOMB, "num_bytes": 5000},
        {"method": 8, "num_bytes": 10**9},
        {"content": npy(header(shape=f"({10**12},)"))},
    ):
        content, refused = archive(bomb), r"more than|never inflate|cannot inflate|truncated"
        with pytest.raises(DecodeError, match=refused), little_memory():
            load_npz(content)["a"]
