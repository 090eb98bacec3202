"""Reports of sections: tables and the pages that show them. Without torch, like all of the parent process
(see `processes`)."""

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Spread = dict[str, float]  # low, median, high
Row = dict[str, Any]  # heading -> number, text, `Spread` or None
Report = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """One part of the benchmark. `measure` takes a `context.Bench` and returns the report's "data", "model",
    "about" (the setting in words) and "tables": title -> rows. `needs`: modules that requirements.txt does
    not install -> the requirements file that does."""

    name: str
    title: str
    legend: str
    measure: Callable[[Any], Report]
    needs: dict[str, str] = field(default_factory=dict)


def spread(values: Iterable[float]) -> Spread:
    """Minimum, median and maximum."""
    values = list(values)
    return {"low": min(values), "median": statistics.median(values), "high": max(values)}


def two_digits(value: Any) -> Any:
    """A number, or each number of a spread, rounded to two significant digits."""
    if isinstance(value, dict):
        return {name: two_digits(number) for name, number in value.items()}
    return float(f"{value:.1e}")


def show(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, dict):
        if value["low"] == value["high"]:
            return show(value["median"])
        return f"{show(value['median'])} ({show(value['low'])} to {show(value['high'])})"
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def markdown(rows: list[Row]) -> list[str]:
    """A table with the first row's keys as headings."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([show(row[name]) for name in head] for row in rows)]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def save(folder: Path, kind: str, section: Section, report: Report) -> None:
    """Writes SECTION_KIND.json and SECTION_KIND.md into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{section.name}_{kind}"
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lines = [f"## {section.title}: {report['data']}", "", HEAD, "", section.legend, "", describe(report), ""]
    lines += [f"    {command_line()}", ""]
    for title, rows in report["tables"].items():
        lines += [f"### {title}", "", *markdown(rows)]
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def command_line() -> str:
    """This command, with absolute paths shortened to their names."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return shlex.join(["python", "scripts/bench.py", *words])


def describe(report: Report) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    precision = "fp32" if report["precision"] == "no" else report["precision"]
    load = report["others_cpu_share"]
    return (
        f"{report['about']}. {report['model']}, {precision}. {report['machine']}. {versions}. "
        f"commit {report['commit']}, {report['date']}; took {report['minutes']:.1f} minutes. Other processes "
        f"used {load['median']:.0%} of the CPU meanwhile (median; {load['low']:.0%} to {load['high']:.0%})."
    )


HEAD = """Every contender runs in its own process. They take turns (A B B A ...) of one step on a CPU and
several on a GPU, so that other work on the machine disturbs all alike. Each is measured with the fastest of
its settings; all that were tried are listed. Spreads are minimum and maximum over the rounds."""
