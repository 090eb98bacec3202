"""Titles: training at several lengths of document, and writing them."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarking.context import Bench
from benchmarking.ratios import LEAST_TURNS, WARM_UP, compare, turns
from benchmarking.report import BOTH, CPU, Goal, Report, Row, Section, chart, table

TITLES_OTHERS = ("bare", "trainer_best", "trainer", "padded")
COST = "titles: our step costs more than the bare loop's, at the worst length"
FASTER = "titles: times Seq2SeqTrainer's best training, at the worst length"
TITLES_LEGEND = """All documents of a batch have the same length, so nobody pads; every contender has the same model, weights
and rows per step. `ours` is `app/titlegen.py` itself with its own attention. `bare` is a plain PyTorch loop over the same
batches with the task's model, its attention and dropout. `trainer_best` is Seq2SeqTrainer with transformers' block-sparse
attention, fused AdamW and length grouping, `trainer` as it comes. `padded` is the hand-written loop with AdamW as it comes. The
first turn of each is a warm-up and does not count. Against `bare`, where a few percent decide, the first six do not count on a
CPU, in which the heap of either process still grows, and sixteen more are taken. Tokens are those of documents. Memory is the
peak while training, above what the process held before its first step: gradients, moments, activations. The loss before
training, without dropout, shows that the models are the same; the one after is that of the same rows after each contender's own
steps, whose batches come in another order."""


def measure_titles(bench: Bench) -> Report:
    size = bench.size("titles_training")
    lengths = sorted(bench.options.lengths or size["lengths"])
    settings, about = prepare(bench, {"max_steps": size["max_steps"], "train_lengths": lengths})
    rows, compared = [], []
    for length in lengths:
        runs: dict[str, list[dict[str, Any]]] = {}
        for other in bench.others("titles_training", TITLES_OTHERS):
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
        "loss before": runs[0]["loss_before"],
        "after": runs[0]["loss_after"],
    }


TITLES_GOALS = (Goal(COST, BOTH, 3, False, "%"), Goal(f"{COST}, in CPU time", CPU, 3, False, "%"), Goal(FASTER, BOTH, 1))
TRAINING = Section("titles_training", "Titles: training", TITLES_LEGEND, measure_titles, TITLES_GOALS)


WRITING_GOAL = "titles: times the documents/s of Seq2SeqTrainer.predict, writing what transformers writes for a document alone"
WRITING_OTHERS = ("trainer_sorted", "trainer")
WRITING_LEGEND = """`ours` is `app/titlegen.py --do_predict`; `trainer` is `Seq2SeqTrainer.predict` with `predict_with_generate`
and the documents in the order of the file, `trainer_sorted` with documents sorted by length beforehand. The beam search is the
same for all. A turn is one pass over all documents; the first is a warm-up. `as written alone`: as plain transformers writes
for a document by itself, without padding. Its sparse attention depends on how far a batch pads a row, so `predict` may write
something else, the more so as these weights are random and drawn wide (a title hangs on small differences)."""


def measure_writing(bench: Bench) -> Report:
    size = bench.size("titles_writing")
    asked = {name: size[name] for name in ("documents", "eval_batch_size", "beams", "max_steps")}
    settings, model = prepare(bench, asked | {"generate_length": size["length"], "steps_per_turn": 1})
    runs, compared = {}, []
    for other in bench.others("titles_writing", WRITING_OTHERS):
        pair = bench.run(["writing.ours", f"writing.{other}"], settings, bench.turns(size, LEAST_TURNS))
        runs |= {run["contender"]: run for run in pair}
        equal = share(*(run["titles"] for run in pair))
        compared.append({"": other, **compare(*pair), "equal titles, %": equal})
        bench.say_speed("writing", compared[-1])
    alone, rows, count = runs["ours"]["alone"], [], size["documents"]
    for name, run in runs.items():
        seconds = run["step_seconds"][WARM_UP:]
        rows.append({
            "": name,
            "passes": len(seconds),
            "documents/s": count * len(seconds) / sum(seconds),
            "at best": count / min(seconds),
            "memory, MiB": run["memory_mb"],
            "of the process, MiB": run["peak_memory_mb"],
            f"as written alone (first {len(alone)}), %": share(alone, run["titles"][: len(alone)]),
        })  # fmt: skip
    documents = f"{count} documents of {size['length'] // 2} to {size['length']} tokens"
    search = f"{size['eval_batch_size']} at a time, {size['beams']} beams, titles of at most {settings['title_length']} tokens"
    equal = share(alone, runs["ours"]["titles"][: len(alone)])
    # Ours must write what transformers writes for the document itself: predict's titles change with the padding.
    reason = None if equal == 100 else f"{equal:.0f}% of the titles are as written alone"
    speeds = {row[""]: row["speed (quartiles)"]["median"] for row in compared}
    return {
        "data": bench.source("titles").name,
        "model": model,
        "about": f"{documents}, {search}, {len(set(runs['ours']['titles']))} of them different",
        "tables": [
            table("Documents per second", rows, chart(rows, "", "documents/s")),
            table("Ours against predict", compared, chart(compared, "", "speed (quartiles)")),
        ],
        "goals": {WRITING_GOAL: (speeds.get("trainer"), reason)},
    }


def share(some: list[str], others: list[str]) -> float:
    """Percentage of titles that are equal."""
    return 100 * sum(a == b for a, b in zip(some, others, strict=True)) / len(some)


WRITING = Section("titles_writing", "Titles: writing them", WRITING_LEGEND, measure_writing, (Goal(WRITING_GOAL, BOTH, 1.5),))
