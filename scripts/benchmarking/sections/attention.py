"""BigBird's attention and one whole layer of it."""

from __future__ import annotations

from typing import Any

from benchmarking.context import Bench
from benchmarking.figures import exponent, quartiles, ratios
from benchmarking.report import Chart, Figures, Goal, Section, Table

OTHERS = {"block_sparse": "transformers' block_sparse", "full_sdpa": "full attention (SDPA)"}
LEGEND = """Forward and backward passes of one layer, dimensions of BigBird-base, all ways in one process and in turns,
each turn a pass that is not counted and one that is. `block_sparse` is transformers' own, `full_sdpa` full attention by
torch's scaled_dot_product_attention, in the layer that of a BERT layer of the same size. The attention alone is the module
without its projections. The exponent says how the cost grows with the length."""


def measure(bench: Bench) -> Figures:
    size = bench.size("attention")
    settings = size | {"lengths": bench.options.lengths or size["lengths"]}
    (found,) = bench.run("attention", ["measure"], settings)
    about = f"1 layer, {size['hidden']} wide, {size['heads']} heads, blocks of {size['block_size']}"
    groups = [group | {"against": against(group["ways"])} for group in found["measured"]]
    for group in groups:
        said = ", ".join(f"{name} {ratio['speed']['median']:.2f}" for name, ratio in group["against"].items())
        bench.say(f"attention {group['length']:>5} {group['part']:<10} times as fast as {said}")
    cost = "cpu_seconds" if bench.kind == "cpu" else "seconds"
    powers = exponents(groups, cost)
    return {"data": "", "model": about, "rows": size["rows"], "groups": groups, "cost": cost, "exponents": powers}


def against(ways: dict[str, Any]) -> dict[str, Any]:
    ours = ways["ours"]
    return {
        name: {
            "speed": quartiles(ratios(way["all"], ours["all"])),
            "cpu_time": ours["cpu_seconds"] / way["cpu_seconds"],
            "memory": ours["memory_mb"] / way["memory_mb"] if way["memory_mb"] else None,
        }
        for name, way in ways.items()
        if name != "ours"
    }


def exponents(groups: list[dict[str, Any]], cost: str) -> dict[str, dict[str, float]]:
    """Part -> way -> the power of the length that its `cost` grows with."""
    found: dict[str, dict[str, dict[float, float]]] = {}
    for group in groups:
        for name, way in group["ways"].items():
            found.setdefault(group["part"], {}).setdefault(name, {})[group["length"]] = way[cost]
    return {part: {name: exponent(points) for name, points in ways.items() if len(points) > 1} for part, ways in found.items()}


def describe(f: Figures) -> str:
    return f"{f['rows']} sequence(s) a pass"


def tables(f: Figures) -> list[Table]:
    found = []
    for part, title in (("attention", "The attention alone"), ("layer", "A whole layer")):
        rows, series, ratio_series = [], {}, {}
        for group in f["groups"]:
            if group["part"] != part:
                continue
            for name, way in group["ways"].items():
                series.setdefault(name, {})[group["length"]] = 1000 * way["seconds"]
                ratio = group["against"].get(name)
                speed = ratio["speed"] if ratio else None
                memory = "" if way["memory_mb"] is None else f"{way['memory_mb']:.0f} MiB"
                shown = ("", "", "")
                if ratio:
                    quarters = f"{speed['low']:.2f}, {speed['high']:.2f}"
                    shown = (f"{speed['median']:.2f} x", quarters, f"{ratio['cpu_time']:.2f} x")
                rows.append(
                    (
                        group["length"],
                        name,
                        f"{1000 * way['seconds']:.1f} ms",
                        f"{1000 * way['at_best']:.1f} ms",
                        *shown,
                        memory,
                    )
                )
            for name, ratio in group["against"].items():
                ratio_series.setdefault(name, {})[group["length"]] = ratio["speed"]["median"]
        grown = ", ".join(f"{name} {power:.2f}" for name, power in f["exponents"].get(part, {}).items())
        head = ("length", "", "median", "at best", "ours is faster by", "quartiles", "CPU time", "memory")
        what = "CPU seconds" if f["cost"] == "cpu_seconds" else "Seconds"
        note = f"{what} grow with the length to the power of: {grown}." if grown else ""
        found.append(Table(title, head, rows, note, Chart("ms", series, "tokens of a sequence")))
    return found


def ratio(figures: Figures, part: str, length: int, other: str, what: str = "speed") -> float | None:
    for group in figures["groups"]:
        if (group["part"], group["length"]) == (part, length):
            found = group["against"][other][what]
            return found["median"] if isinstance(found, dict) else found
    return None


def against_full(figures: Figures) -> float | None:
    found = [g["against"]["full_sdpa"]["speed"]["median"] for g in figures["groups"] if g["length"] >= 2048]
    return min(found) if found else None


def goal(part: str, words: str, length: int, kinds: tuple[str, ...], bound: float) -> Goal:
    name = f"BigBird, {words} at {length}: times transformers' block_sparse"
    return Goal(name, kinds, bound, lambda f: ratio(f, part, length, "block_sparse"))


SECTION = Section(
    "attention",
    "BigBird attention",
    LEGEND,
    measure,
    describe,
    tables,
    (
        goal("attention", "the attention alone", 4096, ("cpu",), 2.5),
        goal("layer", "a whole layer", 4096, ("cpu",), 1.5),
        goal("layer", "a whole layer", 1536, ("cpu",), 1.15),
        goal("layer", "a whole layer", 4096, ("cuda",), 4),
        Goal(
            "BigBird, a whole layer at 4096: share of block_sparse's peak memory",
            ("cuda",),
            0.5,
            lambda f: ratio(f, "layer", 4096, "block_sparse", "memory"),
            least=False,
        ),
        Goal("BigBird, attention and layer from 2048 on: times full SDPA, at worst", ("cpu", "cuda"), 1, against_full),
    ),
)
