"""Arguments of tasks on volumes."""

import math
from dataclasses import dataclass

from samerun.arguments import (
    BatchArguments,
    FileArguments,
    LaunchArguments,
    OptimizationArguments,
    RunArguments,
    SmoothingArguments,
)
from samerun.images.arguments import problems_of_masks
from samerun.parsing import SpaceSeparated, changed_option, is_installed, option


@dataclass(frozen=True, kw_only=True)
class VolumeDataArguments(FileArguments):
    """Data"""

    train_file: SpaceSeparated[str] | None = changed_option(
        FileArguments,
        "train_file",
        "folder with images/ and labels/ of equal names (NIfTI), and split.csv (file,split) if it "
        "has several splits; or "
        "a csv, tsv, json, jsonl or parquet file of paths; one or several, and patterns ('hospital-*')",
    )
    validation_file: SpaceSeparated[str] | None = changed_option(
        FileArguments,
        "validation_file",
        "the same; without it --validation_split takes volumes from training",
    )
    test_file: SpaceSeparated[str] | None = changed_option(
        FileArguments, "test_file", "volumes to predict, and to score when they have labels"
    )
    image_column: str = option("image", help="column of the images' paths, relative to the file")
    label_column: str = option("label", help="column of the labels' paths")
    id_column: str = option(
        "id", help="column that names a volume in predictions; without it, its file's name does"
    )


@dataclass(frozen=True, kw_only=True)
class NetworkArguments:
    """Network (MONAI's UNet with instance norm)"""

    model_name_or_path: str | None = option(
        reads=True,
        help="folder of an exported model, to predict with or to start training from; it keeps its settings",
    )
    channels: tuple[int, ...] = option((16, 32, 64, 128, 256), at_least=1, help="channels of each level")
    strides: tuple[int, ...] = option(
        (2, 2, 2, 2), at_least=1, help="downsampling between levels, one fewer than channels"
    )
    dropout: float = option(0.0, at_least=0, below=1, help="dropout of each convolution")

    def problems(self) -> list[str]:
        if len(self.channels) != len(self.strides) + 1 or len(self.channels) < 2:
            return [
                f"--channels has {len(self.channels)} numbers and --strides {len(self.strides)}; "
                "expected one fewer strides"
            ]
        return []


@dataclass(frozen=True, kw_only=True)
class VolumeArguments(
    LaunchArguments,
    RunArguments,
    OptimizationArguments,
    SmoothingArguments,
    BatchArguments,
    NetworkArguments,
    VolumeDataArguments,
):
    """Volumes"""

    class_names: tuple[str, ...] | None = option(
        help="names of the labels 1, 2, ...; 0 is the background (default: numbers, as many as training "
        "labels have)"
    )
    ignore_index: int | None = option(at_least=0, help="label of voxels left out of loss and metrics")
    spacing: tuple[float, ...] | None = option(
        above=0,
        help="voxel size to resample to, in mm along right, anterior, superior (default: median of "
        "training images)",
    )
    patch_size: tuple[int, ...] | None = option(
        at_least=1,
        help="voxels of a training patch and of a window (default: the median training image, at most 96 "
        "each)",
    )
    patches_per_volume: int = option(
        4, at_least=1, help="training patches per volume and epoch; each is a row"
    )
    foreground_share: float = option(
        0.5,
        at_least=0,
        at_most=1,
        help="share of patches centred on a voxel of a random class; the others are placed at random",
    )
    flip_axes: tuple[str, ...] = option(
        ("x", "y", "z"),
        choices=("x", "y", "z", "none"),
        help="axes along which half of the patches are flipped: x left-right, y back-front, z bottom-top",
    )
    random_rotation: float = option(
        0.0, at_least=0, at_most=180, help="rotate patches by up to this many degrees about each axis"
    )
    random_scale: tuple[float, ...] | None = option(
        above=0, help="LOW,HIGH: scale patches by a random factor in this range"
    )
    random_intensity: float = option(
        0.0,
        at_least=0,
        below=1,
        help="change contrast by up to this share, brightness by up to this many standard deviations",
    )
    random_noise: float = option(
        0.0,
        at_least=0,
        help="add Gaussian noise of up to this standard deviation to patches (volumes have deviation 1)",
    )
    cross_entropy_weight: float = option(1.0, at_least=0, help="weight of the cross-entropy in the loss")
    dice_weight: float = option(1.0, at_least=0, help="weight of the Dice loss, which is computed per patch")
    class_weights: tuple[float, ...] | None = option(
        at_least=0, help="weights of background and classes in the cross-entropy (default: all 1)"
    )
    overlap: float | None = option(
        at_least=0,
        below=1,
        help="overlap of neighbouring windows, as a share of a window (default: 0.5, or the model's)",
    )
    window_batch_size: int = option(4, at_least=1, help="windows per forward pass in prediction")

    evaluation_rows = 1  # volumes are padded to the largest of the batch

    def problems(self) -> list[str]:
        problems = [
            f"{name} is not installed: pip install -r requirements-vision.txt"
            for name in ("monai", "nibabel")
            if not is_installed(name)
        ]
        for name in ("spacing", "patch_size"):
            value = getattr(self, name)
            if value is not None and len(value) != 3:
                problems.append(f"--{name} has {len(value)} numbers, expected 3")
        stride = 1 if self.model_name_or_path else math.prod(self.strides)  # a model keeps its own
        if self.patch_size is not None and any(size % stride for size in self.patch_size):
            sizes = ",".join(map(str, self.patch_size))
            problems.append(
                f"--patch_size {sizes}: each must be a multiple of {stride}, the product of --strides"
            )
        problems += problems_of_masks(self)
        if "none" in self.flip_axes and len(self.flip_axes) > 1:
            problems.append("--flip_axes has none and an axis; keep one")
        if not self.modes.train and self.model_name_or_path is None:
            problems.append("--model_name_or_path is missing: name the folder of an exported model")
        return problems
