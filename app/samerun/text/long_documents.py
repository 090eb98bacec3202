"""--long_documents: how a classifier handles texts longer than --max_length.

`truncate` keeps the beginning (or the end: --truncation_side). `head_tail` keeps the first quarter and the
last three quarters of --max_length tokens, about the 128 + 382 tokens of Sun et al. (arXiv:1905.05583,
section 5.3.1). `windows` runs overlapping windows of a document through the model in one batch and pools
their logits; the paper's hierarchical methods pool representations. The exported model's configuration stores
the setting. `classify_windows` and `classify_head_and_tail` apply it in plain transformers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput

from samerun.errors import InputError
from samerun.kernels.common import current_row_lengths, current_rows, row_lengths, send
from samerun.parsing import with_settings
from samerun.text.arguments import LongDocumentArguments
from samerun.text.tokenizer import IDS_ALONE, TextEncoder

MAX_WINDOWS = 8
STRIDE_DIVISOR = 8  # default stride: --max_length / 8
USAGE = """import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

{function}
model = AutoModelForSequenceClassification.from_pretrained("best")
tokenizer = AutoTokenizer.from_pretrained("best")
{name}(model, tokenizer, "a long text"){comment}"""


@dataclass(frozen=True)
class LongDocuments:
    """The value of --long_documents (`method`) with its settings.

    `max_length`: of one input, special tokens included. `head`: number of first tokens that head_tail keeps.
    `stride`: overlap of two windows in tokens. `pooling`: max or mean.
    """

    method: str
    max_length: int
    head: int = 0
    stride: int = 0
    max_windows: int = 1
    pooling: str = "max"

    @staticmethod
    def of(arguments: Any, config: Any, tokenizer: Any, max_length: int) -> LongDocuments:
        """The setting of the arguments or, without --long_documents, of the model's `config`, which then
        stores it.

        Raises `InputError` for a stride that leaves a window no new tokens.
        """
        if not isinstance(arguments, LongDocumentArguments):
            return LongDocuments("truncate", max_length)
        way, given = with_settings(arguments, "long_documents")
        setting = {"way": way, "max_windows": given.get("max"), **given}
        if arguments.long_documents is None:
            setting = getattr(config, "long_documents", None) or {"way": "truncate"}
        if setting["way"] == "truncate":
            if hasattr(config, "long_documents"):
                del config.long_documents
            return LongDocuments("truncate", max_length)
        text_tokens = max_length - tokenizer.num_special_tokens_to_add()
        if setting["way"] == "head_tail":
            leading_special = tokenizer("a").encodings[0].special_tokens_mask.index(0)
            result = LongDocuments("head_tail", max_length, head=leading_special + math.ceil(text_tokens / 4))
        else:
            stride = setting.get("stride")
            stride = max_length // STRIDE_DIVISOR if stride is None else stride
            if stride >= text_tokens:
                raise InputError(
                    f"--long_documents windows:stride={stride}: a window of --max_length {max_length} has "
                    f"{text_tokens} tokens of text, and at least "
                    f"one must be new; give at most {text_tokens - 1}"
                )
            more = setting["max_windows"] or MAX_WINDOWS, setting.get("pooling") or "max"
            result = LongDocuments("windows", max_length, 0, stride, *more)
        config.long_documents = result.as_config()
        return result

    def as_config(self) -> dict[str, Any]:
        """`long_documents` of an exported model's configuration."""
        names = ("head",) if self.method == "head_tail" else ("stride", "max_windows", "pooling")
        return {"way": self.method, **{name: getattr(self, name) for name in names}}

    def fingerprint(self) -> dict[str, Any]:
        """The setting's entry of the run fingerprint."""
        return {} if self.method == "truncate" else {"long_documents": self.as_config()}

    def encoder(self, tokenizer: Any, prefix: str) -> Callable[[list[str]], dict[str, list]]:
        """Texts -> ids, and whether each text was cut, as `TextEncoder`."""
        if self.method == "truncate":
            return TextEncoder(tokenizer, self.max_length, prefix)
        return partial(self._head_and_tail if self.method == "head_tail" else self._windows, tokenizer)

    def _head_and_tail(self, tokenizer: Any, texts: list[str]) -> dict[str, list]:
        head, limit = self.head, self.max_length
        rows = tokenizer(texts, verbose=False, **IDS_ALONE)["input_ids"]
        kept = [ids if len(ids) <= limit else [*ids[:head], *ids[head - limit :]] for ids in rows]
        return {"input_ids": kept, "cut": [len(ids) > limit for ids in rows]}

    def _windows(self, tokenizer: Any, texts: list[str]) -> dict[str, list]:
        """Concatenates the windows of a text, each with its special tokens. All but the last have
        `max_length` ids.

        They are those of `return_overflowing_tokens`, which tokenizers 0.23.1 and 0.23.2 leave empty.
        """
        is_special = tokenizer("a").encodings[0].special_tokens_mask
        leading, trailing = is_special.index(0), is_special[::-1].index(0)
        size = self.max_length - leading - trailing
        encoded: dict[str, list] = {"input_ids": [], "cut": []}
        for ids in tokenizer(texts, verbose=False, **IDS_ALONE)["input_ids"]:
            end = len(ids) - trailing
            before, text, behind = ids[:leading], ids[leading:end], ids[end:]
            firsts = range(0, max(1, len(text) - self.stride), size - self.stride)
            windows = ((*before, *text[first : first + size], *behind) for first in firsts)
            encoded["input_ids"].append(list(chain.from_iterable(islice(windows, self.max_windows))))
            encoded["cut"].append(len(firsts) > self.max_windows)
        return encoded

    @property
    def limit(self) -> str:
        """The tokens that are kept of longer texts, for notes: "texts are cut to LIMIT tokens"."""
        if self.method == "head_tail":
            return f"{self.head} first and {self.max_length - self.head} last"
        windows = f"{self.max_windows} windows of " if self.method == "windows" else ""
        return f"{windows}{self.max_length}"

    def widths(self, lengths: np.ndarray, multiple: int) -> np.ndarray | None:
        """`Split.widths` of documents with (rows,) `lengths`; every window of a longer document counts as a
        full one."""
        if self.method != "windows":
            return None
        full, single = (-(-np.maximum(size, 1) // multiple) * multiple for size in (self.max_length, lengths))
        return np.where(lengths > self.max_length, -(-lengths // self.max_length) * full, single)

    def pieces(self, ids: list[np.ndarray]) -> tuple[list[np.ndarray], int | None]:
        """(rows to pad, windows per document). Without windows: the documents and None. With windows: every
        document's windows, filled up with empty ones to the number of the longest document."""
        if self.method != "windows":
            return ids, None
        num_windows = max(-(-max(1, len(row)) // self.max_length) for row in ids)
        starts = range(0, num_windows * self.max_length, self.max_length)
        return [row[start : start + self.max_length] for row in ids for start in starts], num_windows

    def prepare(self, model: Any, side: str) -> Any:
        """The model; with windows its `forward` takes `input_ids` and `attention_mask` (documents, windows,
        width) and gives pooled logits (documents, labels). Parameters and state dict stay. Documents with
        fewer windows end with empty ones, which are not computed. `side`: padding side of the tokenizer."""
        if self.method == "windows":
            model.forward = partial(_document_logits, model.forward, self.max_length, self.pooling, side)
        return model


# A classifier of windows as one of documents


def _document_logits(
    forward: Callable, window: int, pooling: str, side: str, input_ids: Tensor, attention_mask: Tensor
) -> SequenceClassifierOutput:
    documents, most, width = input_ids.shape
    # Lengths counted on the CPU avoid a synchronisation with the GPU.
    lengths = current_row_lengths(documents, most * width) or attention_mask.sum((1, 2)).tolist()
    window_lengths = [
        [min(window, length - first) for first in range(0, max(1, length), window)] for length in lengths
    ]
    numbers = [(row, number) for row, windows in enumerate(window_lengths) for number in range(len(windows))]
    index = send(torch.tensor([row * most + number for row, number in numbers]), input_ids.device)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    inputs = {name: tensor.flatten(0, 1).index_select(0, index) for name, tensor in inputs.items()}
    flat_lengths = tuple(length for windows in window_lengths for length in windows)
    known_lengths = flat_lengths if side == "right" and min(flat_lengths) > 0 else None
    places = current_rows().places
    if places is not None:  # a window's place, for dropout by row
        places = tuple(places[row] + number * 2**32 for row, number in numbers)
    with row_lengths(known_lengths, places):
        logits = forward(**inputs).logits
    empty = logits.new_full((documents * most, logits.shape[-1]), -torch.inf if pooling == "max" else 0.0)
    grid = empty.index_copy(0, index, logits).unflatten(0, (documents, most))
    if pooling == "max":
        return SequenceClassifierOutput(logits=grid.amax(dim=1))
    counts = send(torch.tensor([[len(windows)] for windows in window_lengths]), logits.device)
    return SequenceClassifierOutput(logits=grid.sum(dim=1) / counts)


# The exported model


def usage(config: Any) -> str | None:
    """Python code for the model card that classifies long texts with best/; None for a model that
    truncates."""
    setting = getattr(config, "long_documents", None)
    if setting is None:
        return None
    function, several = classifier_of(setting), config.problem_type == "multi_label_classification"
    comment = "  # thresholds: model.config.thresholds" if several else ""
    return USAGE.format(function=inspect.getsource(function), name=function.__name__, comment=comment)


def classifier_of(setting: dict[str, Any]) -> Callable[[Any, Any, str], dict[str, float]]:
    """The function that classifies a text with this setting. The model card shows its source."""
    return classify_head_and_tail if setting["way"] == "head_tail" else classify_windows


def classify_windows(model, tokenizer, text):
    """Probability of every label (or value of every column), pooled over all windows of the text."""
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
    other = {"single_label_classification": pooled.softmax(-1), "regression": pooled}
    outputs = other.get(model.config.problem_type, pooled.sigmoid())
    return dict(zip(model.config.id2label.values(), outputs.tolist(), strict=True))


def classify_head_and_tail(model, tokenizer, text):
    """Probability of every label (or value of every column), from the text's first and last tokens."""
    limit, head = tokenizer.model_max_length, model.config.long_documents["head"]
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) > limit:
        ids = ids[:head] + ids[head - limit :]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    other = {"single_label_classification": logits.softmax(-1), "regression": logits}
    outputs = other.get(model.config.problem_type, logits.sigmoid())
    return dict(zip(model.config.id2label.values(), outputs.tolist(), strict=True))
