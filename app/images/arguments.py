"""The arguments that image tasks share."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.arguments import groups
from finetune.arguments.parsing import changed_option, option

FORMS = "a folder, csv, tsv, json, jsonl or parquet; .gz of the text ones"


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
    train_file: str | None = changed_option(groups.DataArguments, "train_file", None, FORMS)
    validation_file: str | None = changed_option(
        groups.DataArguments, "validation_file", None, "the same; without it --validation_split takes rows from training"
    )
    test_file: str | None = changed_option(
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

    def __post_init__(self) -> None:
        """What suits a model that is trained from random weights is too much for a pretrained one."""
        pretrained = self.model_name_or_path is not None and not self.from_scratch
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", 5e-5 if pretrained else 1e-3)
        if self.global_batch_size is None and self.per_device_train_batch_size is None:
            object.__setattr__(self, "global_batch_size", 32 if pretrained else 128)

    def problems(self) -> list[str]:
        if not self.modes.train and self.from_scratch:
            return ["--from_scratch is for training, which is not requested; name a trained model, or add --do_train"]
        return []
