"""A report on data: repeated rows, leaks between splits, contradicting labels, label counts, lengths, sizes, classes of masks;
each with advice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from finetune.reports import regions
from finetune.reports.figures import BLUE, COLORS, NAME, legend_below, matrix, new_figure
from finetune.reports.regions import Finding
from finetune.task import Described, Section, Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORD = re.compile(r"\w+")
MOST_LABELS, MOST_PAIRS, MOST_NAMED = 30, 15, 5
FEW_ROWS = 10  # of a label
MUCH_CUT = 0.05
MOST_LABELS_OF_A_ROW = 50  # whose pairs are counted
MOST_ROWS = 200_000  # in the report of a run, whose end must not wait for minutes


class DataReport(NamedTuple):
    """`shown`: figures and tables."""

    findings: list[Finding]
    shown: Shown


def describe_texts(
    texts: Iterable[str],
    titles: Sequence[str] | None,
    labels: Sequence[tuple[str, ...]] | None,
    tokens: tuple[np.ndarray, int] | None = None,
) -> Described:
    """Rows of texts with titles, labels or neither. `tokens`: the (rows,) lengths in tokens and their limit; without it lengths
    are in words."""
    contents, similar, words, blank = [], [], [], []
    for text in texts:
        found = WORD.findall(text)
        contents.append(hash(text))
        similar.append(hash(" ".join(found).casefold()) if found else contents[-1])
        words.append(len(found))
        blank.append(not text.strip())
    lengths, limit = (np.array(words), None) if tokens is None else tokens
    unit = "words" if tokens is None else "tokens"
    answers = [tuple(sorted(each)) for each in labels] if labels is not None else titles
    nearly = "equal but for case, spaces and punctuation"
    return Described(contents, similar, answers, labels, np.array(blank, dtype=bool), lengths, unit, limit, nearly)


def examine(splits: Mapping[str, Described]) -> DataReport:
    """Looks at all the splits of some data: "train", with which others are compared, "validation" and "test"."""
    table, findings = [], []
    splits = {name: splits[name] for name in ("train", "validation", "test") if name in splits}
    for name, rows in splits.items():
        counts, found = _examine_split(name, rows, splits.get("train"))
        table.append([name, *counts])
        findings += found
    header = ["split", "rows", "repeated", "nearly repeated", "contradicting", "in training", "nearly in training", "empty"]
    nearly = next(iter(splits.values())).nearly
    shown = [place for place, name in enumerate(header) if nearly or not name.startswith("nearly")]
    cells = [[row[place] for place in shown] for row in table]
    sections = [Section("Rows", f"Nearly: {nearly}." if nearly else "", [header[place] for place in shown], cells)]
    figures: dict[str, Figure] = {}
    measured = {name: rows for name, rows in splits.items() if rows.lengths is not None and len(rows.lengths)}
    if measured:
        sections.append(_length_table(measured))
        figures["data_lengths"] = _length_figure(measured)
    if any(rows.sizes for rows in splits.values()):
        sections.append(regions.size_table(splits))
    areas = {name: rows.areas for name, rows in splits.items() if rows.areas is not None}
    if areas:
        findings += regions.findings(areas)
        sections.append(regions.class_table(areas))
        figures["data_classes"] = regions.class_figure(areas)
    labelled = {name: rows.labels for name, rows in splits.items() if rows.labels is not None}
    if any(map(len, labelled.values())):
        counts = {name: Counter(chain.from_iterable(labels)) for name, labels in labelled.items()}
        pairs = _pairs(labelled.get("train", ()))
        findings += _label_findings(counts, pairs)
        sections += _label_tables(labelled, counts, pairs)
        figures |= _label_figures(counts, pairs)
    return DataReport(findings, Shown(figures, sections))


def as_section(findings: list[Finding]) -> Section:
    """The findings as a table."""
    rows = [list(finding) for finding in findings] or [["nothing unusual", ""]]
    return Section("Findings", "", ["found", "what to do"], rows)


def _examine_split(name: str, rows: Described, train: Described | None) -> tuple[list[str], list[Finding]]:
    """(cells of the table, findings)."""
    number = len(rows.contents)
    repeated = number - len(set(rows.contents))
    nearly = 0 if rows.similar is None else number - len(set(rows.similar)) - repeated
    against = _contradicting(rows)
    leaked, close = (0, 0) if train is None or rows is train else _shared(rows, train)
    empty = int(rows.blank.sum())
    found = []
    if repeated or nearly:
        what = f"{repeated} {name} row(s) repeat another one" + (f", {nearly} more nearly do" if rows.nearly else "")
        found.append(Finding(what, "Leave repetitions out: they weigh several times in the loss and in metrics."))
    if against:
        places = "; ".join(f"rows {first} and {second}" for first, second in against[:MOST_NAMED])
        what = f"{len(against)} {name} row(s) contradict an equal one ({places} of those read, from 0)"
        found.append(Finding(what, "Correct them: no model can be right about both."))
    if leaked or close:
        what = f"{leaked} {name} row(s) are in the training rows too" + (f", {close} more nearly are" if rows.nearly else "")
        found.append(Finding(what, "Take them out of training: scores on rows that were trained on promise too much."))
    if empty:
        found.append(Finding(f"{empty} {name} row(s) are empty", "Fill them or leave them out."))
    if rows.limit is not None and number:
        full = float((rows.lengths >= rows.limit).mean())
        if full > MUCH_CUT:
            what = f"{full:.1%} of the {name} rows reach the limit of {rows.limit} {rows.unit}"
            found.append(Finding(what, "Raise --max_length, if the model can read more: what is beyond it is lost."))
    return [f"{count:,}" for count in (number, repeated, nearly, len(against), leaked, close, empty)], found


def _contradicting(rows: Described) -> list[tuple[int, int]]:
    """(an earlier row, a row of equal content and another answer)."""
    if rows.answers is None:
        return []
    first: dict[Hashable, int] = {}
    pairs = ((first.setdefault(content, row), row) for row, content in enumerate(rows.contents))
    return [(earlier, row) for earlier, row in pairs if rows.answers[earlier] != rows.answers[row]]


def _shared(rows: Described, train: Described) -> tuple[int, int]:
    """(rows that training has too, further rows that it nearly has)."""
    exact = set(train.contents)
    leaked = sum(content in exact for content in rows.contents)
    if rows.similar is None or train.similar is None:
        return leaked, 0
    near = set(train.similar)
    return leaked, sum(similar in near for similar in rows.similar) - leaked


def _length_table(splits: dict[str, Described]) -> Section:
    cells = []
    for name, rows in splits.items():
        shown = [f"{value:,.0f}" for value in np.percentile(rows.lengths, [5, 50, 95, 100])]
        full = "-" if rows.limit is None else f"{(rows.lengths >= rows.limit).mean():.1%}"
        cells.append([name, rows.unit, *shown, full])
    return Section("Lengths", "", ["split", "in", "5 %", "median", "95 %", "longest", "at the limit"], cells)


def _length_figure(splits: dict[str, Described]) -> Figure:
    unit = next(iter(splits.values())).unit
    figure, axes = new_figure("Lengths", unit, "share of rows")
    most = max(int(rows.lengths.max()) for rows in splits.values())
    for color, (name, rows) in zip(COLORS, splits.items(), strict=False):
        share = np.full(len(rows.lengths), 1 / len(rows.lengths))
        axes.hist(rows.lengths, np.linspace(0, most + 1, 40), weights=share, histtype="step", color=color, label=name)
    legend_below(figure)
    return figure


def _pairs(labels: Iterable[tuple[str, ...]]) -> Counter[tuple[str, str]]:
    """How many rows have both labels of a pair."""
    several = (sorted(each) for each in labels if 1 < len(each) <= MOST_LABELS_OF_A_ROW)
    return Counter(chain.from_iterable(map(partial(combinations, r=2), several)))


def _label_findings(counts: dict[str, Counter[str]], pairs: Counter[tuple[str, str]]) -> list[Finding]:
    train, found = counts.get("train", Counter()), []
    rare = [label for label, count in train.items() if count < FEW_ROWS]
    if rare:
        what = f"{len(rare)} of {len(train)} labels have fewer than {FEW_ROWS} training rows: {_named(rare)}"
        found.append(Finding(what, "Find more rows of them, merge them, or do not trust their scores."))
    missing = [label for label in train if label not in counts["validation"]] if "validation" in counts else []
    if missing:
        what = f"{len(missing)} labels of the training rows have no validation row: {_named(missing)}"
        found.append(Finding(what, "Give --validation_file with rows of each: their metrics are undefined."))
    same = [" and ".join(pair) for pair, both in pairs.items() if both == train[pair[0]] == train[pair[1]]]
    if same:
        what = f"{len(same)} pairs of labels always come together: {_named(same)}"
        found.append(Finding(what, "Merge such labels, or add rows that have one of them only: no model can tell them apart."))
    return found


def _named(names: list[str]) -> str:
    return f"{', '.join(names[:MOST_NAMED])}{', ...' if len(names) > MOST_NAMED else ''}"


def _label_tables(
    labelled: dict[str, Sequence[tuple[str, ...]]], counts: dict[str, Counter[str]], pairs: Counter[tuple[str, str]]
) -> list[Section]:
    total = sum(counts.values(), Counter())
    often = [label for label, _ in total.most_common(MOST_LABELS)]
    rows = [[label, *(f"{counts[name][label]:,} ({_share(counts[name][label], len(labelled[name]))})" for name in counts)]
            for label in often]  # fmt: skip
    bare = [f"{sum(not labels for labels in each):,} {name}" for name, each in labelled.items()]
    more = f"The {len(often)} most frequent of {len(total)}. " if len(total) > len(often) else ""
    found = [Section("Labels", f"{more}Rows without a label: {', '.join(bare)}.", ["label", *counts], rows)]
    if pairs:
        train = counts["train"]
        cells = [
            [*pair, f"{both:,}", _share(both, min(train[label] for label in pair))]
            for pair, both in pairs.most_common(MOST_PAIRS)
        ]
        header = ["label", "with", "training rows", "of the rarer one's"]
        found.append(Section("Labels that come together", "", header, cells))
    return found


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else "-"


def _label_figures(counts: dict[str, Counter[str]], pairs: Counter[tuple[str, str]]) -> dict[str, Figure]:
    name, first = next(iter(counts.items()))
    often = [label for label, _ in first.most_common(MOST_LABELS)]
    figure, axes = new_figure(f"Rows by label ({name})", "rows", height=1.2 + 0.2 * len(often))
    axes.barh(range(len(often)), [first[label] for label in often], color=BLUE)
    axes.set_yticks(range(len(often)), [label[:NAME] for label in often])
    axes.invert_yaxis()
    if not pairs:
        return {"data_labels": figure}
    names = often[:MOST_PAIRS]
    both = np.array([[pairs[tuple(sorted((row, column)))] if row != column else 0 for column in names] for row in names])
    return {"data_labels": figure, "data_label_pairs": matrix("Training rows with both labels", both, names)}
