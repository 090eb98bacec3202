"""A classifier's output layer, and the check of its export against transformers' pipeline."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from samerun.errors import InputError
from samerun.export import check_agreement
from samerun.models.adapters import load_plain
from samerun.models.pretrained import labels_of, load_config, own_labels
from samerun.text import long_documents
from samerun.text.arguments import problem_kind

# What an exported configuration stores beside transformers' own entries.
STORED = (
    *("thresholds", "threshold_tuning", "temperatures", "pos_weight", "class_weight"),
    *("label_smoothing_factor", "multilabel_loss", "regression", "text_pair"),
)
# Largest difference in probability, by the run's precision. The pipeline computes in fp32.
TOLERANCE = {"no": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
# Hidden units up to which an encoder has the higher default rates (benchmarks/quality.md, "Learning rates").
NARROW = 384


def set_default_rates(
    arguments: Any, config: Any, labels: list[str], many_labels: bool, notes: list[str]
) -> None:
    """Sets --learning_rate if it is not given, and then --head_learning_rate of a new head on a trained
    encoder. `config`: the model's; `many_labels`: whether `labels` lengthen the training."""
    if arguments.learning_rate is not None:
        return
    narrow = getattr(config, "hidden_size", math.inf) <= NARROW
    of_narrow = 2e-4 if many_labels else 1e-4
    object.__setattr__(arguments, "learning_rate", of_narrow if narrow else 5e-5)
    own = own_labels(config)
    fits = len(labels) == config.num_labels if own is None else not {*own}.isdisjoint(labels)
    # An adapter's configuration has the architecture of its base model.
    has_head = config.problem_type is not None or "ForSequenceClassification" in str(config.architectures)
    if arguments.head_learning_rate is None and not (arguments.from_scratch or (fits and has_head)):
        object.__setattr__(arguments, "head_learning_rate", 10 * arguments.learning_rate)
        notes.append(f"the new head learns at {arguments.head_learning_rate:g} (--head_learning_rate)")


def output_layer(model: Any, num_labels: int) -> tuple[str, torch.nn.Linear] | None:
    """Name and module of the last linear layer of the head with `num_labels` outputs."""
    found, body = None, f"{model.base_model_prefix}."
    for name, module in model.named_modules():
        is_linear = isinstance(module, torch.nn.Linear) and module.out_features == num_labels
        if is_linear and not name.startswith(body):
            found = name, module
    return found


def trained_outputs(
    model: Any, new_names: set[str], new_rows: np.ndarray | None, num_labels: int
) -> np.ndarray:
    """(labels,) bool: the outputs with trained weights. `new_names`: untrained parameters; `new_rows`:
    (labels,) bool, untrained rows of a trained head."""
    named_layer = output_layer(model, num_labels)
    if named_layer is None or f"{named_layer[0]}.weight" in new_names:
        return np.zeros(num_labels, dtype=bool)
    return np.ones(num_labels, dtype=bool) if new_rows is None else ~new_rows


def set_head_bias(model: Any, bias: np.ndarray, new: np.ndarray) -> None:
    """Sets the bias, (labels,), of the output layer's rows `new`, (labels,) bool."""
    named_layer = output_layer(model, len(bias))
    if named_layer is not None and named_layer[1].bias is not None:
        with torch.no_grad():
            named_layer[1].bias[new] = torch.as_tensor(bias[new], dtype=named_layer[1].bias.dtype)


def check_calibration(calibration: str, model: Any, num_labels: int) -> None:
    """Raises `InputError` if --calibration is given and the head has no linear output layer."""
    if calibration != "none" and output_layer(model, num_labels) is None:
        raise InputError(
            f"--calibration: the head of {model.name_or_path or type(model).__name__} has no linear layer "
            f"for its {num_labels} labels, whose weights could be divided by the temperatures; leave "
            "--calibration out"
        )


def check_pairs(arguments: Any, config: Any) -> None:
    """Raises `InputError` for files of single texts for a model of pairs, and the reverse."""
    own, column = getattr(config, "text_pair", None), arguments.text_pair_column
    name = arguments.model_name_or_path
    if own and column is None:
        raise InputError(f"{name} reads pairs of texts; name the column of the second by --text_pair_column")
    if own is False and column is not None:
        raise InputError(f"--text_pair_column {column}: {name} was trained on single texts; leave it out")


def store(config: Any, entries: dict[str, Any]) -> None:
    """Sets our entries of an exported configuration; removes those of an earlier training."""
    for name in dict.fromkeys([*STORED, *entries]):
        if entries.get(name) is not None:
            setattr(config, name, entries[name])
        elif hasattr(config, name):
            delattr(config, name)


def problem_type_of(arguments: Any) -> str:
    """--problem_type by our name; without training, the model's own. Loading the model raises its errors."""
    if arguments.problem_kind is not None:
        return arguments.problem_kind
    try:
        own = load_config(arguments).problem_type
    except InputError:
        own = None
    return problem_kind(own or "multi_label")


def check_problem_type(arguments: Any, config: Any, notes: list[str]) -> None:
    """Raises `InputError` if --problem_type is given for a model that was trained for another. Notes that
    neither the model nor the argument names one."""
    own, given = config.problem_type, arguments.problem_type
    if own is None and given is None:  # transformers' pipeline takes such a model for one of single labels
        notes.append(
            f"{arguments.model_name_or_path} names no problem type and is read as multi_label; if its texts "
            "have one label each, add --problem_type single_label"
        )
    if own is not None and given is not None and problem_kind(given) != problem_kind(own):
        name = arguments.model_name_or_path
        raise InputError(
            f"--problem_type {given}: {name} was trained for {problem_kind(own)}; leave the argument out"
        )


def rescaled(
    plain: Any, divisor: np.ndarray, shift: np.ndarray | None, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The weights with the outputs, (outputs,), divided by `divisor`, then shifted: plain transformers gives
    calibrated probabilities or original units. `plain`: the model."""
    if shift is None and (divisor == 1).all():
        return weights
    layer, _ = output_layer(plain, len(divisor))
    scale, scaled = torch.as_tensor(divisor, dtype=torch.float64), {}
    for name in (f"{layer}.weight", f"{layer}.bias"):
        if name in weights:
            wide = weights[name].double()
            wide = wide / scale.view(-1, *[1] * (wide.ndim - 1))
            if shift is not None and wide.ndim == 1:
                wide = wide + torch.as_tensor(shift, dtype=torch.float64)
            scaled[name] = wide.to(weights[name].dtype)
    return {**weights, **scaled}


def check_export(
    folder: Path, expected: dict[Any, np.ndarray], precision: str, unit: np.ndarray | float = 1.0
) -> None:
    """Loads the folder into transformers' pipeline and compares its probabilities with the run's. `expected`:
    text -> (labels,) probabilities or, of a regression, values; `unit`: what a difference of 1 is.

    With --long_documents the function on the model card is checked, too; the pipeline only on texts that need
    no truncation.

    Raises `TrainingError` if probabilities differ by more than `TOLERANCE`.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_plain(folder, AutoModelForSequenceClassification)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None, device="cpu")
    labels, setting = labels_of(classify.model.config), getattr(classify.model.config, "long_documents", None)
    for text, probabilities in expected.items():
        outputs, inputs = [], text
        if isinstance(text, tuple):
            inputs = dict(zip(("text", "text_pair"), text, strict=True))
        if setting is None or len(tokenizer(text, verbose=False)["input_ids"]) <= tokenizer.model_max_length:
            outputs.append({item["label"]: item["score"] for item in classify([inputs], truncation=True)[0]})
        if setting is not None:
            outputs.append(long_documents.classifier_of(setting)(classify.model, tokenizer, text))
        exported = np.array([[output[label] for label in labels] for output in outputs])
        check_agreement("probabilities", exported / unit, probabilities / unit, TOLERANCE[precision])
