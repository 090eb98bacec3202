"""The data report: repeated and leaked rows, contradicting labels, label counts, lengths, sizes, areas of
classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from samerun.reports import areas
from samerun.reports.areas import Finding, shortened
from samerun.reports.figures import BLUE, COLORS, NAME, legend_below, matrix, new_figure
from samerun.task import DataInfo, ReportContent, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORD = re.compile(r"\w+")
MOST_LABELS, MOST_PAIRS, MOST_EXAMPLES = 30, 15, 5
FEW_ROWS = 10  # a label with fewer training rows is rare
MUCH_TRUNCATED = 0.05  # share of rows
MOST_LABELS_OF_A_ROW = 50  # label pairs of rows with more are not counted
MOST_ROWS = 200_000  # larger data get no report at the end of a run, since it would take minutes


class DataReport(NamedTuple):
    findings: list[Finding]
    shown: ReportContent


def describe_texts(
    texts: Iterable[str],
    titles: Sequence[str] | None,
    labels: Sequence[tuple[str, ...]] | None,
    tokens: tuple[np.ndarray, int] | None = None,
) -> DataInfo:
    """Describes texts with titles, labels or neither. `tokens`: ((rows,) lengths in tokens, their limit);
    without it lengths are in words."""
    contents, similar, num_words, blank = [], [], [], []
    for text in texts:
        words = WORD.findall(text)
        contents.append(hash(text))
        similar.append(hash(" ".join(words).casefold()) if words else contents[-1])
        num_words.append(len(words))
        blank.append(not text.strip())
    lengths, limit = (np.array(num_words), None) if tokens is None else tokens
    unit = "words" if tokens is None else "tokens"
    answers = [tuple(sorted(labels_of_row)) for labels_of_row in labels] if labels is not None else titles
    nearly = "equal but for case, spaces and punctuation"
    return DataInfo(
        contents, similar, answers, labels, np.array(blank, dtype=bool), lengths, unit, limit, nearly
    )


def examine(splits: Mapping[str, DataInfo]) -> DataReport:
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
        sections.append(areas.size_table(splits))
    with_areas = {name: rows.areas for name, rows in splits.items() if rows.areas is not None}
    if with_areas:
        findings += areas.findings(with_areas)
        sections.append(areas.class_table(with_areas))
        figures["data_classes"] = areas.class_figure(with_areas)
    labelled = {name: rows.labels for name, rows in splits.items() if rows.labels is not None}
    if any(map(len, labelled.values())):
        counts = {name: Counter(chain.from_iterable(labels)) for name, labels in labelled.items()}
        pairs = _pair_counts(labelled.get("train", ()))
        findings += _label_findings(counts, pairs)
        sections += _label_tables(labelled, counts, pairs)
        figures |= _label_figures(counts, pairs)
    return DataReport(findings, ReportContent(figures, sections))


def as_section(findings: list[Finding]) -> Section:
    rows = [list(finding) for finding in findings] or [["nothing unusual", ""]]
    return Section("Findings", "", ["found", "what to do"], rows)


def _row_table(splits: Mapping[str, DataInfo]) -> tuple[Section, list[Finding]]:
    """(counts of rows by split, findings). Leaves the columns of similar rows out if similarity was not
    examined."""
    cells, findings = [], []
    for name, rows in splits.items():
        counts, found = _examine_split(name, rows, splits.get("train"))
        cells.append([name, *counts])
        findings += found
    header = [
        "split",
        "rows",
        "repeated",
        "nearly repeated",
        "contradicting",
        "in training",
        "nearly in training",
        "empty",
    ]
    nearly = next(iter(splits.values())).similarity
    columns = [column for column, name in enumerate(header) if nearly or not name.startswith("nearly")]
    header, *cells = [[row[column] for column in columns] for row in [header, *cells]]
    return Section("Rows", f"Nearly: {nearly}." if nearly else "", header, cells), findings


def _examine_split(name: str, rows: DataInfo, train: DataInfo | None) -> tuple[list[str], list[Finding]]:
    """(cells of the table, findings)."""
    number = len(rows.contents)
    repeated = number - len(set(rows.contents))
    nearly_repeated = 0 if rows.similar is None else number - len(set(rows.similar)) - repeated
    contradicting = _contradicting(rows)
    leaked, nearly_leaked = (0, 0) if train is None or rows is train else _leaked(rows, train)
    empty = int(rows.blank.sum())
    findings = []
    if repeated or nearly_repeated:
        more = f", {nearly_repeated} of them only nearly" if nearly_repeated else ""
        advice = "Leave repetitions out: they weigh several times in the loss and in metrics."
        findings.append(
            Finding(f"{repeated + nearly_repeated} {name} row(s) repeat another one{more}", advice)
        )
    if contradicting:
        pairs = "; ".join(f"rows {first} and {second}" for first, second in contradicting[:MOST_EXAMPLES])
        found = f"{len(contradicting)} {name} row(s) contradict an equal one ({pairs} of those read, from 0)"
        findings.append(Finding(found, "Correct them: no model can be right about both."))
    if leaked or nearly_leaked:
        more = f", {nearly_leaked} of them only nearly" if nearly_leaked else ""
        advice = "Take them out of training: scores on training rows are too high."
        findings.append(
            Finding(f"{leaked + nearly_leaked} {name} row(s) are in the training rows too{more}", advice)
        )
    if empty:
        findings.append(Finding(f"{empty} {name} row(s) are empty", "Fill them or leave them out."))
    if rows.limit is not None and number:
        truncated = float((rows.lengths >= rows.limit).mean())
        if truncated > MUCH_TRUNCATED:
            found = f"{truncated:.1%} of the {name} rows reach the limit of {rows.limit} {rows.unit}"
            findings.append(
                Finding(found, "Raise --max_length, if the model can read more: longer texts are truncated.")
            )
    counts = (number, repeated, nearly_repeated, len(contradicting), leaked, nearly_leaked, empty)
    return [f"{count:,}" for count in counts], findings


def _contradicting(rows: DataInfo) -> list[tuple[int, int]]:
    """Pairs (earlier row, row) of equal content and different answers."""
    if rows.answers is None:
        return []
    first: dict[Hashable, int] = {}
    pairs = ((first.setdefault(content, row), row) for row, content in enumerate(rows.contents))
    return [(earlier, row) for earlier, row in pairs if rows.answers[earlier] != rows.answers[row]]


def _leaked(rows: DataInfo, train: DataInfo) -> tuple[int, int]:
    """(number of rows that are in the training rows too, number of further rows that are similar to one)."""
    contents = set(train.contents)
    leaked = sum(content in contents for content in rows.contents)
    if rows.similar is None or train.similar is None:
        return leaked, 0
    similar = set(train.similar)
    return leaked, sum(content in similar for content in rows.similar) - leaked


def _length_table(splits: dict[str, DataInfo]) -> Section:
    cells = []
    for name, rows in splits.items():
        percentiles = [f"{value:,.0f}" for value in np.percentile(rows.lengths, [5, 50, 95, 100])]
        truncated = "-" if rows.limit is None else f"{(rows.lengths >= rows.limit).mean():.1%}"
        cells.append([name, rows.unit, *percentiles, truncated])
    return Section("Lengths", "", ["split", "in", "5 %", "median", "95 %", "longest", "at the limit"], cells)


def _length_figure(splits: dict[str, DataInfo]) -> Figure:
    unit = next(iter(splits.values())).unit
    figure, axes = new_figure("Lengths", unit, "share of rows")
    longest = max(int(rows.lengths.max()) for rows in splits.values())
    for color, (name, rows) in zip(COLORS, splits.items(), strict=False):
        share = np.full(len(rows.lengths), 1 / len(rows.lengths))
        axes.hist(
            rows.lengths,
            np.linspace(0, longest + 1, 40),
            weights=share,
            histtype="step",
            color=color,
            label=name,
        )
    legend_below(figure)
    return figure


def _pair_counts(labels: Iterable[tuple[str, ...]]) -> Counter[tuple[str, str]]:
    """Pair of labels -> number of rows with both."""
    several = (
        sorted(labels_of_row) for labels_of_row in labels if 1 < len(labels_of_row) <= MOST_LABELS_OF_A_ROW
    )
    return Counter(chain.from_iterable(map(partial(combinations, r=2), several)))


def _label_findings(counts: dict[str, Counter[str]], pairs: Counter[tuple[str, str]]) -> list[Finding]:
    train, findings = counts.get("train", Counter()), []
    rare = [label for label, count in train.items() if count < FEW_ROWS]
    if rare:
        found = (
            f"{len(rare)} of {len(train)} labels have fewer than {FEW_ROWS} training rows: {shortened(rare)}"
        )
        findings.append(Finding(found, "Find more rows of them, merge them, or do not trust their scores."))
    missing = (
        [label for label in train if label not in counts["validation"]] if "validation" in counts else []
    )
    if missing:
        found = f"{len(missing)} labels of the training rows have no validation row: {shortened(missing)}"
        findings.append(
            Finding(found, "Give --validation_file with rows of each: their metrics are undefined.")
        )
    same = [" and ".join(pair) for pair, both in pairs.items() if both == train[pair[0]] == train[pair[1]]]
    if same:
        found = f"{len(same)} pairs of labels always come together: {shortened(same)}"
        advice = "Merge such labels, or add rows that have one of them only: no model can tell them apart."
        findings.append(Finding(found, advice))
    return findings


def _label_tables(
    labelled: dict[str, Sequence[tuple[str, ...]]],
    counts: dict[str, Counter[str]],
    pairs: Counter[tuple[str, str]],
) -> list[Section]:
    total = sum(counts.values(), Counter())
    frequent = [label for label, _ in total.most_common(MOST_LABELS)]
    rows = [
        [
            label,
            *(
                f"{count[label]:,} ({_share(count[label], len(labelled[name]))})"
                for name, count in counts.items()
            ),
        ]
        for label in frequent
    ]
    unlabelled = [f"{sum(not labels for labels in by_row):,} {name}" for name, by_row in labelled.items()]
    more = f"The {len(frequent)} most frequent of {len(total)}. " if len(total) > len(frequent) else ""
    tables = [
        Section("Labels", f"{more}Rows without a label: {', '.join(unlabelled)}.", ["label", *counts], rows)
    ]
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


def _label_figures(counts: dict[str, Counter[str]], pairs: Counter[tuple[str, str]]) -> dict[str, Figure]:
    name, first = next(iter(counts.items()))
    frequent = [label for label, _ in first.most_common(MOST_LABELS)]
    figure, axes = new_figure(f"Rows by label ({name})", "rows", height=1.2 + 0.2 * len(frequent))
    axes.barh(range(len(frequent)), [first[label] for label in frequent], color=BLUE)
    axes.set_yticks(range(len(frequent)), [label[:NAME] for label in frequent])
    axes.invert_yaxis()
    if not pairs:
        return {"data_labels": figure}
    names = frequent[:MOST_PAIRS]
    both = np.array(
        [[pairs[tuple(sorted((row, column)))] if row != column else 0 for column in names] for row in names]
    )
    return {"data_labels": figure, "data_label_pairs": matrix("Training rows with both labels", both, names)}
