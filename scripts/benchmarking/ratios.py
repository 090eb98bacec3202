"""Spreads and ratios of what contenders measured. No torch: the parent's memory is where that of its children begins."""

import statistics
from collections.abc import Iterable
from typing import Any

Run = dict[str, Any]  # what a contender measured: "seconds" and "cpu_seconds" of its turns, "memory_mb", "peak_memory_mb"
Spread = dict[str, float]  # low, median, high


def quartiles(values: list[float]) -> Spread:
    """Median and quartiles; of fewer than four values the least and the most."""
    if len(values) < 4:
        return spread(values)
    return dict(zip(("low", "median", "high"), statistics.quantiles(values, n=4, method="inclusive"), strict=True))


def spread(values: Iterable[float]) -> Spread:
    """Median, least and most."""
    values = list(values)
    return {"low": min(values), "median": statistics.median(values), "high": max(values)}


def ratios(some: list[float], others: list[float]) -> list[float]:
    """some / others, turn by turn, as far as both go."""
    return [a / b for a, b in zip(some, others, strict=False)]


def joined(runs: list[Run], whole: bool = False) -> Run:
    """Several runs of one contender as one. `whole`: each is one turn."""
    turns = {
        name: [sum(run[name]) for run in runs] if whole else [second for run in runs for second in run[name]]
        for name in ("seconds", "cpu_seconds")
    }
    return turns | {name: statistics.median(run[name] for run in runs) for name in ("memory_mb", "peak_memory_mb")}


def speed_row(run: Run, count: int, what: str) -> dict[str, Any]:
    """Speed and memory of a contender that does `count` of something in a turn."""
    return {
        "turns": len(run["seconds"]),
        f"{what}/s": count / statistics.median(run["seconds"]),
        "at best": count / min(run["seconds"]),
        "memory, MiB": run["memory_mb"],
        "of the process, MiB": run["peak_memory_mb"],
    }


def compare(mine: Run, other: Run) -> dict[str, Any]:
    """How many times as fast `mine` is in the same turn, and its share of the other's CPU time and memory. The two took
    turns."""
    return {
        "speed (quartiles)": quartiles(ratios(other["seconds"], mine["seconds"])),
        "at best": min(other["seconds"]) / min(mine["seconds"]),
        "CPU time": statistics.median(ratios(mine["cpu_seconds"], other["cpu_seconds"])),
        "memory": mine["memory_mb"] / other["memory_mb"] if other["memory_mb"] else None,
        "of the process": mine["peak_memory_mb"] / other["peak_memory_mb"],
    }
