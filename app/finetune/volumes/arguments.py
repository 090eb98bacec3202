"""The arguments of tasks on volumes."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

from finetune.arguments import groups
from finetune.arguments.parsing import SpaceSeparated, changed_option, option

REQUIREMENTS = "requirements-vision.txt"


@dataclass(frozen=True, kw_only=True)
class VolumeDataArguments(groups.FileArguments):
    """Data"""

    train_file: SpaceSeparated[str] | None = changed_option(
        groups.FileArguments,
        "train_file",
        None,
        "folder with images/ and labels/ of equal names (NIfTI), and split.csv (file,split) if it has several splits; or "
        "a csv, tsv, json, jsonl or parquet file of paths; one or several, and patterns ('hospital-*')",
    )
    validation_file: SpaceSeparated[str] | None = changed_option(
        groups.FileArguments, "validation_file", None, "the same; without it --validation_split takes volumes from training"
    )
    test_file: SpaceSeparated[str] | None = changed_option(
        groups.FileArguments, "test_file", None, "volumes to predict, and to score when they have labels"
    )
    image_column: str = option("image", help="column of the images' paths, relative to the file")
    label_column: str = option("label", help="column of the labels' paths")
    id_column: str = option("id", help="column that names a volume in predictions (default: its file's name)")
    encoding: str = option("utf-8", help="encoding of text files")
    validation_split: float = option(
        0.1, above=0, below=1, help="share of the training volumes kept for validation when there are no others"
    )
    max_train_samples: int | None = option(at_least=1, help="use only the first N training volumes")
    max_eval_samples: int | None = option(at_least=1, help="use only the first N validation volumes")
    max_predict_samples: int | None = option(at_least=1, help="use only the first N test volumes")


@dataclass(frozen=True, kw_only=True)
class NetworkArguments:
    """Network (MONAI's UNet with instance norm)"""

    model_name_or_path: str | None = option(
        reads=True, help="folder of an exported model, to predict with or to start from; its settings are used"
    )
    channels: tuple[int, ...] = option((16, 32, 64, 128, 256), at_least=1, help="channels of each level")
    strides: tuple[int, ...] = option((2, 2, 2, 2), at_least=1, help="downsampling between levels, one fewer than channels")
    num_res_units: int = option(2, at_least=0, help="residual units of a level; 0: plain convolutions")
    dropout: float = option(0.0, at_least=0, below=1, help="dropout of each convolution")

    def problems(self) -> list[str]:
        if len(self.channels) != len(self.strides) + 1 or len(self.channels) < 2:
            return [
                f"--channels has {len(self.channels)} numbers and --strides {len(self.strides)}; expected one fewer strides"
            ]
        return []


@dataclass(frozen=True, kw_only=True)
class VolumeArguments(
    groups.LaunchArguments,
    groups.RunArguments,
    groups.OptimizationArguments,
    groups.BatchArguments,
    NetworkArguments,
    VolumeDataArguments,
):
    """Volumes"""

    class_names: tuple[str, ...] | None = option(
        help="names of the labels 1, 2, ...; 0 is the background (default: numbers, as many as training labels have)"
    )
    ignore_index: int | None = option(at_least=0, help="label of voxels that count nowhere")
    spacing: tuple[float, ...] | None = option(
        above=0, help="voxel size to compute in, in mm along right, anterior, superior (default: median of the training images)"
    )
    patch_size: tuple[int, ...] | None = option(
        at_least=1, help="voxels of a training patch and of a window (default: the median training image, at most 96 each)"
    )
    patches_per_volume: int = option(4, at_least=1, help="training patches of each volume in an epoch; each is a row")
    foreground_share: float = option(
        0.5,
        at_least=0,
        at_most=1,
        help="share of the patches around a voxel of a class, all classes alike; others lie anywhere",
    )
    flip_axes: tuple[str, ...] = option(
        ("x", "y", "z"),
        choices=("x", "y", "z", "none"),
        help="axes along which half of the patches are flipped: x left-right, y back-front, z bottom-top",
    )
    random_rotation: float = option(
        0.0, at_least=0, at_most=180, help="turn patches by so many degrees at most about each axis"
    )
    random_scale: tuple[float, ...] | None = option(
        above=0, help="LOW,HIGH: enlarge patches by a random factor between the two"
    )
    random_intensity: float = option(
        0.0, at_least=0, below=1, help="change contrast by this share at most, brightness by this many standard deviations"
    )
    random_noise: float = option(
        0.0, at_least=0, help="add Gaussian noise to patches, of this standard deviation at most (a volume's own is 1)"
    )
    cross_entropy_weight: float = option(1.0, at_least=0, help="weight of the cross-entropy in the loss")
    dice_weight: float = option(1.0, at_least=0, help="weight of the Dice loss, which is computed per patch")
    class_weights: tuple[float, ...] | None = option(
        at_least=0, help="weights of background and classes in the cross-entropy (default: all 1)"
    )
    overlap: float | None = option(
        at_least=0, below=1, help="share by which neighbouring windows overlap in prediction (default: 0.5, or the model's)"
    )
    window_batch_size: int = option(4, at_least=1, help="windows in one forward pass of a prediction")

    evaluation_rows = 1  # volumes of one batch are padded to the largest of them

    def problems(self) -> list[str]:
        found = [
            f"{name} is not installed: pip install -r {REQUIREMENTS}"
            for name in ("monai", "nibabel")
            if importlib.util.find_spec(name) is None
        ]
        for name in ("spacing", "patch_size"):
            value = getattr(self, name)
            if value is not None and len(value) != 3:
                found.append(f"--{name} has {len(value)} numbers, expected 3")
        stride = math.prod(self.strides)
        if self.patch_size is not None and any(size % stride for size in self.patch_size):
            sizes = ",".join(map(str, self.patch_size))
            found.append(f"--patch_size {sizes}: each must be a multiple of {stride}, the product of --strides")
        if self.cross_entropy_weight == self.dice_weight == 0:
            found.append("--cross_entropy_weight and --dice_weight are both 0; there is nothing to learn")
        scale = self.random_scale
        if scale is not None and (len(scale) != 2 or scale[0] > scale[1]):
            found.append(f"--random_scale {','.join(map(str, scale))}: expected two numbers, the lower one first")
        if "none" in self.flip_axes and len(self.flip_axes) > 1:
            found.append("--flip_axes none stands beside axes; keep one")
        if self.metrics:
            found.append("--metrics: volumes are scored by Dice, IoU and Hausdorff distance alone; leave it out")
        best = (self.metric_for_best_model or "").removeprefix("eval_")
        if "hd95" in best and self.greater_is_better is not False:
            found.append(f"--metric_for_best_model {best} is a distance: add --greater_is_better false")
        wants = {"train": self.modes.train, "test": self.modes.predict and self.test_file is None}
        if wants["train"] and self.train_file is None:
            found.append("no training volumes: give --train_file FOLDER")
        if not self.modes.train and self.model_name_or_path is None:
            found.append("--model_name_or_path is missing: name the folder of an exported model")
        if wants["test"] and self.train_file is None:
            found.append("no test volumes: give --test_file")
        if not self.modes.train and self.modes.evaluate and self.validation_file is None and self.train_file is None:
            found.append("no validation volumes: give --validation_file")
        return found
