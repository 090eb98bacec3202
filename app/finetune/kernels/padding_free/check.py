"""Whether a kernel for packed rows does here what it should, found out before a run relies on it."""

from __future__ import annotations

import functools
import warnings

import torch

from finetune.kernels.padding_free import kernels
from finetune.kernels.padding_free.rows import packed_rows

LENGTHS, HEADS = (65, 1, 17, 17, 130), 2
WITHIN = 0.05  # of the largest element; bf16 is within 0.01
NOISE = 0.1


@functools.cache
def works(name: str, device: torch.device, dtype: torch.dtype, size: int, noisy: bool) -> bool:
    """Whether the kernel of that name runs on `device` for heads of `size`, forward and backward, and gives what one call per
    length gives; with dropout (`noisy`), whether it gives numbers.

    Which kernels there are depends on the chip, the version of torch and how that was built; where one fails another is taken,
    with a warning.
    """
    try:
        found = _difference(name, device, dtype, size, 0.0)
        reason = None if found <= WITHIN else f"it differs by {found:.1e} of the largest element"
        if reason is None and noisy and not _difference(name, device, dtype, size, NOISE) < float("inf"):
            reason = "with dropout it gives no numbers"
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason is not None:
        warnings.warn(
            f"attention of packed rows does without its {name} kernel ({dtype}, heads of {size}): {reason}", stacklevel=2
        )
    return reason is None


def _difference(name: str, device: torch.device, dtype: torch.dtype, size: int, dropout: float) -> float:
    """The greatest difference of contexts and gradients from `by_length`'s, as a share of the largest element of each."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, sum(LENGTHS), HEADS, size, generator=generator).to(device, dtype)
    rows = packed_rows(torch.stack([torch.arange(max(LENGTHS)) < length for length in LENGTHS]).to(device), LENGTHS)
    results = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        for kernel, noise in ((kernels.by_length, 0.0), (getattr(kernels, name), dropout)):
            query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
            context = kernel(query, key, value, rows, noise, size**-0.5)
            context.backward(inputs[3])
            results.append([context.detach(), query.grad, key.grad, value.grad])
    return max(float((x - y).abs().max() / y.abs().max()) for y, x in zip(*results, strict=True))
