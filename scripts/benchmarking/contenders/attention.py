"""Forward and backward passes of a BigBird layer and of its attention alone: ours, transformers', full
attention."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BigBirdConfig, BigBirdModel, PreTrainedModel

from benchmarking.contenders.timing import Sample, columns, timed
from samerun.kernels.bigbird import use_bigbird_attention
from samerun.kernels.common import row_lengths

WARM_UP = 2


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Samples by length, part (attention, layer) and variant. All variants take turns, in alternating
    order."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    passes = {
        (length, part, name): make(settings, length, model.to(device).train())
        for length in settings["lengths"]
        for part, make in (("attention", attention_pass), ("layer", layer_pass))
        for name, model in models(settings, length).items()
    }
    samples: dict[tuple[int, str, str], list[Sample]] = {key: [] for key in passes}
    for turn in range(settings["repeats"] + WARM_UP):
        for key in list(passes)[:: 1 if turn % 2 else -1]:
            passes[key]()  # another variant's pass leaves memory in another state
            samples[key].append(timed(passes[key], device))
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    for (length, part, name), each in samples.items():
        group = groups.setdefault((length, part), {"length": length, "part": part, "variants": {}})
        group["variants"][name] = columns(each[WARM_UP:])
    return {"measured": list(groups.values())}


def models(settings: dict[str, Any], length: int) -> dict[str, PreTrainedModel]:
    """Models of one layer: BigBird with our attention and with transformers'
    block-sparse attention; BERT with torch's full attention."""
    hidden = settings["hidden"]
    dimensions = {
        "vocab_size": 100, "max_position_embeddings": length, "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": settings["heads"], "num_hidden_layers": 1, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    config = BigBirdConfig(**dimensions, attention_type="block_sparse", block_size=settings["block_size"])
    sparse = BigBirdModel(config, add_pooling_layer=False)
    ours = copy.deepcopy(sparse)
    use_bigbird_attention(ours)
    full = BertModel(BertConfig(**dimensions, attn_implementation="sdpa"), add_pooling_layer=False)
    return {"ours": ours, "block_sparse": sparse, "full_sdpa": full}


def layer_pass(settings: dict[str, Any], length: int, model: PreTrainedModel) -> partial:
    """A forward and a backward pass of a whole layer."""
    hidden = torch.randn(settings["rows"], length, settings["hidden"], device=model.device)
    return partial(run_layer, model, hidden, settings["precision"] == "bf16")


def run_layer(model: PreTrainedModel, hidden: Tensor, bf16: bool) -> None:
    rows, length, _ = hidden.shape
    mask = torch.ones(rows, length, dtype=torch.long, device=hidden.device)
    inputs = hidden.clone().requires_grad_()
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=bf16), row_lengths((length,) * rows):
        out = model(inputs_embeds=inputs, attention_mask=mask).last_hidden_state
    out.float().sum().backward()
    model.zero_grad()


def attention_pass(settings: dict[str, Any], length: int, model: PreTrainedModel) -> partial:
    """A forward and a backward pass of the attention module without its projections."""
    rows, dtype = settings["rows"], torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
    attention, masks = model.encoder.layer[0].attention.self, ()
    for name in ("query", "key", "value"):
        setattr(attention, name, nn.Identity())
    if isinstance(model, BigBirdModel):
        mask = torch.ones(rows, length, dtype=torch.long, device=model.device)
        with row_lengths((length,) * rows):
            block_masks = model.create_masks_for_block_sparse_attn(mask, model.block_size)
        # One of our masks is not a tensor.
        blocked, *others = (each.to(dtype) if isinstance(each, Tensor) else each for each in block_masks)
        masks = (*others, blocked, blocked)
    hidden = torch.randn(rows, length, settings["hidden"], device=model.device, dtype=dtype)
    return partial(run_attention, attention, masks, hidden)


def run_attention(attention: nn.Module, masks: tuple, hidden: Tensor) -> None:
    attention(hidden.clone().requires_grad_(), *masks)[0].float().sum().backward()


CONTENDERS = {"measure": measure}
