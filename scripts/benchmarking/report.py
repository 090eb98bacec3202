"""Reports of sections: tables, goals and the files that show them."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarking import plots

KEPT_FROM = "\n## Reading\n"
NOT_MEASURED = "not measured"
KEY = ("section", "data", "model", "precision")  # a new report replaces the old one with the same values
DEVICES = {"cpu": "CPU", "cuda": "NVIDIA GPU"}
CPU, GPU, BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")
Row = dict[str, Any]  # heading -> number, text, spread (`ratios.Spread`) or None
Report = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """A goal for some kinds of device. A report's "goals" hold its value under this name."""

    name: str
    kinds: tuple[str, ...]
    bound: float
    is_minimum: bool = True
    unit: str = " x"

    def judge(self, report: Report | None) -> Row:
        """The goal's table row with its verdict. A value with a reason not to count fails; a quick run gets
        no verdict."""
        row = {
            "goal": self.name,
            "wanted": f"{'at least' if self.is_minimum else 'at most'} {self.bound:g}{self.unit}",
        }
        value, reason = report["goals"].get(self.name, (None, None)) if report else (None, None)
        if value is None:
            return row | {"measured": NOT_MEASURED, "": ""}
        met = value >= self.bound if self.is_minimum else value <= self.bound
        verdict = ("pass" if not reason else f"**fail**: {reason}") if met else "**fail**"
        return row | {"measured": f"{value:.3g}{self.unit}", "": "quick" if report["quick"] else verdict}


@dataclass(frozen=True)
class Section:
    """One part of the benchmark. `measure` takes a `context.Bench` and returns the report's "data", "model",
    "about" (the setting in words), "tables" and "goals": goal -> (value, reason not to count it or None).
    `needs`: modules that requirements.txt does not install -> the requirements file that does."""

    name: str
    title: str
    legend: str
    measure: Callable[[Any], Report]
    goals: tuple[Goal, ...] = ()
    needs: dict[str, str] = field(default_factory=dict)


def table(title: str, rows: list[Row], x: str | None = None, y: str = "") -> dict[str, Any]:
    """A table, and with `x` its chart: column `y` against column `x`, a line for each value of column ""."""
    if x is None:
        return {"title": title, "rows": rows}
    series: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        series.setdefault(row[""], []).append((row[x], row[y]))
    return {"title": title, "rows": rows, "chart": {"x": x, "y": y, "series": series}}


def command_line() -> str:
    """This command, with absolute paths shortened to their names."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return shlex.join(["python", "scripts/bench.py", *words])


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


def read(folder: Path, kind: str) -> list[Report]:
    path = folder / f"bench_{kind}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def save(folder: Path, kind: str, report: Report, sections: dict[str, Section]) -> None:
    """Adds a report to bench_KIND.json and rewrites the pages."""
    folder.mkdir(parents=True, exist_ok=True)
    reports = [old for old in read(folder, kind) if any(old[key] != report[key] for key in KEY)]
    order = list(sections)
    reports = sorted([*reports, report], key=lambda r: (order.index(r["section"]), r["precision"], r["data"]))
    (folder / f"bench_{kind}.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    write_page(folder, kind, sections)
    write_goals(folder, sections)


def write_page(folder: Path, kind: str, sections: dict[str, Section]) -> None:
    """Writes bench_KIND.md and its plots from all reports. Keeps the hand-written text from the heading
    KEPT_FROM on."""
    page, reports = folder / f"bench_{kind}.md", read(folder, kind)
    _, heading, kept = (page.read_text(encoding="utf-8") if page.exists() else "").partition(KEPT_FROM)
    lines = [f"# Speed and memory: {DEVICES[kind]}", "", HEAD, ""]
    for number, report in enumerate(reports):
        section = sections[report["section"]]
        earlier = sum(r["section"] == section.name for r in reports[:number])
        name = f"{section.name}_{kind}" + (f"_{earlier + 1}" if earlier else "")
        goals = [goal.judge(report) for goal in section.goals if kind in goal.kinds]
        lines += [
            *render(report, section, folder / name),
            *(["### Goals", "", *markdown(goals)] if goals else []),
        ]
    page.write_text("\n".join(lines) + heading + kept, encoding="utf-8")


def render(report: Report, section: Section, path: Path) -> list[str]:
    """The lines of a report in Markdown. Draws its plots: PATH_1.png, PATH_2.png, ..."""
    data = f": {report['data']}" if report["data"] else ""
    lines = [
        f"## {section.title}{data}",
        "",
        section.legend,
        "",
        describe(report),
        "",
        f"    {report['command']}",
        "",
    ]
    for number, table in enumerate(report["tables"], 1):
        title, plot = table["title"], path.with_name(f"{path.name}_{number}.png")
        lines += [f"### {title}", "", *markdown(table["rows"])]
        if "chart" in table:
            plots.draw(f"{section.title}: {title[0].lower()}{title[1:]}", table["chart"], plot)
            lines += [f"![{title}]({plot.name})", ""]
    return lines


def describe(report: Report) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    code = f"commit {report['commit']}, " if report["commit"] else ""
    model, load = ", ".join(filter(None, (report["model"], precision(report)))), report["others_cpu_share"]
    sentences = [report["about"], model, report["machine"], versions]
    sentences.append(f"{code}{report['date']}; took {report['minutes']:.1f} minutes")
    share = f"{load['median']:.0%} of the CPU meanwhile (median; {load['low']:.0%} to {load['high']:.0%})"
    return ". ".join(filter(None, (*sentences, f"Other processes used {share}"))) + "."


def precision(report: Report) -> str:
    return "fp32" if report["precision"] == "no" else report["precision"]


def write_goals(folder: Path, sections: dict[str, Section]) -> None:
    """Writes goals.md: every goal on every kind of device, measured or not."""
    lines = ["# Goals", "", GOALS, ""]
    for kind, device in DEVICES.items():
        reports, rows = read(folder, kind), []
        for section in sections.values():
            for report in [report for report in reports if report["section"] == section.name] or [None]:
                data = " ".join(filter(None, (report["data"], precision(report)))) if report else ""
                rows += [goal.judge(report) | {"data": data} for goal in section.goals if kind in goal.kinds]
        machines = "; ".join(sorted({report["machine"] for report in reports}))
        lines += [f"## {device}", "", machines or "No measurements yet.", "", *markdown(rows)]
    (folder / "goals.md").write_text("\n".join(lines), encoding="utf-8")


HEAD = """Written by `scripts/bench.py`. Every contender runs in its own process. They take turns (A B B A
...) of one step on a CPU and several on a GPU, so that other work on the machine disturbs all alike. Where
the settings of contenders are searched, each is measured with the fastest settings found; all that were
tried are listed. Spreads are minimum and maximum over the rounds, or quartiles over the turns where the
heading says so."""
GOALS = "The goals of `scripts/bench.py` and their measured values. Details: bench_cpu.md and bench_cuda.md."
