"""Self-tests of GPU kernels. A kernel that fails is replaced by the reference, with a warning.

Availability and correctness of kernels depend on the GPU, the driver, and torch's version and build.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor

TOLERANCE = 0.05  # relative to the largest element; bf16 is within 0.01


def passes(test: Callable[[], str | None], failure: str) -> bool:
    """Whether `test()` returns None. If it returns a reason or raises, warns with `failure` and the
    reason."""
    try:
        reason = test()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason is not None:
        warnings.warn(f"{failure}: {reason}", stacklevel=3)
    return reason is None


def compare(results: list[Tensor], expected: list[Tensor]) -> str | None:
    """A message if results differ by more than `TOLERANCE` of the largest element of their tensor, otherwise
    None."""
    difference = max(
        float((x - y).abs().max() / y.abs().max()) for x, y in zip(results, expected, strict=True)
    )
    return None if difference <= TOLERANCE else f"it differs by {difference:.1e} of the largest element"


def with_gradients(context: Tensor, gradient: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """`context`, and the gradients of `inputs` after a backward pass from `gradient`."""
    context.backward(gradient)
    return [context.detach(), *(x.grad for x in inputs)]
