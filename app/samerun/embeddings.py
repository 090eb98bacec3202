"""Trains the embeddings of the tokens that occur, alone.

XLM-RoBERTa has embeddings for 250,002 tokens, two thirds of its weights. The rows of a training have a few
thousand of them. The others have no gradient, so AdamW changes them by weight decay alone. Here they are no
parameters: no gradients, no moments, no exchange between processes. They stay in rank 0's memory and get
their decay when weights are read, so checkpoints and exports are those of a training of all, up to rounding
(benchmarks/notes.md, "Embeddings of the tokens that occur").
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from samerun import optim_arguments
from samerun.errors import TrainingError
from samerun.task import Task

MOST = 0.75  # share of all embeddings that may occur; with more there is little to gain


class OccurringTokens(nn.Embedding):
    """An embedding of token ids. `weight`, (tokens that occur, size), has one row for each of `used`."""

    used: Tensor  # ids, ascending
    places: Tensor  # (all tokens,) the row of each id in `weight`; behind the last if it does not occur
    # (all tokens, size) before the training, on rank 0; a function, so that a copy of the module shares them
    before: Callable[[], Tensor | None]
    decay: Callable[[], float]  # by which weight decay has multiplied the others until now

    def in_words(self) -> str:
        return f"{len(self.used):,} of {len(self.places):,} tokens occur; the others need no training"

    def forward(self, input: Tensor) -> Tensor:
        places = self.places[input]
        if isinstance(places, FakeTensor) or len(self.used) not in places:
            return functional.embedding(places, self.weight, self.padding_idx)
        if self.training or self.before() is None:
            raise TrainingError("a batch has tokens of no row: its `Task.occurring_tokens` must return None")
        return functional.embedding(input, self.whole(self.weight))

    def whole(self, trained: Tensor, are_weights: bool = True) -> Tensor:
        """`trained`, of the tokens that occur, with rows for all: the weights of the others, or zeros."""
        before = self.before()
        made = before * self.decay() if are_weights else torch.zeros_like(before)
        made[self.used.cpu()] = trained
        return made

    def _take_others(self, whole: Tensor) -> None:
        """Takes the weights of the others from a checkpoint of steps that trained all, such as a GPU's."""
        before, decay = self.before(), self.decay()
        if before is not None and decay and not torch.equal(self.whole(whole[self.used]), whole):
            before.copy_(whole / decay)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        """A checkpoint has the weights of all tokens."""
        if (name := f"{prefix}weight") in state:
            self._take_others(state[name])
            state[name] = state[name][self.used]
        super()._load_from_state_dict(state, prefix, *others)


def train_occurring(model: nn.Module, task: Task, keeps_others: bool) -> OccurringTokens | None:
    """Leaves the embeddings of tokens that do not occur out of `model`, which is not prepared yet. None if
    something else changes them, too, or if they are few. `keeps_others`: on rank 0."""
    arguments, found = task.arguments, task.occurring_tokens(model)
    if found is None or arguments.optim != optim_arguments.DEFAULT or arguments.ema_decay:
        return None
    embedding, ids = found
    weight = embedding.weight
    owners = [name for name, other in model.named_parameters(remove_duplicate=False) if other is weight]
    is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    if not is_plain or embedding.sparse or embedding.scale_grad_by_freq or not weight.requires_grad:
        return None
    if len(owners) != 1 or len(ids) > MOST * len(weight):
        return None
    used = torch.from_numpy(ids)
    places = torch.full((len(weight),), len(used))
    places[used] = torch.arange(len(used))
    embedding.__class__ = OccurringTokens
    embedding.register_buffer("used", used, persistent=False)
    embedding.register_buffer("places", places, persistent=False)
    before = weight.detach() if keeps_others else None
    embedding.before, embedding.decay = lambda: before, lambda: 1.0
    embedding.weight, embedding.num_embeddings = nn.Parameter(weight.detach()[used]), len(used)
    if embedding.padding_idx is not None:
        place = int(places[embedding.padding_idx])
        embedding.padding_idx = place if place < len(used) else None  # it does not occur
    return embedding


def with_others(model: nn.Module, tensors: dict[str, Tensor], are_weights: bool = True) -> dict[str, Tensor]:
    """Tensors of rank 0 by parameter name, `whole`."""
    parts = {name: module for name, module in _found(model) if name in tensors}
    return tensors | {name: module.whole(tensors[name], are_weights) for name, module in parts.items()}


def without_others(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reverses `with_others`."""
    parts = {name: module for name, module in _found(model) if name in tensors}
    return tensors | {name: tensors[name][module.used.cpu()] for name, module in parts.items()}


def _found(model: nn.Module) -> Iterator[tuple[str, OccurringTokens]]:
    for name, module in model.named_modules():
        if isinstance(module, OccurringTokens):
            yield f"{name}.weight", module


def occurring_ids(parts: list[np.ndarray], further: list[int | None], size: int) -> np.ndarray:
    """The ids below `size` in `parts` and `further`, ascending, (tokens,) int64."""
    seen = np.zeros(size, dtype=bool)
    for ids in parts:
        seen[ids] = True
    seen[[each for each in further if each is not None and each < size]] = True
    return np.flatnonzero(seen)
