"""The arguments that image tasks share."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.arguments import groups
from finetune.arguments.parsing import SpaceSeparated, changed_option, option

RESIZED_CROP = "--random_crop resizes what it takes, but windows are not resized; give --random_scale instead"
FORMS = "a folder, csv, tsv, json, jsonl or parquet; .gz of the text ones; one or several, and patterns ('site-*')"


@dataclass(frozen=True, kw_only=True)
class ImageArguments(
    groups.LaunchArguments,
    groups.RunArguments,
    groups.OptimizationArguments,
    groups.BatchArguments,
    groups.DataArguments,
    groups.ModelArguments,
):
    """Images"""

    # Other defaults and words for arguments of the groups above; they stand there in --help.
    train_file: SpaceSeparated[str] | None = changed_option(groups.DataArguments, "train_file", None, FORMS)
    validation_file: SpaceSeparated[str] | None = changed_option(
        groups.DataArguments, "validation_file", None, "the same; without it --validation_split takes rows from training"
    )
    test_file: SpaceSeparated[str] | None = changed_option(
        groups.DataArguments, "test_file", None, "the same: pictures to predict, and to score when they have labels"
    )
    learning_rate: float | None = changed_option(
        groups.OptimizationArguments, "learning_rate", None, "peak learning rate (default: 1e-3, of pretrained weights 5e-5)"
    )
    global_batch_size: int | None = changed_option(
        groups.BatchArguments,
        "global_batch_size",
        None,
        "samples per optimizer step over all processes (default: 128, with pretrained weights 32)",
    )

    image_column: str = option("image", help="column of a picture: the path of a file, from the table's folder, or the picture")
    image_mode: str = option(
        "auto",
        choices=("auto", "L", "RGB"),
        help="what pictures are read as: L, grey, or RGB (auto: what the model needs; for a new one, L if all training "
        "pictures are grey)",
    )
    random_crop: float | None = option(
        above=0, at_most=1, help="train on random crops of at least this share of a picture's area, resized to the model's size"
    )
    random_flip: bool = option(False, help="swap left and right of half of the training pictures")
    random_rotation: float = option(0.0, at_least=0, at_most=180, help="rotate training pictures by so many degrees at most")
    color_jitter: float = option(
        0.0, at_least=0, below=1, help="change brightness, contrast and saturation of training pictures by this share at most"
    )
    sync_batch_norm: bool = option(
        False, help="batch norm over the rows of all processes; without it each process normalises its own"
    )

    batch_sizes = (128, 32)  # the default of --global_batch_size for random and for pretrained weights

    def __post_init__(self) -> None:
        """What suits a model that is trained from random weights is too much for a pretrained one."""
        super().__post_init__()
        pretrained = self.model_name_or_path is not None and not self.from_scratch
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", 5e-5 if pretrained else 1e-3)
        if self.global_batch_size is None and self.per_device_train_batch_size is None:
            object.__setattr__(self, "global_batch_size", self.batch_sizes[pretrained])

    def problems(self) -> list[str]:
        if not self.modes.train and self.from_scratch:
            return ["--from_scratch is for training, which is not requested; name a trained model, or add --do_train"]
        return []


@dataclass(frozen=True, kw_only=True)
class MaskArguments(ImageArguments):
    """Masks"""

    train_file: SpaceSeparated[str] | None = changed_option(
        groups.DataArguments,
        "train_file",
        None,
        "folder with images/ and masks/ of equal names, in it or in train/ and val/; CamVid's or Cityscapes' folders; or csv, "
        "tsv, json, jsonl or parquet with their paths; one or several, and patterns ('site-*')",
    )
    label_column: str = option("label", help="column of the mask: the path of a file, from the table's folder, or the mask")
    classes_file: str | None = option(
        reads=True,
        per_machine=True,
        help="a class a line, numbered from 0, or NUMBER NAME; (ignore) behind a name: its pixels do not count (default: "
        "classes.txt beside the training data, else numbers)",
    )
    ignore_index: int = option(255, at_least=0, at_most=65535, help="value of pixels that do not count")
    image_size: tuple[int, ...] | None = option(
        at_least=16, help="HEIGHT,WIDTH of the model's input, or one number for both (default: the model's own)"
    )
    inference: str | None = option(
        choices=("whole", "sliding_window"),
        help="what is predicted: whole pictures, resized to --image_size; or windows of that size, in the picture's own "
        "resolution, of which training sees crops (default: whole, or what an exported model was trained for)",
    )
    overlap: float | None = option(
        at_least=0, below=1, help="share by which neighbouring windows overlap (default: 0.25, or the exported model's)"
    )
    window_batch_size: int = option(4, at_least=1, help="windows in one forward pass of a prediction")
    random_scale: tuple[float, ...] | None = option(
        above=0, help="LOW,HIGH: train on crops of --image_size from pictures enlarged by a random factor between the two"
    )
    cross_entropy_weight: float = option(1.0, at_least=0, help="weight of the cross-entropy in the loss")
    dice_weight: float = option(1.0, at_least=0, help="weight of the Dice loss, which is computed per picture")
    class_weights: str = option(
        "none",
        choices=("none", "balanced"),
        help="of the cross-entropy; balanced: the median class's number of training pixels over a class's own",
    )

    global_batch_size: int | None = changed_option(
        groups.BatchArguments, "global_batch_size", None, "samples per optimizer step over all processes (default: 16)"
    )

    batch_sizes = (16, 16)
    evaluation_rows = 8  # pictures of one batch may be large, and are filled up to the largest of them

    def problems(self) -> list[str]:
        found, scale = [], self.random_scale
        if self.cross_entropy_weight == self.dice_weight == 0:
            found.append("--cross_entropy_weight and --dice_weight are both 0; there is nothing to learn")
        if scale is not None and (len(scale) != 2 or scale[0] > scale[1]):
            found.append(f"--random_scale {','.join(map(str, scale))}: expected two numbers, the lower one first")
        if scale is not None and self.random_crop is not None:
            found.append("--random_scale and --random_crop are both given; keep one")
        if self.image_size is not None and len(self.image_size) > 2:
            found.append(f"--image_size has {len(self.image_size)} numbers, expected HEIGHT,WIDTH")
        if self.random_crop is not None and self.inference == "sliding_window":
            found.append(RESIZED_CROP)
        if self.metrics:
            found.append("--metrics: masks are scored by IoU, Dice and pixel accuracy alone; leave it out")
        if self.model_name_or_path is None and self.config_name is None:
            found.append("no model: give --model_name_or_path, or --config_name with --from_scratch")
        return found
