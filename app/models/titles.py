"""Title generation as a task: cross-entropy over title tokens, titles by beam search, ROUGE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import BaseModelOutput

from finetune.errors import TrainingError
from finetune.task import Batch, Record

IGNORED = -100  # the label that counts for nothing


@dataclass(frozen=True)
class Generation:
    """How titles are searched for. Lengths are in tokens and leave out start and end."""

    num_beams: int
    length_penalty: float
    no_repeat_ngram_size: int
    min_length: int
    max_length: int
    num_return_sequences: int
    in_step: bool  # under ZeRO-3 weights are gathered together, so all processes must generate equally long


@dataclass(frozen=True)
class TitleTask:
    """The four verbs (see `finetune.task.Task`). Every token of a title, its end included, is one target.

    `decode` turns rows of ids into titles; `references` are the titles of the rows that are scored, None when there are none;
    `rouge_tokenizer` names what ROUGE counts.
    """

    headline: str
    start_id: int
    pad_id: int
    generation: Generation
    decode: Callable[[list[list[int]]], list[str]]
    references: Sequence[str] | None
    rouge_tokenizer: str
    label_smoothing: float = 0.0

    def num_targets(self, batch: Batch) -> torch.Tensor:
        return ((batch.labels != IGNORED) & batch.is_real[:, None]).sum()

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        logits = model(**batch.inputs, **self.teacher_forcing(batch.labels)).logits
        return self.token_losses(logits, batch, self.label_smoothing).sum()

    def predict(self, model: Any, batch: Batch) -> list[Record]:
        plain = getattr(model, "module", model)
        rows = batch.rows.tolist()
        losses = counts = [None] * len(rows)
        encoded = {}
        if batch.labels is not None:
            # Through the wrapper, which may autocast; the gathering of ZeRO-3 hangs on the inner modules.
            out = model(**batch.inputs, **self.teacher_forcing(batch.labels))
            losses = self.token_losses(out.logits, batch, 0.0).sum(dim=1).double().tolist()
            counts = (batch.labels != IGNORED).sum(dim=1).tolist()
            # The search starts from the same documents: most of the work is done.
            encoded = {"encoder_outputs": BaseModelOutput(last_hidden_state=out.encoder_last_hidden_state)}
        sequences, scores = self.search(plain, batch, encoded)
        titles, each = self.decode(sequences), self.generation.num_return_sequences
        found = []
        for i, row in enumerate(rows):
            if row >= 0:
                mine = slice(i * each, (i + 1) * each)
                lengths = [self.length(ids) for ids in sequences[mine]]
                candidates = {"titles": titles[mine], "scores": scores[mine], "gen_len": lengths[0]}
                found.append({"row": row, "loss": losses[i], "targets": counts[i], **candidates})
        return found

    def score(self, records: list[Record]) -> dict[str, float | None]:
        # evaluate takes up to a second to import: at the first score, not at the start
        from metrics.rouge_metric import RougeMetric

        titles = [record["titles"][0] for record in records]
        figures: dict[str, float | None] = {}
        if records and records[0]["loss"] is not None:
            figures["loss"] = sum(record["loss"] for record in records) / max(1, sum(record["targets"] for record in records))
            if figures["loss"] != figures["loss"]:
                raise TrainingError("the model's loss is not finite: it diverged. Try a smaller --learning_rate")
        figures["gen_len"] = sum(record["gen_len"] for record in records) / len(records) if records else None
        rouge = RougeMetric().compute(predictions=titles, references=self.references, tokenizer=self.rouge_tokenizer)
        return {**figures, **rouge}

    def teacher_forcing(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Decoder inputs (b, t): the labels moved right by one behind the start id, and their mask. No keys and
        values are kept: no token is to come."""
        ids = labels.masked_fill(labels == IGNORED, self.pad_id)
        start = ids.new_full((len(ids), 1), self.start_id)
        mask = torch.cat([torch.ones_like(start), (labels[:, :-1] != IGNORED).long()], dim=1)
        ids = torch.cat([start, ids[:, :-1]], dim=1)
        return {"decoder_input_ids": ids, "decoder_attention_mask": mask, "use_cache": False}

    def token_losses(self, logits: torch.Tensor, batch: Batch, smoothing: float) -> torch.Tensor:
        """(b, t) float32: each title token's cross-entropy, 0 where there is none."""
        labels = batch.labels.masked_fill(~batch.is_real[:, None], IGNORED)
        flat = cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
        )
        return flat.view(labels.shape)

    def search(self, model: Any, batch: Batch, encoded: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
        """Beam search: (rows x num_return_sequences) ids, best first within a row, and their scores.

        `encoded`: the encoder's outputs for the batch, if they are known.
        """
        asked = self.generation
        out = model.generate(
            **batch.inputs,
            **encoded,
            do_sample=False,
            num_beams=max(asked.num_beams, asked.num_return_sequences),
            length_penalty=asked.length_penalty,
            no_repeat_ngram_size=asked.no_repeat_ngram_size,
            # transformers counts the start token
            min_length=asked.min_length + 1 if asked.min_length else 0,
            max_length=asked.max_length + 2,
            num_return_sequences=asked.num_return_sequences,
            early_stopping=True,
            synced_gpus=asked.in_step,
            return_dict_in_generate=True,
            output_scores=asked.num_return_sequences > 1,
        )
        scores = out.sequences_scores.tolist() if asked.num_return_sequences > 1 else [None] * len(out.sequences)
        return out.sequences.tolist(), scores

    def length(self, ids: list[int]) -> int:
        """Tokens of a generated title, without start and padding."""
        return sum(token not in (self.pad_id, self.start_id) for token in ids)
