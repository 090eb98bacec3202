"""One layer of BigBird-base and its attention alone, forward and backward: ours, transformers', and full attention."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Work = Callable[[], None]
WARM_UP = 2


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Wall and CPU seconds (of all threads) by length, part (attention, layer) and way; on a GPU the peak memory above what was
    held before.

    All lengths, parts and ways take turns, in an order that changes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    works = {
        (length, part, name): work
        for length in settings["lengths"]
        for part, make in (("attention", attentions), ("layer", layers))
        for name, work in make(settings, length, device).items()
    }
    taken: dict[tuple[int, str, str], list[Taken]] = {place: [] for place in works}
    for turn in range(settings["repeats"] + WARM_UP):
        for place in list(works) if turn % 2 else list(works)[::-1]:
            # As in a training, the pass before is one of the same kind: after another's, memory is in another state.
            works[place]()
            found = timed(works[place], device)
            if turn >= WARM_UP:
                taken[place].append(found)
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    for (length, part, name), each in taken.items():
        group = groups.setdefault((length, part), {"length": length, "part": part, "rows": settings["rows"], "ways": {}})
        seconds = [one.seconds for one in each]
        group["ways"][name] = {
            "seconds": statistics.median(seconds),
            "cpu_seconds": statistics.median(one.cpu_seconds for one in each),
            "at_best": min(seconds),
            "all": seconds,
            "memory_mb": each[-1].memory_mb,
        }
    return {"measured": list(groups.values())}


class Taken(NamedTuple):
    """What one repetition took. `memory_mb`: the peak of the allocator above what it held before, on a GPU."""

    seconds: float
    cpu_seconds: float
    memory_mb: float | None


def timed(work: Work, device: torch.device) -> Taken:
    cpu = time.process_time()
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return Taken(time.perf_counter() - started, time.process_time() - cpu, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    return Taken(start.elapsed_time(end) / 1000, time.process_time() - cpu, peak)


def layers(settings: dict[str, Any], length: int, device: torch.device) -> dict[str, Work]:
    """A whole layer: transformers' block-sparse one, the same with our attention, and a BERT layer with full SDPA."""
    from transformers import BertConfig, BertModel, BigBirdModel

    from finetune.kernels.row_lengths import row_lengths

    theirs = BigBirdModel(big_bird(settings, length), add_pooling_layer=False).to(device).train()
    sizes = dimensions(settings)
    full = BertModel(
        BertConfig(vocab_size=100, max_position_embeddings=length, attn_implementation="sdpa", **sizes), add_pooling_layer=False
    )
    hidden = torch.randn(settings["rows"], length, settings["hidden"], device=device)
    mask = torch.ones(settings["rows"], length, dtype=torch.long, device=device)

    def work(model: nn.Module) -> Work:
        def one() -> None:
            given = hidden.clone().requires_grad_()
            half = torch.autocast(device.type, torch.bfloat16, enabled=settings["precision"] == "bf16")
            with half, row_lengths((length,) * settings["rows"]):
                out = model(inputs_embeds=given, attention_mask=mask).last_hidden_state
            out.float().sum().backward()
            model.zero_grad()

        return one

    models = {**ours_of(theirs, device), "block_sparse": theirs, "full_sdpa": full.to(device).train()}
    return {name: work(model) for name, model in models.items()}


def ours_of(theirs: nn.Module, device: torch.device) -> dict[str, nn.Module]:
    """Copies with our attention: as the application chooses it, and on a GPU with gathered blocks too."""
    from finetune.kernels.bigbird.layers import use_bigbird_attention

    found = {}
    for name, kind in (("ours", "auto"), ("ours_blocks", "blocks"))[: 2 if device.type == "cuda" else 1]:
        found[name] = copy.deepcopy(theirs)
        use_bigbird_attention(found[name], kind)
    return found


def attentions(settings: dict[str, Any], length: int, device: torch.device) -> dict[str, Work]:
    """The attention alone: the same modules without their projections, and torch's full SDPA."""
    from transformers import BigBirdModel

    from finetune.kernels.row_lengths import row_lengths

    theirs = BigBirdModel(big_bird(settings, length), add_pooling_layer=False).to(device).train()
    for name in ("query", "key", "value"):
        setattr(theirs.encoder.layer[0].attention.self, name, nn.Identity())
    rows, heads = settings["rows"], settings["heads"]
    half = settings["precision"] == "bf16"
    hidden = torch.randn(rows, length, settings["hidden"], device=device, dtype=torch.bfloat16 if half else torch.float32)
    mask = torch.ones(rows, length, dtype=torch.long, device=device)

    def module(model: nn.Module) -> Work:
        layer, kind = model.encoder.layer[0].attention.self, hidden.dtype
        with row_lengths((length,) * rows):
            masks = model.create_masks_for_block_sparse_attn(mask, model.block_size)  # ours makes one thing of them, no tensor
        blocked, *others = (given.to(kind) if isinstance(given, torch.Tensor) else given for given in masks)

        def one() -> None:
            x = hidden.clone().requires_grad_()
            layer(x, *others, blocked, blocked)[0].float().sum().backward()

        return one

    def full() -> None:
        x = hidden.clone().requires_grad_()
        split = x.view(rows, length, heads, -1).transpose(1, 2)
        nn.functional.scaled_dot_product_attention(split, split, split).float().sum().backward()

    models = {**ours_of(theirs, device), "block_sparse": theirs}
    return {**{name: module(model) for name, model in models.items()}, "full_sdpa": full}


def dimensions(settings: dict[str, Any]) -> dict[str, Any]:
    hidden = settings["hidden"]
    return {
        "hidden_size": hidden, "num_attention_heads": settings["heads"], "intermediate_size": 4 * hidden,
        "num_hidden_layers": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def big_bird(settings: dict[str, Any], length: int) -> Any:
    from transformers import BigBirdConfig

    return BigBirdConfig(
        vocab_size=100, max_position_embeddings=length, attention_type="block_sparse", block_size=settings["block_size"],
        **dimensions(settings),
    )  # fmt: skip


CONTENDERS = {"measure": measure}
