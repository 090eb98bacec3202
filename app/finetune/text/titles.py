"""Titles by an encoder-decoder: teacher forcing, cross-entropy, beam search, the check of an exported model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

from finetune.errors import InputError, TrainingError
from finetune.metrics.rouge import ROUGE_METRICS
from finetune.metrics.rouge_tokenizers import choose_tokenizer
from finetune.models.adapters import loadable
from finetune.reading.columns import SHOWN, blank_rows, more, texts_of
from finetune.reading.stored_rows import Column
from finetune.reading.tables import Table
from finetune.reports.card import markdown_table
from finetune.task import Batch
from finetune.text.chinese import join_chinese
from finetune.text.search import SETTINGS

IGNORED = -100  # the label that counts for nothing
EXAMPLES = 10  # titles shown in TensorBoard and in the model card
METRICS = ("loss", *ROUGE_METRICS, "exact_match", "gen_len")
CARD_METRICS = [*METRICS, *(f"lead_{name}" for name in ROUGE_METRICS)]
USAGE = """import re
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("best"), AutoModelForSeq2SeqLM.from_pretrained("best")
ids = model.generate(**tokenizer("a long document", truncation=True, return_tensors="pt"))
title = tokenizer.decode(ids[0], skip_special_tokens=True)
chinese = "[\\u3001-\\u9fff\\uff01-\\uffef]"  # its characters are decoded with spaces between them
print(re.sub(f"(?<={chinese}) +(?={chinese})", "", title))"""


def usage(prefix: str) -> str:
    """Python code that writes a title with best/. `prefix`: what stands before each document."""
    return USAGE.replace('"a long document"', f'{prefix!r} + "a long document"') if prefix else USAGE


def told(source_prefix: str, language: int | None) -> dict[str, Any]:
    """What an encoder-decoder is told besides the text, for the fingerprint of a run; nothing for most models."""
    found = {"source_prefix": source_prefix, "title_language": language}
    return {name: value for name, value in found.items() if value}


def example_table(examples: list[dict[str, str]]) -> str:
    """References and generated titles as a Markdown table."""
    return "\n".join(markdown_table(["reference", "generated"], [list(example.values()) for example in examples]))


def lead_remark(metrics: dict[str, Any]) -> list[str]:
    """A line that compares the model with the document's first sentence as its title."""
    ours, lead = metrics.get("rougeL"), metrics.get("lead_rougeL")
    if ours is None or lead is None:
        return []
    return [f"the first sentence as title: rougeL {lead:.4f} ({'below' if lead < ours else 'not below'} ours)"]


def check_titles(table: Table, column: str, split: str) -> Column | None:
    """The titles of a file; None for test rows without. Raises `InputError` for titles that are no text, and for empty ones."""
    if column not in table.columns or (split == "test" and all(title in (None, "") for title in table.columns[column])):
        table.columns.pop(column, None)
        return None
    titles = texts_of(table, column)
    empty = blank_rows(titles)
    if len(empty):
        found = [f"{table.where(row)}: {column} is empty; give it a title or leave the row out" for row in empty]
        raise InputError(*found[:SHOWN], *more(len(empty)))
    return titles


@dataclass(frozen=True)
class Generation:
    """How titles are searched for. Lengths are in tokens and leave out start and end.

    `in_step`: under ZeRO-3 and FSDP weights are gathered together, so all processes must generate equally long; `further`:
    settings of --generation_config (`finetune.text.search`).
    """

    num_beams: int
    length_penalty: float
    no_repeat_ngram_size: int
    min_length: int
    max_length: int
    start_id: int
    pad_id: int
    in_step: bool
    num_return_sequences: int = 1
    further: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(arguments: Any, start_id: int, pad_id: int, in_step: bool, further: Mapping[str, Any]) -> Generation:
        """The search that the arguments ask for. `further`: what --generation_config adds."""
        return Generation(
            num_beams=arguments.num_beams,
            length_penalty=arguments.length_penalty,
            no_repeat_ngram_size=arguments.no_repeat_ngram_size,
            min_length=arguments.min_title_length,
            max_length=arguments.max_title_length,
            start_id=start_id,
            pad_id=pad_id,
            in_step=in_step,
            further=further,
        )

    def search(
        self, model: Any, inputs: dict[str, torch.Tensor], encoder_output: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Beam search: ((b, num_return_sequences, max_length + 2) int32 ids, best first within a row; (b, num_return_sequences)
        scores, 0 where there is one candidate only).

        `encoder_output`: (b, width, hidden) the encoder's last layer for these inputs, if it is known.
        """
        known = {} if encoder_output is None else {"encoder_outputs": BaseModelOutput(last_hidden_state=encoder_output)}
        candidates, width = self.num_return_sequences, self.max_length + 2  # transformers counts the start token
        out = model.generate(
            **inputs,
            **known,
            do_sample=False,
            num_beams=max(self.num_beams, candidates),
            length_penalty=self.length_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            min_length=self.min_length + 1 if self.min_length else 0,
            max_length=width,
            num_return_sequences=candidates,
            early_stopping=True,
            synced_gpus=self.in_step,
            return_dict_in_generate=True,
            output_scores=candidates > 1,
            **self.further,
        )
        ids = pad(out.sequences.int(), (0, width - out.sequences.shape[1]), value=self.pad_id)
        scores = out.sequences_scores if candidates > 1 else torch.zeros(len(ids), device=ids.device)
        return ids.view(-1, candidates, width), scores.view(-1, candidates)

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """(titles,) tokens of generated titles, (titles, width), without start and padding."""
        return ((ids != self.pad_id) & (ids != self.start_id)).sum(axis=1)


def teacher_forcing(labels: torch.Tensor, generation: Generation) -> dict[str, Any]:
    """Decoder inputs (b, t): the labels moved right by one behind the start id, and their mask. No keys and values are kept: no
    token is to come."""
    ids = labels.masked_fill(labels == IGNORED, generation.pad_id)
    start = ids.new_full((len(ids), 1), generation.start_id)
    mask = torch.cat([torch.ones_like(start), (labels[:, :-1] != IGNORED).long()], dim=1)
    return {"decoder_input_ids": torch.cat([start, ids[:, :-1]], dim=1), "decoder_attention_mask": mask, "use_cache": False}


def token_losses(logits: torch.Tensor, batch: Batch, smoothing: float) -> torch.Tensor:
    """(b, t) float32: each title token's cross-entropy, 0 where there is none."""
    labels = batch.labels.masked_fill(~batch.is_real[:, None], IGNORED)
    flat = cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
    )
    return flat.view(labels.shape)


def decode(tokenizer: Any, ids: np.ndarray) -> list[str]:
    """The titles of (titles, width) generated ids."""
    return [join_chinese(text).strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def prediction_lines(tokenizer: Any, ids: np.ndarray, scores: np.ndarray) -> Iterator[dict[str, Any]]:
    """The lines of predictions.jsonl. `ids`: (rows, candidates, width), best first; `scores`: (rows, candidates)."""
    for each, theirs in zip(ids, scores, strict=True):
        pairs = zip(decode(tokenizer, each), theirs.tolist(), strict=True)
        candidates = [{"title": title, "score": round(score, 6)} for title, score in pairs]
        yield {"title": candidates[0]["title"], **({"candidates": candidates} if len(candidates) > 1 else {})}


def counted_by_rouge(requested: str, references: Column | None) -> str:
    """--rouge_tokenizer as a decision for these references."""
    if requested != "auto":
        return requested
    return "default" if references is None else choose_tokenizer(references)


def plain_model(model: Any, search: Generation) -> Any:
    """An fp32 model without weights, to save others' weights with, whose generation configuration is the run's."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = torch.float32
    with torch.device("meta"):
        plain = type(model)(config)
    generation = plain.generation_config
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id", "forced_bos_token_id"):
        setattr(generation, name, getattr(model.generation_config, name))
    generation.num_beams, generation.max_length = search.num_beams, search.max_length + 2
    generation.no_repeat_ngram_size = search.no_repeat_ngram_size
    for name in SETTINGS:
        setattr(generation, name, search.further.get(name, getattr(model.generation_config, name)))
    if search.min_length:
        generation.min_length = search.min_length + 1
    if search.num_beams > 1:  # they mean nothing to a greedy search, and saving complains about them
        generation.early_stopping, generation.length_penalty = True, search.length_penalty
    return plain


def check_export(folder: Path, collate: Callable[[np.ndarray], Batch] | None, expected: dict[int, str]) -> None:
    """Generates titles of a few documents, one at a time, with the folder in plain transformers.

    `expected`: the run's titles by row of the file that `collate` batches. Raises `TrainingError` if they differ.
    """
    model, tokenizer = loadable(folder, AutoModelForSeq2SeqLM), AutoTokenizer.from_pretrained(folder)
    if isinstance(model, str):
        model = AutoModelForSeq2SeqLM.from_pretrained(model)
    model.eval()
    for row, title in expected.items():
        batch = collate(np.array([row]))
        real = int(batch.inputs["attention_mask"].sum())
        with torch.no_grad():
            ids = model.generate(**{name: tensor[:, :real] for name, tensor in batch.inputs.items()}, do_sample=False)
        found = decode(tokenizer, ids.numpy())[0]
        if found != title:
            raise TrainingError(
                f"the exported model writes {found!r} where the run wrote {title!r} (row {row}); nothing was replaced. Please "
                "report this with run.json"
            )


def card_sections(folder: Path) -> list[str]:
    """What the card of a title run says besides its metrics."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    examples = [list(example.values()) for example in metrics.get("examples", [])]
    sections = [f"ROUGE counts `{metrics.get('rouge_tokenizer')}`; `lead_*` is the document's first sentence as its title.", ""]
    if examples:
        sections += ["## Titles of validation documents", "", *markdown_table(["reference", "generated"], examples)]
    return sections
