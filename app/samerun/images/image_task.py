"""What image tasks share: reading and checking images, batches, the model's layers, the run's fingerprint."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samerun.data.cache import content_key
from samerun.data.splits import read_needed
from samerun.errors import InputError, collecting, in_short, raise_problems
from samerun.export import export_model, plain_model
from samerun.images.data import Examples, Images, Inspection, Targets
from samerun.images.transforms import ALPHA, DEEP, Processing, row_generator, too_deep
from samerun.launch import Launch
from samerun.models import adapters
from samerun.models.pretrained import fingerprint, head_names, load_model
from samerun.models.sync_batch_norm import allow_single_values, has_batch_norm, synchronise_batch_norm
from samerun.plan import Modes
from samerun.task import Batch, Data, Mixture, Split, Task


@dataclass(frozen=True, kw_only=True)
class ImageSplit(Split):
    """A split of images. `targets`: None without labels."""

    images: Images
    inspected: Inspection
    targets: Targets | None


class ImageTask(Task):
    """Base class of tasks whose rows are images. `load` sets `launch`, `processing`, `processor` (of
    transformers, saved with the model), `augmentation`, `inspected` and `splits`."""

    input_kind = "images"
    memory_advice = "a smaller --per_device_train_batch_size, "
    evaluation_rows: int | None = None  # of its splits

    @abstractmethod
    def collator(self, name: str, images: Images, values: Any) -> Callable[..., Batch]:
        """(row numbers, epoch) -> batch, augmented if the epoch is given, of the split of this name ("train",
        "validation", "test"). `values`: those of its `Targets`, None without labels."""

    def read(self, launch: Launch, modes: Modes, read: Callable[..., Examples | None]) -> dict[str, Examples]:
        """Reads and inspects the images of the splits that the run needs (`read_needed`)."""
        self.launch, a = launch, self.arguments
        adapters.check_quantization(a, launch)
        given = a, modes, partial(read, a, notes=self.notes), self.notes
        examples = read_needed(*given, unit="images", elsewhere=" or --dataset_name")
        self.inspected = inspect_all(examples, self.notes)
        return examples

    def make_data(self, examples: dict[str, Examples], targets: dict[str, Targets], **of_task: Any) -> Data:
        """The run's data. `of_task`: the task's entries of the fingerprint."""
        self.splits = {
            name: self.split(name, rows, targets.get(name), self.inspected[name])
            for name, rows in examples.items()
        }
        if "train" in examples:
            self.notes.insert(0, f"{len(examples['train'])} training images, read as {self.processing}")
        return Data(self.splits, self.fingerprint(**of_task), self.notes)

    def split(self, name: str, rows: Examples, targets: Targets | None, inspected: Inspection) -> ImageSplit:
        collate = self.collator(name, rows.images, None if targets is None else targets.values)
        trains, weights = name == "train", self.arguments.mixing_weights
        return ImageSplit(
            rows.path,
            collate,
            len(rows),
            augment=collate if trains and not self.augmentation.is_off else None,
            labelled=targets is not None,
            ids=rows.ids,
            mixture=Mixture.of(rows.source, weights, rows.sources, self.notes) if trains else None,
            content=partial(_content, inspected, targets),
            evaluation_rows=self.evaluation_rows,
            images=rows.images,
            inspected=inspected,
            targets=targets,
        )

    def augment(
        self, image: Any, mask: Any, row: int, epoch: int | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """An image and its mask, if it has one, in the size of the model's input; with an epoch, augmented.
        A function of (seed, epoch, row): the same under any launcher, in any worker, and after a resume."""
        if epoch is not None:
            image, mask = self.augmentation(image, mask, row_generator(self.arguments.seed, epoch, row))
        is_cropped = epoch is not None and self.augmentation.has_fixed_size
        pixels = np.asarray(image) if is_cropped else self.processing.fit(image)
        return pixels, None if mask is None else self.processing.fit_mask(mask)

    def rows_in_memory(self, items: Sequence[bytes]) -> ImageSplit:
        images = Images.of(list(items), Path(), "image {}".format)
        examples = {"test": Examples("images", images, None, range(len(items)))}
        inspected = inspect_all(examples, [])
        check_colours(self.arguments, self.processing, examples, inspected)
        return self.split("test", examples["test"], None, inspected["test"])

    def limit_training(self, model: Any) -> Any:
        """Applies --lora_r and --freeze, but for the head. Raises `InputError` for layers that the model does
        not have."""
        self.head = head_names(model)
        self.num_layers = adapters.numbered_layers(model, self.head)
        by_layer = self.arguments.layerwise_lr_decay, *map(str.isdecimal, self.arguments.freeze or ())
        if any(by_layer) and not self.num_layers:
            raise InputError(
                "--layerwise_lr_decay and --freeze with a number: the layers of a "
                f"{model.config.model_type} model are not numbered throughout; leave it out"
            )
        return adapters.limit_training(model, self.arguments, self.head)

    def learning_rate_scale(self, model: torch.nn.Module, parameter: str) -> float:
        decay = self.arguments.layerwise_lr_decay
        if decay is None or parameter in self.head:
            return 1.0
        return adapters.layerwise_scale(parameter, self.num_layers, decay)

    def tolerance(self, by_precision: dict[str, float]) -> float:
        """How far outputs of best/ may differ from the run's."""
        return by_precision[adapters.rounded_as(self.arguments, self.launch)]

    def save_best(self, path: Path, model: Any, weights: dict[str, torch.Tensor], check: Callable) -> None:
        saved, weights = adapters.to_export(model, plain_model(model), weights, self.arguments)
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

    def fingerprint(self, **of_task: Any) -> dict[str, Any]:
        """The run's fingerprint: equal on every machine, and equal to that of a checkpoint to resume from."""
        return {
            **fingerprint(self.arguments, self.splits),
            **of_task,
            "input": str(self.processing),
            "augmentation": list(self.arguments.changes),
            "sync_batch_norm": self.arguments.sync_batch_norm,
        }


def check_size(auto_class: Any, arguments: Any, config: Any, size: tuple[int, int]) -> None:
    """Raises `InputError` for a size of images that the model cannot process. Runs a forward pass on the meta
    device."""
    with torch.device("meta"), torch.no_grad():
        try:
            model = load_model(auto_class, arguments, config).eval()
            model(pixel_values=torch.zeros(1, getattr(config, "num_channels", 3), *size))
        except (ValueError, RuntimeError) as error:
            if "meta" in str(error):  # a model that reads a tensor's value, as Perceiver does
                return
            shown = size[0] if size[0] == size[1] else f"{size[0]},{size[1]}"
            raise InputError(
                f"--image_size {shown}: this {config.model_type} model cannot work on such images "
                f"({in_short(error)})"
            ) from None


# Reading


def inspect_all(examples: dict[str, Examples], notes: list[str]) -> dict[str, Inspection]:
    """Inspects the images of all splits. Notes dropped alpha channels, and training images in other splits.
    Raises `InputError` for files that are missing, no images, or have more than 8 bits per pixel."""
    inspected, problems = {}, []
    for split, rows in examples.items():
        with collecting(problems):
            inspected[split] = rows.images.inspect()
            headers = inspected[split].headers
            if num_alpha := sum(header.mode in ALPHA for header in headers):
                notes.append(
                    f"{rows.path}: {num_alpha} of {len(rows)} images have an alpha channel, which is dropped"
                )
            deep = [row for row, header in enumerate(headers) if header.mode in DEEP]
            raise_problems([f"{rows.images.name(row)}: {too_deep(headers[row].mode)}" for row in deep])
    if problems:
        raise InputError(*problems)
    if "train" in inspected:
        digests = set(inspected["train"].digests)
        for split in (split for split in inspected if split != "train"):
            if shared := sum(digest in digests for digest in inspected[split].digests):
                number = len(examples[split])
                notes.append(f"{shared} of {number} {split} images are in the training data too")
    return inspected


def check_colours(
    arguments: Any, processing: Processing, examples: dict[str, Examples], inspected: dict[str, Inspection]
) -> None:
    """Raises `InputError` for an --image_mode that is not the model's, and for colour images if the model has
    one input channel."""
    if arguments.image_mode not in ("auto", processing.mode):
        raise InputError(f"--image_mode {arguments.image_mode}: the model sees {processing}; leave it out")
    if processing.mode == "L" and arguments.image_mode == "auto":
        problems = [
            f"{rows.images.name(row)}: a colour image ({header.mode}), but the model sees grey levels only; "
            "convert images to grey by --image_mode L, or train a model of colours (--image_mode RGB)"
            for split, rows in examples.items()
            for row, header in enumerate(inspected[split].headers)
            if not header.is_grey
        ]
        raise_problems(problems)


def _content(inspected: Inspection, targets: Targets | None) -> str:
    return content_key([inspected.content, *([] if targets is None else [targets.content])])
