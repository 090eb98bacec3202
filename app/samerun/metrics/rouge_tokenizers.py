"""Tokenizers for ROUGE, for languages with and without spaces between words."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class RougeTokenizer(NamedTuple):
    """The tokenizer interface of rouge-score's RougeScorer."""

    tokenize: Callable[[str], list[str]]


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
    spaced = "".join(
        char if char.isalnum() or unicodedata.category(char).startswith("M") else " " for char in folded
    )
    return [word for word in spaced.split() if any(map(str.isalnum, word))]  # without the lone marks of emoji


def default(text: str) -> list[str]:
    """rouge-score's own tokenizer: lower-case runs of a-z and 0-9, without stemming."""
    from rouge_score.tokenize import tokenize

    return tokenize(text, None)


CJK_TOKENIZERS = {"characters": characters, "words": words}
TOKENIZERS = {**CJK_TOKENIZERS, "unicode_words": unicode_words, "default": default}


def rouge_tokenizer(name: str) -> RougeTokenizer:
    """The tokenizer of that name in TOKENIZERS. Raises ValueError for any other name."""
    if name not in TOKENIZERS:
        raise ValueError(f"no ROUGE tokenizer is named {name!r}: choose one of {', '.join(TOKENIZERS)}")
    return RougeTokenizer(TOKENIZERS[name])


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
