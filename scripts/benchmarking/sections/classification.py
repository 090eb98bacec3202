"""Classifiers: training beside other tools, in speed and, after epochs of many rows, in quality."""

import statistics
from functools import partial
from typing import Any

from benchmarking.contest import EVERYWHERE, Contest, Stages, accumulating, caption, contest
from benchmarking.context import Bench
from benchmarking.report import Report, Section

OTHERS = ("trainer", "accelerate", "lightning")
TOKENS = ({}, *({"max_tokens_per_micro_batch": tokens} for tokens in (1024, 4096)))  # ours; first the default
LEARNING_RATE = 3e-4  # high enough to learn something in an epoch over a few hundred rows
EQUAL_LOSS, EQUAL_PRECISION = 0.02, 0.02  # relative, absolute
LEGEND = """`ours` is `app/classify.py` itself, from its arguments to the end of training; `trainer` is
transformers' Trainer; `accelerate` is the loop of Accelerate's examples; `lightning` is Lightning's
Trainer. The last two use transformers' LengthGroupedSampler where `grouped` is chosen. All train the same
rows equally often, as many in each update. Memory is the peak during training, above the memory before
the first step."""
QUALITY_LEGEND = f"""{LEGEND} Quality is judged after the last epoch, on held-out rows: the loss, and the
average precision over all pairs of row and label. Equal: within {EQUAL_LOSS:.0%} of the loss and
{EQUAL_PRECISION} of the precision. Where ours is worse, no speed is shown."""


def measure(bench: Bench, name: str, texts: str) -> Report:
    size, source = bench.size(name), bench.source(texts)
    settings = size | {"learning_rate": LEARNING_RATE}
    settings["train_file"] = bench.rows(texts, size["steps"] * size["batch_size"] + size["eval_rows"])
    settings, model = bench.with_classifier(settings | {"rows": size["steps"] * size["batch_size"]})
    contenders = stages(bench, size["batch_size"], bench.others(name, OTHERS))
    found = contest(bench, "classification", contenders, settings, {})
    judge(found, bool(size["eval_rows"]))
    limits = (
        f"at most {size['max_length']} tokens, learning rate {LEARNING_RATE:g}, every head's first bias at "
        "the labels' log-odds"
    )
    held_out = f"; quality on {size['eval_rows']} other rows" if size["eval_rows"] else ""
    return {
        "data": source.name,
        "model": model,
        "about": f"{caption(settings)}; {limits}{held_out}",
        "tables": {"Training": found.measured, "Settings tried": found.searched},
    }


def stages(bench: Bench, batch_size: int, others: list[str]) -> dict[str, Stages]:
    """The settings of each contender that are tried."""
    if bench.kind == "cpu":
        tokens = [{"length_grouping": True, **each} for each in TOKENS]
        theirs = accumulating(batch_size, grouped=True)
        return {"ours": [tokens, [{"length_grouping": False}]], **dict.fromkeys(others, theirs)}
    theirs = [[EVERYWHERE | {"grouped": True}], [{"accumulation": 2}]]
    ours: Stages = [[{"per_device_train_batch_size": batch_size}], [{"torch_compile": True}]]
    compiled: Stages = [theirs[0], [*theirs[1], {"compile": True}]]
    return {"ours": ours, **{name: compiled if name == "trainer" else theirs for name in others}}


def judge(found: Contest, judged: bool) -> None:
    """Adds the quality to the measured rows, and takes the speed from those where ours is worse."""
    for row in found.measured:
        runs, ours = found.runs[row[""]], found.runs["ours"]
        if judged:
            for key in ("held-out loss", "held-out precision"):
                row[key] = statistics.median(run[key] for run in runs)
        row["quality"] = "" if row[""] == "ours" else quality(ours, runs) if judged else "not judged"
        if row["quality"] == "**worse**":
            row["ours is faster by"] = "not compared"


def quality(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """Rates our quality against the other's in the same rounds: "**worse**" if either difference is."""
    pairs = list(zip(ours, theirs, strict=True))
    loss = statistics.median(a["held-out loss"] / b["held-out loss"] - 1 for a, b in pairs)
    precision = statistics.median(a["held-out precision"] - b["held-out precision"] for a, b in pairs)
    if loss > EQUAL_LOSS or precision < -EQUAL_PRECISION:
        return "**worse**"
    return "better" if loss < -EQUAL_LOSS or precision > EQUAL_PRECISION else "equal"


def section(name: str, texts: str, title: str, legend: str) -> Section:
    return Section(name, title, legend, partial(measure, name=name, texts=texts))


SHORT = section("short", "short", "Training, short texts", LEGEND)
MIXED = section("mixed", "mixed", "Training, texts of mixed length", LEGEND)
QUALITY = section("quality", "mixed", "Quality, texts of mixed length", QUALITY_LEGEND)
