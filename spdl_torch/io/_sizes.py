"""The size of a picture or frame of which only one side is asked for."""

from __future__ import annotations

import operator


def check_size(
    width: int | None, height: int | None, where: str, *, may_be_none: bool = True
) -> None:
    """Raise a TypeError unless both are whole numbers, or None, and a ValueError below 1."""
    or_none = " or None" if may_be_none else ""
    for name, pixels in (("width", width), ("height", height)):
        if pixels is None and may_be_none:
            continue
        try:
            operator.index(pixels)  # type: ignore[arg-type]  # whatever was given
        except TypeError:
            raise TypeError(
                f"{where}: {name} must be an int{or_none}, in pixels, got {pixels!r}. "
                "Convert it with int()."
            ) from None
    if any(pixels is not None and pixels < 1 for pixels in (width, height)):
        raise ValueError(f"width and height must be >= 1{or_none}, got {width=}, {height=}.")


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
