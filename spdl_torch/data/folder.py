"""An image folder whose standard recipes run a batch in two calls that release the GIL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torchvision.datasets
from torch import Generator

from spdl_torch.errors import UnsupportedOptionError
from spdl_torch.io._cache.memory import open_store
from spdl_torch.io._image.decode import decode_pil, decode_tensor
from spdl_torch.io._image.images import image_loader, load_planned
from spdl_torch.io._image.kernel import PicturePlan, Seeds, is_compiled
from spdl_torch.io._image.recipe import Recipe, recognise
from spdl_torch.io._source import read_source, source_name
from spdl_torch.io._storage import BatchStorage
from spdl_torch.machine.readings import has_gil

from ..loader.rng.dispatch import not_redirected
from ..loader.rng.streams import torch_seeds
from .caching import contents_of_files

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from spdl_torch.io._cache.store import Store

    from ..loader.rng.streams import SampleContext


class CollatedSamples(list[tuple[Any, Any]]):
    """The samples of a batch, with the batch that they are views of.

    It is an ordinary list for every collate function; ``default_collate`` can be skipped if
    ``collated`` is set.
    """

    collated: tuple[Tensor, Tensor] | None = None
    """The result of ``default_collate`` for the list: images (N, 3, H, W) and targets (int64, shape
    (N,)). None: call ``default_collate``."""


def load_pil_image(path: str | os.PathLike[str]) -> Image:
    """Return the image that ``PIL.Image.open(path).convert("RGB")`` does, decoded faster.

    Raises: as :func:`spdl_torch.io.decode_image`.
    """
    return decode_pil(read_source(path), source_name(path))


_NOT_COMPILED = (
    "Each photograph waits for the GIL several times, as torch has no TorchScript, or torchvision "
    "no decoders: python -m spdl_torch build-kernel mends it."
)
_LOADERS = (load_pil_image, image_loader)
"""Those that leave decoding to the class; a user's own is called for each file."""


class ImageFolder(torchvision.datasets.ImageFolder):  # type: ignore[misc]  # untyped in torchvision
    """``torchvision.datasets.ImageFolder`` with faster images: same arguments, same samples.

    The start of the transform runs on a whole batch at a time, without the GIL, if it is
    ``RandomResizedCrop`` or ``Resize`` + ``CenterCrop`` or ``Resize((h, w))``, each bilinear, then
    optionally ``RandomHorizontalFlip`` (of ``torchvision.transforms`` or its ``v2``). Following
    ``ToTensor``, ``PILToTensor``, ``ToImage``, ``ToDtype``, ``ConvertImageDtype`` and ``Normalize``
    run on the whole batch too; the rest runs sample by sample, on the same input as before (before
    ``ToTensor`` and the like, a Pillow image).

    Any other transform gets the Pillow image of each file or, with ``loader=image_loader``, the
    uint8 tensor (3, H, W). With any other ``loader`` this class behaves like torchvision's.

    Random numbers are drawn as torchvision draws them: ``dataset[i]`` with the same random state
    has the same crop and flip, and pixels within one level (of 255) of Pillow's.

    ``scaled=True`` decodes JPEGs of many megapixels at a reduced size, as that of
    :func:`spdl_torch.io.load_image_batch` does, for the transforms that run on a whole batch. The
    random numbers stay the same; the pixels do not.

    ``cache`` keeps the files' bytes: ``"memory"`` or a folder on a local disk, shared by all ranks
    and workers of the machine, so that a slow store is read once. ``max_bytes`` and ``version`` are
    those of :func:`spdl_torch.data.cached`, which keeps decoded samples.

    Raises: UnsupportedOptionError: ``cache`` or ``scaled`` with a ``loader`` of your own, or
        ``scaled`` with a transform that does not begin as above. On access: DecodeError: a file
        cannot be decoded; OSError: it cannot be read.
    """

    sample_context: SampleContext | None = None
    """The context of a sample's random stream, set by a loader that gives every sample its own.

    ``__getitems__`` enters ``sample_context(k)`` around everything random that it does for the
    k-th of its indices. It may enter it twice for one sample (crop and flip of all samples first,
    then the rest); the second time has to continue the stream where the first left it. The context
    yields torch's generator of that stream, or None if torch's functions draw from it by
    themselves.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        loader: Callable[[str], Any] = load_pil_image,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        *,
        scaled: bool = False,
        cache: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        version: str | int | None = None,
    ) -> None:
        if cache is not None and loader not in _LOADERS:
            raise UnsupportedOptionError(
                "ImageFolder: cache needs the bytes of files, which a loader of your own reads by "
                "itself. Leave loader out, or pass cached(ImageFolder(...), ...)."
            )
        if cache is None and (max_bytes, version) != (None, None):
            raise ValueError("ImageFolder: max_bytes and version are for a cache. Pass cache, too.")
        self.scaled = scaled
        super().__init__(root, transform, target_transform, loader, is_valid_file, allow_empty)
        # A transform may also be set later.
        may_scale = loader in _LOADERS and (transform is None or self._recipe() is not None)
        if scaled and not may_scale:
            raise UnsupportedOptionError(
                "ImageFolder: scaled=True needs loader=image_loader or none, and a transform that "
                "begins with a bilinear RandomResizedCrop, Resize and CenterCrop, or "
                f"Resize((height, width)), got {loader=} and {transform=}. Change these, or leave "
                "scaled out."
            )
        self._store_version = version
        self._store: Store | None = None
        if cache is not None:
            name = f"files of {os.path.abspath(self.root)}"
            self._store = open_store(
                cache, name, repr(version), max_bytes=max_bytes, who="ImageFolder"
            )
        is_compiled()  # compile the kernel now: that takes 7 ms, otherwise of the first batch

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Load one sample: the transformed image, and the target."""
        recipe = self._recipe()
        if recipe is None and self._store is None:
            return super().__getitem__(index)  # type: ignore[no-any-return]  # untyped in torchvision
        if recipe is None:
            return self._load_cached(index)
        return self._load([index], recipe, None)[0]

    def __getitems__(self, indices: Sequence[int]) -> CollatedSamples:
        """Load many samples, as ``[self[i] for i in indices]`` would, in one call if possible."""
        # A subclass that extends __getitem__ (to add the path, say) must see every sample.
        overridden = type(self).__getitem__ is not ImageFolder.__getitem__
        recipe = None if overridden else self._recipe()
        if recipe is None or len(indices) == 0 or not self._may_batch(recipe):
            samples = CollatedSamples()
            for k, index in enumerate(indices):
                with _stream(self.sample_context, k):
                    samples.append(self[index])
            return samples
        # A loader may offer memory from which the batch goes to the device as it is.
        return self._load(indices, recipe, self.sample_context, BatchStorage())

    def loading_remarks(self) -> tuple[str, ...]:
        """Return the remarks for a loader's report: hits and misses of the cache; what is slow."""
        remarks = () if self._store is None else (self._store.remark(),)
        is_slow = has_gil() and self._recipe() is not None and not is_compiled()
        return (*remarks, _NOT_COMPILED) if is_slow else remarks

    def loading_counts(self) -> dict[str, int]:
        """Return the files that were found in the cache, and that were not, in this process."""
        return {} if self._store is None else self._store.counts()

    def _recipe(self) -> Recipe | None:
        """Return the recipe in the present transform; not cached, as users replace transforms."""
        if self.loader not in _LOADERS:
            return None
        return recognise(self.transform, from_tensor=self.loader is image_loader)

    def _may_batch(self, recipe: Recipe) -> bool:
        """Return whether drawing all crops before all tails leaves each sample's numbers the same.

        With one random stream for all samples it does not if the tail may draw from it too.
        """
        if self.sample_context is not None:
            return True
        return recipe.is_batched and self.target_transform is None

    def _load(
        self,
        indices: Sequence[int],
        recipe: Recipe,
        context: SampleContext | None,
        storage: BatchStorage | None = None,
    ) -> CollatedSamples:
        """Run the kernel over the samples; ``context`` as in :attr:`sample_context`."""
        # No user code runs sample by sample, so nothing but the kernel draws.
        is_kernels = recipe.is_batched and self.target_transform is None

        def plan(sizes: dict[int, tuple[int, int]]) -> list[PicturePlan]:
            if context is None or not recipe.plans_draw:
                return recipe.plans([*sizes.values()])
            if is_kernels and (seeds := torch_seeds(context, sizes)) is not None:
                return _drawn(recipe, [*sizes.values()], Seeds(seeds))
            plans = []
            for k, size in sizes.items():
                with context(k) as generator:
                    if generator is None:  # torch's functions draw from it by themselves
                        plans += recipe.plans([size])
                    else:
                        plans += _drawn(recipe, [size], [generator])
            return plans

        paths, targets = zip(*[self.samples[index] for index in indices], strict=True)
        pictures = load_planned(
            self._contents(paths),
            plan,
            recipe.height,
            recipe.width,
            scaled=self.scaled,
            storage=storage if recipe.keeps_bytes else None,
            names=paths,
        )
        images = recipe.finish(pictures, storage if recipe.is_batched else None)
        if is_kernels:
            samples = CollatedSamples(zip(images.unbind(), targets, strict=True))
        else:
            samples = CollatedSamples()
            for k, (image, target) in enumerate(zip(images, targets, strict=True)):
                with _stream(context, k):
                    samples.append((recipe.finish_one(image), self._target(target)))
        labels = [target for _, target in samples]
        if recipe.is_batched and all(type(label) is int for label in labels):
            samples.collated = images, torch.tensor(labels, device="cpu")
        return samples

    def _load_cached(self, index: int) -> tuple[Any, Any]:
        """Load one sample as torchvision does, from the cache."""
        path, target = self.samples[index]
        (content,) = self._contents([path])
        decode = decode_pil if self.loader is load_pil_image else decode_tensor
        image: Any = decode(content, path)
        return image if self.transform is None else self.transform(image), self._target(target)

    def _contents(self, paths: Sequence[str]) -> Sequence[Any]:
        """Return the bytes of files from the cache; without one, the paths as they are."""
        if self._store is None:
            return paths
        return contents_of_files(self._store, paths, self._store_version)

    def _target(self, target: int) -> Any:
        return target if self.target_transform is None else self.target_transform(target)


def _stream(context: SampleContext | None, k: int) -> AbstractContextManager[Generator | None]:
    return contextlib.nullcontext() if context is None else context(k)


def _drawn(
    recipe: Recipe, sizes: list[tuple[int, int]], generators: list[Generator] | Seeds
) -> list[PicturePlan]:
    """Return the plans of pictures from one generator or seed each."""
    # The draws name their generators: nobody has to look at each, for which compiled code would
    # take the GIL again.
    with torch._C.DisableTorchFunction(), not_redirected():
        return recipe.plans(sizes, generators)
