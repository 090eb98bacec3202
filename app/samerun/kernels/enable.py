"""Switches kernels on, as --kernels, --attention and --padding_free request.

With --kernels reference none of our kernels is active, whatever --attention says:

- BigBird is transformers' own: a document's result depends on the padding of its batch, and one batch of at
  most 5 + 2 r blocks switches the model to full attention for the rest of the run (transformers issue 20031).
- Dropout masks on a CPU are torch's, another sample for the same seed.
- Batches are padded, embedding gradients are reallocated, and attention masks synchronise with the GPU.
"""

from __future__ import annotations

import torch
from torch import nn

from samerun.kernels.bigbird.layers import use_bigbird_attention
from samerun.kernels.dropout.attention import use_cpu_dropout
from samerun.kernels.masks import use_masks_without_sync
from samerun.kernels.padding_free.encoders import use_padding_free


def enable_kernels(model: nn.Module, *, kernels: str, attention: str, padding_free: bool) -> None:
    """Switches our kernels on in `model` if `kernels` is auto; reference changes nothing.

    `attention`: --attention, see `use_bigbird_attention`; `padding_free`: the result of `check_padding_free`.
    Parameters, state dict and exported configuration stay unchanged. Kernels of `sdpa` attention apply to the
    whole process.
    """
    if kernels == "reference":
        return
    use_bigbird_attention(model, attention)
    use_cpu_dropout(model)
    if padding_free:
        use_padding_free(model)


def enable_device_kernels(device: torch.device, *, kernels: str) -> None:
    """Switches on the kernels of a device in this process: attention masks on a GPU."""
    if kernels == "auto":
        use_masks_without_sync(device)
