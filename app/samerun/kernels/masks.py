"""transformers' attention masks without synchronising with the GPU.

Replaces: `transformers.masking_utils.sdpa_mask`, which reads from the GPU whether a batch has padding, to
omit the mask if not. In each forward pass of encoder and decoder the host waits until the GPU has finished
its work. Active: on a GPU, in every model whose attention is transformers' `sdpa`. Gain: not yet measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from samerun.kernels.row_lengths import current_row_lengths


def use_masks_without_sync(device: torch.device) -> None:
    """Registers the masks for `sdpa` attention in this process, if `device` is a GPU."""
    if device.type == "cuda":
        AttentionMaskInterface.register("sdpa", mask_without_sync)


def mask_without_sync(
    *sizes: Any,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """`sdpa_mask` with the same arguments and meaning; None if the host knows that the batch has no
    padding."""
    if attention_mask is not None and allow_is_bidirectional_skip:
        lengths = current_row_lengths(*attention_mask.shape)
        if lengths is not None and min(lengths) == attention_mask.shape[1]:
            attention_mask = None
    no_padding = attention_mask is None
    options["allow_is_causal_skip"] = allow_is_causal_skip and no_padding
    options["allow_is_bidirectional_skip"] = allow_is_bidirectional_skip and no_padding
    return sdpa_mask(*sizes, attention_mask=attention_mask, **options)
