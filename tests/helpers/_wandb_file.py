"""The rows of an offline run of Weights & Biases, read from its file."""

from __future__ import annotations

import json
import struct


def wandb_history(path):
    """Lines of a ``.wandb`` file: a 7-byte header, then records of protocol buffers in blocks of
    32 KiB, in the log format of LevelDB; a record may go over several blocks.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, parts, lines = path.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # complete, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts.clear()
            if record.WhichOneof("record_type") == "history":
                found = [(i.key or "/".join(i.nested_key), i) for i in record.history.item]
                lines.append({key: json.loads(item.value_json) for key, item in found})
    return lines
