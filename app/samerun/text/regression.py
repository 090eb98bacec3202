"""Regression: a text has one or several numbers. The model is trained on standardised targets; the exported
output layer includes the scale, so that plain transformers gives the original units."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.errors import InputError, described, listed, raise_problems
from samerun.kernels.common import constants
from samerun.models.pretrained import labels_of, load_config, own_labels
from samerun.parsing import is_given
from samerun.predictions import by_name
from samerun.reports.figures import BLUE, GREY, new_figure
from samerun.task import Predictions, ReportContent
from samerun.text.head import output_layer
from samerun.text.labels import as_number
from samerun.text.multi_label_scores import worst_texts
from samerun.text.problem import Problem
from samerun.text.text import TextSplit

HIGHER_IS_BETTER = ("r2", "pearson", "spearman")  # undefined for one value only
METRICS = ("mse", "mae", *HIGHER_IS_BETTER)
FEWEST_STEPS = 1e-5  # smallest standard deviation, relative to the mean, that fp32 outputs resolve
MAX_FIGURES = 9
USAGE = """from transformers import pipeline
estimate = pipeline("text-classification", model="best", top_k=None)
estimate("a text", truncation=True)  # the value of every column as "score", in the original units"""


@dataclass(frozen=True)
class Numbers:
    """The targets of a file, (rows, columns) float64."""

    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: np.ndarray) -> Numbers:
        return Numbers(self.values[rows])


class Regression(Problem):
    """A row has one target per column. Predictions and `labels` are in the original units."""

    name, title, usage = "regression", "Text regression", USAGE
    default_metric = "mse"
    shown_metrics = ("loss", *METRICS)

    def __init__(self, arguments: Any) -> None:
        super().__init__(arguments)
        are_named = is_given(arguments, "label_columns") or is_given(arguments, "label_column")
        own: tuple[str, ...] = ()
        if not arguments.modes.train:
            with contextlib.suppress(InputError):  # which `load` reports
                own = tuple(own_labels(load_config(arguments)) or ())
        if own and (not are_named or sorted(own) == sorted(self.columns)):  # in the order of the outputs
            self.columns = own
        several = self.columns if len(self.columns) > 1 else ()
        if several:  # their units may differ
            self.default_metric = "r2"
        by_column = (f"{metric}_{column}" for column in several for metric in METRICS)
        self.metric_names = self.card_metrics = (*self.shown_metrics, *by_column)
        self.loss = {"kind": arguments.loss_name, **arguments.loss_arguments}
        self.mean, self.scale = (np.full(len(self.columns), value) for value in (0.0, 1.0))
        self.is_exported = False  # whether the model's outputs are in the original units

    # Targets

    def read(self, table: Table) -> Numbers | None:
        """Raises `InputError` with line and column for cells that are no finite number."""
        if missing := [column for column in self.columns if column not in table.columns]:
            if len(missing) < len(self.columns):
                self.notes.append(f"{table.path}: no metrics and references, as it has no {listed(missing)}")
            return None
        values, problems = np.empty((len(table), len(self.columns))), []
        for place, column in enumerate(self.columns):
            for row, cell in enumerate(table.columns[column]):
                number = as_number(cell)
                if number is None:
                    found = "empty" if cell == "" else described(cell)
                    problems.append(f"{table.where(row)}: {column} is {found}, expected a number")
                else:
                    values[row, place] = number
        raise_problems(problems)
        return Numbers(values)

    def choose(self, config: Any, train: Numbers | None) -> None:
        """Raises `InputError` for a training column with one value only, and for other columns than the
        model's."""
        self.labels = list(self.columns)
        if train is not None:
            self.mean, self.scale = train.values.mean(axis=0), train.values.std(axis=0)
            self.scale[np.ptp(train.values, axis=0) == 0] = 0  # the mean of equal values is rounded, too
            problems = [
                f"{column}: its training rows have {'one value only' if scale == 0 else 'values too close'} "
                f"({mean:g}{'' if scale == 0 else f' plus or minus {scale:g}; subtract an offset'})"
                for column, mean, scale in zip(self.columns, self.mean, self.scale, strict=True)
                if not scale > FEWEST_STEPS * abs(mean)
            ]
            raise_problems(problems)
            return
        self.labels = labels_of(config)
        if len(self.labels) != len(self.columns):
            raise InputError(
                f"{self.arguments.model_name_or_path} gives {len(self.labels)} number(s), "
                f"{listed(self.labels)}, but {len(self.columns)} column(s) are named, "
                f"{listed(self.columns)}; name one for each, in this order, by --label_columns"
            )

    def ids(self, table: Table, targets: Numbers) -> Ragged:
        return Ragged.of(targets.values.tolist(), "float64")

    def tensor(self, ids: Ragged, rows: np.ndarray) -> Tensor:
        return torch.tensor(np.stack([ids[row] for row in rows]), dtype=torch.float32)

    def prepare(self, ids: dict[str, Ragged]) -> None:
        if "validation" in ids and self._constant(ids["validation"]):  # r2 is undefined
            self.default_metric = "mse"
        self.loss_settings = {**self.loss, "mean": self.mean.tolist(), "scale": self.scale.tolist()}
        self.notes += [
            f"{column}: mean {mean:.6g}, standard deviation {scale:.6g}; the loss is of standardised values"
            for column, mean, scale in zip(self.columns, self.mean, self.scale, strict=True)
        ]

    def check_best_metric(self, name: str, ids: Ragged) -> None:
        kind, _, named = name.partition("_")
        constant = [column for column in self._constant(ids) if named in ("", column)]
        if kind in HIGHER_IS_BETTER and constant:
            raise InputError(
                f"--metric_for_best_model {name} is undefined on these validation rows ({listed(constant)} "
                "has one value only); choose another, such as mse"
            )

    def _constant(self, ids: Ragged) -> list[str]:
        """The columns with one value only."""
        spread = np.ptp(ids.values.reshape(-1, len(self.labels)), axis=0)
        return [column for column, width in zip(self.columns, spread, strict=True) if width == 0]

    def fingerprint(self) -> dict[str, Any]:
        return {"problem_type": self.name, "label_list": list(self.labels), "loss": self.loss}

    # Training

    def initial_bias(self) -> np.ndarray:
        return np.zeros(len(self.labels))

    def adopt_head(self, model: Any, trained: np.ndarray) -> None:
        """An exported model's output layer is in the original units; here it is standardised.
        `trained`: (outputs,) bool."""
        layer = output_layer(model, len(self.labels))
        if layer is None or layer[1].bias is None:
            raise InputError(
                f"--problem_type regression: the head of {model.name_or_path or type(model).__name__} has no "
                f"linear layer with a bias for its {len(self.labels)} value(s), which would hold their scale"
            )
        with torch.no_grad():
            for row in np.flatnonzero(trained).tolist():
                layer[1].bias[row] = (layer[1].bias[row].double() - self.mean[row]) / self.scale[row]
                layer[1].weight[row] /= self.scale[row]

    def units(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(columns,) each: mean and standard deviation of the training rows."""
        return constants(self.mean, like), constants(self.scale, like)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        mean, scale = self.units(logits)
        return self.standard_losses(logits, (targets - mean) / scale)

    def standard_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(b, columns) losses of standardised values: squared errors, or Huber's."""
        if self.loss["kind"] == "huber":
            return huber_loss(outputs, targets, reduction="none", delta=self.loss["huber_delta"])
        return (outputs - targets) ** 2

    def outputs(self, logits: Tensor) -> Tensor:
        if self.is_exported:
            return logits
        mean, scale = self.units(logits)
        return logits * scale + mean

    # Scores and predictions

    def score(self, predictions: Predictions, split: TextSplit) -> dict[str, float | None]:
        found, true = predictions["logits"].astype(np.float64), self.true(split)
        standard = (torch.as_tensor((values - self.mean) / self.scale) for values in (found, true))
        loss = float(self.standard_losses(*standard).mean()) if len(true) else None
        return {"loss": loss, **regression_scores(found, true, self.columns)}

    def true(self, split: TextSplit) -> np.ndarray:
        """(rows, columns) float64: `labels` of predictions are rounded to fp32."""
        return split.targets.values.reshape(-1, len(self.labels))

    def for_evaluate(self, predictions: Predictions, split: TextSplit) -> tuple[Any, Any]:
        found, true = predictions["logits"], self.true(split)
        return (found[:, 0], true[:, 0]) if len(self.labels) == 1 else (found, true)

    def lines(self, predictions: Predictions, split: TextSplit) -> Iterator[dict[str, Any]]:
        true = self.true(split).tolist() if split.labelled else ()
        for row, values in enumerate(predictions["logits"]):
            line = {"values": by_name(self.labels, values, 9)}
            if split.labelled:
                line["reference"] = dict(zip(self.labels, true[row], strict=True))
            yield line

    def figures(self, best: Predictions, split: TextSplit) -> ReportContent:
        found, true = best["logits"].astype(np.float64), self.true(split)
        figures = {}
        for place, column in list(enumerate(self.columns))[:MAX_FIGURES]:
            figure, axes = new_figure(f"{column}: predicted and true values", "true", "predicted", height=4.6)
            axes.plot(true[:, place], found[:, place], ".", color=BLUE, markersize=4)
            ends = [true[:, place].min(), true[:, place].max()]
            axes.plot(ends, ends, color=GREY, linewidth=1, linestyle="--")
            figures[f"values_{place}"] = figure
        losses = (((found - true) / self.scale) ** 2).mean(axis=1)
        cells = {
            header: [", ".join(f"{value:.4g}" for value in row) for row in values]
            for header, values in (("values", true), ("predicted", found))
        }
        return ReportContent(figures, [worst_texts(losses, cells, split)])

    # The exported model

    def fit(self, best: Predictions | None, split: TextSplit | None) -> dict[str, Any]:
        facts = {"target_mean": self.mean, "target_std": self.scale}
        return {name: by_name(self.labels, values) for name, values in facts.items()}

    def exported_outputs(self, logits: np.ndarray) -> np.ndarray:
        return logits

    @property
    def unit(self) -> np.ndarray:
        """As a sigmoid has a slope of 1/4 at most, errors of a quarter of the scale count like those of
        probabilities; and fp32 rounds values by their size."""
        return 4 * self.scale + np.abs(self.mean) / 10

    def config_entries(self) -> dict[str, Any]:
        values = {"mean": self.mean.tolist(), "scale": self.scale.tolist()}
        return {"regression": {**self.loss, **values}}

    @property
    def export_scale(self) -> tuple[np.ndarray, np.ndarray]:
        return 1 / self.scale, self.mean

    def use_exported(self, model: Any) -> None:
        self.is_exported, stored = True, dict(getattr(model.config, "regression", None) or {})
        mean, scale = (stored.pop(name, default) for name, default in (("mean", 0.0), ("scale", 1.0)))
        self.mean, self.scale = (np.broadcast_to(value, len(self.labels)) for value in (mean, scale))
        self.loss = stored or self.loss
        if "regression" in vars(model.config):  # so its output layer has a bias
            _, layer = output_layer(model, len(self.labels))
            # Not by a matrix product, which autocast would round: near 2000 to a multiple of 8.
            layer.forward = lambda x: (x.float()[..., None, :] * layer.weight).sum(-1) + layer.bias


def regression_scores(found: np.ndarray, true: np.ndarray, columns: Sequence[str]) -> dict[str, float | None]:
    """METRICS as means over the columns, and with several columns those of each column; None for undefined
    ones, such as correlations of a column with one value. `found`, `true`: (rows, columns) float64."""
    table = [column_scores(*pair) for pair in zip(found.T, true.T, strict=True)]
    scores: dict[str, float | None] = {}
    for metric in METRICS:
        values = [row[metric] for row in table]
        scores[metric] = None if None in values else float(np.mean(values))
    if len(columns) > 1:
        for column, row in zip(columns, table, strict=True):
            scores |= {f"{metric}_{column}": value for metric, value in row.items()}
    return scores


def column_scores(found: np.ndarray, true: np.ndarray) -> dict[str, float | None]:
    """METRICS of (rows,) values."""
    from scipy.stats import pearsonr, spearmanr

    if not len(true):
        return dict.fromkeys(METRICS)
    error, spread = found - true, ((true - true.mean()) ** 2).sum()
    varies = np.ptp(true) > 0  # the mean of equal values is rounded
    correlated = varies and np.ptp(found) > 0
    return {
        "mse": float((error**2).mean()),
        "mae": float(np.abs(error).mean()),
        "r2": float(1 - (error**2).sum() / spread) if varies else None,
        "pearson": float(pearsonr(found, true)[0]) if correlated else None,
        "spearman": float(spearmanr(found, true)[0]) if correlated else None,
    }
