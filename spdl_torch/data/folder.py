"""An image folder whose standard recipes run a batch in two calls that release the GIL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torchvision.datasets

from spdl_torch.io._image.codec import check_codec, image_codec
from spdl_torch.io._image.decode import decode_image, to_pil
from spdl_torch.io._image.images import image_loader, load_planned
from spdl_torch.io._image.kernel import is_compiled
from spdl_torch.io._image.recipe import Recipe, recognise

if TYPE_CHECKING:
    import os
    from contextlib import AbstractContextManager

    from PIL.Image import Image
    from torch import Tensor

    from spdl_torch.io._image.codec import Codec
    from spdl_torch.io._image.kernel import Plan

__all__ = ["CollatedSamples", "ImageFolder"]

SampleContext = Callable[[int], "AbstractContextManager[torch.Generator | None]"]


class CollatedSamples(list[tuple[Any, Any]]):
    """The samples of a batch, with the batch that they are views of.

    It is an ordinary list for every collate function; ``default_collate`` can be skipped if
    ``collated`` is set.
    """

    collated: tuple[Tensor, Tensor] | None = None
    """The result of ``default_collate`` for the list: images (N, 3, H, W) and targets (int64, shape
    (N,)). None: call ``default_collate``."""


def load_pil_image(path: str | os.PathLike[str]) -> Image:
    """Decode an image file for transforms that take Pillow images.

    Raises: as :func:`spdl_torch.io.decode_image`.
    """
    return to_pil(decode_image(path))


class ImageFolder(torchvision.datasets.ImageFolder):  # type: ignore[misc]
    """``torchvision.datasets.ImageFolder`` with faster images: same arguments, same samples.

    The start of the transform runs on a whole batch at a time, without the GIL, if it is
    ``RandomResizedCrop`` or ``Resize`` + ``CenterCrop`` or ``Resize((h, w))``, each bilinear, then
    optionally ``RandomHorizontalFlip`` (of ``torchvision.transforms`` or its ``v2``). Following
    ``ToTensor``, ``PILToTensor``, ``ToImage``, ``ToDtype``, ``ConvertImageDtype`` and ``Normalize``
    run on the whole batch too; the rest runs sample by sample, on the same input as ever (before
    ``ToTensor`` and the like, a Pillow image).

    Any other transform gets the Pillow image of each file or, with ``loader=image_loader``, the
    uint8 tensor (3, H, W). With any other ``loader`` this class behaves like torchvision's.

    Random numbers are drawn as torchvision draws them: ``dataset[i]`` with the same random state
    has the same crop and flip, and pixels within one level (of 255) of Pillow's.

    ``codec`` is that of :func:`spdl_torch.io.load_image_batch`: libjpeg-turbo decodes only the
    random crop of a JPEG. Neither samples nor random numbers depend on it.

    Raises (on access): DecodeError: a file cannot be decoded; OSError: it cannot be read.
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
        codec: Codec = "auto",
    ) -> None:
        check_codec(codec, "ImageFolder")
        self.codec: Codec = codec
        super().__init__(
            root,
            transform=transform,
            target_transform=target_transform,
            loader=loader,
            is_valid_file=is_valid_file,
            allow_empty=allow_empty,
        )
        is_compiled()  # compile the kernel now: that takes 7 ms, otherwise of the first batch

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Load one sample: the transformed image, and the target."""
        recipe = self._recipe()
        if recipe is None:
            return super().__getitem__(index)  # type: ignore[no-any-return]
        return self._load([index], recipe, None)[0]

    def __getitems__(self, indices: Sequence[int]) -> CollatedSamples:
        """Load many samples, as ``[self[i] for i in indices]`` would, in one call if possible."""
        # A subclass that extends __getitem__ (to add the path, say) must see every sample.
        overridden = type(self).__getitem__ is not ImageFolder.__getitem__
        recipe = None if overridden else self._recipe()
        if recipe is None or len(indices) == 0 or not self._may_batch(recipe):
            samples = CollatedSamples()
            for k, index in enumerate(indices):
                with self._stream(k):
                    samples.append(self[index])
            return samples
        return self._load(indices, recipe, self.sample_context)

    def loading_remarks(self) -> tuple[str, ...]:
        """Return the remark of a loader's report that says which library decodes."""
        if self.loader is not load_pil_image and self.loader is not image_loader:
            return ()
        recipe = self._recipe()
        library = image_codec(self.codec)
        if recipe is None or not recipe.crops_first or library == "torchvision":
            return ("fetch: JPEGs are decoded whole, by torchvision.",)
        return (f"fetch: of JPEGs only the part in the crop is decoded, by {library}.",)

    def _recipe(self) -> Recipe | None:
        """Return the recipe in the present transform; not cached, as users replace transforms."""
        if self.loader is load_pil_image or self.loader is image_loader:
            return recognise(self.transform, from_tensor=self.loader is image_loader)
        return None

    def _may_batch(self, recipe: Recipe) -> bool:
        """Return whether drawing all crops before all tails leaves each sample's numbers the same.

        With one random stream for all samples it does not if the tail may draw from it too.
        """
        if self.sample_context is not None:
            return True
        return recipe.is_batched and self.target_transform is None

    def _stream(self, k: int) -> AbstractContextManager[torch.Generator | None]:
        return contextlib.nullcontext() if self.sample_context is None else self.sample_context(k)

    def _load(
        self, indices: Sequence[int], recipe: Recipe, context: SampleContext | None
    ) -> CollatedSamples:
        """Run the kernel over the samples; ``context`` as in :attr:`sample_context`."""

        def stream(k: int) -> AbstractContextManager[torch.Generator | None]:
            return contextlib.nullcontext() if context is None else context(k)

        def plan(k: int, height: int, width: int) -> Plan:
            if not recipe.plans_draw:
                return recipe.plan(height, width)
            with stream(k) as generator:
                if generator is None:
                    return recipe.plan(height, width)
                with torch._C.DisableTorchFunction():  # the draws name their generator
                    return recipe.plan(height, width, generator)

        paths, targets = zip(*[self.samples[index] for index in indices], strict=True)
        pictures = load_planned(paths, plan, recipe.height, recipe.width, codec=self.codec)
        images = recipe.finish(pictures)
        if recipe.is_batched and self.target_transform is None:  # no user code, sample by sample
            samples = CollatedSamples(zip(images.unbind(), targets, strict=True))
        else:
            samples = CollatedSamples()
            for k, (image, target) in enumerate(zip(images, targets, strict=True)):
                with stream(k):
                    samples.append((recipe.finish_one(image), self._target(target)))
        labels = [target for _, target in samples]
        if recipe.is_batched and all(type(label) is int for label in labels):
            samples.collated = images, torch.tensor(labels, device="cpu")
        return samples

    def _target(self, target: int) -> Any:
        return target if self.target_transform is None else self.target_transform(target)
