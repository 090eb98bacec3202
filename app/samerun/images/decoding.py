"""Strict decoding with Pillow. Broken, truncated and 16-bit images are errors that name the file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from samerun.errors import InputError, in_short, is_out_of_memory

GREY = ("1", "L", "LA", "La")
DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # more than 8 bits a channel
ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
Encoded = bytes | Path  # an undecoded image


class Header(NamedTuple):
    """Size in pixels, after EXIF rotation, and Pillow's mode."""

    width: int
    height: int
    mode: str

    @property
    def is_grey(self) -> bool:
        return self.mode in GREY or self.mode in DEEP


def read_header(encoded: Encoded, name: str) -> Header:
    """Reads an image's header without decoding its pixels. `name`: starts the message of an `InputError`."""
    with _opened(encoded, name) as image:
        width, height = image.size
        return (
            Header(height, width, image.mode)
            if _orientation(image) in TRANSPOSED
            else Header(width, height, image.mode)
        )


def decode(encoded: Encoded, name: str, mode: str) -> Image.Image:
    """An image in `mode`, "L" or "RGB". Applies the EXIF rotation and the palette, drops an alpha channel.

    Raises `InputError`, starting with `name`, if it is broken, truncated or has more than 8 bits per channel.
    """
    image = _decoded(encoded, name)
    if image.mode in DEEP:
        raise InputError(f"{name}: {too_deep(image.mode)}")
    return (
        image
        if image.mode == mode
        else image.convert("RGBA" if image.mode in ("P", "PA") else mode).convert(mode)
    )


def decode_mask(encoded: Encoded, name: str) -> Image.Image:
    """A mask of class numbers in mode "L" or, above 255, "I": the values of a grey image, or the indices (not
    the colours) of one with a palette. Raises `InputError`, starting with `name`, for colours."""
    image = _decoded(encoded, name)
    if image.mode in ("L", "I"):
        return image
    if image.mode == "P":
        return Image.fromarray(np.asarray(image))
    if image.mode == "1":
        return Image.fromarray(np.asarray(image).astype(np.uint8))
    if image.mode in DEEP and image.mode != "F":
        return Image.fromarray(np.asarray(image).astype(np.int32))
    raise InputError(
        f"{name}: a mask of mode {image.mode}; expected one channel of class numbers: a grey image, "
        "or one with a palette"
    )


def too_deep(mode: str) -> str:
    """The error message for an image of this mode, one of DEEP."""
    return (
        f"has more than 8 bits a pixel (Pillow's mode {mode}), so its black and white levels are "
        "unknown. Save it with 8 bits, "
        "scaled as you want it"
    )


def _orientation(image: Image.Image) -> int | None:
    try:
        # The method of PNG images would decode the pixels first.
        return Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except Exception as error:  # damaged EXIF data count as none
        if is_out_of_memory(error):
            raise
        return None


def _decoded(encoded: Encoded, name: str) -> Image.Image:
    with _opened(encoded, name) as image:
        try:
            image.load()
            return ImageOps.exif_transpose(image)
        except Exception as error:  # Pillow's formats raise exceptions of many types
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"{name}: broken or truncated image ({in_short(error)}); copy it again or leave it out"
            ) from None


def _opened(encoded: Encoded, name: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded)
    except FileNotFoundError:
        raise InputError(f"{name}: this file does not exist") from None
    except UnidentifiedImageError:
        start = encoded[:16] if isinstance(encoded, bytes) else encoded.open("rb").read(16)
        reason = "is empty" if not start else f"is no image that Pillow can read (it begins with {start!r})"
        raise InputError(f"{name}: {reason}; copy it again or leave it out") from None
    except Exception as error:  # Pillow's formats raise exceptions of many types
        if is_out_of_memory(error):
            raise
        raise InputError(f"{name}: cannot be opened as an image ({in_short(error)})") from None
