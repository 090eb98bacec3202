"""Switches kernels on, as --kernels and --padding_free request.

With --kernels reference none of our kernels is active:

- BigBird is transformers' own: a document's result depends on the padding of its batch, and one batch of at
  most 5 + 2 r blocks switches the model to full attention for the rest of the run (transformers issue 20031).
- Dropout masks on a CPU are torch's, another sample for the same seed.
- Batches are padded, and embedding gradients are reallocated.
"""

from __future__ import annotations

from torch import nn

from samerun.kernels.bigbird.layers import use_bigbird_attention
from samerun.kernels.dropout.attention import use_cpu_dropout
from samerun.kernels.padding_free.encoders import use_padding_free


def enable_kernels(model: nn.Module, *, kernels: str, padding_free: bool, on_cpu: bool) -> None:
    """Switches our kernels on in `model` if `kernels` is auto; reference changes nothing.

    Parameters, state dict and exported configuration stay unchanged. Kernels of `sdpa` attention apply to the
    whole process.
    """
    if kernels == "reference":
        return
    use_bigbird_attention(model)
    if on_cpu:
        use_cpu_dropout(model)
    if padding_free:
        use_padding_free(model)
