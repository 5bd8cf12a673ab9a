"""The peers: whether they are installed, how to install them, and SPDL's decoder."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from spdl_torch.machine.limits import whole_cores

PEERS = {
    "spdl": ("SPDL", "spdl"),
    "torchdata": ("torchdata", "torchdata"),
    "torchcodec": ("torchcodec", "torchcodec"),
    "simplejpeg": ("simplejpeg", "simplejpeg"),
    "grain": ("Grain", "grain"),
    "datasets": ("Hugging Face datasets", "datasets"),
    "webdataset": ("WebDataset", "webdataset"),
    "cv2": ("OpenCV", "opencv-python-headless"),
    "deflate": ("libdeflate", "deflate"),
}
"""Module: the name that people use, and the distribution."""


def imported(module: str) -> Any:
    """Return a peer's module, imported on use; untyped, since some peers ship no types."""
    return importlib.import_module(module)


def installed(module: str) -> bool:
    """Return whether a peer is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def left_out(module: str) -> str:
    """Return the line that explains why a peer's rows are missing, and how to install it."""
    name, package = PEERS.get(module, (module, module))
    return f"{name} ({module}) is not installed, so it is left out: pip install {package}"


def machine(**more: object) -> dict[str, object]:
    """Describe the machine and the versions that were measured."""
    packages = {"torch": "torch", "torchvision": "torchvision"}
    packages |= dict(PEERS.values())
    versions = {name: found for name, package in packages.items() if (found := _version(package))}
    return {"cores": whole_cores(), "Python": platform.python_version(), **versions, **more}


def find_spdl_decoder(folder: Path) -> None:
    """Let the processes that this one starts find the FFmpeg that SPDL's decoder needs.

    The machine's own FFmpeg comes first. Without one, the FFmpeg in PyAV's wheel serves: its
    libraries have other names, so they are linked, in ``folder``, under the names that SPDL looks
    for.
    """
    code = "import spdl.io.lib; spdl.io.lib._import_libspdl()"
    av = importlib.util.find_spec("av")
    if (
        subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
        or av is None
        or av.origin is None
    ):
        return
    libraries = Path(av.origin).parent.with_name("av.libs")
    for library in libraries.glob("lib*-*.so.*"):
        name, _, numbers = library.name.partition(".so.")
        link = f"{name.rpartition('-')[0]}.so.{numbers.partition('.')[0]}"
        (folder / link).symlink_to(library)
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, (folder, libraries)))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
