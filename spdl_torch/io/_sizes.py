"""The size of a picture or frame of which only one side is asked for."""

from __future__ import annotations

import operator


def check_size(width: int | None, height: int | None, where: str) -> None:
    """Raise a TypeError unless both are whole numbers, or None, and a ValueError below 1."""
    for name, pixels in (("width", width), ("height", height)):
        if pixels is None:
            continue
        try:
            operator.index(pixels)
        except TypeError:
            raise TypeError(
                f"{where}: {name} must be an int or None, in pixels, got {pixels!r}. "
                "Convert it with int()."
            ) from None
    if any(pixels is not None and pixels < 1 for pixels in (width, height)):
        raise ValueError(f"width and height must be >= 1 or None, got {width=}, {height=}.")


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
