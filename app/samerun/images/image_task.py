"""The base class of image tasks: reads and checks images, decodes and augments them in batches, builds and
exports models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from samerun.data.cache import fingerprint
from samerun.data.tables import split_off
from samerun.errors import SHOWN, InputError, collecting, more
from samerun.images.augmentation import Augmentation, row_generator
from samerun.images.decoding import ALPHA, DEEP, too_deep
from samerun.images.examples import Examples, read_examples
from samerun.images.processing import Processing
from samerun.images.sources import ArrayImages, EncodedImages, Images, Inspection
from samerun.models import adapters
from samerun.models.export import export_model
from samerun.models.pretrained import load_config, load_model_and_new_names
from samerun.models.sync_batch_norm import allow_single_values, has_batch_norm, synchronise_batch_norm
from samerun.models.weight_files import model_content
from samerun.plan import Modes
from samerun.runtime import Launch
from samerun.task import Batch, Data, Split, Task, mixing_fingerprint

MOST_PIXELS = 50_000_000  # of an image in a request to a server


@dataclass(frozen=True)
class Targets:
    """The targets of a split. `values`: (rows,) int64 class numbers, or masks. `content`: a hash of them.
    `counts`: for each mask, value -> number of pixels."""

    values: np.ndarray | Images
    content: str
    counts: list[dict[int, int]] | None = None

    @classmethod
    def of_numbers(cls, numbers: np.ndarray) -> Targets:
        return cls(numbers, fingerprint([numbers.tobytes()]))


@dataclass(frozen=True, kw_only=True)
class ImageSplit(Split):
    """A split of images. `targets`: None without labels. `where`: row -> its name in messages."""

    images: Images
    targets: Targets | None
    where: Callable[[int], str]


class ImageTask(Task):
    """Base class of tasks whose rows are images. A subclass defines targets and model.

    `load` sets `launch`, `modes`, `notes`, `inspected`, `processing`, `augmentation` and `splits`.
    """

    input_kind = "images"
    memory_advice = "a smaller --per_device_train_batch_size, "
    evaluation_rows: int | None = None  # of a batch; None: the arguments' default
    mask_fill = 0  # mask value outside of a rotated image

    @abstractmethod
    def choose_model(
        self, examples: dict[str, Examples], inspected: dict[str, Inspection], notes: list[str]
    ) -> Processing:
        """Chooses and checks the model's configuration. Returns its preprocessing. `examples`, `inspected`:
        by split."""

    @abstractmethod
    def encode_targets(
        self, examples: dict[str, Examples], inspected: dict[str, Inspection], notes: list[str]
    ) -> dict[str, Targets]:
        """The targets of the labelled splits. Raises `InputError` for invalid labels."""

    def mask_labels(self, mask: np.ndarray) -> np.ndarray:
        """Maps the values of a mask to targets, (height, width) int64."""
        return mask.astype(np.int64)

    def load(self, launch: Launch, modes: Modes) -> Data:
        arguments, notes = self.arguments, []
        self.launch, self.modes, self.notes = launch, modes, notes
        adapters.check_quantization(arguments, launch)
        examples = self.read(notes)
        inspected = inspect_all(examples, notes)
        self.inspected = inspected
        self.processing = self.choose_model(examples, inspected, notes)
        if arguments.image_mode not in ("auto", self.processing.mode):
            raise InputError(
                f"--image_mode {arguments.image_mode}: the model sees {self.input_words()}; leave it out"
            )
        if self.processing.mode == "L" and arguments.image_mode == "auto":
            check_grey(examples, inspected)
        targets = self.encode_targets(examples, inspected, notes)
        self.augmentation = self.make_augmentation()
        self.splits = {
            name: self._split(name, rows, targets.get(name), inspected[name])
            for name, rows in examples.items()
        }
        if modes.train:
            notes.insert(0, f"{len(self.splits['train'])} training images, read as {self.input_words()}")
        if arguments.test_file is not None and not modes.predict:
            notes.append(
                f"--test_file {' '.join(arguments.test_file)} is not read: --do_predict is not given"
            )
        return Data(self.splits, self._fingerprint(), notes)

    def read(self, notes: list[str]) -> dict[str, Examples]:
        """The images of the splits that the run needs. Raises `InputError` with all problems."""
        examples, problems = {}, []
        for split, needed in zip(("train", "validation", "test"), self.modes, strict=True):
            with collecting(problems):
                rows = self.read_split(split, notes) if needed else None
                if rows is not None:
                    examples[split] = rows
                elif needed and (split != "validation" or not self.modes.train):
                    problems.append(f"no {split} images: give --{split}_file or --dataset_name")
        if problems:
            raise InputError(*problems)
        if self.modes.train and self.modes.evaluate and "validation" not in examples:
            train = examples["train"]
            parts = split_off(train, self.arguments.validation_split, self.arguments.seed)
            examples |= {
                name: train.take(rows) for name, rows in zip(("train", "validation"), parts, strict=True)
            }
            notes.append(f"{len(parts[1])} training images are kept for validation (--validation_split)")
        return examples

    def read_split(self, split: str, notes: list[str]) -> Examples | None:
        """The images of a split; None if the arguments name no source."""
        return read_examples(self.arguments, split, notes)

    def make_augmentation(self) -> Augmentation:
        a = self.arguments
        size, fill = self.processing.size, self.mask_fill
        return Augmentation(size, a.random_crop, a.random_flip, a.random_rotation, a.color_jitter, fill)

    def input_words(self) -> str:
        """The size and mode of the model's input, for messages."""
        height, width = self.processing.size
        return f"{width}x{height} {'grey levels' if self.processing.mode == 'L' else 'RGB'}"

    def fit(self, image: Image.Image, mask: Image.Image | None) -> tuple[np.ndarray, np.ndarray | None]:
        """An image and its mask, resized to the model's input."""
        return self.processing.fit(image), None if mask is None else np.asarray(
            self.processing.resize_mask(mask)
        )

    def _split(
        self, name: str, examples: Examples, targets: Targets | None, inspected: Inspection
    ) -> ImageSplit:
        is_train, images = name == "train", examples.images
        if is_train:
            collate = partial(self._collate, images, targets)
        else:
            collate = partial(self.collate_to_evaluate, name, images, targets)
        return ImageSplit(
            path=examples.path,
            collate=collate,
            num_rows=len(examples),
            augment=collate if is_train and not self.augmentation.is_off else None,
            labelled=targets is not None,
            ids=examples.ids,
            content=partial(_content, inspected, targets),
            images=images,
            targets=targets,
            where=examples.where,
            evaluation_rows=self.evaluation_rows,
            mixture=examples.mixture(self.arguments.mixing_weights, self.notes) if is_train else None,
        )

    def rows_in_memory(self, items: Sequence[bytes]) -> ImageSplit:
        images = EncodedImages(list(items), Path(), "image {}".format)
        examples = {"test": Examples("images", images, None, images.name, range(len(items)))}
        inspected = inspect_all(examples, [])
        for row, header in enumerate(inspected["test"].headers):
            if header.width * header.height > MOST_PIXELS:
                raise InputError(
                    f"{images.name(row)}: has {header.width}x{header.height} pixels; expected at "
                    f"most {MOST_PIXELS} in all"
                )
        if self.processing.mode == "L" and self.arguments.image_mode == "auto":
            check_grey(examples, inspected)
        self.encode_targets(examples, inspected, [])
        return self._split("test", examples["test"], None, inspected["test"])

    def collate_to_evaluate(
        self, split: str, images: Images, targets: Targets | None, rows: np.ndarray
    ) -> Batch:
        """Collates rows of the "validation" or "test" split."""
        return self._collate(images, targets, rows)

    def _collate(
        self, images: Images, targets: Targets | None, rows: np.ndarray, epoch: int | None = None
    ) -> Batch:
        """Collates rows; with an epoch, augments them."""
        values = None if targets is None else targets.values
        labels = torch.from_numpy(values[rows]) if isinstance(values, np.ndarray) else None
        if epoch is None and self._needs_no_fit(images) and not isinstance(values, Images):
            pixels = images.pixels[rows]  # the whole batch at once
        else:
            pairs = [self._pair(images, values, int(row), epoch) for row in rows]
            pixels = np.stack([image for image, _ in pairs])
            if isinstance(values, Images):
                labels = torch.from_numpy(np.stack([self.mask_labels(mask) for _, mask in pairs]))
        return Batch(
            torch.as_tensor(rows, dtype=torch.int64),
            {"pixel_values": self.processing.normalize(pixels)},
            labels,
        )

    def _needs_no_fit(self, images: Images) -> bool:
        """Whether the images are an array that already has the mode and size of the model's input."""
        if not isinstance(images, ArrayImages) or self.processing.processor is not None:
            return False
        same_mode = (images.pixels.ndim == 3) == (self.processing.mode == "L")
        return same_mode and images.pixels.shape[1:3] == self.processing.size

    def _pair(
        self, images: Images, masks: Any, row: int, epoch: int | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(image, mask or None) of a row as arrays of the input's size; with an epoch, augmented."""
        image = images.load(row, self.processing.mode)
        mask = masks.load_mask(row) if isinstance(masks, Images) else None
        if epoch is not None:
            image, mask = self.augmentation(image, mask, row_generator(self.arguments.seed, epoch, row))
            if self.augmentation.has_fixed_size:
                return np.asarray(image), None if mask is None else np.asarray(mask)
        return self.fit(image, mask)

    def load_trained(self, auto_class: Any, path: str | Path) -> torch.nn.Module:
        """Loads a model of transformers from a folder or the hub. Raises `InputError` if its head is not
        trained."""
        arguments = replace(
            self.arguments, model_name_or_path=str(path), config_name=None, from_scratch=False
        )
        model, new_names = load_model_and_new_names(auto_class, arguments, load_config(arguments))
        if new_names:
            raise InputError(f"{path}: has no trained classifier ({min(new_names)} is missing); train first")
        return model

    def limit_training(self, model: Any) -> Any:
        """Applies --lora_r and --freeze: freezes the other parameters, except for the head. Raises
        `InputError` for layers that the model does not have."""
        if self.arguments.layerwise_lr_decay is not None and not hasattr(model.config, "num_hidden_layers"):
            kind = model.config.model_type
            raise InputError(
                f"--layerwise_lr_decay: a {kind} model's layers are not numbered throughout; leave it out"
            )
        head = {
            name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")
        }
        return adapters.limit_training(model, self.arguments, head)

    def learning_rate_scale(self, model: torch.nn.Module, parameter: str) -> float:
        decay = self.arguments.layerwise_lr_decay
        return (
            1.0
            if decay is None
            else adapters.layerwise_scale(parameter, model.config.num_hidden_layers, decay)
        )

    @property
    def rounding(self) -> str:
        """The precision that decides how far outputs of best/ may differ from the run's."""
        return adapters.rounded_as(self.arguments, self.launch.precision)

    def save_best(
        self, path: Path, model: Any, plain: Any, weights: dict[str, torch.Tensor], check: Callable
    ) -> None:
        """Writes best/. `plain`: a model without weights, of the same class and configuration as the trained
        `model`."""
        saved, weights = adapters.to_export(model, plain, weights, self.arguments)
        export_model(path, saved, weights, check, self.processor)

    def with_batch_norm(self, model: torch.nn.Module) -> torch.nn.Module:
        """Applies --sync_batch_norm. Raises `InputError` if the model has no batch norm."""
        has_norm, several = has_batch_norm(model), self.launch.world_size > 1
        if self.arguments.sync_batch_norm and not has_norm:
            raise InputError("--sync_batch_norm: this model has no batch norm; leave it out")
        if self.arguments.sync_batch_norm and several:
            return synchronise_batch_norm(model, on_gpu=self.launch.device_type == "cuda")
        if has_norm and several:
            self.notes.append(
                "batch norm: each process normalises its own rows (--sync_batch_norm: those of all together)"
            )
        return allow_single_values(model)

    def _fingerprint(self) -> dict[str, Any]:
        """The run's fingerprint: equal on every machine, and equal to that of a checkpoint to resume from."""
        arguments, rows = self.arguments, {}
        for name in (name for name in self.splits if name != "test"):
            rows[f"{name}_rows"] = len(self.splits[name])
            rows[f"{name}_content"] = self.splits[name].content()[:16]
        weights = None if arguments.from_scratch else arguments.model_name_or_path
        augmentation = [
            arguments.random_crop,
            arguments.random_flip,
            arguments.random_rotation,
            arguments.color_jitter,
        ]
        return {
            "task": self.name,
            "model": model_content(arguments.config_name or arguments.model_name_or_path, weights),
            **self.task_fingerprint(),
            "input": self.input_words(),
            "augmentation": augmentation,
            "sync_batch_norm": arguments.sync_batch_norm,
            **adapters.fingerprint(arguments),
            **mixing_fingerprint(self.splits),
            **rows,
        }

    def task_fingerprint(self) -> dict[str, Any]:
        """Further entries of a task for the run's fingerprint."""
        return {}


def inspect_all(examples: dict[str, Examples], notes: list[str]) -> dict[str, Inspection]:
    """Inspects the images of all splits. Notes dropped alpha channels, and training images in other splits.
    Raises `InputError` for files that are missing, no images, or have more than 8 bits per pixel."""
    inspected, problems = {}, []
    for split, rows in examples.items():
        try:
            inspected[split] = rows.images.inspect()
        except InputError as error:
            problems += error.problems
            continue
        headers = inspected[split].headers
        deep = [row for row, header in enumerate(headers) if header.mode in DEEP]
        problems += [
            f"{rows.images.name(row)}: {too_deep(headers[row].mode)}" for row in deep[:SHOWN]
        ] + more(len(deep))
        if num_alpha := sum(header.mode in ALPHA for header in headers):
            notes.append(
                f"{rows.path}: {num_alpha} of {len(rows)} images have an alpha channel, which is dropped"
            )
    if problems:
        raise InputError(*problems)
    if "train" in inspected:
        digests = set(inspected["train"].digests)
        for split in ("validation", "test"):
            if split in inspected and (
                shared := sum(digest in digests for digest in inspected[split].digests)
            ):
                notes.append(
                    f"{shared} of {len(examples[split])} {split} images are in the training data too"
                )
    return inspected


def check_grey(examples: dict[str, Examples], inspected: dict[str, Inspection]) -> None:
    """Raises `InputError` for colour images, which a model with one input channel cannot use."""
    problems = []
    for split, rows in examples.items():
        colour = [row for row, header in enumerate(inspected[split].headers) if not header.is_grey]
        problems += [
            f"{rows.images.name(row)}: a colour image ({inspected[split].headers[row].mode}), but "
            "the model sees grey levels "
            "only; convert images to grey by --image_mode L, or train a model of colours (--image_mode RGB)"
            for row in colour[:SHOWN]
        ] + more(len(colour))
    if problems:
        raise InputError(*problems)


def _content(inspected: Inspection, targets: Targets | None) -> str:
    return fingerprint([inspected.content, *([] if targets is None else [targets.content])])
