"""Encoders of the BERT family without computation on padding.

Replaces: the padded forward pass between the embeddings and the last layer, and transformers' attention
there, by one call per row length. Active: with --padding_free on a CPU, for the models in
`enable.SUPPORTED`, in passes with known row lengths. Gain: 1.36 times for MiniLM without length grouping (22%
padding), 1.05 to 1.15 with it (5%; benchmarks/notes.md).

Between the embeddings and the last layer, a padded batch (rows, width) becomes one sequence of its real
tokens, in which attention is restricted to each row. Everything else in a layer works token by token. If the
host does not know the row lengths (`common.row_lengths`), the forward pass is padded.

Padded and padding-free passes agree up to rounding, with dropout by row too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.bert.modeling_bert import BertEncoder
from transformers.models.camembert.modeling_camembert import CamembertEncoder
from transformers.models.distilbert.modeling_distilbert import DistilBertModel
from transformers.models.distilbert.modeling_distilbert import Transformer as DistilBertEncoder
from transformers.models.electra.modeling_electra import ElectraEncoder
from transformers.models.roberta.modeling_roberta import RobertaEncoder
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaEncoder

from samerun.kernels.common import current_row_lengths
from samerun.kernels.dropout import DropoutMask, dropout_attention, is_active

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


@dataclass(eq=False)
class PaddingFreeBatch:
    """The positions of the rows in a padding-free batch. It passes through an encoder's layers in place of
    the attention mask.

    It is no tuple and not frozen: torch.compile traces into tuples, and torch 2.11 into frozen dataclasses,
    and would recompile a layer for each batch, or each number of rows.
    """

    lengths: tuple[int, ...]  # tokens of each row, on the host
    index: Tensor  # (tokens,) int64: each token's position in the flattened padded batch
    width: int  # of the padded batch


def padding_free_batch(mask: Tensor, lengths: tuple[int, ...]) -> PaddingFreeBatch:
    """Builds the positions without synchronising with the device. `mask`: (rows, width), not 0 for the first
    `lengths[i]` tokens of row i."""
    starts = pad((mask != 0).sum(dim=1).cumsum(dim=0), (1, 0))
    tokens, width = sum(lengths), mask.shape[1]
    # A row's tokens are shifted by the padding of the rows before it.
    padding = torch.arange(len(lengths), device=mask.device) * width - starts[:-1]
    shifts = torch.repeat_interleave(padding, starts.diff(), output_size=tokens)
    return PaddingFreeBatch(lengths, torch.arange(tokens, device=mask.device) + shifts, width)


def remove_padding(padded: Tensor, rows: PaddingFreeBatch) -> Tensor:
    """(rows, width, size) -> (1, tokens, size)."""
    return padded.flatten(0, 1).index_select(0, rows.index)[None]


def restore_padding(flat: Tensor, rows: PaddingFreeBatch) -> Tensor:
    """(1, tokens, size) -> (rows, width, size), 0 in the padding."""
    padded = flat.new_zeros(len(rows.lengths) * rows.width, flat.shape[-1])
    return padded.index_copy(0, rows.index, flat[0]).view(len(rows.lengths), rows.width, -1)


@torch.compiler.disable
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PaddingFreeBatch | Tensor | None,
    dropout: float = 0.0,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' AttentionInterface: query, key and value (batch, heads, tokens, size) -> (batch, tokens,
    heads, size).

    `rows`: the rows of a padding-free batch, which is one sequence; for a padded batch of unknown lengths,
    its mask (batch, tokens); None without padding.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(rows, PaddingFreeBatch):
        mask = None if rows is None else rows[:, None, None, :].expand(-1, 1, query.shape[2], -1)
        context = functional.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
        return context.transpose(1, 2), None
    tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    return _by_length(*tokens, rows, dropout, scale)[None], None


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, rows: PaddingFreeBatch, dropout: float, scale: float
) -> Tensor:
    """Query, key and value (tokens, heads, size) -> context of that shape, by one call of attention for
    consecutive rows of equal length."""
    groups = [(length, len(list(same))) for length, same in itertools.groupby(rows.lengths)]
    sizes = [length * number for length, number in groups]
    contexts, first = [], 0
    mask = DropoutMask.draw(dropout) if is_active(dropout) else None
    for (length, number), *parts in zip(groups, *(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(0, (number, length)).transpose(1, 2) for x in parts)
        if mask is None:
            context = functional.scaled_dot_product_attention(q, k, v, None, dropout, scale=scale)
        else:
            context = dropout_attention(q, k, v, None, mask.of(slice(first, first + number)), scale)
        first += number
        contexts.append(context.transpose(1, 2).flatten(0, 1))
    return torch.cat(contexts)
