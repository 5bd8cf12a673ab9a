"""The peers: whether they are installed, how to install them, and SPDL's decoder."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spdl_torch.machine.limits import whole_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

PEERS = {
    "spdl": ("SPDL", "spdl"),
    "torchdata": ("torchdata", "torchdata"),
    "torchcodec": ("torchcodec", "torchcodec"),
    "simplejpeg": ("simplejpeg", "simplejpeg"),
    "webdataset": ("WebDataset", "webdataset"),
    "grain": ("Grain", "grain"),
    "matplotlib": ("matplotlib", "matplotlib"),
    # Linux on x86-64 and arm64 only, and 1 GB with its dependencies, so it is in no extra.
    "nvidia.dali": ("DALI", "nvidia-dali-cuda120"),
}
"""Module: the name that people use, and the distribution, all but DALI in the extra bench."""

_LIBRARIES = {"cv2": ("OpenCV", "opencv-python-headless")}
"""The same for libraries that datasets are read with, where the module has another name."""


def imported(module: str) -> Any:
    """Return a peer's module, imported on use; untyped, since some peers ship no types."""
    return importlib.import_module(module)


def installed(module: str) -> bool:
    """Return whether a peer is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def left_out(module: str, name: str | None = None) -> str:
    """Return the line that explains why a peer's rows are missing, and how to install it."""
    known, package = {**PEERS, **_LIBRARIES}.get(module, (module, module))
    return f"{name or known} ({module}) is not installed, so it is left out: pip install {package}"


def machine(**more: object) -> dict[str, object]:
    """Describe the machine and the versions that were measured."""
    packages = {"torch": "torch", "torchvision": "torchvision"}
    packages |= {name: package for name, package in PEERS.values() if name != "matplotlib"}
    versions = {name: found for name, package in packages.items() if (found := _version(package))}
    return {"cores": whole_cores(), "Python": platform.python_version(), **versions, **more}


@contextlib.contextmanager
def spdl_decoder(wanted: bool = True) -> Iterator[str | None]:
    """Let fresh processes find the FFmpeg that SPDL's decoder needs; yields why it cannot be used.

    The machine's own FFmpeg comes first. Without one, the FFmpeg in PyAV's wheel serves: its
    libraries have other names, so they are linked under the names that SPDL looks for. Does nothing
    if ``wanted`` is False.
    """
    if not wanted:
        yield None
        return
    if not installed("spdl"):
        yield left_out("spdl")
        return
    before = os.environ.get("LD_LIBRARY_PATH")
    with tempfile.TemporaryDirectory(prefix="spdl-torch-bench-") as links:
        try:
            if not _spdl_decodes():
                places = [links]
                for library in pyav_libraries():
                    name, _, numbers = library.name.partition(".so.")
                    link = f"{name.rpartition('-')[0]}.so.{numbers.partition('.')[0]}"
                    (Path(links) / link).symlink_to(library)
                    places[1:] = [str(library.parent)]
                os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(places)
            yield None if _spdl_decodes() else "SPDL found no FFmpeg, so it is left out."
        finally:
            if before is None:
                os.environ.pop("LD_LIBRARY_PATH", None)
            else:
                os.environ["LD_LIBRARY_PATH"] = before


def _spdl_decodes() -> bool:
    code = "import spdl.io.lib; spdl.io.lib._import_libspdl()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def pyav_libraries() -> list[Path]:
    """Return the libraries that come with PyAV's wheel; [] where there is none."""
    found = importlib.util.find_spec("av")
    if found is None or found.origin is None:
        return []
    return sorted(Path(found.origin).parent.with_name("av.libs").glob("lib*-*.so.*"))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
