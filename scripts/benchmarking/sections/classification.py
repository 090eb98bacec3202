"""Classifiers: ours against a bare loop, other tools and a hand-written loop, one epoch over the same
rows."""

import statistics
from functools import partial
from typing import Any

from benchmarking.context import Bench
from benchmarking.ratios import Run, compare, merge, speed_row
from benchmarking.report import CPU, GPU, Goal, Report, Row, Section, overhead_goals, overhead_values, table

OTHERS = ("bare", "trainer_best", "trainer", "padded")
TOOLS = ("trainer_best", "accelerate", "lightning", "simpletransformers")
SLOW = ("trainer", "padded")  # run in every other round
WORDS = {
    "trainer": "Trainer's defaults", "trainer_best": "Trainer's best",
    "padded": "the loop that pads to max_length",
}  # fmt: skip
OVERHEAD = "classification, {}: our step costs more than the bare loop's"
FASTER = "classification, {}: times {}, at equal quality"
TEXTS = {"short": "short texts", "mixed": "texts of mixed length"}
LEARNING_RATE = 3e-4  # high enough to learn something in an epoch over a few hundred rows
EQUAL_LOSS, EQUAL_PRECISION = 0.02, 0.02  # differences that seeds cause too: relative, absolute
OURS = "`ours` is `app/classify.py` itself, from its arguments to the end of training."
MEASURED = """Tokens do not include padding. Memory is the peak during training: above the memory before the
first step, and of the whole process. Start-up lasts from the start of the process to its first step. Quality
is measured on held-out rows: the loss, and the average precision over all pairs of row and label."""
LEGEND = f"""{OURS} `bare` is a plain PyTorch loop over the same micro-batches with the task's model, dropout
and loss. `trainer_best` is transformers' Trainer with fused AdamW and batches of similar length, `trainer`
the Trainer with its defaults. `padded` is the loop of many hand-written scripts: every text padded to
max_length, default AdamW, the loss read in every step. {MEASURED}"""
TOOLS_LEGEND = f"""{OURS} The others train the same model on the same rows for as many steps, each with its
best settings. `trainer_best` is transformers' Trainer with fused AdamW and batches of similar length.
`accelerate` is the loop of Accelerate's examples, `lightning` Lightning's Trainer; both use random batches,
padding to the longest row and fused AdamW. `simpletransformers` always pads to max_length. {MEASURED}"""


def measure(bench: Bench, name: str, texts: str, others: tuple[str, ...]) -> Report:
    source, size = bench.source(texts), bench.size(name)
    settings = {name: size[name] for name in ("rows", "eval_rows", "batch_size", "max_length")}
    settings |= {"rows": bench.options.rows or size["rows"], "learning_rate": LEARNING_RATE}
    settings["train_file"] = bench.rows(texts, settings["rows"] + settings["eval_rows"])
    settings, model = bench.with_classifier(settings)
    pairs: dict[str, list[list[Run]]] = {other: [] for other in bench.others(name, others)}
    for number in range(bench.options.rounds or size["rounds"]):
        for other in pairs:
            if other in SLOW and number % 2:
                continue
            jobs = ["classification.ours", f"classification.{other}"]
            pairs[other].append(bench.run(jobs, settings | {"seed": bench.options.seed + number}))
            for run in pairs[other][-1]:
                speed = f"{settings['rows'] / sum(run['seconds']):9.2f} samples/s"
                print(f"{name} round {number + 1} {run['contender']:<18}{speed}", flush=True)
    tokens, limits = next(iter(pairs.values()))[0][0]["tokens"], f"at most {settings['max_length']} tokens"
    trained = f"{settings['rows']} random rows, {tokens} tokens, batch {settings['batch_size']}, {limits}"
    runs = {"ours": [ours for each in pairs.values() for ours, _ in each]}
    runs |= {other: [theirs for _, theirs in each] for other, each in pairs.items()}
    rows = [contender_row(name, each, settings["rows"], bench.per_turn) for name, each in runs.items()]
    compared = [against(other, *zip(*each, strict=True)) for other, each in pairs.items()]
    return {
        "data": source.name,
        "model": model,
        "about": f"{trained}; learning rate {LEARNING_RATE:g}; quality on {settings['eval_rows']} other rows",
        "tables": [
            table("Speed, memory, quality", rows, "", "samples/s"),
            table("Ours against the others", compared, "", "speed (quartiles)"),
        ],
        "goals": goal_values(pairs, compared, TEXTS[texts]),
    }


def contender_row(name: str, runs: list[Run], count: int, per_turn: int) -> Row:
    """A contender's medians over its runs. Each run is an epoch over `count` rows."""
    speed = speed_row(merge(runs, one_turn_per_run=True), count, "samples")
    return {
        "": name,
        "runs": speed.pop("turns"),
        "samples/s": speed.pop("samples/s"),
        "tokens/s": runs[0]["tokens"] / statistics.median(sum(run["seconds"]) for run in runs),
        "step p50, ms": 1000 * statistics.median(merge(runs)["seconds"]) / per_turn,
        **speed,
        "start-up, s": statistics.median(run["startup_seconds"] for run in runs),
        **{
            key: statistics.median(run[key] for run in runs)
            for key in ("held-out loss", "held-out precision")
        },
    }


def against(other: str, ours: tuple[Run, ...], theirs: tuple[Run, ...]) -> Row:
    """Ours against another contender by epoch; single steps have different batches."""
    pairs = list(zip(ours, theirs, strict=True))
    loss = statistics.median(a["held-out loss"] / b["held-out loss"] - 1 for a, b in pairs)
    precision = statistics.median(a["held-out precision"] - b["held-out precision"] for a, b in pairs)
    return {
        "": other,
        "rounds": len(pairs),
        **compare(merge(ours, one_turn_per_run=True), merge(theirs, one_turn_per_run=True)),
        "held-out loss, %": 100 * loss,
        "precision": precision,
        "quality": quality(loss, precision),
    }


def quality(loss: float, precision: float) -> str:
    """Rates our quality against the other's: "**worse**" if either difference is."""
    if loss > EQUAL_LOSS or precision < -EQUAL_PRECISION:
        return "**worse**"
    return "better" if loss < -EQUAL_LOSS or precision > EQUAL_PRECISION else "equal"


def goal_values(
    pairs: dict[str, list[list[Run]]], compared: list[Row], texts: str
) -> dict[str, tuple[float, str | None]]:
    # The bare loop has the same batches as ours, so its steps can be compared one by one.
    steps = [compare(*map(merge, zip(*pairs["bare"], strict=True)))] if "bare" in pairs else []
    values: dict[str, Any] = overhead_values(OVERHEAD.format(texts), steps)
    for row in compared:
        if row[""] in WORDS:
            worse = f"held-out loss {row['held-out loss, %']:+.1f}%, precision {row['precision']:+.4f}"
            reason = worse if row["quality"] == "**worse**" else None
            values[FASTER.format(texts, WORDS[row[""]])] = row["speed (quartiles)"]["median"], reason
    return values


def section(kind: str, *more: tuple[tuple[str, ...], str, float]) -> Section:
    """`more`: further goals as (devices, contender, minimum speed ratio)."""
    texts = TEXTS[kind]
    speeds = ((GPU, "trainer_best", 1.5), (GPU, "padded", 3), *more)
    goals = (Goal(FASTER.format(texts, WORDS[other]), devices, bound) for devices, other, bound in speeds)
    measure_kind = partial(measure, name=kind, texts=kind, others=OTHERS)
    return Section(
        kind,
        f"Classification of {texts}",
        LEGEND,
        measure_kind,
        (*overhead_goals(OVERHEAD.format(texts)), *goals),
    )


SHORT = section("short", (CPU, "trainer_best", 1))
MIXED = section("mixed", (CPU, "trainer", 3.5), (CPU, "trainer_best", 1.25), (CPU, "padded", 4))
BESIDE_TOOLS = Section(
    "tools", "Classification beside other tools", TOOLS_LEGEND,
    partial(measure, name="tools", texts="mixed", others=TOOLS),
)  # fmt: skip
