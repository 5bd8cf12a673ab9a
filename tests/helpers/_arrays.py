"""npy and npz files as numpy writes them, and archives that it would not write."""

import io
import struct
import zlib

import numpy as np

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


def packed(form, version, fields, *names):
    """Numbers for a record: the version before them and two of time and date behind, if any."""
    values = [fields[name] for name in names]
    return struct.pack(form, *([version, *values, 0, 0] if version else values))


def archive(*members, before=b"", comment=b"", after=b"", **end):
    """A zip archive, honest but for the fields that are given.

    Of a member: ``name, content, method, data, flags, crc, num_stored, num_bytes, offset, disk``;
    ``header`` has those of them that its header gets instead.
    """
    body, directory = before, b""
    for member in members:
        fields = {"name": b"a.npy", "content": NPY, "method": 0, "flags": 0, "disk": 0, **member}
        content = fields["content"]
        data = fields.get("data", deflated(content) if fields["method"] == 8 else content)
        honest = {
            "crc": zlib.crc32(content),
            "num_stored": len(data),
            "num_bytes": len(content),
            "offset": len(body),
            "extra": b"",
        }
        entry = {**honest, **fields}
        first = {**entry, **fields.get("header", {})}
        body += b"PK\3\4" + packed("<5H", 20, first, "flags", "method") + bytes(0)
        body += packed("<3L", None, first, "crc", "num_stored", "num_bytes")
        body += struct.pack("<2H", len(first["name"]), len(first["extra"]))
        body += first["name"] + first["extra"] + data
        directory += b"PK\1\2" + bytes(2) + packed("<5H", 20, entry, "flags", "method")
        directory += packed("<3L", None, entry, "crc", "num_stored", "num_bytes")
        directory += struct.pack(
            "<5H2L",
            *(len(entry["name"]), len(entry["extra"]), 0, entry["disk"], 0),
            *(0, entry["offset"]),
        )
        directory += entry["name"] + entry["extra"]
    fields = {"count": len(members), "size": len(directory), "start": len(body), "disk": 0, **end}
    count_here = fields.get("count_here", fields["count"])
    tail = struct.pack(
        "<4H2LH",
        *(fields["disk"], fields["disk"], count_here, fields["count"]),
        *(fields["size"], fields["start"], len(comment)),
    )
    return body + directory + fields.get("end64", b"") + b"PK\5\6" + tail + comment + after


ZIP64 = struct.pack("<2H2Q", 1, 16, len(NPY), len(NPY))
SIZES_IN_ZIP64 = {"num_stored": 2**32 - 1, "num_bytes": 2**32 - 1, "extra": ZIP64}

STRUCTURED = np.array([(1, 2.0, b"x")] * 4, [("a", "<i2"), ("b", ">f4"), ("c", "S3")])

SEEDS = [
    NPY,
    saved(np.save, np.asfortranarray(STRUCTURED.reshape(2, 2))),
    saved(np.savez, a=SMOOTH, b=STRUCTURED),
    saved(np.savez_compressed, a=SMOOTH, b=STRUCTURED),
    archive({"header": SIZES_IN_ZIP64}, {"name": b"b.npy", "method": 8}, comment=b"comment"),
]
