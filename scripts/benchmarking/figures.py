"""Medians, spreads, ratios and fitted exponents. No torch: the parent's memory is where its children's begins."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

Spread = dict[str, float]  # low, median, high


def quartiles(values: list[float]) -> Spread:
    """Median and quartiles."""
    if len(values) == 1:
        return {"low": values[0], "median": values[0], "high": values[0]}
    return dict(zip(("low", "median", "high"), statistics.quantiles(values, n=4, method="inclusive"), strict=True))


def spread(values: Iterable[float]) -> Spread:
    """Median, least and most."""
    values = list(values)
    return {"low": min(values), "median": statistics.median(values), "high": max(values)}


def turns(seconds: list[float], per_turn: int) -> list[float]:
    """Seconds of each turn from those of its steps."""
    return [sum(seconds[start : start + per_turn]) for start in range(0, len(seconds), per_turn)]


def ratios(some: list[float], others: list[float]) -> list[float]:
    """some / others, turn by turn, as far as both go."""
    return [a / b for a, b in zip(some, others, strict=False)]


def exponent(points: dict[float, float]) -> float:
    """The slope of log y over log x by least squares: y grows like x to this power. `points`: x -> y, two or more."""
    xs, ys = [math.log(x) for x in points], [math.log(y) for y in points.values()]
    middle = statistics.mean(xs), statistics.mean(ys)
    above = sum((x - middle[0]) * (y - middle[1]) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - middle[0]) ** 2 for x in xs)


def compare(mine: dict[str, Any], other: dict[str, Any], warm_up: int, per_turn: int = 1) -> dict[str, Any]:
    """How many times as fast `mine` is in the same turn, and its share of the other's CPU time and memory. The two are results
    of contenders that took turns; their first `warm_up` turns do not count."""
    a, b = (turns(run["step_seconds"], per_turn)[warm_up:] for run in (mine, other))
    cpu = (turns(run["step_cpu_seconds"], per_turn)[warm_up:] for run in (mine, other))
    compared: dict[str, Any] = {
        "speed": quartiles(ratios(b, a)),
        "at_best": min(b) / min(a),
        "cpu_time": statistics.median(ratios(*cpu)),
    }
    for name in ("memory", "peak_memory"):
        held = other[f"{name}_mb"]
        compared[name] = mine[f"{name}_mb"] / held if held else None
    return compared
