"""Chinese words as tokens: transformers' RoFormerTokenizer (rjieba, then WordPiece) over a model's vocabulary."""

import copyreg
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import BertPreTokenizer, PreTokenizer
from transformers import BertTokenizer, PreTrainedTokenizerBase, RoFormerTokenizer
from transformers.models.roformer.tokenization_utils import JiebaPreTokenizer

from finetune.errors import InputError

HAN = "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ceaf\U0002f800-\U0002fa1f]"
HAN_WORD = re.compile(HAN * 2)
# rjieba's dictionary has C++, C# and AT&T. As one word that the vocabulary lacks they would be [UNK]; BERT splits them.
MARK_IN_WORD = re.compile("(?!##).*[+#&]")


def jieba_tokenizer(name_or_path: str | Path, user_dictionary: str | Path | None, notes: list[str]) -> RoFormerTokenizer:
    """A RoFormerTokenizer with the WordPiece vocabulary, normalization and added tokens of a folder or a hub model.

    Its saved folder loads with plain AutoTokenizer and gives the same ids. Every word of the user dictionary that the
    vocabulary has becomes an added token with its own id: it is kept whole wherever it stands. A note tells how many others
    there are.

    Raises InputError for a bad user dictionary, without a vocabulary, and for one that is not BERT's WordPiece or holds no
    Chinese word of two or more characters.
    """
    words = read_user_dictionary(user_dictionary) if user_dictionary is not None else []
    stock = BertTokenizer.from_pretrained(str(name_or_path))
    check_vocabulary(stock, name_or_path)
    # RoFormerTokenizer.from_pretrained takes the path of a vocab.txt for the vocabulary and then finds no word in it.
    tokenizer = RoFormerTokenizer(
        vocab=stock.backend_tokenizer.get_vocab(with_added_tokens=False),
        do_lower_case=stock.do_lower_case,
        strip_accents=stock.strip_accents,
        model_max_length=stock.model_max_length,
        padding_side=stock.padding_side,
        truncation_side=stock.truncation_side,
        model_input_names=stock.model_input_names,
        **stock.special_tokens_map,
    )
    tokenizer.add_tokens([token for _, token in sorted(stock.added_tokens_decoder.items())])
    tokenizer.add_tokens([AddedToken(token) for token in stock.get_vocab() if MARK_IN_WORD.match(token)])
    if words:
        keep_whole(tokenizer, words, f"user dictionary {user_dictionary}", notes)
    return tokenizer


def keep_whole(tokenizer: PreTrainedTokenizerBase, words: list[str], source: str, notes: list[str]) -> None:
    """Makes added tokens of those words that the vocabulary has, with the ids that they have; notes how many it lacks."""
    normalize, vocabulary = tokenizer.backend_tokenizer.normalizer.normalize_str, tokenizer.get_vocab()
    normalized = dict.fromkeys(map(normalize, words))
    known = [word for word in normalized if word in vocabulary]
    # A single character would be cut out of every word; a Latin word counts only between spaces or marks.
    tokenizer.add_tokens([AddedToken(word, single_word=word.isascii()) for word in known if len(word) > 1])
    if len(known) < len(normalized):
        missing = next(word for word in normalized if word not in vocabulary)
        notes.append(
            f"{source}: {len(normalized) - len(known)} of {len(normalized)} words are not in the vocabulary and change "
            f"nothing, such as {missing!r}"
        )


def read_user_dictionary(path: str | Path) -> list[str]:
    """The words of a UTF-8 file in jieba's format, "word [frequency [tag]]" per line. Frequencies and tags mean nothing here.

    Raises InputError with every bad line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"user dictionary: {path} cannot be read ({error.strerror}). Name an existing file.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"user dictionary: {path} is not UTF-8 (byte {error.start}). Save it as UTF-8.") from None
    rows = [(number, line.split()) for number, line in enumerate(lines, start=1) if line.strip()]
    problems = [
        f"user dictionary: {path}:{number}: {' '.join(fields)!r} is not 'word [frequency [tag]]'."
        for number, fields in rows
        if len(fields) > 3 or (len(fields) > 1 and not (fields[1].isascii() and fields[1].isdigit()))
    ]
    if not rows:
        problems.append(f"user dictionary: {path} holds no word. Write one word per line or drop the argument.")
    if problems:
        raise InputError(*problems)
    return [fields[0] for _, fields in rows]


def check_vocabulary(tokenizer: BertTokenizer, name_or_path: str | Path) -> None:
    """Raises InputError unless the tokenizer has a WordPiece vocabulary with Chinese words in it.

    transformers makes a vocabulary of five special tokens for a folder without any, and reads a sentencepiece
    vocabulary as if it were WordPiece.
    """
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    if len(vocabulary) <= len(tokenizer.all_special_tokens):
        raise InputError(f"tokenizer: {name_or_path} holds no vocabulary. Name a folder or model with a vocab.txt.")
    missing = [token for token in tokenizer.all_special_tokens if token not in vocabulary]
    if missing or any(token.startswith(("\u2581", "\u0120")) for token in vocabulary):
        raise InputError(
            f"tokenizer: the vocabulary of {name_or_path} is not BERT's WordPiece, which --tokenizer_type jieba needs "
            f"(special tokens missing: {', '.join(missing) or 'none'}). Use --tokenizer_type auto."
        )
    if not any(HAN_WORD.match(token) for token in vocabulary):
        raise InputError(
            f"tokenizer: the vocabulary of {name_or_path} holds no Chinese word of two or more characters, so cutting "
            "text into words would change nothing. Use --tokenizer_type auto or a model with a vocabulary of words."
        )


def backend_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """The Rust tokenizer as JSON, BERT's pre-tokenizer standing for rjieba's, which cannot be serialized."""
    backend = tokenizer.backend_tokenizer
    if not isinstance(tokenizer, RoFormerTokenizer):
        return backend.to_str()
    backend.pre_tokenizer = BertPreTokenizer()
    try:
        return backend.to_str()
    finally:
        backend.pre_tokenizer = PreTokenizer.custom(JiebaPreTokenizer(backend.get_vocab()))


def _reduce(tokenizer: RoFormerTokenizer) -> tuple[Any, ...]:
    state = {**tokenizer.__dict__, "_tokenizer": Tokenizer.from_str(backend_json(tokenizer))}
    return copyreg.__newobj__, (RoFormerTokenizer,), state


# transformers 5.17 and 5.23: its own __getstate__ fails with "Custom PreTokenizer cannot be serialized".
copyreg.pickle(RoFormerTokenizer, _reduce)
