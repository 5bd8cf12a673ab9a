"""Fine-tune an image classifier from Parquet files that hold the images, as the Hugging Face hub
stores them: columns ``image`` (its bytes and path) and ``label``.

    python examples/finetune_parquet.py FILE_OR_FOLDER [--pretrained] [--checkpoint FILE]

FILE_OR_FOLDER may be a URL such as hf://datasets/OWNER/NAME/data/train-*.parquet; without it, 64
photographs are made. At the end, also by Ctrl-C, the checkpoint has model, optimizer and the
loader's state; where there is one, training goes on from it, with the next batch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.transforms import v2

from spdl_torch import DataLoader
from spdl_torch.data.sources import Parquet
from spdl_torch.demo.photographs import write_photographs
from spdl_torch.io import decode_image


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", help="default: made photographs")
    parser.add_argument("--pretrained", action="store_true", help="begin with ImageNet's weights")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="default: none")
    parser.add_argument("--smoke", action="store_true", help="one epoch of two batches")
    options = parser.parse_args()
    if options.smoke:
        options.epochs, options.batch_size, options.workers, options.pixels = 1, 8, 2, 64
    return options


class Images:
    """The rows of Parquet files, decoded and augmented."""

    thread_safe = True  # reading and decoding share nothing that changes

    def __init__(self, data: str, pixels: int) -> None:
        self.rows = Parquet(data, ["image", "label"])
        self.num_classes = 1 + max(int(row["label"]) for row in Parquet(data, ["label"]))
        crop = v2.RandomResizedCrop(pixels, antialias=True)
        scaled = v2.ToDtype(torch.float32, scale=True)
        self.augment = v2.Compose([crop, v2.RandomHorizontalFlip(), scaled])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        """Return a batch's samples: each row group that they are in is read once."""
        rows = self.rows.__getitems__(indices)
        return [(self.augment(decode_image(row["image"])), int(row["label"])) for row in rows]


def make_table(folder: str, count: int) -> str:
    """Write made photographs into a Parquet file; return its path."""
    import pyarrow
    import pyarrow.parquet

    write_photographs(Path(folder, "photographs"), count)
    paths = sorted(Path(folder).glob("photographs/*/*"))
    classes = sorted({path.parent.name for path in paths})
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    labels = [classes.index(path.parent.name) for path in paths]
    table = pyarrow.table({"image": images, "label": labels})
    pyarrow.parquet.write_table(table, f"{folder}/images.parquet", row_group_size=16)
    return f"{folder}/images.parquet"


def train(options: argparse.Namespace) -> None:
    """Train, save, and say how it goes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset: Any = Images(options.data, options.pixels)
    loader: Any = DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        generator=torch.Generator().manual_seed(0),  # its state is in the loader's
        seed=0,
    )
    model = torchvision.models.resnet18(weights="DEFAULT" if options.pretrained else None)
    model.fc = nn.Linear(model.fc.in_features, dataset.num_classes)
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    epoch = first = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        epoch = first = saved["epoch"]
    try:
        for epoch in range(first, options.epochs):
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss of the last batch {loss.item():.3f}")
            print(loader.report())
        epoch = options.epochs
    finally:
        if options.checkpoint is not None:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "epoch": epoch}, options.checkpoint)


if __name__ == "__main__":
    given = parse()
    with tempfile.TemporaryDirectory() as made:
        given.data = given.data or make_table(made, 16 if given.smoke else 64)
        train(given)
