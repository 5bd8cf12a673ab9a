"""The batch kernel as an extension of torch: built by a command, loaded where it was built.

``kernel.cpp`` has the kernel's functions as operators of torch. It outlives TorchScript, and
torchvision's decoders where torchcodec is installed. It needs nothing of Python's, so that one
library serves every Python beside the same torch.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...handlers import unless_of_handler

_SOURCE = Path(__file__).with_name("kernel.cpp")


def library_path() -> Path:
    """Return where the library lies, built or not: beside its source, as only those who install the
    package may write there. The name tells it from those for another source, torch or machine.
    """
    key = _SOURCE.read_bytes(), torch.__version__, torch.version.git_version, platform.machine()
    return _SOURCE.with_name(f"kernel-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.so")


@functools.lru_cache(maxsize=1)
def load() -> Callable[..., Any] | None:
    """Return what calls the kernel's functions by name; None where the library was not built."""
    try:
        torch.ops.load_library(library_path())  # type: ignore[no-untyped-call]  # untyped in torch
    except unless_of_handler(OSError):
        return None  # not built, or on another system
    operators = torch.ops.spdl_torch_images
    # Their only form, by name: torch looks through all arguments to find it otherwise.
    return lambda name, *args: getattr(operators, name).default(*args)


def build() -> Path:
    """Build the library for this torch, in 10 to 30 seconds; return its path.

    Raises: OSError: there is no compiler, or the folder cannot be written to; CalledProcessError:
        the compiler has failed, and has said why.
    """
    path, torch_folder = library_path(), Path(torch.__file__).parent
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    options = ["-std=c++20", "-O2", "-fPIC", "-shared", f"-I{torch_folder / 'include'}"]
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    # In a folder of its own until it is whole: others may build or load it at the same time.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder, path.name)
        subprocess.run([*compiler, *options, _SOURCE, "-o", built, *libraries], check=True)
        built.replace(path)
    return path
