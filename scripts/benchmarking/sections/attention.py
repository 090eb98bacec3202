"""BigBird's attention, alone and in a whole layer."""

import statistics
from typing import Any

from benchmarking.context import Bench
from benchmarking.ratios import quartiles, ratios
from benchmarking.report import BOTH, CPU, GPU, Goal, Report, Row, Section, table

LEGEND = """Forward and backward passes of one layer with the dimensions of BigBird-base. All variants take
turns in one process; each turn is a warm-up pass and a measured one. `block_sparse` is transformers'
implementation. `full_sdpa` is full attention by torch's scaled_dot_product_attention, for a whole layer in
a BERT layer of the same size. "The attention alone" is the module without its projections."""
PARTS = {"attention": "The attention alone", "layer": "A whole layer"}
BLOCK_SPARSE = "BigBird, {} at {}: times transformers' block_sparse"
MEMORY = "BigBird, a whole layer at 4096: share of block_sparse's peak memory"
FULL = "BigBird, attention and layer from 2048 on: times full SDPA, at worst"


def measure(bench: Bench) -> Report:
    size = bench.size("attention")
    (result,) = bench.run(
        [("attention.measure", {})], size | {"lengths": bench.options.lengths or size["lengths"]}
    )
    tables, goals, against_full = [], {}, []
    for part, title in PARTS.items():
        groups = [group for group in result["measured"] if group["part"] == part]
        rows = [row for group in groups for row in group_rows(group)]
        tables.append(table(title, rows, "length", "median, ms"))
        for row in rows:
            if row[""] == "block_sparse":
                goals[BLOCK_SPARSE.format(title.lower(), row["length"])] = row["speed"]["median"], None
                if (part, row["length"]) == ("layer", 4096):
                    goals[MEMORY] = row["share of the memory"], None
            if row[""] == "full_sdpa" and row["length"] >= 2048:
                against_full.append(row["speed"]["median"])
    goals[FULL] = min(against_full, default=None), None
    model = "1 layer, {hidden} wide, {heads} heads, blocks of {block_size}".format(**size)
    return {
        "data": "",
        "model": model,
        "about": f"{size['rows']} sequence(s) per pass",
        "tables": tables,
        "goals": goals,
    }


def group_rows(group: dict[str, Any]) -> list[Row]:
    ours, rows = group["variants"]["ours"], []
    for name, other in group["variants"].items():
        median, best, memory = (
            statistics.median(other["seconds"]),
            min(other["seconds"]),
            other["memory_mb"][-1],
        )
        rows.append({
            "length": group["length"], "": name, "median, ms": 1000 * median, "at best, ms": 1000 * best,
            "memory, MiB": memory,
            "speed": None if other is ours else quartiles(ratios(other["seconds"], ours["seconds"])),
            "CPU time": None if other is ours else statistics.median(ratios(ours["cpu_seconds"],
                other["cpu_seconds"])),
            "share of the memory": None if other is ours or not memory else ours["memory_mb"][-1] / memory,
        })  # fmt: skip
    return rows


GOALS = (
    Goal(BLOCK_SPARSE.format("the attention alone", 4096), CPU, 2.5),
    Goal(BLOCK_SPARSE.format("a whole layer", 4096), CPU, 1.5),
    Goal(BLOCK_SPARSE.format("a whole layer", 1536), CPU, 1.15),
    Goal(BLOCK_SPARSE.format("a whole layer", 4096), GPU, 4),
    Goal(MEMORY, GPU, 0.5, is_minimum=False),
    Goal(FULL, BOTH, 1),
)
SECTION = Section("attention", "BigBird attention", LEGEND, measure, GOALS)
