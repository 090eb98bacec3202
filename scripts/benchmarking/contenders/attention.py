"""One layer of BigBird-base and its attention alone, forward and backward: ours, transformers', and full attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BigBirdConfig, BigBirdModel

from benchmarking.contenders.timing import Work, summary, take_turns
from finetune.kernels.bigbird.layers import use_bigbird_attention
from finetune.kernels.row_lengths import row_lengths

WARM_UP = 2


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Samples by length, part (attention, layer) and way. All of them take turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    works = {
        (length, part, name): work
        for length in settings["lengths"]
        for part, kind in (("attention", Attention), ("layer", Layer))
        for name, work in works_of(settings, length, kind, device).items()
    }
    # As in a training, the pass before is one of the same kind: after another's, memory is in another state.
    samples = take_turns(works, device, settings["repeats"], WARM_UP, before=lambda work, turn: work(turn))
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    for (length, part, name), each in samples.items():
        group = groups.setdefault((length, part), {"length": length, "part": part, "rows": settings["rows"], "ways": {}})
        group["ways"][name] = summary(each) | {"all": [sample.seconds for sample in each]}
    return {"measured": list(groups.values())}


def works_of(settings: dict[str, Any], length: int, kind: type[Layer | Attention], device: torch.device) -> dict[str, Work]:
    """Ours as the application chooses it; transformers' block-sparse one; full SDPA."""
    sparse = big_bird(settings, length)
    ours = copy.deepcopy(sparse)
    use_bigbird_attention(ours, "auto")
    models = {"ours": ours, "block_sparse": sparse, "full_sdpa": kind.full(settings, length)}
    return {name: kind(settings, length, model.to(device).train(), device) for name, model in models.items()}


class Layer:
    """A forward and a backward pass of a whole layer."""

    def __init__(self, settings: dict[str, Any], length: int, model: nn.Module, device: torch.device) -> None:
        self.model, self.lengths, self.bf16 = model, (length,) * settings["rows"], settings["precision"] == "bf16"
        self.hidden = torch.randn(settings["rows"], length, settings["hidden"], device=device)
        self.mask = torch.ones(settings["rows"], length, dtype=torch.long, device=device)

    @staticmethod
    def full(settings: dict[str, Any], length: int) -> nn.Module:
        """A BERT layer of the same size."""
        return BertModel(BertConfig(**dimensions(settings, length), attn_implementation="sdpa"), add_pooling_layer=False)

    def __call__(self, _turn: int) -> None:
        given = self.hidden.clone().requires_grad_()
        with torch.autocast(given.device.type, torch.bfloat16, enabled=self.bf16), row_lengths(self.lengths):
            out = self.model(inputs_embeds=given, attention_mask=self.mask).last_hidden_state
        out.float().sum().backward()
        self.model.zero_grad()


class Attention:
    """A forward and a backward pass of the attention alone: the module without its projections."""

    def __init__(self, settings: dict[str, Any], length: int, model: nn.Module, device: torch.device) -> None:
        rows, kind = settings["rows"], torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
        self.hidden = torch.randn(rows, length, settings["hidden"], device=device, dtype=kind)
        self.layer, self.masks = model, ()
        if isinstance(model, BigBirdModel):
            self.layer = model.encoder.layer[0].attention.self
            for name in ("query", "key", "value"):
                setattr(self.layer, name, nn.Identity())
            mask = torch.ones(rows, length, dtype=torch.long, device=device)
            with row_lengths((length,) * rows):
                masks = model.create_masks_for_block_sparse_attn(mask, model.block_size)
            # Ours makes one thing of them that is no tensor.
            blocked, *others = (given.to(kind) if isinstance(given, Tensor) else given for given in masks)
            self.masks = (*others, blocked, blocked)

    @staticmethod
    def full(settings: dict[str, Any], length: int) -> nn.Module:
        return FullAttention(settings["heads"])

    def __call__(self, _turn: int) -> None:
        self.layer(self.hidden.clone().requires_grad_(), *self.masks)[0].float().sum().backward()


class FullAttention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        split = hidden.view(*hidden.shape[:2], self.heads, -1).transpose(1, 2)
        return (nn.functional.scaled_dot_product_attention(split, split, split),)


def big_bird(settings: dict[str, Any], length: int) -> BigBirdModel:
    config = BigBirdConfig(**dimensions(settings, length), attention_type="block_sparse", block_size=settings["block_size"])
    return BigBirdModel(config, add_pooling_layer=False)


def dimensions(settings: dict[str, Any], length: int) -> dict[str, Any]:
    hidden = settings["hidden"]
    return {
        "vocab_size": 100, "max_position_embeddings": length, "hidden_size": hidden, "intermediate_size": 4 * hidden,
        "num_attention_heads": settings["heads"], "num_hidden_layers": 1, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


CONTENDERS = {"measure": measure}
