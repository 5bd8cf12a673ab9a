"""PyAV is needed by video and sound alone: the rest loads where it is not installed."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
from pathlib import Path

class NoAV:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "av":
            raise ModuleNotFoundError("No module named 'av'", name="av")

def refused(use, *arguments):
    try:
        use(*arguments)
    except Exception as error:
        return "pip install 'av>=18'" in str(error) or repr(error)

sys.meta_path.insert(0, NoAV())

import numpy as np
from PIL import Image
from torchvision import transforms

import spdl_torch
from spdl_torch import DataLoader, ImageFolder, io
from spdl_torch.spdl import io as spdl_io

folder = Path(sys.argv[1])
picture = np.arange(24 * 32 * 3, dtype=np.uint8).reshape(24, 32, 3)
for name in ("cat/1.jpg", "cat/2.png", "dog/1.jpg", "dog/2.jpg"):
    (folder / name).parent.mkdir(exist_ok=True)
    Image.fromarray(picture).save(folder / name)
np.savez(folder / "arrays.npz", picture=picture)
steps = transforms.RandomResizedCrop(16), transforms.ToTensor()
data = ImageFolder(folder, transforms.Compose(steps))
for num_workers, isolation in ((0, "auto"), (2, "thread"), (2, "process")):
    loader = DataLoader(data, batch_size=4, num_workers=num_workers, isolation=isolation)
    ((images, labels),) = loader
    assert (images.shape, labels.tolist()) == ((4, 3, 16, 16), [0, 0, 1, 1])
first = folder / "cat/1.jpg"
assert io.load_image_batch([first], width=16, height=8).shape == (1, 8, 16, 3)
assert np.array_equal(io.load_npz(folder / "arrays.npz")["picture"], picture)

for use in (
    lambda: io.load_video(b""),
    lambda: io.load_audio(b""),
    lambda: io.load_clip(b"", None),
    lambda: spdl_io.load_image(first, filter_desc="vflip"),
    lambda: spdl_io.utils.get_ffmpeg_versions(),
):
    assert refused(use) is True, refused(use)

needing = {"spdl_torch.io._video"}
elsewhere = {"lightning", "accelerate", "transformers", "__main__"}  # an extra's library, or run
packages = pkgutil.walk_packages(spdl_torch.__path__, "spdl_torch.", onerror=lambda _: None)
found = {each.name: refused(importlib.import_module, each.name) for each in packages
         if each.name.removeprefix("spdl_torch.") not in elsewhere}
assert {name: why for name, why in found.items() if why} == dict.fromkeys(needing, True), found
"""


def test_all_but_video_and_sound_works_without_pyav(tmp_path):
    """Images of a folder in every seat, batches and archives; videos, sound, filters and FFmpeg's
    versions say what to install; and every other module can be imported."""
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM, tmp_path]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
