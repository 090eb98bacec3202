"""Classifiers: predictions per second."""

from typing import Any

from benchmarking.contest import Stages, contest
from benchmarking.context import Bench
from benchmarking.report import Report, Section, two_digits

BATCHES = (1, 4, 16, 64)
CONTENDERS: dict[str, Stages] = {
    "ours": [[{}, *({"per_device_eval_batch_size": rows} for rows in BATCHES[1:])]],
    "pipeline": [
        [{"sorted": False, "batch_size": rows} for rows in BATCHES],
        [{"sorted": True, "batch_size": rows} for rows in BATCHES[1:]],
    ],
    "sentence_transformers": [[{"batch_size": rows} for rows in BATCHES[1:]]],
}
TEXTS = {"short": "short texts", "mixed": "texts of mixed length"}
LEGEND = """`ours` is what `samerun.load` and `predict.py --text` use, with its defaults or that many rows
at a time; `pipeline` is transformers' pipeline, also with texts that its user has sorted by length;
`sentence_transformers` is its `encode`, which sorts by length, so embeddings by the same encoder.
Tokenization is included, loading is not."""


def measure(bench: Bench) -> Report:
    size, searched, measured = bench.size("prediction"), [], []
    inputs = {"train_file": bench.rows("short", 2000), "rows": 2000}
    settings, model = bench.with_classifier(size | inputs | {"classifier": str(bench.folder / "head")})
    bench.run([("prediction.model", {})], settings)
    others = bench.others("prediction", tuple(CONTENDERS)[1:])
    for texts, name in TEXTS.items():
        count = size[f"{texts}_rows"]
        rows = {"train_file": bench.rows(texts, count), "batch_size": 1}
        own = settings | rows | {"steps": count, "search_steps": count // 4}
        chosen = {other: CONTENDERS[other] for other in ("ours", *others)}
        found = contest(bench, "prediction", chosen, own, {"texts": f"{name}, {count}"})
        searched += found.searched
        for row in found.measured:
            run, mine = found.runs[row[""]][0], found.runs["ours"][0]
            compared = run is not mine and run["probabilities"]
            row["largest difference"] = difference(run, mine) if compared else None
        measured += found.measured
    return {
        "data": ", ".join(bench.source(texts).name for texts in TEXTS),
        "model": f"{model}, {size['labels']} labels with a random head",
        "about": f"{size['rounds']} round(s); settings searched with a quarter of the texts; a row is a text",
        "tables": {"Predictions per second": measured, "Settings tried": searched},
    }


def difference(run: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two contenders' probabilities."""
    pairs = zip(run["probabilities"], other["probabilities"], strict=True)
    return two_digits(max(abs(one[label] - two[label]) for one, two in pairs for label in two))


SECTION = Section("prediction", "Prediction of classifiers", LEGEND, measure)
