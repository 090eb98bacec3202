"""The memory that block-sparse attention takes, rehearsed on tensors without values (`finetune.memory`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bigbird.plan import shortest_sparse
from bigbird.scores import SCORES_ELSEWHERE, SCORES_PER_CORE


class Rehearsal(torch.autograd.Function):
    """The copies that `attention.BlockSparse` makes for rows of full width, without content."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, block_size: int, number: int) -> Tensor:
        context = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, context)
        blocks, heads = query.shape[1] // block_size, len(query) * query.shape[2]
        seen = 5 + number if blocks >= shortest_sparse(number) else blocks
        room = SCORES_PER_CORE * torch.get_num_threads() if query.device.type == "cpu" else SCORES_ELSEWHERE
        ctx.scores = min(max(room, block_size**2 * seen), heads * blocks * block_size**2 * seen)
        copies = [torch.empty_like(query) for _ in range(4)]
        scores = [query.new_empty(ctx.scores, dtype=torch.float32) for _ in range(2)]
        del copies, scores
        return context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = ctx.saved_tensors  # under checkpointing they may be asked for once only
        query = saved[0]
        gradients = [torch.empty_like(x) for x in saved[:3]]
        copies = [torch.empty_like(query) for _ in range(6)]
        sums = [torch.empty_like(query, dtype=torch.float32) for _ in range(2)]
        scores = [query.new_empty(ctx.scores, dtype=torch.float32) for _ in range(3)]
        del copies, sums, scores
        return (*gradients, None, None)
