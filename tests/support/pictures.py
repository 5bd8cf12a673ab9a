"""One picture in every kind of file that is decoded."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def photograph(height=61, width=97, seed=0, *, noise=8):
    """Smooth colours with some noise, so that every codec has something to do."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=int)
    noisy = smooth + rng.integers(-noise, noise + 1, smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def encode(image, file_format, **options):
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def png_chunk(kind, content):
    crc = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + crc


def png(width, height, bits, colour, rows):
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(rows))
        + png_chunk(b"IEND", b"")
    )


def png16(colour, channels, seed=0):
    """A 16-bit PNG of random samples, 20 wide and 10 high, and its samples."""
    samples = np.random.default_rng(seed).integers(0, 1 << 16, (10, 20, channels))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    return png(20, 10, 16, colour, rows), samples


def without_segment(jpeg, marker):
    start = jpeg.index(b"\xff" + bytes([marker]))
    (length,) = struct.unpack(">H", jpeg[start + 2 : start + 4])
    return jpeg[:start] + jpeg[start + 2 + length :]


def ycck(jpeg):
    """The same samples, declared as YCCK by the Adobe segment."""
    start = jpeg.index(b"\xff\xee")
    return jpeg[: start + 15] + b"\x02" + jpeg[start + 16 :]


def kinds():
    photo = photograph()
    alpha = photo.convert("RGBA")
    alpha.putalpha(Image.linear_gradient("L").resize(photo.size))
    cmyk = encode(photo.convert("CMYK"), "JPEG")
    first, *others = (Image.new("RGB", (30, 20), (40 * i, 200 - 40 * i, 9)) for i in range(4))
    frames = {"save_all": True, "append_images": others}
    exif = Image.Exif()
    exif[0x112] = 6
    exif[0x10E] = "a long description " * 100
    return {
        "jpeg": encode(photo, "JPEG", quality=90),
        "jpeg progressive": encode(photo, "JPEG", progressive=True),
        "jpeg 4:4:4": encode(photo, "JPEG", subsampling=0),
        "jpeg stored as RGB": encode(photo, "JPEG", keep_rgb=True),
        "jpeg gray": encode(photo.convert("L"), "JPEG"),
        "jpeg CMYK": cmyk,
        "jpeg CMYK without Adobe segment": without_segment(cmyk, 0xEE),
        "jpeg YCCK": ycck(cmyk),
        "jpeg with EXIF": encode(photo, "JPEG", exif=exif),
        "jpeg with trailing garbage": encode(photo, "JPEG") + b"garbage" * 9,
        "jpeg of one pixel": encode(photo.resize((1, 1)), "JPEG"),
        "png": encode(photo, "PNG"),
        "png gray": encode(photo.convert("L"), "PNG"),
        "png 1 bit": encode(photo.convert("1"), "PNG"),
        "png palette": encode(photo.quantize(), "PNG"),
        "png palette of 4 bits": encode(photo.quantize(16), "PNG", bits=4),
        "png palette, transparent": encode(photo.quantize(16), "PNG", transparency=3),
        "png RGB, transparent": encode(photo, "PNG", transparency=(1, 2, 3)),
        "png alpha": encode(alpha, "PNG"),
        "png gray alpha": encode(alpha.convert("LA"), "PNG"),
        "png 16-bit RGB": png16(2, 3)[0],
        "png 16-bit gray alpha": png16(4, 2)[0],
        "png 16-bit alpha": png16(6, 4)[0],
        "webp": encode(photo, "WEBP"),
        "webp lossless": encode(photo, "WEBP", lossless=True),
        "webp alpha": encode(alpha, "WEBP", lossless=True),
        "webp animated": encode(first, "WEBP", **frames),
        "gif": encode(photo.quantize(), "GIF"),
        "gif animated": encode(first, "GIF", **frames),
        "bmp": encode(photo, "BMP"),
        "tiff": encode(photo, "TIFF"),
        "tiff CMYK": encode(photo.convert("CMYK"), "TIFF"),
        "ppm": encode(photo, "PPM"),
    }


KINDS = kinds()
