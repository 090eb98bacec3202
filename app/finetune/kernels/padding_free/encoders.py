"""Encoders of the BERT family without work on padding: the same modules, parameters and results.

Between the embeddings and whatever reads the last layer (a pooler, a head, a decoder) a padded batch (rows, width) becomes one
sequence of its real tokens, in which attention keeps to each row. Everything else in a layer works token by token and need not
know. A forward pass whose lengths the host does not know (`finetune.kernels.row_lengths`) is padded as ever.

With dropout, padded and padding-free passes draw different masks of the same distribution; without they give the same to
rounding.
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

from finetune.kernels.padding_free.attention import (
    PaddingFreeBatch,
    attend,
    padding_free_batch,
    remove_padding,
    restore_padding,
)
from finetune.kernels.row_lengths import current_row_lengths

NAME = "padding_free"  # of our attention among transformers'; in no file that is exported
ENCODERS = (BertEncoder, RobertaEncoder, XLMRobertaEncoder, CamembertEncoder, ElectraEncoder, DistilBertEncoder)


def use_padding_free(model: nn.Module) -> bool:
    """Makes every encoder of the BERT family in `model` compute without padding; False if there is none. Decoders are left."""
    found = False
    for owner in model.modules():
        layers = getattr(owner, "transformer" if isinstance(owner, DistilBertModel) else "encoder", None)
        if not isinstance(layers, ENCODERS) or getattr(owner.config, "is_decoder", False):
            continue
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, _mask)
        for module in (owner, *layers.modules()):  # an EncoderDecoderModel gives its encoder, but not the layers, a copy
            if hasattr(module, "config"):
                module.config._attn_implementation = NAME
        if _enter not in layers._forward_pre_hooks.values():
            layers.register_forward_pre_hook(_enter, with_kwargs=True)
            layers.register_forward_hook(_leave, with_kwargs=True)
        found = True
    return found


def _mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """In place of transformers' mask for every pair of tokens: which tokens are real, (rows, width), without a look at it."""
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
