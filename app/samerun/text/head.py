"""A classifier's output layer, and the check of its export against transformers' pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from samerun.errors import InputError, TrainingError
from samerun.models.adapters import loadable
from samerun.models.pretrained import labels_of, set_labels
from samerun.text import long_documents

# --problem_type -> transformers' name for it
PROBLEM_TYPES = {
    "multi_label": "multi_label_classification",
    "single_label": "single_label_classification",
    "regression": "regression",
}
CHECKED_ROWS = 4  # of the exported model
# Largest difference in probability, by the run's precision. The pipeline computes in fp32.
TOLERANCE = {"no": 1e-5, "bf16": 5e-2, "fp16": 1e-2}


def configure(config: Any, labels: list[str], problem: str) -> None:
    """Sets the labels and the problem type of a configuration. `problem`: of --problem_type."""
    set_labels(config, labels)
    config.problem_type = PROBLEM_TYPES[problem]


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
    set_labels(model.config, labels)
    model.num_labels = len(labels)
    return rows < 0


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


def store(config: Any, entries: dict[str, Any]) -> None:
    """Sets the entries of an exported configuration; removes those that are None."""
    for name, value in entries.items():
        if value is not None:
            setattr(config, name, value)
        elif hasattr(config, name):
            delattr(config, name)


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
