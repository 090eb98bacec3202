"""Parts of the multi-label classification task: labels, head, loss, sampling weights, and the exported
model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from samerun.data.files import read_object
from samerun.data.tokens import Ragged
from samerun.errors import InputError, TrainingError
from samerun.losses.multilabel import MultiLabelLoss
from samerun.metrics.multilabel import METRICS, multilabel_scores
from samerun.models import export
from samerun.models.adapters import loadable
from samerun.models.calibration import divide_outputs
from samerun.models.pretrained import labels_of, set_labels
from samerun.reports.card import markdown_table
from samerun.text import long_documents
from samerun.text.decisions import Fitted

MAX_POS_WEIGHT = 1e6  # larger weights would soon overflow fp32 losses
MAX_TABLE_ROWS = 100  # in the card's per-label table; metrics.json has all labels
CHECKED_ROWS = 4
# Largest difference in probability, by the run's precision. The pipeline computes in fp32.
TOLERANCE = {"no": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
CARD_METRICS = [
    *METRICS,
    "ece",
    "calibrated_ece",
]
CARD_NOTE = (
    "\n`tuned_*` use the model's thresholds, one per label. On validation rows, which tuned them, "
    "each row is decided by "
    "thresholds tuned on the other folds; ECE is the expected calibration error over all labels.\n"
)
USAGE = """from transformers import pipeline
classify = pipeline("text-classification", model="best", top_k=None)
# A probability for every label; thresholds: classify.model.config.thresholds
classify("a text", truncation=True)"""


def usage(config: Any) -> str:
    """Python code that classifies with best/, for the model card."""
    return long_documents.usage(config) or USAGE


def configure(config: Any, labels: list[str]) -> None:
    """Sets the labels and the problem type of a configuration."""
    set_labels(config, labels)
    config.problem_type = "multi_label_classification"


def thresholds_of(config: Any) -> np.ndarray:
    """(labels,) the thresholds in a configuration; 0.5 if it has none."""
    stored = getattr(config, "thresholds", None)
    return np.full(config.num_labels, 0.5) if stored is None else np.asarray(stored, dtype=np.float64)


def _output_layer(model: Any, num_labels: int) -> tuple[str, torch.nn.Linear] | None:
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


def check_calibration(arguments: Any, model: Any, num_labels: int) -> None:
    """Raises `InputError` if --calibration is given and the head has no linear output layer."""
    if arguments.calibration != "none" and _output_layer(model, num_labels) is None:
        raise InputError(
            f"--calibration: the head of {model.name_or_path or type(model).__name__} has no linear "
            f"layer for its {num_labels} "
            "labels, whose weights could be divided by the temperatures; leave --calibration out"
        )


def replace_output_layer(model: Any, own: list[str], labels: list[str]) -> np.ndarray:
    """Replaces the head's output layer for the labels `own` by one for `labels`. Labels in both lists keep
    their weights.

    Returns (labels,) bool: the labels with new weights. Raises `InputError` for a head without a linear
    output layer.
    """
    named_layer = _output_layer(model, len(own))
    if named_layer is None:
        raise InputError(
            f"model {model.name_or_path}: its head has no linear layer for its {len(own)} labels, "
            "so its rows cannot be "
            "matched to other labels; give its own labels, in its order, by --label_file"
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


def set_head_bias(
    model: Any, new_names: set[str], bias: np.ndarray, new_rows: np.ndarray | None = None
) -> bool:
    """Sets the bias, (labels,), of the untrained rows of the output layer. Returns whether there were any.

    `new_names`: untrained parameters; `new_rows`: (labels,) bool, untrained rows of a trained head.
    """
    named_layer = _output_layer(model, len(bias))
    if named_layer is None or named_layer[1].bias is None:
        return False
    name, output = named_layer
    new = np.full(len(bias), f"{name}.bias" in new_names)
    new |= False if new_rows is None else new_rows
    with torch.no_grad():
        output.bias[new] = torch.as_tensor(bias[new], dtype=output.bias.dtype)
    return bool(new.any())


def plain_model(model: Any, fitted: Fitted, loss: MultiLabelLoss) -> Any:
    """`export.plain_model` with the configuration to export.

    The configuration stores the loss, so that later evaluations compute the same one. It stores the
    temperatures for information only: the exported weights include them (`calibrated`).
    """
    plain = export.plain_model(model)
    settings = {
        "thresholds": fitted.thresholds.tolist(),
        "threshold_tuning": fitted.tuning,
        "temperatures": fitted.temperatures.tolist() if fitted.calibrates else None,
        "pos_weight": None if loss.pos_weight is None else loss.pos_weight.tolist(),
        "label_smoothing_factor": loss.label_smoothing or None,
        "multilabel_loss": loss.as_config(),
    }
    for name, value in settings.items():
        if value is not None:
            setattr(plain.config, name, value)
        elif hasattr(plain.config, name):
            delattr(plain.config, name)
    return plain


def calibrated(plain: Any, fitted: Fitted, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with the output layer divided by the temperatures, so that any pipeline gives calibrated
    probabilities."""
    if not fitted.calibrates:
        return weights
    name, _ = _output_layer(plain, len(fitted.temperatures))
    return divide_outputs(weights, name, fitted.temperatures)


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
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        loadable(folder, AutoModelForSequenceClassification),
    )
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
                "the exported model does not give the run's probabilities (difference "
                f"{difference:.1e}); nothing was "
                "replaced. Please report this with run.json"
            )


def label_table(folder: Path) -> list[str]:
    """The per-label metrics of metrics.json as a section of the model card; [] if there are none."""
    rows = json.loads((folder / "metrics.json").read_text(encoding="utf-8")).get("eval_per_label")
    if not rows:
        return []
    columns = list(rows[0])
    most_frequent = sorted(rows, key=lambda row: -(row["support"] or 0))[:MAX_TABLE_ROWS]
    title = ["## Labels (validation)", ""]
    return title + markdown_table(columns, [[row[column] for column in columns] for row in most_frequent])


def check_best_metric(name: str, labels: Ragged, num_labels: int) -> None:
    """Raises `InputError` if `name`, --metric_for_best_model, is undefined on these validation rows.

    `labels`: label ids of each row.
    """
    count = np.bincount(labels.values, minlength=num_labels)
    targets = np.stack(
        [count > 0, count == len(labels)]
    )  # the same metrics are undefined on these two rows as on all
    metrics = multilabel_scores(np.zeros(targets.shape), targets, from_logits=True, tuned_thresholds="tune")
    if metrics[name] is None:
        raise InputError(
            f"--metric_for_best_model {name} is undefined on these validation rows (every label has "
            "one class "
            "only); choose another, such as f1_micro or loss"
        )


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


def make_loss(arguments: Any, positive: np.ndarray, rows: int, labels: list[str]) -> MultiLabelLoss:
    """The loss of --loss. `positive`: (labels,) number of the training `rows` with each label. Raises
    `InputError`."""
    if arguments.loss == "bce":
        weight = positive_weights(arguments, positive, rows, labels)
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
            f"--pos_weight {choice}: no positive weight for {', '.join(map(repr, wrong[:20]))}; "
            "expected a number above 0 and "
            f"at most {MAX_POS_WEIGHT:g} for every label"
        )
    return np.array([float(weights[label]) for label in labels])


def class_balanced(targets: Ragged, num_labels: int) -> np.ndarray:
    """(rows,) probability of each row if a label is drawn first, then one of its rows (Shen et al.,
    arXiv:1512.05830, section 3.2). "No label" counts as a label of its own, so that rows without labels are
    drawn, too."""
    count = np.bincount(targets.values, minlength=num_labels)
    lengths = targets.lengths
    weights = np.zeros(len(targets))
    np.add.at(weights, np.repeat(np.arange(len(targets)), lengths), 1 / count[targets.values])
    weights[lengths == 0] = 1 / max(1, (lengths == 0).sum())
    return weights / weights.sum()
