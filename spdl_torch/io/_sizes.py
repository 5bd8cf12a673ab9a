"""The size of a picture or frame of which only one side is asked for."""

from __future__ import annotations


def fitted_size(
    width: int | None, height: int | None, own_width: int, own_height: int
) -> tuple[int, int]:
    """Return width and height; if one is None the shape is kept, if both are, the size."""
    if width is None and height is None:
        return own_width, own_height
    if width is None:
        width = max(1, round(own_width * (height or 1) / own_height))
    if height is None:
        height = max(1, round(own_height * width / own_width))
    return width, height
