"""transformers' BigBird encoders with this attention: the same parameters, the same result, less work."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import gelu
from transformers.activations import NewGELUActivation
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import (
    BigBirdPegasusBlockSparseAttention,
    BigBirdPegasusEncoder,
)

from finetune.kernels.bigbird.attention import BlockSparse
from finetune.kernels.bigbird.dry_run import BlockSparseDryRun
from finetune.kernels.bigbird.flex import TILE, Plans, attend, works
from finetune.kernels.bigbird.plan import Shape
from finetune.kernels.bigbird.rows import Rows, draw_blocks, read_rows
from finetune.kernels.row_lengths import current_row_lengths

FLEX_DEVICES = ("cuda",)  # where FlexAttention has kernels both ways


def use_bigbird_attention(model: torch.nn.Module, kind: str = "auto") -> bool:
    """Makes every block-sparse BigBird encoder in `model` use this attention, and its activation in one kernel; False if there
    is none.

    `kind`: auto, FlexAttention on a GPU where it works, gathered blocks elsewhere; blocks, the latter everywhere; transformers,
    none: the model is left alone.

    Parameters and state dict stay as they are. From then on the encoders keep their kind of attention at any width (one
    that transformers would turn dense on a narrow batch attends densely in that batch alone).
    """
    found = False
    for encoder in model.modules() if kind != "transformers" else ():
        if isinstance(encoder, BigBirdModel | BigBirdPegasusEncoder) and encoder.attention_type == "block_sparse":
            for layer in encoder.modules():
                layer.__class__ = FAST.get(type(layer), type(layer))
            shape = _shape([layer for layer in encoder.modules() if isinstance(layer, _Fast)])
            encoder.create_masks_for_block_sparse_attn = functools.partial(_masks, shape=shape, use_flex=kind == "auto")
            encoder.set_attention_type = _keep_attention_type
            found = True
    return found


def _shape(layers: list[Any]) -> Shape:
    one, seeds = layers[0], tuple(layer.seed for layer in layers)
    return Shape(seeds, one.num_attention_heads, one.num_random_blocks, one.block_size, one.max_seqlen)


def _masks(attention_mask: Tensor, block_size: int, *, shape: Shape, use_flex: bool) -> tuple[Rows, None, None, None]:
    """In place of transformers' four masks: the first one reaches every layer untouched."""
    rows = read_rows(attention_mask, shape)
    lengths = current_row_lengths(*rows.mask.shape)
    if use_flex and lengths is not None and attention_mask.device.type in FLEX_DEVICES and block_size % TILE == 0:
        rows.plans = Plans(rows.mask, lengths, shape)
    return rows, None, None, None


def _keep_attention_type(value: str) -> None:
    """In place of the switch to full attention: rows too short for sparsity have it anyway."""


class _Fast:
    """The forward pass of a block-sparse layer; everything else is the class it is mixed into."""

    def forward(self, hidden_states: Tensor, *masks: Any, from_blocked_mask: Rows | None = None, **_: Any) -> tuple:
        """(rows, width, hidden) -> the same, and None in place of the weights. 0 for tokens that are not real.

        Called by transformers as forward(hidden, band_mask, from_mask, to_mask, from_blocked_mask, to_blocked_mask).
        """
        rows = masks[3] if from_blocked_mask is None else from_blocked_mask
        shape = (*hidden_states.shape[:2], self.num_attention_heads, self.attention_head_size)
        query, key, value = (project(hidden_states).view(shape) for project in (self.query, self.key, self.value))
        return _attend(self, query, key, value, rows).view(*shape[:2], -1), None


class FusedGELU(NewGELUActivation):
    """The activation of BigBird's feed-forward layers (gelu_new), the same formula in one kernel each way: written out it takes
    eight passes over the widest tensor of a layer, and keeps several of them for the backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, approximate="tanh")


class FastBigBirdAttention(_Fast, BigBirdBlockSparseAttention):
    """BigBird's layer."""


class FastBigBirdPegasusAttention(_Fast, BigBirdPegasusBlockSparseAttention):
    """BigBirdPegasus' layer."""


FAST = {
    BigBirdBlockSparseAttention: FastBigBirdAttention,
    BigBirdPegasusBlockSparseAttention: FastBigBirdPegasusAttention,
    NewGELUActivation: FusedGELU,
}


@torch.compiler.disable
def _attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    """Query, key and value (rows, width, heads, size) -> context of that shape, as `layer` attends."""
    if isinstance(query, FakeTensor):
        return BlockSparseDryRun.apply(query, key, value, rows.shape)
    if rows.plans is not None and works(query.device, query.dtype, query.shape[-1]):
        return attend(query, key, value, rows.mask, rows.plans.of(layer.seed, layer.training))
    drawn = draw_blocks(rows, layer.seed, query.device) if layer.training else [None] * len(rows.groups)
    return BlockSparse.apply(query, key, value, rows, drawn)
