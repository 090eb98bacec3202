"""The exported classifier: labels and thresholds in its configuration, probabilities that a stock pipeline repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from finetune.errors import InputError, TrainingError
from finetune.losses.multilabel import MultiLabelLoss
from finetune.metrics.multilabel import DECISION_METRICS, RANKING_METRICS, multilabel_scores
from finetune.models.adapters import loadable
from finetune.models.calibration import divide_outputs
from finetune.reading.json_files import read_object
from finetune.reading.ragged import Ragged
from finetune.reports.card import markdown_table
from finetune.task import check_metric
from finetune.text import long_documents
from finetune.text.decisions import Fitted

MOST_WEIGHT = 1e6  # of a positive target: beyond it fp32 losses would soon be infinite
MOST_LABELS = 100  # rows of the card's per-label table; metrics.json has them all
CHECKED_ROWS = 4
# The pipeline computes in fp32; a run in half precision reported what half precision gave it.
TOLERANCE = {"no": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
CARD_METRICS = [
    "loss",
    *DECISION_METRICS,
    *RANKING_METRICS,
    *(f"tuned_{name}" for name in DECISION_METRICS),
    "ece",
    "calibrated_ece",
]
CARD_NOTE = (
    "\n`tuned_*` use the model's thresholds, one per label. On validation rows, which tuned them, each row is decided by "
    "thresholds tuned on the other folds; ECE is the expected calibration error over all labels.\n"
)
USAGE = """from transformers import pipeline
classify = pipeline("text-classification", model="best", top_k=None)
classify("a text", truncation=True)  # a probability for every label; thresholds: classify.model.config.thresholds"""


def usage(config: Any) -> str:
    """Python code that classifies with best/, for the model card."""
    return long_documents.usage(config) or USAGE


def configure(config: Any, labels: list[str]) -> None:
    """Makes a configuration that of a multi-label classifier with these labels."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = "multi_label_classification"


def labels_of(config: Any) -> list[str]:
    """The label list of a trained classifier, in the order of its logits. Raises `InputError` for numbers with gaps."""
    missing = [number for number in range(config.num_labels) if number not in config.id2label]
    if missing:
        numbers = ", ".join(map(str, sorted(config.id2label)[:20]))
        raise InputError(
            f"model {config.name_or_path}: id2label in its config.json numbers {config.num_labels} label(s) {numbers}, so "
            f"number {missing[0]} has no name; number them from 0 to {config.num_labels - 1}"
        )
    return [config.id2label[number] for number in range(config.num_labels)]


def own_labels(config: Any) -> list[str] | None:
    """The labels that a configuration names; None for LABEL_0, LABEL_1, ... as every untrained one has them."""
    labels = labels_of(config)
    return labels if any(label != f"LABEL_{number}" for number, label in enumerate(labels)) else None


def thresholds_of(config: Any) -> np.ndarray:
    """(labels,) the thresholds that travel in the configuration; 0.5 where there are none."""
    stored = getattr(config, "thresholds", None)
    return np.full(config.num_labels, 0.5) if stored is None else np.asarray(stored, dtype=np.float64)


def _output_layer(model: Any, num_labels: int) -> tuple[str, torch.nn.Linear] | None:
    body = f"{model.base_model_prefix}."
    outputs = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features == num_labels and not name.startswith(body)
    ]
    return outputs[-1] if outputs else None


def check_calibration(arguments: Any, model: Any, num_labels: int) -> None:
    """Raises `InputError` if --calibration is asked for and the head has no linear layer that gives the logits."""
    if arguments.calibration != "none" and _output_layer(model, num_labels) is None:
        raise InputError(
            f"--calibration: the head of {model.name_or_path or type(model).__name__} has no linear layer for its {num_labels} "
            "labels, whose weights would be divided by the temperatures; leave --calibration out"
        )


def match_rows(model: Any, own: list[str], labels: list[str]) -> np.ndarray:
    """Replaces the output layer of a head for the labels `own` by one for `labels`: rows of the same name move, others are new.

    Returns (labels,) bool, which rows are new. Raises `InputError` for a head without such a layer.
    """
    found = _output_layer(model, len(own))
    if found is None:
        raise InputError(
            f"model {model.name_or_path}: its head has no linear layer for its {len(own)} labels, so its rows cannot be "
            "matched to other labels; give its own labels, in its order, by --label_file"
        )
    name, old = found
    output = torch.nn.Linear(old.in_features, len(labels), old.bias is not None)
    model._init_weights(output)
    place = {label: row for row, label in enumerate(own)}
    rows = np.array([place.get(label, -1) for label in labels])
    with torch.no_grad():
        for mine, theirs in zip(output.parameters(), old.parameters(), strict=True):
            mine[rows >= 0] = theirs[rows[rows >= 0]]
    model.set_submodule(name, output)
    configure(model.config, labels)
    model.num_labels = len(labels)
    return rows < 0


def set_head_bias(model: Any, new_names: set[str], bias: np.ndarray, new_rows: np.ndarray | None = None) -> bool:
    """Gives a new head's output layer this bias, (labels,); what comes trained keeps its own. Whether it did.

    `new_rows`: (labels,) bool, rows of a trained head that are new.
    """
    found = _output_layer(model, len(bias))
    if found is None or found[1].bias is None:
        return False
    name, output = found
    new = np.full(len(bias), f"{name}.bias" in new_names)
    new |= False if new_rows is None else new_rows
    with torch.no_grad():
        output.bias[new] = torch.as_tensor(bias[new], dtype=output.bias.dtype)
    return bool(new.any())


def plain_model(model: Any, fitted: Fitted, loss: MultiLabelLoss) -> Any:
    """An fp32 model without weights, to save others' weights with; the trained one may be partitioned or in half precision.

    The settings of the loss travel in the configuration, so that the model has the same loss wherever it is evaluated; and the
    temperatures, for the reader, since the weights hold them (`calibrated`).
    """
    config = type(model.config).from_dict(model.config.to_dict())
    config.thresholds = [float(threshold) for threshold in fitted.thresholds]
    config.threshold_tuning = fitted.tuning
    config.temperatures = [float(temperature) for temperature in fitted.temperatures] if fitted.calibrates else None
    config.pos_weight = None if loss.pos_weight is None else [float(weight) for weight in loss.pos_weight]
    config.label_smoothing_factor = loss.label_smoothing or None
    config.multilabel_loss = loss.as_config()
    for name in ("threshold_tuning", "temperatures", "pos_weight", "label_smoothing_factor", "multilabel_loss"):
        if getattr(config, name) is None:
            delattr(config, name)
    config.dtype = torch.float32
    with torch.device("meta"):
        return type(model)(config)


def calibrated(plain: Any, fitted: Fitted, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's weights with the temperatures in its output layer, so that any pipeline gives calibrated probabilities."""
    if not fitted.calibrates:
        return weights
    name, _ = _output_layer(plain, len(fitted.temperatures))
    return divide_outputs(weights, name, fitted.temperatures)


def rows_to_check(lengths: np.ndarray) -> list[int]:
    """A few rows from the shortest to the longest."""
    by_length = np.argsort(lengths, kind="stable")
    places = np.linspace(0, len(by_length) - 1, min(CHECKED_ROWS, len(by_length))).astype(int)
    return by_length[places].tolist()


def check_export(folder: Path, expected: dict[str, np.ndarray], precision: str) -> None:
    """Loads the folder into transformers' pipeline and compares its probabilities with the run's, `expected` by text. A
    model that does not truncate long texts is checked by the function on its card and, for texts that fit, by the pipeline.

    Raises `TrainingError` if they differ by more than round-off (or, in half precision, than its rounding).
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), loadable(folder, AutoModelForSequenceClassification)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None, device="cpu")
    labels, setting = labels_of(classify.model.config), getattr(classify.model.config, "long_documents", None)
    for text, chances in expected.items():
        found = []
        if setting is None or len(tokenizer(text, verbose=False)["input_ids"]) <= tokenizer.model_max_length:
            found.append({item["label"]: item["score"] for item in classify([text], truncation=True)[0]})
        if setting is not None:
            found.append(long_documents.classifier_of(setting)(classify.model, tokenizer, text))
        difference = float(np.abs(np.array([[scores[label] for label in labels] for scores in found]) - chances).max())
        if not difference <= TOLERANCE[precision]:
            raise TrainingError(
                f"the exported model does not give the run's probabilities (difference {difference:.1e}); nothing was "
                "replaced. Please report this with run.json"
            )


def label_table(folder: Path) -> list[str]:
    """The per-label metrics of metrics.json as a section of the model card; nothing if there are none."""
    rows = json.loads((folder / "metrics.json").read_text(encoding="utf-8")).get("eval_per_label")
    if not rows:
        return []
    columns = list(rows[0])
    shown = sorted(rows, key=lambda row: -(row["support"] or 0))[:MOST_LABELS]
    title = ["## Labels (validation)", ""]
    return title + markdown_table(columns, [[row[column] for column in columns] for row in shown])


def check_best_metric(name: str, labels: Ragged, num_labels: int) -> None:
    """Raises `InputError` for a --metric_for_best_model that does not exist or that these validation rows leave undefined.

    `labels`: the rows' label numbers.
    """
    count = np.bincount(labels.values, minlength=num_labels)
    targets = np.stack([count > 0, count == len(labels)])  # these two rows define what all rows do
    metrics = multilabel_scores(np.zeros(targets.shape), targets, from_logits=True, tuned_thresholds="tune")
    check_metric(name, metrics)
    if metrics[name] is None:
        raise InputError(
            f"--metric_for_best_model {name} is undefined on these validation rows (every label has one class "
            "only); choose another, such as f1_micro or loss"
        )


def prior_bias(positive: np.ndarray, rows: int, pos_weight: np.ndarray | None, smoothing: float) -> np.ndarray:
    """(labels,) the logits that have the least loss of all that do not look at the text: each label's log-odds in training.

    `positive`: (labels,) how many of the `rows` have each label. With targets that sum to t over n rows and weights w these
    are log(w t / (n - t)); half a row is added on both sides for labels that no row, or every row, has. A head that starts
    there (as in Lin et al., arXiv:1708.02002, section 3.3) need not spend its first steps on learning that labels are rare.
    """
    targets = positive * (1 - smoothing) + rows * smoothing / 2
    weight = 1.0 if pos_weight is None else pos_weight
    return np.log(weight * (targets + 0.5) / (rows - targets + 0.5))


def make_loss(arguments: Any, positive: np.ndarray, rows: int, labels: list[str]) -> MultiLabelLoss:
    """--loss for these labels, of which (labels,) `positive` of the training `rows` have each. Raises `InputError`."""
    if arguments.loss == "bce":
        weight = positive_weights(arguments, positive, rows, labels)
        return MultiLabelLoss("bce", arguments.label_smoothing_factor, weight)
    # Half a row on both sides, as in `prior_bias`, for labels that no row, or every row, has.
    prior = (positive + 0.5) / (rows + 1) if arguments.loss == "distribution_balanced" else None
    return MultiLabelLoss(arguments.loss, settings=arguments.loss_settings, prior=prior)


def positive_weights(arguments: Any, positive: np.ndarray, rows: int, labels: list[str]) -> np.ndarray | None:
    """--pos_weight as numbers, (labels,): None for "none"; for "balanced" negatives / positives in training, at least 1 and at
    most --pos_weight_cap, and 1 for a label without rows; read from a json object otherwise.

    `positive`: (labels,) how many of the training `rows` have each label.

    Raises `InputError` for a file that cannot be read or does not give every label a positive number.
    """
    choice = arguments.pos_weight
    if choice == "none":
        return None
    if choice == "balanced":
        ratio = np.divide(rows - positive, positive, out=np.ones(len(positive)), where=positive > 0)
        return np.clip(ratio, 1.0, arguments.pos_weight_cap)
    try:
        given = read_object(choice)
    except InputError as error:
        hint = "" if Path(choice).is_file() else "; none, balanced or a json file"
        raise InputError(*(f"--pos_weight {problem}{hint}" for problem in error.problems)) from None
    wrong = [x for x in labels if type(given.get(x)) not in (int, float) or not 0 < given[x] <= MOST_WEIGHT]
    if wrong:
        raise InputError(
            f"--pos_weight {choice}: no positive weight for {', '.join(map(repr, wrong[:20]))}; expected a number above 0 and "
            f"at most {MOST_WEIGHT:g} for every label"
        )
    return np.array([float(given[label]) for label in labels])


def class_balanced(targets: Ragged, num_labels: int) -> np.ndarray:
    """(rows,) how likely it is to draw each row by drawing a label, and then one of its rows (Shen et al., arXiv:1512.05830,
    section 3.2). Having no label counts as one more label: such rows would never be drawn."""
    count = np.bincount(targets.values, minlength=num_labels)
    lengths = np.diff(targets.offsets)
    weights = np.zeros(len(targets))
    np.add.at(weights, np.repeat(np.arange(len(targets)), lengths), 1 / count[targets.values])
    weights[lengths == 0] = 1 / max(1, (lengths == 0).sum())
    return weights / weights.sum()
