"""Titles for long documents: an encoder that reads thousands of tokens, a decoder that writes a title, scored
with ROUGE.

    deepspeed --num_gpus 8 app/titlegen.py --deepspeed ds_configs/zero2.json --mixed_precision bf16 \\
        --model_name_or_path BIGBIRD --decoder_layers 3 --max_length 4096 --train_file train.jsonl \\
        --validation_file valid.jsonl --output_dir runs/titles
    accelerate launch --config_file accelerate_configs/ddp_bf16.yaml app/titlegen.py ...the same...
    torchrun --nproc_per_node 8 app/titlegen.py ...the same...      python app/titlegen.py ...the same...

An encoder (BigBird, BERT, ...) gets a BERT decoder; a model that has a decoder (BART, mT5, LED, PEGASUS, ...)
is used as it is. `best/` in the output folder is plain transformers:
AutoModelForSeq2SeqLM.from_pretrained("runs/titles/best").generate(...).

    python app/titlegen.py --do_predict --model_name_or_path runs/titles/best --test_file new.jsonl \\
        --output_dir runs/titles
"""

import sys
from dataclasses import dataclass

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from samerun.arguments import SmoothingArguments
from samerun.cli import read_arguments
from samerun.parsing import changed_option, is_given, option
from samerun.text.arguments import SearchArguments, SourceArguments, TextArguments


@dataclass(frozen=True, kw_only=True)
class Arguments(SourceArguments, SearchArguments, SmoothingArguments, TextArguments):
    """Titles"""

    title_column: str = option("title", help="column of the title")
    decoder_layers: int | None = option(
        at_least=1,
        excludes=("decoder_model_name_or_path",),
        help="number of layers of a new decoder (default: as many as the encoder)",
    )
    num_train_epochs: float | None = changed_option(
        TextArguments, "num_train_epochs", "passes over the training rows", 3.0
    )
    decoder_model_name_or_path: str | None = option(
        reads=True, help="pretrained decoder for an encoder, such as a BERT"
    )
    rouge_tokenizer: str = option(
        "auto",
        choices=("auto", "characters", "words", "unicode_words", "default"),
        help="tokens of ROUGE; auto: characters for Chinese, rouge-score's own words for English, else "
        "Unicode words",
    )


if __name__ == "__main__":
    # Before torch is imported: --help and wrong arguments answer at once.
    arguments = read_arguments(Arguments, __doc__)

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM

from samerun.data.tables import Cells, Table, note_cut
from samerun.data.tokens import Ragged, encode_cached
from samerun.errors import InputError, raise_problems
from samerun.launch import Launch
from samerun.main import run
from samerun.models import encoder_decoder
from samerun.models.adapters import limit_training
from samerun.models.pretrained import model_content
from samerun.plan import Modes
from samerun.task import Batch, Data, ModelCard, Predictions, ReportContent
from samerun.text import titles
from samerun.text.rouge import choose_tokenizer, first_sentence_scores, rouge_scores
from samerun.text.text import IGNORED, TextSplit, TextTask, check_outputs
from samerun.text.titles import Generation, teacher_forcing, token_losses
from samerun.text.tokenizer import TitleEncoder, set_languages


class TitleGeneration(TextTask):
    """A row has one target per title token, the end token included."""

    name = "titlegen"
    default_metric = "rougeL"
    shown_metrics = ("loss", "rouge1", "rouge2", "rougeL", "gen_len")
    metric_names = titles.METRICS
    baseline_name = "the first sentence, cut to the titles' median length"

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(titles.with_search_defaults(arguments))
        self.units_of_rouge = arguments.rouge_tokenizer

    # Data

    def load(self, launch: Launch, modes: Modes) -> Data:
        a = self.arguments
        tables, reference_titles = self.read(launch, modes)

        self.config = encoder_decoder.load_title_config(a)
        encoder_decoder.check_decoder(a, self.config)
        if modes.train and self.config.is_encoder_decoder:
            named = filter(partial(is_given, a), ("decoder_layers", "decoder_model_name_or_path"))
            problem = "is for encoders, but the model has a decoder; leave it out"
            raise_problems([f"--{name} {problem}" for name in named])
        self.source_prefix = a.source_prefix or getattr(self.config, "source_prefix", "")

        if a.rouge_tokenizer == "auto":
            self.units_of_rouge = getattr(self.config, "rouge_tokenizer", "auto")

        columns = (a.text_column, a.title_column) if modes.train else ()
        tokenizer = self.load_tokenizer([tables["train"].columns[name] for name in columns])
        if self.source_prefix and tokenizer.truncation_side == "left":
            raise InputError("--truncation_side left would cut --source_prefix off; leave one of them out")
        self.start = set_languages(tokenizer, a)
        if modes.train and a.source_lang is None and getattr(tokenizer, "src_lang", None):
            marked = f"the tokenizer marks documents as {tokenizer.src_lang}"
            self.notes.append(f"{marked}; --source_lang and --target_lang name your languages")
        self.title_language = getattr(tokenizer, "tgt_lang", None)
        encoder_decoder.set_decoder_start(self.config, self.start)
        self.generation = self.beam_search(tokenizer)
        self.use_tokenizer(tokenizer, getattr(self.config, "encoder", self.config), 4096)

        ids = self.all_ids(tables, reference_titles)
        name = a.decoder_model_name_or_path
        decoder = model_content(name, name) or a.decoder_layers
        optional = {"source_prefix": self.source_prefix, "title_language": self.start}
        optional = {key: value for key, value in optional.items() if value}
        own = {"decoder": decoder, "max_title_length": a.max_title_length, **optional}
        return self.data(tables, ids, own)

    def beam_search(self, tokenizer: Any) -> Generation:
        first = encoder_decoder.special_ids(self.config, tokenizer)[0]
        # Under ZeRO-3 and FSDP all processes must run the same number of forward passes.
        synced_gpus = self.modes.train and self.launch.gathers_weights and self.launch.world_size > 1
        further = titles.read_generation_config(self.arguments.generation_config, tokenizer)
        config = titles.generation_config(self.arguments, further)
        return Generation(config, first, tokenizer.pad_token_id, synced_gpus)

    @property
    def target_columns(self) -> tuple[str, ...]:
        return (self.arguments.title_column,)

    def read_targets(self, table: Table, split: str) -> Cells | None:
        return titles.read_titles(table, self.arguments.title_column, split)

    def ids_of_targets(self, table: Table, targets: Cells) -> Ragged:
        limit, ids = self.arguments.max_title_length, encoder_decoder.special_ids(self.config, self.tokenizer)
        settings = f"{self.tokenizer_hash} title {ids} {limit} {self.title_language or ''}".rstrip()
        encode = TitleEncoder(self.tokenizer, *ids, limit)
        encoded = encode_cached(targets, encode, settings, self.arguments.preprocessing_num_workers)
        note_cut(table, "titles", encoded["cut"], limit, self.notes)
        return encoded["input_ids"]

    def collate(self, split: TextSplit, rows: np.ndarray) -> Batch:
        batch = super().collate(split, rows)
        more = encoder_decoder.global_attention(self.config, batch.inputs)
        return replace(batch, inputs=batch.inputs | more)

    # Training

    def build(self) -> torch.nn.Module:
        arguments = self.arguments
        model = encoder_decoder.build_title_model(arguments, self.config, self.tokenizer)
        has_decoder = self.config.is_encoder_decoder or arguments.decoder_model_name_or_path
        if arguments.from_scratch or not has_decoder:  # the decoder is new
            encoder_decoder.set_output_bias(model, self.splits["train"].targets.values)
        self.store_settings(model)
        new_names = encoder_decoder.new_names(model, arguments, self.config)
        return self.with_kernels(limit_training(model, arguments, new_names))

    def store_settings(self, model: torch.nn.Module) -> None:
        """Keeps what later predictions need in the model's configuration."""
        tokenizer = "" if self.units_of_rouge == "auto" else self.units_of_rouge
        settings = {"source_prefix": self.source_prefix, "rouge_tokenizer": tokenizer}
        encoder_decoder.store_settings(model, self.start, **settings)

    def num_targets(self, batch: Batch) -> torch.Tensor:
        return ((batch.labels != IGNORED) & batch.is_real[:, None]).sum()

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(**batch.inputs, **teacher_forcing(batch.labels, self.generation)).logits
        return token_losses(logits, batch, self.arguments.label_smoothing_factor).sum()

    # Evaluation and prediction

    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        outputs, encoder_output = {}, None
        if batch.labels is not None:
            # Through the wrapper, which may autocast; ZeRO-3 and FSDP gather weights in hooks of the modules.
            out = model(**batch.inputs, **teacher_forcing(batch.labels, self.generation))
            losses = token_losses(out.logits, batch, 0.0).sum(dim=1)
            outputs["loss"] = losses.double()
            outputs["targets"] = (batch.labels != IGNORED).sum(dim=1)
            if not hasattr(out, "encoder_router_logits"):  # which a decoder may ask for, too
                encoder_output = out.encoder_last_hidden_state  # saves a second pass of the encoder
        ids, scores = self.generation.search(getattr(model, "module", model), batch.inputs, encoder_output)
        return {**outputs, "ids": ids, "scores": scores}

    def score(self, predictions: Predictions, split: TextSplit) -> dict[str, float | None]:
        check_outputs(predictions["loss"], "losses", split)
        loss = sum(predictions["loss"].tolist()) / max(1, int(predictions["targets"].sum()))
        length = float(titles.title_lengths(self.tokenizer, predictions["ids"][:, 0]).mean())
        pair, tokenizer = self.for_evaluate(predictions, split), self.rouge_tokenizer(split)
        return {"loss": loss, "gen_len": length, **rouge_scores(*pair, tokenizer)}

    def for_evaluate(self, predictions: Predictions, split: TextSplit) -> tuple[Any, Any]:
        return titles.decode(self.tokenizer, predictions["ids"][:, 0]), list(split.titles)

    def rouge_tokenizer(self, split: TextSplit | None) -> str:
        """The name of ROUGE's tokenizer; "auto" is resolved by the script of the references."""
        if self.units_of_rouge != "auto":
            return self.units_of_rouge
        return "default" if split is None or split.titles is None else choose_tokenizer(split.titles)

    def baseline(self, split: TextSplit, seconds: float) -> dict[str, float | None]:
        return first_sentence_scores(split.texts, split.titles, self.rouge_tokenizer(split))

    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        examples, validation = self.examples(best), self.splits.get("validation")
        # Rounding in half precision may change a title, so those are not compared.
        compared = examples[:2] if self.rounding == "no" else []
        by_length = sorted(range(len(compared)), key=lambda row: -validation.lengths[row])
        checked = {row: compared[row]["generated"] for row in by_length}
        check = partial(titles.check_export, collate=validation and validation.collate, expected=checked)
        self.save_best(path, model, titles.plain_model(model, self.generation), weights, check)
        return {"examples": examples, "rouge_tokenizer": self.rouge_tokenizer(validation)}

    def examples(self, best: Predictions | None) -> list[dict[str, str]]:
        """References and generated titles of the first validation documents."""
        generated = [] if best is None else titles.decode(self.tokenizer, best["ids"][: titles.EXAMPLES, 0])
        titles_by_row = self.splits["validation"].titles if generated else []
        return [{"reference": titles_by_row[row], "generated": title} for row, title in enumerate(generated)]

    def previews(self, best: Predictions) -> dict[str, str | np.ndarray]:
        return {"titles": "\n".join(titles.example_table(self.examples(best)))}

    def load_exported(self, path: str | Path) -> torch.nn.Module:
        if str(path) == self.arguments.model_name_or_path and not self.config.is_encoder_decoder:
            raise InputError(
                f"{path}: has no decoder, so it cannot write titles; train first, or name a run's best/"
            )
        # Every process has the whole model, so the processes need not generate in step.
        candidates = self.arguments.num_return_sequences
        self.generation = replace(self.generation, synced_gpus=False, candidates=candidates)
        model = self.load_for_prediction(AutoModelForSeq2SeqLM, path, False)
        self.store_settings(model)
        return self.with_kernels(model)

    def lines(self, predictions: Predictions, split: TextSplit) -> Iterator[dict[str, Any]]:
        lines = titles.prediction_lines(self.tokenizer, predictions["ids"], predictions["scores"])
        if not split.labelled:
            return lines
        return (line | {"reference": title} for line, title in zip(lines, split.titles, strict=True))

    def figures(self, best: Predictions, split: TextSplit) -> ReportContent:
        generated, references = best["ids"][:, 0], (split.targets[row] for row in range(len(split)))
        lengths = [titles.title_lengths(self.tokenizer, ids) for ids in (generated, references)]
        pair, tokenizer = self.for_evaluate(best, split), self.rouge_tokenizer(split)
        return titles.report_content(*pair, (*lengths, split.lengths), split.texts, tokenizer)

    def card(self, folder: Path) -> ModelCard:
        has_mask = encoder_decoder.has_global_attention(self.config)
        return titles.model_card(folder, self.source_prefix, has_mask, self.limits)


if __name__ == "__main__":
    run(TitleGeneration, arguments)
