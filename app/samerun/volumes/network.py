"""The model for volumes: its settings (classes, voxel size, patch size, network) and exported folder, and
MONAI's U-Net, sliding windows and Hausdorff distance. The only module that imports MONAI.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.inferers import sliding_window_inference
from monai.metrics import compute_hausdorff_distance
from monai.networks.nets import UNet
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from samerun.errors import InputError
from samerun.files import write_json
from samerun.models.pretrained import check_finite_weights, in_one_line
from samerun.parsing import is_given, written
from samerun.volumes.data import Prepared, Volumes
from samerun.volumes.nifti import IGNORED, read_header, resample

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MOST_PATCH, OVERLAP = 96, 0.5
NO_MODEL = (
    "{}: is no exported model of segment3d.py ({}); expected a folder with config.json and model.safetensors"
)
# Loads best/ without code of this repository; shown in the model card, and run by a test.
USAGE = """\
import json, nibabel, torch
from monai.inferers import sliding_window_inference
from monai.networks.nets import UNet
from safetensors.torch import load_file
from torch.nn.functional import interpolate

config = json.load(open("best/config.json"))
model = UNet(**config["unet"]).eval()
model.load_state_dict(load_file("best/model.safetensors"))
image = nibabel.as_closest_canonical(nibabel.load("image.nii.gz"))
voxels = torch.from_numpy(image.get_fdata(dtype="float32").reshape(image.shape[:3]).copy())[None, None]
voxels = (voxels - voxels.mean()) / voxels.std(correction=0)
zooms = zip(image.shape[:3], nibabel.affines.voxel_sizes(image.affine), config["spacing"])
voxels = interpolate(voxels, [max(1, round(n * old / new)) for n, old, new in zooms], mode="trilinear")
with torch.no_grad():
    logits = sliding_window_inference(
        voxels, config["patch_size"], 4, model, overlap=config["overlap"], mode="gaussian"
    )
logits = interpolate(logits, image.shape[:3], mode="trilinear")[0]
# In RAS orientation; config["classes"] names them.
classes = logits.argmax(0) if len(logits) > 1 else (logits[0] > 0).long()"""


@dataclass(frozen=True)
class Settings:
    """The settings of a model, stored in best/config.json."""

    classes: list[str]  # names, background first
    spacing: tuple[float, ...]  # voxel size in mm along right, anterior, superior
    patch_size: tuple[int, ...]  # voxels of a patch and a window
    unet: dict[str, Any]  # arguments of MONAI's UNet, a residual 3-D U-Net (Kerfoot et al., 2018)
    overlap: float  # of windows
    loss: dict[str, Any] | None = None  # `SegmentationLoss.settings` of the training

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # tuples become lists, as in a checkpoint

    @staticmethod
    def choose(
        arguments: Any, classes: list[str], spacing: tuple[float, ...], train: list[Prepared]
    ) -> Settings:
        """Takes settings from the arguments; chooses a missing patch size by the median training volume.
        Raises `InputError` for a patch that is too small for the network."""
        stride = math.prod(arguments.strides)
        patch = arguments.patch_size
        if patch is None:
            median = np.median([volume.facts["shape"] for volume in train], axis=0)
            largest = max(stride, MOST_PATCH // stride * stride)
            patch = tuple(min(largest, math.ceil(size / stride) * stride) for size in median)
        if all(size == stride for size in patch):
            raise InputError(
                f"patches of {'x'.join(map(str, patch))} voxels are one voxel at the network's "
                "lowest level, too few for "
                f"instance norm: give a larger --patch_size, or fewer --strides (their product is {stride})"
            )
        overlap = OVERLAP if arguments.overlap is None else arguments.overlap
        unet = {  # arguments of `monai.networks.nets.UNet`
            "spatial_dims": 3,
            "in_channels": 1,
            "out_channels": len(classes) if len(classes) > 2 else 1,  # background and one class share one
            "channels": list(arguments.channels),
            "strides": list(arguments.strides),
            "num_res_units": 2,
            "dropout": arguments.dropout,
            "norm": ["INSTANCE", {"affine": True}],
        }
        return Settings(classes, spacing, tuple(patch), unet, overlap)

    @staticmethod
    def read(path: str | Path) -> Settings:
        """Reads the settings of an exported folder. Raises `InputError` for another folder."""
        try:
            config = json.loads((Path(path) / CONFIG).read_text(encoding="utf-8"))
            names = ("classes", "spacing", "patch_size", "unet", "overlap")
            classes, spacing, patch, unet, overlap = (config[name] for name in names)
        except KeyError as error:
            raise InputError(NO_MODEL.format(path, f"{CONFIG} has no {error.args[0]}")) from None
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                NO_MODEL.format(path, getattr(error, "strerror", None) or f"{CONFIG} cannot be read")
            ) from None
        return Settings(classes, tuple(spacing), tuple(patch), unet, overlap, config.get("loss"))

    def updated(self, arguments: Any) -> Settings:
        """The settings of an exported model with the overlap of the arguments. Raises `InputError` for
        arguments that contradict the model."""
        own = {"class_names": self.classes[1:], "spacing": self.spacing, "patch_size": self.patch_size}
        for name, value in (own | self.unet).items():
            value = tuple(value) if isinstance(value, list) else value
            if is_given(arguments, name) and getattr(arguments, name) != value:
                model = arguments.model_name_or_path
                raise InputError(f"--{name}: the model of {model} has {written(value)}; leave it out")
        return self if arguments.overlap is None else replace(self, overlap=arguments.overlap)

    def training_note(self, train: list[Prepared], patches: int) -> str:
        """A note about the training data. `patches`: per volume and epoch."""
        spacing, patch = ("x".join(f"{x:g}" for x in values) for values in (self.spacing, self.patch_size))
        resampled = sum(volume.facts["shape"] != volume.facts["size"] for volume in train)
        return (
            f"{len(train)} training volumes, {patches} patches of {patch} voxels of {spacing} mm from each "
            f"per epoch; classes {', '.join(self.classes[1:])}; {resampled} volumes are resampled, all "
            "normalised by mean and deviation"
        )

    def write(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        """Writes the exported folder and checks it by loading it."""
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        constants = {
            "model_type": "monai_unet",
            "orientation": "RAS",
            "normalization": "z-score over all voxels of a volume",
        }
        write_json(folder / CONFIG, {**constants, **self.as_dict()})
        Settings.read(folder).load_model(folder)

    def load_model(self, path: str | Path) -> torch.nn.Module:
        model = self.build()
        load_weights(model, path)
        return model

    def build(self) -> torch.nn.Module:
        """The network with random weights."""
        return UNet(**self.unet)


def load_weights(model: torch.nn.Module, path: str | Path) -> None:
    """Loads the weights of an exported folder. Raises `InputError` if they do not fit the network."""
    try:
        model.load_state_dict(load_file(Path(path) / WEIGHTS))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(NO_MODEL.format(path, f"{WEIGHTS}: {in_one_line(error)}")) from None
    check_finite_weights(path, model)


def choose_spacing(spacing: tuple[float, ...] | None, train: Volumes) -> tuple[float, ...]:
    """The given voxel size, or the median of the training images along each axis."""
    if spacing is not None:
        return spacing
    return tuple(np.median([read_header(file.image).spacing for file in train.files], axis=0).tolist())


def check_weights(weights: tuple[float, ...] | None, classes: list[str]) -> None:
    """Raises `InputError` unless there is a weight for each class."""
    if weights is not None and len(weights) != len(classes):
        raise InputError(
            f"--class_weights has {len(weights)} numbers, expected {len(classes)}: {', '.join(classes)}"
        )


# Logits and distances


def volume_logits(
    model: Callable[[torch.Tensor], torch.Tensor],
    image: torch.Tensor,
    size: Sequence[int],
    settings: Settings,
    window_batch_size: int,
) -> torch.Tensor:
    """Logits of a volume, (x, y, z), by sliding windows with Gaussian weights, resampled to (channels, *size)
    float32.

    `image`: in the precision of the model's inputs. `size`: the grid of the volume's file.
    """

    def predict(windows: torch.Tensor) -> torch.Tensor:
        return model(windows.to(image.dtype)).float()

    given = image.float()[None, None], settings.patch_size, window_batch_size, predict
    logits = sliding_window_inference(*given, overlap=settings.overlap, mode="gaussian")[0]
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
        # Crops to the bounding box of both, for speed.
        box = tuple(slice(indices.min(), indices.max() + 1) for indices in np.nonzero(pair[0] | pair[1]))
        tensors = [torch.from_numpy(mask[box])[None, None] for mask in pair]
        given = {"include_background": True, "percentile": 95, "spacing": list(spacing)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            distances[number] = float(compute_hausdorff_distance(*tensors, **given))
    return distances
