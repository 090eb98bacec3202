"""The optimizer of --optim: parameter groups, learning rates, size of its state; the average of the weights
(--ema_decay)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from samerun import checkpoint, deepspeed, fsdp, optim_arguments
from samerun.errors import StopRequested
from samerun.runtime import Run

OF_TORCH = {
    optim_arguments.DEFAULT: partial(torch.optim.AdamW, fused=True),
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def build_optimizer(
    arguments: Any,
    model: nn.Module,
    learning_rate: float,
    scale_of: Callable[[nn.Module, str], float],
    *,
    device_type: str = "cpu",
) -> torch.optim.Optimizer:
    """Builds the optimizer of --optim, without weight decay on biases and norms; the default is AdamW
    (Loshchilov and Hutter, arXiv:1711.05101).

    `learning_rate`: at its peak; `scale_of(model, name)`: a parameter's factor on it; `device_type`: of the
    parameters in training.
    """
    decays = _parameters_with_decay(model)
    members: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = learning_rate * scale_of(model, name)
            decay = arguments.weight_decay if name in decays else 0.0
            members.setdefault((rate, decay), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay, "lr": rate, "peak_lr": rate}
        for (rate, decay), parameters in members.items()
    ]
    optim, settings = arguments.optim, optim_arguments.settings_of(arguments) | {"lr": learning_rate}
    if "beta1" in settings:
        settings["betas"] = settings.pop("beta1"), settings.pop("beta2")
    if optim in ("sgd", "adagrad"):
        # `fused` steps a small encoder on a CPU ten times faster than torch's default. On a GPU the default
        # is fast, and the momentum of fused SGD is undefined if fp16 skips the first step. For sharded
        # parameters only AdamW can be fused.
        settings["fused"] = device_type == "cpu" and not any(map(fsdp.is_sharded, model.parameters()))
    if optim in OF_TORCH:
        return OF_TORCH[optim](groups, **settings)
    import bitsandbytes

    if optim == "lion_32bit":
        return bitsandbytes.optim.Lion(groups, **settings, optim_bits=32)
    size = optim_arguments.SMALL_8BIT
    return bitsandbytes.optim.AdamW(groups, **settings, optim_bits=8, min_8bit_size=size)


def set_learning_rate(optimizer: Any, multiplier: float) -> None:
    """Sets every group to `multiplier` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * multiplier


def state_bytes(arguments: Any, model: nn.Module) -> float:
    """Bytes of state per trained element, averaged over the model: the optimizer's and that of
    --ema_decay."""
    optim, total, elements = arguments.optim, 0, 0
    for parameter in model.parameters():
        size = parameter.numel() if parameter.requires_grad else 0
        elements += size
        if optim == "adafactor" and parameter.ndim > 1:
            total += 4 * (size // parameter.shape[-1] + size // parameter.shape[-2])
        elif optim == "adafactor":
            total += 4 * size
        elif optim == "adamw_bnb_8bit" and size >= optim_arguments.SMALL_8BIT:
            # Two 8-bit moments, and an fp32 scale per block of 256.
            total += 2 * size + 2 * 4 * -(-size // 256)
        else:
            total += 4 * size * optim_arguments.moments(optim, optim_arguments.settings_of(arguments))
    return total / max(1, elements) + (4 if arguments.ema_decay else 0)


def _parameters_with_decay(model: nn.Module) -> set[str]:
    """Names of the parameters with weight decay: matrices, except the parameters of normalisation layers and
    biases. As for transformers' Trainer, tables of biases by relative position (T5, Swin, BEiT) are among
    these."""
    names = set()
    for module_name, module in model.named_modules():
        norms = nn.LayerNorm | nn.GroupNorm | nn.modules.batchnorm._NormBase
        if isinstance(module, norms) or type(module).__name__.endswith("Norm"):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and "bias" not in f"{module_name}.{name}":
                names.add(f"{module_name}.{name}" if module_name else name)
    return names


# The average of the weights


class WeightAverage:
    """An exponential moving average of the trained weights, evaluated and exported in their place.

    After update t, average = d average + (1 - d) weights, in fp32, with d = min(decay, (1 + t) / (10 +
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
