"""Everything that is MONAI's: the U-Net, sliding windows, the Hausdorff distance. The only module that imports it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from monai.inferers import sliding_window_inference
from monai.metrics import compute_hausdorff_distance
from monai.networks.nets import UNet

from finetune.volumes.nifti import IGNORED, resample


def unet_settings(arguments: Any, num_classes: int) -> dict[str, Any]:
    """The arguments of `monai.networks.nets.UNet`, as config.json holds them. A single class has one output, no background."""
    return {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": num_classes if num_classes > 2 else 1,
        "channels": list(arguments.channels),
        "strides": list(arguments.strides),
        "num_res_units": arguments.num_res_units,
        "dropout": arguments.dropout,
        "norm": ["INSTANCE", {"affine": True}],
    }


def build_unet(settings: dict[str, Any]) -> torch.nn.Module:
    """A residual 3-D U-Net (Kerfoot et al., 2018), with random weights."""
    return UNet(**settings)


class _Windows:
    """The model for sliding windows: in its own precision, with results in fp32. `passes`: how many forward passes it did."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype, self.passes = model, dtype, 0

    def __call__(self, windows: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.model(windows.to(self.dtype)).float()


def volume_logits(
    model: torch.nn.Module,
    image: torch.Tensor,
    size: Sequence[int],
    *,
    patch_size: Sequence[int],
    overlap: float,
    window_batch_size: int,
    all_alike: bool = False,
) -> torch.Tensor:
    """(channels, *size) float32: logits of a volume, (x, y, z), brought to the grid of its file.

    Windows overlap, weighted by a Gaussian; what is smaller than one is padded. `all_alike`: every process does as many forward
    passes as the one with most, which ZeRO-3 and FSDP need: their weights are gathered by all together.
    """
    windows = _Windows(model, image.dtype)
    logits = sliding_window_inference(
        image.float()[None, None], tuple(patch_size), window_batch_size, windows, overlap=overlap, mode="gaussian"
    )[0]
    if all_alike and dist.is_initialized():
        most = torch.tensor(windows.passes, device=image.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        for _ in range(int(most) - windows.passes):
            windows(torch.zeros(1, 1, *patch_size, device=image.device))
    return resample(logits, size)


def classes_of(logits: torch.Tensor) -> torch.Tensor:
    """(x, y, z) uint8 class numbers of logits, (channels, x, y, z)."""
    return (logits[0] > 0).to(torch.uint8) if len(logits) == 1 else logits.argmax(0).to(torch.uint8)


def hausdorff95(predicted: np.ndarray, truth: np.ndarray, spacing: Sequence[float], num_classes: int) -> np.ndarray:
    """(classes,) float32: the 95% Hausdorff distance of each class in mm, the larger of its two directions; NaN where
    prediction or truth has none of a class, and for the background. Voxels that do not count are in neither.

    `predicted`, `truth`: (x, y, z) class numbers; `spacing`: voxel size in mm.
    """
    found = np.full(num_classes, np.nan, dtype=np.float32)
    predicted = np.where(truth == IGNORED, IGNORED, predicted)
    for number in range(1, num_classes):
        pair = [mask == number for mask in (predicted, truth)]
        if not all(mask.any() for mask in pair):
            continue
        # In the box of both with a margin of one voxel: the border of the array is no surface.
        box = tuple(slice(max(0, places.min() - 1), places.max() + 2) for places in np.nonzero(pair[0] | pair[1]))
        tensors = [torch.from_numpy(np.pad(mask[box], 1))[None, None] for mask in pair]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            distance = compute_hausdorff_distance(*tensors, include_background=True, percentile=95, spacing=list(spacing))
        found[number] = float(distance)
    return found
