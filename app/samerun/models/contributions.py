"""Word attributions of a classifier's logits."""

from typing import Any

import torch

EXPLAINED_LABELS = 5
# Start and end in the text, in characters, and contribution of each word.
Words = list[tuple[int, int, float]]


def words_of_likeliest(
    model: Any, encoded: Any, labels: list[str], probabilities: dict[str, float], in_windows: bool
) -> dict[str, Words]:
    """Each word's contribution to the logits of the likeliest labels, likeliest first: gradient x input,
    summed over the word's embeddings.

    This estimates, to first order, how much a logit would fall if the word's embedding were zero (Shrikumar
    et al., arXiv:1605.01713). `encoded`: the tokenizer's output for one text, as tensors with offsets.
    Special tokens are left out. `labels`: of the model; `probabilities`: of some. `in_windows`: the model
    takes (documents, windows, width).
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
    contributions = {}
    for label in sorted(probabilities, key=probabilities.get, reverse=True)[:EXPLAINED_LABELS]:
        (gradient,) = torch.autograd.grad(logits[labels.index(label)], embeddings[0], retain_graph=True)
        scores = (gradient * embeddings[0])[0].sum(-1).tolist()
        contributions[label] = _by_word(scores, offsets, word_ids)
    return contributions


def _by_word(scores: list[float], offsets: list[list[int]], word_ids: list[int | None]) -> Words:
    words: dict[int, tuple[int, int, float]] = {}
    for score, (start, end), word_id in zip(scores, offsets, word_ids, strict=True):
        if word_id is not None:
            first, last, total = words.get(word_id, (start, end, 0.0))
            words[word_id] = min(first, start), max(last, end), total + score
    return [(start, end, round(total, 6)) for start, end, total in words.values()]
