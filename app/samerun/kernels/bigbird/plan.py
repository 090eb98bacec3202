"""Decisions about BigBird without torch: the attention type of a run, the padding of batches, and random
blocks."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from samerun.errors import InputError

KINDS = ("block_sparse", "original_full")
# For these lengths transformers draws the random blocks like the paper's code
# (`bigbird_block_sparse_attention`).
PAPER_LENGTHS = frozenset({1024, 3072, 4096})


class Shape(NamedTuple):
    """The settings of an encoder that determine its layers' random blocks, together with the lengths of
    rows."""

    seeds: tuple[int, ...]  # of the layers
    heads: int
    num_random_blocks: int  # per inner block
    block_size: int
    positions: int  # of the position table


def shortest_sparse(random_blocks: int) -> int:
    """The minimum number of blocks for block-sparse attention; shorter rows use full attention, as in
    transformers."""
    return 5 + 2 * random_blocks + 1


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
    shortest = shortest_sparse(encoder.num_random_blocks) * block
    if max_length <= shortest - block:
        encoder.attention_type = "original_full"
        return (
            f"BigBird uses full attention: block-sparse attention needs more than {shortest - block} "
            "tokens (--max_length)"
        )
    if _round_up(max_length, block) > positions:
        raise InputError(
            f"--max_length {max_length} needs {_round_up(max_length, block)} positions in blocks of "
            f"{block}, but the model has "
            f"{positions}; give at most {positions // block * block}"
        )
    encoder.attention_type = "block_sparse"
    if configured != encoder.attention_type:
        return f"BigBird uses block-sparse attention (the configuration says {configured})"
    return None


def padding_of(config: Any) -> int:
    """The number of tokens of which a batch's width must be a multiple."""
    encoder = _encoder(config)
    if encoder is None or encoder.attention_type != "block_sparse":
        return 1
    return encoder.block_size


def random_blocks(blocks: int, shape: Shape, seed: int) -> np.ndarray:
    """The random blocks that transformers draws in training for the inner query blocks 1 .. blocks - 2 of a
    row, for the layer with this seed.

    Returns int64 (heads, blocks - 2, num_random_blocks). A drawn block that the query sees anyway counts
    twice. Shorter rows use a prefix of the longest row's blocks. Raises `ValueError` for a row longer than
    the position table.
    """
    paper = blocks * shape.block_size in PAPER_LENGTHS
    if not paper and blocks > shape.positions // shape.block_size:
        raise ValueError(
            f"{blocks} blocks of {shape.block_size} tokens pass the {shape.positions} positions of the model"
        )
    return _draw(paper, shape, seed)[:, : blocks - 2]


@functools.lru_cache(maxsize=256)
def _draw(paper: bool, shape: Shape, seed: int) -> np.ndarray:
    """Draws by transformers' own methods, which use numpy's global generator; its state is restored."""
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention as Source

    _, heads, number, block_size, positions = shape
    layer = SimpleNamespace(
        training=True, _get_single_block_row_attention=Source._get_single_block_row_attention
    )
    state = np.random.get_state()
    try:
        np.random.seed(seed)
        if paper:
            sizes = (positions, positions, block_size, block_size, number)
            plan = [Source._bigbird_block_rand_mask(layer, *sizes, last_idx=1024) for _ in range(heads)]
        else:
            length = positions // block_size * block_size
            ends, numbers = Source._get_rand_attn_plan(length, block_size, number)
            plan = Source._bigbird_block_rand_mask_with_head(
                layer,
                length,
                length,
                block_size,
                block_size,
                heads,
                plan_from_length=ends,
                plan_num_rand_blocks=numbers,
            )
    finally:
        np.random.set_state(state)
    return np.stack(plan).astype(np.int64)


def _encoder(config: Any) -> Any | None:
    """The configuration of the BigBird encoder in `config`; None if there is none."""
    encoder = getattr(config, "encoder", config)
    known = encoder.model_type in ("big_bird", "bigbird_pegasus") and not getattr(
        encoder, "is_decoder", False
    )
    return encoder if known and encoder.attention_type in KINDS else None


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
