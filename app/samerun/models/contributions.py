"""Word attributions of a classifier's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

EXPLAINED_LABELS = 5
# Start and end in the text, in characters, and contribution of each word.
Words = list[tuple[int, int, float]]


def word_contributions(
    model: Any, encoded: Any, labels: Sequence[int], in_windows: bool = False
) -> list[Words]:
    """Each word's contribution to the logit of each of these label ids: gradient x input, summed over the
    word's embeddings.

    This estimates, to first order, how much the logit would fall if the word's embedding were zero (Shrikumar
    et al., arXiv:1605.01713). `encoded`: the tokenizer's output for one text, as tensors with offsets.
    Special tokens are left out. `in_windows`: the model takes (documents, windows, width).
    """
    offsets, word_ids = encoded["offset_mapping"][0].tolist(), encoded.word_ids(0)
    device, embeddings = next(model.parameters()).device, []

    def keep_as_leaf(*call: Any) -> torch.Tensor:  # of the graph, so that its gradient can be computed
        embeddings.append(call[-1].detach().requires_grad_())
        return embeddings[-1]

    hook = model.get_input_embeddings().register_forward_hook(keep_as_leaf)
    try:
        with torch.enable_grad():
            inputs = {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}
            if in_windows:
                inputs = {name: tensor[:, None] for name, tensor in inputs.items()}
            logits = model(**inputs).logits[0]
    finally:
        hook.remove()
    contributions = []
    for label in labels:
        (gradient,) = torch.autograd.grad(logits[label], embeddings[0], retain_graph=True)
        contributions.append(_by_word((gradient * embeddings[0])[0].sum(-1).tolist(), offsets, word_ids))
    return contributions


def words_of_likeliest(
    model: Any, encoded: Any, labels: list[str], probabilities: dict[str, float], in_windows: bool
) -> dict[str, Words]:
    """`word_contributions` to the likeliest labels, likeliest first. `labels`: of the model; `probabilities`:
    of some."""
    likeliest = sorted(probabilities, key=probabilities.get, reverse=True)[:EXPLAINED_LABELS]
    contributions = word_contributions(
        model, encoded, [labels.index(label) for label in likeliest], in_windows
    )
    return dict(zip(likeliest, contributions, strict=True))


def _by_word(scores: list[float], offsets: list[list[int]], word_ids: list[int | None]) -> Words:
    words: dict[int, tuple[int, int, float]] = {}
    for score, (start, end), word_id in zip(scores, offsets, word_ids, strict=True):
        if word_id is not None:
            first, last, total = words.get(word_id, (start, end, 0.0))
            words[word_id] = min(first, start), max(last, end), total + score
    return [(start, end, round(total, 6)) for start, end, total in words.values()]
