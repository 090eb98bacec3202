"""The floating-point operations that the model itself needs for what was trained: no padding, nothing computed twice.

Matrix products are counted by torch's counter over forward passes; a backward pass counts as two forward passes (PaLM,
arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarking.contenders.classification import Classification
from benchmarking.contenders.titles import Titles

BACKWARD = 2.0


def train_classification(settings: dict[str, Any]) -> dict[str, Any]:
    """Ours, with the operations of each step: `units`. Those of a row are a * length + b * length^2, through two counts."""
    ours = Classification(settings | {"contender": "ours"})
    measured, model = ours.measure(), ours.plain_model()
    long = settings["max_length"]
    short = min(64, long // 2)
    low, high = (counted(partial(forward, model, length), model) / length for length in (short, long))
    slope = (high - low) / (long - short)
    done = [float((lengths * (low + slope * (lengths - short))).sum()) for lengths in ours.step_lengths]
    return measured | {"units": [(1 + BACKWARD) * operations for operations in done]}


def train_titles(settings: dict[str, Any]) -> dict[str, Any]:
    """Ours, with the operations of each step as transformers' block-sparse BigBird needs them."""
    ours = Titles(settings | {"contender": "ours"})
    measured, row = ours.measure(), ours.prepared.steps.collate([0])
    model = ours.plain_model()
    operations = counted(partial(ours.loss_sum, model, row), model)
    return measured | {"units": [(1 + BACKWARD) * operations * measured["batch_size"]] * len(measured["step_seconds"])}


def forward(model: Any, length: int) -> None:
    ids = torch.full((1, length), 5)
    model(input_ids=ids, attention_mask=torch.ones_like(ids))


def counted(work: Callable[[], Any], model: torch.nn.Module) -> float:
    model.eval()
    # The counter knows the products of plain attention, but not torch's fused one on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        work()
    return float(counter.get_total_flops())


CONTENDERS = {"classification": train_classification, "titles": train_titles}
