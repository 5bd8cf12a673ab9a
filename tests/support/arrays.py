"""npy and npz files as numpy writes them, and archives that it would not write."""

import contextlib
import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from spdl_torch.io._array import npz

SMOOTH = (np.add.outer(np.arange(20), np.arange(30)) // 3).astype("<i4")


def saved(save, *arrays, **named):
    """What one of numpy's functions writes."""
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


NPY = saved(np.save, SMOOTH)


def deflated(content):
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(content) + compressor.flush()


@pytest.fixture(params=["deflate", "zlib"])
def codec(request, monkeypatch):
    """Each of the two ways to inflate."""
    if request.param == "zlib":
        monkeypatch.setattr(npz, "deflate", None)
    elif npz.deflate is None:
        pytest.skip("deflate is not installed: pip install deflate")


both_codecs = pytest.mark.usefixtures("codec")


@contextlib.contextmanager
def little_memory():
    """What runs in it takes less than a megabyte, however it ends."""
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000, peak


def archive(*members, **end):
    """A zip archive, honest but for the fields that are given.

    Of a member: ``name, content, method, data, flags, crc, num_stored, num_bytes, offset``;
    ``header`` has those of them that its header gets instead.
    """
    body = directory = b""
    for member in members:
        fields = {"name": b"a.npy", "content": NPY, "method": 0, "flags": 0, "extra": b"", **member}
        content = fields["content"]
        data = fields.get("data", deflated(content) if fields["method"] == 8 else content)
        entry = {
            "crc": zlib.crc32(content),
            "num_stored": len(data),
            "num_bytes": len(content),
            "offset": len(body),
            **fields,
        }
        first = {**entry, **fields.get("header", {})}
        body += b"PK\3\4" + facts(first) + first["name"] + first["extra"] + data
        directory += b"PK\1\2" + bytes(2) + facts(entry) + bytes(10)
        directory += struct.pack("<L", entry["offset"]) + entry["name"] + entry["extra"]
    fields = {"count": len(members), "size": len(directory), "start": len(body), **end}
    tail = struct.pack(
        *("<4H2LH", 0, 0, fields["count"], fields["count"]),
        *(fields["size"], fields["start"], 0),
    )
    return body + directory + fields.get("end64", b"") + b"PK\5\6" + tail


def facts(fields):
    """What a header and the directory say of a member in the same words."""
    names = "flags", "method", "crc", "num_stored", "num_bytes"
    flags, method, *numbers = (fields[name] for name in names)
    lengths = len(fields["name"]), len(fields["extra"])
    return struct.pack("<5H3L2H", 20, flags, method, 0, 0, *numbers, *lengths)


ZIP64 = struct.pack("<2H2Q", 1, 16, len(NPY), len(NPY))
SIZES_IN_ZIP64 = {"num_stored": 2**32 - 1, "num_bytes": 2**32 - 1, "extra": ZIP64}

STRUCTURED = np.array([(1, 2.0, b"x")] * 4, [("a", "<i2"), ("b", ">f4"), ("c", "S3")])

SEEDS = [
    NPY,
    saved(np.save, np.asfortranarray(STRUCTURED.reshape(2, 2))),
    saved(np.savez, a=SMOOTH, b=STRUCTURED),
    saved(np.savez_compressed, a=SMOOTH, b=STRUCTURED),
    archive({"header": SIZES_IN_ZIP64}, {"name": b"b.npy", "method": 8}),
]
