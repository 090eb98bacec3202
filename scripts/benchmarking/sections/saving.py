"""How long a checkpoint holds the training."""

from __future__ import annotations

from benchmarking.context import Bench
from benchmarking.ratios import spread
from benchmarking.report import Report, Section, chart, table

LEGEND = """Model, optimizer and state after every few steps. `ours` copies them and writes beside the next steps, hashes and
flushes to disk, so that a power cut harms nothing; `trainer` (transformers' Trainer) writes while the step waits, and does
not flush. The two run in turns. The whole training ends when everything is written."""


def measure(bench: Bench) -> Report:
    size = bench.size("saving")
    rows = {"held_rows": 0, "train_file": bench.rows("long_tailed", size["rows"]), "learning_rate": 1e-4}
    settings, model = bench.with_classifier(size | rows | {"max_steps": size["steps"]})
    jobs = {"ours": "saving.ours", "trainer": "saving.trainer"}
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


SECTION = Section("saving", "Save stall", LEGEND, measure)
