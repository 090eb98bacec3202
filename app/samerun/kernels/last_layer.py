"""A classifier's last layer for the first token alone.

Replaces: the last layer's forward pass in transformers' models of `LAST_LAYERS`, whose heads read the first
token's state and no other. Keys and values are of all tokens still, so logits, gradients and dropout by row
stay the same up to rounding. Active: on CPUs, in training and in prediction, with transformers' SDPA
attention; `--attn_implementation eager` turns it off. It has not run on a GPU. Gain: 5/6 of a layer's
products and nearly all of its attention; a training step of MiniLM (6 layers) is 1.11 to 1.20 times as fast
(benchmarks/notes.md, "The last layer").
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional


def use_first_token(model: Any) -> None:
    """Replaces the last layer's forward pass, if `model` is such a classifier. Parameters and state dict stay
    unchanged."""
    config, kind = model.config, type(model)
    forward = LAST_LAYERS.get(config.model_type)
    is_classifier = kind.__name__.endswith("ForSequenceClassification")
    is_theirs = kind.__module__.startswith("transformers.") and not getattr(config, "is_decoder", False)
    if forward and is_classifier and is_theirs and config._attn_implementation == "sdpa":
        body = model.base_model
        layer = getattr(body, "encoder" if hasattr(body, "encoder") else "transformer").layer[-1]
        layer.forward = partial(forward, layer)


def _bert(layer: Any, states: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    own = layer.attention.self
    context = _first_context(own, (own.query, own.key, own.value), states, attention_mask)
    return layer.feed_forward_chunk(layer.attention.output(context, states[:, :1]))


def _distilbert(layer: Any, states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    own = layer.attention
    context = _first_context(own, (own.q_lin, own.k_lin, own.v_lin), states, attention_mask)
    attended = layer.sa_layer_norm(own.out_lin(context) + states[:, :1])
    return layer.output_layer_norm(layer.ffn(attended) + attended)


def _first_context(
    attention: Any, projections: tuple[nn.Module, ...], states: Tensor, mask: Tensor | None
) -> Tensor:
    """(rows, 1, size): attention's output for the first token of `states`, (rows, tokens, size). `mask`: as
    transformers gives it to SDPA."""
    query, key, value = (
        project(part).unflatten(-1, (-1, attention.attention_head_size)).transpose(1, 2)
        for project, part in zip(projections, (states[:, :1], states, states), strict=True)
    )
    mask = None if mask is None else mask[:, :, :1]
    dropout = attention.dropout.p if attention.training else 0.0
    context = functional.scaled_dot_product_attention(query, key, value, mask, dropout)
    return context.transpose(1, 2).flatten(2)


LIKE_BERT = ("bert", "camembert", "data2vec-text", "electra", "ernie", "roberta", "xlm-roberta")
LAST_LAYERS = dict.fromkeys(LIKE_BERT, _bert) | {"distilbert": _distilbert}  # by model type
