"""Noise of dropout, drawn by all cores.

torch (2.13) draws dropout's noise on a CPU element by element on one core, in a quarter of the time of a BERT's training step.
Here numpy's SFC64, seeded from torch's generator and the number of the piece, draws 64 bits at a time, 16 of which decide about
an element. The share of what is dropped is a multiple of 2**-16, and what is left is scaled by that very share, so that the
expectation is the input. The noise is another sample than torch's; the same seed gives the same sample, on any number of cores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from finetune.kernels.threads import in_threads

LEVELS = 2**16
PIECE = 2**20  # elements that have a stream of their own; the noise depends on it


class Noise(NamedTuple):
    """Which elements of one tensor are dropped."""

    seed: int
    hidden: int  # levels of 2**16 that drop an element

    @classmethod
    def of(cls, p: float) -> Noise:
        """Of probability `p`, 0 < p < 1; seeded by torch's generator, which goes on by one number."""
        seed = torch.randint(2**63 - 1, ())
        # In a rehearsal of the memory (finetune.memory_estimate) numbers have no values.
        return cls(0 if isinstance(seed, FakeTensor) else int(seed), min(round(p * LEVELS), LEVELS - 1))

    @property
    def scale(self) -> float:
        """What elements that are left are multiplied by."""
        return LEVELS / (LEVELS - self.hidden)

    def fill(self, kept: Tensor) -> None:
        """Makes `kept` (uint8, contiguous) 1, or 0 where an element is dropped."""
        pieces = kept.view(-1).split(PIECE)
        if not isinstance(kept, FakeTensor):
            in_threads(lambda number: self._fill(number, pieces[number]), range(len(pieces)))

    def _fill(self, number: int, kept: Tensor) -> None:
        levels = np.random.SFC64([self.seed, number]).random_raw(-(-len(kept) // 4)).view(np.int16)[: len(kept)]
        # numpy compares 5 to 20 times as fast as torch.
        np.greater_equal(levels, self.hidden - LEVELS // 2, out=kept.numpy().view(np.bool_))
