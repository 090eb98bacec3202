"""Trains a WordPiece vocabulary like BERT's. The ids do not depend on the order of the texts."""

from collections.abc import Collection

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import BertTokenizer

from samerun.console import counted
from samerun.errors import InputError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
MAX_WORD_CHARACTERS = 100  # WordPiece turns longer words into [UNK], so training skips them
NO_LIMIT = 2**31 - 1


def train_tokenizer(texts: Collection[str], vocab_size: int) -> BertTokenizer:
    """A BertTokenizer with a WordPiece vocabulary of at most `vocab_size` tokens, trained on `texts`.

    The vocabulary holds the special tokens (ids 0 to 4), every character of the texts, then the most frequent
    merges. Every Chinese character is a word. Words are lower-cased and lose their accents, as in BERT.
    `texts` is read twice and may be larger than memory: only the counts of distinct words are kept.

    Raises InputError if the texts hold no word or if their characters do not fit into `vocab_size`.
    """
    words = distinct_words(texts)
    vocabulary = learn_vocabulary(texts, words, vocab_size)
    return BertTokenizer(vocab=vocabulary)


def distinct_words(texts: Collection[str]) -> Collection[str]:
    """The distinct words of the texts, as BERT splits them. Raises InputError if there is none."""
    tokenizer = _bert_like(models.WordLevel())
    # This trainer does not return counts, so `learn_vocabulary` reads the texts again. On two cores both
    # passes together take a third less time than counting words in Python.
    trainer = trainers.WordLevelTrainer(
        vocab_size=NO_LIMIT, min_frequency=0, special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(counted(texts, "reading words", "texts", len(texts)), trainer)
    words = tokenizer.get_vocab(with_added_tokens=False)
    if all(len(word) > MAX_WORD_CHARACTERS for word in words):
        raise InputError(
            "the training texts hold no word, so there is nothing to train a tokenizer on; see --text_column"
        )
    return words.keys()


def learn_vocabulary(texts: Collection[str], words: Collection[str], vocab_size: int) -> dict[str, int]:
    """Token -> id, by the WordPiece trainer of `tokenizers`. `words`: the distinct words of the texts.

    The trainer numbers characters in the order of a randomly seeded hash map and breaks ties between merges
    by these numbers, so two runs differ. Passing all characters as sorted "special tokens" makes the result
    reproducible.
    """
    short = [word for word in words if len(word) <= MAX_WORD_CHARACTERS]
    characters = sorted({character for word in short for character in word})
    continuations = sorted({f"##{character}" for word in short for character in word[1:]})
    alphabet = [*SPECIAL_TOKENS, *characters, *continuations]
    if vocab_size < len(alphabet):
        raise InputError(
            f"--vocab_size {vocab_size} is too small: {len(characters)} characters, "
            f"{len(continuations)} of them also inside "
            f"words, and {len(SPECIAL_TOKENS)} special tokens need {len(alphabet)} entries before "
            "any word is learnt"
        )
    tokenizer = _bert_like(models.WordPiece(unk_token="[UNK]"))
    if len(short) < len(words):  # only if needed: it takes 50% more time
        too_long = pre_tokenizers.Split(Regex(rf"\A.{{{MAX_WORD_CHARACTERS + 1},}}\z"), "removed")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, too_long])
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=alphabet, show_progress=False)
    tokenizer.train_from_iterator(counted(texts, "training a tokenizer", "texts", len(texts)), trainer)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return dict(sorted(vocabulary.items(), key=lambda entry: entry[1]))


def _bert_like(model: models.Model) -> Tokenizer:
    """A tokenizer with BERT's normalizer and pre-tokenizer."""
    bert, tokenizer = BertTokenizer().backend_tokenizer, Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = bert.normalizer, bert.pre_tokenizer
    return tokenizer
