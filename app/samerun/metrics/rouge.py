"""ROUGE for titles in any language, by rouge-score; and the lead baseline.

ROUGE-N, ROUGE-L and ROUGE-Lsum: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004. Scores
are means of the rows' F1, between 0 and 1, without stemming. They depend on the tokenizer: report its name
with the score.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

import numpy as np

from samerun.metrics.rouge_tokenizers import CJK_TOKENIZERS, UNIT, rouge_tokenizer

ROUGE_METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
CHINESE_STOP = re.compile("[。！？]")

# The end of a paragraph, a Chinese stop, or a western stop between a word of three letters, a number or a
# bracket (so not "e.g." or an initial) and a space with the first letter of the next sentence.
SENTENCE_END = re.compile(
    r"\n[^\S\n]*\n|(?<=[。！？])(?![”’」』）》])|(?<=[。！？][”’」』）》])"
    r"|(?:(?<=[^\W_]{3}[.!?])|(?<=[\d)\]][.!?])|(?<=[.!?][\"”)]))\s+(?=[^\Wa-z_]|[\"“(\[])"
)
SENTENCE_OPENING = re.compile(r"[\"“‘'(\[（《「『【]*$")  # quotes and brackets before the first word


def rouge_scores(
    predictions: Sequence[str], references: Sequence[str], tokenizer: str
) -> dict[str, float | None]:
    """Mean F1 of ROUGE_METRICS over the rows, and `exact_match`. Without rows every score is None.

    `tokenizer`: a name in `rouge_tokenizers.TOKENIZERS`. ROUGE-Lsum splits texts into sentences at line
    breaks and, with CJK tokenizers, at 。！？.

    Raises ValueError for sequences of different lengths and for an unknown tokenizer.
    """
    if len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions for {len(references)} references: one of each per row"
        )
    rouge, exact = row_scores(predictions, references, tokenizer), exact_matches(predictions, references)
    if not rouge:
        return dict.fromkeys((*ROUGE_METRICS, "exact_match"))
    means = zip(ROUGE_METRICS, np.mean(rouge, axis=0).tolist(), strict=True)
    return {**dict(means), "exact_match": float(np.mean(exact))}


def row_scores(predictions: Sequence[str], references: Sequence[str], tokenizer: str) -> list[list[float]]:
    """The F1 of ROUGE_METRICS of each row."""
    return _row_scores(tuple(predictions), tuple(references), tokenizer)


@lru_cache(
    maxsize=2
)  # metrics and reports need the same scores; 2, since another split may be scored in between
def _row_scores(
    predictions: tuple[str, ...], references: tuple[str, ...], tokenizer: str
) -> list[list[float]]:
    from rouge_score.rouge_scorer import RougeScorer  # slow: imports nltk

    units = rouge_tokenizer(tokenizer)
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=units)
    summary_scorer = RougeScorer(["rougeLsum"], tokenizer=units)
    rows = []
    for prediction, reference in zip(predictions, references, strict=True):
        texts = [sentence_lines(text, tokenizer) for text in (reference, prediction)]
        scores = scorer.score(*texts)
        scores["rougeLsum"] = scores["rougeL"]  # equal for single sentences
        if any("\n" in text for text in texts):
            scores |= summary_scorer.score(*texts)
        rows.append([scores[name].fmeasure for name in ROUGE_METRICS])
    return rows


def sentence_lines(text: str, tokenizer: str) -> str:
    """`text` with one sentence per line, as rouge-score expects. The removed stops are no tokens."""
    return (CHINESE_STOP.sub("\n", text) if tokenizer in CJK_TOKENIZERS else text).strip()


def exact_matches(predictions: Sequence[str], references: Sequence[str]) -> list[bool]:
    """Whether each prediction equals its reference, ignoring case and spaces, which an uncased tokenizer
    loses."""
    return [
        _bare(prediction) == _bare(reference)
        for prediction, reference in zip(predictions, references, strict=True)
    ]


def _bare(text: str) -> str:
    return "".join(text.casefold().split())


def lead_baseline(text: str, max_units: int) -> str:
    """A title without a model: the first sentence of a document, cut after `max_units` CJK characters or
    other words.

    A sentence ends at 。！？, at . ! ? before the next sentence, or with its paragraph. A single line break
    counts as a space, since documents may be wrapped. Marks of headings and list items are dropped. Empty if
    the text holds no word.

    Raises ValueError unless `max_units` is positive.
    """
    if max_units < 1:
        raise ValueError(f"max_units is {max_units}: a lead has at least one word")
    first = UNIT.search(text)
    if first is None:
        return ""
    stop = SENTENCE_END.search(text, first.end())
    ends = [unit.end() for unit in islice(UNIT.finditer(text, first.start()), max_units + 1)]
    end = stop.start() if stop else len(text)
    if len(ends) > max_units:
        end = min(end, ends[max_units - 1])
    opening = SENTENCE_OPENING.search(text, 0, first.start()).start()
    return " ".join(text[opening:end].split())


def lead_length(references: Sequence[str]) -> int:
    """The median length of references in UNITs, used as the limit of leads."""
    lengths = [sum(1 for _ in UNIT.finditer(reference)) for reference in references]
    return max(1, int(np.median(lengths))) if lengths else 1


def lead_scores(texts: Sequence[str], references: Sequence[str], tokenizer: str) -> dict[str, float | None]:
    """ROUGE_METRICS of the lead baseline."""
    limit = lead_length(references)
    scores = rouge_scores([lead_baseline(text, limit) for text in texts], references, tokenizer)
    return {name: scores[name] for name in ROUGE_METRICS}
