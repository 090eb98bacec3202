"""How much of DDP's exchange of gradients a step waits for."""

from __future__ import annotations

from typing import Any

from benchmarking.context import Bench
from benchmarking.report import GPU, NOT_MEASURED, Goal, Report, Section, chart, table

GOAL = "DDP's exchange of gradients is hidden behind the backward pass: share of it"
LEGEND = """Classification of long-tailed texts under DDP, on two processes (on GPUs as many as there are): a step with the
exchange of gradients, the same step without it, the exchange alone (in DDP's buckets of 25 MiB), in turns, medians of the
slowest process. What the step does not wait for is `hidden` behind the backward pass."""


def measure(bench: Bench) -> Report:
    size, long_tailed = bench.size("communication"), bench.size("long_tailed")
    settings = {name: long_tailed[name] for name in ("batch_size", "max_length")} | size
    settings |= {"held_rows": 0, "train_file": bench.rows("long_tailed", size["rows"]), "learning_rate": 1e-4}
    settings, model = bench.with_classifier(settings)
    processes, found = 2 if bench.kind == "cpu" else bench.machine["gpus"], None
    if processes > 1:
        (found,) = bench.run(["communication.ours"], settings, processes=processes)
    return {
        "data": bench.source("long_tailed").name,
        "model": model,
        "about": "",
        "tables": [exchange_table(found)],
        "goals": {GOAL: (found and hidden(found), None)},
    }


def exchange_table(e: dict[str, Any] | None) -> dict[str, Any]:
    if e is None:
        return table("Communication", [{"processes": NOT_MEASURED}], note="There was one GPU.")
    times = {"step": e["step"], "without exchange": e["without"], "exchange alone": e["exchange"]}
    bars = [{"": name, "ms": 1000 * seconds} for name, seconds in times.items()]
    row = {"processes": f"{e['processes']}, {e['backend']}", "gradients, MiB": e["gradient_mb"]}
    row |= {f"{bar['']}, ms": bar["ms"] for bar in bars}
    row |= {"waited for, ms": 1000 * (e["step"] - e["without"]), "hidden, %": hidden(e)}
    note = "" if hidden(e) >= 0 else "Steps wait for longer than an exchange alone takes: it needs the cores that compute."
    return table("Communication", [row], chart(bars, "", "ms"), note)


def hidden(e: dict[str, Any]) -> float:
    """The percentage of the exchange that no step waits for; below 0 where steps wait for longer than an exchange takes."""
    return 100 * (1 - (e["step"] - e["without"]) / e["exchange"])


SECTION = Section("communication", "Exchange of gradients", LEGEND, measure, (Goal(GOAL, GPU, 50, unit="%"),))
