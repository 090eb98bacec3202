"""ROUGE for titles in any language, by rouge-score; and the first sentence as a title.

ROUGE-N, ROUGE-L and ROUGE-Lsum: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004. Scores
are means of the rows' F1, between 0 and 1, without stemming. They depend on the tokenizer: report its name
with the score. rouge-score's own tokenizer drops everything but a-z and 0-9, so that identical Chinese titles
would score 0.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from types import SimpleNamespace

import numpy as np

ROUGE_METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
# Han with its iteration mark and zero, and kana: written without spaces, so each character is a unit.
CJK = (
    "\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
UNIT = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
RUN = re.compile(rf"[{CJK}]+|[^\W_{CJK}]+")
IS_CJK = re.compile(f"[{CJK}]")
CJK_SHARE = 0.1
NON_ASCII_SHARE = 0.02
CHINESE_STOP = re.compile("[。！？]")
# The end of a paragraph, a Chinese stop, or a western stop between a word of three letters, a number or a
# bracket (so not "e.g." or an initial) and a space with the first letter of the next sentence.
NUMBERING = re.compile(r"\A\s*\d{1,2}[.)]\s+")  # of a list's first item
SENTENCE_END = re.compile(
    r"\n[^\S\n]*\n|(?<=[。！？])(?![”’」』）》])|(?<=[。！？][”’」』）》])"
    r"|(?:(?<=[^\W_]{3}[.!?])|(?<=[\d)\]][.!?])|(?<=[.!?][\"”)]))\s+(?=[^\Wa-z_]|[\"“(\[])"
)
SENTENCE_OPENING = re.compile(r"[\"“‘'(\[（《「『【]*$")  # quotes and brackets before the first word


# Tokenizers


def characters(text: str) -> list[str]:
    """CJK characters, and lower-case words and numbers of other scripts.

    基于BERT的方法 -> 基 于 bert 的 方 法.

    On ASCII text the tokens are those of rouge-score's own tokenizer.
    """
    return UNIT.findall(text.lower())


def words(text: str) -> list[str]:
    """As `characters`, but rjieba splits CJK text into words. 基于BERT的方法 -> 基于 bert 的 方法."""
    import rjieba

    tokens = []
    for run in RUN.findall(text.lower()):
        tokens.extend(rjieba.cut(run) if IS_CJK.match(run) else (run,))
    return tokens


def unicode_words(text: str) -> list[str]:
    """Case-folded words and numbers of any script; combining marks belong to their word. Größe हिन्दी ->
    grösse हिन्दी.

    On ASCII text the tokens are those of rouge-score's own tokenizer. Scripts without spaces (Chinese, Thai)
    are not split into words.
    """
    folded = unicodedata.normalize("NFC", text.casefold())  # é may be one character or two
    spaced = "".join(c if c.isalnum() or unicodedata.category(c).startswith("M") else " " for c in folded)
    return [word for word in spaced.split() if any(map(str.isalnum, word))]  # without the lone marks of emoji


def default(text: str) -> list[str]:
    """rouge-score's own tokenizer: lower-case runs of a-z and 0-9, without stemming."""
    from rouge_score.tokenize import tokenize

    return tokenize(text, None)


CJK_TOKENIZERS = {"characters": characters, "words": words}
TOKENIZERS = {**CJK_TOKENIZERS, "unicode_words": unicode_words, "default": default}


def choose_tokenizer(references: Sequence[str]) -> str:
    """`characters` for Chinese and Japanese, `unicode_words` for other languages than English, else
    `default`.

    Chinese and Japanese: at least a tenth of the references' units are CJK characters. Not English: at least
    one unit in fifty is not ASCII. The shares are low because `default` drops such units: identical titles in
    Cyrillic would score 0. On ASCII text all three tokenizers agree.
    """
    units = [unit for reference in references for unit in UNIT.findall(reference)]
    n_cjk = sum(IS_CJK.match(unit) is not None for unit in units)
    n_non_ascii = sum(not unit.isascii() for unit in units) - n_cjk
    if units and n_cjk >= CJK_SHARE * len(units):
        return "characters"
    return "unicode_words" if units and n_non_ascii >= NON_ASCII_SHARE * len(units) else "default"


# Scores


def rouge_scores(
    predictions: Sequence[str], references: Sequence[str], tokenizer: str
) -> dict[str, float | None]:
    """Mean F1 of ROUGE_METRICS over the rows, and `exact_match`. Without rows every score is None.

    `tokenizer`: a name in TOKENIZERS. ROUGE-Lsum splits texts into sentences at line breaks and, with CJK
    tokenizers, at 。！？. Raises ValueError for sequences of different lengths.
    """
    rouge, exact = row_scores(predictions, references, tokenizer), exact_matches(predictions, references)
    if not rouge:
        return dict.fromkeys((*ROUGE_METRICS, "exact_match"))
    means = zip(ROUGE_METRICS, np.mean(rouge, axis=0).tolist(), strict=True)
    return {**dict(means), "exact_match": float(np.mean(exact))}


def row_scores(predictions: Sequence[str], references: Sequence[str], tokenizer: str) -> list[list[float]]:
    """The F1 of ROUGE_METRICS of each row."""
    return _row_scores(tuple(predictions), tuple(references), tokenizer)


# Metrics and reports need the same scores; 2, since another split may be scored in between.
@lru_cache(maxsize=2)
def _row_scores(
    predictions: tuple[str, ...], references: tuple[str, ...], tokenizer: str
) -> list[list[float]]:
    from rouge_score.rouge_scorer import RougeScorer  # slow: imports nltk

    units = SimpleNamespace(tokenize=TOKENIZERS[tokenizer])
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=units)
    summary_scorer = RougeScorer(["rougeLsum"], tokenizer=units)
    rows = []
    for pair in zip(references, predictions, strict=True):
        # One sentence per line, as rouge-score expects. The removed stops are no tokens.
        texts = [CHINESE_STOP.sub("\n", text) if tokenizer in CJK_TOKENIZERS else text for text in pair]
        texts = [text.strip() for text in texts]
        scores = scorer.score(*texts)
        scores["rougeLsum"] = scores["rougeL"]  # equal for single sentences
        if any("\n" in text for text in texts):
            scores |= summary_scorer.score(*texts)
        rows.append([scores[name].fmeasure for name in ROUGE_METRICS])
    return rows


def exact_matches(predictions: Sequence[str], references: Sequence[str]) -> list[bool]:
    """Whether each prediction equals its reference, ignoring case and spaces, which an uncased tokenizer
    loses."""
    bare = (["".join(text.casefold().split()) for text in texts] for texts in (predictions, references))
    return [prediction == reference for prediction, reference in zip(*bare, strict=True)]


# The first sentence as a title


def first_sentence(text: str, max_units: int) -> str:
    """A title without a model: the first sentence of a document, cut after `max_units` CJK characters or
    other words.

    A sentence ends at 。！？, at . ! ? before the next sentence, or with its paragraph. A single line break
    counts as a space, since documents may be wrapped. Marks of headings and list items are dropped. Empty if
    the text holds no word.
    """
    text = NUMBERING.sub("", text)
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


def median_length(references: Sequence[str]) -> int:
    """The median length of references in UNITs, the limit of first sentences."""
    lengths = [sum(1 for _ in UNIT.finditer(reference)) for reference in references]
    return max(1, int(np.median(lengths))) if lengths else 1


def first_sentence_scores(
    texts: Sequence[str], references: Sequence[str], tokenizer: str
) -> dict[str, float | None]:
    """ROUGE_METRICS of documents' first sentences as titles."""
    limit = median_length(references)
    scores = rouge_scores([first_sentence(text, limit) for text in texts], references, tokenizer)
    return {name: scores[name] for name in ROUGE_METRICS}
