"""Titles: training, at several lengths of document."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarking.context import Bench
from benchmarking.ratios import LEAST_TURNS, WARM_UP, compare, turns
from benchmarking.report import BOTH, CPU, Goal, Report, Row, Section, chart, table

OTHERS = ("bare", "trainer_best", "trainer", "padded", "trainer_full", "ours_compiled")
FULL_UP_TO = 1024  # longest document for full attention on a CPU
COST = "titles: our step costs more than the bare loop's, at the worst length"
FASTER = "titles: times Seq2SeqTrainer's best training, at the worst length"
LEGEND = """All documents of a batch have the same length, so nobody pads; every contender has the same model, weights and
rows per step. `ours` is `app/titlegen.py` itself with its own attention. `bare` is a plain PyTorch loop over the same batches
with that attention and our dropout. `trainer_best` is Seq2SeqTrainer with transformers' block-sparse attention, fused AdamW and
length grouping, `trainer` as it comes, `trainer_full` the best with full attention. `padded` is the hand-written loop with
AdamW as it comes, `ours_compiled` ours with `--torch_compile` on a GPU. The first turn of each is a warm-up and does not count.
Against `bare`, where a few percent decide, the first six do not count on a CPU, in which the heap of either process still
grows, and sixteen more are taken. Tokens are those of documents. Memory is the peak while training, above what the process held
before its first step: gradients, moments, activations. The loss before training, without dropout, shows that the models are the
same; the one after is that of the same rows after each contender's own steps, whose batches come in another order."""


def measure(bench: Bench) -> Report:
    size = bench.size("titles_training")
    lengths = sorted(bench.options.lengths or size["lengths"])
    settings, about = prepare(bench, {"max_steps": size["max_steps"], "train_lengths": lengths})
    rows, compared = [], []
    for length in lengths:
        left_out = set() if bench.kind == "cuda" else {"ours_compiled", *(("trainer_full",) if length > FULL_UP_TO else ())}
        runs: dict[str, list[dict[str, Any]]] = {}
        for other in bench.others("titles_training", (name for name in OTHERS if name not in left_out)):
            warm_up, least = (size["bare_warm_up"], size["bare_turns"]) if other == "bare" else (WARM_UP, LEAST_TURNS)
            jobs = ["titles.ours", f"titles.{other}"]
            pair = bench.run(jobs, settings | {"length": length}, bench.turns(size, least))
            for result in pair:
                runs.setdefault(result["contender"], []).append(result | {"warm_up": warm_up})
            compared.append({"length": f"{length} tokens", "": other, **compare(*pair, warm_up, bench.per_turn)})
            bench.say_speed(f"titles {length:>5} tokens", compared[-1])
        rows += [{"length": length, "": name, **contender_row(each, bench.per_turn)} for name, each in runs.items()]
    goals = {}
    if bare := [row for row in compared if row[""] == "bare"]:
        goals[COST] = max(100 * (1 / row["speed (quartiles)"]["median"] - 1) for row in bare), None
        goals[f"{COST}, in CPU time"] = max(100 * (row["CPU time"] - 1) for row in bare), None
    if best := [row["speed (quartiles)"]["median"] for row in compared if row[""] == "trainer_best"]:
        goals[FASTER] = min(best), None
    return {
        "data": bench.source("titles").name,
        "model": about,
        "about": "Documents cut from real ones and put together to one length",
        "tables": [
            table("Training", rows, chart(rows, "length", "tokens/s", by="")),
            table("Ours against the others", compared, chart(compared, "length", "speed (quartiles)", by="")),
        ],
        "goals": goals,
    }


def prepare(bench: Bench, more: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(settings, with the inputs made; the model in words)."""
    size, inputs = bench.size("titles"), {"inputs": str(bench.folder / "inputs")}
    asked = {"train_file": bench.source("titles").path, "train_lengths": [], "generate_length": None, "beams": 4}
    settings = size | inputs | asked | more
    bench.run(["title_inputs.titles"], settings)
    encoder = "BigBird encoder ({layers} layers, {hidden} wide, blocks of {block_size})".format(**size)
    return settings, f"{encoder} with a BERT decoder ({size['decoder_layers']} layers), random weights"


def contender_row(runs: list[dict[str, Any]], per_turn: int) -> Row:
    """One contender's medians over all its runs, without their first `warm_up` turns."""
    counted = [(run, slice(run["warm_up"] * per_turn, len(run["step_seconds"]))) for run in runs]
    seconds, units = ([x for run, steps in counted for x in run[name][steps]] for name in ("step_seconds", "units"))
    each = [x for run in runs for x in turns(run["step_seconds"], per_turn)[run["warm_up"] :]]
    return {
        "rows": runs[0]["batch_size"],
        "steps": len(seconds),
        "tokens/s": sum(units) / sum(seconds),
        "at best": max(unit / second for unit, second in zip(units, seconds, strict=True)),
        "step p50, ms": 1000 * statistics.median(each) / per_turn,
        "memory, MiB": statistics.median(run["memory_mb"] for run in runs),
        "of the process, MiB": statistics.median(run["peak_memory_mb"] for run in runs),
        "start-up, s": runs[0]["startup_seconds"],
        "loss before": runs[0]["loss_before"],
        "after": runs[0]["loss_after"],
    }


GOALS = (Goal(COST, BOTH, 3, False, "%"), Goal(f"{COST}, in CPU time", CPU, 3, False, "%"), Goal(FASTER, BOTH, 1))
SECTION = Section("titles_training", "Titles: training", LEGEND, measure, GOALS)
