"""What a signal's handler raises while something is read is for whoever has set it."""

import io
import itertools
import signal
import tarfile

import fsspec
import numpy as np
import pytest
from PIL import Image
from support.at_call import AtCall, TooLate
from support.datasets import Indices

from spdl_torch.data import cached
from spdl_torch.data.sources import TarShards
from spdl_torch.io import load_image, load_npz


def picture(folder):
    Image.new("P", (9, 7), 3).save(folder / "a.png")
    return lambda: load_image(folder / "a.png", 4, 4).tolist()


def archive(folder):
    np.savez_compressed(folder / "a.npz", a=np.arange(3), b=np.ones((2, 2)))
    return lambda: {name: array.tolist() for name, array in load_npz(folder / "a.npz").items()}


def shard(kind, name):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=kind) as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.bin")
            member.size = 700
            tar.addfile(member, io.BytesIO(bytes(700)))
    fsspec.filesystem("memory").pipe(f"/interrupted/{name}", content.getvalue())
    return lambda: [*TarShards(f"memory://interrupted/{name}", on_error="skip")]


def cache(folder):
    kept = cached(Indices(4), folder, version=1)
    made = [kept[index] for index in range(4)]
    return lambda: [kept[index] for index in range(4)] + made


WAYS = {
    "picture": picture,
    "archive": archive,
    "shard": lambda _: shard("w", "a.tar"),
    "packed shard": lambda _: shard("w:bz2", "a.tar.bz2"),
    "cache": cache,
}


# Where Python itself drops what is raised: in a finalizer.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_too_late")
@pytest.mark.parametrize("way", WAYS)
def test_error_of_a_handler_comes_through(way, tmp_path, caplog):
    """Wherever it comes: nothing takes it for damage, for a lost connection or for a full disk, and
    nothing is left out."""
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
