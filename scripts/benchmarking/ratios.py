"""Spreads and ratios. No torch: the parent's memory is where that of its children begins."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

Spread = dict[str, float]  # low, median, high
WARM_UP = 1  # first turns that do not count
LEAST_TURNS = WARM_UP + 3


def quartiles(values: list[float]) -> Spread:
    """Median and quartiles."""
    if len(values) == 1:
        return spread(values)
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


def compare(mine: dict[str, Any], other: dict[str, Any], warm_up: int = WARM_UP, per_turn: int = 1) -> dict[str, Any]:
    """How many times as fast `mine` is in the same turn, and its share of the other's CPU time and memory. The two are results
    of contenders that took turns; their first `warm_up` turns do not count."""
    a, b = (turns(run["step_seconds"], per_turn)[warm_up:] for run in (mine, other))
    cpu = (turns(run["step_cpu_seconds"], per_turn)[warm_up:] for run in (mine, other))
    return {
        "speed (quartiles)": quartiles(ratios(b, a)),
        "at best": min(b) / min(a),
        "CPU time": statistics.median(ratios(*cpu)),
        "memory": mine["memory_mb"] / other["memory_mb"] if other["memory_mb"] else None,
        "of the process": mine["peak_memory_mb"] / other["peak_memory_mb"],
    }
