"""BigBird's block-sparse attention, row by row, by gathered blocks; and a fused gelu_new.

Replaces: the block-sparse attention of transformers' BigBird and BigBirdPegasus encoders, and their
activation gelu_new. Unlike transformers' own, a row's result does not depend on other rows, and a narrow
batch does not switch the encoder to full attention for the rest of the run. Active: in encoders whose
attention type is block_sparse. Gain on a CPU: at 4096 tokens the attention alone is 5.36 and a layer 2.48
times as fast as transformers', a layer at 1536 tokens 1.49 times (benchmarks/goals.md, "BigBird"). gelu_new
of 2048 x 3072 numbers, forward and backward, 3.8 times (CPU time on one thread of a busy machine). On a GPU
the same operations run, for the same results; their speed there was not measured.
"""

import functools
import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
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

from samerun.errors import InputError
from samerun.kernels.block_attention import BlockSparse, Rows, Shape, shortest_sparse
from samerun.kernels.common import current_row_lengths, on_cpu, send

KINDS = ("block_sparse", "original_full")
# For these lengths transformers draws the random blocks like the paper's code
# (`bigbird_block_sparse_attention`).
PAPER_LENGTHS = frozenset({1024, 3072, 4096})


def choose_attention(config: Any, max_length: int) -> str | None:
    """Sets `attention_type` in a BigBird encoder's configuration: full attention if rows of `max_length`
    tokens are too short for sparsity, otherwise block-sparse attention. Returns a note or None.

    `config`: of BigBird, BigBirdPegasus or an encoder-decoder model; other models stay unchanged. Raises
    `InputError` if `max_length`, rounded up to whole blocks, exceeds the position table.
    """
    encoder = _encoder(config)
    if encoder is None:
        return None
    configured, block, positions = encoder.attention_type, encoder.block_size, encoder.max_position_embeddings
    longest_full = (shortest_sparse(encoder.num_random_blocks) - 1) * block
    if max_length <= longest_full:
        encoder.attention_type = "original_full"
        return (
            f"BigBird uses full attention: block-sparse attention needs more than {longest_full} tokens "
            "(--max_length)"
        )
    needed = -(-max_length // block) * block
    if needed > positions:
        raise InputError(
            f"--max_length {max_length} needs {needed} positions in blocks of {block}, but the model has "
            f"{positions}; give at most {positions // block * block}"
        )
    encoder.attention_type = "block_sparse"
    if configured == "block_sparse":
        return None
    return f"BigBird uses block-sparse attention (the configuration says {configured})"


def padding_of(config: Any) -> int:
    """The number of tokens of which a batch's width must be a multiple."""
    encoder = _encoder(config)
    if encoder is None or encoder.attention_type != "block_sparse":
        return 1
    return encoder.block_size


@functools.lru_cache(maxsize=4096)
def random_blocks(blocks: int, shape: Shape, seed: int, device: torch.device) -> Tensor:
    """The random blocks that transformers draws in training for the inner query blocks of a row.

    Returns int64 (heads, blocks - 2, num_random_blocks) of the layer with this seed. A drawn block that the
    query sees anyway counts twice. Shorter rows use a prefix of the longest row's blocks.
    """
    plan = _draw(blocks * shape.block_size in PAPER_LENGTHS, shape, seed)
    return send(torch.tensor(plan[:, : blocks - 2]), device)


@functools.lru_cache(maxsize=256)
def _draw(paper: bool, shape: Shape, seed: int) -> np.ndarray:
    """Draws by transformers' own methods, which use numpy's global generator; its state is restored."""
    source, (heads, number, block_size, positions) = BigBirdBlockSparseAttention, shape
    layer = SimpleNamespace(
        training=True, _get_single_block_row_attention=source._get_single_block_row_attention
    )
    state = np.random.get_state()
    try:
        np.random.seed(seed)
        if paper:
            sizes = (positions, positions, block_size, block_size, number)
            plan = [source._bigbird_block_rand_mask(layer, *sizes, last_idx=1024) for _ in range(heads)]
        else:
            length = positions // block_size * block_size
            ends_and_numbers = source._get_rand_attn_plan(length, block_size, number)
            sizes = (length, length, block_size, block_size)
            plan = source._bigbird_block_rand_mask_with_head(layer, *sizes, heads, *ends_and_numbers)
    finally:
        np.random.set_state(state)
    return np.stack(plan).astype(np.int64)


def _encoder(config: Any) -> Any | None:
    """The configuration of the BigBird encoder in `config`; None if there is none."""
    encoder = getattr(config, "encoder", config)
    is_known = encoder.model_type in ("big_bird", "bigbird_pegasus") and encoder.attention_type in KINDS
    return encoder if is_known and not getattr(encoder, "is_decoder", False) else None


@torch.compiler.disable
def read_rows(attention_mask: Tensor, shape: Shape) -> Rows:
    """Groups the rows. `attention_mask`: (rows, whole blocks), not 0 for real tokens. A row ends with the
    block of its last one. Synchronises with the device if the host does not know the lengths."""
    mask = attention_mask != 0
    block_size = shape.block_size
    if isinstance(mask, FakeTensor):  # a dry run, without values to read; on a CPU pieces take little
        return Rows(mask, shape, [] if on_cpu(mask) else [(mask.shape[1] // block_size, None)])
    ends = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)
    blocks, order = ((ends + block_size - 1) // block_size).clamp(min=1).sort(stable=True)
    lengths = current_row_lengths(*mask.shape)
    numbers = (
        blocks.tolist() if lengths is None else sorted(max(1, -(-tokens // block_size)) for tokens in lengths)
    )
    counts = [(number, len(list(same))) for number, same in itertools.groupby(numbers)]
    if len(counts) == 1:
        return Rows(mask, shape, [(counts[0][0], None)])
    parts = order.split([size for _, size in counts])
    return Rows(mask, shape, [(number, part) for (number, _), part in zip(counts, parts, strict=True)])


def use_bigbird_attention(model: torch.nn.Module) -> bool:
    """Gives every block-sparse BigBird encoder our attention and activation. Returns False if there is none.

    Parameters and state dict stay unchanged. The encoders keep their attention type after narrow batches,
    which use full attention in that batch only.
    """
    encoders = [part for part in model.modules() if isinstance(part, BigBirdModel | BigBirdPegasusEncoder)]
    sparse = [encoder for encoder in encoders if encoder.attention_type == "block_sparse"]
    for encoder in sparse:
        for layer in encoder.modules():
            layer.__class__ = FAST.get(type(layer), type(layer))
        one = next(layer for layer in encoder.modules() if isinstance(layer, _Fast))
        shape = Shape(one.num_attention_heads, one.num_random_blocks, one.block_size, one.max_seqlen)
        encoder.create_masks_for_block_sparse_attn = functools.partial(_masks, shape=shape)
        # transformers switches to full attention here, which our attention chooses row by row.
        encoder.set_attention_type = bool  # does nothing, and can be pickled
    return bool(sparse)


def _masks(attention_mask: Tensor, block_size: int, *, shape: Shape) -> tuple[Rows, None, None, None]:
    """Replaces transformers' four masks by `Rows`: the first one is passed to every layer unchanged."""
    return read_rows(attention_mask, shape), None, None, None


class _Fast:
    """The forward pass of a block-sparse layer, as a mixin."""

    def forward(
        self, hidden_states: Tensor, *masks: Any, from_blocked_mask: Rows | None = None, **_: Any
    ) -> tuple:
        """(rows, width, hidden) -> (context of that shape, 0 in the padding; None for attention weights).

        transformers calls forward(hidden, band_mask, from_mask, to_mask, from_blocked_mask, to_blocked_mask).
        """
        rows = masks[3] if from_blocked_mask is None else from_blocked_mask
        shape = (*hidden_states.shape[:2], self.num_attention_heads, self.attention_head_size)
        projections = self.query, self.key, self.value
        query, key, value = (project(hidden_states).view(shape) for project in projections)
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
    shortest = shortest_sparse(rows.shape.num_random_blocks) if layer.training else math.inf
    drawn = [
        random_blocks(blocks, rows.shape, layer.seed, query.device) if blocks >= shortest else None
        for blocks, _ in rows.groups
    ]
    return BlockSparse.apply(query, key, value, rows, drawn)
