"""A kernel for GPUs is tried out before a run relies on it; where it fails, the reference stays, with a warning.

Which kernels there are, and what they compute, depends on the chip, the driver, torch's version and how it was built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor

TOLERANCE = 0.05  # of the largest element; bf16 is within 0.01


def passes(problem: Callable[[], str | None], failure: str) -> bool:
    """Whether `problem()` finds none. Warns otherwise, also where it raises: `failure`, and why."""
    try:
        reason = problem()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason is not None:
        warnings.warn(f"{failure}: {reason}", stacklevel=3)
    return reason is None


def compare(found: list[Tensor], expected: list[Tensor]) -> str | None:
    """The greatest difference of the tensors, as a share of the largest element of each, if it is beyond `TOLERANCE`."""
    difference = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True))
    return None if difference <= TOLERANCE else f"it differs by {difference:.1e} of the largest element"


def with_gradients(context: Tensor, gradient: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """A result and the gradients of its `inputs`."""
    context.backward(gradient)
    return [context.detach(), *(x.grad for x in inputs)]
