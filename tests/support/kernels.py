"""The ways in which the batch kernel runs."""

import contextlib
import functools
import getpass
import shutil
import tempfile
from pathlib import Path

import pytest

from spdl_torch.io._image import extension, kernel

WAYS = ["TorchScript", "eager", *(["extension"] if shutil.which("c++") else [])]


@functools.cache
def compiled(way):
    """What calls the kernel's functions; None = Python itself. The extension is built once for all
    runs of these tests, in 10 seconds, if the package has none."""
    if way == "extension" and extension.load() is None:
        folder = Path(tempfile.gettempdir(), f"pytest-of-{getpass.getuser()}", "spdl_torch")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / extension.library_path().name
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(extension, "library_path", lambda: path)
            if not path.is_file():
                extension.build()
            extension.load.cache_clear()
            extension.load()
    ways = {"TorchScript": kernel._scripted, "extension": extension.load, "eager": lambda: None}
    return ways[way]()


@contextlib.contextmanager
def running(way):
    """The batch kernel runs in this way alone."""
    own = compiled(way)
    assert (own is None) == (way == "eager")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "_compiled", lambda: own)
        yield
