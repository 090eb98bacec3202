"""From encoded images to a model's input: strict decoding, random augmentation, resizing, normalisation."""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageEnhance, ImageOps, UnidentifiedImageError
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING, AutoImageProcessor
from transformers.utils import logging

from samerun.errors import InputError, in_short, is_out_of_memory
from samerun.models.pretrained import explain_failed_load

GREY = ("1", "L", "LA", "La")
# Modes of more than 8 bits a channel. Pillow cuts colours to 8 bits; then only the file's raw mode tells.
DEEP = (
    "I",
    "F",
    *(f"{m};16{order}" for m in ("I", "LA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK") for order in ("", *"BLN")),
)
ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
Encoded = bytes | Path  # an undecoded image
ASPECT_RATIOS = (3 / 4, 4 / 3)  # of crops: width / height
# Seeds numpy apart from the data order: it treats [seed, epoch] and [seed, epoch, 0] alike.
STREAM = 1
PROCESSOR_FILE = "preprocessor_config.json"


# Decoding. Broken, truncated and 16-bit images are errors that name the file.


class Header(NamedTuple):
    """Size in pixels, after EXIF rotation, and Pillow's mode."""

    width: int
    height: int
    mode: str

    @property
    def is_grey(self) -> bool:
        return self.mode in GREY


def read_header(encoded: Encoded, name: str) -> Header:
    """Reads an image's header without decoding its pixels. `name`: starts the message of an `InputError`."""
    with _opened(encoded, name) as image:
        size = image.size[::-1] if _orientation(image) in TRANSPOSED else image.size
        return Header(*size, _mode(image))


def decode(encoded: Encoded, name: str, mode: str) -> Image.Image:
    """An image in `mode`, "L" or "RGB". Applies the EXIF rotation and the palette, drops an alpha channel.

    Raises `InputError`, starting with `name`, if it is broken, truncated or has more than 8 bits per channel.
    """
    image, own_mode = _decoded(encoded, name)
    if own_mode in DEEP:
        raise InputError(f"{name}: {too_deep(own_mode)}")
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def decode_mask(encoded: Encoded, name: str) -> Image.Image:
    """A mask of class numbers in mode "L" or, above 255, "I": the values of a grey image, or the indices (not
    the colours) of one with a palette. Raises `InputError`, starting with `name`, for colours and JPEG."""
    with _opened(encoded, name) as file:
        if file.format == "JPEG":
            raise InputError(f"{name}: a JPEG file, which changes class numbers; save masks as PNG files")
    image, _ = _decoded(encoded, name)
    if image.mode in ("L", "I"):
        return image
    if image.mode in ("P", "1"):
        return Image.fromarray(np.asarray(image).astype(np.uint8))
    if image.mode in DEEP and image.mode != "F":
        return Image.fromarray(np.asarray(image).astype(np.int32))
    raise InputError(
        f"{name}: a mask of mode {image.mode}; expected one channel of class numbers: a grey image, "
        "or one with a palette"
    )


def too_deep(mode: str) -> str:
    """The error message for an image of this mode, one of DEEP, by `_mode`."""
    return (
        f"has more than 8 bits a pixel (Pillow's mode {mode}), so its black and white levels are "
        "unknown. Save it with 8 bits, scaled as you want it"
    )


def _mode(image: Image.Image) -> str:
    """The mode of an image that is not decoded yet, or the file's own if it is one of DEEP."""
    if any(tile.codec_name == "SGI16" for tile in image.tile):
        return "RGB;16B"
    raw = [tile.args if isinstance(tile.args, str) else tile.args[0] for tile in image.tile if tile.args]
    return next((mode for mode in raw if mode in DEEP), image.mode)


def _orientation(image: Image.Image) -> int | None:
    try:
        # The method of PNG images would decode the pixels first.
        return Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except Exception as error:  # damaged EXIF data count as none
        if is_out_of_memory(error):
            raise
        return None


def _decoded(encoded: Encoded, name: str) -> tuple[Image.Image, str]:
    """(the image, its `_mode`)"""
    with _opened(encoded, name) as image:
        try:
            mode = _mode(image)  # before `load`, which forgets it
            image.load()
            return ImageOps.exif_transpose(image), mode
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


# Augmentation


def row_generator(seed: int, epoch: int, row: int) -> np.random.Generator:
    """Of a row's augmentation."""
    return np.random.default_rng([seed, epoch, row, STREAM])


@dataclass(frozen=True)
class Augmentation:
    """Random changes of an image and its mask."""

    size: tuple[int, int]  # (height, width) of crops
    crop: float | None = None  # the least share of the area that a random resized crop keeps; None: no crop
    flip: bool = False  # left to right, with probability 0.5
    rotation: float = 0.0  # the largest angle in degrees
    jitter: float = 0.0  # the largest relative change of brightness, contrast and saturation
    fill: int = 0  # of a mask, where a rotation or crop adds an area
    scales: tuple[float, float] | None = None  # (low, high) of a random scale, at which a crop is taken
    native: bool = False  # whether scale 1 is the image's own size, not `size`
    colour: int | tuple[int, ...] = 0  # of an image, likewise

    @property
    def is_off(self) -> bool:
        return not (self.has_fixed_size or self.flip or self.rotation or self.jitter)

    @property
    def has_fixed_size(self) -> bool:
        """Whether results have `size`, not the size of the image."""
        return self.crop is not None or self.scales is not None

    def __call__(
        self, image: Image.Image, mask: Image.Image | None, generator: np.random.Generator
    ) -> tuple[Image.Image, Image.Image | None]:
        """A randomly changed copy of an image and its mask."""
        if self.jitter:
            enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast]
            for enhancer in enhancers + [ImageEnhance.Color] * (image.mode == "RGB"):
                factor = generator.uniform(1 - self.jitter, 1 + self.jitter)
                image = enhancer(image).enhance(factor)
        if self.rotation:
            angle = generator.uniform(-self.rotation, self.rotation)
            image = image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=self.colour)
            mask = mask and mask.rotate(angle, Image.Resampling.NEAREST, fillcolor=self.fill)
        if self.flip and generator.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            mask = mask and mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.crop is not None:
            box, size = crop_box(image.size, self.crop, generator), self.size[::-1]
            image = image.resize(size, Image.Resampling.BILINEAR, box)
            mask = mask and mask.resize(size, Image.Resampling.NEAREST, box)
        if self.scales is not None:
            factor, size = math.exp(generator.uniform(*np.log(self.scales))), self.size[::-1]
            scaled = tuple(max(1, round(length * factor)) for length in (image.size if self.native else size))
            margins = [length - crop for length, crop in zip(scaled, size, strict=True)]
            start = tuple(int(generator.integers(min(0, margin), max(0, margin) + 1)) for margin in margins)
            place = scaled, start, size
            image = scaled_crop(image, *place, self.colour, Image.Resampling.BILINEAR)
            mask = mask and scaled_crop(mask, *place, self.fill, Image.Resampling.NEAREST)
        return image, mask


def crop_box(
    size: tuple[int, int], min_area: float, generator: np.random.Generator
) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a random crop within an image of `size` (width, height). It has a share
    of the area between `min_area` and 1, and a log-uniform aspect ratio from 3/4 to 4/3, as in Szegedy et
    al., arXiv:1409.4842."""
    width, height = size
    area = width * height * generator.uniform(min_area, 1.0)
    ratio = math.exp(generator.uniform(*map(math.log, ASPECT_RATIOS)))
    crop_width = min(width, max(1, round(math.sqrt(area * ratio))))
    crop_height = min(height, max(1, round(math.sqrt(area / ratio))))
    left = int(generator.integers(width - crop_width + 1))
    top = int(generator.integers(height - crop_height + 1))
    return left, top, left + crop_width, top + crop_height


def scaled_crop(
    image: Image.Image,
    scaled: tuple[int, int],
    start: tuple[int, int],
    size: tuple[int, int],
    fill: int | tuple[int, ...],
    resample: Image.Resampling,
) -> Image.Image:
    """The crop of `size` at `start` of an image that is resized to `scaled`, with `fill` beyond its borders.
    All are (width, height)."""
    first, last = np.maximum(start, 0), np.minimum(np.add(start, size), scaled)  # inside
    step = np.divide(image.size, scaled)
    box = *(first * step).tolist(), *np.minimum(last * step, image.size).tolist()
    crop = image.resize((last - first).tolist(), resample, box)
    if crop.size == size:
        return crop
    padded = Image.new(image.mode, size, fill)
    padded.paste(crop, tuple((first - start).tolist()))
    return padded


# A model's input


@dataclass(frozen=True)
class Processing:
    """How images become a model's input: a value v of 0..255 becomes (v * scale - mean) / std of its
    channel."""

    size: tuple[int, int]  # (height, width)
    mode: str  # Pillow's, "L" or "RGB"
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255
    processor: Any = None  # of transformers, resizes and crops; None: images are resized to `size`

    def __str__(self) -> str:
        height, width = self.size
        return f"{width}x{height} {'grey levels' if self.mode == 'L' else 'RGB'}"

    @property
    def mean_colour(self) -> int | tuple[int, ...]:
        """The colour that normalisation turns into 0."""
        values = tuple(min(255, max(0, round(mean / self.scale))) for mean in self.mean)
        return values if self.mode == "RGB" else values[0]

    def fit(self, image: Image.Image) -> np.ndarray:
        """An image in the input's size: (height, width) or (height, width, 3) uint8."""
        if self.processor is None:
            return np.asarray(self._resize(image, Image.Resampling.BILINEAR))  # with antialiasing
        # The processor only resizes and crops: `normalize` is faster, on a whole batch.
        pixels = self.processor(image.convert("RGB"), do_rescale=False, do_normalize=False)["pixel_values"][0]
        pixels = np.asarray(pixels).round().clip(0, 255).astype(np.uint8)
        return pixels[0] if self.mode == "L" else pixels.transpose(1, 2, 0)

    def fit_mask(self, mask: Image.Image) -> np.ndarray:
        """A mask in the input's size."""
        return np.asarray(self._resize(mask, Image.Resampling.NEAREST))

    def _resize(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        size = self.size[::-1]
        return image if image.size == size else image.resize(size, resample)

    def normalize(self, pixels: np.ndarray) -> torch.Tensor:
        """Normalises a batch from `fit`, (b, height, width[, 3]) uint8, to (b, channels, height, width)
        float32.

        The memory format is channels_last: on a CPU steps of small ResNets and MobileNets take 10 to 30 %
        less time, those of a small ViT up to 3 % more.
        """
        values = torch.from_numpy(np.ascontiguousarray(pixels))
        values = values[:, None] if pixels.ndim == 3 else values.permute(0, 3, 1, 2)
        mean, std = (torch.tensor(x, dtype=torch.float32).view(-1, 1, 1) for x in (self.mean, self.std))
        return (values.to(torch.float32) * self.scale - mean) / std


def processing_of(processor: Any, channels: int) -> Processing:
    """A `Processing` around an image processor of transformers. Finds the output size by a trial; raises
    `InputError` if it depends on the image, and for other than one or three channels."""
    mode = {1: "L", 3: "RGB"}.get(channels)
    if mode is None:
        raise InputError(f"the model sees {channels} channels; expected 1 (grey levels) or 3 (RGB)")
    images = [Image.new("RGB", shape) for shape in ((96, 64), (64, 96))]
    outputs = [processor(image, do_rescale=False, do_normalize=False)["pixel_values"][0] for image in images]
    size, other = (tuple(np.asarray(output).shape[-2:]) for output in outputs)
    if size != other:
        raise InputError(
            f"the image processor {type(processor).__name__} gives images of several sizes, which a "
            "batch cannot hold; give it a fixed size, or a centre crop, in its preprocessor_config.json"
        )
    mean, std = [0.0] * channels, [1.0] * channels
    if processor.do_normalize:
        mean, std = processor.image_mean, processor.image_std
    scale = processor.rescale_factor if processor.do_rescale else 1.0
    return Processing(size, mode, tuple(mean[:channels]), tuple(std[:channels]), scale, processor)


# Image processors of transformers, computed with Pillow. In transformers 5.17 `AutoImageProcessor`
# needs torchvision if it is imported from the package instead of its module.


def load_processor(arguments: Any, config: Any, image_size: int | None) -> Any:
    """The model's image processor; with --from_scratch and a folder without one, the default of the model
    type. `image_size`: overrides its size. Raises `InputError` if it cannot be loaded."""
    logging.set_verbosity_error()  # each process would warn that torchvision is not installed
    name = (arguments.from_scratch and arguments.config_name) or arguments.model_name_or_path
    folder, own = Path(name), getattr(config, "image_size", None)
    by_default = arguments.from_scratch and folder.exists() and not (folder / PROCESSOR_FILE).is_file()
    defaults = IMAGE_PROCESSOR_MAPPING.get(type(config), {}) if by_default else {}
    if by_default and "pil" not in defaults:
        raise InputError(
            f"{name}: has no {PROCESSOR_FILE}, and transformers knows none for a {config.model_type} model"
        )
    try:
        if by_default:
            processor = defaults["pil"]()
        else:
            processor = AutoImageProcessor.from_pretrained(name, backend="pil", **arguments.hub_options(name))
    except Exception as error:  # before transformers 5.22, SegFormer's needs torchvision
        raise InputError(explain_failed_load("image processor", name, error)) from error
    if by_default and isinstance(own, int):
        _set_size(processor, own)
    if image_size is not None:
        _set_size(processor, image_size)
    return processor


def _set_size(processor: Any, size: int) -> None:
    """Sets the output size to size x size pixels."""
    square = {"height": size, "width": size}
    processor.size = {"shortest_edge": size} if "shortest_edge" in processor.size else square
    if getattr(processor, "do_center_crop", False):
        processor.crop_size = square
