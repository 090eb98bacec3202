"""Titles: training."""

import math
from typing import Any

from benchmarking.contest import EVERYWHERE, Stages, accumulating, caption, contest, micro_batches
from benchmarking.context import Bench
from benchmarking.report import BOTH, Goal, Report, Section, table

FASTER = "training, titles of {} tokens: times Seq2SeqTrainer"
GOAL_LENGTHS = (1536, 4096)
LEGEND = """All documents have the same length, so there is no padding. `ours` is `app/titlegen.py` itself
with its own attention, `trainer` is Seq2SeqTrainer with transformers' block-sparse attention. Both have the
same model, weights and rows per step. Memory is the peak during training above the memory before the first
step. Quality was not judged: the weights are random."""


def measure(bench: Bench) -> Report:
    size, searched, measured, goals = bench.size("titles_training"), [], [], {}
    lengths = sorted(bench.options.lengths or size["lengths"])
    # About the same number of tokens at every length; powers of two, for equal micro-batches.
    tokens = bench.size("titles")["tokens_per_step"]
    batches = {length: 2 ** int(math.log2(max(1, tokens // length))) for length in lengths}
    settings, model = prepare(bench, {"max_steps": size["steps"], "train": list(batches.items())})
    for length, batch_size in batches.items():
        own = size | {"length": length, "batch_size": batch_size}
        theirs = accumulating(batch_size)
        contenders = {"ours": micro_batches(batch_size, theirs), "trainer": theirs}
        if bench.kind == "cuda":
            contenders = all_at_once(batch_size)
        found = contest(
            bench, "titles", contenders, settings | own, {"tokens": str(length), "rows": batch_size}
        )
        searched, measured = searched + found.searched, measured + found.measured
        goals[FASTER.format(length)] = found.ratios["trainer"], None
    rows = " or ".join(map(str, batches.values()))
    return {
        "data": bench.source("titles").name,
        "model": model,
        "about": f"Real documents, joined and cut to one length; {caption(size | {'batch_size': rows})}",
        "tables": [table("Training", measured), table("Settings tried", searched)],
        "goals": goals,
    }


def all_at_once(batch_size: int) -> dict[str, Stages]:
    """Settings that fit a GPU together. transformers 5.17 to 5.23 cannot compute BigBird under autocast
    (scatter_ of fp32 into bf16), so its weights are in fp32 with TF32 products, or in bf16 as a whole."""
    theirs = [
        EVERYWHERE | {"accumulation": count, "weights": dtype}
        for count, dtype in ((2, "fp32"), (4, "fp32"), (1, "bf16"), (2, "bf16"))
    ]
    ours = [{"per_device_train_batch_size": batch_size // count} for count in (1, 2)]
    return {"ours": [ours], "trainer": [theirs]}


def prepare(bench: Bench, more: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Writes the inputs. Returns (settings, description of the model)."""
    size, inputs = bench.size("titles"), {"inputs": str(bench.folder / "inputs")}
    settings = size | inputs | {"train_file": bench.source("titles").path} | more
    bench.run([("titles.inputs", {})], settings)
    encoder = "BigBird encoder ({layers} layers, {hidden} wide, blocks of {block_size})".format(**size)
    return settings, f"{encoder} with a BERT decoder ({size['decoder_layers']} layers), random weights"


GOALS = tuple(Goal(FASTER.format(length), BOTH, 2) for length in GOAL_LENGTHS)
TRAINING = Section("titles_training", "Training, titles", LEGEND, measure, GOALS)
