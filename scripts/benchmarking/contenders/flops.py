"""The floating-point operations that the model itself needs for what was trained: no padding, nothing computed twice.

Matrix products are counted by torch's counter over forward passes without values, and fitted as a * length + b * length^2; a
backward pass counts as two forward passes (PaLM, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarking.contenders import classification, titles

BACKWARD = 2.0


def classification_step(settings: dict[str, Any]) -> dict[str, Any]:
    """Ours, with the operations of each step."""
    import classify

    from finetune.arguments.parsing import parse
    from finetune.plan import make_plan

    figures = classification.train_ours(settings)
    arguments = parse(classify.Arguments, argv=classification.our_arguments(settings | {"contender": "ours"}))
    data = classify.load_data(arguments, True, False, False)
    lengths = data.train.tokens.lengths
    steps = classify.train_steps(arguments, data, make_plan(arguments, len(lengths), 1), 0)
    model = classification.load_model(settings, len(data.labels))
    cost = polynomial(lambda length: forward(model, length), min(64, settings["max_length"]), settings["max_length"])
    done = [sum(cost(int(length)) for length in lengths[steps.rows(step)]) for step in range(len(steps))]
    return figures | {"units": [(1 + BACKWARD) * operations for operations in done]}


def titles_step(settings: dict[str, Any]) -> dict[str, Any]:
    """Ours, with the operations of each step as transformers' block-sparse BigBird needs them."""
    import titlegen

    from benchmarking.contenders.title_models import plain_model
    from text.title_splits import collator

    figures = titles.train_ours(settings)
    arguments, rows = titles.training_arguments(settings)
    data = titlegen.load_data(arguments, True, False, False)
    model = plain_model(arguments, data)
    row = collator(data.train, data)([0])
    task = titles.task_of(data)
    operations = counted(lambda: task.loss_sum(model, row), model)
    return figures | {"units": [(1 + BACKWARD) * operations * rows] * len(figures["step_seconds"])}


def forward(model: Any, length: int) -> float:
    ids = torch.full((1, length), 5)
    return counted(lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids)), model)


def counted(work: Callable[[], Any], model: torch.nn.Module) -> float:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model.eval()
    # The counter knows the products of plain attention, but not torch's fused one on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        work()
    return float(counter.get_total_flops())


def polynomial(count: Callable[[int], float], short: int, long: int) -> Callable[[int], float]:
    """a * length + b * length^2 through two counts."""
    low, high = count(short) / short, count(long) / long
    slope = (high - low) / (long - short) if long > short else 0.0
    return lambda length: length * (low + slope * (length - short))


CONTENDERS = {"classification": classification_step, "titles": titles_step}
