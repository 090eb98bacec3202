"""Chinese text: word tokenization with transformers' RoFormerTokenizer (rjieba, then WordPiece), and
detokenization without WordPiece's spaces."""

import copyreg
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import BertPreTokenizer, PreTokenizer
from transformers import BertTokenizer, PreTrainedTokenizerBase, RoFormerTokenizer
from transformers.models.roformer.tokenization_utils import JiebaPreTokenizer

from samerun.data.files import read_text
from samerun.errors import InputError

HAN = "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ceaf\U0002f800-\U0002fa1f]"
HAN_WORD = re.compile(HAN * 2)
# rjieba keeps C++, C# and AT&T as single words. BERT splits them, so only those in the vocabulary may stay
# whole.
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


def jieba_tokenizer(
    name_or_path: str | Path, user_dictionary: str | Path | None, notes: list[str]
) -> RoFormerTokenizer:
    """A RoFormerTokenizer with the WordPiece vocabulary, normalization and added tokens of a folder or a hub
    model.

    Its saved folder loads with plain AutoTokenizer and gives the same ids. `add_user_words` adds the user
    dictionary.

    Raises InputError for an unreadable user dictionary and for a vocabulary without Chinese words.
    """
    words = read_user_dictionary(user_dictionary) if user_dictionary is not None else []
    bert = BertTokenizer.from_pretrained(str(name_or_path))
    check_vocabulary(bert, name_or_path)
    # RoFormerTokenizer.from_pretrained mistakes the path of vocab.txt for the vocabulary.
    tokenizer = RoFormerTokenizer(
        vocab=bert.backend_tokenizer.get_vocab(with_added_tokens=False),
        do_lower_case=bert.do_lower_case,
        strip_accents=bert.strip_accents,
        model_max_length=bert.model_max_length,
        padding_side=bert.padding_side,
        truncation_side=bert.truncation_side,
        model_input_names=bert.model_input_names,
        **bert.special_tokens_map,
    )
    tokenizer.add_tokens([token for _, token in sorted(bert.added_tokens_decoder.items())])
    tokenizer.add_tokens([AddedToken(token) for token in bert.get_vocab() if MARK_IN_WORD.match(token)])
    if words:
        add_user_words(tokenizer, words, f"user dictionary {user_dictionary}", notes)
    return tokenizer


def add_user_words(
    tokenizer: PreTrainedTokenizerBase, words: list[str], source: str, notes: list[str]
) -> None:
    """Adds the words of the vocabulary as tokens with their present ids, so that they are never split; counts
    the others in a note."""
    normalize, vocabulary = tokenizer.backend_tokenizer.normalizer.normalize_str, tokenizer.get_vocab()
    normalized = dict.fromkeys(map(normalize, words))
    known = [word for word in normalized if word in vocabulary]
    # An added single character would split every word that contains it. Latin words match only as whole
    # words.
    tokenizer.add_tokens([AddedToken(word, single_word=word.isascii()) for word in known if len(word) > 1])
    if len(known) < len(normalized):
        missing = next(word for word in normalized if word not in vocabulary)
        notes.append(
            f"{source}: {len(normalized) - len(known)} of {len(normalized)} words are not in the "
            "vocabulary and change "
            f"nothing, such as {missing!r}"
        )


def read_user_dictionary(path: str | Path) -> list[str]:
    """The words of a UTF-8 file in jieba's format, "word [frequency [tag]]" per line. Frequencies and tags
    are ignored.

    Raises InputError.
    """
    words = [line.split()[0] for line in read_text(path).split("\n") if line.strip()]
    if not words:
        raise InputError(
            f"--user_dictionary {path}: holds no word; write one per line, or leave the argument out"
        )
    return words


def check_vocabulary(tokenizer: BertTokenizer, name_or_path: str | Path) -> None:
    """Raises InputError unless the tokenizer has a WordPiece vocabulary with Chinese words.

    BertTokenizer loads without an error from a folder without a vocabulary, and from a SentencePiece
    vocabulary.
    """
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    is_wordpiece = all(token in vocabulary for token in tokenizer.all_special_tokens) and not any(
        token.startswith(("\u2581", "\u0120")) for token in vocabulary
    )
    if not is_wordpiece or not any(HAN_WORD.match(token) for token in vocabulary):
        raise InputError(
            f"tokenizer {name_or_path} has no WordPiece vocabulary that holds Chinese words of two "
            "or more characters, which "
            "--tokenizer_type jieba needs; use --tokenizer_type auto or another model"
        )


def backend_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """The Rust tokenizer as JSON. BERT's pre-tokenizer replaces rjieba's, which cannot be serialized."""
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


# In transformers 5.17 and 5.23 RoFormerTokenizer.__getstate__ fails with "Custom PreTokenizer cannot be
# serialized".
copyreg.pickle(RoFormerTokenizer, _reduce)


def join_chinese(text: str) -> str:
    """Removes spaces between Chinese or Japanese characters and beside their punctuation:
    深 度 学 习 。 -> 深度学习。

    Spaces inside “ ” and beside ASCII punctuation that touches a Chinese character go, too. Spaces beside a
    Latin word or a number stay (使用 BERT 模型): the tokens do not show whether the author wrote them.
    Idempotent.
    """
    return ADDED_SPACE.sub("", text).strip(" ")
