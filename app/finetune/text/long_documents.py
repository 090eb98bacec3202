"""--long_documents: what a classifier reads of a text that has more tokens than it reads at once.

`truncate` reads its beginning (or its end: --truncation_side). `head_tail` reads its first and last tokens, a quarter and
three quarters of what the model reads, as Sun et al. (arXiv:1905.05583, section 5.3.1) do with 128 and 382 of 510. `windows`
reads all of it in windows that overlap: a document's windows go through the model together, their logits are pooled (the
paper's hierarchical methods pool representations), and the loss is that of the document. The setting travels in the exported
model's configuration; the functions at the end are what a user of transformers does with it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from finetune.errors import InputError
from finetune.models.windows import pool_windows
from finetune.text.arguments import LongDocumentArguments
from finetune.text.tokenizer import IDS_ALONE, TextEncoder

MAX_WINDOWS = 8
STRIDE = 8  # windows share an eighth of their tokens
USAGE = """import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

{function}
model, tokenizer = AutoModelForSequenceClassification.from_pretrained("best"), AutoTokenizer.from_pretrained("best")
{name}(model, tokenizer, "a long text")  # a probability for every label; thresholds: model.config.thresholds"""


@dataclass(frozen=True)
class LongDocuments:
    """`way`: that of --long_documents. `max_length`: tokens that the model reads at once, special ones included; `head`: how
    many of them are a document's first (head_tail); `stride`: tokens that a window shares with the one before; `pooling`: max
    or mean."""

    way: str
    max_length: int
    head: int = 0
    stride: int = 0
    max_windows: int = 1
    pooling: str = "max"

    @staticmethod
    def of(arguments: Any, config: Any, tokenizer: Any, max_length: int) -> LongDocuments:
        """What the arguments request or, if they say nothing, what the model was trained with; it is put into `config`.

        Raises `InputError` for windows that have no room for their stride.
        """
        if not isinstance(arguments, LongDocumentArguments):
            return LongDocuments("truncate", max_length)
        given = {"stride": arguments.stride, "max_windows": arguments.max_windows, "pooling": arguments.window_pooling}
        own = getattr(config, "long_documents", None) or {"way": "truncate"}
        setting = own if arguments.long_documents is None else {"way": arguments.long_documents, **given}
        if setting["way"] == "truncate":
            if hasattr(config, "long_documents"):
                del config.long_documents
            return LongDocuments("truncate", max_length)
        text = max_length - tokenizer.num_special_tokens_to_add()
        if setting["way"] == "head_tail":
            before = tokenizer("a").encodings[0].special_tokens_mask.index(0)  # special tokens in front of a text
            found = LongDocuments("head_tail", max_length, head=before + math.ceil(text / 4))
        else:
            stride = setting["stride"] if setting["stride"] is not None else max_length // STRIDE
            if stride >= text:
                raise InputError(
                    f"--stride {stride}: a window of --max_length {max_length} has {text} tokens of the text, and some of them "
                    f"must not be in the one before; give at most {text - 1}"
                )
            most, pooling = setting["max_windows"] or MAX_WINDOWS, setting["pooling"] or "max"
            found = LongDocuments("windows", max_length, stride=stride, max_windows=most, pooling=pooling)
        config.long_documents = found.as_config()
        return found

    def as_config(self) -> dict[str, Any]:
        """What an exported model's configuration says of it."""
        if self.way == "head_tail":
            return {"way": self.way, "head": self.head}
        return {"way": self.way, "stride": self.stride, "max_windows": self.max_windows, "pooling": self.pooling}

    def fingerprint(self) -> dict[str, Any]:
        """What it adds to the fingerprint of a run."""
        return {} if self.way == "truncate" else {"long_documents": self.as_config()}

    def encoder(self, tokenizer: Any, prefix: str) -> Callable[[list[str]], dict[str, list]]:
        """Texts -> ids and whether something was left out, as `TextEncoder`."""
        if self.way == "truncate":
            return TextEncoder(tokenizer, self.max_length, prefix)
        return HeadTailEncoder(tokenizer, self) if self.way == "head_tail" else WindowEncoder(tokenizer, self)

    @property
    def limit(self) -> str:
        """What a note says that longer texts are cut to."""
        if self.way == "head_tail":
            return f"{self.head} first and {self.max_length - self.head} last"
        return f"{self.max_windows} windows of {self.max_length}" if self.way == "windows" else str(self.max_length)

    def widths(self, lengths: np.ndarray, multiple: int) -> np.ndarray | None:
        """`Split.widths` of documents with (rows,) `lengths`; a document of several windows takes them whole."""
        if self.way != "windows":
            return None
        whole, last = -(-self.max_length // multiple) * multiple, -(-np.maximum(lengths, 1) // multiple) * multiple
        return np.where(lengths > self.max_length, -(-lengths // self.max_length) * whole, last)

    def pieces(self, ids: list[np.ndarray]) -> tuple[list[np.ndarray], int | None]:
        """(the rows that are padded, how many each document has): documents, and None; or as many windows of each as the
        longest has, the last ones of others empty."""
        if self.way != "windows":
            return ids, None
        most = max(-(-max(1, len(row)) // self.max_length) for row in ids)
        begins = range(0, most * self.max_length, self.max_length)
        return [row[begin : begin + self.max_length] for row in ids for begin in begins], most

    def prepare(self, model: Any, side: str) -> Any:
        """The model as one of documents. `side`: where the tokenizer pads."""
        return pool_windows(model, self.max_length, self.pooling, side) if self.way == "windows" else model


@dataclass(frozen=True)
class HeadTailEncoder:
    """As `TextEncoder`: the first and the last ids of longer texts."""

    tokenizer: Any
    setting: LongDocuments

    def __call__(self, texts: list[str]) -> dict[str, list]:
        head, limit = self.setting.head, self.setting.max_length
        rows = self.tokenizer(texts, verbose=False, **IDS_ALONE)["input_ids"]
        kept = [ids if len(ids) <= limit else [*ids[:head], *ids[head - limit :]] for ids in rows]
        return {"input_ids": kept, "cut": [len(ids) > limit for ids in rows]}


@dataclass(frozen=True)
class WindowEncoder:
    """As `TextEncoder`: the windows of a text one after the other, each with its special tokens. All but the last have
    `max_length` ids."""

    tokenizer: Any
    setting: LongDocuments

    def __call__(self, texts: list[str]) -> dict[str, list]:
        limit, stride, most = self.setting.max_length, self.setting.stride, self.setting.max_windows
        encoded = self.tokenizer(texts, truncation=True, max_length=limit, stride=stride, **IDS_ALONE).encodings
        windows = [[one, *one.overflowing] for one in encoded]
        ids = [list(chain.from_iterable(window.ids for window in each[:most])) for each in windows]
        return {"input_ids": ids, "cut": [len(each) > most for each in windows]}


def usage(config: Any) -> str | None:
    """Python code that classifies long texts with best/; None for a model that truncates them."""
    setting = getattr(config, "long_documents", None)
    if setting is None:
        return None
    function = classifier_of(setting)
    return USAGE.format(function=inspect.getsource(function), name=function.__name__)


def classifier_of(setting: dict[str, Any]) -> Callable[[Any, Any, str], dict[str, float]]:
    """What classifies a text as training with this setting did; its source is on the model card."""
    return classify_head_and_tail if setting["way"] == "head_tail" else classify_windows


def classify_windows(model, tokenizer, text):
    """A probability for every label: that of all windows of the text together."""
    setting = model.config.long_documents
    windows = tokenizer(
        text,
        truncation=True,
        stride=setting["stride"],
        return_overflowing_tokens=True,
        padding=True,
        return_tensors="pt",
    )
    inputs = {name: windows[name][: setting["max_windows"]] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = model(**inputs).logits
    pooled = logits.amax(dim=0) if setting["pooling"] == "max" else logits.mean(dim=0)
    return dict(zip(model.config.id2label.values(), pooled.sigmoid().tolist(), strict=True))


def classify_head_and_tail(model, tokenizer, text):
    """A probability for every label, from the text's first and last tokens."""
    limit, head = tokenizer.model_max_length, model.config.long_documents["head"]
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) > limit:
        ids = ids[:head] + ids[head - limit :]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    return dict(zip(model.config.id2label.values(), logits.sigmoid().tolist(), strict=True))
