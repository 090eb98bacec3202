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
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from samerun import task_scripts
from samerun.console import plain_table
from samerun.errors import InputError
from samerun.files import write_json, write_text
from samerun.reports.figures import BLUE, COLORS, NAME, as_image, legend_below, new_figure
from samerun.reports.page import render
from samerun.task import ReportContent, Section
from samerun.tools.examining.rows import Rows, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CELL_WIDTH = 100  # characters of a printed cell
MOST_LABELS, MOST_PAIRS, MOST_EXAMPLES = 30, 15, 5
FEW_ROWS = 10  # a label with fewer training rows is rare
MUCH_TRUNCATED = 0.05  # share of rows
MOST_LABELS_OF_A_ROW = 50  # label pairs of rows with more are not counted
SMALL_SHARE = 0.01  # of the area: a smaller class hardly influences means over pixels
MOST_CLASSES, MOST_NAMES = 30, 5
ADVICE = {
    "repeated": "Leave repetitions out: they weigh several times in the loss and in metrics.",
    "contradicting": "Correct them: no model can be right about both.",
    "leaked": "Take them out of training: scores on training rows are too high.",
    "empty": "Fill them or leave them out.",
    "truncated": "Raise --max_length, if the model can read more: longer texts are truncated.",
    "rare": "Find more rows of them, merge them, or do not trust their scores.",
    "not in validation": "Give --validation_file with rows of each: their metrics are undefined.",
    "together": "Merge such labels, or add rows that have one of them only: no model can tell them apart.",
    "single": "Keep no larger share of them than expected in use: they teach no border between classes.",
    "no train": "Add masks with them, or drop the classes: they cannot be learnt.",
    "no validation": "Move masks with them to the validation rows: their metrics are undefined.",
    "small": "Increase their weight (--class_weights, --dice_weight); compare their own scores, not a mean "
    "over pixels.",
}
Areas = Mapping[str, tuple[Sequence[str], np.ndarray]]  # split -> (class names, (rows, classes) pixels)


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
        figures["data_classes"] = class_figure(with_areas)
    labelled = {name: rows.labels for name, rows in splits.items() if rows.labels is not None}
    if any(map(len, labelled.values())):
        counts = {name: Counter(chain.from_iterable(labels)) for name, labels in labelled.items()}
        pairs = _pair_counts(labelled.get("train", ()))
        findings += _label_findings(counts, pairs)
        sections += _label_tables(labelled, counts, pairs)
        figures["data_labels"] = _label_figure(counts)
    return DataReport(findings, ReportContent(figures, sections))


def _row_table(splits: Mapping[str, Rows]) -> tuple[Section, list[Finding]]:
    """(counts of rows by split, findings)."""
    cells, findings = [], []
    for name, rows in splits.items():
        counts, found = _examine_split(name, rows, splits.get("train"))
        cells.append([name, *counts])
        findings += found
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


def _pair_counts(labels: Iterable[tuple[str, ...]]) -> Counter[tuple[str, str]]:
    """Pair of labels -> number of rows with both."""
    several = (row for row in labels if 1 < len(row) <= MOST_LABELS_OF_A_ROW)
    return Counter(pair for row in several for pair in combinations(sorted(row), 2))


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
        Finding(f"{len(names)} {what}: {shortened(names)}", ADVICE[kind])
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


def _label_figure(counts: dict[str, Counter[str]]) -> Figure:
    name, first = next(iter(counts.items()))
    frequent = [label for label, _ in first.most_common(MOST_LABELS)]
    figure, axes = new_figure(f"Rows by label ({name})", "rows", height=1.2 + 0.2 * len(frequent))
    axes.barh(range(len(frequent)), [first[label] for label in frequent], color=BLUE)
    axes.set_yticks(range(len(frequent)), [label[:NAME] for label in frequent])
    axes.invert_yaxis()
    return figure


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
        single = int(((counts > 0).sum(axis=1) <= 1).sum())
        if single:
            found = f"{single} of {len(counts)} {split} masks have one class only, or are ignored altogether"
            findings.append(Finding(found, ADVICE["single"]))
        missing = [name for name, total in zip(names, counts.sum(axis=0), strict=True) if not total]
        if missing and split != "test":
            found = f"no {split} mask has the class {shortened(missing)}"
            findings.append(Finding(found, ADVICE[f"no {split}"]))
    if "train" in areas:
        names, counts = areas["train"]
        shares = zip(names, _shares(counts), strict=True)
        small = [f"{name} ({share:.2%})" for name, share in shares if 0 < share < SMALL_SHARE]
        if small:
            found = f"{len(small)} classes have less than {SMALL_SHARE:.0%} of the training area"
            findings.append(Finding(f"{found}: {shortened(small)}", ADVICE["small"]))
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


def class_figure(areas: Areas) -> Figure:
    """The share of the area by class and split, for the largest classes of the first split."""
    (names, first), *_ = areas.values()
    chosen = np.argsort(-first.sum(axis=0), kind="stable")[:MOST_CLASSES]
    figure, axes = new_figure("Share of the area by class", "share", height=1.4 + 0.3 * len(chosen))
    height = 0.8 / len(areas)
    for number, (color, (split, (_, counts))) in enumerate(zip(COLORS, areas.items(), strict=False)):
        shares = _shares(counts)[chosen]
        bars = axes.barh(np.arange(len(chosen)) + number * height, shares, height, color=color, label=split)
        axes.bar_label(bars, [f"{share:.2%}" for share in shares], fontsize=6, padding=2)
    axes.set_yticks(np.arange(len(chosen)) + 0.4 - height / 2, [names[number][:NAME] for number in chosen])
    axes.set_xlim(0, 1.15)
    axes.invert_yaxis()
    legend_below(figure)
    return figure


def _shares(counts: np.ndarray) -> np.ndarray:
    totals = counts.sum(axis=0)
    return totals / max(1, totals.sum())


def shortened(names: list[str]) -> str:
    return f"{', '.join(names[:MOST_NAMES])}{', ...' if len(names) > MOST_NAMES else ''}"


def write_page(path: Path, report: DataReport, notes: list[str]) -> None:
    """Writes the report as one self-contained page."""
    plots = {}
    for name, figure in report.shown.figures.items():
        file = io.BytesIO()
        Image.fromarray(as_image(figure)).save(file, "PNG")
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
