"""The class that a user writes to train something new, in one file. The engine does everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from samerun.additional_metrics import load_metrics
from samerun.errors import InputError, TrainingError, nearest, raise_problems
from samerun.plan import ENOUGH_UPDATES, Modes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from samerun.data.stream import Stream
    from samerun.launch import Launch

Predictions = dict[str, np.ndarray]  # (rows, ...) each, in the file's order


@dataclass(frozen=True)
class Batch:
    """Rows collated to tensors.

    `rows`: (b,) int64, each row's number in its file, or -1 for a placeholder, which gives every process the
    same number of forward passes and counts for nothing. `lengths`: tokens of each row if padding follows
    them, for encoders that compute without padding (`samerun.kernels.common`); otherwise None. `places`: of
    the rows in the global batch, for dropout by row (`samerun.kernels.dropout`); the engine sets them.
    """

    rows: torch.Tensor
    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor | None = None
    lengths: tuple[int, ...] | None = None
    places: tuple[int, ...] | None = None

    @property
    def is_real(self) -> torch.Tensor:
        """(b,) bool: False for placeholders."""
        return self.rows >= 0

    @property
    def shape(self) -> torch.Size:
        """The shape of the largest input."""
        return max((tensor.shape for tensor in self.inputs.values()), key=lambda s: (s.numel(), s))

    def __getitem__(self, rows: slice) -> Batch:
        """The batch of these rows; its padding is not trimmed."""
        lengths, places = (None if x is None else x[rows] for x in (self.lengths, self.places))
        return replace(self.map(lambda tensor: tensor[rows]), lengths=lengths, places=places)

    def placeholder(self) -> Batch:
        """The first row, as a placeholder."""
        first = self[:1]
        return replace(first, rows=torch.full_like(first.rows, -1))

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """Copies the batch to a device, and floating-point inputs to `dtype` if it is given."""
        labels = None if self.labels is None else self.labels.to(device, non_blocking=True)
        inputs = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
            for name, tensor in self.inputs.items()
        }
        return replace(self, rows=self.rows.to(device, non_blocking=True), inputs=inputs, labels=labels)

    def pin_memory(self) -> Batch:
        return self.map(torch.Tensor.pin_memory)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with `change` applied to all its tensors."""
        labels = None if self.labels is None else change(self.labels)
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        return replace(self, rows=change(self.rows), inputs=inputs, labels=labels)


@dataclass(frozen=True)
class Mixture:
    """A weighted mixture of training sources. An epoch has as many rows as all sources together. `source`:
    (rows,) each row's source number; `weights`: the share of an epoch that each source gets, summing to 1."""

    source: np.ndarray
    weights: tuple[float, ...]

    @property
    def counts(self) -> np.ndarray:
        """(sources,) int64: the rows of an epoch from each source, rounded by largest remainders."""
        exact = len(self.source) * np.asarray(self.weights)
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: len(self.source) - counts.sum()]] += 1
        return counts

    @classmethod
    def of(
        cls, source: Any, weights: Sequence[float] | None, paths: Sequence[str], notes: list[str]
    ) -> Mixture | None:
        """Builds the mixture of --mixing_weights, `weights`, and appends a note. `paths`: the sources' names.
        Raises `InputError` for a source without rows in an epoch."""
        if weights is None:
            return None
        mixture = cls(source, tuple(weight / sum(weights) for weight in weights))
        available = np.bincount(source, minlength=len(weights))
        problems = [
            f"--mixing_weights: {path} ({rows} training rows, weight {weight:g}) gives no row to an epoch of "
            f"{len(source)}; give it more rows or a larger weight, or leave it out"
            for path, weight, rows, count in zip(paths, weights, available, mixture.counts, strict=True)
            if not rows or not count
        ]
        raise_problems(problems)
        sizes = zip(paths, available, mixture.counts, strict=True)
        shares = [f"{count} from the {rows} of {path}" for path, rows, count in sizes]
        notes.append(f"rows of an epoch: {', '.join(shares)} (--mixing_weights)")
        return mixture


@dataclass(frozen=True)
class Split:
    """One file's rows, ready to be batched."""

    path: str
    collate: Callable[[np.ndarray], Batch]  # row numbers -> batch
    num_rows: int
    # (row numbers, epoch) -> batch; replaces `collate` in training. A pure function of (seed, epoch, row), so
    # that all launches and resumed runs see the same data.
    augment: Callable[[np.ndarray, int], Batch] | None = None
    labelled: bool = True
    lengths: np.ndarray | None = None  # (rows,) tokens; None for data without tokens
    padding_multiple: int = 1  # `collate` pads batches to a multiple of this width
    # (rows,) padded tokens of each row alone; None: `lengths` rounded up to the multiple.
    widths: np.ndarray | None = None
    ids: Sequence[Any] | None = None  # of the rows, for predictions
    mixture: Mixture | None = None  # None: one source
    # (rows,) sampling weights for drawing with replacement; None: each row once an epoch.
    weights: np.ndarray | None = None
    # Returns a hash of all rows, which must be unchanged to resume an interrupted prediction; None: it cannot
    # be resumed.
    content: Callable[[], str] | None = None
    evaluation_rows: int | None = None  # of a batch unless --per_device_eval_batch_size is given
    enough_updates: int = ENOUGH_UPDATES  # of a training whose number of epochs is chosen
    stream: Stream | None = None  # source of each epoch's training rows; the split holds the first epoch's

    def __len__(self) -> int:
        return self.num_rows


@dataclass
class Data:
    """The data of a run."""

    splits: dict[str, Split]  # those of "train", "validation" and "test" that the run needs
    # What must be equal on every machine, and in a checkpoint to resume from. A new entry refuses the
    # checkpoints of earlier versions unless its default is None.
    fingerprint: dict[str, Any]
    notes: list[str] = field(default_factory=list)  # for the console


class ModelCard(NamedTuple):
    """The task's part of the model card, a run's README.md."""

    title: str
    pipeline_tag: str | None  # the hub's
    usage: str  # Python code that loads best/
    metrics: Sequence[str]  # of the table; names without eval_ or test_
    sections: list[str]  # lines of Markdown
    limits: Sequence[str] = ()  # sentences about what the model cannot do


class Section(NamedTuple):
    """A table of report.html with an introductory sentence, `text`."""

    title: str
    text: str
    header: list[str]
    rows: list[list[str]]


class ReportContent(NamedTuple):
    """Figures and tables for report.html."""

    figures: dict[str, Figure]  # by file name without suffix
    sections: list[Section]


class Task(ABC):
    """Subclass this to train something new. A run calls the methods in about this order. You need `load`,
    `build`, `num_targets`, `loss_sum`, `predict`, `score`, `export`, `load_exported` and `lines`; the rest
    has defaults.

    A loss is a sum and a count, so that its mean can be taken over the global batch. `num_targets` is called
    before the first backward pass, because DeepSpeed steps inside the last one, after which gradients cannot
    be rescaled.
    """

    name: str
    default_metric: str  # of --metric_for_best_model
    shown_metrics: tuple[str, ...] = ("loss",)  # on the console
    metric_names: tuple[str, ...] = ()  # choices of --metric_for_best_model; empty if they depend on the data
    # Metrics of which lower values are better, besides those with "loss" in their names. A name counts, too,
    # by its part before the first "_", as mse_price, of one column.
    lower_is_better: Iterable[str] = (
        *("mse", "mae", "rmse", "rmsle", "mape", "error", "brier", "ece"),
        *("perplexity", "ppl", "nll", "wer", "cer"),
    )
    named_metrics: Iterable[str] = ()  # of one class, tag or column, as "f1" of f1_PERSON: higher is better
    # Settings that change the scale of the metric "loss", set by `load`. Losses of other settings are never
    # compared.
    loss_settings: dict[str, Any] | None = None
    replays_passes = False  # whether `loss_sum` was tried in CUDA graphs (--cuda_graphs auto)
    evaluates_by_tokens = False  # whether evaluation batches on a CPU are limited by tokens by default
    list_separator = "|"  # between the texts of a list in csv predictions
    column_order: Sequence[str] = ()  # of the names in a line's mappings, for csv predictions
    memory_advice = ""  # task-specific advice in the out-of-memory message
    baseline_name = ""  # what `baseline` scores, such as "the commonest class"
    baseline_advice = ""  # why a model may not be better, and the arguments to try
    # Called on every process after each evaluation of a training, with the step and the metrics.
    on_evaluation: Callable[[int, dict[str, float | None]], None] | None = None
    input_kind: str | None = None  # items of `rows_in_memory`: "texts" or "images"; None: not supported

    def __init__(self, arguments: Any) -> None:
        """`arguments`: Launch-, Run-, Optimization- and BatchArguments, and `model_name_or_path`, the
        exported model if the run does not train. Raises `InputError` for arguments that the task does not
        support."""
        self.arguments = arguments
        self.details: dict[str, Any] = {}  # the task's entries of run.json, set before the training
        self.notes: list[str] = []  # of `load`, for `Data`
        if arguments.metrics and type(self).for_evaluate is Task.for_evaluate:
            raise InputError(f"--metrics: {self.name} does not support additional metrics; leave it out")
        self.additional_metrics = load_metrics(arguments.metrics) if arguments.metrics else []
        if self.metric_names:
            check_metric(self.best_metric, self.metric_names, arguments)

    @abstractmethod
    def load(self, launch: Launch, modes: Modes) -> Data:
        """Reads and checks the run's files, before a process group exists. Raises `InputError`."""

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """Builds the model to train, on the CPU in fp32. The engine has seeded torch. `samerun plan` calls
        it under `torch.device("meta")`, and again without if it fails there because it reads weights."""

    def occurring_tokens(self, model: torch.nn.Module) -> tuple[torch.nn.Embedding, np.ndarray] | None:
        """The embedding of `model`'s tokens and the ids that its inputs may have in training and evaluation,
        ascending, so that the others need no training; None if they are not known."""
        return None

    def learning_rate_scale(self, model: torch.nn.Module, parameter: str) -> float:
        """The factor on --learning_rate for the parameter of this name."""
        return 1.0

    @abstractmethod
    def num_targets(self, batch: Batch) -> torch.Tensor:
        """() int64: the number of targets (labels, tokens, pixels, voxels) that the loss averages over."""

    @abstractmethod
    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """() float32: the loss summed over the batch's targets."""

    @abstractmethod
    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Arrays of shape (b, ...), placeholders included. The engine gathers them over batches and
        processes. Batches may differ in their other sizes, such as the tokens of their longest row: `score`
        and `lines` get arrays of the largest sizes, filled up with -100 (unsigned types with 0)."""

    @abstractmethod
    def score(self, predictions: Predictions, split: Split) -> dict[str, float | None]:
        """The metrics of a whole labelled file; None for undefined ones. Called on rank 0 only, like all
        methods below except `load_exported`."""

    def for_evaluate(self, predictions: Predictions, split: Split) -> tuple[Any, Any]:
        """(predictions, references) in the format of `evaluate`'s metrics. Without it a task has no
        --metrics."""
        raise NotImplementedError

    def baseline(self, split: Split, seconds: float) -> dict[str, float | None]:
        """Metrics, by the names of the model's, that `baseline_name` reaches on `split` after reading the
        training rows; none if that takes more than about this many seconds."""
        return {}

    @abstractmethod
    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        """Writes the best model to the folder `path`, checks it by loading it, and returns entries for
        metrics.json.

        `model` has the class and configuration, `weights` are the full fp32 weights, `best` its predictions
        of the validation rows.
        """

    def previews(self, best: Predictions) -> dict[str, str | np.ndarray]:
        """Markdown texts for TensorBoard, and images for trackers and the model card, (height, width, 3)
        uint8, by tag or file name without suffix."""
        return {}

    @abstractmethod
    def load_exported(self, path: str | Path) -> torch.nn.Module:
        """Loads an exported model from a folder or the hub, on every process. All reported test metrics are
        this model's."""

    def rows_in_memory(self, items: Sequence[Any]) -> Split:
        """Builds a test split of items in memory: texts, or images as bytes. Call `load` first. Raises
        `InputError`."""
        raise NotImplementedError  # `input_kind` is None

    def explain(self, model: torch.nn.Module, item: Any, line: dict[str, Any]) -> dict[str, Any]:
        """Explains the prediction `line` of one of `rows_in_memory`'s items, for a web page. `model`: of
        `load_exported`."""
        return {}

    @abstractmethod
    def lines(self, predictions: Predictions, split: Split) -> Iterable[dict[str, Any]]:
        """Lines of predictions.jsonl, one per row, without ids."""

    def figures(self, best: Predictions, split: Split) -> ReportContent:
        """Figures and tables for report.html, from the best model's predictions of a labelled file."""
        return ReportContent({}, [])

    def card(self, folder: Path) -> ModelCard:
        """The task's part of the model card. `folder`: the run's, with metrics.json."""
        return ModelCard(self.name, None, "", self.shown_metrics, [])

    @property
    def best_metric(self) -> str:
        """The metric that chooses the best model."""
        return (self.arguments.metric_for_best_model or self.default_metric).removeprefix("eval_")

    @property
    def headline_metrics(self) -> tuple[str, ...]:
        """`shown_metrics`, and the metric that chooses the best model."""
        return tuple(dict.fromkeys([*self.shown_metrics, self.best_metric]))


def check_finite(values: np.ndarray, what: str, path: str, unit: str, name_of: Callable[[int], str]) -> None:
    """Raises `TrainingError`, naming the first row, if a model's outputs are NaN or infinite. `values`:
    (rows, ...); `what`: their name; `path`: the file; `unit`: what a row is, in the plural; `name_of`: row ->
    its name."""
    wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if len(wrong):
        some = "leave them out, or compute with --mixed_precision no"
        advice = some if len(wrong) < len(values) else "the model diverged"
        raise TrainingError(
            f"{path}: the model's {what} are not finite for {len(wrong)} of {len(values)} {unit}, first for "
            f"{name_of(int(wrong[0]))}; {advice}. Or try a smaller --learning_rate"
        )


def check_metric(name: str, metrics: Iterable[str], arguments: Any) -> None:
    """Raises `InputError` if `name`, --metric_for_best_model, is none of the task's metrics.

    It may be one of --metrics, whose names are known after the first evaluation. Then --greater_is_better is
    required: an error rate must not be maximized.
    """
    known = list(metrics)
    if name in known or (arguments.metrics and arguments.greater_is_better is not None):
        return
    near = nearest(name, known)
    hint = f"; did you mean {near}?" if near else "."
    message = f"--metric_for_best_model {name}: no such metric{hint} The metrics are {', '.join(known)}"
    if arguments.metrics:
        message += "; if it is one of --metrics, add --greater_is_better true or false"
    raise InputError(message)


def higher_is_better(task: Task, metric: str) -> bool:
    """Whether higher values of the metric are better: --greater_is_better, else what the task says."""
    requested, kind = task.arguments.greater_is_better, metric.split("_")[0]
    # The name of a class, tag or column says nothing, as in iou_blossom.
    is_loss = "loss" in metric and kind not in task.named_metrics
    is_error = is_loss or not {metric, kind}.isdisjoint(task.lower_is_better)
    return not is_error if requested is None else requested
