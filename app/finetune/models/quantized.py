"""Frozen linear layers in 4 or 8 bits, by bitsandbytes: QLoRA (Dettmers et al., arXiv:2305.14314) and LLM.int8() (Dettmers et
al., arXiv:2208.07339).

A layer holds fp32 weights until it is moved to its device, where they are rounded. A state dict leaves them out: like those of
every frozen layer they come from the base model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bitsandbytes
import torch
from torch import nn


class Linear4bit(bitsandbytes.nn.Linear4bit):
    """NF4 in blocks of 64 weights; the scales of the blocks take 8 bits, in blocks of 256."""

    bytes_per_element = 1 / 2 + 1 / 64 + 4 / (64 * 256)

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, quant_type="nf4", device="meta")
        self.weight = bitsandbytes.nn.Params4bit(layer.weight.data, quant_type="nf4", module=self)
        self.bias = layer.bias
        self.support_avx512bf16_for_cpu = False  # an evaluation would repack the weights, and compute in bf16

    def values(self) -> torch.Tensor:
        """(outputs, inputs) float32: the weights that it computes with."""
        return bitsandbytes.functional.dequantize_4bit(self.weight.data, self.weight.quant_state).float()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        _save_bias(self, destination, prefix, keep_vars)


class Linear8bit(bitsandbytes.nn.Linear8bitLt):
    """int8 with a scale for each row. Inputs are rounded to int8, too, but for columns with values above 6."""

    bytes_per_element = 1.0

    def __init__(self, layer: nn.Linear) -> None:
        size = layer.in_features, layer.out_features, layer.bias is not None
        super().__init__(*size, has_fp16_weights=False, threshold=6.0, device="meta")
        self.weight = bitsandbytes.nn.Int8Params(layer.weight.data, requires_grad=False)
        self.bias = layer.bias

    def values(self) -> torch.Tensor:
        """(outputs, inputs) float32: the weights that it computes with."""
        scales = self.state.SCB if self.weight.SCB is None else self.weight.SCB  # the first pass moves them
        return bitsandbytes.functional.int8_vectorwise_dequant(self.weight.data, scales).float()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        _save_bias(self, destination, prefix, keep_vars)


KINDS = {4: Linear4bit, 8: Linear8bit}


def quantize(model: nn.Module, bits: int, whole: list[str]) -> None:
    """Replaces a model's linear layers, in place, but those in `whole` and those that share their weights with embeddings."""
    for name, layer in list(_layers(model, whole)):
        model.set_submodule(name, KINDS[bits](layer))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8  # peft looks for them


def round_weights(model: nn.Module, bits: int, whole: list[str]) -> None:
    """Gives the layers that `quantize` would replace, in place, the weights that they would compute with, in fp32."""
    for _, layer in _layers(model, whole):
        layer.weight.data = KINDS[bits](layer).to("cpu").values()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The fp32 weights of a model's quantized layers by name, on the CPU."""
    kinds = tuple(KINDS.values())
    return {f"{name}.weight": m.values().cpu() for name, m in model.named_modules() if isinstance(m, kinds)}


def _layers(model: nn.Module, whole: list[str]) -> Iterator[tuple[str, nn.Linear]]:
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and name not in whole and id(layer.weight) not in embedded:
            yield name, layer


def _save_bias(layer: nn.Linear, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    if layer.bias is not None:
        destination[f"{prefix}bias"] = layer.bias if keep_vars else layer.bias.detach()
