"""A cache believes its user alone, and its files never end a training, whatever became of them."""

from __future__ import annotations

import gc
import logging
import os
import random
import stat
from pathlib import Path

import pytest
from support.datasets import Made
from support.inside import kept_by

from spdl_torch.data import cached
from spdl_torch.io._cache import memory
from spdl_torch.io._cache.store import Store

NOBODY = 65534


def rows():
    """Samples that anybody can check."""
    return Made("row {}".format, 3)


SAMPLES = ["row 0", "row 1", "row 2"]


def filled(folder):
    """A cache of two of the three samples, and the path of its own folder."""
    dataset = cached(rows(), folder, version=1)
    assert [dataset[0], dataset[1]] == SAMPLES[:2]
    return dataset, Path(kept_by(dataset).folder)


@pytest.mark.parametrize(("name", "in_use"), [("index", False), ("index", True), ("data", False)])
def test_damaged_file_costs_the_cache_and_never_the_training(name, in_use, tmp_path, caplog):
    """Any byte changed, any length cut: no error, no other sample, no file that grows large."""
    caplog.set_level(logging.ERROR, "spdl_torch.io")  # no thousand warnings
    draws, own = random.Random(0), filled(tmp_path)[1]
    wholes = {each: each.read_bytes() for each in own.iterdir()}
    whole = wholes[own / name]
    damages = [whole[:length] for length in range(len(whole))]
    for place, byte in enumerate(whole):
        other = bytes([byte ^ draws.randrange(1, 256)])
        damages.append(whole[:place] + other + whole[place + 1 :])
    assert len(damages) > 100
    for damaged in damages:
        dataset = None
        gc.collect(0)
        for each, content in wholes.items():
            each.write_bytes(content)
        if in_use:
            dataset, _ = filled(tmp_path)
        (own / name).write_bytes(damaged)
        dataset = dataset or cached(rows(), tmp_path, version=1)
        for _ in range(2):
            assert [dataset[index] for index in range(3)] == SAMPLES
        assert dataset.loading_remarks()
        assert max(each.stat().st_size for each in own.iterdir()) < 100_000


def test_damaged_content_is_made_anew_for_all_who_read_it(tmp_path, caplog):
    """Also if its record was read before; the log says so."""
    own = filled(tmp_path)[1]
    damaged = bytearray((own / "data").read_bytes())
    damaged[-1] ^= 1
    (own / "data").write_bytes(damaged)
    first, second = (cached(rows(), tmp_path, version=1) for _ in range(2))
    for each in (first, second):
        assert [each[index] for index in range(3)] == SAMPLES
    assert first.loading_counts() == {"cache/found": 1, "cache/missing": 2}
    assert second.loading_counts() == {"cache/found": 3, "cache/missing": 0}
    assert "contents were damaged, and are made anew" in caplog.text
    assert "not used" not in caplog.text


def test_disk_that_fails_turns_the_cache_off(tmp_path, caplog):
    """The samples come all the same, and the log says so once."""
    dataset, _ = filled(tmp_path)
    dataset[0]
    reading, writing = os.pipe()
    os.dup2(reading, kept_by(dataset)._contents._data)  # every read of it now fails
    os.close(reading)
    os.close(writing)
    for _ in range(2):
        assert [dataset[index] for index in range(3)] == SAMPLES
    assert caplog.text.count("not used") == 1
    assert "is not used: Illegal seek" in dataset.loading_remarks()[0]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("another user's", "belongs to another user"),
        ("a link", "is a link or a file"),
        ("open", r"open to others \(mode 0710\)"),
        ("a file", "is a link or a file"),
    ],
)
def test_folder_that_others_can_write_is_not_used(kind, why, tmp_path, monkeypatch):
    """It is refused with the reason, before anything in it is opened. In memory another name is
    taken: nothing is read or written there, and all processes agree."""
    place, is_roots = tmp_path / "cache", kind == "another user's" and os.geteuid()
    if kind == "a file":
        place.touch()
    elif kind == "a link":
        (tmp_path / "own").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "own")
    elif is_roots:
        place = Path("/")
    else:
        place.mkdir()
        place.chmod(0o710 if kind == "open" else 0o700)
        os.chown(place, *[os.geteuid() if kind == "open" else NOBODY] * 2)
    with pytest.raises(ValueError, match=f"cache: {place} is refused: .*{why}.*could run code"):
        Store(str(place))
    if is_roots:
        pytest.skip("only root can give a folder away")
    monkeypatch.setattr(memory, "_SHARED_MEMORY", str(tmp_path))
    root = tmp_path / f"spdl_torch-cache-{os.geteuid()}"
    place.rename(root)
    dataset = cached(rows())
    assert [dataset[index] for index in range(3)] == SAMPLES
    own = Path(kept_by(dataset).folder)
    assert own.parent == tmp_path / f"{root.name}-1"
    assert Path(memory.memory_folder("another")).parent == own.parent
    if root.is_dir():
        assert not any(root.iterdir())
    monkeypatch.setattr(memory, "_NUM_ROOTS", 1)
    with pytest.raises(ValueError, match=f"cache: {root} is refused: .*{why}"):
        cached(rows())


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("cache", "mask"), [("folder", 0), ("memory", 0), ("memory", 0o177)])
def test_cache_is_this_users_alone_whatever_the_umask(cache, mask, tmp_path, monkeypatch):
    """Its folders have mode 0700, its files 0600."""
    monkeypatch.setattr(memory, "_SHARED_MEMORY", str(tmp_path))
    before = os.umask(mask)
    try:
        dataset = cached(rows(), cache if cache == "memory" else tmp_path / cache, version=1)
        assert [dataset[index] for index in range(3)] == SAMPLES
    finally:
        os.umask(before)
    own = Path(kept_by(dataset).folder)
    assert [mode_of(folder) for folder in (own, own.parent)] == [0o700, 0o700]
    assert {mode_of(file) for file in own.iterdir()} == {0o600}


def test_training_goes_on_where_no_folder_can_be_made_in_memory(tmp_path, monkeypatch, caplog):
    """The cache is off, with a warning, and in the report."""
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setattr(memory, "_SHARED_MEMORY", str(place))

    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "mkdir", refused)
    dataset = cached(rows())
    assert [dataset[index] for index in range(3)] == SAMPLES
    assert "cache memory: not used: " in caplog.text
    assert "is not used" in dataset.loading_remarks()[0]
