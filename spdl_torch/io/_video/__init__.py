"""Video and sound: packets, frames and clips, by PyAV, which nothing outside of this room needs."""

try:
    import av as av
except ModuleNotFoundError as error:
    if error.name != "av":
        raise
    raise ModuleNotFoundError(
        "Video, sound and FFmpeg's filters are read by PyAV, which is not installed: "
        "pip install 'av>=18'. Images, arrays and tensors load without it.",
        name="av",
    ) from None
