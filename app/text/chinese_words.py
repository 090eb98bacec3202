"""A tokenizer that reads Chinese by words: rjieba cuts first, WordPiece follows, for vocabularies of whole words."""

import re
from collections.abc import Callable, Container
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from finetune.errors import InputError
from text.user_dictionary import read_user_dictionary, rjieba_dictionary

SEGMENTER = "rjieba"  # the marker in tokenizer_config.json
USER_DICTIONARY = "user_dictionary.txt"
# what BERT's normalizer sets apart as single characters
HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ceaf\U0002f800-\U0002fa1f]")
CACHED_WORDS = 1 << 17


class JiebaTokenizer(BertTokenizer):
    """A BertTokenizer whose Chinese words come from rjieba.

    A word that is in the vocabulary is one token; any other falls back to what BertTokenizer makes of it: single
    characters, and WordPiece for Latin. A stretch between spaces that holds no Chinese character is BertTokenizer's
    alone, unless the vocabulary has it whole. `hmm` lets rjieba guess words that its dictionary lacks.

    Text reaches the Rust tokenizer as words joined by spaces, so batches stay nearly as fast as a stock tokenizer's;
    character offsets would be those of the joined text and are refused. Make one with `jieba_tokenizer`, load a saved
    one with `load_tokenizer`. The saved folder is a stock BertTokenizer's plus a marker and the user dictionary: plain
    AutoTokenizer reads it with the same vocabulary, by characters.
    """

    vocab_files_names = {**BertTokenizer.vocab_files_names, "user_dictionary_file": USER_DICTIONARY}  # noqa: RUF012

    def __init__(self, *args: Any, user_dictionary_file: str | None = None, hmm: bool = False, **kwargs: Any):
        kwargs["segmenter"] = SEGMENTER
        super().__init__(*args, hmm=hmm, **kwargs)
        self.hmm = hmm
        self.user_words = read_user_dictionary(user_dictionary_file) if user_dictionary_file else ()
        self._stock_parts = (self._tokenizer.normalizer, self._tokenizer.pre_tokenizer)
        self._segment = None
        self._read_words()

    def _read_words(self) -> None:
        """The Rust part gets text that is normalized and split already, see `segmenter`."""
        self._tokenizer.normalizer = None
        self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_segment": None}  # rjieba's dictionary does not pickle; it is rebuilt on first use

    def segment(self, text: str) -> str:
        """`text` normalized, its words separated by spaces; special and added tokens stay as they are."""
        if self._segment is None:
            self._segment = segmenter(
                whole_words(self._tokenizer.get_vocab(with_added_tokens=False)),
                rjieba_dictionary(self.user_words, self.hmm).cut,
                self.hmm,
                lowercase=self.do_lower_case,
                strip_accents=self.strip_accents,
            )
        parts = re.split("(" + "|".join(map(re.escape, self.added_tokens_encoder)) + ")", text)
        return " ".join(part if odd % 2 else self._segment(part) for odd, part in enumerate(parts))

    def _encode_plus(self, text, text_pair=None, *, return_offsets_mapping: bool = False, **kwargs):
        if return_offsets_mapping:
            raise NotImplementedError("JiebaTokenizer has no character offsets: it encodes the text cut into words.")
        return super()._encode_plus(map_strings(self.segment, text), map_strings(self.segment, text_pair), **kwargs)

    def _save_pretrained(self, save_directory, file_names, *args: Any, **kwargs: Any):
        """Runs after tokenizer_config.json is written and before anything is pushed to a hub."""
        self._tokenizer.normalizer, self._tokenizer.pre_tokenizer = self._stock_parts
        try:
            file_names = super()._save_pretrained(save_directory, file_names, *args, **kwargs)
        finally:
            self._read_words()
        config = Path(file_names[0])
        ours, stock = (f'"tokenizer_class": "{kind.__name__}"' for kind in (JiebaTokenizer, BertTokenizer))
        config.write_text(config.read_text(encoding="utf-8").replace(ours, stock), encoding="utf-8")
        if not self.user_words:
            return file_names
        dictionary = Path(save_directory, USER_DICTIONARY)
        lines = (" ".join(str(field) for field in word if field is not None) for word in self.user_words)
        dictionary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return (*file_names, str(dictionary))


def jieba_tokenizer(
    name_or_path: str | Path, user_dictionary: str | Path | None = None, hmm: bool = False, **kwargs: Any
) -> JiebaTokenizer:
    """The words-first tokenizer over the vocab.txt (or WordPiece tokenizer.json) of a folder or a hub model.

    `user_dictionary` is a UTF-8 file in jieba's format, one "word [frequency [tag]]" per line; a word without frequency
    gets one that keeps it whole. The dictionary decides where text is cut; a word that the vocabulary lacks still
    becomes characters. Further arguments go to `from_pretrained`.

    Raises InputError when there is no vocabulary, when it is not a BERT-style one or holds no Chinese word of two or
    more characters (rjieba would change nothing), and for every bad line of the user dictionary.
    """
    if user_dictionary is not None:
        rjieba_dictionary(read_user_dictionary(user_dictionary), hmm)
        kwargs["user_dictionary_file"] = str(user_dictionary)
    tokenizer = JiebaTokenizer.from_pretrained(str(name_or_path), hmm=hmm, **kwargs)
    check_vocabulary(tokenizer, name_or_path)
    return tokenizer


def load_tokenizer(name_or_path: str | Path, **kwargs: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub model: a JiebaTokenizer where one was saved, else what AutoTokenizer finds."""
    if get_tokenizer_config(str(name_or_path), **kwargs).get("segmenter") == SEGMENTER:
        kwargs.pop("trust_remote_code", None)
        return JiebaTokenizer.from_pretrained(str(name_or_path), **kwargs)
    return AutoTokenizer.from_pretrained(str(name_or_path), **kwargs)


def segmenter(
    words: Container[str], cut: Callable[[str, bool], list[str]], hmm: bool, lowercase: bool, strip_accents: bool | None
) -> Callable[[str], str]:
    """A function from text to its pieces joined by spaces, each piece ready for WordPiece.

    The words are rjieba's, over the text as written (its dictionary knows T恤, not t恤); what a word falls back to, and
    any stretch without a Chinese character, is what BERT's normalizer and pre-tokenizer give.
    """
    style = {"clean_text": True, "lowercase": lowercase, "strip_accents": strip_accents}
    normalize = normalizers.BertNormalizer(handle_chinese_chars=False, **style).normalize_str
    set_apart = normalizers.BertNormalizer(handle_chinese_chars=True, **style).normalize_str
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str

    @lru_cache(maxsize=CACHED_WORDS)
    def pieces(word: str) -> str:
        normalized = normalize(word)
        if normalized in words:
            return normalized
        return " ".join(piece for piece, _ in split(set_apart(word)))

    def segment(text: str) -> str:
        found = []
        for stretch in text.split():
            found.extend(map(pieces, cut(stretch, hmm)) if HAN.search(stretch) else (pieces(stretch),))
        return " ".join(found)

    return segment


def whole_words(vocabulary: Container[str]) -> frozenset[str]:
    """The tokens that text may name whole: no continuation pieces (##ing), no reserved ones ([unused1])."""
    return frozenset(token for token in vocabulary if not token.startswith("##") and not (token[0] == "[" and token[-1] == "]"))


def map_strings(change: Callable[[str], str], texts: Any) -> Any:
    """`change` applied to every string in a text, a batch, pairs or words; anything else is left alone."""
    if isinstance(texts, str):
        return change(texts)
    if isinstance(texts, (list, tuple)):
        return type(texts)(map_strings(change, text) for text in texts)
    return texts


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
            f"tokenizer: the vocabulary of {name_or_path} is not BERT's WordPiece, which words-first reading needs "
            f"(special tokens missing: {', '.join(missing) or 'none'}). Leave the tokenizer type to AutoTokenizer."
        )
    if not any(len(token) > 1 and HAN.match(token) and HAN.match(token[1]) for token in vocabulary):
        raise InputError(
            f"tokenizer: the vocabulary of {name_or_path} holds no Chinese word of two or more characters, so "
            "cutting text into words would change nothing. Leave the tokenizer type to AutoTokenizer or name a model "
            "that reads words."
        )
