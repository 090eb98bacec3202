"""Figures of a benchmark in words: ratios, tables, the machine, the files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarking.processes import WAIT_POLICY

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers")
KEPT_FROM = "## Reading"


def quartiles(values: list[float]) -> dict[str, float]:
    if len(values) == 1:
        return {"low": values[0], "median": values[0], "high": values[0]}
    return dict(zip(("low", "median", "high"), statistics.quantiles(values, n=4, method="inclusive"), strict=True))


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def command_line(script: str, hidden: dict[str, str | None]) -> str:
    """This command without the folders of this machine. `hidden`: arguments that name files, and what is shown in place of
    their values (None: the file's name)."""
    shown, name = ["python", f"scripts/{Path(script).name}"], ""
    for word in sys.argv[1:]:
        if name in hidden:
            inside = not Path(word).is_absolute() and ".." not in Path(word).parts
            shown.append(hidden[name] or (word if inside else Path(word).name))
        else:
            shown.append(shlex.quote(word))
        name = word
    return " ".join(shown)


def machine(device: str, threads: int) -> str:
    policy = os.environ.get("OMP_WAIT_POLICY", WAIT_POLICY)
    cores = f"{os.cpu_count()} CPU cores ({platform.machine()}), {threads} thread(s), OMP_WAIT_POLICY={policy}"
    return f"{device}; {cores}" if device != "cpu" else cores


def cpu_model() -> str:
    """The name of the processor; its architecture where the system does not say."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def versions(more: Iterable[str] = ()) -> dict[str, str]:
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in (*LIBRARIES, *more)}}


def row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    head = list(head)
    return [row(head), row(["---"] * len(head)), *map(row, rows)]


def load_sentence(load: dict[str, float] | None) -> str:
    """What else the machine did; empty where it is not known. `load`: a `spread` of shares of the CPU."""
    if load is None:
        return ""
    least_most = f"{load['least']:.0%} to {load['most']:.0%}"
    return f" Other processes used {load['median']:.0%} of the CPU while it ran (median; {least_most})."


def save(path: Path, report: dict[str, Any], key: tuple[str, ...], head: list[str], render: Callable[[dict], str]) -> None:
    """Puts the report into NAME.json in place of an earlier one with equal `key` fields, and renders NAME.md from all of them.

    What stands in NAME.md from the heading KEPT_FROM on is a person's and stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    reports = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    places = [number for number, old in enumerate(reports) if all(old[k] == report[k] for k in key)]
    if places:
        reports[places[0]] = report
    else:
        reports.append(report)
    path.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    page = path.with_suffix(".md")
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    _, found, kept = old.partition(KEPT_FROM)
    parts = [*head, *map(render, reports)]
    page.write_text("\n".join(parts) + (f"\n{found}{kept}" if found else ""), encoding="utf-8")
