"""Parts of the title generation task: teacher forcing, loss, beam search, decoding, and the exported
model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

from samerun.data.tables import Cells, Table, is_blank, texts_of
from samerun.errors import TrainingError, raise_problems
from samerun.metrics.rouge import ROUGE_METRICS
from samerun.metrics.rouge_tokenizers import choose_tokenizer
from samerun.models import export
from samerun.models.adapters import loadable
from samerun.reports.card import markdown_table
from samerun.task import Batch
from samerun.text.chinese import join_chinese
from samerun.text.search import SETTINGS

IGNORED = -100  # target id without a loss
EXAMPLES = 10  # titles in TensorBoard and in the model card
METRICS = ("loss", *ROUGE_METRICS, "exact_match", "gen_len")
CARD_METRICS = [*METRICS, *(f"lead_{name}" for name in ROUGE_METRICS)]
USAGE = """import re
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("best"), AutoModelForSeq2SeqLM.from_pretrained("best")
ids = model.generate(**tokenizer("a long document", truncation=True, return_tensors="pt"))
title = tokenizer.decode(ids[0], skip_special_tokens=True)
chinese = "[\\u3001-\\u9fff\\uff01-\\uffef]"  # decoding puts spaces between Chinese characters
print(re.sub(f"(?<={chinese}) +(?={chinese})", "", title))"""


def usage(prefix: str) -> str:
    """Python code for the model card that writes a title with best/. `prefix`: put before each document."""
    return USAGE.replace('"a long document"', f'{prefix!r} + "a long document"') if prefix else USAGE


def example_table(examples: list[dict[str, str]]) -> list[str]:
    """References and generated titles as the lines of a Markdown table."""
    return markdown_table(["reference", "generated"], [list(example.values()) for example in examples])


def lead_remark(metrics: dict[str, Any]) -> list[str]:
    """A line that compares rougeL with that of the baseline, the document's first sentence."""
    ours, lead = metrics.get("rougeL"), metrics.get("lead_rougeL")
    if ours is None or lead is None:
        return []
    return [
        f"the first sentence as title: rougeL {lead:.4f} ({'below' if lead < ours else 'not below'} ours)"
    ]


def read_titles(table: Table, column: str, split: str) -> Cells | None:
    """The titles of a file; None for a test file without titles. Raises `InputError` for empty titles and
    other types."""
    if column not in table.columns or (
        split == "test" and all(title in (None, "") for title in table.columns[column])
    ):
        table.columns.pop(column, None)
        return None
    titles = texts_of(table, column)
    empty = [row for row, title in enumerate(titles) if is_blank(title)]
    raise_problems(
        [f"{table.where(row)}: {column} is empty; give it a title or leave the row out" for row in empty]
    )
    return titles


@dataclass(frozen=True)
class Generation:
    """The beam search. `config`: `samerun.text.search.generation_config`. `candidates`: titles per document.

    `synced_gpus`: as in transformers; under ZeRO-3 and FSDP all processes must run the same number of forward
    passes.
    """

    config: GenerationConfig
    start_id: int
    pad_id: int
    synced_gpus: bool
    candidates: int = 1

    def search(
        self, model: Any, inputs: dict[str, torch.Tensor], encoder_output: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (ids, scores): (b, candidates, max_length) int32, best candidate first, and (b,
        candidates), 0 for a single candidate.

        `encoder_output`: (b, width, hidden) last hidden state of the encoder for these inputs, if it was
        computed before.
        """
        cached = (
            {}
            if encoder_output is None
            else {"encoder_outputs": BaseModelOutput(last_hidden_state=encoder_output)}
        )
        config, candidates, width = deepcopy(self.config), self.candidates, self.config.max_length
        beams = max(config.num_beams, candidates)
        config.update(
            num_beams=beams,
            early_stopping=beams > 1,
            num_return_sequences=candidates,
            return_dict_in_generate=True,
            output_scores=candidates > 1,
        )
        out = model.generate(**inputs, **cached, generation_config=config, synced_gpus=self.synced_gpus)
        ids = pad(out.sequences.int(), (0, width - out.sequences.shape[1]), value=self.pad_id)
        scores = out.sequences_scores if candidates > 1 else torch.zeros(len(ids), device=ids.device)
        return ids.view(-1, candidates, width), scores.view(-1, candidates)


def teacher_forcing(labels: torch.Tensor, generation: Generation) -> dict[str, Any]:
    """Decoder inputs (b, t): the labels shifted right behind the start id, and their mask."""
    ids = labels.masked_fill(labels == IGNORED, generation.pad_id)
    start = ids.new_full((len(ids), 1), generation.start_id)
    mask = torch.cat([torch.ones_like(start), (labels[:, :-1] != IGNORED).long()], dim=1)
    return {
        "decoder_input_ids": torch.cat([start, ids[:, :-1]], dim=1),
        "decoder_attention_mask": mask,
        "use_cache": False,
    }


def token_losses(logits: torch.Tensor, batch: Batch, smoothing: float) -> torch.Tensor:
    """(b, t) float32 cross-entropy of each title token; 0 for ignored tokens and placeholder rows."""
    labels = batch.labels.masked_fill(~batch.is_real[:, None], IGNORED)
    flat = cross_entropy(
        logits.float().flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="none",
    )
    return flat.view(labels.shape)


def title_lengths(tokenizer: Any, titles: Iterable[np.ndarray]) -> np.ndarray:
    """(titles,) number of tokens of each title, an array of ids, without special tokens, which `decode` drops
    too."""
    return np.array([(~np.isin(ids, tokenizer.all_special_ids)).sum() for ids in titles], dtype=np.int64)


def decode(tokenizer: Any, ids: np.ndarray) -> list[str]:
    """The texts of generated ids (titles, width)."""
    return [join_chinese(text).strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def prediction_lines(tokenizer: Any, ids: np.ndarray, scores: np.ndarray) -> Iterator[dict[str, Any]]:
    """The lines of predictions.jsonl. `ids`: (rows, candidates, width), best first; `scores`: (rows,
    candidates)."""
    for row_ids, row_scores in zip(ids, scores, strict=True):
        pairs = zip(decode(tokenizer, row_ids), row_scores.tolist(), strict=True)
        candidates = [{"title": title, "score": round(score, 6)} for title, score in pairs]
        yield {"title": candidates[0]["title"], **({"candidates": candidates} if len(candidates) > 1 else {})}


def rouge_tokenizer_for(requested: str, references: Cells | None) -> str:
    """--rouge_tokenizer; "auto" is resolved by the script of the references."""
    if requested != "auto":
        return requested
    return "default" if references is None else choose_tokenizer(references)


def plain_model(model: Any, search: Generation) -> Any:
    """`export.plain_model` with the generation configuration to export."""
    plain = export.plain_model(model)
    generation, trained = deepcopy(search.config), model.generation_config
    tokens = ("decoder_start", "eos", "pad", "bos", "forced_bos", "forced_eos")
    for name in (*(f"{token}_token_id" for token in tokens), *SETTINGS):
        if getattr(generation, name) is None:
            setattr(generation, name, getattr(trained, name))
    if generation.num_beams == 1:  # transformers refuses to save these settings with greedy search
        generation.early_stopping = generation.length_penalty = None
    plain.generation_config = generation
    return plain


def check_export(
    folder: Path, collate: Callable[[np.ndarray], Batch] | None, expected: dict[int, str]
) -> None:
    """Generates the titles of a few documents with the exported folder in plain transformers.

    `expected`: row number -> the run's title; `collate` makes the batch of a row. Raises `TrainingError` if
    titles differ.
    """
    model, tokenizer = loadable(folder, AutoModelForSeq2SeqLM), AutoTokenizer.from_pretrained(folder)
    if isinstance(model, str):
        model = AutoModelForSeq2SeqLM.from_pretrained(model)
    model.eval()
    for row, title in expected.items():
        batch = collate(np.array([row]))
        length = int(batch.inputs["attention_mask"].sum())
        with torch.no_grad():
            ids = model.generate(
                **{name: tensor[:, :length] for name, tensor in batch.inputs.items()}, do_sample=False
            )
        generated = decode(tokenizer, ids.numpy())[0]
        if generated != title:
            raise TrainingError(
                f"the exported model writes {generated!r}, but the run wrote {title!r} (row {row}); "
                "nothing was replaced. "
                "Please report this with run.json"
            )


def card_sections(folder: Path) -> list[str]:
    """Markdown lines of the model card about ROUGE and example titles."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    sections = [
        f"ROUGE counts `{metrics.get('rouge_tokenizer')}`; `lead_*` is the document's first "
        "sentence as its title.",
        "",
    ]
    if examples := metrics.get("examples"):
        sections += ["## Titles of validation documents", "", *example_table(examples)]
    return sections
