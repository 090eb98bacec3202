"""transformers' attention masks without a look at them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def spare_the_device(device: torch.device) -> None:
    """On a GPU, from now on, transformers' `sdpa` masks are made without asking the device whether anything is padded.

    transformers asks in each forward pass, of encoder and decoder, and leaves a mask out where nothing is; the host waits for
    the answer until the GPU has done all its work. Here a mask is left out where the host knows that nothing is padded.
    """
    if device.type == "cuda":
        from transformers import AttentionMaskInterface

        AttentionMaskInterface.register("sdpa", mask_without_looking)


def mask_without_looking(
    *sizes: Any,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **named: Any,
) -> Tensor | None:
    """`transformers.masking_utils.sdpa_mask`, with the same arguments and a mask that means the same."""
    from transformers.masking_utils import sdpa_mask

    from finetune.kernels.row_lengths import known_lengths

    if attention_mask is not None and allow_is_bidirectional_skip:
        lengths = known_lengths(*attention_mask.shape)
        if lengths is not None and min(lengths) == attention_mask.shape[1]:
            attention_mask = None
    blind = attention_mask is None
    named["allow_is_causal_skip"] = allow_is_causal_skip and blind
    named["allow_is_bidirectional_skip"] = allow_is_bidirectional_skip and blind
    return sdpa_mask(*sizes, attention_mask=attention_mask, **named)
