"""The loader of a training script: ImageNet's recipe over a folder of photographs."""

from __future__ import annotations

from typing import Any

__all__ = ["BATCH", "import_all", "recipe_loader"]

BATCH = 32


def import_all(context: str | None) -> None:
    """Import what :func:`recipe_loader` needs, for those who do not measure it."""
    import torchvision  # noqa: F401 - only its import is wanted

    if context is None:
        from spdl_torch import DataLoader, ImageFolder  # noqa: F401 - only their import is wanted


def recipe_loader(
    folder: str, *, num_workers: int, context: str | None, num_samples: int | None = None
) -> Any:
    """RandomResizedCrop to 224 x 224, flip, to tensor, normalise; shuffled batches of 32.

    context: of torch's worker processes; None = our DataLoader over our ImageFolder. num_samples:
    the folder's pictures again and again; None = each once.
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
    if context is None:
        from spdl_torch import DataLoader, ImageFolder

        loader_class, folder_class = DataLoader, ImageFolder
    else:
        options["multiprocessing_context"] = context
    dataset = folder_class(folder, recipe)
    if num_samples is not None:
        indices = [index % len(dataset) for index in range(num_samples)]
        dataset = torch.utils.data.Subset(dataset, indices)
    return loader_class(dataset, **options)
