"""Chinese words as tokens: transformers' RoFormerTokenizer (rjieba, then WordPiece) over a model's vocabulary; and decoded
Chinese without the spaces that WordPiece leaves between tokens."""

import copyreg
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import BertPreTokenizer, PreTokenizer
from transformers import BertTokenizer, PreTrainedTokenizerBase, RoFormerTokenizer
from transformers.models.roformer.tokenization_utils import JiebaPreTokenizer

from finetune.errors import InputError
from finetune.reading.text_files import read_text

HAN = "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ceaf\U0002f800-\U0002fa1f]"
HAN_WORD = re.compile(HAN * 2)
# rjieba's dictionary has C++, C# and AT&T. As one word that the vocabulary lacks they would be [UNK]; BERT splits them.
MARK_IN_WORD = re.compile("(?!##).*[+#&]")

CJK = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
    "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3005-\u3007\u3021-\u302f\uff10-\uff19\uff21-\uff3a\uff41-\uff5a"  # 々〇〡, full-width ０Ａａ
)
PUNCTUATION = (  # 、。《》【】 and the full-width and vertical forms of ASCII's
    "\u3001-\u3004\u3008-\u3020\u3030-\u303f\ufe10-\ufe1f\ufe30-\ufe6f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)
WIDE = CJK + PUNCTUATION
SHARED = "“”‘’—…·"  # English uses them too, where spaces around them may be meant
ADDED_SPACE = re.compile(
    f"(?<=[{WIDE}{SHARED}]) +(?=[{WIDE}])|(?<=[{WIDE}]) +(?=[{SHARED}])"
    f"|(?<=[{PUNCTUATION}]) +| +(?=[{PUNCTUATION}])"
    rf"|(?<=[{WIDE}]) +(?=[,.:;!?%)\]}}])|(?<=[(\[{{]) +(?=[{WIDE}])"
    "|(?<=“) +| +(?=”)"
)


def jieba_tokenizer(name_or_path: str | Path, user_dictionary: str | Path | None, notes: list[str]) -> RoFormerTokenizer:
    """A RoFormerTokenizer with the WordPiece vocabulary, normalization and added tokens of a folder or a hub model.

    Its saved folder loads with plain AutoTokenizer and gives the same ids. Every word of the user dictionary that the
    vocabulary has becomes an added token with its own id: it is kept whole wherever it stands. A note tells how many others
    there are.

    Raises InputError for a user dictionary that cannot be read, and as `check_vocabulary` does.
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

    Raises InputError.
    """
    words = [line.split()[0] for line in read_text(path).split("\n") if line.strip()]
    if not words:
        raise InputError(f"--user_dictionary {path}: holds no word; write one a line, or leave the argument out")
    return words


def check_vocabulary(tokenizer: BertTokenizer, name_or_path: str | Path) -> None:
    """Raises InputError unless the tokenizer has a WordPiece vocabulary with Chinese words in it.

    transformers makes a vocabulary of five special tokens for a folder without any, and reads a sentencepiece
    vocabulary as if it were WordPiece.
    """
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    is_wordpiece = all(token in vocabulary for token in tokenizer.all_special_tokens) and not any(
        token.startswith(("\u2581", "\u0120")) for token in vocabulary
    )
    if not is_wordpiece or not any(HAN_WORD.match(token) for token in vocabulary):
        raise InputError(
            f"tokenizer {name_or_path} has no WordPiece vocabulary that holds Chinese words of two or more characters, which "
            "--tokenizer_type jieba needs; use --tokenizer_type auto or another model"
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


def join_chinese(text: str) -> str:
    """`text` without the spaces between Chinese (or Japanese) characters and beside their punctuation.

    Removed: 深 度 学 习 。 -> 深度学习。, also inside “ ” and beside ASCII punctuation that touches a Chinese character.
    Kept: spaces between Latin words or numbers, and between one of them and a Chinese character (使用 BERT 模型): the tokens
    do not tell whether the author wrote these. Idempotent.
    """
    return ADDED_SPACE.sub("", text).strip(" ")
