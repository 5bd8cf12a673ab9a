"""The loader of a training script: ImageNet's recipe over a folder of photographs."""

from __future__ import annotations

from typing import Any, Literal

BATCH = 32


Arrangement = Literal["threads", "processes", "fork", "spawn"]
"""Ours with our ImageFolder, which loads on threads, or with torchvision's, which loads in
processes, both by default; torch's loader with workers that are forked or spawned."""


def import_all(arrangement: Arrangement) -> None:
    """Import what :func:`recipe_loader` needs, for those who do not measure it."""
    import torchvision  # noqa: F401 - only its import is wanted

    if arrangement in ("threads", "processes"):
        from spdl_torch import DataLoader, ImageFolder  # noqa: F401 - only their import is wanted


def recipe_loader(
    folder: str, *, num_workers: int, arrangement: Arrangement, num_samples: int | None = None
) -> Any:
    """Return the loader: RandomResizedCrop to 224 x 224, flip, to tensor, normalise; shuffled
    batches of 32.

    num_samples: repeats the folder's pictures up to this many; None = each once.
    """
    import torch.utils.data
    from torchvision import datasets, transforms

    recipe = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": num_workers}
    loader_class: Any = torch.utils.data.DataLoader
    folder_class: Any = datasets.ImageFolder
    if arrangement in ("threads", "processes"):
        from spdl_torch import DataLoader, ImageFolder

        loader_class = DataLoader
        folder_class = ImageFolder if arrangement == "threads" else folder_class
    else:
        options["multiprocessing_context"] = arrangement
    dataset = folder_class(folder, recipe)
    if num_samples is not None:
        indices = [index % len(dataset) for index in range(num_samples)]
        dataset = torch.utils.data.Subset(dataset, indices)
    return loader_class(dataset, **options)
