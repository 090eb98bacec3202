"""transformers' attention masks without a question to the GPU.

Replaces: the test whether a batch has padding, which makes the host wait for all queued work in each forward
pass, and whose answer changes while a CUDA graph is recorded. Active: on GPUs, where the host knows the rows'
lengths. Gain: not measured by itself; a CUDA graph so has the masks of a pass that is not recorded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers import masking_utils

from samerun.kernels.common import current_row_lengths


def use_known_masks() -> None:
    """Replaces the two functions of transformers that decide whether attention needs a mask."""
    ours = {"_ignore_bidirectional_mask_sdpa": _no_mask, "_ignore_causal_mask_sdpa": _no_causal_mask}
    for name, function in ours.items():
        theirs = getattr(masking_utils, name)
        if not isinstance(theirs, partial):
            setattr(masking_utils, name, partial(function, theirs))


def _no_mask(theirs: Callable, padding_mask: Tensor | None, keys: int, window: int | None = None) -> bool:
    """Whether attention in both directions needs no mask."""
    full = True
    if padding_mask is not None:
        lengths = current_row_lengths(*padding_mask.shape)
        if lengths is None:
            return theirs(padding_mask, keys, window)
        full = min(lengths) == padding_mask.shape[1]
    return full and (window is None or keys < window)


def _no_causal_mask(
    theirs: Callable, padding_mask: Tensor | None, queries: int, keys: int, *offsets_and_window: Any
) -> bool:
    """Whether causal attention needs no mask but torch's own."""
    if padding_mask is None and queries == keys and offsets_and_window[-1] is None:
        return True
    return theirs(padding_mask, queries, keys, *offsets_and_window)
