"""Tags of words: sentences of files, tagging schemes, windows of long sentences, scores, exported models.

A sentence is kept as one text with a word on each line; `words_of` gives its words. Names (entities) are
tagged in IOB2 within: B- for the first word of a name, I- for the others, O for all other words.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from seqeval.metrics import classification_report
from seqeval.metrics.sequence_labeling import get_entities
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from samerun.classes import confusion_matrix, per_class_table
from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.errors import SHOWN, InputError, described, more, nearest, quoted, raise_problems
from samerun.export import check_agreement
from samerun.models.adapters import load_plain
from samerun.reports.card import section
from samerun.reports.figures import NAME, bars, confusion
from samerun.reports.page import worst_rows
from samerun.run_folder import METRICS, read_metrics
from samerun.task import ModelCard, ReportContent
from samerun.text.labels import OF_MODEL, Labelled, knows_none, read_label_file
from samerun.text.long_documents import LongDocuments
from samerun.text.tokenizer import IDS_ALONE, WIDE, WORD

Rows = Sequence[Sequence[str]]  # the tags of each row's words
OUTSIDE = "O"
PREFIXED = re.compile(r"[BILMUES]-.+")
RAW = "\2"  # begins the text of a sentence that was not split into words by its file
WORD_OR_SYMBOL = re.compile(rf"{WORD}|[^\w\s]")
WIDE_CHARACTER = re.compile(f"[{WIDE}]")
CONTEXT_DIVISOR = 8  # words around a window that are read but not tagged: tokens of --max_length / 8
SPECIAL, PADDING = -1, -2  # in place of a word's number: special tokens and words around; padding of windows
CHECKED_ROWS = 8
TOLERANCE = {"no": 1e-5, "bf16": 5e-2, "fp16": 1e-2}  # of a probability, by the run's precision
STRATEGIES = ("simple", "first")  # of transformers' pipeline: by token, by a word's first token
MAX_TYPES = 20  # of the report's figures
USAGE = """from transformers import pipeline
tag = pipeline("token-classification", model="best", aggregation_strategy="STRATEGY")
tag("a text")"""


# Sentences


def words_of(cell: str) -> list[str]:
    """The words of a sentence."""
    return WORD_OR_SYMBOL.findall(cell[1:]) if cell.startswith(RAW) else cell.split("\n") if cell else []


def text_of(cell: str) -> str:
    """A sentence as a text: its words, with spaces between them unless one is Chinese or Japanese there."""
    if cell.startswith(RAW):
        return cell[1:]
    words = words_of(cell)
    spaces = [
        "" if WIDE_CHARACTER.match(left[-1]) or WIDE_CHARACTER.match(right[0]) else " "
        for left, right in pairwise(words)
    ]
    return "".join(chain.from_iterable(zip(words, [*spaces, ""], strict=False)))


def with_spaces(cell: str) -> list[str]:
    """The words of a sentence, each with the spaces before it in the sentence's text."""
    text = text_of(cell)
    ends = [0, *(end for _, end in spans_of(words_of(cell), text))]
    return [text[start:end] for start, end in pairwise(ends)]


def spans_of(words: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Where each word begins and ends in the sentence's text, in characters."""
    spans, end = [], 0
    for word in words:
        start = text.index(word, end)
        end = start + len(word)
        spans.append((start, end))
    return spans


def as_sentences(table: Table, words_column: str, tags_column: str, takes_texts: bool) -> Table:
    """The table with sentences in place of its lists of words. `takes_texts`: whether a cell may be a text,
    to predict. Raises `InputError` for cells of other types, and for rows with more words than tags."""
    import datasets

    tags = table.columns.get(tags_column, repeat(None))
    has_tags, cells, problems = tags_column in table.columns, [], []
    for row, (words, of_row) in enumerate(zip(table.columns[words_column], tags, strict=False)):
        if isinstance(words, str) and takes_texts and not has_tags:
            cells.append(f"{RAW}{words}" if words else "")
            continue
        found = [f"{words_column}{problem}" for problem in word_problems(words)]
        if has_tags and not found:
            found = [f"{tags_column}{problem}" for problem in _tag_problems(of_row, words)]
        problems += [f"{table.where(row)}: {problem}" for problem in found]
        cells.append("" if found else "\n".join(words))
    raise_problems(problems)
    rows, texts = table.rows.remove_columns([words_column]), datasets.Value("large_string")
    return replace(table, rows=rows.add_column(words_column, cells, new_fingerprint="words", feature=texts))


def word_problems(words: Any) -> Iterator[str]:
    if not isinstance(words, list):
        hint = "; use a jsonl, parquet or .conll file" if isinstance(words, str) else ""
        yield f" is {described(words)}, expected a list of words{hint}"
        return
    for number, word in enumerate(words, 1):
        if not isinstance(word, str):
            yield f": word {number} is {described(word)}, expected a text"
        elif not word.strip() or "\n" in word or word.startswith(RAW):
            yield f": word {number} is {word!r:.60}; a word is no space and holds no line break: correct it"


def _tag_problems(tags: Any, words: list[str]) -> Iterator[str]:
    if not isinstance(tags, list):
        yield f" is {described(tags)}, expected a list with a tag for each word"
    elif len(tags) != len(words):
        yield f": {len(tags)} tag(s) for {len(words)} word(s); each word needs one"
    elif {type(tag) for tag in tags} == {int}:
        yield (
            ": numbers, whose names are unknown; write the names, such as B-PER, or load a data set whose "
            "ClassLabel has them (--dataset_name)"
        )
    else:
        for number, (word, tag) in enumerate(zip(words, tags, strict=True), 1):
            if not isinstance(tag, str) or not tag.strip():
                yield f": word {number}, {quoted(word)}, has the tag {tag!r:.40}, expected a name"


# Schemes


@dataclass(frozen=True)
class Tagged(Labelled):
    """The tags of each row's words, of names in IOB2."""

    @cached_property
    def names(self) -> list[str]:
        """All tags, in the declared order or in that of first appearance; B- and I- of each type of names."""
        found = list(dict.fromkeys([*self.declared, *chain.from_iterable(self.rows)]))
        if not _are_prefixed(found):
            return found
        types = dict.fromkeys(tag[2:] for tag in found if PREFIXED.fullmatch(tag))
        return [OUTSIDE, *(f"{mark}-{kind}" for kind in types for mark in "BI")]


def _are_prefixed(tags: Collection[str]) -> bool:
    """Whether the tags are those of names. Word classes, one of which may look like the tag of a name, lack
    O."""
    prefixed = {tag for tag in tags if PREFIXED.fullmatch(tag)}
    return bool(prefixed) and (OUTSIDE in tags or prefixed == set(tags))


def read_tags(table: Table, words_column: str, tags_column: str, notes: list[str]) -> Tagged | None:
    """The tags of a table of `as_sentences`; None without a column of tags. Tags of names are recognised as
    IOB1, IOB2, or BILOU, IOBES and BMES, checked, and turned into IOB2, with a note; other tags stay. Raises
    `InputError` with row and word of each tag that does not fit the scheme."""
    if tags_column not in table.columns:
        return None
    rows = [tuple(tags) for tags in table.columns[tags_column]]
    declared = tuple(table.classes.get(tags_column, ()))
    names = set(chain.from_iterable(rows))
    if not _are_prefixed(names):
        return Tagged(rows, declared)
    prefixed = {tag for tag in names if PREFIXED.fullmatch(tag)}
    if bare := names - prefixed - {OUTSIDE}:
        scheme, wrong = "", {tag: f"{tag!r} has no B- or I- before it, as others have" for tag in bare}
        found = [[(n, wrong[tag]) for n, tag in enumerate(tags) if tag in wrong] for tags in rows]
    elif {tag[0] for tag in prefixed} & set("LMUES"):
        scheme, found = "BILOU, IOBES or BMES", [list(_bilou_problems(tags)) for tags in rows]
    else:
        scheme, found = _iob_problems(rows)
    cells, problems = table.columns[words_column], []
    for row, of_row in enumerate(found):
        for number, problem in of_row if len(problems) <= SHOWN else ():
            word = quoted(words_of(cells[row])[number])
            problems.append(f"{table.where(row)}: {tags_column}: word {number + 1}, {word}: {problem}")
    if problems:
        total = sum(map(len, found))
        raise InputError(*problems[:SHOWN], *more(total))
    if scheme != "IOB2":
        notes.append(f"{table.path}: {scheme} tags, read as IOB2")
        rows = list(map(as_iob2, rows))
    return Tagged(rows, tuple(dict.fromkeys(map(_unified, declared))))


def _unified(tag: str) -> str:
    """The tag with I- for M-, E- for L- and S- for U-."""
    return {"M": "I", "L": "E", "U": "S"}.get(tag[0], tag[0]) + tag[1:] if PREFIXED.fullmatch(tag) else tag


def _bilou_problems(tags: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(word, what is wrong) of a row in BILOU, IOBES or BMES."""
    for number, (last, tag) in enumerate(pairwise(map(_unified, [OUTSIDE, *tags, OUTSIDE]))):
        is_open, goes_on = last[:2] in ("B-", "I-"), tag[:2] in ("I-", "E-")
        if is_open and (not goes_on or last[2:] != tag[2:]):
            yield number - 1, f"{tags[number - 1]} is no last word (L- or E-), but its name ends here"
        elif goes_on and not is_open:
            yield number, f"{tags[number]} follows nothing; a name begins with B-"


def _iob_problems(rows: Rows) -> tuple[str, list[list[tuple[int, str]]]]:
    """(IOB1 or IOB2, (word, what is wrong) of each row). IOB2 begins each name with B-, IOB1 only one that
    follows another of its type."""
    without, needless = [], []
    for tags in rows:
        firsts = [(n, tag) for n, (last, tag) in enumerate(pairwise([OUTSIDE, *tags])) if last[2:] != tag[2:]]
        problem = "follows nothing; a name begins with B-"
        without.append([(n, f"{tag} {problem}") for n, tag in firsts if tag[0] == "I"])
        needless.append([
            (n, f"{tag} follows no {tag[2:]}; in IOB1, as in the rest of the file, it is I-")
            for n, tag in firsts if tag[0] == "B"
        ])  # fmt: skip
    is_iob2 = sum(map(len, without)) <= sum(map(len, needless))
    return ("IOB2", without) if is_iob2 else ("IOB1", needless)


def as_iob2(tags: Sequence[str]) -> tuple[str, ...]:
    """Tags of IOB1, BILOU, IOBES or BMES in IOB2."""
    found = []
    for last, tag in pairwise(map(_unified, [OUTSIDE, *tags])):
        goes_on = tag[0] in "IE" and last[2:] == tag[2:] and last[0] in "BI"
        found.append(tag if tag == OUTSIDE else f"{'I' if goes_on else 'B'}-{tag[2:]}")
    return tuple(found)


def tag_ids(table: Table, tagged: Tagged, labels: Sequence[str], words_column: str, source: str) -> Ragged:
    """The number of each word's tag. Raises `InputError` with row and word of tags that are no label.
    `source`: of the labels, for messages."""
    numbers = {label: number for number, label in enumerate(labels)}
    unknown: dict[str, list[tuple[int, int]]] = {}
    for row, tags in enumerate(tagged.rows):
        for number, tag in enumerate(tags):
            if tag not in numbers:
                unknown.setdefault(tag, []).append((row, number))
    if unknown and source.startswith(OF_MODEL) and unknown.keys() >= set().union(*tagged.rows) - {OUTSIDE}:
        raise InputError(knows_none(table, next(iter(unknown)), source))
    instead = "leave out the row" if source.startswith(OF_MODEL) else "name it in --label_file"
    problems = []
    for tag, places in list(unknown.items())[:SHOWN]:
        (row, number), near = places[0], nearest(tag, labels)
        word = quoted(words_of(table.columns[words_column][row])[number])
        problems.append(
            f"{table.where(row)}: word {number + 1}, {word}: the tag {tag!r} is not in the {source} "
            f"({len(places)} word(s)){f'; did you mean {near!r}?' if near else ''}; correct it, or {instead}"
        )
    if problems:
        raise InputError(*problems, *more(len(unknown)))
    return Ragged.of([[numbers[tag] for tag in tags] for tags in tagged.rows])


def choose_labels(own: list[str] | None, train_labels: list[str], label_file: str | None) -> list[str]:
    """The tags to train: those of --label_file, else `train_labels`; in the order of the model's `own` ones
    if they are the same. Raises `InputError` if no word has a tag."""
    labels = read_label_file(label_file) if label_file else train_labels
    if set(labels) <= {OUTSIDE}:
        raise InputError("no training word has a tag; name the tags with --label_file if that is intended")
    return own if own is not None and set(own) == set(labels) else labels


def are_names(labels: Sequence[str]) -> bool:
    """Whether the labels are tags of names in IOB2."""
    return _are_prefixed(labels) and any(label.startswith("B-") for label in labels)


def types_of(labels: Sequence[str]) -> list[str]:
    """The types of the names, or the labels themselves."""
    return [label[2:] for label in labels if label.startswith("B-")] if are_names(labels) else list(labels)


# Tokens


def keeps_spaces(tokenizer: Any) -> bool:
    """Whether a word has other tokens with a space before it than without one (the bytes of RoBERTa), so that
    the pipeline, which reads texts, needs a model that was trained on words with their spaces."""
    words, text = tokenizer(["a", "a"], is_split_into_words=True), tokenizer("a a")
    return words["input_ids"] != text["input_ids"]


@dataclass(frozen=True)
class SentenceWindows(LongDocuments):
    """Sentences longer than the model reads, in windows. Each word is tagged in one window; the words around
    it are only read. `max_length`: the width of a window; `tokens`: those that the model reads; `spaces`: of
    `keeps_spaces`."""

    tokens: int = 0
    spaces: bool = False

    def as_config(self) -> dict[str, Any]:
        return {"way": "words", "spaces": True} if self.spaces else {"way": "words"}

    def encoder(self, tokenizer: Any, prefix: str) -> WordEncoder:
        return WordEncoder(tokenizer, self)

    @property
    def limit(self) -> str:
        return f"windows of {self.tokens}"

    def prepare(self, model: Any, side: str) -> Any:
        return model


@dataclass(frozen=True)
class WordEncoder:
    """Sentences -> {"input_ids", "word_ids": the number of each token's word, SPECIAL or PADDING, "cut":
    whether there are several windows}. All windows but a sentence's last are filled up to their width. A word
    without a token becomes the unknown token."""

    tokenizer: Any
    setting: SentenceWindows
    more_columns = ("word_ids",)

    def __call__(self, cells: list[str]) -> dict[str, list]:
        tokenizer = self.tokenizer
        texts = list(map(with_spaces if self.setting.spaces else words_of, cells))
        is_special = tokenizer("a").encodings[0].special_tokens_mask
        around, leading = tokenizer("a")["input_ids"], is_special.index(0)
        first, last = around[:leading], around[len(around) - is_special[::-1].index(0) :]
        options = {"add_special_tokens": False, "verbose": False, **IDS_ALONE}
        encoded = tokenizer(texts, is_split_into_words=True, **options) if texts else {"input_ids": []}
        unknown = tokenizer.pad_token_id if tokenizer.unk_token_id is None else tokenizer.unk_token_id
        columns: dict[str, list] = {"input_ids": [], "word_ids": [], "cut": []}
        for row, (words, ids) in enumerate(zip(texts, encoded["input_ids"], strict=True)):
            groups: list[list[int]] = [[] for _ in words]
            for number, token in zip(encoded.word_ids(row), ids, strict=True):
                groups[number].append(token)
            groups = [group or [unknown] for group in groups]
            windows = list(self._windows(groups, self.setting.tokens - len(first) - len(last)))
            columns["cut"].append(len(windows) > 1)
            ids, numbers = [], []
            for window in windows:
                padding = -len(ids) % self.setting.max_length
                ids += [*[tokenizer.pad_token_id] * padding, *first, *(token for token, _ in window), *last]
                numbers += [PADDING] * padding + [SPECIAL] * len(first)
                numbers += [*(number for _, number in window), *[SPECIAL] * len(last)]
            columns["input_ids"].append(ids)
            columns["word_ids"].append(numbers)
        return columns

    def _windows(self, groups: list[list[int]], size: int) -> Iterator[list[tuple[int, int]]]:
        """Yields the (token, its word or SPECIAL) of each window of `size` tokens. `groups`: by word."""
        if sum(map(len, groups)) <= size:
            yield [(token, number) for number, group in enumerate(groups) for token in group]
            return
        context = size // CONTEXT_DIVISOR
        own = size - 2 * context
        groups = [group[:own] for group in groups]
        tokens = [(token, number) for number, group in enumerate(groups) for token in group]
        begin = 0
        while begin < len(tokens):
            end = min(begin + own, len(tokens))
            while end < len(tokens) and tokens[end][1] == tokens[end - 1][1]:
                end -= 1  # a word stays whole
            before = [(token, SPECIAL) for token, _ in tokens[max(0, begin - context) : begin]]
            behind = [(token, SPECIAL) for token, _ in tokens[end : end + context]]
            yield [*before, *tokens[begin:end], *behind]
            begin = end


def first_tokens(word_ids: Any) -> Any:
    """(..., tokens) bool: the first token of each word. `word_ids`: (..., tokens), of `WordEncoder`."""
    first = word_ids >= 0
    first[..., 1:] &= word_ids[..., 1:] != word_ids[..., :-1]
    return first


def inside_labels(labels: Sequence[str]) -> np.ndarray:
    """(labels,) the label of a word's further tokens: I- for B- of a name, else the same."""
    numbers, has_names = {label: number for number, label in enumerate(labels)}, are_names(labels)
    return np.array([numbers.get(f"I-{label[2:]}", number) if has_names and label.startswith("B-") else number
                     for label, number in numbers.items()])  # fmt: skip


# Scores


def per_type(truth: Rows, predicted: Rows, labels: Sequence[str]) -> dict[str, dict[str, float | int]]:
    """precision, recall, f1 and support of each type of `types_of` that occurs or is predicted. Whole names
    are counted, by seqeval, and "micro avg" is that of all names; of other tags, words are counted."""
    if not are_names(labels):
        numbers = {label: number for number, label in enumerate(labels)}
        found, true = (
            np.array([numbers[tag] for tag in chain.from_iterable(rows)], dtype=int)
            for rows in (predicted, truth)
        )
        confusion = confusion_matrix(found, true, len(labels))
        seen = confusion.sum(axis=0) + confusion.sum(axis=1) > 0
        rows = compress(per_class_table(confusion, list(labels)), seen)
        return {row.pop("label"): row for row in rows}
    if {*chain.from_iterable(truth), *chain.from_iterable(predicted)} <= {OUTSIDE}:
        return {}
    report = classification_report(truth, predicted, output_dict=True, zero_division=0)
    return {
        kind: {name.removesuffix("-score"): value.item() for name, value in report[kind].items()}
        for kind in [*types_of(labels), "micro avg"]
        if kind in report
    }


def scores_of(truth: Rows, predicted: Rows, labels: Sequence[str]) -> dict[str, float | None]:
    """`metric_names`, without the loss. None if undefined."""
    table = per_type(truth, predicted, labels)
    words = zip(chain.from_iterable(truth), chain.from_iterable(predicted), strict=True)
    right = [true == found for true, found in words]
    scores: dict[str, float | None] = {"accuracy": float(np.mean(right)) if right else None}
    if are_names(labels):
        total = table.pop("micro avg", {})
        scores |= {name: total.get(name) for name in ("precision", "recall", "f1")}
    scores["f1_macro"] = float(np.mean([row["f1"] for row in table.values()])) if table else None
    return scores | {f"f1_{kind}": table.get(kind, {}).get("f1") for kind in types_of(labels)}


def metric_names(labels: Sequence[str]) -> list[str]:
    """The names of the metrics: precision, recall and F1 of whole names; accuracy of words; and the F1 of
    each type of names, or of each tag."""
    return ["loss", *scores_of([], [], labels)]


def undefined_metrics(tagged: Tagged, labels: Sequence[str]) -> set[str]:
    """The metrics that these rows do not define, such as the F1 of names where no word is part of one: it is
    0 with a wrong name and None without."""
    found = [sorted(set(chain.from_iterable(tagged.rows)))]  # each tag once defines the same ones
    return {name for name, score in scores_of(found, found, labels).items() if score is None}


def commonest_tags(sentences: Sequence[str], targets: Ragged) -> tuple[dict[str, int], int]:
    """(the commonest tag of each word, that of all words), of training rows."""
    counts: dict[str, Counter[int]] = {}
    for row, cell in enumerate(sentences):
        for word, tag in zip(words_of(cell), targets[row].tolist(), strict=True):
            counts.setdefault(word, Counter())[tag] += 1
    in_all = sum(counts.values(), Counter())
    return {word: tags.most_common(1)[0][0] for word, tags in counts.items()}, in_all.most_common(1)[0][0]


# Predictions and the report


def entities_of(
    tags: Sequence[str], words: Sequence[str], text: str, scores: Sequence[float]
) -> list[dict[str, Any]]:
    """The names of a sentence: type, start and end in characters of `text`, the text between them, the first
    word and the one behind the last, and the mean probability of the tags, `scores`."""
    spans, found = spans_of(words, text), []
    for kind, first, last in get_entities(list(tags)):
        (start, _), (_, end) = spans[first], spans[last]
        score = round(float(np.mean(scores[first : last + 1])), 6)
        place = {"start": start, "end": end, "text": text[start:end], "words": [first, last + 1]}
        found.append({"type": kind, **place, "score": score})
    return found


def report_content(
    truth: Rows, predicted: Rows, labels: Sequence[str], losses: np.ndarray, sentences: Sequence[str]
) -> ReportContent:
    """F1 by type, which types are taken for which, and the sentences of the largest loss. `losses`: (rows,)
    per tagged token."""
    table = per_type(truth, predicted, labels)
    table.pop("micro avg", None)
    types = sorted(table, key=lambda kind: -table[kind]["support"])[:MAX_TYPES]
    figures = {}
    if types:
        names = [f"{kind[:NAME]} ({table[kind]['support']})" for kind in types]
        figure = bars("F1 by type", "F1", names, [table[kind]["f1"] for kind in types])
        classes = [*types, OUTSIDE] if are_names(labels) else types
        figures = {"tag_f1": figure, "tag_confusion": _confusion(truth, predicted, classes)}

    wrong = []
    for cell, *tags in zip(sentences, truth, predicted, strict=True):
        words = zip(words_of(cell), *tags, strict=True)
        wrong.append(", ".join(f"{word}: {true} → {found}" for word, true, found in words if true != found))
    columns = {"words: true → predicted": wrong, "text": list(map(text_of, sentences))}
    return ReportContent(figures, [worst_rows(losses, columns)])


def _confusion(truth: Rows, predicted: Rows, names: list[str]) -> Any:
    """The words of each type, by the type that they are taken for."""
    numbers = {name: number for number, name in enumerate(names)}
    counts = np.zeros((len(names), len(names)), dtype=np.int64)
    for pair in zip(chain.from_iterable(truth), chain.from_iterable(predicted), strict=True):
        row, column = (numbers.get(tag, PREFIXED.fullmatch(tag) and numbers.get(tag[2:])) for tag in pair)
        if row is not None and column is not None:
            counts[row, column] += 1
    return confusion("Words by type (rows) and predicted type (columns)", counts, names, len(names))


# The exported model


def check_export(folder: Path, expected: Sequence[tuple], precision: str, found: dict[str, float]) -> None:
    """Loads the folder into transformers and compares the probabilities of tags with the run's. `expected`:
    (text, token ids, the likeliest tags' probabilities, names as (type, start, end) or None) of sentences.

    Sets `found["pipeline_strategy"]` to the pipeline's aggregation that finds the run's names in most
    sentences, and `found["eval_pipeline_agreement"]` to their share. Raises `TrainingError` for other
    probabilities."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_plain(folder, AutoModelForTokenClassification)
    given = {"model": model, "tokenizer": tokenizer, "device": "cpu"}
    find = pipeline("token-classification", **given)
    agrees: dict[str, list[bool]] = {strategy: [] for strategy in STRATEGIES}
    for text, ids, probabilities, names in expected:
        inputs = torch.as_tensor(ids)[None].long()
        with torch.no_grad():
            logits = find.model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0]
        highest = logits.float().softmax(-1).amax(-1)
        check_agreement("probabilities", highest, probabilities, TOLERANCE[precision])
        # They differ where a token of the text reaches over two words.
        if names is not None and tokenizer(text)["input_ids"] == list(ids):
            for strategy, own in agrees.items():
                with warnings.catch_warnings(action="ignore"):  # on tokenizers without marks of words
                    tagged = find(text, aggregation_strategy=strategy)
                own.append([(x["entity_group"], x["start"], x["end"]) for x in tagged] == names)
    best = max(STRATEGIES, key=lambda strategy: sum(agrees[strategy]))
    if agrees[best]:
        found |= {"pipeline_strategy": best, "eval_pipeline_agreement": float(np.mean(agrees[best]))}


def model_card(folder: Path, limits: list[str]) -> ModelCard:
    """The task's part of the model card, with the scores of each type in the folder's metrics.json."""
    sections = section("Types (validation)", read_metrics(folder / METRICS).get("eval_per_type"))
    metrics = ["loss", "precision", "recall", "f1", "f1_macro", "accuracy", "pipeline_agreement"]
    known = read_metrics(folder / METRICS)
    usage = USAGE.replace("STRATEGY", known.get("pipeline_strategy", STRATEGIES[0]))
    agrees = known.get("eval_pipeline_agreement")
    if agrees is not None and agrees < 1:
        share = f"{agrees:.0%} of the sentences that were tried"
        limits = [*limits, f"The pipeline decides by token; it found the run's names in {share}."]
    return ModelCard("Token classification", "token-classification", usage, metrics, sections, limits)
