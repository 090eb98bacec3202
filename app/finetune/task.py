"""What a user writes to train something new: one class in one file. The engine does everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from finetune.errors import InputError
from finetune.metrics.additional import compute_additional, load_metrics
from finetune.metrics.bootstrap import MetricsOfRows
from finetune.plan import Modes
from finetune.reading.problems import nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from finetune.batching.stream import Stream
    from finetune.launching.launch import Launch

Predictions = dict[str, np.ndarray]  # arrays of a file's rows, (rows, ...) each, in the file's order


@dataclass(frozen=True)
class Batch:
    """Rows collated to tensors.

    `rows`: (b,) int64, each row's number in its file; -1 marks a placeholder, which takes part in the forward pass so that
    every process does the same number of them, and counts for nothing. `lengths`: tokens of each row, at its beginning, for
    encoders that compute without padding (`finetune.kernels.row_lengths`); None if that is not so, or means nothing.
    """

    rows: torch.Tensor
    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def is_real(self) -> torch.Tensor:
        """(b,) bool: False for placeholders."""
        return self.rows >= 0

    def __getitem__(self, rows: slice) -> Batch:
        """Some of its rows, at the width of all."""
        labels = None if self.labels is None else self.labels[rows]
        lengths = None if self.lengths is None else self.lengths[rows]
        return Batch(self.rows[rows], {name: tensor[rows] for name, tensor in self.inputs.items()}, labels, lengths)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """On a device; inputs that are floating-point numbers in `dtype`, if one is given."""
        return self._each(
            lambda tensor: tensor.to(device, non_blocking=True),
            lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True),
        )

    def pin_memory(self) -> Batch:
        return self._each(torch.Tensor.pin_memory, torch.Tensor.pin_memory)

    def _each(self, change: Callable, change_input: Callable) -> Batch:
        labels = None if self.labels is None else change(self.labels)
        inputs = {name: change_input(tensor) for name, tensor in self.inputs.items()}
        return Batch(change(self.rows), inputs, labels, self.lengths)


@dataclass(frozen=True)
class Mixture:
    """Training rows of several sources, numbered from 0, with weights. `source`: (rows,) of each row; `weights`: by source, its
    share of an epoch, which has as many rows as there are; they sum to 1."""

    source: np.ndarray
    weights: tuple[float, ...]

    @property
    def counts(self) -> np.ndarray:
        """(sources,) int64: how many rows each source gives an epoch."""
        exact = len(self.source) * np.asarray(self.weights)
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: len(self.source) - counts.sum()]] += 1  # the largest remainders
        return counts

    @classmethod
    def of(cls, source: np.ndarray, weights: Sequence[float], paths: Sequence[str], notes: list[str]) -> Mixture:
        """By --mixing_weights, with a note. `source`: (rows,) as above; `paths`: the sources in words. Raises `InputError` for
        a source that would give no rows."""
        found = cls(source, tuple(weight / sum(weights) for weight in weights))
        there = np.bincount(source, minlength=len(weights))
        problems = [
            f"--mixing_weights: {path}, with a weight of {weight:g}, gives no row to an epoch of {len(source)} ({rows} of its "
            "rows are left for training); give it more rows or a larger weight, or leave it out"
            for path, weight, rows, count in zip(paths, weights, there, found.counts, strict=True)
            if not rows or not count
        ]
        if problems:
            raise InputError(*problems)
        shares = [f"{count} from the {rows} of {path}" for path, rows, count in zip(paths, there, found.counts, strict=True)]
        notes.append(f"rows of an epoch: {', '.join(shares)} (--mixing_weights)")
        return found


@dataclass(frozen=True)
class Split:
    """One file's rows, ready to be batched.

    `collate`: row numbers -> `Batch`. `augment`: (row numbers, epoch) -> `Batch`, what training uses in place of `collate` for
    data that it varies; a function of (seed, epoch, row), so that every launch and a resumed run see the same. `lengths`:
    (rows,) tokens of each row, None where rows have none. `padding_multiple`: of what the width of a batch is a multiple, as
    `collate` pads; `widths`: (rows,) tokens that each row takes if it were alone, where that is not its length rounded up to
    that multiple. `ids`: what names each row in predictions. `mixture`: how often rows are trained on, where that is not once
    an epoch. `weights`: (rows,) how likely training draws each row, with replacement, as many times an epoch as there are rows;
    None: every row once. `content`: gives a hash of all rows, by which a prediction that was interrupted knows them again;
    None: it begins anew. `stream`: of training rows that are others in each epoch; these are the first one's.
    """

    path: str
    collate: Callable[[np.ndarray], Batch]
    num_rows: int
    augment: Callable[[np.ndarray, int], Batch] | None = None
    labelled: bool = True
    lengths: np.ndarray | None = None
    padding_multiple: int = 1
    widths: np.ndarray | None = None
    ids: Sequence[Any] | None = None
    mixture: Mixture | None = None
    weights: np.ndarray | None = None
    content: Callable[[], str] | None = None
    stream: Stream | None = None

    def __len__(self) -> int:
        return self.num_rows


def mixing_fingerprint(splits: Mapping[str, Split]) -> dict[str, Any]:
    """What a mixture adds to a run's fingerprint: the order of rows follows from it."""
    mixture = splits["train"].mixture if "train" in splits else None
    return {} if mixture is None else {"mixing": [list(mixture.weights), np.bincount(mixture.source).tolist()]}


@dataclass
class Data:
    """The files of a run. `splits`: "train", "validation" and "test", those that the run needs. `fingerprint`: what must be
    equal on every machine, and for a checkpoint to be this run's. `notes`: for the reader of the console."""

    splits: dict[str, Split]
    fingerprint: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    padding_free: bool = False  # whether the model computes on a batch's tokens without its padding


class Card(NamedTuple):
    """What a task says in a run's README.md. `pipeline_tag`: the hub's; `usage`: Python code that loads best/; `metrics`: names
    without eval_ or test_, one table row each; `sections`: lines of Markdown."""

    title: str
    pipeline_tag: str | None
    usage: str
    metrics: list[str]
    sections: list[str]


class Section(NamedTuple):
    """A table of report.html, with a sentence about it."""

    title: str
    text: str
    header: list[str]
    rows: list[list[str]]


class Shown(NamedTuple):
    """What report.html shows of a model: figures by a name that can be a file's, and tables."""

    figures: dict[str, Figure]
    sections: list[Section]


class Judgement(NamedTuple):
    """What a labelled file says of a model. `metrics_of_rows`: the headline metrics of some of its rows, by number, which may
    repeat: for confidence intervals and scripts/compare.py. `show`: draws, which takes seconds and is for the report alone."""

    metrics_of_rows: MetricsOfRows | None = None
    show: Callable[[], Shown] = lambda: Shown({}, [])


class Described(NamedTuple):
    """What a data report looks at in the rows of a split, in their order. `contents`: equal for rows of equal content;
    `similar`: for rows that nearly are, as `nearly` says, None where that is not looked at; `answers`: what rows of equal
    content should agree on; `labels`: names by row; `blank`: (rows,) bool; `lengths`: (rows,) in `unit`, of which a model reads
    `limit`; `sizes`: (rows,) by what is measured; `areas`: class names and (rows, classes) pixels or voxels of each."""

    contents: Sequence[Hashable]
    similar: Sequence[Hashable] | None
    answers: Sequence[Hashable] | None
    labels: Sequence[tuple[str, ...]] | None
    blank: np.ndarray
    lengths: np.ndarray | None = None
    unit: str = ""
    limit: int | None = None
    nearly: str = ""
    sizes: Mapping[str, np.ndarray] = MappingProxyType({})
    areas: tuple[Sequence[str], np.ndarray] | None = None


class Task(ABC):
    """A task, in the order in which a run calls its methods.

    A loss is a sum and a count, so that its mean can be taken over the whole global batch: `num_targets` is called before the
    first backward pass, because gradients cannot be rescaled once DeepSpeed has stepped inside the last one.
    """

    name: str
    default_metric: str  # the score that decides which model is best, unless --metric_for_best_model names another
    shown_metrics: tuple[str, ...] = ("loss",)  # on the console
    metric_names: tuple[str, ...] = ()  # those that --metric_for_best_model may name; (): known once there are data
    evaluates_by_tokens = False  # whether an evaluation batch has a number of tokens by default, on a CPU
    list_separator = "|"  # between the texts of a list in predictions that are csv
    memory_advice = ""  # what the message for "out of memory" suggests besides what helps every task
    takes: str | None = None  # "texts" or "pictures": what `rows_in_memory` makes a split of

    def __init__(self, arguments: Any) -> None:
        """`arguments`: Launch-, Run-, Optimization- and BatchArguments and a field `model_name_or_path`, the exported model of
        a run that does not train. Raises `InputError` for arguments that the task cannot work with."""
        self.arguments = arguments
        self.additional_metrics = load_metrics(arguments.metrics) if arguments.metrics else []
        if self.metric_names and not arguments.metrics:
            check_metric(self.best_metric, self.metric_names)

    @abstractmethod
    def load(self, launch: Launch, modes: Modes) -> Data:
        """Reads and checks the run's files. No process group exists yet. Raises `InputError` with what is wrong."""

    def describe(self, name: str, closely: bool = False) -> Described | None:
        """What a data report looks at in a split that was loaded; None for a task that cannot say. `closely`: even if every row
        must be decoded for it."""
        return None

    def describe_files(self, launch: Launch, modes: Modes) -> tuple[dict[str, Described], list[str]]:
        """(`describe` of every split, notes for the reader) in place of a run; a task may need less for it than for one."""
        data = self.load(launch, modes)
        found = {name: self.describe(name, closely=True) for name in data.splits}
        return {name: rows for name, rows in found.items() if rows is not None}, data.notes

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """The model to be trained, on the CPU in fp32. torch is seeded. Under `torch.device("meta")` no weights are read."""

    def learning_rate_scale(self, model: torch.nn.Module, parameter: str) -> float:
        """The learning rate of a parameter of this name as a multiple of --learning_rate."""
        return 1.0

    def details(self) -> dict[str, Any]:
        """What the task adds to run.json."""
        return {}

    @abstractmethod
    def num_targets(self, batch: Batch) -> torch.Tensor:
        """() int64: how many targets (labels, tokens, pixels, voxels) of this batch the loss is a mean over."""

    @abstractmethod
    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """() float32: the loss summed over those targets."""

    @abstractmethod
    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Arrays of the batch's rows, (b, ...) each, placeholders included; the same shapes and types for every batch but for
        b. The engine gathers them over batches and processes."""

    @abstractmethod
    def score(self, predictions: Predictions, split: Split) -> dict[str, float | None]:
        """The metrics of a whole labelled file; None where one is undefined. On rank 0 only, like everything below but
        `load_exported`."""

    def as_references(self, predictions: Predictions, split: Split) -> tuple[Any, Any]:
        """(predictions, references) as metrics of `evaluate` take them, for --metrics."""
        raise InputError(f"--metrics: {self.name} has no form of its predictions for other metrics")

    def all_scores(self, predictions: Predictions, split: Split) -> dict[str, float | None]:
        """`score`'s metrics and those of --metrics."""
        scores = self.score(predictions, split)
        if self.additional_metrics:
            scores |= compute_additional(self.additional_metrics, *self.as_references(predictions, split), taken=scores)
        return scores

    def baseline(self, split: Split) -> dict[str, float | None]:
        """Metrics of an answer without a model, to compare with."""
        return {}

    @abstractmethod
    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        """Writes the best model to the folder `path`, checks it by loading it, and returns what it adds to metrics.json.

        `model` gives class and configuration, `weights` the full fp32 weights; `best`: predictions of the validation rows.
        """

    def samples(self, best: Predictions) -> dict[str, str]:
        """Markdown texts to be shown in TensorBoard, by tag."""
        return {}

    def pictures(self, best: Predictions) -> dict[str, np.ndarray]:
        """Pictures, (height, width, 3) uint8, by a name that can be a file's: shown in TensorBoard and in the model card."""
        return {}

    @abstractmethod
    def load_exported(self, path: str | Path) -> torch.nn.Module:
        """The model of an exported folder (or of the hub), on every process. What is reported is what this model gives."""

    def rows_in_memory(self, items: Sequence[Any]) -> Split:
        """A test split of what no file holds: texts, or pictures as bytes. After `load`. Raises `InputError`."""
        raise NotImplementedError  # `takes` is None

    def explain(self, model: torch.nn.Module, item: Any, line: dict[str, Any]) -> dict[str, Any]:
        """What a page shows of one of `rows_in_memory`'s items beside its prediction `line`. `model`: of `load_exported`."""
        return {}

    @abstractmethod
    def prediction_lines(self, predictions: Predictions, split: Split) -> Iterable[dict[str, Any]]:
        """The lines of predictions.jsonl, one per row, without ids."""

    def remarks(self, metrics: dict[str, Any]) -> list[str]:
        """Lines for the end of the console output."""
        return []

    def limits(self) -> list[str]:
        """Sentences of the model card about what the model was not made for."""
        return []

    def judge(self, best: Predictions, split: Split) -> Judgement:
        """Scores of rows, figures and tables from the best model's predictions of a labelled file; at the end of a run."""
        return Judgement()

    def card(self, folder: Path) -> Card:
        """The model card of the run in `folder`, which holds metrics.json."""
        return Card(self.name, None, "", list(self.shown_metrics), [])

    @property
    def best_metric(self) -> str:
        """The metric that decides which model is best."""
        return (self.arguments.metric_for_best_model or self.default_metric).removeprefix("eval_")


def check_metric(name: str, metrics: Iterable[str]) -> None:
    """Raises `InputError` for a --metric_for_best_model that a task does not have."""
    known = list(metrics)
    if name not in known:
        near = nearest(name, known)
        hint = f"; did you mean {near}?" if near else "."
        raise InputError(f"--metric_for_best_model {name}: no such metric{hint} The metrics are {', '.join(known)}")
