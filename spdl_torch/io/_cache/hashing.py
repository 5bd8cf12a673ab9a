"""Numbers that stand for names and versions, the same in every process."""

from __future__ import annotations

import hashlib


def hash_of(*parts: int | str) -> int:
    """Return 64 bits that depend on every part, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
