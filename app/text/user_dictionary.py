"""The user's words for rjieba: a text file in jieba's format, read strictly."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from finetune.errors import InputError

if TYPE_CHECKING:
    import rjieba


class UserWord(NamedTuple):
    """One line of the file: the word, then optionally its frequency and its part of speech."""

    word: str
    frequency: int | None
    tag: str | None


@lru_cache(maxsize=4)
def rjieba_dictionary(user_words: tuple[UserWord, ...], hmm: bool) -> rjieba.Jieba:
    """rjieba with its own dictionary and the user's words; shared, since one takes 25 MB and a fifth of a second.

    Raises InputError for the words that rjieba cannot keep whole: it always cuts at spaces and at most punctuation.
    """
    import rjieba  # a fifth of a second, which every tokenizer's loading would take

    jieba = rjieba.Jieba()
    for word in user_words:
        jieba.add_word(*word)
    broken = [word for word, frequency, _ in user_words if frequency is None and jieba.cut(word, hmm) != [word]]
    if broken:
        raise InputError(
            *(
                f"user dictionary: rjieba cuts {word!r} into {jieba.cut(word, hmm)} whatever the dictionary says. "
                "A word may hold Chinese characters, ASCII letters, digits and + # & . _ % -: remove it or write it so."
                for word in broken
            )
        )
    return jieba


def read_user_dictionary(path: str | Path) -> tuple[UserWord, ...]:
    """The words of a file in jieba's format; blank lines are skipped. Raises InputError with every bad line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"user dictionary: {path} cannot be read ({error.strerror}). Name an existing file.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"user dictionary: {path} is not UTF-8 (byte {error.start}). Save it as UTF-8.") from None
    words, problems = [], []
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if len(fields) > 3 or (len(fields) > 1 and not (fields[1].isascii() and fields[1].isdigit())):
            problems.append(f"user dictionary: {path}:{number}: {line.strip()!r} is not 'word [frequency [tag]]'.")
        elif fields:
            word, frequency, tag = [*fields, None, None][:3]
            words.append(UserWord(word, None if frequency is None else int(frequency), tag))
    if not words and not problems:
        problems.append(f"user dictionary: {path} holds no word. Write one word per line or drop the argument.")
    if problems:
        raise InputError(*problems)
    return tuple(words)
