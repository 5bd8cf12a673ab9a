"""Loads what needs no PyAV where there is none, and says what happens to the rest, as JSON.

A program of its own: ``python tests/helpers/_without_av.py`` takes an installed wheel, too.
"""

import importlib
import json
import pkgutil
import sys
import tempfile
from pathlib import Path

NEEDS_AV = ("spdl_torch.io._video", "spdl_torch.check_gpu.clips")
HEAVY = ("lightning", "accelerate", "transformers", "__main__")
"""Modules that import an extra's library, or run."""


class NoAV:
    """Finds no PyAV, wherever it may lie."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "av":
            raise ModuleNotFoundError("No module named 'av'", name="av")


def not_imported():
    """The modules that cannot be imported, and why."""
    import spdl_torch

    found, left_out = {}, {f"spdl_torch.{name}" for name in HEAVY}
    packages = pkgutil.walk_packages(spdl_torch.__path__, "spdl_torch.", onerror=lambda _: None)
    for name in (each.name for each in packages if each.name not in left_out):
        try:
            importlib.import_module(name)
        except Exception as error:
            found[name] = str(error)
    return found


def write_data(folder):
    """Write pictures of two classes, as JPEG and PNG, and arrays."""
    import numpy as np
    from PIL import Image

    picture = np.arange(24 * 32 * 3, dtype=np.uint8).reshape(24, 32, 3)
    for name in ("cat/1.jpg", "cat/2.png", "dog/1.jpg", "dog/2.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(picture).save(folder / name)
    np.savez(folder / "arrays.npz", picture=picture)


def loaded(folder):
    """The classes and shapes of batches from each seat, and of what io reads."""
    from torchvision import transforms

    from spdl_torch import DataLoader, ImageFolder
    from spdl_torch.io import load_image_batch, load_npz

    change = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])
    data = ImageFolder(folder, change)
    seats = {
        "none": {"num_workers": 0},
        "threads": {"num_workers": 2, "isolation": "thread"},
        "processes": {"num_workers": 2, "isolation": "process"},
    }
    found = {}
    for seat, options in seats.items():
        ((images, labels),) = DataLoader(data, batch_size=4, **options)
        found[seat] = [list(images.shape), labels.tolist()]
    found["batch"] = list(load_image_batch([folder / "cat/1.jpg"], width=16, height=8).shape)
    found["npz"] = list(load_npz(folder / "arrays.npz")["picture"].shape)
    return found


def refused(folder):
    """The errors of what needs PyAV."""
    from spdl_torch import io
    from spdl_torch.spdl import io as spdl_io

    uses = {
        "load_video": lambda: io.load_video(b""),
        "load_audio": lambda: io.load_audio(b""),
        "load_clip": lambda: io.load_clip(b"", None),
        "filter_desc": lambda: spdl_io.load_image(folder / "cat/1.jpg", filter_desc="vflip"),
        "get_ffmpeg_versions": lambda: spdl_io.utils.get_ffmpeg_versions(),
    }
    found = {}
    for name, use in uses.items():
        try:
            use()
            found[name] = "no error"
        except ModuleNotFoundError as error:
            found[name] = str(error)
    return found


def main():
    """Run all."""
    sys.meta_path.insert(0, NoAV())
    with tempfile.TemporaryDirectory() as name:
        write_data(folder := Path(name))
        facts = {"loaded": loaded(folder), "refused": refused(folder)}
    facts["not_imported"] = not_imported()
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
