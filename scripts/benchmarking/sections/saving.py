"""How long a checkpoint holds the training."""

from __future__ import annotations

from benchmarking.context import Bench
from benchmarking.figures import spread
from benchmarking.report import Chart, Figures, Section, Table

LEGEND = """Model, optimizer and state after every few steps. `ours` copies them and writes beside the next steps, hashes and
flushes to disk, so that a power cut harms nothing; `trainer` (transformers' Trainer) writes while the step waits, and does
not flush. The two run in turns. The whole training is without what ours still writes when it is done."""


def measure(bench: Bench) -> Figures:
    size = bench.size("saving")
    settings = {**size, "held_rows": 0, "train_file": bench.rows("long_tailed", size["rows"]), "learning_rate": 1e-4}
    settings["model"] = bench.options.model or str(bench.folder / "saving_model")
    about = bench.options.model_name
    if bench.options.model is None:
        bench.run("classification", ["model"], settings | bench.size("classifier"))
        about = "BERT of {layers} layers, {hidden} wide, random weights".format(**bench.size("classifier"))
    names = [name for name in ("ours", "trainer") if bench.wants(name)]
    holds: dict[str, list[float]] = {name: [] for name in names}
    sizes, whole = {}, {name: [] for name in names}
    for number in range(bench.options.rounds or size["rounds"]):
        for name in names if number % 2 == 0 else names[::-1]:
            (run,) = bench.run("saving", [name], settings)
            holds[name] += run["holds"]
            whole[name].append(run["train_seconds"])
            sizes[name] = run["mb"]
    found = {
        name: {"hold": spread(times), "saves": len(times), "mb": sizes[name], "train": spread(whole[name])}
        for name, times in holds.items()
    }
    bench.say("saving " + ", ".join(f"{name} {f['hold']['median']:.2f} s" for name, f in found.items()))
    return {"data": "", "model": about, "contenders": found, **{name: size[name] for name in ("steps", "save_every")}}


def describe(f: Figures) -> str:
    return f"{f['steps']} steps, a checkpoint after every {f['save_every']}"


def tables(f: Figures) -> list[Table]:
    rows = [
        (
            name,
            c["saves"],
            f"{c['mb']:.0f} MiB",
            f"{c['hold']['median']:.3f} s",
            f"{c['hold']['low']:.3f}, {c['hold']['high']:.3f}",
            f"{c['train']['median']:.1f} s",
        )
        for name, c in f["contenders"].items()
    ]
    chart = Chart("s", {"": {name: c["hold"]["median"] for name, c in f["contenders"].items()}})
    return [
        Table(
            "A step is held for",
            ("", "saves", "a checkpoint", "median", "least, most", "the whole training"),
            rows,
            chart=chart,
        )
    ]


SECTION = Section("saving", "Save stall", LEGEND, measure, describe, tables)
