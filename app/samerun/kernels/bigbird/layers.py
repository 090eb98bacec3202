"""Puts our attention into transformers' BigBird encoders: the same parameters and results."""

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

from samerun.kernels.bigbird.attention import BlockSparse
from samerun.kernels.bigbird.dry_run import BlockSparseDryRun
from samerun.kernels.bigbird.plan import Shape
from samerun.kernels.bigbird.rows import Rows, draw_blocks, read_rows


def use_bigbird_attention(model: torch.nn.Module) -> bool:
    """Switches every block-sparse BigBird encoder in `model` to our attention and fused activation. Returns
    False if there is none.

    Parameters and state dict stay unchanged. The encoders keep their attention type after narrow batches,
    which use full attention in that batch only.
    """
    any_encoder = False
    for encoder in model.modules():
        if (
            isinstance(encoder, BigBirdModel | BigBirdPegasusEncoder)
            and encoder.attention_type == "block_sparse"
        ):
            for layer in encoder.modules():
                layer.__class__ = FAST.get(type(layer), type(layer))
            shape = _shape([layer for layer in encoder.modules() if isinstance(layer, _Fast)])
            encoder.create_masks_for_block_sparse_attn = functools.partial(_masks, shape=shape)
            encoder.set_attention_type = _keep_attention_type
            any_encoder = True
    return any_encoder


def _shape(layers: list[Any]) -> Shape:
    one, seeds = layers[0], tuple(layer.seed for layer in layers)
    return Shape(seeds, one.num_attention_heads, one.num_random_blocks, one.block_size, one.max_seqlen)


def _masks(attention_mask: Tensor, block_size: int, *, shape: Shape) -> tuple[Rows, None, None, None]:
    """Replaces transformers' four masks by `Rows`: the first one is passed to every layer unchanged."""
    return read_rows(attention_mask, shape), None, None, None


def _keep_attention_type(value: str) -> None:
    """Replaces transformers' switch to full attention, which our attention chooses row by row."""


class _Fast:
    """The forward pass of a block-sparse layer, as a mixin."""

    def forward(
        self, hidden_states: Tensor, *masks: Any, from_blocked_mask: Rows | None = None, **_: Any
    ) -> tuple:
        """(rows, width, hidden) -> (context of that shape, 0 in the padding; None in place of attention
        weights).

        transformers calls forward(hidden, band_mask, from_mask, to_mask, from_blocked_mask, to_blocked_mask).
        """
        rows = masks[3] if from_blocked_mask is None else from_blocked_mask
        shape = (*hidden_states.shape[:2], self.num_attention_heads, self.attention_head_size)
        query, key, value = (
            project(hidden_states).view(shape) for project in (self.query, self.key, self.value)
        )
        return _attend(self, query, key, value, rows).view(*shape[:2], -1), None


class FusedGELU(NewGELUActivation):
    """BigBird's activation gelu_new in one kernel. transformers' formula takes eight passes over the widest
    tensor of a layer and stores several of them for the backward pass."""

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
    """Query, key and value (rows, width, heads, size) -> context of that shape."""
    if isinstance(query, FakeTensor):
        return BlockSparseDryRun.apply(query, key, value, rows.shape)
    drawn = draw_blocks(rows, layer.seed, query.device) if layer.training else [None] * len(rows.groups)
    return BlockSparse.apply(query, key, value, rows, drawn)
