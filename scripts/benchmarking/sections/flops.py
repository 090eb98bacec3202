"""How much of what the machine can compute goes into the model."""

from __future__ import annotations

from typing import Any

from benchmarking.context import Bench
from benchmarking.processes import Turns
from benchmarking.ratios import WARM_UP, turns
from benchmarking.report import Report, Row, Section, chart, table
from benchmarking.sections.titles import prepare

LEGEND = """Model FLOPs utilisation (PaLM, arXiv:2204.02311): the operations of the model's own matrix products - no padding,
nothing computed twice, a backward pass counted as two forward passes - per second of training, held against large matrix
products in the same precision. The products take turns with our training, step by step, so that both find the machine in the
same state. BigBird's operations are those of transformers' block-sparse attention."""


def measure(bench: Bench) -> Report:
    size = bench.size("flops")
    more, length = {"product_size": size["product_size"], "product_turns": 10_000}, size["title_length"]
    settings, model = bench.long_tailed(size["rows"])
    titles, _ = prepare(bench, {"train_lengths": [length], "max_steps": size["title_steps"]})
    rows = [
        {"": "classification, long-tailed texts", **utilisation(bench, "classification", settings | more)},
        {"": f"titles, {length} tokens", **utilisation(bench, "titles", titles | {"length": length} | more)},
    ]
    for row in rows:
        bench.say(f"flops {row['']:<36} {row['utilisation, %']:.1f}% of the peak")
    return {
        "data": bench.source("long_tailed").name,
        "model": model,
        "about": "Products of {product_size} x {product_size} matrices".format(**size),
        "tables": [table("Utilisation", rows, chart(rows, "", "utilisation, %"))],
        "goals": {},
    }


def utilisation(bench: Bench, task: str, settings: dict[str, Any]) -> Row:
    """Of our training beside the products, which go on for as many turns."""
    runs = bench.run([f"flops.{task}", "machine.products"], settings, Turns(until_first=True))
    ours, peak = (per_second(run, bench.per_turn) for run in runs)
    return {"model GFLOP/s": ours / 1e9, "products GFLOP/s": peak / 1e9, "utilisation, %": 100 * ours / peak}


def per_second(run: dict[str, Any], per_turn: int) -> float:
    """Operations of all steps but those of the first turn."""
    seconds, units = (turns(run[name], per_turn)[WARM_UP:] for name in ("step_seconds", "units"))
    return sum(units) / sum(seconds)


SECTION = Section("flops", "Model FLOPs utilisation", LEGEND, measure)
