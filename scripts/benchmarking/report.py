"""What a section found, in tables, goals and files."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT_FROM = "\n## Reading\n"
NOT_MEASURED = "not measured"
KEY = ("section", "data", "model", "precision")  # a report replaces an earlier one with these alike
HIDDEN = {"--data": None, "--model": "MODEL", "--output": None}  # arguments that name folders of one machine
DEVICES = {"cpu": "CPU", "cuda": "NVIDIA GPU"}
Figures = dict[str, Any]
Draw = Callable[[str, "Table", Path], bool]  # (title, table, where) -> whether there is a plot now


@dataclass(frozen=True)
class Chart:
    """A plot of a table. `series`: name -> {x or label: y}. Bars where x are labels, lines where they are numbers."""

    unit: str
    series: dict[str, dict[Any, float]]
    x: str = ""
    logarithmic: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: list[tuple]
    note: str = ""
    chart: Chart | None = None


@dataclass(frozen=True)
class Goal:
    """Something to reach on some kinds of device. `value` takes a section's figures to a number, or None where they lack it;
    `but` to a reason why the number does not count, if there is one."""

    name: str
    kinds: tuple[str, ...]
    bound: float
    value: Callable[[Figures], float | None]
    least: bool = True
    but: Callable[[Figures], str | None] = lambda _: None
    unit: str = " x"

    def wanted(self) -> str:
        return f"{'at least' if self.least else 'at most'} {self.bound:g}{self.unit}"

    def judge(self, figures: Figures | None) -> tuple[str, str]:
        """(the number, pass or fail)."""
        value = None if figures is None else self.value(figures)
        if value is None:
            return NOT_MEASURED, ""
        met = value >= self.bound if self.least else value <= self.bound
        reason = self.but(figures)
        verdict = "pass" if met else "**fail**"
        return f"{value:.3g}{self.unit}", f"**fail**: {reason}" if met and reason else verdict


@dataclass(frozen=True)
class Section:
    """One part of the benchmark. `measure` takes a `context.Bench` and returns the figures; `describe` says in words what was
    measured; `tables` and `goals` read the figures."""

    name: str
    title: str
    legend: str
    measure: Callable[[Any], Figures]
    describe: Callable[[Figures], str]
    tables: Callable[[Figures], list[Table]]
    goals: tuple[Goal, ...] = ()


def command_line() -> str:
    """This command without the folders of this machine."""
    shown, name = ["python", "scripts/bench.py"], ""
    for word in sys.argv[1:]:
        if name in HIDDEN:
            inside = not Path(word).is_absolute() and ".." not in Path(word).parts
            shown.append(HIDDEN[name] or (word if inside else Path(word).name))
        else:
            shown.append(shlex.quote(word))
        name = word
    return " ".join(shown)


def row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def markdown(table: Table) -> list[str]:
    return [row(table.head), row(["---"] * len(table.head)), *map(row, table.rows), *(["", table.note] if table.note else [])]


def goal_lines(section: Section, report: dict[str, Any] | None, kind: str) -> list[tuple[str, str, str, str]]:
    """(goal, wanted, found, verdict) of those that a kind of device has. A quick pass is not judged."""
    lines = []
    for goal in section.goals:
        if kind in goal.kinds:
            found, verdict = goal.judge(report and report["figures"])
            lines.append((goal.name, goal.wanted(), found, "quick" if report and report["quick"] else verdict))
    return lines


# Files -----------------------------------------------------------------------------------------------------------------


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / f"bench_{kind}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def save(folder: Path, kind: str, report: dict[str, Any], sections: dict[str, Section], draw: Draw) -> None:
    """Puts a report into bench_KIND.json, and writes bench_KIND.md with its plots, and goals.md, from all reports there are.

    What stands in bench_KIND.md from the heading KEPT_FROM on is a person's and stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reports = [old for old in read(folder, kind) if any(old[key] != report[key] for key in KEY)]
    order = list(sections)
    reports = sorted([*reports, report], key=lambda r: (order.index(r["section"]), r["precision"], r["data"]))
    (folder / f"bench_{kind}.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    page = folder / f"bench_{kind}.md"
    _, found, kept = (page.read_text(encoding="utf-8") if page.exists() else "").partition(KEPT_FROM)
    lines = [f"# Speed and memory: {DEVICES[kind]}", "", HEAD, ""]
    for place, each in enumerate(reports):
        earlier = sum(r["section"] == each["section"] for r in reports[:place])
        name = f"{each['section']}_{kind}" + (f"_{earlier + 1}" if earlier else "")
        lines += render(each, sections[each["section"]], folder, kind, name, draw)
    page.write_text("\n".join(lines) + (f"{found}{kept}" if found else ""), encoding="utf-8")
    write_goals(folder, sections)


def render(report: dict[str, Any], section: Section, folder: Path, kind: str, name: str, draw: Draw) -> list[str]:
    """A report as lines of Markdown; its plots NAME_1.png, NAME_2.png, ... are drawn beside."""
    figures, data = report["figures"], f": {report['data']}" if report["data"] else ""
    lines = [f"## {section.title}{data}", "", section.legend, "", describe(report, section), "", f"    {report['command']}", ""]
    for number, table in enumerate(section.tables(figures), 1):
        lines += [f"### {table.title}", "", *markdown(table), ""]
        path = folder / f"{name}_{number}.png"
        if table.chart is not None and draw(f"{section.title}: {lower(table.title)}", table, path):
            lines += [f"![{table.title}]({path.name})", ""]
    goals = goal_lines(section, report, kind)
    if goals:
        lines += ["### Goals", "", *markdown(Table("", ("goal", "wanted", "found", ""), goals)), ""]
    return lines


def lower(title: str) -> str:
    return title[0].lower() + title[1:]


def describe(report: dict[str, Any], section: Section) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    precision = "fp32" if report["precision"] == "no" else report["precision"]
    said = [section.describe(report["figures"]), f"{report['model']}, {precision}" if report["model"] else precision]
    code = f"commit {report['commit']}, " if report["commit"] else ""
    said += [report["machine"], versions, f"{code}{report['date']}; took {report['minutes']:.1f} minutes"]
    if report["others_cpu_share"] is not None:
        load = report["others_cpu_share"]
        said.append(
            f"Other processes used {load['median']:.0%} of the CPU meanwhile (median; {load['low']:.0%} to {load['high']:.0%})"
        )
    return ". ".join(part for part in said if part) + "."


def write_goals(folder: Path, sections: dict[str, Section]) -> None:
    """goals.md: every goal on every kind of device, measured or not."""
    lines = ["# Goals", "", GOALS, ""]
    for kind, device in DEVICES.items():
        reports = read(folder, kind)
        rows = []
        for section in sections.values():
            # The newest precision and data of a section stand for it.
            own = [report for report in reports if report["section"] == section.name] or [None]
            for report in own:
                where = (
                    ""
                    if report is None
                    else " ".join(filter(None, (report["data"], report["precision"].replace("no", "fp32"))))
                )
                rows += [(*line, where) for line in goal_lines(section, report, kind)]
        machines = sorted({report["machine"] for report in reports})
        lines += [f"## {device}", "", "; ".join(machines) or f"No {device} was in reach yet: {NOT_MEASURED}.", ""]
        lines += [*markdown(Table("", ("goal", "wanted", "found", "", "measured on"), rows)), ""]
    (folder / "goals.md").write_text("\n".join(lines), encoding="utf-8")


HEAD = """Made by `scripts/bench.py`. Each contender has a process of its own; two of them, ours and another, are in memory at
a time and take turns (A B B A ...), a step each on a CPU, some steps each on a GPU, so that what else the machine does meets
both. Ratios above 1 mean that ours is faster; CPU time and memory are ours' share of the other's. `at best` takes the least
time of each step (or the fastest step), which other work on the machine disturbs least. Spreads are least and most over the
rounds, or quartiles over the turns where that is said."""
GOALS = """What `scripts/bench.py` is to show, and what it has shown. A number that was not measured is not claimed. The
tables behind the numbers are in bench_cpu.md and bench_cuda.md."""
