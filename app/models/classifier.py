"""The exported classifier: labels and thresholds in its configuration, probabilities that a stock pipeline repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.errors import TrainingError
from finetune.task import Record
from models.multilabel import probabilities
from text.labels import read_label_file

CHECKED_ROWS = 4
# The pipeline computes in fp32; a run in half precision reported what half precision gave it.
TOLERANCE = {"no": 1e-5, "bf16": 5e-2, "fp16": 1e-2}


def configure(config: Any, labels: list[str]) -> None:
    """Makes a configuration that of a multi-label classifier with these labels."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = "multi_label_classification"


def labels_of(config: Any) -> list[str]:
    """The label list of a trained classifier, in the order of its logits."""
    return [config.id2label[number] for number in range(config.num_labels)]


def has_own_labels(config: Any) -> bool:
    """Whether a configuration names its labels, rather than LABEL_0, LABEL_1, ... as every untrained one does."""
    return any(label != f"LABEL_{number}" for number, label in enumerate(labels_of(config)))


def choose_labels(config: Any, found: list[str], label_file: str | None, notes: list[str]) -> list[str]:
    """The labels to be trained, in their order: those of `label_file`, or those that the training rows have (`found`), in the
    order of the model's own where these are the same. Notes a head that is given up. Raises `InputError` for a bad file."""
    own = labels_of(config) if has_own_labels(config) else None
    labels = read_label_file(label_file) if label_file else found
    if not label_file and own is not None and set(own) == set(found):
        labels = own
    if own is not None and own != labels:
        notes.append(f"the model's head for {len(own)} label(s) is replaced by a new one for {len(labels)}")
    return labels


def thresholds_of(config: Any) -> np.ndarray:
    """(labels,) the thresholds that travel in the configuration; 0.5 where there are none."""
    stored = getattr(config, "thresholds", None)
    return np.full(config.num_labels, 0.5) if stored is None else np.asarray(stored, dtype=np.float64)


def set_head_bias(model: Any, new_names: set[str], bias: np.ndarray) -> bool:
    """Gives a new head's output layer this bias, (labels,); a head that comes trained keeps its own. Whether it did."""
    body = f"{model.base_model_prefix}."
    outputs = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features == len(bias) and not name.startswith(body)
    ]
    if not outputs:
        return False
    name, output = outputs[-1]
    if output.bias is None or f"{name}.bias" not in new_names:
        return False
    with torch.no_grad():
        output.bias.copy_(torch.as_tensor(bias))
    return True


def plain_model(model: Any, thresholds: np.ndarray) -> Any:
    """An fp32 model without weights, to save others' weights with; the trained one may be partitioned or in half precision."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.thresholds = [float(threshold) for threshold in thresholds]
    config.dtype = torch.float32
    with torch.device("meta"):
        return type(model)(config)


def rows_to_check(lengths: np.ndarray) -> list[int]:
    """A few rows from the shortest to the longest."""
    by_length = np.argsort(lengths, kind="stable")
    places = np.linspace(0, len(by_length) - 1, min(CHECKED_ROWS, len(by_length))).astype(int)
    return by_length[places].tolist()


def check_export(folder: Path, texts: list[str], records: list[Record], precision: str) -> None:
    """Loads the folder into transformers' pipeline and compares its probabilities with the run's.

    Raises `TrainingError` if they differ by more than round-off (or, in half precision, than its rounding).
    """
    from transformers import AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained(folder)
    classify = pipeline("text-classification", model=str(folder), tokenizer=tokenizer, top_k=None, device="cpu")
    labels = labels_of(classify.model.config)
    if not texts:
        return
    for found, record in zip(classify(texts, truncation=True), records, strict=True):
        scores = {item["label"]: item["score"] for item in found}
        difference = float(np.abs(np.array([scores[x] for x in labels]) - probabilities(record["logits"])).max())
        if not difference <= TOLERANCE[precision]:
            raise TrainingError(
                f"the exported model does not give the run's probabilities (difference {difference:.1e} on row "
                f"{record['row']}); nothing was replaced. Please report this with run.json"
            )
