"""An exponential moving average of the trained weights (--ema_decay), evaluated and exported in their
place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samerun import checkpoint, deepspeed, fsdp
from samerun.errors import StopRequested
from samerun.runtime import Run


class WeightAverage:
    """After update t, average = d average + (1 - d) weights, in fp32, with d = min(decay, (1 + t) / (10 +
    t)). The initial average is the initial weights.

    The ramp of d is that of TensorFlow's `ExponentialMovingAverage`; without it, short runs would keep much
    of the initial weights. Each process averages the weights that it updates: all of them under DDP, its
    shards under ZeRO and FSDP. Buffers, such as batch norm's statistics, are not averaged.
    """

    def __init__(self, run: Run, model: torch.nn.Module, decay: float) -> None:
        """`model`: prepared, before its first forward pass."""
        self.run, self.model, self.decay = run, model, decay
        # While FSDP has gathered weights, it registers other parameters.
        named = run.unwrapped(model).named_parameters()
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.parts = [part.clone() for part in self._weights()]

    def _weights(self) -> list[torch.Tensor]:
        """The fp32 weights that this process updates."""
        if self.run.deepspeed_config is not None:
            return deepspeed.local_weights(self.model)
        return [fsdp.to_local(parameter) for parameter in self._parameters.values()]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Updates the average after update number `updates`, counted from 1."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(self.parts, self._weights(), 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the model's weights and the average, bit for bit. All processes must call it."""
        if self.run.fsdp is not None:  # else the model keeps computing with what an evaluation gathered
            fsdp.reshard(self.model)
        for average, weight in zip(self.parts, self._weights(), strict=True):
            previous = weight.clone()
            weight.copy_(average)
            average.copy_(previous)
        if self.run.deepspeed_config is not None:
            deepspeed.copy_to_module(self.model)

    def state(self) -> dict[str, torch.Tensor]:
        """The average for a checkpoint: by parameter name, in rank 0's host memory. All processes must call
        it."""
        with averaged(self):
            weights = checkpoint.full_weights(self.run, self.model)
        return {name: weights[name] for name in self._parameters if name in weights}

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Restores the result of `state`. All processes must call it."""
        if self.run.deepspeed_config is not None:  # DeepSpeed can set full tensors in the model only
            self.swap()
            deepspeed.restore_weights(self.model, state)
            self.swap()
        else:
            for part, (name, parameter) in zip(self.parts, self._parameters.items(), strict=True):
                part.copy_(fsdp.to_local(fsdp.distribute_like(state[name], parameter)))


@contextmanager
def averaged(average: WeightAverage | None) -> Iterator[None]:
    """Swaps the averaged weights, if there are any, into the model. All processes must enter and leave it."""
    if average is None:
        yield
        return
    average.swap()
    try:
        yield
    except StopRequested:  # raised by all processes; after another error, the collective `swap` might hang
        average.swap()
        raise
    average.swap()
