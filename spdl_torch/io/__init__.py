"""Images from bytes to tensors, at Pillow's quality and without the GIL."""

from spdl_torch.io._decode import decode_image
from spdl_torch.io._geometry import Crop, random_resized_crop, random_resized_crop_params
from spdl_torch.io._images import image_loader, load_image, load_image_batch
from spdl_torch.io._source import ImageSource

__all__ = [
    "Crop",
    "ImageSource",
    "decode_image",
    "image_loader",
    "load_image",
    "load_image_batch",
    "random_resized_crop",
    "random_resized_crop_params",
]
