"""How much of what the machine can compute goes into the model."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarking.context import Bench
from benchmarking.figures import turns
from benchmarking.report import Chart, Figures, Section, Table
from benchmarking.sections.titles import prepare

WARM_UP = 1
LEGEND = """Model FLOPs utilisation (PaLM, arXiv:2204.02311): the operations of the model's own matrix products - no padding,
nothing computed twice, a backward pass counted as two forward passes - per second of training, held against large matrix
products in the same precision. The products take turns with our training, step by step, so that both find the machine in the
same state. BigBird's operations are those of transformers' block-sparse attention."""


def measure(bench: Bench) -> Figures:
    size, source = bench.size("flops"), bench.source("long_tailed")
    settings = bench.classification(size["rows"]) | {"max_steps": 10_000, "product_size": size["product_size"]}
    found = {"classification, long-tailed texts": utilisation(bench, "classification", settings)}
    length = size["title_length"]
    titles, _ = prepare(bench, bench.source("titles"), {"train_lengths": [length], "max_steps": size["title_steps"]})
    more = {"length": length, "product_size": size["product_size"]}
    found[f"titles, {length} tokens"] = utilisation(bench, "titles", titles | more)
    for name, figures in found.items():
        bench.say(f"flops {name:<36} {figures['utilisation']:.1%} of the peak")
    model = "" if bench.options.model is None else bench.options.model_name
    return {"data": source.name, "model": model, "tasks": found, "size": size["product_size"]}


def utilisation(bench: Bench, task: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Operations per second of our training and of the products, which go on for as many turns."""
    ours, products = bench.run_together(f"flops-{task}", "machine-products", settings)
    mine, peak = (per_second(run, bench.per_turn) for run in (ours, products))
    return {"ours": mine, "peak": peak, "utilisation": mine / peak}


def per_second(run: dict[str, Any], per_turn: int) -> float:
    """All steps but those of the first turn."""
    seconds = turns(run["step_seconds"], per_turn)[WARM_UP:]
    units = turns(run["units"][: len(run["step_seconds"])], per_turn)[WARM_UP:]
    return sum(units) / sum(seconds) if seconds else statistics.mean(run["units"]) / statistics.mean(run["step_seconds"])


def describe(f: Figures) -> str:
    return f"Products of {f['size']} x {f['size']} matrices"


def tables(f: Figures) -> list[Table]:
    rows = [
        (name, f"{t['ours'] / 1e9:.1f}", f"{t['peak'] / 1e9:.1f}", f"{t['utilisation']:.1%}") for name, t in f["tasks"].items()
    ]
    chart = Chart("% of the machine's products", {"": {name: 100 * t["utilisation"] for name, t in f["tasks"].items()}})
    return [Table("Utilisation", ("", "model GFLOP/s", "products GFLOP/s", "utilisation"), rows, chart=chart)]


SECTION = Section("flops", "Model FLOPs utilisation", LEGEND, measure, describe, tables)
