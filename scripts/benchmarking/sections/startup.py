"""Start-up time of a command."""

import statistics
import subprocess
import sys
import time

from benchmarking.context import Bench
from benchmarking.data import random_rows, write_rows
from benchmarking.processes import REPOSITORY
from benchmarking.ratios import Run, spread
from benchmarking.report import BOTH, Goal, Report, Row, Section, table

HELP, AGAIN = "--help of either task", "first step over a million rows whose tokens are kept"
SCRIPTS = ("app/classify.py", "app/titlegen.py")
LEGEND = """`--help`: the whole process. First step: from the start of the process to the end of the first
optimizer step, over a file of short texts; `first` without, `again` with cached rows and tokens. `trainer`
is transformers' Trainer over rows that `datasets` reads, tokenizes and caches."""
JOBS = {"ours": "classification.ours", "trainer": "trainer.start"}


def measure(bench: Bench) -> Report:
    size, path = bench.size("startup"), bench.folder / "rows.jsonl"
    helps = [{"": script, "seconds": seconds_of_help(script, size["helps"])} for script in SCRIPTS]
    common = {"eval_rows": 0, **{name: size[name] for name in ("batch_size", "max_length")}}
    settings, _ = bench.with_classifier(common | {"train_file": bench.rows("short", 2000), "rows": 2000})
    settings |= {"train_file": str(path), "rows": size["rows"], "learning_rate": 1e-4, "max_steps": 1}
    write_rows(path, random_rows(size["rows"], bench.options.seed))
    runs: dict[str, list[Run]] = {name: [] for name in JOBS}
    for number in range(1 + (bench.options.rounds or size["rounds"])):
        for name in list(JOBS)[:: -1 if number % 2 else 1]:
            runs[name] += bench.run([(JOBS[name], {})], settings)
    starts = [start_row(name, each) for name, each in runs.items()]
    ours = starts[0]["again, s"]["median"]
    return {
        "data": "",
        "model": "",
        "about": f"A file of {size['rows']} rows, {path.stat().st_size / 2**20:.0f} MiB",
        "tables": [
            table("--help", helps),
            table(f"First step over {size['rows']} rows", starts),
        ],
        "goals": {
            HELP: (max(row["seconds"]["median"] for row in helps), None),
            AGAIN: (ours if size["rows"] >= 1_000_000 else None, None),
        },
    }


def seconds_of_help(script: str, count: int) -> dict[str, float]:
    """Seconds of a script's --help, without the first call."""
    seconds = []
    for _ in range(count + 1):
        started = time.perf_counter()
        subprocess.run([sys.executable, REPOSITORY / script, "--help"], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    return spread(seconds[1:])


def start_row(name: str, runs: list[Run]) -> Row:
    """`runs`: the first one had an empty cache."""
    first, *again = [run["startup_seconds"] + run["seconds"][0] for run in runs]
    return {
        "": name,
        "first, s": first,
        "again, s": spread(again),
        "of it before the first step, s": statistics.median(run["startup_seconds"] for run in runs[1:]),
        "memory of the process, MiB": runs[-1]["peak_memory_mb"],
    }


GOALS = (Goal(HELP, BOTH, 2, False, " s"), Goal(AGAIN, BOTH, 10, False, " s"))
SECTION = Section("startup", "Start-up", LEGEND, measure, GOALS)
