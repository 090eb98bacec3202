"""Statistics of contenders' measurements. Without torch, like all of the parent process (see `processes`)."""

import statistics
from collections.abc import Iterable
from typing import Any

Run = dict[str, Any]  # a contender's "seconds" and "cpu_seconds" by turn, "memory_mb", "peak_memory_mb"
Spread = dict[str, float]  # low, median, high


def quartiles(values: list[float]) -> Spread:
    """Median and quartiles; minimum and maximum for fewer than four values."""
    if len(values) < 4:
        return spread(values)
    return dict(
        zip(("low", "median", "high"), statistics.quantiles(values, n=4, method="inclusive"), strict=True)
    )


def spread(values: Iterable[float]) -> Spread:
    """Minimum, median and maximum."""
    values = list(values)
    return {"low": min(values), "median": statistics.median(values), "high": max(values)}


def two_digits(value: Any) -> Any:
    """A number, or each number of a spread, rounded to two significant digits."""
    if isinstance(value, dict):
        return {name: two_digits(number) for name, number in value.items()}
    return float(f"{value:.1e}")


def ratios(some: list[float], others: list[float]) -> list[float]:
    """some / others by turn, up to the shorter list."""
    return [a / b for a, b in zip(some, others, strict=False)]


def speed_row(run: Run, count: int) -> dict[str, Any]:
    """Speed and memory of a contender that trains `count` rows in a turn."""
    return {
        "turns": len(run["seconds"]),
        "rows/s": count / statistics.median(run["seconds"]),
        "at best": count / min(run["seconds"]),
        "memory, MiB": run["memory_mb"],
        "of the process, MiB": run["peak_memory_mb"],
    }


def compare(mine: Run, other: Run) -> dict[str, Any]:
    """The speed of `mine` relative to `other` in the same turn, and its share of the other's CPU time and
    memory."""
    return {
        "speed (quartiles)": quartiles(ratios(other["seconds"], mine["seconds"])),
        "at best": min(other["seconds"]) / min(mine["seconds"]),
        "CPU time": statistics.median(ratios(mine["cpu_seconds"], other["cpu_seconds"])),
        "memory": mine["memory_mb"] / other["memory_mb"] if other["memory_mb"] else None,
        "of the process": mine["peak_memory_mb"] / other["peak_memory_mb"],
    }
