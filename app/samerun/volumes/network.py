"""The U-Net, sliding windows and the Hausdorff distance of MONAI. The only module that imports MONAI."""

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

from samerun.volumes.nifti import IGNORED, resample


def unet_settings(arguments: Any, num_classes: int) -> dict[str, Any]:
    """The arguments of `monai.networks.nets.UNet`, for config.json. Background and one class share one output
    channel."""
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
    """Calls the model with inputs of its precision, returns fp32, and counts the forward passes."""

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
    equal_passes: bool = False,
) -> torch.Tensor:
    """Logits of a volume, (x, y, z), by sliding windows with Gaussian weights, resampled to (channels, *size)
    float32.

    `size`: the grid of the volume's file. `equal_passes`: every process does the same number of forward
    passes, as ZeRO-3 and FSDP need, which gather the weights in each.
    """
    windows = _Windows(model, image.dtype)
    logits = sliding_window_inference(
        image.float()[None, None],
        tuple(patch_size),
        window_batch_size,
        windows,
        overlap=overlap,
        mode="gaussian",
    )[0]
    if equal_passes and dist.is_initialized():
        max_passes = torch.tensor(windows.passes, device=image.device)
        dist.all_reduce(max_passes, op=dist.ReduceOp.MAX)
        for _ in range(int(max_passes) - windows.passes):
            windows(torch.zeros(1, 1, *patch_size, device=image.device))
    return resample(logits, size)


def classes_of(logits: torch.Tensor) -> torch.Tensor:
    """(x, y, z) uint8 class numbers of logits, (channels, x, y, z)."""
    return (logits[0] > 0).to(torch.uint8) if len(logits) == 1 else logits.argmax(0).to(torch.uint8)


def hausdorff95(
    predicted: np.ndarray, truth: np.ndarray, spacing: Sequence[float], num_classes: int
) -> np.ndarray:
    """(classes,) float32: the symmetric 95% Hausdorff distance of each class in mm. NaN for the background,
    and for a class that is missing in prediction or truth. Ignored voxels belong to no class.

    `predicted`, `truth`: (x, y, z) class numbers; `spacing`: voxel size in mm.
    """
    distances = np.full(num_classes, np.nan, dtype=np.float32)
    predicted = np.where(truth == IGNORED, IGNORED, predicted)
    for number in range(1, num_classes):
        pair = [mask == number for mask in (predicted, truth)]
        if not all(mask.any() for mask in pair):
            continue
        # Crops to the bounding box of both, for speed. Pads by a voxel, so that masks at the border have a
        # surface there.
        box = tuple(
            slice(max(0, indices.min() - 1), indices.max() + 2) for indices in np.nonzero(pair[0] | pair[1])
        )
        tensors = [torch.from_numpy(np.pad(mask[box], 1))[None, None] for mask in pair]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            distance = compute_hausdorff_distance(
                *tensors, include_background=True, percentile=95, spacing=list(spacing)
            )
        distances[number] = float(distance)
    return distances
