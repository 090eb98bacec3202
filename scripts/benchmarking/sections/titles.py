"""Titles: training."""

import math

from benchmarking.contest import EVERYWHERE, Stages, accumulating, caption, contest, micro_batches
from benchmarking.context import Bench
from benchmarking.report import Report, Section

LEGEND = """All documents have the same length, so there is no padding. `ours` is `app/titlegen.py` itself
with its own attention, `trainer` is Seq2SeqTrainer with transformers' block-sparse attention. Both have the
same model, weights and rows per step. Memory is the peak during training above the memory before the first
step. Quality was not judged: the weights are random."""


def measure(bench: Bench) -> Report:
    size, searched, measured = bench.size("titles_training"), [], []
    lengths, tokens = sorted(size["lengths"]), size["tokens_per_step"]
    # About the same number of tokens at every length; powers of two, for equal micro-batches.
    batches = {length: 2 ** int(math.log2(max(1, tokens // length))) for length in lengths}
    settings = size | {"learning_rate": 5e-5, "inputs": str(bench.folder / "inputs")}
    settings["train"] = list(batches.items())
    bench.run([("titles.inputs", {})], settings | {"train_file": bench.source("titles").path})
    for length, batch_size in batches.items():
        own = settings | {"length": length, "batch_size": batch_size}
        theirs = accumulating(batch_size)
        contenders = {"ours": micro_batches(batch_size, theirs), "trainer": theirs}
        if bench.kind == "cuda":
            contenders = all_at_once(batch_size)
        label = {"tokens": str(length), "rows": batch_size}
        found = contest(bench, "titles", contenders, own, label)
        searched, measured = searched + found.searched, measured + found.measured
    rows = " or ".join(map(str, batches.values()))
    encoder = "BigBird encoder ({layers} layers, {hidden} wide, blocks of {block_size})".format(**size)
    return {
        "data": bench.source("titles").name,
        "model": f"{encoder} with a BERT decoder ({size['decoder_layers']} layers), random weights",
        "about": f"Real documents, joined and cut to one length; {caption(size | {'batch_size': rows})}",
        "tables": {"Training": measured, "Settings tried": searched},
    }


def all_at_once(batch_size: int) -> dict[str, Stages]:
    """Settings that fit a GPU together. transformers 5.17 to 5.23 cannot compute BigBird under autocast
    (scatter_ of fp32 into bf16), so its weights are in fp32 with TF32 products, or in bf16 as a whole."""
    theirs = [
        EVERYWHERE | {"accumulation": count, "weights": dtype}
        for count, dtype in ((2, "fp32"), (4, "fp32"), (1, "bf16"), (2, "bf16"))
        if batch_size % count == 0
    ]
    ours = [{"cuda_graphs": on, "per_device_train_batch_size": batch_size} for on in ("true", "false")]
    return {"ours": [ours], "trainer": [theirs]}


SECTION = Section("titles_training", "Training, titles", LEGEND, measure)
