"""The switch of all kernels: what a model, a process and a step use, by --kernels, --attention and --padding_free.

With --kernels reference none of our kernels computes, whatever --attention says:

- BigBird is transformers' own: the blocks of a document depend on how far its batch is padded, and one batch of at most 5 + 2 r
  blocks turns the model to full attention for the rest of the run (transformers issue 20031).
- Dropout masks on a CPU are torch's: another sample for the same seed.
- Batches are padded, gradients of embeddings are new tensors, masks on a GPU are made with a question to it.
"""

from __future__ import annotations

import torch
from torch import nn

from finetune.kernels.bigbird.layers import use_bigbird_attention
from finetune.kernels.dropout.attention import use_cpu_dropout
from finetune.kernels.masks import use_masks_without_sync
from finetune.kernels.padding_free.encoders import use_padding_free


def enable_kernels(model: nn.Module, *, kernels: str, attention: str, padding_free: bool) -> None:
    """Has `model` compute with our kernels (`kernels` auto) or leaves it alone (reference).

    `attention`: --attention, see `use_bigbird_attention`; `padding_free`: what `check_padding_free` decided. Parameters, state
    dict and exported configuration stay as they are. Kernels of `sdpa` attention hold for the whole process.
    """
    if kernels == "reference":
        return
    use_bigbird_attention(model, attention)
    use_cpu_dropout(model)
    if padding_free:
        use_padding_free(model)


def enable_device_kernels(device: torch.device, *, kernels: str) -> None:
    """Has this process use the kernels that belong to a device and not to a model: masks on a GPU."""
    if kernels == "auto":
        use_masks_without_sync(device)
