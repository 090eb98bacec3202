"""Train a BERT-style WordPiece vocabulary: offline, in one pass, the same ids for the same texts in any order."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertTokenizer

from finetune.failure import InputError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
LONGEST_WORD = 100  # characters; WordPiece reads a longer word as [UNK], so there is nothing to learn from it
WORDS_PER_CHUNK = 4096


def train_tokenizer(texts: Iterable[str], vocab_size: int, lowercase: bool = True) -> BertTokenizer:
    """A transformers' BertTokenizer whose WordPiece vocabulary of at most `vocab_size` tokens was learnt from `texts`.

    The vocabulary holds the special tokens (ids 0 to 4), every character of the texts, then the merges, most frequent
    first. It is smaller than `vocab_size` when the texts have nothing left to merge. `texts` is read once and may be
    larger than memory: only the count of each distinct word is kept. Chinese characters are words of their own;
    `lowercase` also strips accents, as BERT does. The saved folder holds no code of ours: AutoTokenizer loads it.

    Raises InputError when there is no word in the texts, when one is not a string, or when the characters alone do not
    fit into `vocab_size`.
    """
    counts = count_words(texts, lowercase)
    vocabulary = learn_vocabulary(counts, vocab_size)
    return BertTokenizer(vocab=vocabulary, do_lower_case=lowercase)


def count_words(texts: Iterable[str], lowercase: bool) -> Counter[str]:
    """How often each word occurs, words being what BERT's normalizer and pre-tokenizer make of the texts."""
    backend = BertTokenizer(do_lower_case=lowercase).backend_tokenizer
    normalize, split = backend.normalizer.normalize_str, backend.pre_tokenizer.pre_tokenize_str
    counts: Counter[str] = Counter()
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise InputError(
                f"vocabulary: text {number} is {text!r} ({type(text).__name__}), not a string. "
                "Every row that a vocabulary is trained on needs a text: fill it in or drop the row."
            )
        counts.update(word for word, _ in split(normalize(text)) if len(word) <= LONGEST_WORD)
    if not counts:
        raise InputError(
            "vocabulary: the texts hold no word, so there is nothing to train a tokenizer on. "
            "Check the training file and its text column."
        )
    return counts


def learn_vocabulary(counts: Mapping[str, int], vocab_size: int) -> dict[str, int]:
    """Token -> id by the WordPiece trainer of `tokenizers`, independent of the order in which it visits the words.

    That trainer numbers the single-character pieces in the order of a randomly seeded hash map and breaks ties between
    equally frequent merges by those numbers, so two runs over the same texts give different vocabularies. Handing it
    all the single characters beforehand, sorted, as "special tokens" leaves it nothing to number by chance.
    """
    characters = sorted({character for word in counts for character in word})
    continuations = sorted({f"##{character}" for word in counts for character in word[1:]})
    alphabet = [*SPECIAL_TOKENS, *characters, *continuations]
    if vocab_size < len(alphabet):
        raise InputError(
            f"vocabulary: a size of {vocab_size} is too small: the texts have {len(characters)} different characters, "
            f"{len(continuations)} of them also inside words, which with {len(SPECIAL_TOKENS)} special tokens need "
            f"{len(alphabet)} entries before any word is learnt. Ask for more than {len(alphabet)}."
        )
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=alphabet, show_progress=False)
    learner.train_from_iterator(repeat_words(counts), trainer)
    vocabulary = learner.get_vocab(with_added_tokens=False)
    return dict(sorted(vocabulary.items(), key=lambda entry: entry[1]))


def repeat_words(counts: Mapping[str, int]) -> Iterator[str]:
    """The words as often as they were counted, in chunks of bounded length: the trainer takes texts, not counts."""
    for word, count in counts.items():
        for start in range(0, count, WORDS_PER_CHUNK):
            yield " ".join([word] * min(WORDS_PER_CHUNK, count - start))
