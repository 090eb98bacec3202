"""How costs grow: a step with tokens, rows and labels; the figures of an evaluation; what comes before the training."""

from __future__ import annotations

from typing import Any

from benchmarking.context import Bench
from benchmarking.figures import exponent
from benchmarking.report import Chart, Figures, Goal, Section, Table

UNITS = {"cpu_seconds": "ms of CPU time", "seconds": "ms"}
LEGEND = """`growth` is the power of x that the cost (on a CPU its CPU time) grows with from one point to the next; below each
table that over all points, by least squares. A step is one optimizer step of ours over rows of one length, random weights,
one thing growing at a time; on a CPU it is cut into forward passes of at most 2048 tokens, as the application does. Memory,
on a GPU, is the step's peak above what was held before it. The figures are all that an evaluation computes from its logits.
Reading is everything before the training: reading, checking, tokenizing (`first`), and the same when the tokens are kept
(`again`), over short texts."""


def measure(bench: Bench) -> Figures:
    size = bench.size("growth")
    (steps,) = bench.run("growth", ["steps"], size)
    (scores,) = bench.run("growth", ["scores"], size)
    model = bench.options.model
    if model is None:
        model = str(bench.folder / "growth_model")
        rows = {
            "train_file": bench.rows("short", 2000),
            "rows": 2000,
            "held_rows": 0,
            "max_length": 64,
            "hidden": 32,
            "layers": 1,
        }
        bench.run("classification", ["model"], rows | {"model": model})
    (reading,) = bench.run("growth", ["reading"], size | {"model": model})
    bench.say(f"growth {len(steps['measured'])} steps, {len(scores['measured'])} evaluations, {len(reading['measured'])} files")
    about = f"BERT of {size['layers']} layers, {size['hidden']} wide, random weights"
    cost = "cpu_seconds" if bench.kind == "cpu" else "seconds"
    usual = {name: size[name] for name in ("length", "batch_size", "labels")}
    return {
        "data": "", "model": about, "usual": usual, "cost": cost, "steps": steps["measured"], "scores": scores["measured"],
        "reading": reading["measured"],
    }  # fmt: skip


def describe(f: Figures) -> str:
    usual = f["usual"]
    rows = f"{usual['batch_size']} rows of {usual['length']} tokens, {usual['labels']} labels"
    return f"Where something else grows, a step has {rows}"


def tables(f: Figures) -> list[Table]:
    found = []
    for against in dict.fromkeys(point["against"] for point in f["steps"]):
        points = [point for point in f["steps"] if point["against"] == against]
        rows = [
            (
                p["x"], f"{1000 * p['seconds']:.1f} ms", f"{1000 * p['at_best']:.1f} ms", f"{1000 * p['cpu_seconds']:.1f} ms",
                growth(points, place, f["cost"]), memory(p),
            )
            for place, p in enumerate(points)
        ]  # fmt: skip
        curve = {point["x"]: 1000 * point[f["cost"]] for point in points}
        head = (against, "median step", "at best", "CPU time", "growth", "memory")
        found.append(
            Table(
                f"A step against {against}", head, rows, fitted(curve), Chart(UNITS[f["cost"]], {"ours": curve}, against, True)
            )
        )
    rows = [(s["rows"], s["labels"], f"{s['seconds']:.3f} s", f"{s['at_best']:.3f} s") for s in f["scores"]]
    bars = {f"{s['rows']} x {s['labels']}": s["seconds"] for s in f["scores"]}
    found.append(
        Table("All figures of an evaluation", ("rows", "labels", "median", "at best"), rows, chart=Chart("s", {"": bars}))
    )
    first, again = ({p["rows"]: p[name] for p in f["reading"]} for name in ("first", "again"))
    rows = [
        (p["rows"], f"{p['file_mb']:.1f} MiB", f"{p['first']:.2f} s", f"{p['again']:.2f} s", f"{p['memory_mb']:.0f} MiB")
        for p in f["reading"]
    ]
    note = f"First: {fitted(first)} Again: {fitted(again)}" if len(first) > 1 else ""
    chart = Chart("s", {"first": first, "again": again}, "rows of the file", True)
    found.append(Table("Reading against rows", ("rows", "file", "first", "again", "memory"), rows, note, chart))
    return found


def growth(points: list[dict[str, Any]], place: int, cost: str) -> str:
    if place == 0:
        return ""
    return f"{exponent({point['x']: point[cost] for point in points[place - 1 : place + 1]}):.2f}"


def fitted(curve: dict[float, float]) -> str:
    return f"Fitted exponent {exponent(curve):.2f}." if len(curve) > 1 else ""


def memory(point: dict[str, Any]) -> str:
    return "" if point["memory_mb"] is None else f"{point['memory_mb']:.0f} MiB"


def largest_evaluation(figures: Figures) -> float | None:
    return next((s["seconds"] for s in figures["scores"] if (s["rows"], s["labels"]) == (10_000, 1000)), None)


SECTION = Section(
    "growth",
    "How costs grow",
    LEGEND,
    measure,
    describe,
    tables,
    (Goal("all figures of 10,000 rows x 1,000 labels", ("cpu", "cuda"), 10, largest_evaluation, False, unit=" s"),),
)
