"""What a training waits for: checkpoints and the start of a command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from benchmarking.context import Bench
from benchmarking.processes import REPOSITORY
from benchmarking.ratios import spread
from benchmarking.report import BOTH, Goal, Report, Row, Section, chart, table

SAVING_LEGEND = """Model, optimizer and state after every few steps. `ours` copies them and writes beside the next steps, hashes
and flushes to disk, so that a power cut harms nothing; `trainer` (transformers' Trainer) writes while the step waits, and does
not flush. The two run in turns. The whole training ends when everything is written."""


def measure_saving(bench: Bench) -> Report:
    size = bench.size("saving")
    rows = {"held_rows": 0, "train_file": bench.rows("long_tailed", size["rows"]), "learning_rate": 1e-4}
    settings, model = bench.with_classifier(size | rows | {"max_steps": size["steps"]})
    jobs = {"ours": "waits.save_ours", "trainer": "waits.save_trainer"}
    rows = [
        {
            "": name,
            "saves": sum(len(run["holds"]) for run in runs),
            "a checkpoint, MiB": runs[-1]["mb"],
            "a step is held, s": spread(seconds for run in runs for seconds in run["holds"]),
            "the whole training, s": spread(run["train_seconds"] for run in runs)["median"],
        }
        for name, runs in bench.repeat(jobs, settings, bench.options.rounds or size["rounds"]).items()
    ]
    bench.say("saving " + ", ".join(f"{row['']} {row['a step is held, s']['median']:.2f} s" for row in rows))
    about = "{steps} steps, a checkpoint after every {save_every}".format(**size)
    tables = [table("A step is held for", rows, chart(rows, "", "a step is held, s"))]
    return {"data": "", "model": model, "about": about, "tables": tables, "goals": {}}


SAVING = Section("saving", "Save stall", SAVING_LEGEND, measure_saving)


HELP, AGAIN = "--help of either task", "first step over a million rows whose tokens are kept"
SCRIPTS = ("app/classify.py", "app/titlegen.py")
STARTUP_LEGEND = """`--help`: the whole process. First step: from the start of the process to the end of the first optimizer
step, over a file of short texts; `first`, when nothing is kept, and `again`, when the rows and tokens of the earlier start are.
`trainer` is transformers' Trainer over rows that `datasets` reads, tokenizes and keeps."""


def measure_startup(bench: Bench) -> Report:
    size = bench.size("startup")
    helps = [help_row(script, size["helps"]) for script in SCRIPTS]
    common = {"held_rows": 0, **{name: size[name] for name in ("batch_size", "max_length")}}
    settings, _ = bench.with_classifier(common | {"train_file": bench.rows("short", 2000), "rows": 2000})
    path = bench.folder / "rows.jsonl"
    settings |= {"train_file": str(path), "rows": size["rows"], "learning_rate": 1e-4, "max_steps": 1}
    (file,) = bench.run(["waits.file"], settings)
    jobs = {"ours": "classification.ours", "trainer": "waits.start_trainer"}
    runs = bench.repeat(jobs, settings, 1 + (bench.options.rounds or size["rounds"]))
    path.unlink()
    starts = [{"": name, **start_row(each)} for name, each in runs.items()]
    times = [{"": row[""], "s": row[f"{when}, s"], "start": when} for row in starts for when in ("first", "again")]
    ours = next(row for row in starts if row[""] == "ours")["again, s"]["median"]
    bench.say(f"startup {size['rows']} rows, again {ours:.1f} s")
    return {
        "data": "",
        "model": "",
        "about": f"A file of {size['rows']} rows, {file['mb']:.0f} MiB",
        "tables": [
            table("--help", helps, chart(helps, "", "seconds")),
            table(f"First step over {size['rows']} rows", starts, chart(times, "", "s", by="start")),
        ],
        "goals": {
            HELP: (max(row["seconds"]["median"] for row in helps), None),
            AGAIN: (ours if size["rows"] >= 1_000_000 else None, None),
        },
    }


def help_row(script: str, count: int) -> Row:
    """Wall and CPU seconds of a script's --help; the first time does not count."""
    walls, cpus = [], []
    for _ in range(count + 1):
        before, started = os.times(), time.perf_counter()
        subprocess.run([sys.executable, REPOSITORY / script, "--help"], check=True, stdout=subprocess.DEVNULL)
        walls.append(time.perf_counter() - started)
        after = os.times()
        cpus.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return {"": script, "seconds": spread(walls[1:]), "CPU seconds": spread(cpus[1:])["median"]}


def start_row(runs: list[dict[str, Any]]) -> Row:
    """`runs`: the first one found no tokens that are kept."""
    first, *again = [run["startup_seconds"] + run["step_seconds"][0] for run in runs]
    return {
        "first, s": first,
        "again, s": spread(again),
        "of it before the first batch, s": spread(run["startup_seconds"] for run in runs[1:])["median"],
        "CPU time of that, s": spread(run["startup_cpu_seconds"] for run in runs[1:])["median"],
        "memory of the process, MiB": runs[-1]["peak_memory_mb"],
    }


STARTUP_GOALS = (Goal(HELP, BOTH, 2, False, " s"), Goal(AGAIN, BOTH, 10, False, " s"))
STARTUP = Section("startup", "Start-up", STARTUP_LEGEND, measure_startup, STARTUP_GOALS)
