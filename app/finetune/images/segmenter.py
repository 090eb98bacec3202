"""Models that give each pixel a class: their input, their logits in a picture's own size, masks and overlays to look at."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.functional import interpolate, pad
from transformers import AutoModelForSemanticSegmentation

from finetune.errors import InputError, TrainingError, in_short
from finetune.images.arguments import RESIZED_CROP
from finetune.images.folders import picture_extensions
from finetune.images.masks import IGNORED
from finetune.images.processing import Processing, processing_of
from finetune.output import written
from finetune.reports.card import markdown_table
from finetune.reports.figures import with_legend

# The exported model computes in fp32; a run in half precision reported what half precision gave it.
TOLERANCE = {"no": 1e-3, "bf16": 2e-1, "fp16": 5e-2}
OVERLAP = 0.25  # of windows
SHOWN_HEIGHT = 180  # pixels of a picture in overlays
USAGE = """from transformers import pipeline
segment = pipeline("image-segmentation", model="best")
segment("picture.png")  # for each class that is there a label and a mask"""


# Input


def processor_for(processor: Any, size: tuple[int, int], windows: bool) -> Any:
    """A copy of a model's image processor that resizes to `size` (height, width) and cuts nothing off, so that its
    `post_process_semantic_segmentation` gives a mask of the whole picture. With `windows` it leaves pictures in their size."""
    found = copy.deepcopy(processor)
    found.size = {"height": size[0], "width": size[1]}
    found.resample = Image.Resampling.BILINEAR
    found.do_resize = not windows
    for name in ("do_center_crop", "do_reduce_labels", "do_pad", "keep_aspect_ratio"):
        if hasattr(found, name):
            setattr(found, name, False)
    for name in ("ensure_multiple_of", "size_divisor"):
        if getattr(found, name, None) is not None:
            setattr(found, name, 1)
    return found


def by_windows(arguments: Any, processor: Any, exported: bool) -> bool:
    """Whether pictures are predicted by windows in their own resolution: as --inference says, or as a model is `exported` for.
    Raises `InputError` for crops that are resized beside it."""
    by_default = "sliding_window" if exported and not processor.do_resize else "whole"
    windows = (arguments.inference or by_default) == "sliding_window"
    if windows and arguments.random_crop is not None:
        raise InputError(RESIZED_CROP)
    return windows


def own_size(processor: Any) -> tuple[int, int]:
    """(height, width) that a model's image processor makes pictures, or one that is near where it keeps their shape."""
    size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    edge = size.get("shortest_edge")
    return (size["height"], size["width"]) if edge is None else (edge, edge)


def processing_for(processor: Any, size: tuple[int, int], channels: int, name: str) -> Processing:
    """What a processor of `processor_for` does, with masks and crops. Raises `InputError` for one that does more, such as
    swapping channels."""
    resizes = copy.deepcopy(processor)
    resizes.do_resize = True
    found = processing_of(resizes, channels)
    found = Processing(size, found.mode, found.mean, found.std, found.scale)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)).convert(found.mode)
    theirs = torch.as_tensor(np.asarray(resizes(picture.convert("RGB"))["pixel_values"][0]))
    ours = found.normalize(np.stack([found.fit(picture)]))[0]
    if len(theirs) != channels:
        raise InputError(
            f"{name}: the model sees {channels} channel(s), but its {type(processor).__name__} gives {len(theirs)}; set "
            f"num_channels to {len(theirs)} in its config.json, or name another model"
        )
    if theirs.shape != ours.shape or not torch.allclose(theirs.float(), ours, atol=1e-3):
        raise InputError(f"{name}: its {type(processor).__name__} does more than resize and normalise; name another model")
    return found


def unused_parameters(config: Any, channels: int, size: tuple[int, int]) -> set[str]:
    """The parameters that no logits depend on, such as the last layer of a BEiT whose features are taken before it: they would
    have no gradient, which DDP takes for an error. Raises `InputError` for a size that the model cannot work on. Both are found
    by a pass without values."""
    with torch.device("meta"):
        model = AutoModelForSemanticSegmentation.from_config(config).eval()
        try:
            logits = model(pixel_values=torch.zeros(1, channels, *size)).logits
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"--image_size {size[0]},{size[1]}: this {config.model_type} model cannot work on such pictures "
                f"({in_short(error)})"
            ) from None
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(logits.sum(), parameters, allow_unused=True)
    return {name for name, gradient in zip(names, gradients, strict=True) if gradient is None}


def filled(tensors: Sequence[torch.Tensor], size: Sequence[int], value: int) -> torch.Tensor:
    """(b, ..., *size) of tensors of shape (..., height, width), filled up to `size` at the right and below."""
    return torch.stack([pad(each, (0, size[1] - each.shape[-1], 0, size[0] - each.shape[-2]), value=value) for each in tensors])


# Model


def configure(config: Any, labels: list[str], overlap: float, loss_settings: dict[str, Any]) -> None:
    """Makes a configuration that of a model of these classes, with one head. It keeps by which share windows overlap and the
    settings of the loss, so that an exported model is predicted with and scored as its run did."""
    config.overlap, config.loss_settings = overlap, loss_settings
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    if hasattr(config, "use_auxiliary_head"):
        config.use_auxiliary_head = False  # it has a loss of its own, which this one is not


def renew_head(model: Any) -> None:
    """Random weights for the layer that gives classes: it was trained for others."""
    for name, module in model.named_modules():
        of_body = name.startswith(f"{model.base_model_prefix}.")
        if isinstance(module, nn.Conv2d) and module.out_channels == model.config.num_labels and not of_body:
            model._init_weights(module)


# Logits


def upsampled(logits: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """(b, classes, *size) float32, as transformers' post_process_semantic_segmentation makes them."""
    return interpolate(logits.float(), size=tuple(size), mode="bilinear", align_corners=False)


def whole_logits(model: nn.Module, pixels: torch.Tensor, sizes: list[list[int]]) -> Iterator[torch.Tensor]:
    """(1, classes, height, width) of each picture, in its own size, from pictures that were resized to the model's."""
    logits = model(pixel_values=pixels).logits
    for row, size in enumerate(sizes):
        yield upsampled(logits[row : row + 1], size)


def window_logits(
    model: nn.Module,
    pixels: torch.Tensor,
    sizes: list[list[int]],
    *,
    window: tuple[int, int],
    overlap: float,
    window_batch_size: int,
    all_alike: bool,
) -> Iterator[torch.Tensor]:
    """As `whole_logits`, of pictures in their own size, filled up to the largest: the mean over windows that overlap by this
    share or more, so many of one picture in a forward pass. `all_alike`: every process does as many forward passes as the one
    with most, which ZeRO-3 and FSDP need, as their weights are gathered by all together."""
    places = [window_places(size, window, overlap) for size in sizes]
    passes = [[each[at : at + window_batch_size] for at in range(0, len(each), window_batch_size)] for each in places]
    for row, (size, groups) in enumerate(zip(sizes, passes, strict=True)):
        picture = pixels[row : row + 1, :, : size[0], : size[1]]
        margins = [max(0, length - there) for length, there in zip(window, size, strict=True)]
        picture = pad(picture, (0, margins[1], 0, margins[0]))
        total = count = None
        for corners in groups:
            parts = [(..., slice(top, top + window[0]), slice(left, left + window[1])) for top, left in corners]
            logits = upsampled(model(pixel_values=torch.cat([picture[part] for part in parts])).logits, window)
            if total is None:
                total = logits.new_zeros(1, logits.shape[1], *picture.shape[2:])
                count = logits.new_zeros(1, 1, *picture.shape[2:])
            for part, found in zip(parts, logits, strict=True):
                total[part] += found
                count[part] += 1
        yield (total / count)[..., : size[0], : size[1]]
    if all_alike and dist.is_initialized():
        own = sum(map(len, passes))
        most = torch.tensor(own, device=pixels.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        for _ in range(int(most) - own):
            model(pixel_values=pixels.new_zeros(1, pixels.shape[1], *window))


def window_places(size: Sequence[int], window: Sequence[int], overlap: float) -> list[tuple[int, int]]:
    """(top, left) of the windows that cover a picture: evenly spaced, the last at the border."""
    starts = []
    for length, across in zip(size, window, strict=True):
        room, stride = max(0, length - across), max(1, int(across * (1 - overlap)))
        starts.append(np.linspace(0, room, math.ceil(room / stride) + 1).round().astype(int).tolist())
    return [(top, left) for top in starts[0] for left in starts[1]]


def check_losses(found: np.ndarray, of_run: np.ndarray, precision: str) -> None:
    """Raises `TrainingError` if an exported model's losses of some pictures differ from the run's by more than rounding."""
    difference = float(np.abs(found - of_run).max())
    if not difference <= TOLERANCE[precision]:
        raise TrainingError(
            f"the exported model does not give the run's losses (difference {difference:.1e}); nothing was replaced. Please "
            "report this with run.json"
        )


# Masks to look at


def palette(num_colours: int = 256) -> np.ndarray:
    """(num_colours, 3) uint8: the colours of PASCAL VOC's classes, in which each class's number is written bit by bit."""
    numbers = np.arange(num_colours)
    colours = np.zeros((num_colours, 3), dtype=np.uint8)
    for place in range(8):
        for channel in range(3):
            colours[:, channel] |= (((numbers >> (3 * place + channel)) & 1) << (7 - place)).astype(np.uint8)
    return colours


def mask_names(ids: Sequence[Any]) -> list[str]:
    """Names of the files of masks, one for each row: its id without folders and a picture's extension."""
    found: dict[str, None] = {}
    for row, name in enumerate(map(str, ids)):
        path = Path(name.replace("/", "_"))
        stem = path.stem if path.suffix.lower() in picture_extensions() else path.name
        found[f"{stem}.png" if f"{stem}.png" not in found else f"{stem}_{row}.png"] = None
    return list(found)


def write_mask(mask: np.ndarray, path: Path) -> None:
    """Writes a mask, (height, width) uint8, to a folder in the run's folder, as a PNG whose indices are the class numbers."""
    path.parent.mkdir(exist_ok=True)
    written.add(path.parents[1], path)
    image = Image.fromarray(mask)
    image.putpalette(palette().tobytes())
    image.save(path)


def shares(mask: np.ndarray, labels: list[str]) -> dict[str, float]:
    """The share of the pixels of each class that is there."""
    found = np.bincount(mask.ravel(), minlength=len(labels)) / mask.size
    return {label: round(float(share), 6) for label, share in zip(labels, found, strict=True) if share}


def overlays(rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]], labels: list[str]) -> np.ndarray:
    """(height, width, 3) uint8: picture, truth and prediction side by side, a line for each of (picture (h, w[, 3]), truth
    (h, w), prediction (h, w)) uint8, and the classes' colours. What does not count is black."""
    lines = [np.concatenate([_shown(picture, mask) for mask in (None, truth, found)], axis=1) for picture, truth, found in rows]
    width = max(line.shape[1] for line in lines)
    lines = [np.pad(line, ((0, 2), (0, width - line.shape[1]), (0, 0))) for line in lines]
    colours = dict(zip(labels, palette(len(labels)).tolist(), strict=True))
    return with_legend(np.concatenate(lines), "image, truth, prediction", colours)


def _shown(picture: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    size = (max(1, round(picture.shape[1] * SHOWN_HEIGHT / picture.shape[0])), SHOWN_HEIGHT)
    shown = np.asarray(Image.fromarray(picture).convert("RGB").resize(size, Image.Resampling.BILINEAR))
    if mask is None:
        return shown
    mask = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
    mixed = shown // 3 + (palette()[mask].astype(np.uint16) * 2 // 3).astype(np.uint8)
    return np.where((mask == IGNORED)[..., None], 0, mixed).astype(np.uint8)


def class_table(metrics: dict[str, Any], labels: list[str]) -> list[str]:
    """Markdown: IoU and Dice of each class, for validation and test."""
    lines = []
    for prefix, split in (("eval", "validation"), ("test", "test")):
        if f"{prefix}_mean_iou" in metrics:
            rows = [[label, *(metrics.get(f"{prefix}_{kind}_{label}") for kind in ("iou", "dice"))] for label in labels]
            lines += [f"## Classes ({split})", "", *markdown_table(["class", "IoU", "Dice"], rows), ""]
    return lines
