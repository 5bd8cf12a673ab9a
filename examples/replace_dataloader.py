"""Change one import: the same training script with torch's DataLoader and with ours.

``train`` below is an ordinary script; it is run with ``torch.utils.data.DataLoader`` (before) and
with ``spdl_torch.DataLoader`` (after), then with ``spdl_torch.ImageFolder`` too, the second import
that image folders can change. A comparison of the batches comes first: before and after they are
equal bit for bit, and so are the losses; our ImageFolder's differ by at most one level of 255,
because it resizes without Pillow.

    python examples/replace_dataloader.py [--data DIR] [--images N] [--workers N] [--smoke]

DIR is a folder of class folders of images, ``train/`` of ImageNet say; without it photographs are
made. It prints for each variant the seconds until the first batch of a fresh loader, the images a
second after it, and the loss of the last step. The model is a small one, so that the rate is that
of loading.

Exit code: 1 if batches that should be equal are not, 2 if there is no such folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
import torchvision.datasets
from torch import nn
from torchvision import transforms

import spdl_torch
from spdl_torch.autotune import Limits
from spdl_torch.demo.photographs import write_photographs


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    num_cores = max(1, int(Limits.of_this_machine().num_cores))
    parser.add_argument("--data", type=Path, metavar="DIR", help="default: made photographs")
    parser.add_argument("--images", type=int, default=1000, help="at most (default: 1000)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=min(num_cores, 8))
    parser.add_argument("--smoke", action="store_true", help="48 images in batches of 8")
    options = parser.parse_args()
    if options.smoke:
        options.images, options.batch_size = min(options.images, 48), 8
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data {options.data}: there is no such folder of class folders.")
    return options


TRANSFORM = transforms.Compose(
    [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
)


def make_loader(DataLoader: Any, ImageFolder: Any, options: argparse.Namespace) -> Any:
    """Return the usual loader of a script; a generator makes the order repeatable."""
    dataset = ImageFolder(options.data, TRANSFORM)
    chosen = range(0, len(dataset), -(-len(dataset) // options.images))
    return DataLoader(
        torch.utils.data.Subset(dataset, chosen),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        generator=torch.Generator().manual_seed(0),
    )


def train(DataLoader: Any, ImageFolder: Any, options: argparse.Namespace) -> tuple[float, ...]:
    """Train a small model for one epoch. Return the seconds until the first batch, the images a
    second after it, and the last loss."""
    torch.manual_seed(0)
    loader = make_loader(DataLoader, ImageFolder, options)
    num_classes = len(loader.dataset.dataset.classes)
    model = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(3 * 7 * 7, num_classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_images, begin = 0, time.perf_counter()
    for images, targets in loader:
        if num_images == 0:
            first = time.perf_counter()
            num_first = len(images)
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        num_images += len(images)
    seconds = time.perf_counter() - first
    return first - begin, (num_images - num_first) / seconds, loss.item()


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest difference between the pixels (0 to 1) of two loaders' batches; infinite
    if targets differ."""
    largest = 0.0
    for (images, targets), (others, other_targets) in zip(one, other, strict=True):
        if not torch.equal(targets, other_targets):
            return float("inf")
        largest = max(largest, (images - others).abs().max().item())
    return largest


BEFORE = (torch.utils.data.DataLoader, torchvision.datasets.ImageFolder)
AFTER = (spdl_torch.DataLoader, torchvision.datasets.ImageFolder)
BOTH = (spdl_torch.DataLoader, spdl_torch.ImageFolder)
ONE_LEVEL = 1.001 / 255


def main(options: argparse.Namespace) -> int:
    """Compare the batches, then run the three variants."""
    print("largest difference of a pixel, from torch's DataLoader and torchvision's ImageFolder:")
    equal = True
    for name, classes, allowed in (
        ("our DataLoader", AFTER, 0.0),
        ("our DataLoader and ImageFolder", BOTH, ONE_LEVEL),
    ):
        before = make_loader(*BEFORE, options)
        difference = largest_difference(before, make_loader(*classes, options))
        equal = equal and difference <= allowed
        print(f"  {name}: " + (f"{255 * difference:.0f} of 255" if difference else "none"))
    print(f"\n{'':32}{'first batch':>12}{'images/s':>10}{'last loss':>11}")
    for name, classes in (
        ("torch.utils.data.DataLoader", BEFORE),
        ("spdl_torch.DataLoader", AFTER),
        ("... and spdl_torch.ImageFolder", BOTH),
    ):
        first, rate, loss = train(*classes, options)
        print(f"{name:32}{first:10.2f} s{rate:10.0f}{loss:11.5f}")
    if not equal:
        print("batches that should be equal are not", file=sys.stderr)
    return 0 if equal else 1


if __name__ == "__main__":
    given = parse()
    with tempfile.TemporaryDirectory() as made:
        if given.data is None:
            given.data = Path(made)
            write_photographs(given.data, min(given.images, 400))
        sys.exit(main(given))
