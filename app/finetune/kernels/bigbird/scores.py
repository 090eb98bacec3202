"""What full and sparse blocks share: attention weights, pieces of work that fit the cache, the tensors of a backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from finetune.kernels.scratch import scratch

HIDDEN = -10000.0  # added to the score of a key that is not to be seen: transformers' value, exp(HIDDEN) is 0
# Scores held at once: on a CPU what stays in a thread's cache, elsewhere as many as memory allows, since launches cost more.
SCORES_PER_THREAD = 2**20
SCORES_ELSEWHERE = 2**26


class Backward(NamedTuple):
    """What a backward pass reads and fills, all (pairs, blocks, block_size, size)."""

    q: Tensor  # scaled
    k: Tensor
    v: Tensor
    d_out: Tensor
    delta: Tensor  # (pairs, blocks, block_size, 1): sum_j P_ij dP_ij of each query, which the softmax's gradient needs
    d_q: Tensor  # filled
    d_k: Tensor  # added to
    d_v: Tensor  # added to


def chunks(pairs: int, blocks: int, scores: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cuts `pairs` x `blocks` query blocks, each with so many `scores`, into pieces: whole pairs, or blocks of one pair."""
    room = max(1, (SCORES_PER_THREAD if device.type == "cpu" else SCORES_ELSEWHERE) // scores)
    step = min(room, blocks)
    together = max(1, room // blocks)
    for pair in range(0, pairs, together):
        for block in range(0, blocks, step):
            yield slice(pair, min(pair + together, pairs)), slice(block, min(block + step, blocks))


def weights_of(scores: Tensor, bias: Tensor) -> Tensor:
    """Scores (..., keys) and what is added to them -> attention weights in fp32, until this thread's next piece. May write
    into `scores`."""
    weights = scratch("weights", scores.shape, torch.float32, scores)
    return torch.softmax(scores.float().add_(bias), dim=-1, out=weights)


def ends_of(x: Tensor) -> Tensor:
    """The first and the last block: (pairs, blocks, ...) -> (pairs, 2, ...)."""
    return torch.stack((x[:, 0], x[:, -1]), dim=1)
