"""Classifiers: predictions per second, and the start of a prediction."""

import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarking.contest import Stages, contest
from benchmarking.context import Bench
from benchmarking.processes import REPOSITORY, environment
from benchmarking.ratios import spread, two_digits
from benchmarking.report import BOTH, Goal, Report, Row, Section, table

BATCHES = (1, 4, 16, 64)
CONTENDERS: dict[str, Stages] = {
    "ours": [[{}, *({"per_device_eval_batch_size": rows} for rows in BATCHES[1:])]],
    "pipeline": [
        [{"sorted": False, "batch_size": rows} for rows in BATCHES],
        [{"sorted": True, "batch_size": rows} for rows in BATCHES[1:]],
    ],
    "sentence_transformers": [[{"batch_size": rows} for rows in BATCHES[1:]]],
}
FASTER = "prediction, {}: times the best of the others"
START = "predict.py --text: longer than importing torch and transformers and loading the model"
TEXTS = {"short": "short texts", "mixed": "texts of mixed length"}
LEGEND = """`ours` is what `samerun.load` and `predict.py --text` use, with its defaults or that many rows
at a time; `pipeline` is transformers' pipeline, also with texts that its user has sorted by length;
`sentence_transformers` is its `encode`, which sorts by length, so embeddings by the same encoder.
Tokenization is included, loading is not. Start: whole processes, after one that is not counted."""
BASELINE = (
    "import sys, torch, transformers as t; t.AutoModelForSequenceClassification.from_pretrained(sys.argv[1])"
)


def measure(bench: Bench) -> Report:
    size, searched, measured, goals = bench.size("prediction"), [], [], {}
    settings, model = bench.with_classifier(
        size
        | {"train_file": bench.rows("short", 2000), "rows": 2000, "classifier": str(bench.folder / "head")}
    )
    bench.run([("prediction.model", {})], settings)
    others = bench.others("prediction", tuple(CONTENDERS)[1:])
    for texts, name in TEXTS.items():
        count = size[f"{texts}_rows"]
        own = {
            "train_file": bench.rows(texts, count),
            "steps": count,
            "search_steps": count // 4,
            "batch_size": 1,
        }
        chosen = {"ours": CONTENDERS["ours"], **{other: CONTENDERS[other] for other in others}}
        found = contest(bench, "prediction", chosen, settings | own, {"texts": f"{name}, {count}"})
        searched += found.searched
        for row in found.measured:
            run, mine = found.runs[row[""]][0], found.runs["ours"][0]
            compared = run is not mine and run["probabilities"]
            row["largest difference"] = difference(run, mine) if compared else None
        measured += found.measured
        goals[FASTER.format(name)] = min(found.ratios.values()), None
    starts, longer = starting(bench, settings["classifier"], size["rounds"])
    goals[START] = longer, None
    return {
        "data": ", ".join(bench.source(texts).name for texts in TEXTS),
        "model": f"{model}, {size['labels']} labels with a random head",
        "about": f"{size['rounds']} round(s); settings searched with a quarter of the texts; a row is a text",
        "tables": [
            table("Predictions per second", measured),
            table("Settings tried", searched),
            table("Start of a prediction of one text", starts),
        ],
        "goals": goals,
    }


def difference(run: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two contenders' probabilities."""
    pairs = zip(run["probabilities"], other["probabilities"], strict=True)
    return two_digits(max(abs(one[label] - two[label]) for one, two in pairs for label in two))


def starting(bench: Bench, model: str, rounds: int) -> tuple[list[Row], float]:
    """(rows of the table, median seconds that predict.py takes longer)."""
    commands = {
        "predict.py --text": [REPOSITORY / "app" / "predict.py", model, "--text", "Nothing of interest"],
        "python -c 'import torch, transformers', loading the model": ["-c", BASELINE, model],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds + 1):
        for name, words in commands.items():
            started = time.perf_counter()
            subprocess.run(
                [sys.executable, *words], check=True, capture_output=True,
                env=environment(bench.options.threads, bench.folder),
            )  # fmt: skip
            seconds[name].append(time.perf_counter() - started)
    rows = [{"": name, "seconds": two_digits(spread(each[1:]))} for name, each in seconds.items()]
    ours, other = (each[1:] for each in seconds.values())
    return rows, statistics.median(a - b for a, b in zip(ours, other, strict=True))


GOALS = (
    *(Goal(FASTER.format(name), BOTH, 1.5) for name in TEXTS.values()),
    Goal(START, BOTH, 1, False, " s"),
)
SECTION = Section("prediction", "Prediction of classifiers", LEGEND, measure, GOALS)
