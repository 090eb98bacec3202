"""Semantic segmentation of images with models of transformers: preprocessing, logits in an image's own size,
mask files and overlays.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import interpolate, pad

from samerun.errors import InputError
from samerun.images.data import image_extensions
from samerun.images.segmentation import IGNORED, EqualPasses, file_names
from samerun.images.transforms import Processing, processing_of
from samerun.reports.figures import with_legend

OVERLAP = 0.25  # of windows
SHOWN_HEIGHT = 180  # pixels of an image in overlays
USAGE = """from transformers import pipeline
segment = pipeline("image-segmentation", model="best")
segment("image.png")  # a label and a mask for each class in the image"""


# Input


def processor_for(processor: Any, size: tuple[int, int], windows: bool) -> Any:
    """A copy of a model's image processor that resizes to `size` (height, width) without cropping or padding,
    so that `post_process_semantic_segmentation` returns a mask of the whole image. With `windows` it does not
    resize."""
    adapted = copy.deepcopy(processor)
    adapted.size = {"height": size[0], "width": size[1]}
    adapted.resample = Image.Resampling.BILINEAR
    adapted.do_resize = not windows
    for name in ("do_center_crop", "do_reduce_labels", "do_pad", "keep_aspect_ratio"):
        if hasattr(adapted, name):
            setattr(adapted, name, False)
    for name in ("ensure_multiple_of", "size_divisor"):
        if getattr(adapted, name, None) is not None:
            setattr(adapted, name, 1)
    return adapted


def default_size(processor: Any) -> tuple[int, int]:
    """(height, width) that an image processor resizes to; a square of the shortest edge if it keeps the
    aspect ratio."""
    size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    edge = size.get("shortest_edge")
    return (size["height"], size["width"]) if edge is None else (edge, edge)


def processing_for(processor: Any, size: tuple[int, int], channels: int, name: str) -> Processing:
    """A `Processing` equal to a processor of `processor_for`; it can handle masks and crops too. Compares
    both on a random image, and raises `InputError` if the processor does more, such as swapping channels.
    `name`: the model's, for errors."""
    resizing = copy.deepcopy(processor)
    resizing.do_resize = True
    ours = replace(processing_of(resizing, channels), size=size, processor=None)
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(noise).convert(ours.mode)
    expected = torch.as_tensor(np.asarray(resizing(image.convert("RGB"))["pixel_values"][0]))
    pixels = ours.normalize(np.stack([ours.fit(image)]))[0]
    if len(expected) != channels:
        raise InputError(
            f"{name}: the model sees {channels} channel(s), but its {type(processor).__name__} gives "
            f"{len(expected)}; set num_channels to {len(expected)} in its config.json, or name another model"
        )
    if expected.shape != pixels.shape or not torch.allclose(expected.float(), pixels, atol=1e-3):
        raise InputError(
            f"{name}: its {type(processor).__name__} does more than resize and normalise; name another model"
        )
    return ours


def pad_and_stack(tensors: Sequence[torch.Tensor], size: Sequence[int], value: int) -> torch.Tensor:
    """Stacks tensors of shape (..., height, width) to (b, ..., *size), padded with `value` on the right and
    below."""
    margins = [(0, size[1] - tensor.shape[-1], 0, size[0] - tensor.shape[-2]) for tensor in tensors]
    padded = [pad(tensor, margin, value=value) for tensor, margin in zip(tensors, margins, strict=True)]
    return torch.stack(padded)


# Model


def configure(config: Any, overlap: float, loss_settings: dict[str, Any]) -> None:
    """Switches off an auxiliary head in a configuration. It keeps the overlap of windows and the settings of
    the loss, so that the exported model predicts and scores as in its run."""
    config.overlap, config.loss_settings = overlap, loss_settings
    if hasattr(config, "use_auxiliary_head"):
        config.use_auxiliary_head = False  # our loss does not use it


# Logits


def upsampled(logits: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Resizes logits to (b, classes, *size) float32, as transformers' post_process_semantic_segmentation
    does."""
    return interpolate(logits.float(), size=tuple(size), mode="bilinear", align_corners=False)


def window_logits(
    model: nn.Module,
    pixels: torch.Tensor,
    sizes: list[list[int]],
    window: tuple[int, int],
    *,
    overlap: float,
    batch_size: int,
    equal_passes: bool,
) -> Iterator[torch.Tensor]:
    """Logits as the mean over sliding windows of size `window`, (height, width). `pixels`: images in their
    own `sizes`, padded to the largest. `overlap`: the least share of a window that overlaps with the next;
    `batch_size`: windows per forward pass; `equal_passes`: of all processes (`EqualPasses`)."""
    passes = EqualPasses(model, pixels.device, equal_passes)
    for row, size in enumerate(sizes):
        image = pixels[row : row + 1, :, : size[0], : size[1]]
        margins = [max(0, length - own) for length, own in zip(window, size, strict=True)]
        image = pad(image, (0, margins[1], 0, margins[0]))
        corners, total, count = window_corners(size, window, overlap), None, None
        for first in range(0, len(corners), batch_size):
            parts = [
                (..., slice(top, top + window[0]), slice(left, left + window[1]))
                for top, left in corners[first : first + batch_size]
            ]
            logits = upsampled(passes(pixel_values=torch.cat([image[part] for part in parts])).logits, window)
            if total is None:
                total = logits.new_zeros(1, logits.shape[1], *image.shape[2:])
                count = logits.new_zeros(1, 1, *image.shape[2:])
            for part, part_logits in zip(parts, logits, strict=True):
                total[part] += part_logits
                count[part] += 1
        yield (total / count)[..., : size[0], : size[1]]
    passes.fill_up(pixel_values=pixels.new_zeros(1, pixels.shape[1], *window))


def window_corners(size: Sequence[int], window: Sequence[int], overlap: float) -> list[tuple[int, int]]:
    """(top, left) of the windows that cover an image: evenly spaced, the last at the border."""
    starts = []
    for length, window_length in zip(size, window, strict=True):
        last, stride = max(0, length - window_length), max(1, int(window_length * (1 - overlap)))
        starts.append(np.linspace(0, last, math.ceil(last / stride) + 1).round().astype(int).tolist())
    return [(top, left) for top in starts[0] for left in starts[1]]


# Mask files and overlays


def palette(num_colours: int = 256) -> np.ndarray:
    """(num_colours, 3) uint8: the colour map of PASCAL VOC."""
    numbers, bits = np.arange(num_colours)[:, None, None], np.arange(8)[:, None]
    return ((numbers >> (3 * bits + np.arange(3)) & 1) << (7 - bits)).sum(axis=1).astype(np.uint8)


def mask_names(ids: Sequence[Any]) -> list[str]:
    """A unique PNG file name for each row: its id without an image's extension (`file_names`)."""
    stems = []
    for name in map(str, ids):
        is_image = Path(name).suffix.lower() in image_extensions()
        stems.append(str(Path(name).with_suffix("")) if is_image else name)
    return file_names(stems, ".png")


def shares(mask: np.ndarray, labels: list[str]) -> dict[str, float]:
    """Class -> share of the pixels, for the classes in a mask."""
    by_class = np.bincount(mask.ravel(), minlength=len(labels)) / mask.size
    return {label: round(float(share), 6) for label, share in zip(labels, by_class, strict=True) if share}


def overlays(rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]], labels: list[str]) -> np.ndarray:
    """(height, width, 3) uint8: one line per row with image, truth and prediction side by side, above a
    legend. Ignored pixels are black. `rows`: (image (h, w[, 3]), truth (h, w), prediction (h, w)) uint8."""
    lines = [
        np.concatenate([_overlay(image, mask) for mask in (None, truth, predicted)], axis=1)
        for image, truth, predicted in rows
    ]
    width = max(line.shape[1] for line in lines)
    lines = [np.pad(line, ((0, 2), (0, width - line.shape[1]), (0, 0))) for line in lines]
    colours = dict(zip(labels, palette(len(labels)).tolist(), strict=True))
    return with_legend(np.concatenate(lines), "image, truth, prediction", colours)


def _overlay(image: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    size = (max(1, round(image.shape[1] * SHOWN_HEIGHT / image.shape[0])), SHOWN_HEIGHT)
    resized = np.asarray(Image.fromarray(image).convert("RGB").resize(size, Image.Resampling.BILINEAR))
    if mask is None:
        return resized
    mask = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
    mixed = resized // 3 + (palette()[mask].astype(np.uint16) * 2 // 3).astype(np.uint8)
    return np.where((mask == IGNORED)[..., None], 0, mixed).astype(np.uint8)
