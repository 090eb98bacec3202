"""Encoders of the BERT family without computation on padding: the same modules, parameters and results.

Between the embeddings and the last layer, a padded batch (rows, width) becomes one sequence of its real
tokens, in which attention is restricted to each row. Everything else in a layer works token by token. If the
host does not know the row lengths (`samerun.kernels.row_lengths`), the forward pass is padded.

Without dropout, padded and padding-free passes agree up to rounding; with dropout they draw different masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.bert.modeling_bert import BertEncoder
from transformers.models.camembert.modeling_camembert import CamembertEncoder
from transformers.models.distilbert.modeling_distilbert import DistilBertModel
from transformers.models.distilbert.modeling_distilbert import Transformer as DistilBertEncoder
from transformers.models.electra.modeling_electra import ElectraEncoder
from transformers.models.roberta.modeling_roberta import RobertaEncoder
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaEncoder

from samerun.kernels.padding_free.attention import (
    PaddingFreeBatch,
    attend,
    padding_free_batch,
    remove_padding,
    restore_padding,
)
from samerun.kernels.row_lengths import current_row_lengths

NAME = "padding_free"  # of our attention in transformers' AttentionInterface; never exported
ENCODERS = (
    BertEncoder,
    RobertaEncoder,
    XLMRobertaEncoder,
    CamembertEncoder,
    ElectraEncoder,
    DistilBertEncoder,
)


def use_padding_free(model: nn.Module) -> bool:
    """Makes every encoder of the BERT family in `model` compute without padding, but no decoder. Returns
    False if there is none."""
    any_encoder = False
    for owner in model.modules():
        layers = getattr(owner, "transformer" if isinstance(owner, DistilBertModel) else "encoder", None)
        if not isinstance(layers, ENCODERS) or getattr(owner.config, "is_decoder", False):
            continue
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, _mask)
        for module in (
            owner,
            *layers.modules(),
        ):  # in an EncoderDecoderModel their configurations are different objects
            if hasattr(module, "config"):
                module.config._attn_implementation = NAME
        if _enter not in layers._forward_pre_hooks.values():
            layers.register_forward_pre_hook(_enter, with_kwargs=True)
            layers.register_forward_hook(_leave, with_kwargs=True)
        any_encoder = True
    return any_encoder


def _mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """Passes the padding mask (rows, width) on, in place of transformers' mask for every pair of tokens."""
    return attention_mask


@torch.compiler.disable
def _enter(layers: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    hidden = inputs[0] if inputs else named["hidden_states"]
    lengths = current_row_lengths(*hidden.shape[:2])
    mask = named.get("attention_mask")
    if mask is None or lengths is None:
        return None
    if min(lengths) == hidden.shape[1]:
        return inputs, {**named, "attention_mask": None}
    rows = padding_free_batch(mask, lengths)
    flat = remove_padding(hidden, rows)
    named = {**named, "attention_mask": rows}
    return ((flat, *inputs[1:]), named) if inputs else (inputs, {**named, "hidden_states": flat})


@torch.compiler.disable
def _leave(layers: nn.Module, inputs: tuple, named: dict[str, Any], output: Any) -> Any:
    rows = named["attention_mask"]
    if isinstance(rows, PaddingFreeBatch):
        output.last_hidden_state = restore_padding(output.last_hidden_state, rows)
    return output
