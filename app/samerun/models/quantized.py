"""Frozen 4-bit and 8-bit linear layers by bitsandbytes: QLoRA (Dettmers et al., arXiv:2305.14314) and
LLM.int8() (Dettmers et al., arXiv:2208.07339).

A layer holds fp32 weights until it is moved to its device, where they are quantized. State dicts omit them,
like all frozen weights: they come from the base model.
"""

from collections.abc import Iterator
from typing import Any

import bitsandbytes
import torch
from torch import nn


class WithoutWeight(nn.Module):
    """Leaves the weight out of state dicts."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()


class Linear4bit(WithoutWeight, bitsandbytes.nn.Linear4bit):
    """NF4 in blocks of 64 weights, with double quantization: 8-bit scales in blocks of 256."""

    bytes_per_element = 1 / 2 + 1 / 64 + 4 / (64 * 256)

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(
            layer.in_features, layer.out_features, layer.bias is not None, quant_type="nf4", device="meta"
        )
        self.weight = bitsandbytes.nn.Params4bit(layer.weight.data, quant_type="nf4", module=self)
        self.bias = layer.bias
        self.support_avx512bf16_for_cpu = False  # else an evaluation repacks the weights and computes in bf16

    def dequantized(self) -> torch.Tensor:
        """(outputs, inputs) float32 weights after quantization."""
        return bitsandbytes.functional.dequantize_4bit(self.weight.data, self.weight.quant_state).float()


class Linear8bit(WithoutWeight, bitsandbytes.nn.Linear8bitLt):
    """int8 with a scale per row. Inputs are rounded to int8, too, except columns with values above 6."""

    bytes_per_element = 1.0

    def __init__(self, layer: nn.Linear) -> None:
        size = layer.in_features, layer.out_features, layer.bias is not None
        super().__init__(*size, has_fp16_weights=False, threshold=6.0, device="meta")
        self.weight = bitsandbytes.nn.Int8Params(layer.weight.data, requires_grad=False)
        self.bias = layer.bias

    def dequantized(self) -> torch.Tensor:
        """(outputs, inputs) float32 weights after quantization."""
        # The first forward pass moves them.
        scales = self.state.SCB if self.weight.SCB is None else self.weight.SCB
        return bitsandbytes.functional.int8_vectorwise_dequant(self.weight.data, scales).float()


KINDS = {4: Linear4bit, 8: Linear8bit}


def quantize(model: nn.Module, bits: int, skip: list[str]) -> None:
    """Replaces linear layers in place, except those in `skip`, those with an embedding's weights, and those
    whose inputs the model casts to the weight's precision (`_keep_in_fp32_modules`, such as T5's `wo`)."""
    for name, layer in list(_layers(model, skip)):
        model.set_submodule(name, KINDS[bits](layer))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8  # peft reads them


def round_weights(model: nn.Module, bits: int, skip: list[str]) -> None:
    """Rounds in place the weights of the layers that `quantize` would replace; the layers stay fp32."""
    for _, layer in _layers(model, skip):
        layer.weight.data = KINDS[bits](layer).to("cpu").dequantized()


def dequantized_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The fp32 weights of a model's quantized layers by name, on the CPU."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, Linear4bit | Linear8bit)]
    return {f"{name}.weight": module.dequantized().cpu() for name, module in found}


def _layers(model: nn.Module, skip: list[str]) -> Iterator[tuple[str, nn.Linear]]:
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or [])
    for name, layer in model.named_modules():
        is_plain = type(layer) is nn.Linear and name not in skip and not kept & set(name.split("."))
        if is_plain and id(layer.weight) not in tied:
            yield name, layer
