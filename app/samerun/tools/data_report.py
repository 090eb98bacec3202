"""Checks data before training: duplicate rows, test rows that are in the training data, equal rows with
different labels, rare labels, lengths. Every finding comes with advice.

    samerun data-report [--output report.html] classify --train_file train.csv \\
        --test_file test.csv

ARGS are the training command's arguments for files, columns and model. --output_dir is optional and stays
untouched. Without --model_name_or_path, text lengths are in words instead of tokens. Files that a training
would reject end the report.

    --output FILE   also write a page (.html) or the numbers (.json)

Exit codes: 0 done, with or without findings; 2 bad input.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from samerun import task_scripts
from samerun.console import plain_table
from samerun.data.cache import content_key
from samerun.data.tokens import Ragged
from samerun.errors import InputError, listed
from samerun.files import write_json, write_text
from samerun.images.data import map_rows
from samerun.images.image_task import ImageTask
from samerun.launch import Launch
from samerun.plan import Modes
from samerun.reports.figures import COLORS, NAME, as_image, bars, legend_below, new_figure
from samerun.reports.page import render
from samerun.task import ReportContent, Section, Task
from samerun.text.regression import Numbers
from samerun.text.text import TextTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORD = re.compile(r"\w+")
AXES = ("left-right", "back-front", "down-up")
MAX_CELL_WIDTH = 100  # characters of a printed cell
MOST_LABELS, MOST_PAIRS, MOST_EXAMPLES = 30, 15, 5
FEW_ROWS = 10  # a label with fewer training rows is rare
MUCH_TRUNCATED = 0.05  # share of rows
MOST_LABELS_OF_A_ROW = 50  # label pairs of rows with more are not counted
SMALL_SHARE = 0.01  # of the area: a smaller class hardly influences means over pixels
ADVICE = {
    "repeated": "Leave repetitions out: they weigh several times in the loss and in metrics.",
    "contradicting": "Correct them: no model can be right about both.",
    "leaked": "Take them out of training: scores on training rows are too high.",
    "chosen": "Take them out of validation: the best model and its thresholds are chosen there.",
    "empty": "Fill them or leave them out.",
    "truncated": "Raise --max_length, if the model can read more: longer texts are truncated.",
    "rare": "Find more rows of them, merge them, or do not trust their scores.",
    "not in validation": "Give --validation_file with rows of each: in macro averages their F1 is 0.",
    "together": "Merge such labels, or add rows that have one of them only: no model can tell them apart.",
    "single": "Keep no larger share of them than expected in use: they teach no border between classes.",
    "no train": "Add masks with them, or drop the classes: they cannot be learnt.",
    "no validation": "Move masks with them to the validation rows: their metrics are undefined.",
    "small": "Increase their weight (--class_weights, --dice_weight); compare their own scores, not a mean "
    "over pixels.",
}
Areas = Mapping[str, tuple[Sequence[str], np.ndarray]]  # split -> (class names, (rows, classes) pixels)


# The rows of any task


class Rows(NamedTuple):
    """Properties of a split's rows, in their order."""

    contents: Sequence[Hashable]  # a key per row, equal for duplicates
    similar: Sequence[Hashable]  # equal for near duplicates
    similarity: str  # what near duplicates are, such as "equal but for case"
    answers: Sequence[Hashable] | None = None  # targets, which should be equal for duplicates
    labels: Sequence[tuple[str, ...]] | None = None  # label names of each row, without repetitions
    blank: Sequence[bool] = ()
    lengths: np.ndarray | None = None  # (rows,) in `unit`
    unit: str = ""
    limit: int | None = None  # the longest length that the model reads
    sizes: Mapping[str, np.ndarray] = MappingProxyType({})  # (rows,) by the name of the dimension
    areas: tuple[Sequence[str], np.ndarray] | None = None  # class names; (rows, classes) pixels or voxels


def rows_of(task: Task, modes: Modes) -> tuple[dict[str, Rows], list[str]]:
    """(rows by split, notes) of a task's files; {} for a task whose rows are of another kind."""
    arguments, launch = task.arguments, Launch()
    if isinstance(task, TextTask) and not (
        arguments.model_name_or_path or arguments.tokenizer_name or arguments.tokenizer_type == "train"
    ):  # without a tokenizer, lengths are in words
        tables, targets = task.read(launch, modes)
        rows = {}
        for name, table in tables.items():
            answers = table.columns.get(getattr(arguments, "title_column", None))
            if isinstance(targets[name], Numbers):
                answers = map(tuple, targets[name].values.tolist())
            texts = joined(*(table.columns[column] for column in task.text_columns))
            rows[name] = of_texts(texts, answers and list(answers), getattr(targets[name], "rows", None))
        return rows, task.notes
    data = task.load(launch, modes)
    if isinstance(task, TextTask):
        return {name: of_text_split(task, split) for name, split in data.splits.items()}, data.notes
    if isinstance(task, ImageTask):
        return {name: _of_images(task, name) for name in data.splits}, data.notes
    if hasattr(task, "prepared"):
        rows = {name: _of_volumes(task.prepared[name], task.settings.classes) for name in data.splits}
        return rows, data.notes
    return {}, data.notes


def joined(*columns: Iterable[str]) -> Iterable[str]:
    """The texts of each row as one text."""
    return columns[0] if len(columns) == 1 else map("\n".join, zip(*columns, strict=True))


def of_texts(
    texts: Iterable[str],
    titles: Sequence[str] | None,
    labels: Sequence[tuple[str, ...]] | None,
    tokens: tuple[np.ndarray, int] | None = None,
) -> Rows:
    """Texts with titles, labels or neither. `tokens`: ((rows,) lengths in tokens, their limit); without it
    lengths are in words."""
    contents, similar, num_words, blank = [], [], [], []
    for text in texts:
        words = WORD.findall(text)
        contents.append(hash(text))
        similar.append(hash(" ".join(words).casefold()) if words else contents[-1])
        num_words.append(len(words))
        blank.append(not text.strip())
    lengths, limit = (np.array(num_words), None) if tokens is None else tokens
    return Rows(
        contents,
        similar,
        "equal but for case, spaces and punctuation",
        titles if labels is None else [tuple(sorted(of_row)) for of_row in labels],
        labels and [tuple(dict.fromkeys(of_row)) for of_row in labels],  # several words may have a tag
        blank,
        lengths,
        "words" if tokens is None else "tokens",
        limit,
    )


def of_text_split(task: TextTask, split: Any) -> Rows:
    labels, titles = None, None if split.titles is None else list(split.titles)
    if split.titles is None and isinstance(split.targets, Ragged):
        targets = (split.targets[row].tolist() for row in range(len(split)))
        if split.targets.values.dtype.kind == "f":  # numbers of a regression
            titles = list(map(tuple, targets))
        else:
            labels = [tuple(task.labels[number] for number in row) for row in targets]
    texts = joined(split.texts, *([] if split.pairs is None else [split.pairs]))
    return of_texts(texts, titles, labels, (split.lengths, task.max_length))


def _of_images(task: ImageTask, name: str) -> Rows:
    """Images by the hashes of their files and of their pixels."""
    inspected, split = task.inspected[name], task.splits[name]
    similar = map_rows(partial(_pixel_hash, split.images), len(split), "comparing images", "images")
    sizes = {
        f"{side}, pixels": np.array([getattr(header, side) for header in inspected.headers])
        for side in ("width", "height")
    }
    rows = Rows(inspected.digests, similar, "of equal pixels, in files that are not equal", sizes=sizes)
    if split.targets is None:
        return rows
    if split.targets.counts is None:
        labels = [(task.labels[number],) for number in split.targets.values]
        return rows._replace(labels=labels, answers=labels)
    counts, names = split.targets.counts, task.classes.names
    areas = np.array([[of_mask.get(value, 0) for value in range(len(names))] for of_mask in counts])
    # Equal images should have equal counts of pixels.
    return rows._replace(answers=[tuple(sorted(of_mask.items())) for of_mask in counts], areas=(names, areas))


def _pixel_hash(images: Any, row: int) -> str:
    image = images.load(row, "RGB")
    return content_key([repr(image.size), image.tobytes()])


def _of_volumes(volumes: Sequence[Any], classes: Sequence[str]) -> Rows:
    """Volumes (`volumes.data.Prepared`) by the hashes of their files and of their voxels: compressed
    files of equal volumes differ."""
    labels, sizes, areas = [volume.files[1:] for volume in volumes], {}, None
    for name, unit in (("size", "voxels"), ("spacing", "mm")):
        values = np.array([volume.facts[name] for volume in volumes], dtype=float).reshape(-1, 3)
        sizes |= {f"{axis}, {unit}": column for axis, column in zip(AXES, values.T, strict=True)}
    if all(labels):
        values = [str(value) for value in range(len(classes))]
        counts = [[volume.facts["values"].get(value, 0) for value in values] for volume in volumes]
        areas = classes, np.array(counts).reshape(-1, len(classes))
    files = [volume.files[0] for volume in volumes]
    similar = [content_key([repr(volume.facts["shape"]), volume.image.tobytes()]) for volume in volumes]
    similarity, answers = "of equal voxels, in files that are not equal", labels if areas else None
    return Rows(files, similar, similarity, answers, sizes=sizes, areas=areas)


# What is found in them


class Finding(NamedTuple):
    """A problem of the data, and advice."""

    found: str
    advice: str


class DataReport(NamedTuple):
    findings: list[Finding]
    shown: ReportContent


def examine(splits: Mapping[str, Rows]) -> DataReport:
    """Examines the splits "train", "validation" and "test" of a data set, and compares the others with
    "train"."""
    splits = {name: splits[name] for name in ("train", "validation", "test") if name in splits}
    table, findings = _row_table(splits)
    sections, figures = [table], {}
    with_lengths = {
        name: rows for name, rows in splits.items() if rows.lengths is not None and len(rows.lengths)
    }
    if with_lengths:
        sections.append(_length_table(with_lengths))
        figures["data_lengths"] = _length_figure(with_lengths)
    if any(rows.sizes for rows in splits.values()):
        sections.append(size_table(splits))
    with_areas = {name: rows.areas for name, rows in splits.items() if rows.areas is not None}
    if with_areas:
        findings += class_findings(with_areas)
        sections.append(class_table(with_areas))
        name, (names, areas) = next(iter(with_areas.items()))
        figures["data_classes"] = _largest_shares("area by class", name, names, areas)
    labelled = {name: rows.labels for name, rows in splits.items() if rows.labels is not None}
    if any(map(len, labelled.values())):
        counts = {name: Counter(chain.from_iterable(labels)) for name, labels in labelled.items()}
        several = (row for row in labelled.get("train", ()) if 1 < len(row) <= MOST_LABELS_OF_A_ROW)
        pairs = Counter(pair for row in several for pair in combinations(sorted(row), 2))
        findings += _label_findings(counts, pairs)
        sections += _label_tables(labelled, counts, pairs)
        name, count = next(iter(counts.items()))
        figures["data_labels"] = _largest_shares("labels", name, list(count), np.array([[*count.values()]]))
    return DataReport(findings, ReportContent(figures, sections))


def _row_table(splits: Mapping[str, Rows]) -> tuple[Section, list[Finding]]:
    """(counts of rows by split, findings)."""
    cells, findings = [], []
    for name, rows in splits.items():
        counts, found = _examine_split(name, rows, splits.get("train"))
        cells.append([name, *counts])
        findings += found
    if {"validation", "test"} <= splits.keys():
        known = set(splits["validation"].contents)
        if count := sum(content in known for content in splits["test"].contents):
            findings.append(Finding(f"{count} test row(s) are in the validation rows too", ADVICE["chosen"]))
    header = ["split", "rows", "repeated", "nearly repeated", "contradicting"]
    header += ["in training", "nearly in training", "empty"]
    nearly = next(iter(splits.values())).similarity
    return Section("Rows", f"Nearly: {nearly}.", header, cells), findings


def _examine_split(name: str, rows: Rows, train: Rows | None) -> tuple[list[str], list[Finding]]:
    """(cells of the table, findings)."""
    number = len(rows.contents)
    repeated = number - len(set(rows.contents))
    nearly_repeated = number - len(set(rows.similar)) - repeated
    contradicting = _contradicting(rows)
    leaked = nearly_leaked = 0
    if train is not None and rows is not train:
        contents, similar = set(train.contents), set(train.similar)
        leaked = sum(content in contents for content in rows.contents)
        nearly_leaked = sum(content in similar for content in rows.similar) - leaked
    counts = (number, repeated, nearly_repeated, len(contradicting), leaked, nearly_leaked, sum(rows.blank))
    pairs = "; ".join(f"rows {first} and {second}" for first, second in contradicting[:MOST_EXAMPLES])
    nearly = [f", {count} of them only nearly" if count else "" for count in (nearly_repeated, nearly_leaked)]
    found = {
        "repeated": (repeated + nearly_repeated, f"repeat another one{nearly[0]}"),
        "contradicting": (len(contradicting), f"contradict an equal one ({pairs} of those read, from 0)"),
        "leaked": (leaked + nearly_leaked, f"are in the training rows too{nearly[1]}"),
        "empty": (sum(rows.blank), "are empty"),
    }
    findings = [
        Finding(f"{count} {name} row(s) {what}", ADVICE[kind])
        for kind, (count, what) in found.items()
        if count
    ]
    if rows.limit is not None and number:
        truncated = float((rows.lengths >= rows.limit).mean())
        if truncated > MUCH_TRUNCATED:
            what = f"{truncated:.1%} of the {name} rows reach the limit of {rows.limit} {rows.unit}"
            findings.append(Finding(what, ADVICE["truncated"]))
    return [f"{count:,}" for count in counts], findings


def _contradicting(rows: Rows) -> list[tuple[int, int]]:
    """Pairs (earlier row, row) of equal content and different answers."""
    if rows.answers is None:
        return []
    first: dict[Hashable, int] = {}
    pairs = ((first.setdefault(content, row), row) for row, content in enumerate(rows.contents))
    return [(earlier, row) for earlier, row in pairs if rows.answers[earlier] != rows.answers[row]]


def _length_table(splits: dict[str, Rows]) -> Section:
    cells = []
    for name, rows in splits.items():
        percentiles = [f"{value:,.0f}" for value in np.percentile(rows.lengths, [5, 50, 95, 100])]
        truncated = "-" if rows.limit is None else f"{(rows.lengths >= rows.limit).mean():.1%}"
        cells.append([name, rows.unit, *percentiles, truncated])
    return Section("Lengths", "", ["split", "in", "5 %", "median", "95 %", "longest", "at the limit"], cells)


def _length_figure(splits: dict[str, Rows]) -> Figure:
    unit = next(iter(splits.values())).unit
    figure, axes = new_figure("Lengths", unit, "share of rows")
    longest = max(int(rows.lengths.max()) for rows in splits.values())
    for color, (name, rows) in zip(COLORS, splits.items(), strict=False):
        bins, share = np.linspace(0, longest + 1, 40), np.full(len(rows.lengths), 1 / len(rows.lengths))
        axes.hist(rows.lengths, bins, weights=share, histtype="step", color=color, label=name)
    legend_below(figure)
    return figure


def _label_findings(counts: dict[str, Counter[str]], pairs: Counter[tuple[str, str]]) -> list[Finding]:
    train, validation = counts.get("train", Counter()), counts.get("validation")
    rare = [label for label, count in train.items() if count < FEW_ROWS]
    missing = [label for label in train if validation is not None and label not in validation]
    same = [" and ".join(pair) for pair, both in pairs.items() if both == train[pair[0]] == train[pair[1]]]
    found = {
        "rare": (rare, f"of {len(train)} labels have fewer than {FEW_ROWS} training rows"),
        "not in validation": (missing, "labels of the training rows have no validation row"),
        "together": (same, "pairs of labels always come together"),
    }
    return [
        Finding(f"{len(names)} {what}: {listed(names)}", ADVICE[kind])
        for kind, (names, what) in found.items()
        if names
    ]


def _label_tables(
    labelled: dict[str, Sequence[tuple[str, ...]]],
    counts: dict[str, Counter[str]],
    pairs: Counter[tuple[str, str]],
) -> list[Section]:
    total = sum(counts.values(), Counter())
    frequent = [label for label, _ in total.most_common(MOST_LABELS)]
    columns = [
        [f"{count[label]:,} ({_share(count[label], len(labelled[name]))})" for label in frequent]
        for name, count in counts.items()
    ]
    rows = [list(cells) for cells in zip(frequent, *columns, strict=True)]
    unlabelled = [f"{sum(not labels for labels in by_row):,} {name}" for name, by_row in labelled.items()]
    more = f"The {len(frequent)} most frequent of {len(total)}. " if len(total) > len(frequent) else ""
    text = f"{more}Rows without a label: {', '.join(unlabelled)}."
    tables = [Section("Labels", text, ["label", *counts], rows)]
    if pairs:
        train = counts["train"]
        cells = [
            [*pair, f"{both:,}", _share(both, min(train[label] for label in pair))]
            for pair, both in pairs.most_common(MOST_PAIRS)
        ]
        header = ["label", "with", "training rows", "of the rarer one's"]
        tables.append(Section("Labels that come together", "", header, cells))
    return tables


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else "-"


def size_table(splits: Mapping[str, Rows]) -> Section:
    """Quantiles of the sizes of rows, by dimension."""
    cells = []
    for name, rows in splits.items():
        for dimension, values in rows.sizes.items():
            if len(values):
                quantiles = [f"{value:,.4g}" for value in np.percentile(values, [0, 50, 100])]
                cells.append([name, dimension, *quantiles, f"{len(np.unique(values)):,}"])
    return Section("Sizes", "", ["split", "of", "smallest", "median", "largest", "different"], cells)


def class_findings(areas: Areas) -> list[Finding]:
    """Findings about rare and missing classes, and about rows with a single class."""
    findings = []
    for split, (names, counts) in areas.items():
        if single := int(((counts > 0).sum(axis=1) <= 1).sum()):
            found = f"{single} of {len(counts)} {split} masks have one class only, or are ignored altogether"
            findings.append(Finding(found, ADVICE["single"]))
        missing = [name for name, total in zip(names, counts.sum(axis=0), strict=True) if not total]
        if missing and split != "test":
            found = f"no {split} mask has the class {listed(missing)}"
            findings.append(Finding(found, ADVICE[f"no {split}"]))
    if "train" in areas:
        names, counts = areas["train"]
        shares = zip(names, _shares(counts), strict=True)
        if small := [f"{name} ({share:.2%})" for name, share in shares if 0 < share < SMALL_SHARE]:
            found = f"{len(small)} classes have less than {SMALL_SHARE:.0%} of the training area"
            findings.append(Finding(f"{found}: {listed(small)}", ADVICE["small"]))
    return findings


def class_table(areas: Areas) -> Section:
    """For each class, its share of the area and the number of rows with it."""
    (names, _), *_ = areas.values()
    header, columns = ["class"], [names]
    for split, (_, counts) in areas.items():
        header += [f"{split}: area", f"{split}: rows"]
        columns.append([f"{share:.2%}" for share in _shares(counts)])
        columns.append([f"{rows:,}" for rows in (counts > 0).sum(axis=0)])
    text = "Shares of the pixels or voxels, without ignored ones; rows that have the class."
    return Section("Classes", text, header, [list(cells) for cells in zip(*columns, strict=True)])


def _shares(counts: np.ndarray) -> np.ndarray:
    totals = counts.sum(axis=0)
    return totals / max(1, totals.sum())


def _largest_shares(of: str, split: str, names: Sequence[str], counts: np.ndarray) -> Figure:
    shares = _shares(counts)
    chosen = np.argsort(-shares, kind="stable")[:MOST_LABELS]
    ticks = [names[number][:NAME] for number in chosen]
    return bars(f"Shares of the {of} ({split})", "share", ticks, shares[chosen])


def write_page(path: Path, report: DataReport, notes: list[str]) -> None:
    """Writes the report as one self-contained page."""
    plots = {}
    for name, figure in report.shown.figures.items():
        file = io.BytesIO()
        Image.fromarray(as_image(figure)).save(file, "png")
        plots[name] = file.getvalue()
    more = [Section("Notes of the readers", "", ["note"], [[note] for note in notes])] if notes else []
    findings = [list(finding) for finding in report.findings] or [["nothing unusual", ""]]
    found = Section("Findings", "", ["found", "what to do"], findings)
    page = {
        "title": "Data report",
        "summary": [f"{len(report.findings)} finding(s), each with advice, are below the figures."],
        "sections": [found, *more, *report.shown.sections],
    }
    write_text(path, render("layout.html.j2", plots=plots, **page))


def main(argv: list[str]) -> int:
    parser = task_scripts.tool_parser(__doc__)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    output = options.output
    if output is not None and (output.suffix not in (".html", ".json") or not output.parent.is_dir()):
        parser.error(
            f"--output {output}: expected a name that ends in .html or .json, in a folder that exists"
        )
    task, modes = task_scripts.task_to_read(options.script, options.arguments)
    rows, notes = rows_of(task, modes)
    if not rows:
        raise InputError(f"{options.script}: a data report needs a task of texts, images or volumes")
    report = examine(rows)
    for table in report.shown.sections:
        rows = [[str(cell)[:MAX_CELL_WIDTH] for cell in row] for row in table.rows]
        print(table.title, *plain_table(table.header, rows), "", sep="\n")
    print(*(f"note           {note}" for note in notes), sep="\n")
    for finding in report.findings or [("nothing unusual", "")]:
        print(f"found          {finding[0]}. {finding[1]}".rstrip(". "))
    if output is not None and output.suffix == ".html":
        write_page(output, report, notes)
    elif output is not None:
        tables = {
            table.title: [dict(zip(table.header, row, strict=True)) for row in table.rows]
            for table in report.shown.sections
        }
        findings = [finding._asdict() for finding in report.findings]
        write_json(output, {"findings": findings, "notes": notes, **tables})
    return 0
