"""Classifiers: ours beside a bare loop, Trainer and the hand-written loop, one epoch over the same rows."""

from __future__ import annotations

import functools
import statistics
from typing import Any

from benchmarking.context import Bench
from benchmarking.processes import Turns
from benchmarking.ratios import quartiles, ratios, spread, turns
from benchmarking.report import BOTH, CPU, GPU, Goal, Report, Row, Section, chart, table

OTHERS = ("bare", "trainer_best", "trainer", "padded")
SLOW = ("trainer", "padded")  # every other round
FASTER = {
    "trainer": "Trainer's defaults", "trainer_best": "Trainer's best", "padded": "the loop that pads to max_length",
}  # fmt: skip
TEXTS = {"short": "short texts", "long_tailed": "long-tailed texts"}
LEARNING_RATE = 3e-4  # so that an epoch over a few hundred rows learns something that can be compared
EQUAL_LOSS, EQUAL_PRECISION = 0.02, 0.02  # quality that counts as equal: relative, absolute; seeds differ by as much
LEGEND = """`ours` is `app/classify.py` itself, from its arguments to the end of training. `bare` is a plain PyTorch loop over
the same batches and passes, with the task's model, its dropout and its loss. `trainer_best` is transformers' Trainer with fused
AdamW and batches of similar length, `trainer` as it comes. `padded` is the loop of many hand-written scripts: every text padded
to max_length, AdamW as it comes, the loss of every step read. Tokens are counted without padding. Memory is the peak while
training, above what the process held before its first step and (of the process) with everything. Start-up is the time from the
start of the process to its first batch. Quality is measured on rows that nobody
was trained on: the loss, and the average precision over all pairs of row and label."""


def measure(bench: Bench, kind: str) -> Report:
    source, size = bench.source(kind), bench.size(kind)
    settings = {name: size[name] for name in ("rows", "held_rows", "batch_size", "max_length")}
    settings |= {"rows": bench.options.rows or size["rows"], "learning_rate": LEARNING_RATE}
    settings["train_file"] = bench.rows(kind, settings["rows"] + settings["held_rows"])
    settings, model = bench.with_classifier(settings)
    others = bench.others(kind, OTHERS)
    results = []
    for number in range(bench.options.rounds or size["rounds"]):
        for other in others:
            if other in SLOW and number % 2:
                continue
            # The bare loop pads, which ours does not on a GPU.
            mine = "ours_padded" if (bench.kind, other) == ("cuda", "bare") else "ours"
            jobs = [f"classification.{mine}", f"classification.{other}"]
            for result in bench.run(jobs, settings | {"seed": bench.options.seed + number}, Turns()):
                results.append(result | {"round": number, "pair": other})
                speed = f"{result['row']['samples/s']:9.2f} samples/s"
                print(f"{kind} round {number + 1} {result['contender']:<13}{speed}", flush=True)
    tokens, limits = results[0]["tokens"], f"batch {settings['batch_size']}, at most {settings['max_length']} tokens"
    trained = f"{results[0]['rows']} rows drawn at random, {tokens} tokens, {limits}; learning rate {LEARNING_RATE:g}"
    rows, compared = contender_rows(results), [against(results, name, bench.per_turn) for name in others]
    return {
        "data": source.name,
        "model": model,
        "about": f"{trained}; quality on {settings['held_rows']} more rows",
        "tables": [
            table("Speed, memory, quality", rows, chart(rows, "", "samples/s")),
            table("Ours against the others", compared, chart(compared, "", "speed (least to most)")),
        ],
        "goals": goal_values({row[""]: row for row in compared}, TEXTS[kind]),
    }


def contender_rows(results: list[dict[str, Any]]) -> list[Row]:
    """Medians of each contender. At best: an epoch whose every step took the least time of all its runs; runs of one seed have
    the same batches, so their steps can be compared."""
    rows = []
    for name in dict.fromkeys(result["contender"] for result in results):
        runs = [result for result in results if result["contender"] == name]
        of_one_seed = (run["step_seconds"] for run in runs if run["round"] == runs[0]["round"])
        medians = {key: statistics.median(run["row"][key] for run in runs) for key in runs[0]["row"]}
        at_best = {"samples/s at best": runs[0]["rows"] / sum(map(min, zip(*of_one_seed, strict=True)))}
        rows.append({"": name, "runs": len(runs), **medians, **at_best})
    return rows


def against(results: list[dict[str, Any]], other: str, per_turn: int) -> Row:
    """Ours against another contender, over the runs in which the two took turns."""
    pair = [result for result in results if result["pair"] == other]
    theirs = [run for run in pair if run["contender"] == other]
    pairs = list(zip([run for run in pair if run["contender"] != other], theirs, strict=True))
    steps = [
        ratio for a, b in pairs for ratio in ratios(turns(a["step_seconds"], per_turn), turns(b["step_seconds"], per_turn))
    ]
    loss = statistics.median(a["row"]["held-out loss"] / b["row"]["held-out loss"] - 1 for a, b in pairs)
    precision = statistics.median(a["row"]["held-out precision"] - b["row"]["held-out precision"] for a, b in pairs)
    return {
        "": other,
        "rounds": len(pairs),
        "speed (least to most)": spread(sum(b["step_seconds"]) / sum(a["step_seconds"]) for a, b in pairs),
        "CPU time": statistics.median(sum(a["step_cpu_seconds"]) / sum(b["step_cpu_seconds"]) for a, b in pairs),
        "memory": statistics.median(a["memory_mb"] / max(b["memory_mb"], 1.0) for a, b in pairs),
        "time of a step on the same batches (quartiles)": quartiles(steps) if other == "bare" else None,
        "held-out loss, %": 100 * loss,
        "precision": precision,
        "quality": quality(loss, precision),
    }


def quality(loss: float, precision: float) -> str:
    """Ours' beside the other's. Worse in one way is worse."""
    if loss > EQUAL_LOSS or precision < -EQUAL_PRECISION:
        return "**worse**"
    return "better" if loss < -EQUAL_LOSS or precision > EQUAL_PRECISION else "equal"


def goal_values(compared: dict[str, Row], texts: str) -> dict[str, tuple[float, str | None]]:
    found = {}
    for other, words in FASTER.items():
        if other in compared:
            row = compared[other]
            worse = f"held-out loss {row['held-out loss, %']:+.1f}%, precision {row['precision']:+.4f}"
            reason = worse if row["quality"] == "**worse**" else None
            found[faster(texts, words)] = row["speed (least to most)"]["median"], reason
    if "bare" in compared:
        step, cpu = compared["bare"]["time of a step on the same batches (quartiles)"], compared["bare"]["CPU time"]
        found[cost(texts)] = 100 * (step["median"] - 1), None
        found[f"{cost(texts)}, in CPU time"] = 100 * (cpu - 1), None
    return found


def faster(texts: str, words: str) -> str:
    return f"classification, {texts}: times {words}, at equal quality"


def cost(texts: str) -> str:
    return f"classification, {texts}: our step costs more than the bare loop's"


def section(kind: str, *more: tuple[tuple[str, ...], str, float]) -> Section:
    """`more`: (devices, contender, how many times as fast) of further goals."""
    texts = TEXTS[kind]
    goals = (
        Goal(cost(texts), BOTH, 3, False, "%"),
        Goal(f"{cost(texts)}, in CPU time", CPU, 3, False, "%"),
        *(Goal(faster(texts, FASTER[other]), kinds, bound) for kinds, other, bound in (*ON_GPU, *more)),
    )
    return Section(kind, f"Classification of {texts}", LEGEND, functools.partial(measure, kind=kind), goals)


ON_GPU = ((GPU, "trainer_best", 1.5), (GPU, "padded", 3))
SHORT = section("short", (CPU, "trainer_best", 1))
LONG_TAILED = section("long_tailed", (CPU, "trainer", 3.5), (CPU, "trainer_best", 1.25), (CPU, "padded", 4))
