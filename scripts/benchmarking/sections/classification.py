"""Classifiers: ours beside a bare loop, Trainer and the hand-written loop, one epoch over the same rows."""

from __future__ import annotations

import functools
import statistics
from typing import Any

from benchmarking.context import Bench
from benchmarking.figures import quartiles, ratios, spread, turns
from benchmarking.report import Chart, Figures, Goal, Section, Table

OTHERS = ("bare", "trainer_best", "trainer", "padded", "ours_random", "ours_whole", "ours_bf16", "ours_compiled")
SLOW = ("trainer", "padded", "ours_random", "ours_whole", "ours_compiled")  # every other round
SAME_BATCHES = ("bare", "ours_compiled")
LEARNING_RATE = 3e-4  # so that an epoch over a few hundred rows learns something that can be compared
EQUAL_LOSS, EQUAL_PRECISION = 0.02, 0.02  # quality that counts as equal: relative, absolute; seeds differ by as much
MEDIANS = (
    *("samples_per_second", "tokens_per_second", "padding_share", "step_p50", "memory_mb", "peak_memory_mb", "startup_seconds"),
    *("train_seconds", "cpu_seconds", "train_loss", "held_loss", "held_precision"),
)
LEGEND = """`ours` is `app/classify.py` itself, from its arguments to the end of training; `bare` a plain PyTorch loop over
the very same batches and passes, with our dropout; `trainer_best` transformers' Trainer with fused AdamW and batches of
similar length, `trainer` as it comes; `padded` the hand-written DDP script that many start from (local_rank,
DistributedSampler, reduce_tensor, every text padded to max_length), on one process; `ours_random` ours with
`--length_grouping false`, `ours_whole` ours with each batch in one pass, `ours_bf16` with `--mixed_precision bf16` on a CPU
that multiplies such numbers itself, `ours_compiled` with `--torch_compile` on a GPU, the time of compiling included. Tokens
are real ones, without padding. Memory is the peak while training, above what the process held before its first step and (of
the process) with everything. Start-up is the time from the start of the process to its first batch, in brackets that of the
first run, when ours had not kept its tokens. Quality is that of the trained model on rows that nobody was trained on: the
loss, and the average precision over all pairs of row and label."""


def measure(bench: Bench, kind: str) -> Figures:
    source, size = bench.source(kind), bench.size(kind)
    settings = {name: size[name] for name in ("rows", "held_rows", "batch_size", "max_length")}
    settings["rows"] = bench.options.rows or settings["rows"]
    settings["train_file"] = bench.rows(kind, settings["rows"] + settings["held_rows"])
    settings |= {"learning_rate": LEARNING_RATE, "model": bench.options.model}
    model = "MODEL"
    if settings["model"] is None:
        settings["model"] = str(bench.folder / f"{kind}_model")
        bench.run("classification", ["model"], settings | bench.size("classifier"))
        model = "BERT of {layers} layers, {hidden} wide, random weights".format(**bench.size("classifier"))
    rounds = bench.options.rounds or size["rounds"]
    others = bench.others(kind, (name for name in OTHERS if applies(bench, name)))
    results = []
    for number in range(rounds):
        for other in others:
            if other in SLOW and number % 2:
                continue
            names = [partner(bench.kind, other), other]
            pair = bench.run("classification", names, settings | {"seed": bench.options.seed + number}, True)
            for result in pair:
                results.append(result | {"round": number, "pair": other})
                speed, loss = result["samples_per_second"], result["held_loss"]
                bench.say(
                    f"{kind} round {number + 1} {result['contender']:<13}{speed:9.2f} samples/s, held-out loss {loss:.4f}"
                )
    return {
        "data": source.name,
        "model": bench.options.model_name if model == "MODEL" else model,
        **{name: settings[name] for name in ("batch_size", "max_length", "held_rows")},
        **{name: results[0][name] for name in ("rows", "tokens")},
        "contenders": contenders(results),
        "against": {name: against(results, name, bench.per_turn) for name in others},
        "runs": [short(result) for result in results],
    }


def applies(bench: Bench, other: str) -> bool:
    """A GPU makes one pass of a batch as it is, and computes in bf16 throughout. A CPU compiles for longer than the benchmark
    trains, and gains nothing."""
    match other:
        case "ours_compiled":
            return bench.kind == "cuda"
        case "ours_whole":
            return bench.kind == "cpu"
        case "ours_bf16":
            return bench.kind == "cpu" and bench.precision == "no" and bench.machine["cpu_has_bf16"]
    return True


def partner(kind: str, other: str) -> str:
    """Which of ours takes turns with another: the bare loop pads, which ours does not on a GPU."""
    return "ours_padded" if (kind, other) == ("cuda", "bare") else "ours"


def short(result: dict[str, Any]) -> dict[str, Any]:
    """A run without its single steps."""
    return {name: value for name, value in result.items() if name not in ("step_seconds", "step_cpu_seconds")}


def contenders(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each contender; `at_best`: samples/s of an epoch whose every step took the least time of all its runs.

    Runs of one seed have the same batches, so their steps can be compared.
    """
    found = {}
    for name in dict.fromkeys(result["contender"] for result in results):
        runs = [result for result in results if result["contender"] == name]
        figures = {key: statistics.median(run[key] for run in runs) for key in MEDIANS}
        figures["at_best"] = runs[0]["rows"] / least([run for run in runs if run["round"] == runs[0]["round"]])
        found[name] = figures | {"startup_first": runs[0]["startup_seconds"], "runs": len(runs)}
    return found


def least(runs: list[dict[str, Any]]) -> float:
    return sum(min(times) for times in zip(*(run["step_seconds"] for run in runs), strict=True))


def against(results: list[dict[str, Any]], other: str, per_turn: int) -> dict[str, Any]:
    """Ours against another contender, over the runs in which the two took turns."""
    mine, theirs = (
        sorted((r for r in results if r["pair"] == other and r["contender"] == name), key=lambda r: r["round"])
        for name in (next(r["contender"] for r in results if r["pair"] == other), other)
    )
    pairs = list(zip(mine, theirs, strict=True))
    steps = [
        ratio for a, b in pairs for ratio in ratios(turns(a["step_seconds"], per_turn), turns(b["step_seconds"], per_turn))
    ]
    return {
        "speed": spread(b["train_seconds"] / a["train_seconds"] for a, b in pairs),
        "cpu_time": spread(a["cpu_seconds"] / b["cpu_seconds"] for a, b in pairs),
        "memory": statistics.median(a["memory_mb"] / max(b["memory_mb"], 1.0) for a, b in pairs),
        "rounds": len(pairs),
        "step_time": quartiles(steps) if other in SAME_BATCHES else None,
        "loss": statistics.median(a["held_loss"] / b["held_loss"] - 1 for a, b in pairs),
        "precision": statistics.median(a["held_precision"] - b["held_precision"] for a, b in pairs),
    }


def describe(f: Figures) -> str:
    trained = (
        f"{f['rows']} rows drawn at random, {f['tokens']} tokens, batch {f['batch_size']}, at most {f['max_length']} tokens"
    )
    return f"{trained}; learning rate {LEARNING_RATE:g}; quality on {f['held_rows']} more rows"


def tables(f: Figures) -> list[Table]:
    speed_rows = [
        (
            name, c["runs"], f"{c['samples_per_second']:.2f}", f"{c['at_best']:.2f}", f"{c['tokens_per_second']:.0f}",
            f"{c['padding_share']:.1%}", f"{c['step_p50'] * 1000:.1f} ms", f"{c['memory_mb']:.0f} MiB",
            f"{c['peak_memory_mb']:.0f} MiB", f"{c['startup_seconds']:.1f} s ({c['startup_first']:.1f} s)",
            f"{c['train_loss']:.4f}", f"{c['held_loss']:.4f}", f"{c['held_precision']:.4f}",
        )
        for name, c in f["contenders"].items()
    ]  # fmt: skip
    head = (
        *("", "runs", "samples/s", "at best", "tokens/s", "padding", "step p50", "memory", "of the process", "start-up"),
        *("training loss", "held-out loss", "held-out precision"),
    )
    ratio_rows = [
        (
            name, a["rounds"], f"{a['speed']['median']:.3f} x", f"{a['speed']['low']:.3f}, {a['speed']['high']:.3f}",
            f"{a['cpu_time']['median']:.3f} x", f"{a['memory']:.2f} x", f"{a['loss']:+.1%}", f"{a['precision']:+.4f}",
            quality(a),
        )
        for name, a in f["against"].items()
    ]  # fmt: skip
    notes = []
    for other, words in (("bare", "the bare loop's time"), ("ours_compiled", "the time of compiled layers")):
        if other in f["against"]:
            step = f["against"][other]["step_time"]
            quarters = f"quartiles {step['low'] - 1:+.1%} and {step['high'] - 1:+.1%}"
            notes.append(f"Step by step on the same batches, ours costs {step['median'] - 1:+.1%} of {words} ({quarters}).")
    return [
        Table(
            "Speed, memory, quality", head, speed_rows,
            chart=Chart("samples/s", {"": {name: c["samples_per_second"] for name, c in f["contenders"].items()}}),
        ),
        Table(
            "Ours against the others",
            ("", "rounds", "speed", "least, most", "CPU time", "memory", "held-out loss", "precision", "quality"),
            ratio_rows, "\n".join(notes),
            Chart("times as fast as", {"": {name: a["speed"]["median"] for name, a in f["against"].items()}}),
        ),
    ]  # fmt: skip


def quality(ratio: dict[str, Any]) -> str:
    """Ours' beside the other's. Worse in one way is worse."""
    if ratio["loss"] > EQUAL_LOSS or ratio["precision"] < -EQUAL_PRECISION:
        return "**worse**"
    return "better" if ratio["loss"] < -EQUAL_LOSS or ratio["precision"] > EQUAL_PRECISION else "equal"


def worse(figures: Figures, other: str) -> str | None:
    ratio = figures["against"][other]
    if quality(ratio) != "**worse**":
        return None
    return f"held-out loss {ratio['loss']:+.1%}, precision {ratio['precision']:+.4f}"


def speed(figures: Figures, other: str) -> float | None:
    return figures["against"][other]["speed"]["median"] if other in figures["against"] else None


def faster(texts: str, kinds: tuple[str, ...], other: str, words: str, bound: float) -> Goal:
    return Goal(
        f"classification, {texts}: times {words}, at equal quality",
        kinds,
        bound,
        lambda f: speed(f, other),
        but=lambda f: worse(f, other),
    )


def overhead(figures: Figures) -> float | None:
    ratio = figures["against"].get("bare")
    return 100 * (ratio["step_time"]["median"] - 1) if ratio else None


def cpu_overhead(figures: Figures) -> float | None:
    ratio = figures["against"].get("bare")
    return 100 * (ratio["cpu_time"]["median"] - 1) if ratio else None


def goals(texts: str) -> tuple[Goal, ...]:
    cost = f"classification, {texts}: our step costs more than the bare loop's"
    costs = (
        Goal(cost, ("cpu", "cuda"), 3, overhead, False, unit="%"),
        Goal(f"{cost}, in CPU time", ("cpu",), 3, cpu_overhead, False, unit="%"),
    )
    best, loop = "Trainer's best", "the loop that pads to max_length"
    common = (*costs, faster(texts, ("cuda",), "trainer_best", best, 1.5), faster(texts, ("cuda",), "padded", loop, 3))
    if texts == "short texts":
        return (*common, faster(texts, ("cpu",), "trainer_best", best, 1))
    return (
        *common,
        faster(texts, ("cpu",), "trainer", "Trainer's defaults", 3.5),
        faster(texts, ("cpu",), "trainer_best", best, 1.25),
        faster(texts, ("cpu",), "padded", loop, 4),
    )


def section(kind: str, texts: str) -> Section:
    title = f"Classification of {texts}"
    return Section(kind, title, LEGEND, functools.partial(measure, kind=kind), describe, tables, goals(texts))


SHORT = section("short", "short texts")
LONG_TAILED = section("long_tailed", "long-tailed texts")
