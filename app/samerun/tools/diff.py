"""Why finished runs differ: arguments, versions, machines, the first step, metrics.

    samerun diff runs/a [runs/b runs/c ...]

The others are compared with the first run. The first step that differs is the first logged one whose loss,
gradient norm or learning rate departs by more than rounding, 1e-5 of its value. A bootstrap over the labelled
rows in `predictions.jsonl` yields the 95 % interval of each headline metric. If two runs predicted the same
rows, a paired one yields the difference with its interval and a two-sided p value (Efron and Tibshirani, "An
Introduction to the Bootstrap", 1993, chapters 13 and 16; Koehn, "Statistical Significance Tests for Machine
Translation Evaluation", EMNLP 2004).

Exit codes: 0 done; 2 a folder holds no finished run.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from seqeval.metrics.sequence_labeling import get_entities

from samerun import task_scripts
from samerun.classes import confusion_matrix, decision_scores, weighted_scores
from samerun.console import number_text
from samerun.errors import InputError
from samerun.files import read_lines
from samerun.reports.tracker import read_history
from samerun.run_folder import METRICS, RUN_FILE
from samerun.text.multi_label_scores import precision_recall_f1
from samerun.text.regression import regression_scores
from samerun.text.rouge import ROUGE_METRICS, choose_tokenizer, exact_matches, row_scores

IGNORED = ("output_dir", "config", "run_name", "predictions_file")  # differ between any two runs
OWN_SECTIONS = ("arguments", "metrics", "history", "rows", "resampled")  # of `read_run`; others are facts
IGNORED_FACTS = ("name", "predictions", "launcher_process", "slurm_job")
RESAMPLES, FEWEST = 1000, 100
FEW_ROWS = 20  # of fewer, intervals are too narrow and p values too small
ROUNDING = 1e-5  # of losses and gradient norms, relative: fp32 sums in another order
MOST_CHARACTERS = 300  # of a list
SORTING = 16  # elements computed for a number, whose rank is found
MAX_ELEMENTS = 2**27  # computed for a file altogether; large files get fewer resamples

Scores = Callable[[np.ndarray], Mapping[str, float]]  # numbers of rows, which may repeat -> metrics by name


def read_run(folder: Path) -> dict[str, Any]:
    """The arguments, metrics, history and predictions of a finished run. Raises `InputError`."""
    try:
        run = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        metrics = dict(json.loads((folder / METRICS).read_text(encoding="utf-8")))
        name, lines, resampled = None, [], {}
        for path in sorted(folder.glob("predictions*.jsonl")):  # the training's, else a later prediction's
            # In one order, for rows of files in another.
            found = list(read_lines(path))
            if not all("id" in line for line in found):
                continue  # a file of the user's
            name, lines = path.name, sorted(found, key=lambda line: str(line["id"]))
            if resampled := resample(lines, metrics.get("rouge_tokenizer")):
                break
        rows = [(line["id"], _truth(line)) for line in lines]
        history = read_history(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{folder}: holds no finished run ({error}); name a run's --output_dir") from None
    read = {"metrics": metrics, "history": history, "rows": rows, "resampled": resampled}
    return {"name": str(folder), **run, **read, "predictions": name}


def _truth(line: Mapping[str, Any]) -> Any:
    """The true answer of a row; the file of a mask. Labels follow the order of a run's own list."""
    truth = line.get("reference", line.get("image"))
    return sorted(truth) if "labels" in line and isinstance(truth, list) else truth


def resample(lines: Sequence[Mapping[str, Any]], rouge_tokenizer: str | None) -> dict[str, np.ndarray]:
    """Bootstrap values of the headline metrics of a file's predictions; {} if the file has no labels."""
    first, cells = lines[0] if lines else {}, 0
    if "hd95" in first or "iou" in first:
        scores = scores_of_masks(lines)
    elif "reference" not in first:
        return {}
    elif "tags" in first:
        scores = scores_of_tags(lines)
    elif "values" in first:
        found, true = (_numbers(lines, key) for key in ("values", "reference"))
        scores, cells = scores_of_numbers(found, true), SORTING * true.size
    elif "title" in first:
        scores = scores_of_titles(lines, rouge_tokenizer)
    elif "labels" in first:
        labels = {name for line in lines for name in line["probabilities"]}
        scores, cells = scores_of_labels(lines), len(lines) * len(labels)
    elif "label" in first:
        scores = scores_of_classes(lines)
    else:
        return {}
    return bootstrap(scores, len(lines), cells)


def scores_of_classes(lines: Sequence[Mapping[str, Any]]) -> Scores:
    """accuracy, f1_macro and Matthews' correlation."""
    names = sorted({line[key] for line in lines for key in ("label", "reference")})
    numbers = {name: number for number, name in enumerate(names)}
    found, true = (np.array([numbers[line[key]] for line in lines]) for key in ("label", "reference"))

    def scores(rows: np.ndarray) -> dict[str, float]:
        confusion = confusion_matrix(found[rows], true[rows], len(numbers))
        correlation = weighted_scores(confusion)["matthews_correlation"]
        return {**decision_scores(confusion), "matthews_correlation": correlation}

    return scores


def scores_of_titles(lines: Sequence[Mapping[str, Any]], rouge_tokenizer: str | None) -> Scores:
    """The means of the ROUGE metrics and of exact_match."""
    titles, references = ([line[key] for line in lines] for key in ("title", "reference"))
    rouge = row_scores(titles, references, rouge_tokenizer or choose_tokenizer(references))
    table = np.column_stack([rouge, exact_matches(titles, references)])
    names = (*ROUGE_METRICS, "exact_match")
    return lambda rows: dict(zip(names, table[rows].mean(axis=0).tolist(), strict=True))


def _numbers(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """(rows, columns) float64; NaN for None."""
    return np.array([[*line[key].values()] for line in lines], dtype=np.float64)


def scores_of_tags(lines: Sequence[Mapping[str, Any]]) -> Scores:
    """accuracy of the words, and f1 of whole names if there are any."""
    counts = []
    for line in lines:
        names = [set(get_entities(line[key])) for key in ("tags", "reference")]
        words = [found == true for found, true in zip(line["tags"], line["reference"], strict=True)]
        counts.append([sum(words), len(words), 2 * len(names[0] & names[1]), len(names[0]) + len(names[1])])
    table = np.array(counts, dtype=np.float64)
    has_names = table[:, 3].any()

    def scores(rows: np.ndarray) -> dict[str, float]:
        right, words, common, names = table[rows].sum(axis=0)
        found = {"accuracy": right / words if words else np.nan}
        return found | ({"f1": common / names if names else np.nan} if has_names else {})

    return scores


def scores_of_numbers(found: np.ndarray, true: np.ndarray) -> Scores:
    """The metrics of a regression, as means over the columns; NaN for undefined ones. `found`, `true`: (rows,
    columns)."""

    def scores(rows: np.ndarray) -> dict[str, float]:
        known = regression_scores(found[rows], true[rows], ())
        return {name: np.nan if value is None else value for name, value in known.items()}

    return scores


def scores_of_masks(lines: Sequence[Mapping[str, Any]]) -> Scores:
    """The means over classes of each class's mean over rows: the metrics of volumes; for images, whose mean
    IoU is that of all pixels together, the IoU of an image."""
    kinds = [kind for kind in ("dice", "iou", "hd95") if kind in lines[0]]
    values = {kind: _numbers(lines, kind) for kind in kinds}
    names = {kind: f"mean_{kind}" if "hd95" in kinds else f"{kind} of an image" for kind in kinds}

    def scores(rows: np.ndarray) -> dict[str, float]:
        # nanmean of a class that no row has
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            return {names[kind]: float(np.nanmean(np.nanmean(values[kind][rows], axis=0))) for kind in kinds}

    return scores


def scores_of_labels(lines: Sequence[Mapping[str, Any]]) -> Scores:
    """f1_micro at 0.5 and of the labels given (`tuned_*`). If the lines have all probabilities, and so name
    all labels, f1_macro, too, and average_precision_micro."""
    names = list(dict.fromkeys(name for line in lines for name in line["probabilities"]))
    has_all = all(len(line["probabilities"]) == len(names) for line in lines)
    probabilities = np.array([[line["probabilities"].get(name, 0.0) for name in names] for line in lines])
    given, truth = (
        np.array([[name in line[key] for name in names] for line in lines]) for key in ("labels", "reference")
    )
    decided, occurs = {"": probabilities >= 0.5, "tuned_": given}, truth.any(axis=0)
    # Average precision is the mean over positives of the precision down to the last cell with their score.
    order = np.argsort(-probabilities, axis=None, kind="stable")
    ranked, hits, row_of = probabilities.ravel()[order], truth.ravel()[order], order // len(names)
    ends = np.searchsorted(-ranked, -ranked, side="right") - 1

    def scores(rows: np.ndarray) -> dict[str, float]:
        found, drawn = {}, truth[rows]
        # Without the labels whose rows were not drawn: as 0 they would pull all resamples down.
        counted = drawn.any(axis=0) | ~occurs
        for prefix, predicted in decided.items():
            micro, macro = (precision_recall_f1(predicted[rows], drawn, axis)[2] for axis in (None, 0))
            of_labels = float(macro[counted].mean()) if counted.any() else np.nan
            found |= {f"{prefix}f1_micro": float(micro)} | (
                {f"{prefix}f1_macro": of_labels} if has_all else {}
            )
        if not has_all:
            return found
        times = np.bincount(rows, minlength=len(lines)).astype(float)[row_of]
        positive = times * hits
        precision = (np.cumsum(positive) / np.maximum(np.cumsum(times), 1))[ends]
        total = positive.sum()
        average = float((positive @ precision) / total) if total else np.nan
        return {**found, "average_precision_micro": average}

    return scores


def bootstrap(scores: Scores, rows: int, elements: int = 0) -> dict[str, np.ndarray]:
    """(1 + resamples,) values of each metric: of the file, then of as many rows drawn from it with
    replacement; NaN where a metric is undefined. Without the metrics that are undefined for the file.

    The draws depend on `rows` alone, so the values of two runs over the same rows are paired. `elements`: of
    the predictions of all rows; the more there are, the fewer resamples are drawn, at least FEWEST.
    """
    resamples = int(np.clip(MAX_ELEMENTS // max(1, elements), FEWEST, RESAMPLES))
    rng = np.random.default_rng(0)
    drawn = [scores(np.arange(rows)), *(scores(rng.integers(rows, size=rows)) for _ in range(resamples))]
    known = [name for name, value in drawn[0].items() if not np.isnan(value)]
    return {name: np.array([values[name] for values in drawn], dtype=np.float64) for name in known}


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % percentile interval of a metric's values from `bootstrap`; NaN if no resample has one."""
    known = values[1:][~np.isnan(values[1:])]
    low, high = np.percentile(known, (2.5, 97.5)) if len(known) else (np.nan, np.nan)
    return float(low), float(high)


def paired_difference(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float, float]:
    """(difference, its 95 % interval's two ends, two-sided p value) of a metric's values from `bootstrap` for
    two runs."""
    shorter = min(len(ours), len(theirs))
    differences = ours[:shorter] - theirs[:shorter]
    known = differences[1:][~np.isnan(differences[1:])]
    # The smallest p that so many resamples can show is not 0.
    below, above = ((known <= 0).sum() + 1) / (len(known) + 1), ((known >= 0).sum() + 1) / (len(known) + 1)
    return float(differences[0]), *interval(differences), float(min(1.0, 2 * min(below, above)))


def differing(runs: list[dict[str, Any]], values_of: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
    """A line for each value that differs between the runs, "none" without one. `values_of`: run -> values by
    name."""
    values = [values_of(run) for run in runs]
    found = []
    for name in sorted({name for each in values for name in each}):
        own = [each.get(name) for each in values]
        if any(value != own[0] for value in own):
            found.append(f"  {name}: {', '.join(map(_in_short, own))}")
    return found or ["  none"]


def _in_short(value: Any) -> str:
    """A value on the console. Of a list that is too long, its length and a hash."""
    text = str(value)
    if not isinstance(value, list) or len(text) <= MOST_CHARACTERS:
        return text
    return f"{len(value)} entries ({hashlib.sha256(text.encode()).hexdigest()[:6]})"


def arguments_of(run: dict[str, Any]) -> dict[str, Any]:
    return {f"--{name}": value for name, value in run["arguments"].items() if name not in IGNORED}


def facts_of(run: dict[str, Any]) -> dict[str, Any]:
    """What was in force, without the arguments: launcher, batch, labels, versions, ..., by dotted names."""
    found: dict[str, Any] = {}
    entries = [([name], value) for name, value in run.items() if name not in OWN_SECTIONS]
    for names, value in entries:  # grows
        if isinstance(value, dict):
            entries += [([*names, name], part) for name, part in value.items()]
        elif ".".join(names) not in IGNORED_FACTS:
            found[".".join(names)] = value
    return found


def first_departure(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Where the training of `ours` departs from that of `theirs`, in words."""
    steps = {event["step"]: event for event in theirs["history"] if "loss" in event}
    both = [event for event in ours["history"] if event["step"] in steps and "loss" in event]
    for event in both:
        for name in ("learning_rate", "loss", "grad_norm"):
            own, known = event.get(name), steps[event["step"]].get(name)
            if own is not None and known is not None and abs(own - known) > ROUNDING * abs(known):
                return f"step {event['step']}: {name} {own:.7g} against {known:.7g}"
    return f"none among {len(both)} logged steps" if both else "no step was logged by both"


def report(runs: list[dict[str, Any]]) -> list[str]:
    """Lines of text: what differs, metrics, and how sure their differences are."""
    names = [f"[{number}]" for number in range(len(runs))]
    lines = [f"{name} {run['name']}" for name, run in zip(names, runs, strict=True)]
    if len(runs) > 1:
        lines += ["", "arguments that differ", *differing(runs, arguments_of)]
        lines += ["", "machine, versions, batch, labels that differ", *differing(runs, facts_of), ""]
    for name, run in zip(names[1:], runs[1:], strict=True):
        lines.append(f"{name} and [0], first step that differs: {first_departure(run, runs[0])}")
    metrics = [
        name
        for name in runs[0]["metrics"]
        if name.startswith(("eval_", "test_", "best_", "train_loss", "train_runtime", "peak_memory"))
        and all(isinstance(run["metrics"].get(name), int | float) for run in runs)
    ]
    lines += ["", f"{'metric':<36}{''.join(f'{name:>14}' for name in names)}"]
    for name in metrics:
        lines.append(f"{name:<36}" + "".join(f"{number_text(run['metrics'][name]):>14}" for run in runs))
    contents, labels = (
        {str(run.get("fingerprint", {}).get(name)) for run in runs}
        for name in ("validation_content", "label_list")
    )
    if len(contents) > 1 and len(labels) == 1:  # the content has the labels' numbers
        lines.append("eval_* and best_*: of other validation rows; they cannot be compared")
    for name, run in zip(names, runs, strict=True):
        if run["resampled"]:
            few = " (too few for these intervals and p values)" if len(run["rows"]) < FEW_ROWS else ""
            lines += ["", f"{name} {len(run['rows'])} rows of {run['predictions']}, bootstrap{few}"]
        for metric, values in run["resampled"].items():
            own, low, high = map(number_text, (values[0], *interval(values)))
            lines.append(f"  {metric:<34}{own:>10}   95 % {low} to {high}")
    for name, run in zip(names[1:], runs[1:], strict=True):
        if not run["resampled"] or run["rows"] != runs[0]["rows"]:
            problem = "predicted different rows, or one has no predictions*.jsonl of labelled rows"
            lines += ["", f"{name} and [0] {problem}"]
            continue
        lines += ["", f"{name} minus [0], the same rows, paired bootstrap"]
        ours, theirs = run["resampled"], runs[0]["resampled"]
        for metric in (name for name in theirs if name in ours):
            *found, p = paired_difference(ours[metric], theirs[metric])
            difference, low, high = map(number_text, found)
            lines.append(f"  {metric:<34}{difference:>10}   95 % {low} to {high}   p {p:.4f}")
    return lines


def main(argv: list[str]) -> int:
    parser = task_scripts.parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    options = parser.parse_args(argv)
    runs = [read_run(folder) for folder in options.runs]
    print(*report(runs), sep="\n")
    return 0
