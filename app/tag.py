"""Tags for words: names in texts, parts of speech. One encoder, one tag for each word, cross-entropy.

    python app/tag.py --model_name_or_path MODEL --train_file train.conll --validation_file valid.conll \\
        --output_dir runs/names
    accelerate launch --config_file accelerate_configs/ddp.yaml app/tag.py ...the same...
    deepspeed --num_gpus 8 app/tag.py --deepspeed ds_configs/zero2.json ...the same...
    torchrun --nproc_per_node 8 app/tag.py ...the same...

Rows are sentences: lists of words and tags (jsonl, parquet, a data set), or a CoNLL file. Names are scored as
wholes (seqeval). `best/` in the output folder is a plain transformers model:
pipeline("token-classification", model="runs/names/best", aggregation_strategy="simple").

    python app/tag.py --do_predict --model_name_or_path runs/names/best --test_file new.jsonl \\
        --output_dir runs/names
"""

import sys
from dataclasses import dataclass

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from samerun.arguments import SmoothingArguments
from samerun.cli import read_arguments
from samerun.parsing import option
from samerun.text.arguments import TextArguments


@dataclass(frozen=True, kw_only=True)
class Arguments(SmoothingArguments, TextArguments):
    """Tags"""

    text_column: str = option("tokens", help="column of the words, a list (also: --tokens_column)")
    label_column: str = option("tags", help="column of the words' tags, a list (also: --tags_column)")
    label_file: str | None = option(
        reads=True,
        per_machine=True,
        help="file with one tag per line; default: in the order of first appearance in training",
    )
    label_all_tokens: bool = option(
        True,
        help="train on all tokens of a word, as transformers' pipeline reads them; false: on its first one",
    )
    head_learning_rate: float | None = option(
        above=0, help="peak learning rate of the new head (default: --learning_rate)"
    )

    def problems(self) -> list[str]:
        given = self.truncation_side != "right"
        return ["--truncation_side: no sentence is cut, longer ones are read in windows"] if given else []


if __name__ == "__main__":
    # Before torch is imported: --help and wrong arguments answer at once.
    arguments = read_arguments(Arguments, __doc__)

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification

from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.errors import InputError
from samerun.export import plain_model, rows_to_check
from samerun.launch import Launch
from samerun.main import run
from samerun.models import pretrained
from samerun.models.adapters import limit_training
from samerun.plan import Modes
from samerun.task import Batch, Data, ModelCard, Predictions, ReportContent, check_metric
from samerun.text import tags
from samerun.text.labels import in_order_of_head, label_source
from samerun.text.tags import RAW, Tagged, first_tokens
from samerun.text.text import IGNORED, TextSplit, TextTask, check_outputs, lengths_of, pad_rows
from samerun.text.titles import token_losses
from samerun.text.tokenizer import check_reload


class TokenClassification(TextTask):
    """A row has one target per word, or per token of its words."""

    name = "tag"
    default_metric = "f1"
    shown_metrics = ("loss", "precision", "recall", "f1", "f1_macro", "accuracy")
    named_metrics = ("f1",)
    evaluates_by_tokens = True
    list_separator = " "
    baseline_name = "the commonest tag of each word"

    # Data

    def load(self, launch: Launch, modes: Modes) -> Data:
        a = self.arguments
        tables, targets = self.read(launch, modes)

        self.config = pretrained.load_config(a)
        pretrained.check_model(a, self.config, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "tag words")
        self.own_labels = None if a.from_scratch else pretrained.own_labels(self.config)
        self.labels = pretrained.labels_of(self.config)
        self.all_tokens = getattr(self.config, "label_all_tokens", a.label_all_tokens)
        if modes.train:
            names = in_order_of_head(a, self.config, targets["train"].names, self.notes)
            self.labels = tags.choose_labels(self.own_labels, names, a.label_file)
            self.all_tokens = a.label_all_tokens
            if self.own_labels is not None:
                pretrained.note_changed_classes(self.own_labels, self.labels, self.notes)
        self.loss_settings = {"label_all_tokens": self.all_tokens}
        if not tags.are_names(self.labels):
            self.default_metric, self.shown_metrics = "accuracy", ("loss", "accuracy", "f1_macro")
        check_metric(self.best_metric, tags.metric_names(self.labels), a)

        words = [tables["train"].columns[a.text_column]] if modes.train else []
        tokenizer = self.load_tokenizer(words)
        check_reload(tokenizer, self.config, words, a)
        self.use_tokenizer(tokenizer, self.config, 512)
        self.window = -(-self.max_length // self.padding_multiple) * self.padding_multiple
        widths = {"max_length": self.window, "tokens": self.max_length}
        self.long_documents = tags.SentenceWindows("windows", **widths, spaces=tags.keeps_spaces(tokenizer))
        self.limits[0] = f"Longer texts than {self.max_length} tokens have to be cut into windows."
        ids = self.all_ids(tables, targets)
        if modes.train:
            if "validation" in targets:
                self.check_best_metric(targets["validation"])
            self.notes.append(f"{len(self.labels)} tags: {', '.join(self.labels[:20])}")
        return self.data(tables, ids, {"label_list": self.labels, "all_tokens": self.all_tokens})

    def check_best_metric(self, validation: Tagged) -> None:
        """Chooses by the loss if the validation rows do not define the default metric. Raises `InputError`
        for such a --metric_for_best_model."""
        if self.best_metric not in tags.undefined_metrics(validation, self.labels):
            return
        if self.arguments.metric_for_best_model is not None:
            raise InputError(
                f"--metric_for_best_model {self.best_metric} is undefined on these validation rows (no word "
                "has such a tag); choose another, such as loss"
            )
        self.default_metric = "loss"

    @property
    def target_columns(self) -> tuple[str, ...]:
        return (self.arguments.label_column,)

    def as_texts(self, table: Table, split: str) -> Table:
        columns = (self.arguments.text_column, self.arguments.label_column)
        return tags.as_sentences(table, *columns, takes_texts=split == "test")

    def read_targets(self, table: Table, split: str) -> Tagged | None:
        return tags.read_tags(table, self.arguments.text_column, self.arguments.label_column, self.notes)

    def ids_of_targets(self, table: Table, targets: Tagged) -> Ragged:
        source = label_source(self.arguments)
        return tags.tag_ids(table, targets, self.labels, self.arguments.text_column, source)

    def collate(self, split: TextSplit, rows: np.ndarray) -> Batch:
        """(b, width) ids and mask, and the label of each token. If a row has several windows, they stand one
        after the other, `window` tokens each."""
        ids, numbers = ([ragged[row] for row in rows] for ragged in (split.tokens, split.word_ids))
        has_windows = max(map(len, ids)) > self.window
        multiple = self.window if has_windows else self.padding_multiple
        word_ids = pad_rows(numbers, tags.PADDING, multiple=multiple)
        mask = (word_ids != tags.PADDING).long()
        if has_windows:
            mask.view(-1, self.window)[:, 0] = 1  # an empty window has to attend to something
        padded = pad_rows(ids, self.tokenizer.pad_token_id, multiple=multiple)
        inputs = {"input_ids": padded, "attention_mask": mask}
        labels = None
        if split.targets is not None:
            of_words, first = self.target_tensor(split.targets, rows), first_tokens(word_ids)
            labels = of_words.gather(1, word_ids.clamp(min=0)).where(first, IGNORED)
            if self.all_tokens:
                inside = torch.as_tensor(tags.inside_labels(self.labels))
                further = inside[of_words.clamp(min=0)].gather(1, word_ids.clamp(min=0))
                labels = labels.where(first | (word_ids < 0), further)
        lengths = None if has_windows else lengths_of(ids, "right")
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels, lengths)

    def rows_in_memory(self, items: Sequence[str | list[str]]) -> TextSplit:
        """`items`: texts or lists of words."""
        for number, item in enumerate(items):
            if not isinstance(item, str) and (problem := next(tags.word_problems(item), None)):
                raise InputError(f"text {number}{problem}")
        return super().rows_in_memory([f"{RAW}{x}" if isinstance(x, str) else "\n".join(x) for x in items])

    # Training

    def build(self) -> torch.nn.Module:
        a, config = self.arguments, self.config
        config.label_all_tokens = self.all_tokens
        if a.from_scratch:
            pretrained.take_vocabulary(config, self.tokenizer)
        config.pad_token_id = self.tokenizer.pad_token_id
        own = self.own_labels
        made = pretrained.load_with_classes(AutoModelForTokenClassification, a, config, own, self.labels)
        model = limit_training(made[0], a, made[1])
        for name, parameter in model.named_parameters():
            # Of Longformer, for tokens that do not exist here: DDP fails for weights without a gradient.
            parameter.requires_grad_(parameter.requires_grad and "_global." not in name)
        return self.with_kernels(model)

    def num_targets(self, batch: Batch) -> torch.Tensor:
        return ((batch.labels != IGNORED) & batch.is_real[:, None]).sum()

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return token_losses(self.logits(model, batch), batch, self.arguments.label_smoothing_factor).sum()

    def logits(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """(b, tokens, labels)"""
        shape, inputs = batch.inputs["input_ids"].shape, batch.inputs
        if shape[1] > self.window:
            inputs = {name: tensor.view(-1, self.window) for name, tensor in inputs.items()}
        return model(**inputs).logits.float().view(*shape, -1)

    # Evaluation and prediction

    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        logits = self.logits(model, batch)
        scores, ids = logits.softmax(-1).max(-1)
        outputs = {"ids": ids.int(), "scores": scores}
        if batch.labels is not None:
            outputs["loss"] = token_losses(logits, batch, 0.0).sum(1)
            outputs["targets"] = (batch.labels != IGNORED).sum(1)
        return outputs

    def score(self, predictions: Predictions, split: TextSplit) -> dict[str, float | None]:
        check_outputs(predictions["scores"], "probabilities", split)
        loss = sum(predictions["loss"].tolist()) / max(1, int(predictions["targets"].sum()))
        predicted, truth = self.for_evaluate(predictions, split)
        return {"loss": loss} | tags.scores_of(truth, predicted, self.labels)

    def for_evaluate(self, predictions: Predictions, split: TextSplit) -> tuple[Any, Any]:
        rows = range(len(split))
        predicted = [self.named(self.of_words(predictions["ids"], split, row)) for row in rows]
        return predicted, [self.named(split.targets[row]) for row in rows]

    def of_words(self, values: np.ndarray, split: TextSplit, row: int) -> np.ndarray:
        """The values of a row's words, those of their first tokens. `values`: (rows, tokens)."""
        first = first_tokens(np.array(split.word_ids[row]))
        return values[row, : len(first)][first]

    def named(self, ids: np.ndarray) -> list[str]:
        return [self.labels[number] for number in ids.tolist()]

    def baseline(self, split: TextSplit, seconds: float) -> dict[str, float | None]:
        """Scores of the commonest tag of each word in training."""
        train = self.splits.get("train")
        if train is None:
            return {}
        known, other = tags.commonest_tags(train.texts, train.targets)
        guessed = [[self.labels[known.get(x, other)] for x in tags.words_of(cell)] for cell in split.texts]
        truth = [self.named(split.targets[row]) for row in range(len(split))]
        scores = tags.scores_of(truth, guessed, self.labels)
        return {name: scores[name] for name in self.shown_metrics if name != "loss"}

    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        expected = [] if best is None else list(self.checked_rows(best, self.splits["validation"]))
        check = partial(tags.check_export, expected=expected, precision=self.rounding, found=metrics)
        self.save_best(path, model, plain_model(model), weights, check)
        if best is not None:
            predicted, truth = self.for_evaluate(best, self.splits["validation"])
            table = tags.per_type(truth, predicted, self.labels)
            metrics["eval_per_type"] = [{"type": kind, **row} for kind, row in table.items()]
        return metrics

    def checked_rows(self, best: Predictions, split: TextSplit) -> Iterator[tuple]:
        """What `tags.check_export` expects of some sentences, from the longest to the shortest."""
        by_length = np.argsort(-split.lengths, kind="stable")
        by_length = by_length[split.lengths[by_length] <= self.max_length]
        for row in rows_to_check(by_length, tags.CHECKED_ROWS).tolist():
            line, ids = self.line(best, split, row), split.tokens[row].tolist()
            names = [(name["type"], name["start"], name["end"]) for name in line["entities"]]
            has_names = tags.are_names(self.labels)
            yield line["text"], ids, best["scores"][row, : len(ids)], names if has_names else None

    def load_exported(self, path: str | Path) -> torch.nn.Module:
        model = self.load_for_prediction(AutoModelForTokenClassification, path, True)
        return self.with_kernels(model)

    def lines(self, predictions: Predictions, split: TextSplit) -> Iterator[dict[str, Any]]:
        check_outputs(predictions["scores"], "probabilities", split)
        return (self.line(predictions, split, row) for row in range(len(split)))

    def line(self, predictions: Predictions, split: TextSplit, row: int) -> dict[str, Any]:
        ids, scores = (self.of_words(predictions[name], split, row) for name in ("ids", "scores"))
        words, text, found = tags.words_of(split.texts[row]), tags.text_of(split.texts[row]), self.named(ids)
        entities = tags.entities_of(found, words, text, scores) if tags.are_names(self.labels) else []
        line = {"tokens": words, "tags": found, "text": text, "entities": entities}
        return line | ({"reference": self.named(split.targets[row])} if split.labelled else {})

    def figures(self, best: Predictions, split: TextSplit) -> ReportContent:
        predicted, truth = self.for_evaluate(best, split)
        losses = best["loss"] / np.maximum(best["targets"], 1)
        return tags.report_content(truth, predicted, self.labels, losses, split.texts)

    def card(self, folder: Path) -> ModelCard:
        return tags.model_card(folder, self.limits)


if __name__ == "__main__":
    run(TokenClassification, arguments)
