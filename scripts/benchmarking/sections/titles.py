"""Titles: training, at several lengths of document."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarking.context import Bench
from benchmarking.figures import compare, turns
from benchmarking.report import Chart, Figures, Goal, Section, Table

OTHERS = ("bare", "trainer_best", "trainer", "padded", "trainer_full", "ours_compiled")
FULL_UP_TO = 1024  # longest document for full attention on a CPU
WARM_UP = 1  # first turns that do not count
LEAST_TURNS = WARM_UP + 3
LEGEND = """All documents of a batch have the same length, so nobody pads; every contender has the same model, weights and
rows per step. `ours` is `app/titlegen.py` itself with its own attention; `bare` a plain PyTorch loop over the very same
batches with that attention and our dropout; `trainer_best` Seq2SeqTrainer with transformers' block-sparse attention, fused
AdamW and length grouping, `trainer` as it comes; `padded` the hand-written loop with AdamW as it comes; `trainer_full`
Seq2SeqTrainer's best with full attention, `ours_compiled` ours with `--torch_compile` on a GPU. The first turn of each is a
warm-up and does not count; against `bare`, where a few percent decide, the first six do not on a CPU, in which the heap of
either process still grows, and sixteen more are taken. Tokens are those of documents. Memory is the peak while training,
above what the process held before its first step: gradients, moments, activations. The loss before training, without dropout,
shows that the models are the same; the one after is that of the same rows after each contender's own steps, whose batches
come in another order."""


def measure(bench: Bench) -> Figures:
    source, size = bench.source("titles"), bench.size("titles_training")
    lengths = sorted(bench.options.lengths or size["lengths"])
    settings, about = prepare(bench, source, {"max_steps": size["max_steps"], "train_lengths": lengths})
    seconds = size["seconds"] if bench.options.seconds is None else bench.options.seconds
    groups = []
    for length in lengths:
        left_out = set() if bench.kind == "cuda" else {"ours_compiled", *(("trainer_full",) if length > FULL_UP_TO else ())}
        others = bench.others("titles_training", (name for name in OTHERS if name not in left_out))
        runs: dict[str, list[dict[str, Any]]] = {}
        against = {}
        for other in others:
            warm_up, least = (size["bare_warm_up"], size["bare_turns"]) if other == "bare" else (WARM_UP, LEAST_TURNS)
            pair = bench.run("titles", ["ours", other], settings | {"length": length}, True, seconds, least)
            against[other] = compare(*pair, warm_up, bench.per_turn)
            for result in pair:
                runs.setdefault(result["contender"], []).append(result | {"warm_up": warm_up})
            bench.say(f"titles {length:>5} tokens  {other:<13} ours is {against[other]['speed']['median']:.3f} times as fast")
        figures = {name: figures_of(each, bench.per_turn) for name, each in runs.items()}
        groups.append({"length": length, "contenders": figures, "against": against})
    return {"data": source.name, "model": about, "groups": groups}


def prepare(bench: Bench, source: Any, more: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(settings, with the inputs made; the model in words)."""
    size = bench.size("titles")
    settings = {
        **size, "train_file": source.path, "inputs": str(bench.folder / "inputs"), "train_lengths": [],
        "generate_length": None, "characters": None, "beams": 4, "documents": 0, "chinese_file": None, **more,
    }  # fmt: skip
    (made,) = bench.run("title_inputs", ["inputs"], settings)
    words = (
        f"BigBird encoder ({size['layers']} layers, {size['hidden']} wide, blocks of {size['block_size']}) with a BERT decoder "
        f"({size['decoder_layers']} layers), random weights"
    )
    return settings | made, words


def figures_of(runs: list[dict[str, Any]], per_turn: int) -> dict[str, Any]:
    """One contender's figures over all its runs, without their first `warm_up` turns."""
    counted = [(run, slice(run["warm_up"] * per_turn, len(run["step_seconds"]))) for run in runs]
    seconds, units = ([x for run, steps in counted for x in run[name][steps]] for name in ("step_seconds", "units"))
    each = [x for run in runs for x in turns(run["step_seconds"], per_turn)[run["warm_up"] :]]
    first = runs[0]
    return {
        "steps": len(seconds),
        "per_second": sum(units) / sum(seconds),
        "at_best": max(unit / second for unit, second in zip(units, seconds, strict=True)),
        "step_p50": statistics.median(each) / per_turn,
        "memory_mb": statistics.median(run["memory_mb"] for run in runs),
        "peak_memory_mb": statistics.median(run["peak_memory_mb"] for run in runs),
        **{name: first[name] for name in ("startup_seconds", "loss_before", "loss_after", "batch_size")},
    }


def describe(f: Figures) -> str:
    return "Documents cut from real ones and put together to one length"


def tables(f: Figures) -> list[Table]:
    head = (
        *("length", "", "rows", "steps", "tokens/s", "at best", "step p50", "memory", "of the process", "start-up"),
        *("loss before", "after"),
    )
    rows = [
        (
            group["length"], name, c["batch_size"], c["steps"], f"{c['per_second']:.0f}", f"{c['at_best']:.0f}",
            f"{c['step_p50'] * 1000:.0f} ms", f"{c['memory_mb']:.0f} MiB", f"{c['peak_memory_mb']:.0f} MiB",
            f"{c['startup_seconds']:.1f} s", f"{c['loss_before']:.5f}", f"{c['loss_after']:.4f}",
        )
        for group in f["groups"] for name, c in group["contenders"].items()
    ]  # fmt: skip
    series: dict[str, dict[int, float]] = {}
    for group in f["groups"]:
        for name, c in group["contenders"].items():
            series.setdefault(name, {})[group["length"]] = c["per_second"]
    ratio_series: dict[str, dict[str, float]] = {}
    for group in f["groups"]:
        for name, ratio in group["against"].items():
            ratio_series.setdefault(name, {})[f"{group['length']} tokens"] = ratio["speed"]["median"]
    chart = Chart("tokens/s", series, "tokens of a document")
    groups = [(f"{name}, {g['length']} tokens", ratio) for g in f["groups"] for name, ratio in g["against"].items()]
    return [
        Table("Training", head, rows, chart=chart),
        ratio_table("Ours against the others", groups, Chart("times as fast as", ratio_series)),
    ]


def ratio_table(title: str, compared: list[tuple[str, dict[str, Any]]], chart: Chart, memory: bool = True) -> Table:
    """A row for each of (name, what `compare` gave)."""
    rows = []
    for name, ratio in compared:
        speed = ratio["speed"]
        shares = [ratio["memory"], ratio["peak_memory"]] if memory else []
        shown = ("" if share is None else f"{share:.2f} x" for share in shares)
        quarters = f"{speed['low']:.3f}, {speed['high']:.3f}"
        rows.append(
            (name, f"{speed['median']:.3f} x", quarters, f"{ratio['at_best']:.3f} x", f"{ratio['cpu_time']:.3f} x", *shown)
        )
    head = ("", "speed", "quartiles", "at best", "CPU time")
    return Table(title, (*head, "memory", "of the process") if memory else head, rows, chart=chart)


def overhead(figures: Figures) -> float | None:
    costs = [100 * (1 / g["against"]["bare"]["speed"]["median"] - 1) for g in figures["groups"] if "bare" in g["against"]]
    return max(costs) if costs else None


def cpu_overhead(figures: Figures) -> float | None:
    costs = [100 * (g["against"]["bare"]["cpu_time"] - 1) for g in figures["groups"] if "bare" in g["against"]]
    return max(costs) if costs else None


def least_ratio(figures: Figures) -> float | None:
    found = [g["against"]["trainer_best"]["speed"]["median"] for g in figures["groups"] if "trainer_best" in g["against"]]
    return min(found) if found else None


BOTH = ("cpu", "cuda")
COST = "titles: our step costs more than the bare loop's, at the worst length"
SECTION = Section(
    "titles_training",
    "Titles: training",
    LEGEND,
    measure,
    describe,
    tables,
    (
        Goal(COST, BOTH, 3, overhead, False, unit="%"),
        Goal(f"{COST}, in CPU time", ("cpu",), 3, cpu_overhead, False, unit="%"),
        Goal("titles: times Seq2SeqTrainer's best training, at the worst length", BOTH, 1, least_ratio),
    ),
)
