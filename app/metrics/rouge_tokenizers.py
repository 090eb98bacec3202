"""What ROUGE counts: the units of a title, for texts with and without spaces between words."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Protocol

# Han with its iteration mark and zero, and kana: written without spaces, so a unit of its own each
CJK = "\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
UNIT = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
RUN = re.compile(rf"[{CJK}]+|[^\W_{CJK}]+")
IS_CJK = re.compile(f"[{CJK}]")
CJK_SHARE = 0.1


class RougeTokenizer(Protocol):
    """What rouge-score's RougeScorer asks of a tokenizer."""

    def tokenize(self, text: str) -> list[str]: ...


class Characters:
    """Each CJK character, and each word or number of any other script in lower case; punctuation and spaces separate.

    On ASCII text the tokens are those of rouge-score's own tokenizer. 基于BERT的方法 -> 基 于 bert 的 方 法.
    """

    def tokenize(self, text: str) -> list[str]:
        return UNIT.findall(text.lower())


class Words:
    """As Characters, but a run of CJK characters is cut into words by rjieba. 基于BERT的方法 -> 基于 bert 的 方法."""

    def tokenize(self, text: str) -> list[str]:
        import rjieba

        tokens = []
        for run in RUN.findall(text.lower()):
            tokens.extend(rjieba.cut(run) if IS_CJK.match(run) else (run,))
        return tokens


def default_tokenizer() -> RougeTokenizer:
    """rouge-score's own: lower-case runs of a-z and 0-9, everything else separates, no stemming."""
    from rouge_score.tokenizers import DefaultTokenizer

    return DefaultTokenizer()


TOKENIZERS = {"characters": Characters, "words": Words, "default": default_tokenizer}


@cache
def rouge_tokenizer(name: str) -> RougeTokenizer:
    """The tokenizer of that name in TOKENIZERS. Raises ValueError for any other name."""
    if name not in TOKENIZERS:
        raise ValueError(f"no ROUGE tokenizer is named {name!r}: choose one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()


def choose_tokenizer(references: Sequence[str]) -> str:
    """`characters` when at least a tenth of the references' units are CJK characters, otherwise `default`.

    A tenth, not a half: `default` drops all Chinese, so rows in Chinese would score 0 however good, while on ASCII text
    the two agree and nothing is lost by choosing `characters`.
    """
    units = [unit for reference in references for unit in UNIT.findall(reference)]
    n_cjk = sum(IS_CJK.match(unit) is not None for unit in units)
    return "characters" if units and n_cjk >= CJK_SHARE * len(units) else "default"
