"""An exponential moving average of the trained weights (--ema_decay), evaluated and exported in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from finetune.checkpoints import saving
from finetune.errors import StopRequested
from finetune.launching import deepspeed_state, fsdp_state
from finetune.launching.processes import Run


class WeightAverage:
    """After update t, average = d average + (1 - d) weights, in fp32, with d = min(decay, (1 + t) / (10 + t)); it starts as the
    weights.

    The ramp is that of TensorFlow's `ExponentialMovingAverage`: a run of a few hundred updates would else keep much of the
    initial weights. Each process has the average of the weights that it updates: of all of them under DDP, of its own shards
    under ZeRO and FSDP. Buffers, such as batch norm's statistics, are not averaged: the model's own serve both.
    """

    def __init__(self, run: Run, model: torch.nn.Module, decay: float) -> None:
        """`model`: prepared, and not yet computed with."""
        self.run, self.model, self.decay = run, model, decay
        # FSDP registers other parameters while weights are gathered.
        named = run.unwrapped(model).named_parameters()
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.parts = [part.clone() for part in self._weights()]

    def _weights(self) -> list[torch.Tensor]:
        """The fp32 weights that this process updates."""
        if self.run.deepspeed_config is not None:
            return deepspeed_state.local_weights(self.model)
        return [fsdp_state.to_local(parameter) for parameter in self._parameters.values()]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Takes in the weights of update number `updates`, counted from 1."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(self.parts, self._weights(), 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the model's weights and the average, bit for bit. All processes must call it."""
        if self.run.fsdp is not None:
            fsdp_state.reshard(self.model)  # an evaluation leaves gathered weights, which would be computed with
        for average, weight in zip(self.parts, self._weights(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        if self.run.deepspeed_config is not None:
            deepspeed_state.copy_to_module(self.model)

    def state(self, in_shards: bool) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it: `in_shards`, this process's parts by number; else the whole average by parameter name,
        on rank 0 alone. On the CPU. All processes must call it."""
        if in_shards:
            return {str(number): part.to("cpu", copy=True) for number, part in enumerate(self.parts)}
        with averaged(self):
            weights = saving.full_weights(self.run, self.model)
        return {name: weights[name] for name in self._parameters if name in weights}

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor], in_shards: bool) -> None:
        """Takes what `state` gave, from any launch unless it is in shards. All processes must call it."""
        if in_shards:
            for number, part in enumerate(self.parts):
                part.copy_(state[str(number)])
        elif self.run.deepspeed_config is not None:  # its functions for full tensors write to the model
            self.swap()
            deepspeed_state.restore_weights(self.model, state)
            self.swap()
        else:
            for part, (name, parameter) in zip(self.parts, self._parameters.items(), strict=True):
                part.copy_(fsdp_state.to_local(fsdp_state.distribute_like(state[name], parameter)))


@contextmanager
def averaged(average: WeightAverage | None) -> Iterator[None]:
    """The model has the averaged weights inside, if there are any. All processes must enter and leave it."""
    if average is None:
        yield
        return
    average.swap()
    try:
        yield
    except StopRequested:  # which all processes raise; where one fails alone, the others would not answer
        average.swap()
        raise
    average.swap()
