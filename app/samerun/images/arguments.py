"""The arguments that image tasks share."""

from dataclasses import dataclass
from typing import Any

from samerun.arguments import (
    BatchArguments,
    DataArguments,
    LaunchArguments,
    ModelArguments,
    OptimizationArguments,
    RunArguments,
    SmoothingArguments,
)
from samerun.parsing import SpaceSeparated, changed_option, option

RESIZED_CROP = (
    "--random_crop resizes its crops, but --inference sliding_window resizes nothing; give "
    "--random_scale instead"
)
FORMS = (
    "a folder, csv, tsv, json, jsonl or parquet; .gz of the text ones; one or several, and patterns "
    "('site-*')"
)


@dataclass(frozen=True, kw_only=True)
class ImageArguments(
    LaunchArguments,
    RunArguments,
    OptimizationArguments,
    SmoothingArguments,
    BatchArguments,
    ModelArguments,
    DataArguments,
):
    """Images"""

    # Other defaults and help for arguments of the groups above; --help shows them in their groups.
    train_file: SpaceSeparated[str] | None = changed_option(DataArguments, "train_file", FORMS)
    validation_file: SpaceSeparated[str] | None = changed_option(
        DataArguments, "validation_file", "the same; without it --validation_split takes rows from training"
    )
    test_file: SpaceSeparated[str] | None = changed_option(
        DataArguments, "test_file", "the same: images to predict, and to score when they have labels"
    )
    learning_rate: float | None = changed_option(
        OptimizationArguments,
        "learning_rate",
        "peak learning rate (default: 1e-3, of pretrained weights 5e-5)",
    )
    global_batch_size: int | None = changed_option(
        BatchArguments,
        "global_batch_size",
        "samples per optimizer step over all processes (default: 128, with pretrained weights 32)",
    )

    image_column: str = option(
        "image", help="column of images, or of their paths relative to the table's folder"
    )
    image_mode: str = option(
        "auto",
        choices=("auto", "L", "RGB"),
        help="read images as L (grey) or RGB (auto: what the model needs; for a new model, L if all "
        "training images are grey)",
    )
    random_crop: float | None = option(
        above=0,
        at_most=1,
        help="train on random crops of at least this share of the area, resized to the model's input size",
    )
    random_flip: bool = option(False, help="flip half of the training images left to right")
    random_rotation: float = option(
        0.0, at_least=0, at_most=180, help="rotate training images by up to this many degrees"
    )
    color_jitter: float = option(
        0.0,
        at_least=0,
        below=1,
        help="change brightness, contrast and saturation of training images by up to this share",
    )
    sync_batch_norm: bool = option(
        False, help="compute batch norm over the rows of all processes, instead of each process's own"
    )

    @property
    def changes(self) -> tuple[float | None, bool, float, float]:
        """The first fields of `Augmentation` after its size."""
        return self.random_crop, self.random_flip, self.random_rotation, self.color_jitter

    batch_sizes = (128, 32)  # defaults of --global_batch_size for random and for pretrained weights

    def __post_init__(self) -> None:
        """Sets the defaults that depend on whether the weights are pretrained."""
        super().__post_init__()
        pretrained = self.model_name_or_path is not None and not self.from_scratch
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", 5e-5 if pretrained else 1e-3)
        if self.global_batch_size is None and self.per_device_train_batch_size is None:
            object.__setattr__(self, "global_batch_size", self.batch_sizes[pretrained])


def problems_of_masks(arguments: Any) -> list[str]:
    """Those of the weights of the loss and of --random_scale."""
    problems, scale = [], arguments.random_scale
    if arguments.cross_entropy_weight == arguments.dice_weight == 0:
        problems.append("--cross_entropy_weight and --dice_weight are both 0; there is nothing to learn")
    if scale is not None and (len(scale) != 2 or scale[0] > scale[1]):
        given = ",".join(map(str, scale))
        problems.append(f"--random_scale {given}: expected two numbers, the lower one first")
    return problems


@dataclass(frozen=True, kw_only=True)
class MaskArguments(ImageArguments):
    """Masks"""

    train_file: SpaceSeparated[str] | None = changed_option(
        DataArguments,
        "train_file",
        "folder with images/ and masks/ of equal names, in it or in train/ and val/; CamVid's or "
        "Cityscapes' folders; or csv, "
        "tsv, json, jsonl or parquet with their paths; one or several, and patterns ('site-*')",
    )
    label_column: str = option(
        "label", help="column of masks, or of their paths relative to the table's folder"
    )
    classes_file: str | None = option(
        reads=True,
        per_machine=True,
        help="one class name per line, numbered from 0, or lines NUMBER NAME; a class with (ignore) "
        "behind its name is left "
        "out of loss and metrics (default: classes.txt beside the training data, else numbers)",
    )
    ignore_index: int = option(
        255, at_least=0, at_most=65535, help="mask value of pixels left out of loss and metrics"
    )
    image_size: tuple[int, ...] | None = option(
        at_least=16,
        help="HEIGHT,WIDTH of the model's input, or one number for both (default: the model's own)",
    )
    inference: str | None = option(
        choices=("whole", "sliding_window"),
        help="whole: resize images to --image_size; sliding_window: keep their resolution, train on crops "
        "and predict windows of --image_size (default: whole, or that of the exported model)",
    )
    overlap: float | None = option(
        at_least=0,
        below=1,
        help="overlap of neighbouring windows, as a share of a window (default: 0.25, or the model's)",
    )
    window_batch_size: int = option(4, at_least=1, help="windows per forward pass in prediction")
    random_scale: tuple[float, ...] | None = option(
        above=0,
        excludes=("random_crop",),
        help="LOW,HIGH: scale training images by a random factor in this range and crop --image_size "
        "from them",
    )
    cross_entropy_weight: float = option(1.0, at_least=0, help="weight of the cross-entropy in the loss")
    dice_weight: float = option(1.0, at_least=0, help="weight of the Dice loss, which is computed per image")
    class_weights: str = option(
        "none",
        choices=("none", "balanced"),
        help="class weights of the cross-entropy; balanced: median pixel count of all classes / pixel "
        "count of the class",
    )

    global_batch_size: int | None = changed_option(
        BatchArguments, "global_batch_size", "samples per optimizer step over all processes (default: 16)"
    )

    batch_sizes = (16, 16)
    evaluation_rows = 8  # images may be large, and are padded to the largest of the batch

    def problems(self) -> list[str]:
        problems = problems_of_masks(self)
        if self.image_size is not None and len(self.image_size) > 2:
            problems.append(f"--image_size has {len(self.image_size)} numbers, expected HEIGHT,WIDTH")
        if self.random_crop is not None and self.inference == "sliding_window":
            problems.append(RESIZED_CROP)
        if self.model_name_or_path is None and self.config_name is None:
            problems.append("no model: give --model_name_or_path, or --config_name with --from_scratch")
        return problems
