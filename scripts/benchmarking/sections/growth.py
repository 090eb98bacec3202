"""How costs grow: a step with tokens, rows and labels; the metrics of an evaluation; what comes before the training."""

from __future__ import annotations

from itertools import pairwise

from benchmarking.context import Bench
from benchmarking.ratios import exponent
from benchmarking.report import BOTH, Goal, Report, Row, Section, chart, table

GOAL, GOAL_SIZE = "all metrics of 10,000 rows x 1,000 labels", "10000 x 1000"
COSTS = {"cpu_seconds": "CPU time, ms", "seconds": "median step, ms"}
SMALL = {"hidden": 32, "layers": 1}
LEGEND = """`growth` is the power of x that the cost (on a CPU its CPU time) grows with from one point to the next; below each
table that over all points, by least squares. A step is one optimizer step of ours over rows of one length, random weights, one
thing growing at a time; on a CPU it is cut into forward passes of at most 2048 tokens, as the application does. Memory, on a
GPU, is the step's peak above what was held before it. The metrics are all that an evaluation computes from its logits. Reading
is everything before the training: reading, checking, tokenizing (`first`), and the same when the tokens are kept (`again`),
over short texts."""


def measure(bench: Bench) -> Report:
    size = bench.size("growth")
    rows = {"train_file": bench.rows("short", 2000), "rows": 2000, "held_rows": 0, "max_length": 64}
    settings, _ = bench.with_classifier(rows, SMALL)
    found = {}
    for name in ("steps", "metrics", "reading"):
        (result,) = bench.run([f"growth.{name}"], size | {"model": settings["model"]})
        found[name] = result["measured"]
    bench.say(f"growth {', '.join(f'{len(measured)} {name}' for name, measured in found.items())}")
    metrics = [
        {"rows x labels": f"{m['rows']} x {m['labels']}", "median, s": m["seconds"], "at best, s": m["at_best"]}
        for m in found["metrics"]
    ]
    values = {row["rows x labels"]: row["median, s"] for row in metrics}
    step = "a step has {batch_size} rows of {length} tokens, {labels} labels".format(**size)
    return {
        "data": "",
        "model": "BERT of {layers} layers, {hidden} wide, random weights".format(**size),
        "about": f"Where something else grows, {step}",
        "tables": [
            *(step_table(found["steps"], x, COSTS[bench.cost]) for x in dict.fromkeys(p["against"] for p in found["steps"])),
            table("All metrics of an evaluation", metrics, chart(metrics, "rows x labels", "median, s")),
            reading_table(found["reading"]),
        ],
        "goals": {GOAL: (values.get(GOAL_SIZE), None)},
    }


def step_table(points: list[dict], against: str, cost: str) -> dict:
    rows: list[Row] = [
        {
            against: point["x"],
            "median step, ms": 1000 * point["seconds"],
            "at best, ms": 1000 * point["at_best"],
            "CPU time, ms": 1000 * point["cpu_seconds"],
            "growth": None,
            "memory, MiB": point["memory_mb"],
        }
        for point in points
        if point["against"] == against
    ]
    for before, row in pairwise(rows):
        row["growth"] = exponent({each[against]: each[cost] for each in (before, row)})
    return table(f"A step against {against}", rows, chart(rows, against, cost, logarithmic=True), fitted(rows, against, cost))


def reading_table(measured: list[dict]) -> dict:
    rows: list[Row] = [
        {
            "rows": p["rows"],
            "file, MiB": p["file_mb"],
            "first, s": p["first"],
            "again, s": p["again"],
            "memory, MiB": p["memory_mb"],
        }
        for p in measured
    ]
    times = [{"rows": row["rows"], "s": row[f"{when}, s"], "when": when} for when in ("first", "again") for row in rows]
    note = " ".join(f"{when.capitalize()}: {fitted(rows, 'rows', f'{when}, s')}" for when in ("first", "again"))
    return table("Reading against rows", rows, chart(times, "rows", "s", "when", logarithmic=True), note)


def fitted(rows: list[Row], x: str, y: str) -> str:
    return f"Fitted exponent {exponent({row[x]: row[y] for row in rows}):.2f}."


SECTION = Section("growth", "How costs grow", LEGEND, measure, (Goal(GOAL, BOTH, 10, False, " s"),))
