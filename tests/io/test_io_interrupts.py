"""What a signal's handler raises while something is read is for whoever has set it."""

import bz2
import itertools
import signal

import fsspec
import numpy as np
import pytest
from PIL import Image
from support.at_call import AtCall, TooLate
from support.datasets import Indices
from support.tars import tar_of

from spdl_torch.data import cached
from spdl_torch.data.sources import TarShards
from spdl_torch.io import load_image, load_npz


def picture(folder):
    Image.new("P", (9, 7), 3).save(folder / "a.png")
    return lambda: load_image(folder / "a.png", 4, 4).tolist()


def archive(folder):
    np.savez_compressed(folder / "a.npz", a=np.arange(3), b=np.ones((2, 2)))
    return lambda: {name: array.tolist() for name, array in load_npz(folder / "a.npz").items()}


def shard(pack):
    content = pack(tar_of((f"{number}.bin", bytes(700)) for number in range(3)))
    fsspec.filesystem("memory").pipe("/interrupted", content)
    return lambda: [*TarShards("memory://interrupted", on_error="skip")]


def cache(folder):
    kept = cached(Indices(4), folder, version=1)
    made = [kept[index] for index in range(4)]
    return lambda: [kept[index] for index in range(4)] + made


WAYS = {
    "picture": picture,
    "archive": archive,
    "shard": lambda _: shard(bytes),
    "packed shard": lambda _: shard(bz2.compress),
    "cache": cache,
}


# Where Python itself drops what is raised: in a finalizer.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_too_late")
@pytest.mark.parametrize("way", WAYS)
def test_error_of_a_handler_comes_through(way, tmp_path, caplog):
    """Nothing takes it for damage, a lost connection or a full disk, or leaves anything out."""
    read = WAYS[way](tmp_path)
    expected, num_raised = read(), 0
    for place in itertools.count(1, 2):
        try:
            with AtCall(place, signal.SIGUSR1) as at_call:
                found = read()
            assert found == expected, at_call.where
        except TooLate:
            num_raised += 1
        if at_call.where is None:
            break
    assert num_raised > place // 3
    assert not caplog.records
