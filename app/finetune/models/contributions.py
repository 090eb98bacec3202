"""Which words of a text a classifier's labels come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

EXPLAINED_LABELS = 5
Words = list[tuple[int, int, float]]  # the characters' start and end in the text, and what they contributed


def word_contributions(model: Any, encoded: Any, labels: Sequence[int], in_windows: bool = False) -> list[Words]:
    """What each word added to the logit of each of these labels: gradient x input, summed over the word's embeddings.

    A first-order estimate of the logit's change if the word's embedding were zero (Shrikumar et al., arXiv:1605.01713).
    `encoded`: what a tokenizer made of one text, as tensors and with offsets. Special tokens are no words. `in_windows`: the
    model takes (documents, windows, width).
    """
    offsets, numbers = encoded["offset_mapping"][0].tolist(), encoded.word_ids(0)
    device, embedded = next(model.parameters()).device, []
    hook = model.get_input_embeddings().register_forward_hook(lambda *call: _leaf(call[-1], embedded))
    try:
        with torch.enable_grad():
            inputs = {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}
            if in_windows:
                inputs = {name: tensor[:, None] for name, tensor in inputs.items()}
            logits = model(**inputs).logits[0]
    finally:
        hook.remove()
    found = []
    for label in labels:
        (gradient,) = torch.autograd.grad(logits[label], embedded[0], retain_graph=True)
        found.append(_by_word((gradient * embedded[0])[0].sum(-1).tolist(), offsets, numbers))
    return found


def words_of_likeliest(model: Any, encoded: Any, probabilities: dict[str, float], in_windows: bool) -> dict[str, Words]:
    """`word_contributions` to the likeliest labels, likeliest first. `probabilities`: of all labels, in the model's order."""
    labels = list(probabilities)
    shown = sorted(labels, key=probabilities.get, reverse=True)[:EXPLAINED_LABELS]
    return dict(
        zip(shown, word_contributions(model, encoded, [labels.index(label) for label in shown], in_windows), strict=True)
    )


def _leaf(output: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    """Embeddings that a gradient can be asked for, in the place of a layer's output."""
    seen.append(output.detach().requires_grad_())
    return seen[-1]


def _by_word(scores: list[float], offsets: list[list[int]], numbers: list[int | None]) -> Words:
    words: dict[int, tuple[int, int, float]] = {}
    for score, (start, end), number in zip(scores, offsets, numbers, strict=True):
        if number is not None:
            first, last, total = words.get(number, (start, end, 0.0))
            words[number] = min(first, start), max(last, end), total + score
    return [(start, end, round(total, 6)) for start, end, total in words.values()]
