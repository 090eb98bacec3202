"""What a section found, as tables, goals and files."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarking import plots

KEPT_FROM = "\n## Reading\n"
NOT_MEASURED = "not measured"
KEY = ("section", "data", "model", "precision")  # a report replaces an earlier one with these alike
DEVICES = {"cpu": "CPU", "cuda": "NVIDIA GPU"}
CPU, GPU, BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")
Row = dict[str, Any]  # heading -> number, text, spread (`ratios.Spread`) or None
Report = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """Something to reach on some kinds of device. A report's "goals" have the value by this name."""

    name: str
    kinds: tuple[str, ...]
    bound: float
    least: bool = True
    unit: str = " x"

    def judge(self, report: Report | None) -> Row:
        """A row about it. A quick pass is not judged. A value with a reason why it does not count fails."""
        row = {"goal": self.name, "wanted": f"{'at least' if self.least else 'at most'} {self.bound:g}{self.unit}"}
        value, reason = report["goals"].get(self.name, (None, None)) if report else (None, None)
        if value is None:
            return row | {"found": NOT_MEASURED, "": ""}
        met = value >= self.bound if self.least else value <= self.bound
        verdict = ("pass" if not reason else f"**fail**: {reason}") if met else "**fail**"
        return row | {"found": f"{value:.3g}{self.unit}", "": "quick" if report["quick"] else verdict}


def cost_goals(name: str) -> tuple[Goal, Goal]:
    """That our step costs at most 3% more than the bare loop's: in time, and on a CPU in CPU time."""
    return Goal(name, BOTH, 3, False, "%"), Goal(f"{name}, in CPU time", CPU, 3, False, "%")


def cost_values(name: str, compared: list[Row]) -> dict[str, tuple[float, None]]:
    """For `cost_goals`, by the worst of the rows (`ratios.compare`) about the bare loop; nothing if there are none."""
    if not compared:
        return {}
    slowest, most = min(row["speed (quartiles)"]["median"] for row in compared), max(row["CPU time"] for row in compared)
    return {name: (100 * (1 / slowest - 1), None), f"{name}, in CPU time": (100 * (most - 1), None)}


@dataclass(frozen=True)
class Section:
    """One part of the benchmark. `measure` takes a `context.Bench` and returns a report's "data", "model", "about" (in words),
    "tables" and "goals": goal -> (value, reason why it does not count or None)."""

    name: str
    title: str
    legend: str
    measure: Callable[[Any], Report]
    goals: tuple[Goal, ...] = ()


def table(title: str, rows: list[Row], x: str, y: str, by: str | None = None) -> dict[str, Any]:
    """With a plot of column y against column x, a series for each value of column `by`: bars where x is text, else lines."""
    series: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        value = row[y]["median"] if isinstance(row[y], dict) else row[y]
        series.setdefault(row[by] if by is not None else "", []).append((row[x], value))
    return {"title": title, "rows": rows, "chart": {"x": x, "y": y, "series": series}}


def command_line() -> str:
    """This command, with the names alone of folders elsewhere on this machine."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return shlex.join(["python", "scripts/bench.py", *words])


def show(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, dict):
        return f"{show(value['median'])} ({show(value['low'])} to {show(value['high'])})"
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def markdown(rows: list[Row]) -> list[str]:
    """A table whose headings are those of the first row."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([show(row[name]) for name in head] for row in rows)]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def read(folder: Path, kind: str) -> list[Report]:
    path = folder / f"bench_{kind}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def save(folder: Path, kind: str, report: Report, sections: dict[str, Section]) -> None:
    """Puts a report into bench_KIND.json, and writes the pages anew."""
    folder.mkdir(parents=True, exist_ok=True)
    reports = [old for old in read(folder, kind) if any(old[key] != report[key] for key in KEY)]
    order = list(sections)
    reports = sorted([*reports, report], key=lambda r: (order.index(r["section"]), r["precision"], r["data"]))
    (folder / f"bench_{kind}.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    write_page(folder, kind, sections)
    write_goals(folder, sections)


def write_page(folder: Path, kind: str, sections: dict[str, Section]) -> None:
    """bench_KIND.md with its plots, from all reports there are. What stands in it from the heading KEPT_FROM on is a person's
    and stays."""
    page, reports = folder / f"bench_{kind}.md", read(folder, kind)
    _, found, kept = (page.read_text(encoding="utf-8") if page.exists() else "").partition(KEPT_FROM)
    lines = [f"# Speed and memory: {DEVICES[kind]}", "", HEAD, ""]
    for place, report in enumerate(reports):
        section = sections[report["section"]]
        earlier = sum(r["section"] == section.name for r in reports[:place])
        name = f"{section.name}_{kind}" + (f"_{earlier + 1}" if earlier else "")
        goals = [goal.judge(report) for goal in section.goals if kind in goal.kinds]
        lines += [*render(report, section, folder / name), *(["### Goals", "", *markdown(goals)] if goals else [])]
    page.write_text("\n".join(lines) + found + kept, encoding="utf-8")


def render(report: Report, section: Section, path: Path) -> list[str]:
    """A report as lines of Markdown; its plots PATH_1.png, PATH_2.png, ... are drawn."""
    data = f": {report['data']}" if report["data"] else ""
    lines = [f"## {section.title}{data}", "", section.legend, "", describe(report), "", f"    {report['command']}", ""]
    for number, table in enumerate(report["tables"], 1):
        title, plot = table["title"], path.with_name(f"{path.name}_{number}.png")
        lines += [f"### {title}", "", *markdown(table["rows"]), *([table["note"], ""] if table.get("note") else [])]
        if plots.draw(f"{section.title}: {title[0].lower()}{title[1:]}", table["chart"], plot):
            lines += [f"![{title}]({plot.name})", ""]
    return lines


def describe(report: Report) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    code = f"commit {report['commit']}, " if report["commit"] else ""
    model, load = ", ".join(filter(None, (report["model"], precision(report)))), report["others_cpu_share"]
    said = [report["about"], model, report["machine"], versions]
    said.append(f"{code}{report['date']}; took {report['minutes']:.1f} minutes")
    share = f"{load['median']:.0%} of the CPU meanwhile (median; {load['low']:.0%} to {load['high']:.0%})"
    return ". ".join(filter(None, (*said, f"Other processes used {share}"))) + "."


def precision(report: Report) -> str:
    return "fp32" if report["precision"] == "no" else report["precision"]


def write_goals(folder: Path, sections: dict[str, Section]) -> None:
    """goals.md: every goal on every kind of device, measured or not."""
    lines = ["# Goals", "", GOALS, ""]
    for kind, device in DEVICES.items():
        reports, found = read(folder, kind), []
        for section in sections.values():
            for report in [report for report in reports if report["section"] == section.name] or [None]:
                where = " ".join(filter(None, (report["data"], precision(report)))) if report else ""
                found += [goal.judge(report) | {"measured on": where} for goal in section.goals if kind in goal.kinds]
        machines = "; ".join(sorted({report["machine"] for report in reports}))
        lines += [f"## {device}", "", machines or f"No {device} was in reach yet: {NOT_MEASURED}.", "", *markdown(found)]
    (folder / "goals.md").write_text("\n".join(lines), encoding="utf-8")


HEAD = """Made by `scripts/bench.py`. Each contender has a process of its own. Two of them, ours and another, are in memory at
a time and take turns (A B B A ...), a step each on a CPU, some steps each on a GPU, so that other work on the machine meets
both. Ratios above 1 mean that ours is faster; CPU time and memory are ours' share of the other's. `at best` takes the least
time of each step (or the fastest step), which other work disturbs least. Spreads are least and most over the rounds, or
quartiles over the turns where that is said."""
GOALS = """What `scripts/bench.py` is to show, and what it has shown. A number that was not measured is not claimed. The
tables behind the numbers are in bench_cpu.md and bench_cuda.md."""
