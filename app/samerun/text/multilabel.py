"""Multi-label classification: label cells of files, losses, the model's output layer, and the exported model.

Scores, thresholds and figures are in `multilabel_scores`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from samerun import export
from samerun.data.files import read_object
from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.errors import (
    SHOWN,
    InputError,
    TrainingError,
    described,
    more,
    nearest,
    raise_problems,
)
from samerun.files import read_text
from samerun.kernels.common import send
from samerun.models.adapters import loadable
from samerun.models.pretrained import labels_of, set_labels
from samerun.reports.card import markdown_table
from samerun.task import ModelCard
from samerun.text import long_documents
from samerun.text.multilabel_scores import METRICS, Thresholds, multilabel_scores

# ['a', 'b'], as pandas writes a list to csv
LIST_AS_TEXT = re.compile(r"\[\s*(([\"']).*\2\s*)?\]", re.DOTALL)
BITS = dict.fromkeys(("1", "true", "True", "TRUE", "1.0"), True) | dict.fromkeys(
    ("0", "false", "False", "FALSE", "0.0"), False
)
DB_ALPHA, DB_BETA = 0.1, 10.0  # of distribution_balanced's weight, the same for all data sets of its paper
MIN_PROBABILITY = 1e-12  # of one that is raised to a power, to keep its gradient finite
MAX_POS_WEIGHT = 1e6  # larger weights would soon overflow fp32 losses
MAX_TABLE_ROWS = 100  # in the card's per-label table; metrics.json has all labels
CHECKED_ROWS = 4  # of the exported model
# Largest difference in probability, by the run's precision. The pipeline computes in fp32.
TOLERANCE = {"no": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
CARD_NOTE = (
    "\n`tuned_*` use the model's thresholds, one per label. On validation rows, which tuned them, each row "
    "is decided by thresholds tuned on the other folds; ECE is the expected calibration error over all "
    "labels.\n"
)
USAGE = """from transformers import pipeline
classify = pipeline("text-classification", model="best", top_k=None)
# A probability for every label; thresholds: classify.model.config.thresholds
classify("a text", truncation=True)"""


# Labels


@dataclass(frozen=True)
class Labelled:
    """The distinct labels of each row. `declared`: all labels of --label_columns or of a ClassLabel column,
    used or not."""

    rows: list[tuple[str, ...]]
    declared: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def names(self) -> list[str]:
        """All labels, in the declared order or in the order of first appearance."""
        return list(self.declared or dict.fromkeys(chain.from_iterable(self.rows)))

    def take(self, rows: np.ndarray) -> Labelled:
        return Labelled([self.rows[row] for row in rows.tolist()], self.declared)


def read_labels(table: Table, arguments: Any, notes: list[str]) -> Labelled | None:
    """The labels of each row of a file; None for a file without labels.

    A cell of --label_column is a list of texts or integers, or one text split at --label_separator (empty: no
    label). Integers are converted to text. A ClassLabel is never split. With --label_columns a row has the
    labels whose columns hold 1.

    Raises `InputError` with the line for cells of another type and for files that mix types.
    """
    columns = arguments.label_columns or (arguments.label_column,)
    if any(column not in table.columns for column in columns):
        return None
    if arguments.label_columns:
        return _from_bits(table, arguments.label_columns)
    column, separator, problems = arguments.label_column, arguments.label_separator, []
    declared = tuple(table.classes.get(column, ()))
    if declared:
        separator = None
    first_rows: dict[str, int] = {}  # by the form of the cell
    interned: dict[tuple[str, ...], tuple[str, ...]] = {}  # saves memory: many rows have the same labels
    rows, repeated = [], 0
    for row, cell in enumerate(table.columns[column]):
        try:
            names, form = _parse_cell(cell, separator)
        except ValueError as error:
            problems.append(f"{table.where(row)}: {column} {error}")
            continue
        if form:
            first_rows.setdefault(form, row)
        distinct = tuple(dict.fromkeys(names))
        repeated += len(distinct) < len(names)
        rows.append(interned.setdefault(distinct, distinct))
    if len(first_rows) > 1:
        (first, first_row), (second, second_row) = list(first_rows.items())[:2]
        problems.append(
            f"{table.where(second_row)}: {column} is {second}, but {first} at {table.where(first_row)}; use "
            "one form in the whole file"
        )
    raise_problems(problems)
    if repeated:
        notes.append(f"{table.path}: {repeated} row(s) name a label twice; it counts once")
    if set(first_rows) == {"a text"} and max(map(len, rows)) == 1 and not declared:
        only_labels = [names[0] for names in rows if names]
        for mark in set(",;") - {separator}:
            if 4 * sum(mark in label for label in only_labels) > len(only_labels):
                notes.append(
                    f"{table.path}: no row has two labels, but many labels hold {mark!r}; is "
                    f"--label_separator {mark!r} meant?"
                )
    return Labelled(rows, declared)


def _parse_cell(cell: Any, separator: str | None) -> tuple[list[str], str]:
    """(labels, form of the cell); the form is "" without labels. `separator`: None if a text is one label.
    Raises ValueError for a cell of another form."""
    if isinstance(cell, str) and separator is None:
        return [cell], "a text"
    if isinstance(cell, str):
        if not cell.strip():
            return [], ""
        if cell.lstrip()[0] == "[" and LIST_AS_TEXT.fullmatch(cell.strip()):
            raise ValueError(
                f"{cell!r:.60} is a list written as a text; write a{separator}b, or use a jsonl file"
            )
        parts = [part.strip() for part in cell.split(separator)]
        if not all(parts):
            raise ValueError(f"{cell!r:.60} has an empty label between separators {separator!r}")
        return parts, "a text"
    if isinstance(cell, list):
        types = set(map(type, cell))
        if types <= {str}:
            names = list(map(str.strip, cell))
            if not all(names):
                raise ValueError("holds an empty label")
            return names, "a list of texts" if cell else ""
        if types == {int}:
            return [str(item) for item in cell], "a list of numbers"
        raise ValueError(f"{cell!r:.80} mixes types; expected a list of texts or a list of whole numbers")
    if type(cell) is int:
        return [str(cell)], "a number"
    hint = ""
    if cell is None:
        hint = "; for csv files in a data set, name the files by --train_file: datasets drops empty texts"
    raise ValueError(
        f"is {described(cell)}, expected a list or a text (empty for a row without labels{hint})"
    )


def _from_bits(table: Table, columns: tuple[str, ...]) -> Labelled:
    rows, problems = [], []
    for row, cells in enumerate(zip(*(table.columns[name] for name in columns), strict=True)):
        bits = [BITS.get(str(cell).strip()) for cell in cells]
        if None in bits:
            wrong = bits.index(None)
            problems.append(f"{table.where(row)}: {columns[wrong]} is {cells[wrong]!r:.60}, expected 0 or 1")
        rows.append(tuple(compress(columns, bits)))
    raise_problems(problems)
    return Labelled(rows, columns)


def read_label_file(path: str) -> list[str]:
    """The labels of --label_file, one per line, in its order. Raises `InputError`."""
    names = [line.strip() for line in read_text(path).split("\n") if line.strip()]
    if any("\0" in name or LIST_AS_TEXT.fullmatch(name) for name in names):
        raise InputError(
            f"--label_file {path}: holds a list or a NUL character; write one label per line, in UTF-8"
        )
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"--label_file {path}: {', '.join(map(repr, repeated[:SHOWN]))} stands twice")
    if not names:
        raise InputError(f"--label_file {path}: holds no label")
    return names


def choose_labels(
    own: list[str] | None,
    train_labels: list[str],
    label_file: str | None,
    notes: list[str],
    path: str = "training data",
) -> list[str]:
    """The labels to train, in order: those of `label_file`, else `train_labels`, in the order of the model's
    `own` labels if both are the same set. Notes changes of the model's head. Raises `InputError` for a bad
    file, and if no row of `path` has a label."""
    labels = read_label_file(label_file) if label_file else train_labels
    if not labels:
        raise InputError(f"{path}: no row has a label; name the labels with --label_file if that is intended")
    if own is None:
        return labels
    if not label_file and set(own) == set(labels):
        return own
    kept = set(own) & set(labels)
    if own != labels and kept:
        notes.append(
            f"the model's head keeps the rows of {len(kept)} label(s), by name; {len(set(labels) - kept)} "
            f"label(s) are new, {len(set(own) - kept)} are dropped"
        )
    elif own != labels:
        notes.append(f"the model's head for {len(own)} label(s) is replaced by a new one for {len(labels)}")
    return labels


def label_ids(
    table: Table,
    labelled: Labelled,
    labels: list[str],
    ignore_unknown: bool,
    notes: list[str],
    source: str = "training data",
) -> Ragged:
    """Each row's label ids, ascending. `source`: of the list `labels`, for messages.

    Raises `InputError` with the lines of labels that are not in the list. With `ignore_unknown` it drops them
    and notes their number.
    """
    label2id = {name: i for i, name in enumerate(labels)}
    ids = {
        names: sorted(label2id[name] for name in names if name in label2id) for names in set(labelled.rows)
    }
    unknown: dict[str, list[int]] = {}  # label -> rows
    for row, names in enumerate(labelled.rows):
        if len(ids[names]) < len(names):
            for name in names:
                if name not in label2id:
                    unknown.setdefault(name, []).append(row)
    if unknown and ignore_unknown:
        count = sum(map(len, unknown.values()))
        notes.append(
            f"{table.path}: {count} label(s) of {len(unknown)} kind(s) that the {source} does not "
            "have are ignored"
        )
    elif unknown:
        advice = "correct it, name it in --label_file, or leave such labels out with --unknown_labels ignore"
        problems = []
        for name, rows in list(unknown.items())[:SHOWN]:
            near = nearest(name, labels)
            hint = f"; did you mean {near!r}?" if near else ""
            where = f"{table.where(rows[0])}: label {name!r:.80}"
            problems.append(f"{where} is not in the {source} ({len(rows)} row(s)){hint}; {advice}")
        raise InputError(*problems, *more(len(unknown)))
    return Ragged.of([ids[names] for names in labelled.rows])


def label_source(arguments: Any) -> str:
    """The source of a run's label list, for messages."""
    if not arguments.modes.train:
        return f"labels of {arguments.model_name_or_path}"
    if arguments.label_file is not None:
        return f"--label_file {arguments.label_file}"
    return "first buffer of the training data" if arguments.streaming else "training data"


def note_labels(
    tables: dict[str, Table], targets: dict[str, Ragged], labels: list[str], notes: list[str]
) -> None:
    """Notes training and validation rows without labels, labels without training rows, and labels without a
    ROC AUC. `targets`: label ids of each row, by split."""
    counts = {name: np.bincount(ids.values, minlength=len(labels)) for name, ids in targets.items()}
    notes.append(
        f"{len(labels)} labels, {counts['train'].sum() / len(targets['train']):.2f} per training row"
    )
    for name in ("train", "validation"):
        if name not in targets:
            continue
        if unlabelled := int((targets[name].lengths == 0).sum()):
            notes.append(f"{tables[name].path}: {unlabelled} row(s) have no label")
        unused = [label for label, count in zip(labels, counts[name], strict=True) if count == 0]
        if name == "train" and unused:
            notes.append(f"no training row has {_first_names(unused)}")
    if "validation" in targets:
        size = len(targets["validation"])
        undefined = [x for x, count in zip(labels, counts["validation"], strict=True) if count in (0, size)]
        if undefined:
            notes.append(
                f"ROC AUC is undefined for {len(undefined)} label(s) that no or every validation row has, "
                f"and left out of its average: {_first_names(undefined)}"
            )


def _first_names(names: list[str]) -> str:
    return f"{', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"


def one_hot(labels: Ragged, rows: np.ndarray, num_labels: int) -> Tensor:
    """(b, labels) float32: 1 for the labels of a row, else 0."""
    dense = torch.zeros(len(rows), num_labels)
    counts = labels.lengths[rows]
    if counts.sum():
        dense[np.repeat(np.arange(len(rows)), counts), np.concatenate([labels[row] for row in rows])] = 1
    return dense


def class_balanced(targets: Ragged, num_labels: int) -> np.ndarray:
    """(rows,) probability of each row if a label is drawn first, then one of its rows (Shen et al.,
    arXiv:1512.05830, section 3.2). "No label" counts as a label of its own, so that rows without labels are
    drawn, too."""
    count = np.bincount(targets.values, minlength=num_labels)
    weights = np.zeros(len(targets))
    np.add.at(weights, np.repeat(np.arange(len(targets)), targets.lengths), 1 / count[targets.values])
    unlabelled = targets.lengths == 0
    weights[unlabelled] = 1 / max(1, unlabelled.sum())
    return weights / weights.sum()


def check_best_metric(name: str, labels: Ragged, num_labels: int) -> None:
    """Raises `InputError` if `name`, --metric_for_best_model, is undefined on these validation rows.
    `labels`: label ids of each row."""
    count = np.bincount(labels.values, minlength=num_labels)
    # The same metrics are undefined on these two rows as on all.
    targets = np.stack([count > 0, count == len(labels)])
    metrics = multilabel_scores(np.zeros(targets.shape), targets, 0.0, targets)
    if metrics[name] is None:
        raise InputError(
            f"--metric_for_best_model {name} is undefined on these validation rows (every label has one "
            "class only); choose another, such as f1_micro or loss"
        )


# Losses


@dataclass(frozen=True)
class MultiLabelLoss:
    """--loss with its settings, per row and label: the sum does not depend on micro-batches."""

    kind: str = "bce"
    label_smoothing: float = 0.0  # of bce: targets 0 and 1 become s/2 and 1 - s/2
    pos_weight: np.ndarray | None = None  # of bce, (labels,)
    settings: dict[str, Any] = field(default_factory=dict)  # of the other losses, by argument name
    prior: np.ndarray | None = None  # of distribution_balanced: (labels,) share of rows with each label

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(b, labels) losses. `logits`, `targets` (0 or 1): (b, labels), of the same floating-point dtype."""
        if self.kind == "focal":
            return focal(logits, targets, **self.settings)
        if self.kind == "asymmetric":
            return asymmetric(logits, targets, **self.settings)
        if self.kind == "distribution_balanced":
            prior = send(torch.as_tensor(self.prior, dtype=logits.dtype), logits.device)
            return distribution_balanced(logits, targets, prior, **self.settings)
        weight, smoothing = None, self.label_smoothing
        if self.pos_weight is not None:
            weight = send(torch.as_tensor(self.pos_weight, dtype=logits.dtype), logits.device)
        soft = targets * (1 - smoothing) + smoothing / 2
        return binary_cross_entropy_with_logits(logits, soft, pos_weight=weight, reduction="none")

    def mean(self, logits: np.ndarray, targets: np.ndarray) -> float | None:
        """The mean loss of a file in float64; None without rows. `logits`, `targets`: (rows, labels)."""
        matrices = (torch.as_tensor(matrix, dtype=torch.float64) for matrix in (logits, targets))
        return float(self(*matrices).mean()) if len(logits) else None

    def as_settings(self) -> dict[str, Any]:
        """What the scale of the loss depends on, as JSON values."""
        weight = None if self.pos_weight is None else self.pos_weight.tolist()
        prior = {} if self.prior is None else {"prior": self.prior.tolist()}
        smoothing = self.label_smoothing
        return {
            "kind": self.kind,
            "label_smoothing": smoothing,
            "pos_weight": weight,
            **self.settings,
            **prior,
        }


def loss_of_arguments(
    arguments: Any, positive: np.ndarray, rows: int, labels: list[str], notes: list[str]
) -> MultiLabelLoss:
    """The loss of --loss. `positive`: (labels,) number of the training `rows` with each label. Raises
    `InputError`."""
    if arguments.loss == "bce":
        weight = positive_weights(arguments, positive, rows, labels)
        if weight is not None:
            notes.append(
                f"weights of positive targets: {weight.min():.2f} to {weight.max():.2f} (--pos_weight)"
            )
        return MultiLabelLoss("bce", arguments.label_smoothing_factor, weight)
    # Half a row is added on both sides, as in `prior_bias`.
    prior = (positive + 0.5) / (rows + 1) if arguments.loss == "distribution_balanced" else None
    return MultiLabelLoss(arguments.loss, settings=arguments.loss_settings, prior=prior)


def positive_weights(arguments: Any, positive: np.ndarray, rows: int, labels: list[str]) -> np.ndarray | None:
    """(labels,) weights of positive targets; None for --pos_weight none.

    "balanced": negatives / positives, clipped to [1, 20] or [1, LIMIT] (balanced:LIMIT); 1 for a label
    without rows. A file is a json object {"LABEL": WEIGHT}. `positive`: (labels,) number of the training
    `rows` with each label.

    Raises `InputError` for a file that cannot be read or lacks a positive number for a label.
    """
    choice = arguments.pos_weight
    if choice == "none":
        return None
    if choice.partition(":")[0] == "balanced":
        ratio = np.divide(rows - positive, positive, out=np.ones(len(positive)), where=positive > 0)
        return np.clip(ratio, 1.0, arguments.pos_weight_cap)
    try:
        weights = read_object(choice)
    except InputError as error:
        hint = "" if Path(choice).is_file() else "; expected none, balanced or a json file"
        raise InputError(*(f"--pos_weight {problem}{hint}" for problem in error.problems)) from None
    wrong = [
        x for x in labels if type(weights.get(x)) not in (int, float) or not 0 < weights[x] <= MAX_POS_WEIGHT
    ]
    if wrong:
        raise InputError(
            f"--pos_weight {choice}: no positive weight for {', '.join(map(repr, wrong[:20]))}; expected a "
            f"number above 0 and at most {MAX_POS_WEIGHT:g} for every label"
        )
    return np.array([float(weights[label]) for label in labels])


def focal(logits: Tensor, targets: Tensor, focal_gamma: float, focal_alpha: float | None) -> Tensor:
    """-alpha_t (1 - p_t)^gamma log(p_t), where p_t is the probability of the true value, and alpha_t is alpha
    for positive labels, 1 - alpha for negative ones (Lin et al., arXiv:1708.02002, equation 5); without
    alpha, equation 4."""
    wrong = (1 - 2 * targets) * logits  # logit of the false value
    loss = torch.exp(focal_gamma * logsigmoid(wrong)) * softplus(wrong)
    return loss if focal_alpha is None else (focal_alpha * targets + (1 - focal_alpha) * (1 - targets)) * loss


def asymmetric(
    logits: Tensor, targets: Tensor, asl_gamma_neg: float, asl_gamma_pos: float, asl_margin: float
) -> Tensor:
    """-(1 - p)^gamma_pos log(p) for positive labels; -p_m^gamma_neg log(1 - p_m), p_m = max(p - margin, 0),
    for negative ones (Ridnik, Ben-Baruch et al., arXiv:2009.14119, equations 4 to 7)."""
    positive = torch.exp(asl_gamma_pos * logsigmoid(-logits)) * -logsigmoid(logits)
    if asl_margin == 0:
        negative = torch.exp(asl_gamma_neg * logsigmoid(logits)) * softplus(logits)
    else:
        shifted = (torch.sigmoid(logits) - asl_margin).clamp(min=MIN_PROBABILITY)
        negative = shifted**asl_gamma_neg * -torch.log1p(-shifted)
    return targets * positive + (1 - targets) * negative


def distribution_balanced(
    logits: Tensor, targets: Tensor, prior: Tensor, db_mu: float, db_lambda: float, db_kappa: float
) -> Tensor:
    """The loss of Wu et al. (arXiv:2007.09654, equations 3 to 9). Their code,
    github.com/wutong16/DistributionBalancedLoss, also has a focal factor and divides kappa by lambda. The
    arguments' defaults are its settings for COCO.

    The weight of a label is alpha + sigmoid(beta (r - mu)). The rebalancing ratio r = (1 / prior) / (sum of 1
    / prior over the row's positive labels) is the label's share of the row's sampling frequency when labels
    are sampled uniformly; rows without labels, which the paper lacks, have r = 1. Logits are shifted by nu =
    kappa log(1 / prior - 1). The loss is -log sigmoid(x - nu) for positive labels and softplus(lambda (x -
    nu)) / lambda for negative ones. `prior`: (labels,), between 0 and 1, both excluded.
    """
    frequency = (targets / prior).sum(dim=1, keepdim=True)
    share = torch.where(frequency > 0, 1 / prior / frequency.clamp(min=1.0), torch.ones_like(targets))
    weight = DB_ALPHA + torch.sigmoid(DB_BETA * (share - db_mu))
    shifted = logits - db_kappa * torch.log(1 / prior - 1)
    return weight * (targets * softplus(-shifted) + (1 - targets) * softplus(db_lambda * shifted) / db_lambda)


# The model's output layer


def configure(config: Any, labels: list[str]) -> None:
    """Sets the labels and the problem type of a configuration."""
    set_labels(config, labels)
    config.problem_type = "multi_label_classification"


def output_layer(model: Any, num_labels: int) -> tuple[str, torch.nn.Linear] | None:
    """Name and module of the last linear layer of the head with `num_labels` outputs."""
    body = f"{model.base_model_prefix}."
    outputs = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module.out_features == num_labels
        and not name.startswith(body)
    ]
    return outputs[-1] if outputs else None


def replace_output_layer(model: Any, own: list[str], labels: list[str]) -> np.ndarray:
    """Replaces the head's output layer for the labels `own` by one for `labels`. Labels in both lists keep
    their weights.

    Returns (labels,) bool: the labels with new weights. Raises `InputError` for a head without a linear
    output layer.
    """
    named_layer = output_layer(model, len(own))
    if named_layer is None:
        raise InputError(
            f"model {model.name_or_path}: its head has no linear layer for its {len(own)} labels, so its "
            "rows cannot be matched to other labels; give its own labels, in its order, by --label_file"
        )
    name, old = named_layer
    new = torch.nn.Linear(old.in_features, len(labels), old.bias is not None)
    model._init_weights(new)
    old_rows = {label: row for row, label in enumerate(own)}
    rows = np.array([old_rows.get(label, -1) for label in labels])
    with torch.no_grad():
        for target, source in zip(new.parameters(), old.parameters(), strict=True):
            target[rows >= 0] = source[rows[rows >= 0]]
    model.set_submodule(name, new)
    configure(model.config, labels)
    model.num_labels = len(labels)
    return rows < 0


def prior_bias(
    positive: np.ndarray, rows: int, pos_weight: np.ndarray | None, smoothing: float
) -> np.ndarray:
    """(labels,) initial bias of a new head: each label's log-odds in training, the constant logits with the
    lowest loss.

    `positive`: (labels,) number of the `rows` with each label. For smoothed targets that sum to t over n rows
    and positive weights w the log-odds are log(w t / (n - t)). Half a row is added on both sides, so that
    they are finite. This saves the first steps, which would learn that labels are rare (Lin et al.,
    arXiv:1708.02002, section 3.3).
    """
    targets = positive * (1 - smoothing) + rows * smoothing / 2
    weight = 1.0 if pos_weight is None else pos_weight
    return np.log(weight * (targets + 0.5) / (rows - targets + 0.5))


def set_head_bias(
    model: Any, new_names: set[str], bias: np.ndarray, new_rows: np.ndarray | None = None
) -> None:
    """Sets the bias, (labels,), of the untrained rows of the output layer. `new_names`: untrained parameters;
    `new_rows`: (labels,) bool, untrained rows of a trained head."""
    named_layer = output_layer(model, len(bias))
    if named_layer is None or named_layer[1].bias is None:
        return
    name, output = named_layer
    new = np.full(len(bias), f"{name}.bias" in new_names)
    new |= False if new_rows is None else new_rows
    with torch.no_grad():
        output.bias[new] = torch.as_tensor(bias[new], dtype=output.bias.dtype)


def check_calibration(calibration: str, model: Any, num_labels: int) -> None:
    """Raises `InputError` if --calibration is given and the head has no linear output layer."""
    if calibration != "none" and output_layer(model, num_labels) is None:
        raise InputError(
            f"--calibration: the head of {model.name_or_path or type(model).__name__} has no linear layer "
            f"for its {num_labels} labels, whose weights could be divided by the temperatures; leave "
            "--calibration out"
        )


# Thresholds of the arguments


def fixed_thresholds(parts: Sequence[str] | None, labels: Sequence[str]) -> np.ndarray | None:
    """(labels,) the thresholds of --threshold; None without the argument. Each part is a number for all
    labels, LABEL=NUMBER, or a json file {"LABEL": NUMBER}; later parts win. Raises `InputError` for unknown
    and for missing labels."""
    if parts is None:
        return None
    thresholds, problems = {}, []
    for part in parts:
        name, _, number = part.rpartition("=")
        if _as_number(part) is not None:
            values = dict.fromkeys(labels, part)
        elif name and _as_number(number) is not None:
            values = {name: number}
        elif Path(part).suffix == ".json" or Path(part).is_file():
            try:
                values = read_object(part)
            except InputError as error:
                raise InputError(*(f"--threshold {problem}" for problem in error.problems)) from None
        else:
            problems.append(
                f"--threshold {part}: expected a number, LABEL=NUMBER, or a json file of labels and numbers"
            )
            continue
        for label, value in values.items():
            threshold = _as_number(value)
            if label not in labels:
                problems.append(
                    f"--threshold {part}: the model has no label {label!r}; it has {', '.join(labels[:20])}"
                )
            elif threshold is None or not 0 <= threshold <= 1:
                problems.append(f"--threshold {part}: {value!r} for {label!r}, expected a number from 0 to 1")
            else:
                thresholds[label] = threshold
    missing = [label for label in labels if label not in thresholds]
    if missing and not problems:
        problems.append(
            f"--threshold lacks {len(missing)} label(s): {', '.join(missing[:20])}; put a number for all "
            "other labels first"
        )
    if problems:
        raise InputError(*problems)
    return np.array([thresholds[label] for label in labels])


def _as_number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


# The exported model


def plain_model(model: Any, fitted: Thresholds, loss: MultiLabelLoss) -> Any:
    """`export.plain_model` with the configuration to export.

    The configuration stores the loss, so that later evaluations compute the same one. It stores the
    temperatures for information only: the exported weights include them (`calibrated`).
    """
    plain = export.plain_model(model)
    stored = loss.as_settings()
    settings = {
        "thresholds": fitted.values.tolist(),
        "threshold_tuning": fitted.tuning,
        "temperatures": fitted.temperatures.tolist() if fitted.calibrates else None,
        "pos_weight": stored.pop("pos_weight"),
        "label_smoothing_factor": stored.pop("label_smoothing") or None,
        "multilabel_loss": None if loss.kind == "bce" else stored,
    }
    for name, value in settings.items():
        if value is not None:
            setattr(plain.config, name, value)
        elif hasattr(plain.config, name):
            delattr(plain.config, name)
    return plain


def thresholds_of(config: Any) -> np.ndarray:
    """(labels,) the thresholds in a configuration; 0.5 if it has none."""
    stored = getattr(config, "thresholds", None)
    return np.full(config.num_labels, 0.5) if stored is None else np.asarray(stored, dtype=np.float64)


def loss_of_config(config: Any) -> MultiLabelLoss | None:
    """The loss stored in the configuration of an exported model; None if there is none."""
    stored = dict(getattr(config, "multilabel_loss", None) or {})
    weight, smoothing = (getattr(config, name, None) for name in ("pos_weight", "label_smoothing_factor"))
    if stored:
        kind, prior = stored.pop("kind"), stored.pop("prior", None)
        prior = None if prior is None else np.asarray(prior, dtype=np.float64)
        return MultiLabelLoss(kind, settings=stored, prior=prior)
    if weight is None and smoothing is None:
        return None
    weight = None if weight is None else np.asarray(weight, dtype=np.float64)
    return MultiLabelLoss("bce", smoothing or 0.0, weight)


def calibrated(plain: Any, fitted: Thresholds, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the output layer divided by the temperatures, so that plain transformers gives
    calibrated probabilities."""
    if not fitted.calibrates:
        return weights
    layer, _ = output_layer(plain, len(fitted.temperatures))
    divisor = torch.as_tensor(fitted.temperatures, dtype=torch.float64)
    scaled = {}
    for name in (f"{layer}.weight", f"{layer}.bias"):
        if name in weights:
            wide = weights[name].double()
            scaled[name] = (wide / divisor.view(-1, *[1] * (wide.ndim - 1))).to(weights[name].dtype)
    return {**weights, **scaled}


def rows_to_check(lengths: np.ndarray) -> list[int]:
    """CHECKED_ROWS row numbers, from the shortest to the longest row."""
    by_length = np.argsort(lengths, kind="stable")
    places = np.linspace(0, len(by_length) - 1, min(CHECKED_ROWS, len(by_length))).astype(int)
    return by_length[places].tolist()


def check_export(folder: Path, expected: dict[str, np.ndarray], precision: str) -> None:
    """Loads the folder into transformers' pipeline and compares its probabilities with the run's. `expected`:
    text -> (labels,) probabilities.

    With --long_documents the function on the model card is checked, too; the pipeline only on texts that need
    no truncation.

    Raises `TrainingError` if probabilities differ by more than `TOLERANCE`.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = loadable(folder, AutoModelForSequenceClassification)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None, device="cpu")
    labels, setting = labels_of(classify.model.config), getattr(classify.model.config, "long_documents", None)
    for text, probabilities in expected.items():
        outputs = []
        if setting is None or len(tokenizer(text, verbose=False)["input_ids"]) <= tokenizer.model_max_length:
            outputs.append({item["label"]: item["score"] for item in classify([text], truncation=True)[0]})
        if setting is not None:
            outputs.append(long_documents.classifier_of(setting)(classify.model, tokenizer, text))
        exported = np.array([[output[label] for label in labels] for output in outputs])
        difference = float(np.abs(exported - probabilities).max())
        if not difference <= TOLERANCE[precision]:
            raise TrainingError(
                f"the exported model does not give the run's probabilities (difference {difference:.1e}); "
                "nothing was replaced. Please report this with run.json"
            )


def model_card(folder: Path, config: Any, limits: list[str]) -> ModelCard:
    """The task's part of the model card, with the per-label scores in the folder's metrics.json."""
    rows = json.loads((folder / "metrics.json").read_text(encoding="utf-8")).get("eval_per_label")
    sections = [CARD_NOTE]
    if rows:
        columns = list(rows[0])
        frequent = sorted(rows, key=lambda row: -(row["support"] or 0))[:MAX_TABLE_ROWS]
        sections += ["## Labels (validation)", ""]
        sections += markdown_table(columns, [[row[column] for column in columns] for row in frequent])
    usage = long_documents.usage(config) or USAGE
    metrics = [*METRICS, "ece", "calibrated_ece"]
    return ModelCard(
        "Multi-label text classification", "text-classification", usage, metrics, sections, limits
    )
