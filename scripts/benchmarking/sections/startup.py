"""How long a command takes to begin."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

from benchmarking.context import Bench
from benchmarking.figures import spread
from benchmarking.processes import REPOSITORY
from benchmarking.report import Chart, Figures, Goal, Section, Table

SCRIPTS = ("app/classify.py", "app/titlegen.py")
LEGEND = """`--help`: the whole process. First step: from the start of the process to the end of the first optimizer step,
over a file of short texts; `first`, when nothing is kept, and `again`, when the rows and tokens of the earlier start
are. `trainer` is transformers' Trainer over rows that `datasets` reads, tokenizes and keeps."""


def measure(bench: Bench) -> Figures:
    size = bench.size("startup")
    helps = {}
    for script in SCRIPTS:
        runs = [help_seconds(script) for _ in range(size["helps"] + 1)][1:]
        helps[script] = {"seconds": spread(wall for wall, _ in runs), "cpu_seconds": spread(cpu for _, cpu in runs)}
    model = bench.options.model or str(bench.folder / "startup_model")
    if bench.options.model is None:
        rows = {"train_file": bench.rows("short", 2000), "rows": 2000, "held_rows": 0, "max_length": size["max_length"]}
        bench.run("classification", ["model"], rows | bench.size("classifier") | {"model": model})
    settings = {
        "train_file": str(bench.folder / "rows.jsonl"), "rows": size["rows"], "held_rows": 0, "batch_size": size["batch_size"],
        "max_length": size["max_length"], "learning_rate": 1e-4, "model": model,
    }  # fmt: skip
    (file,) = bench.run("starting", ["write"], settings)
    names = [name for name in ("ours", "trainer") if bench.wants(name)]
    starts: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(1 + (bench.options.rounds or size["rounds"])):
        for name in names if number % 2 == 0 else names[::-1]:
            starts[name] += bench.run("starting", [name], settings)
            first_step = until_first_step(starts[name][-1])
            bench.say(f"startup {size['rows']} rows, {name:<8} {'again' if number else 'first'} {first_step:6.1f} s")
    os.unlink(settings["train_file"])
    found = {
        name: {
            "first": until_first_step(runs[0]),
            "again": spread(until_first_step(run) for run in runs[1:]),
            "before_training": spread(run["startup_seconds"] for run in runs[1:]),
            "before_training_cpu": spread(run["startup_cpu_seconds"] for run in runs[1:]),
            "peak_memory_mb": runs[-1]["peak_memory_mb"],
        }
        for name, runs in starts.items()
    }
    return {"data": "", "model": "", "help": helps, "rows": size["rows"], "file_mb": file["mb"], "starts": found}


def until_first_step(run: dict) -> float:
    return run["startup_seconds"] + run["step_seconds"][0]


def help_seconds(script: str) -> tuple[float, float]:
    """(wall, CPU) seconds of a script's --help."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run([sys.executable, REPOSITORY / script, "--help"], check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def describe(f: Figures) -> str:
    return f"A file of {f['rows']} rows, {f['file_mb']:.0f} MiB"


def tables(f: Figures) -> list[Table]:
    helps = [
        (
            script, f"{h['seconds']['median']:.2f} s", f"{h['seconds']['low']:.2f}, {h['seconds']['high']:.2f}",
            f"{h['cpu_seconds']['median']:.2f} s",
        )
        for script, h in f["help"].items()
    ]  # fmt: skip
    starts = [
        (
            name, f"{s['first']:.1f} s", f"{s['again']['median']:.1f} s", f"{s['again']['low']:.1f}, {s['again']['high']:.1f}",
            f"{s['before_training']['median']:.1f} s", f"{s['before_training_cpu']['median']:.1f} s",
            f"{s['peak_memory_mb']:.0f} MiB",
        )
        for name, s in f["starts"].items()
    ]  # fmt: skip
    bars = {
        "first": {n: s["first"] for n, s in f["starts"].items()},
        "again": {n: s["again"]["median"] for n, s in f["starts"].items()},
    }
    helped = {script: h["seconds"]["median"] for script, h in f["help"].items()}
    return [
        Table("--help", ("", "median", "least, most", "CPU time"), helps, chart=Chart("s", {"": helped})),
        Table(
            f"First step over {f['rows']} rows",
            ("", "first", "again", "least, most", "of it before the first batch", "CPU time of that", "memory of the process"),
            starts,
            chart=Chart("s", bars),
        ),
    ]


def slowest_help(figures: Figures) -> float:
    return max(h["seconds"]["median"] for h in figures["help"].values())


def again(figures: Figures) -> float | None:
    return figures["starts"]["ours"]["again"]["median"] if figures["rows"] >= 1_000_000 else None


SECTION = Section(
    "startup",
    "Start-up",
    LEGEND,
    measure,
    describe,
    tables,
    (
        Goal("--help of either task", ("cpu", "cuda"), 2, slowest_help, False, unit=" s"),
        Goal("first step over a million rows whose tokens are kept", ("cpu", "cuda"), 10, again, False, unit=" s"),
    ),
)
