"""Our step: where its time goes, and how much of what the machine can compute goes into the model."""

from __future__ import annotations

from typing import Any

from benchmarking.context import Bench
from benchmarking.processes import Turns
from benchmarking.ratios import WARM_UP, turns
from benchmarking.report import GPU, NOT_MEASURED, Goal, Report, Row, Section, chart, table
from benchmarking.sections.titles import prepare

SPLIT_GOAL = "DDP's exchange of gradients is hidden behind the backward pass: share of it"
PARTS = ("data", "forward", "backward", "optimizer")
SPLIT_LEGEND = """The parts of `--profile`, timed without a profiler: making the batches, forward and backward passes, clipping
and the optimizer; `rest` is everything else between the first step and the last. Communication is that of DDP between two
processes (on GPUs as many as there are): a step with the exchange of gradients, the same step without it, the exchange alone
(in DDP's buckets of 25 MiB), in turns, medians of the slowest process. What the step does not wait for is `hidden` behind the
backward pass."""


def measure_split(bench: Bench) -> Report:
    size = bench.size("split")
    settings, model = bench.long_tailed(size["rows"])
    (classification,) = bench.run(["steps.classification"], settings)
    length = size["title_length"]
    titles, _ = prepare(bench, {"train_lengths": [length], "max_steps": size["title_steps"]})
    (title,) = bench.run(["steps.titles"], titles | {"length": length})
    splits = {"classification, long-tailed texts": classification, f"titles, {length} tokens": title}
    processes, exchange = 2 if bench.kind == "cpu" else bench.machine["gpus"], None
    if processes > 1:
        (exchange,) = bench.run(["steps.communication"], settings | {"steps": size["exchange_steps"]}, processes=processes)
    bench.say(f"split {len(splits)} tasks, communication {'' if exchange else NOT_MEASURED}")
    rows = [{"": name, **split_row(split)} for name, split in splits.items()]
    parts = [{"": row[""], "part": part, "% of the step": row[f"{part}, %"]} for row in rows for part in (*PARTS, "rest")]
    return {
        "data": bench.source("long_tailed").name,
        "model": model,
        "about": "",
        "tables": [table("Parts of a step", rows, chart(parts, "part", "% of the step", by="")), exchange_table(exchange)],
        "goals": {SPLIT_GOAL: (exchange and hidden(exchange), None)},
    }


def split_row(split: dict[str, Any]) -> Row:
    shares = {name: 100 * split["parts"].get(name, 0.0) / split["seconds"] for name in PARTS}
    shares["rest"] = max(0.0, 100 - sum(shares.values()))
    step = {"steps": split["steps"], "a step, ms": 1000 * split["seconds"] / split["steps"]}
    return step | {f"{name}, %": share for name, share in shares.items()}


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


SPLIT = Section("split", "Where the time of a step goes", SPLIT_LEGEND, measure_split, (Goal(SPLIT_GOAL, GPU, 50, unit="%"),))


FLOPS_LEGEND = """Model FLOPs utilisation (PaLM, arXiv:2204.02311): the operations of the model's own matrix products - no
padding, nothing computed twice, a backward pass counted as two forward passes - per second of training, held against large
matrix products in the same precision. The products take turns with our training, step by step, so that both find the machine in
the same state. BigBird's operations are those of transformers' block-sparse attention."""


def measure_flops(bench: Bench) -> Report:
    size = bench.size("flops")
    more, length = {"product_size": size["product_size"], "product_turns": 10_000}, size["title_length"]
    settings, model = bench.long_tailed(size["rows"])
    titles, _ = prepare(bench, {"train_lengths": [length], "max_steps": size["title_steps"]})
    rows = [
        {"": "classification, long-tailed texts", **utilisation(bench, "classification", settings | more)},
        {"": f"titles, {length} tokens", **utilisation(bench, "titles", titles | {"length": length} | more)},
    ]
    for row in rows:
        bench.say(f"flops {row['']:<36} {row['utilisation, %']:.1f}% of the peak")
    return {
        "data": bench.source("long_tailed").name,
        "model": model,
        "about": "Products of {product_size} x {product_size} matrices".format(**size),
        "tables": [table("Utilisation", rows, chart(rows, "", "utilisation, %"))],
        "goals": {},
    }


def utilisation(bench: Bench, task: str, settings: dict[str, Any]) -> Row:
    """Of our training beside the products, which go on for as many turns."""
    runs = bench.run([f"steps.{task}_flops", "machine.products"], settings, Turns(until_first=True))
    ours, peak = (per_second(run, bench.per_turn) for run in runs)
    return {"model GFLOP/s": ours / 1e9, "products GFLOP/s": peak / 1e9, "utilisation, %": 100 * ours / peak}


def per_second(run: dict[str, Any], per_turn: int) -> float:
    """Operations of all steps but those of the first turn."""
    seconds, units = (turns(run[name], per_turn)[WARM_UP:] for name in ("step_seconds", "units"))
    return sum(units) / sum(seconds)


FLOPS = Section("flops", "Model FLOPs utilisation", FLOPS_LEGEND, measure_flops)
