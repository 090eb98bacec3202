"""Train a BERT-style WordPiece vocabulary: offline, on all cores, the same ids for the same texts in any order."""

from collections.abc import Collection, Iterable, Iterator, Sized
from typing import Protocol

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import BertTokenizer

from finetune.errors import InputError
from finetune.reading.progress import progress

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
LONGEST_WORD = 100  # characters; WordPiece reads a longer word as [UNK], so there is nothing to learn from it
ALL_WORDS = 2**31 - 1


class Texts(Sized, Iterable[str], Protocol):
    """Texts that can be read more than once, such as a list."""


def train_tokenizer(texts: Texts, vocab_size: int, lowercase: bool = True) -> BertTokenizer:
    """A transformers' BertTokenizer whose WordPiece vocabulary of at most `vocab_size` tokens was learnt from `texts`.

    The vocabulary holds the special tokens (ids 0 to 4), every character of the texts, then the merges, most frequent
    first. It is smaller than `vocab_size` when the texts have nothing left to merge. `texts` is read twice and may be
    larger than memory: only the count of each distinct word is kept. Chinese characters are words of their own;
    `lowercase` also strips accents, as BERT does. The saved folder holds no code of ours: AutoTokenizer loads it.

    Raises InputError when there is no word in the texts, when one is not a string, or when the characters alone do not
    fit into `vocab_size`.
    """
    words = distinct_words(texts, lowercase)
    vocabulary = learn_vocabulary(texts, words, vocab_size, lowercase)
    return BertTokenizer(vocab=vocabulary, do_lower_case=lowercase)


def distinct_words(texts: Texts, lowercase: bool) -> Collection[str]:
    """Every word of the texts once, words being what BERT's normalizer and pre-tokenizer make of them, too long ones included.
    Raises `InputError`."""
    learner = _reader(models.WordLevel(), lowercase)
    # It numbers words by their count and does not tell it, so the texts are read twice: on two cores still in two thirds of the
    # time that counting them in Python takes.
    trainer = trainers.WordLevelTrainer(vocab_size=ALL_WORDS, min_frequency=0, special_tokens=[], show_progress=False)
    learner.train_from_iterator(_checked(texts, "reading words"), trainer)
    words = learner.get_vocab(with_added_tokens=False)
    if all(len(word) > LONGEST_WORD for word in words):
        raise InputError(
            "vocabulary: the texts hold no word, so there is nothing to train a tokenizer on. "
            "Check the training file and its text column."
        )
    return words.keys()


def learn_vocabulary(texts: Texts, words: Collection[str], vocab_size: int, lowercase: bool) -> dict[str, int]:
    """Token -> id by the WordPiece trainer of `tokenizers`, independent of the order in which it visits the words.

    That trainer numbers the single-character pieces in the order of a randomly seeded hash map and breaks ties between
    equally frequent merges by those numbers, so two runs over the same texts give different vocabularies. Handing it
    all the single characters beforehand, sorted, as "special tokens" leaves it nothing to number by chance. `words`: those
    of the texts.
    """
    short = [word for word in words if len(word) <= LONGEST_WORD]
    characters = sorted({character for word in short for character in word})
    continuations = sorted({f"##{character}" for word in short for character in word[1:]})
    alphabet = [*SPECIAL_TOKENS, *characters, *continuations]
    if vocab_size < len(alphabet):
        raise InputError(
            f"vocabulary: a size of {vocab_size} is too small: the texts have {len(characters)} different characters, "
            f"{len(continuations)} of them also inside words, which with {len(SPECIAL_TOKENS)} special tokens need "
            f"{len(alphabet)} entries before any word is learnt. Ask for more than {len(alphabet)}."
        )
    learner = _reader(models.WordPiece(unk_token="[UNK]"), lowercase)
    if len(short) < len(words):
        too_long = pre_tokenizers.Split(Regex(rf"\A.{{{LONGEST_WORD + 1},}}\z"), "removed")  # takes half as long again
        learner.pre_tokenizer = pre_tokenizers.Sequence([learner.pre_tokenizer, too_long])
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=alphabet, show_progress=False)
    learner.train_from_iterator(_checked(texts, "learning a vocabulary"), trainer)
    vocabulary = learner.get_vocab(with_added_tokens=False)
    return dict(sorted(vocabulary.items(), key=lambda entry: entry[1]))


def _reader(model: models.Model, lowercase: bool) -> Tokenizer:
    """A tokenizer that reads words as BERT does."""
    stock, reader = BertTokenizer(do_lower_case=lowercase).backend_tokenizer, Tokenizer(model)
    reader.normalizer, reader.pre_tokenizer = stock.normalizer, stock.pre_tokenizer
    return reader


def _checked(texts: Texts, what: str) -> Iterator[str]:
    """The texts, with a bar. Raises `InputError` for one that is none."""
    with progress(what, "texts", len(texts)) as bar:
        for number, text in enumerate(texts, start=1):
            if not isinstance(text, str):
                raise InputError(
                    f"vocabulary: text {number} is {text!r} ({type(text).__name__}), not a string. "
                    "Every row that a vocabulary is trained on needs a text: fill it in or drop the row."
                )
            yield text
            bar.update()
