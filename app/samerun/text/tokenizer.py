"""The tokenizer of a run: the model's, of Chinese words, or trained; languages; texts and titles to ids."""

import copyreg
import json
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import BertPreTokenizer, PreTokenizer
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase, RoFormerTokenizer
from transformers.models.roformer.tokenization_utils import JiebaPreTokenizer

from samerun.console import counted
from samerun.data.cache import content_key, get_or_create
from samerun.data.tables import Cells
from samerun.data.tokens import Ragged
from samerun.errors import InputError, listed, nearest, raise_problems
from samerun.files import own_names, read_text
from samerun.models.pretrained import explain_failed_load

MAX_UNKNOWN_SHARE = 0.1  # of the tokens of a file, special tokens included, before a note
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}_[A-Za-z]{2,4}")  # zh_CN of mBART, zho_Hans of NLLB
# Position ids of these models start at padding id + 1: a text has fewer tokens than the position table rows.
OFFSET_POSITIONS = {
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "camembert", "longformer"),
    *("mpnet", "ibert", "data2vec-text", "luke", "lilt", "layoutlmv3", "markuplm", "esm"),
}
# Unused lists take a third of the time for short texts: lists are built on one core.
IDS_ALONE = {"return_attention_mask": False, "return_token_type_ids": False}
HAN = "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ceaf\U0002f800-\U0002fa1f]"
HAN_WORD = re.compile(HAN * 2)
# rjieba keeps C++, C# and AT&T as single words. BERT splits them: only those in the vocabulary stay whole.
MARK_IN_WORD = re.compile("(?!##).*[+#&]")
CJK = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
    "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3005-\u3007\u3021-\u302f\uff10-\uff19\uff21-\uff3a\uff41-\uff5a"  # 々〇〡, full-width ０Ａａ
)
# Vowel signs, accents and joiners are parts of words, but not in \w: हिन्दी, می‌خواهم.
MARKS = "\xad\u200c\u200d" + "".join(
    mark for mark in map(chr, range(0x300, 0x10000)) if unicodedata.category(mark).startswith("M")
)
# A Chinese or Japanese character, else as many letters and digits as follow.
WORD = rf"[{CJK}]|[^\W{CJK}]+(?:[{MARKS}]+[^\W{CJK}]*)*"
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
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
MAX_WORD_CHARACTERS = 100  # WordPiece turns longer words into [UNK], so training skips them
NO_LIMIT = 2**31 - 1


def load_tokenizer(arguments: Any, train_texts: Sequence[Cells], notes: list[str]) -> Any:
    """The model's tokenizer, that of --tokenizer_name, or a new one trained on the columns `train_texts`.

    Raises `InputError` if the tokenizer cannot be loaded or has no padding token.
    """
    if arguments.tokenizer_type == "train":
        return _train_or_load(train_texts, arguments.vocab_size)
    name = arguments.tokenizer_name or arguments.model_name_or_path
    if name is None:
        raise InputError(
            "no tokenizer: give --model_name_or_path, --tokenizer_name or --tokenizer_type train"
        )
    for file in sorted(own_names(Path(name))):
        if file.startswith("tokenizer") and not Path(name, file).exists():  # without it, other ids
            raise InputError(f"tokenizer {name}: {file} is missing, which the run had written; copy it, too")
    try:
        if arguments.tokenizer_type == "jieba":
            tokenizer = jieba_tokenizer(name, arguments.user_dictionary, notes)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, **arguments.hub_options(name))
    except InputError:
        raise
    except Exception as error:
        raise InputError(explain_failed_load("tokenizer", name, error)) from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise InputError(f"tokenizer {name}: a {type(tokenizer).__name__}, not one of the tokenizers library")
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(
            f"tokenizer {name}: its vocabulary is empty; the folder lacks tokenizer.json or a vocabulary file"
        )
    if tokenizer.pad_token_id is None:
        raise InputError(f"tokenizer {name} has no padding token; add one to its tokenizer_config.json")
    return tokenizer


def check_reload(tokenizer: Any, config: Any, train_texts: Sequence[Cells], arguments: Any) -> None:
    """Raises `InputError` if a tokenizer that is not the model's own gives other ids after it was exported
    beside the model's configuration. For some models (Qwen2) transformers loads a class of its own, whatever
    tokenizer_config.json names."""
    if not train_texts or (arguments.tokenizer_type == "auto" and arguments.tokenizer_name is None):
        return
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        reloaded = AutoTokenizer.from_pretrained(folder)
    texts = list(train_texts[0][:8])
    if reloaded(texts, verbose=False)["input_ids"] != tokenizer(texts, verbose=False)["input_ids"]:
        given = f"name {arguments.tokenizer_name}"
        if arguments.tokenizer_type != "auto":
            given = f"type {arguments.tokenizer_type}"
        raise InputError(
            f"--tokenizer_{given}: transformers loads a {type(reloaded).__name__} for a {config.model_type} "
            "model, so the exported model would read other tokens; use its own tokenizer or another model"
        )


def choose_max_length(requested: int | None, config: Any, tokenizer: Any, default: int, trains: bool) -> int:
    """--max_length; or else the default, or without training the length of the exported model, which its
    tokenizer has, limited by the position table and the tokenizer. Raises `InputError` for a requested length
    above that of the table, or else of the tokenizer."""
    positions = getattr(config, "max_encoder_position_embeddings", None)  # LED's
    if positions is None:
        positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and config.model_type in OFFSET_POSITIONS:
        positions -= (config.pad_token_id or 0) + 1
    # Models with relative positions have -1, tokenizers without a limit a number of 30 digits.
    positions, own = (
        n if n is not None and 0 < n < 10**6 else None for n in (positions, tokenizer.model_max_length)
    )
    if requested is not None and positions is not None and requested > positions:
        raise InputError(
            f"--max_length {requested} is more than the model can read ({positions} tokens); give at most "
            f"{positions}"
        )
    if requested is not None and positions is None and own is not None and requested > own:
        raise InputError(
            f"--max_length {requested} is more than the tokenizer's limit of {own} tokens; give at most "
            f"{own}, or, for a model without a limit such as T5, raise model_max_length in "
            "tokenizer_config.json"
        )
    default = default if trains else own or default
    return requested or min(filter(None, (default, positions, own)))


def set_languages(tokenizer: Any, arguments: Any) -> dict[str, int]:
    """Sets --source_lang and --target_lang on a multilingual tokenizer. Returns the settings that make a
    model write in the target language: `decoder_start_token_id` (mBART) or `forced_bos_token_id` (mBART-50,
    NLLB); {} without --source_lang.

    Raises `InputError` for a tokenizer without languages and for unknown language codes.
    """
    source, target = arguments.source_lang, arguments.target_lang or arguments.source_lang
    if source is None:
        return {}
    name = arguments.tokenizer_name or arguments.model_name_or_path
    tokens = set(map(str, tokenizer.added_tokens_decoder.values()))
    codes = sorted(filter(LANGUAGE_CODE.fullmatch, tokens))
    if not hasattr(tokenizer, "src_lang") or not codes:
        raise InputError(
            f"--source_lang {source}: the tokenizer of {name} has no language codes; leave it out"
        )
    problems = []
    for argument, code in (("source_lang", source), ("target_lang", target)):
        if code not in codes:
            near = nearest(code, codes)
            hint = f"; did you mean {near}?" if near else "."
            has = f"It has {listed(codes)}"
            problems.append(f"--{argument} {code}: {name} has no such language{hint} {has}")
    raise_problems(problems)
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    code = tokenizer.convert_tokens_to_ids(target)
    first = tokenizer(text_target="")["input_ids"][0]
    return {"forced_bos_token_id" if first == code else "decoder_start_token_id": code}


@dataclass(frozen=True)
class TextEncoder:
    """Texts -> {"input_ids": ids of each text with special tokens, "cut": whether it was truncated}.
    `prefix`: put before each text."""

    tokenizer: Any
    max_length: int
    prefix: str = ""

    def __call__(self, texts: list[str]) -> dict[str, list]:
        texts = [self.prefix + text for text in texts] if self.prefix else texts
        encoded = self.tokenizer(texts, truncation=True, max_length=self.max_length, **IDS_ALONE)
        return {"input_ids": encoded["input_ids"], "cut": [bool(e.overflowing) for e in encoded.encodings]}


@dataclass(frozen=True)
class PairEncoder:
    """As `TextEncoder`, for the two texts of each row, of which the longer one is cut first. With `has_types`
    also "token_type_ids", which tell the model the texts apart."""

    tokenizer: Any
    max_length: int
    has_types: bool

    def __call__(self, texts: list[str], pairs: list[str]) -> dict[str, list]:
        settings = IDS_ALONE | {"return_token_type_ids": self.has_types, "max_length": self.max_length}
        encoded = self.tokenizer(texts, pairs, truncation="longest_first", **settings)
        cut = [bool(each.overflowing) for each in encoded.encodings]
        return {**encoded, "cut": cut}


@dataclass(frozen=True)
class TitleEncoder:
    """As `TextEncoder`, for titles as decoder targets: at most `max_length` ids and the end token, without
    the start token."""

    tokenizer: Any
    start_id: int
    end_id: int
    max_length: int

    def __call__(self, texts: list[str]) -> dict[str, list]:
        encoded = self.tokenizer(text_target=texts, **IDS_ALONE)["input_ids"]
        rows = [ids[1:] if ids and ids[0] == self.start_id else ids for ids in encoded]
        # mBART puts the language code after the end token; its decoder starts with it.
        rows = [ids[:-1] if ids[-2:-1] == [self.end_id] != ids[-1:] else ids for ids in rows]
        rows = [ids[:-1] if ids and ids[-1] == self.end_id else ids for ids in rows]
        return {
            "input_ids": [[*ids[: self.max_length], self.end_id] for ids in rows],
            "cut": [len(ids) > self.max_length for ids in rows],
        }


def note_unknown(tokens: Ragged, tokenizer: Any, path: str, notes: list[str]) -> None:
    """Notes a file with a large share of unknown tokens: the tokenizer is probably for another language."""
    total = int(tokens.lengths.sum())
    if tokenizer.unk_token_id is None or not total:
        return
    unknown = sum(np.count_nonzero(ids == tokenizer.unk_token_id) for ids, _ in tokens.chunks) / total
    if unknown > MAX_UNKNOWN_SHARE:
        notes.append(
            f"{path}: {unknown:.0%} of the tokens are unknown to the tokenizer; is it one for this language?"
        )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of everything that determines the ids of a text, except for the maximum length."""
    backend = json.loads(backend_json(tokenizer))
    # These two hold the settings of the last call, so they depend on whether the cache was read.
    backend.pop("truncation", None)
    backend.pop("padding", None)
    kind, settings = type(tokenizer).__name__, json.dumps(backend, sort_keys=True)
    return content_key([kind, settings, tokenizer.truncation_side])


@dataclass(frozen=True)
class _Concatenated:
    """The cells of several columns, one column after the other. Unlike a generator it can be iterated
    twice."""

    columns: Sequence[Cells]

    def __len__(self) -> int:
        return sum(map(len, self.columns))

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self.columns)


def _train_or_load(texts: Sequence[Cells], vocab_size: int) -> Any:
    """A tokenizer trained on these texts; trained once per machine, then loaded from the cache."""
    key = content_key([str(vocab_size), *(column.content_key for column in texts)])[:40]
    corpus = _Concatenated(texts)
    folder = get_or_create(
        "vocabularies", key, lambda path: train_tokenizer(corpus, vocab_size).save_pretrained(path)
    )
    return AutoTokenizer.from_pretrained(folder)


# Chinese words: transformers' RoFormerTokenizer (rjieba, then WordPiece)


def jieba_tokenizer(
    name_or_path: str | Path, user_dictionary: str | Path | None, notes: list[str]
) -> RoFormerTokenizer:
    """A RoFormerTokenizer with the WordPiece vocabulary, normalization and added tokens of a folder or a hub
    model.

    Its saved folder loads with plain AutoTokenizer and gives the same ids. `add_user_words` adds the user
    dictionary.

    Raises InputError for an unreadable user dictionary and for a vocabulary without Chinese words.
    """
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
    if user_dictionary is not None:
        add_user_words(tokenizer, user_dictionary, notes)
    return tokenizer


def add_user_words(tokenizer: PreTrainedTokenizerBase, path: str | Path, notes: list[str]) -> None:
    """Adds the words of a file in jieba's format, "word [frequency [tag]]" per line, that are in the
    vocabulary as tokens with their present ids, so that they are never split; counts the others in a note.
    Raises `InputError` for a file that cannot be read or holds no word."""
    words = [line.split()[0] for line in read_text(path).split("\n") if line.strip()]
    if not words:
        raise InputError(
            f"--user_dictionary {path}: holds no word; write one per line, or leave the argument out"
        )
    normalize, vocabulary = tokenizer.backend_tokenizer.normalizer.normalize_str, tokenizer.get_vocab()
    normalized = dict.fromkeys(map(normalize, words))
    known = [word for word in normalized if word in vocabulary]
    # An added single character would split every word with it. Latin words match as whole words.
    tokenizer.add_tokens([AddedToken(word, single_word=word.isascii()) for word in known if len(word) > 1])
    if len(known) < len(normalized):
        missing = next(word for word in normalized if word not in vocabulary)
        notes.append(
            f"user dictionary {path}: {len(normalized) - len(known)} of {len(normalized)} words are not in "
            f"the vocabulary and change nothing, such as {missing!r}"
        )


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
            f"tokenizer {name_or_path} has no WordPiece vocabulary that holds Chinese words of two or more "
            "characters, which --tokenizer_type jieba needs; use --tokenizer_type auto or another model"
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


# In transformers 5.17 and 5.23 its __getstate__ fails ("Custom PreTokenizer cannot be serialized").
copyreg.pickle(RoFormerTokenizer, _reduce)


def join_chinese(text: str) -> str:
    """Removes spaces between Chinese or Japanese characters and beside their punctuation:
    深 度 学 习 。 -> 深度学习。

    Spaces inside “ ” and beside ASCII punctuation that touches a Chinese character go, too. Spaces beside a
    Latin word or a number stay (使用 BERT 模型): the tokens do not show whether the author wrote them.
    Idempotent.
    """
    return ADDED_SPACE.sub("", text).strip(" ")


# Vocabularies trained on the texts, like BERT's. The ids do not depend on the order of the texts.


def train_tokenizer(texts: Collection[str], vocab_size: int) -> BertTokenizer:
    """A BertTokenizer with a WordPiece vocabulary of at most `vocab_size` tokens, trained on `texts`.

    The vocabulary holds the special tokens (ids 0 to 4), every character of the texts, then the most frequent
    merges. Every Chinese character is a word. Words are lower-cased and lose their accents, as in BERT.
    `texts` is read twice and may be larger than memory: only the counts of distinct words are kept.

    Raises InputError if the texts hold no word or if their characters do not fit into `vocab_size`.
    """
    return BertTokenizer(vocab=learn_vocabulary(texts, distinct_words(texts), vocab_size))


def distinct_words(texts: Collection[str]) -> Collection[str]:
    """The distinct words of the texts, as BERT splits them. Raises InputError if there is none."""
    tokenizer = _bert_like(models.WordLevel())
    # This trainer does not return counts, so `learn_vocabulary` reads the texts again. On two cores both
    # passes together take a third less time than counting words in Python.
    settings = {"vocab_size": NO_LIMIT, "min_frequency": 0, "special_tokens": []}
    trainer = trainers.WordLevelTrainer(**settings, show_progress=False)
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
            f"--vocab_size {vocab_size} is too small: {len(characters)} characters, {len(continuations)} of "
            f"them also inside words, and {len(SPECIAL_TOKENS)} special tokens need {len(alphabet)} entries "
            "before any word is learnt"
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
