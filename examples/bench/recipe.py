"""The photographs that tables load, and a training script's loader of them, by ImageNet's recipe.

torchvision is imported on use: workers that load other things come here, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import Subset

from .peers import imported

if TYPE_CHECKING:
    from .tables import BenchOptions

BATCH = 32
Arrangement = Literal["threads", "processes", "fork", "spawn"]
"""Ours with our ImageFolder, which loads on threads, or with torchvision's, which loads in
processes, both by default; torch's loader with workers that are forked or spawned."""


def photographs(options: BenchOptions, folder: Path) -> dict[str, Any]:
    """Return as settings the user's folder of photographs, or one of our own in ``folder``; read
    once, to cache them."""
    if options.data is None:
        from spdl_torch.demo.photographs import write_photographs

        write_photographs(folder / "photographs", 40 if options.smoke else 200)
    paths = jpegs(options.data or folder / "photographs")
    for path in paths:
        Path(path).read_bytes()
    return {"folder": str(Path(paths[0]).parents[1]), "files": len(paths)}


def jpegs(folder: Path | str) -> list[str]:
    """Return the JPEGs of a folder of class folders, sorted.

    Raises: SystemExit: there are none.
    """
    paths = sorted(map(str, Path(folder).glob("*/*")))
    found = [path for path in paths if path.lower().endswith((".jpg", ".jpeg"))]
    if not found:
        raise SystemExit(f"--data: {folder} must hold one folder of JPEGs per class, found none.")
    return found


def as_it_is(batch: Any) -> Any:
    """Return the batch: a collate function for datasets that make whole batches."""
    return batch


def recipe_classes(arrangement: Arrangement) -> tuple[Any, Any]:
    """Return the classes of the loader and of the folder, with all that they need imported."""
    loader = "spdl_torch" if arrangement in ("threads", "processes") else "torch.utils.data"
    folder = "spdl_torch" if arrangement == "threads" else "torchvision.datasets"
    imported("torchvision.transforms")
    return imported(loader).DataLoader, imported(folder).ImageFolder


def recipe_loader(
    folder: str, *, num_workers: int, arrangement: Arrangement, num_samples: int | None = None
) -> Any:
    """Return the loader: RandomResizedCrop to 224 x 224, flip, to tensor, normalise; shuffled
    batches of 32.

    num_samples: repeats the folder's pictures up to this many; None = each once.
    """
    from torchvision import transforms

    loader_class, folder_class = recipe_classes(arrangement)
    recipe = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    dataset = folder_class(folder, recipe)
    if num_samples is not None:
        dataset = Subset(dataset, [index % len(dataset) for index in range(num_samples)])
    options = {"multiprocessing_context": arrangement} if arrangement in ("fork", "spawn") else {}
    return loader_class(dataset, BATCH, shuffle=True, num_workers=num_workers, **options)
