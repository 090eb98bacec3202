"""Text classification and regression: several labels a row, one label, or numbers (--problem_type).

    python app/classify.py --model_name_or_path MODEL --train_file train.csv --validation_file valid.csv \\
        --output_dir runs/a
    accelerate launch --config_file accelerate_configs/ddp.yaml app/classify.py ...the same...
    deepspeed --num_gpus 8 app/classify.py --deepspeed ds_configs/zero2.json ...the same...
    torchrun --nproc_per_node 8 app/classify.py ...the same...

Every launcher trains on the same batches and gives the same model up to round-off. `best/` in the output
folder is a plain transformers model: pipeline("text-classification", model="runs/a/best", top_k=None).

Pairs of texts: --text_pair_column. Prediction needs no labels:

    python app/classify.py --do_predict --model_name_or_path runs/a/best --test_file new.csv \\
        --output_dir runs/a
"""

import sys
from dataclasses import dataclass

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from samerun.cli import read_arguments
from samerun.parsing import changed_option, option
from samerun.text.arguments import (
    DecisionArguments,
    LongDocumentArguments,
    LossArguments,
    ProblemArguments,
    TextArguments,
)


@dataclass(frozen=True, kw_only=True)
class Arguments(DecisionArguments, LossArguments, ProblemArguments, LongDocumentArguments, TextArguments):
    """Labels"""

    label_column: str = option(
        "labels",
        help="column of the labels: a list, or one text split at --label_separator; for single_label one "
        "text or whole number, for regression a number",
    )
    label_separator: str = option("|", help="what separates labels in a text")
    label_columns: tuple[str, ...] | None = option(
        help="columns of 0 and 1, one per label, or for regression of numbers, instead of --label_column"
    )
    label_file: str | None = option(
        reads=True,
        per_machine=True,
        help="file with one label per line; default: order of first appearance in training, for "
        "single_label sorted",
    )
    unknown_labels: str = option(
        "error",
        choices=("error", "ignore"),
        help="labels in validation or test data that training does not have",
    )
    baseline: str = option(
        "auto",
        choices=("auto", "true", "false"),
        help="score a linear model on TF-IDF, too; auto: if that takes at most 5 % of the training's time "
        "and a minute (samerun baseline: without a training)",
    )
    head_bias: str = option(
        "prior",
        choices=("prior", "zero"),
        help="bias of a new head: the labels' log-odds (single_label: log shares), or zero",
    )
    learning_rate: float | None = changed_option(
        TextArguments,
        "learning_rate",
        "peak learning rate (default: 5e-5; of encoders with at most 384 hidden units, such as MiniLM, 1e-4, "
        "or 2e-4 for more than 26 labels of a multi-label problem)",
    )
    num_train_epochs: float | None = changed_option(
        TextArguments,
        "num_train_epochs",
        "passes over the training rows (default: 3, or as many as give 400 updates, for multi-label problems "
        "15 per label up to 1500; at most 30)",
    )
    head_learning_rate: float | None = option(
        above=0,
        help="peak learning rate of the head (default: --learning_rate; without that, ten times its default "
        "for a new head)",
    )


if __name__ == "__main__":
    # Before torch is imported: --help and wrong arguments answer at once.
    arguments = read_arguments(Arguments, __doc__)

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.errors import InputError, raise_problems
from samerun.export import plain_model, rows_to_check
from samerun.launch import Launch
from samerun.main import run
from samerun.models import pretrained
from samerun.models.adapters import limit_training
from samerun.models.contributions import words_of_likeliest
from samerun.plan import ENOUGH_UPDATES, Modes
from samerun.task import Batch, Data, ModelCard, Predictions, ReportContent
from samerun.text import head, long_documents
from samerun.text.arguments import PROBLEM_TYPES, inapplicable
from samerun.text.baseline import expected_seconds, linear_model
from samerun.text.labels import class_balanced, separator_of
from samerun.text.multi_label import MultiLabel
from samerun.text.multi_label_scores import MIN_CALIBRATION_ROWS
from samerun.text.regression import HIGHER_IS_BETTER, Regression
from samerun.text.single_label import SingleLabel
from samerun.text.text import TextSplit, TextTask, check_outputs
from samerun.text.tokenizer import check_reload

PROBLEMS = {problem.name: problem for problem in (MultiLabel, SingleLabel, Regression)}


class TextClassification(TextTask):
    """A text has labels. `problem` knows the targets, their loss and scores."""

    name = "classify"
    replays_passes = True
    evaluates_by_tokens = True
    named_metrics = HIGHER_IS_BETTER
    baseline_name = "a linear model on TF-IDF"
    baseline_advice = (
        "Likely reasons, in this order: too few updates (--num_train_epochs), cut texts (--max_length, "
        "--long_documents windows), a small learning rate (--learning_rate, --head_learning_rate), wrong "
        "labels"
    )

    def __init__(self, arguments: Any) -> None:
        kind = head.problem_type_of(arguments)
        raise_problems(inapplicable(arguments, kind))
        self.problem = PROBLEMS[kind](arguments)
        self.target_columns = self.problem.columns
        self.shown_metrics, self.metric_names = self.problem.shown_metrics, self.problem.metric_names
        self.pair_column, self.list_separator = arguments.text_pair_column, arguments.label_separator
        super().__init__(arguments)
        self.notes = self.problem.notes

    @property
    def reads_pairs(self) -> bool:
        own = getattr(self.config, "text_pair", None)
        return self.pair_column is not None if own is None or self.modes.train else own

    @property
    def default_metric(self) -> str:
        return self.problem.default_metric

    @property
    def labels(self) -> list[str]:
        return self.problem.labels

    # Data

    def load(self, launch: Launch, modes: Modes) -> Data:
        a, problem = self.arguments, self.problem
        tables, targets = self.read(launch, modes)

        self.config = pretrained.load_config(a)
        pretrained.check_model(a, self.config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "classify texts")
        if not modes.train:
            head.check_problem_type(a, self.config, self.notes)
            if tables:
                head.check_pairs(a, self.config)
        problem.choose(self.config, targets.get("train"))
        self.column_order = problem.labels
        if problem.name == "multi_label":
            self.list_separator = separator_of(problem.labels, a.label_separator)

        texts = [tables["train"].columns[name] for name in self.text_columns] if modes.train else []
        tokenizer = self.load_tokenizer(texts)
        check_reload(tokenizer, self.config, texts, a)
        self.use_tokenizer(tokenizer, self.config, 512)
        ids = self.all_ids(tables, targets)
        if modes.train:
            problem.prepare(ids)
            many = problem.enough_updates > ENOUGH_UPDATES
            head.set_default_rates(a, self.config, problem.labels, many, self.notes)
            self.details, self.loss_settings = problem.details, problem.loss_settings
            if "validation" in ids:
                rows, needed = len(ids["validation"]), MIN_CALIBRATION_ROWS
                if a.calibration != "none" and rows < needed:
                    raise InputError(f"--calibration: {rows} validation rows, expected at least {needed}")
                if self.best_metric in self.metric_names:
                    problem.check_best_metric(self.best_metric, ids["validation"])
        data = self.data(tables, ids, problem.fingerprint())
        if modes.train:
            weights, updates = None, problem.enough_updates
            if a.sampling == "class_balanced":
                weights = class_balanced(ids["train"], len(self.labels))
                if a.pos_weight.startswith("balanced"):
                    both = "--pos_weight balanced and --sampling class_balanced"
                    self.notes.append(f"{both} both favour rare labels; one of them may be enough")
            self.splits["train"] = replace(self.splits["train"], weights=weights, enough_updates=updates)
        return data

    def read_targets(self, table: Table, split: str) -> Any | None:
        return self.problem.read(table)

    def ids_of_targets(self, table: Table, targets: Any) -> Ragged:
        return self.problem.ids(table, targets)

    def target_tensor(self, targets: Ragged, rows: np.ndarray) -> torch.Tensor:
        return self.problem.tensor(targets, rows)

    # Training

    def build(self) -> torch.nn.Module:
        a, config, problem = self.arguments, self.config, self.problem
        own, new_rows = None if a.from_scratch else pretrained.own_labels(config), None
        has_same_type = config.problem_type == PROBLEM_TYPES[problem.name]
        config.problem_type = PROBLEM_TYPES[problem.name]
        renamed = own is not None and own != problem.labels
        if not renamed:
            pretrained.set_labels(config, problem.labels)
        if a.from_scratch:
            pretrained.take_vocabulary(config, self.tokenizer)
        config.pad_token_id = self.tokenizer.pad_token_id
        model, new_names = pretrained.load_model_and_new_names(AutoModelForSequenceClassification, a, config)
        changed: set[str] = set()
        if renamed:
            changed = pretrained.change_classes(model, own, problem.labels)
            new_rows = np.array([label not in own for label in problem.labels])
            pretrained.set_labels(config, problem.labels)
        trained = head.trained_outputs(model, new_names, new_rows, len(problem.labels))
        problem.adopt_head(model, trained & has_same_type)
        if a.head_bias == "prior":
            head.set_head_bias(model, problem.initial_bias(), ~trained)
        head.check_calibration(a.calibration, model, len(problem.labels))
        # An adapter would be added to the base model's output layer, which has other rows or another scale.
        if problem.name == "regression" and a.export == "adapter":
            changed = pretrained.classification_names(model)
        return self.with_kernels(limit_training(model, a, new_names | changed))

    def num_targets(self, batch: Batch) -> torch.Tensor:
        targets_per_row = batch.labels.shape[1:].numel()  # 1 for a class
        return batch.is_real.sum() * targets_per_row

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(**batch.inputs).logits.float()
        losses = self.problem.losses(logits, batch.labels)
        return (losses * batch.is_real.view(-1, *[1] * (losses.ndim - 1))).sum()

    # Evaluation and prediction

    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        outputs = {"logits": self.problem.outputs(model(**batch.inputs).logits.float())}
        return outputs if batch.labels is None else {**outputs, "labels": batch.labels}

    def score(self, predictions: Predictions, split: TextSplit) -> dict[str, float | None]:
        check_outputs(predictions["logits"], "logits", split)
        return self.problem.score(predictions, split)

    def baseline(self, split: TextSplit, seconds: float) -> dict[str, float | None]:
        """Scores of a linear model on TF-IDF, with thresholds tuned on the same rows as the model's."""
        wanted = self.arguments.baseline
        if "train" not in self.splits or wanted == "false":
            return {}
        texts = whole_texts(self.splits["train"])
        takes_long = wanted == "auto" and expected_seconds(texts, len(self.labels)) > seconds
        if takes_long or self.linear_model is None:
            return {}
        problem = self.problem.of_model(self.linear_predictions, self.splits.get("validation"))
        scores = problem.score(self.linear_predictions(split), split)
        return {name: scores[name] for name in self.shown_metrics if name != "loss"}

    @cached_property
    def linear_model(self) -> Callable[[Sequence[str]], np.ndarray] | None:
        train = self.splits["train"]
        return linear_model(whole_texts(train), self.known_targets(train), len(self.labels))

    def linear_predictions(self, split: TextSplit) -> Predictions:
        return {"logits": self.linear_model(whole_texts(split)), "labels": self.known_targets(split)}

    def known_targets(self, split: TextSplit) -> np.ndarray:
        """The `labels` of predictions of all rows."""
        return self.problem.tensor(split.targets, np.arange(len(split))).numpy()

    def for_evaluate(self, predictions: Predictions, split: TextSplit) -> tuple[Any, Any]:
        return self.problem.for_evaluate(predictions, split)

    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        problem, expected = self.problem, {}
        split = None if best is None else self.splits["validation"]
        metrics = problem.fit(best, split)
        if best is not None:
            for row in rows_to_check(np.argsort(-split.lengths, kind="stable")).tolist():
                text = split.texts[row] if split.pairs is None else (split.texts[row], split.pairs[row])
                expected[text] = problem.exported_outputs(best["logits"][row])
        plain = plain_model(model)
        head.store(plain.config, problem.config_entries() | {"text_pair": self.pair_column is not None})
        check = partial(head.check_export, expected=expected, precision=self.rounding, unit=problem.unit)
        change = partial(head.rescaled, plain, *problem.export_scale)
        self.save_best(path, model, plain, weights, check, change)
        return metrics

    def load_exported(self, path: str | Path) -> torch.nn.Module:
        model = self.load_for_prediction(AutoModelForSequenceClassification, path, True)
        self.problem.use_exported(model)
        return self.with_kernels(model)

    def lines(self, predictions: Predictions, split: TextSplit) -> Iterator[dict[str, Any]]:
        check_outputs(predictions["logits"], "logits", split)
        return self.problem.lines(predictions, split)

    def explain(
        self, model: torch.nn.Module, item: str | tuple[str, str], line: dict[str, Any]
    ) -> dict[str, Any]:
        """The thresholds, and for single texts the contributions of the first `max_length` tokens' words to
        the likeliest labels."""
        if not isinstance(item, str):
            return self.problem.explained()
        cut = {"truncation": True, "max_length": self.max_length}
        encoded = self.tokenizer(item, **cut, return_offsets_mapping=True, return_tensors="pt")
        outputs, method = line.get("probabilities") or line["values"], self.long_documents.method
        words = words_of_likeliest(model, encoded, self.labels, outputs, method == "windows")
        return {**self.problem.explained(), "words": words}

    def figures(self, best: Predictions, split: TextSplit) -> ReportContent:
        return self.problem.figures(best, split)

    def card(self, folder: Path) -> ModelCard:
        problem, usage = self.problem, long_documents.usage(self.config) or self.problem.usage
        if self.reads_pairs:
            usage = usage.replace('"a text"', '{"text": "a text", "text_pair": "another text"}')
        about = problem.card_metrics, problem.card_sections(folder), self.limits
        return ModelCard(problem.title, "text-classification", usage, *about)


def whole_texts(split: TextSplit) -> Sequence[str]:
    """The texts, with their pairs."""
    if split.pairs is None:
        return split.texts
    return [f"{text} {pair}" for text, pair in zip(split.texts, split.pairs, strict=True)]


if __name__ == "__main__":
    run(TextClassification, arguments)
