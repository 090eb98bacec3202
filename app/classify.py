"""Multi-label text classification: one encoder, one logit per label, binary cross-entropy.

    python app/classify.py --model_name_or_path MODEL --train_file train.csv --validation_file valid.csv --output_dir runs/a
    accelerate launch --config_file accelerate_configs/ddp.yaml app/classify.py ...the same...
    deepspeed --num_gpus 8 app/classify.py --deepspeed ds_configs/zero2.json ...the same...
    torchrun --nproc_per_node 8 app/classify.py ...the same...

Every launch trains on the same batches and gives the same model up to round-off. `best/` in the output folder is a plain
transformers model: pipeline("text-classification", model="runs/a/best", top_k=None).

Predict with it, no labels needed:

    python app/classify.py --do_predict --model_name_or_path runs/a/best --test_file new.csv --output_dir runs/a
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import garbage_collection
from finetune.arguments import groups
from finetune.arguments.parsing import option, parse
from finetune.errors import InputError
from finetune.launching.shutdown import failures_end_the_job

if TYPE_CHECKING:  # torch and transformers are imported by the functions that use them, so that --help does not wait
    from collections.abc import Iterator

    from finetune.launching.launch import Launch
    from finetune.launching.processes import Run
    from finetune.plan import Plan
    from finetune.session import Opening
    from models.multilabel import MultiLabelTask
    from text.label_splits import Data, Split

HEADLINE = "f1_macro"
SHOWN = ("loss", "f1_micro", "f1_macro", "tuned_f1_micro", "tuned_f1_macro", "roc_auc_macro")


@dataclass(frozen=True, kw_only=True)
class LabelArguments:
    """Labels"""

    label_column: str = option("labels", help="column of the labels: a list, or one text split at --label_separator")
    label_separator: str = option("|", help="what separates labels in a text")
    label_columns: tuple[str, ...] | None = option(help="columns of 0 and 1, one per label, instead of --label_column")
    label_file: str | None = option(help="the label list, one a line; default: order of first appearance in training")
    unknown_labels: str = option(
        "error", choices=("error", "ignore"), help="labels in validation or test data that training does not have"
    )
    pos_weight: str = option("none", help="none, balanced (negatives / positives per label, capped) or a json FILE")
    pos_weight_cap: float = option(20.0, at_least=1, help="the most that --pos_weight balanced gives a label")
    head_bias: str = option(
        "prior", choices=("prior", "zero"), help="bias of a new head: the labels' log-odds in the training rows, or zero"
    )
    head_learning_rate: float | None = option(above=0, help="peak learning rate of the new head (default: --learning_rate)")


@dataclass(frozen=True, kw_only=True)
class Arguments(
    groups.LaunchArguments,
    groups.RunArguments,
    groups.OptimizationArguments,
    groups.BatchArguments,
    LabelArguments,
    groups.TextArguments,
    groups.DataArguments,
    groups.ModelArguments,
):
    """Multi-label classification"""


def main(arguments: Arguments) -> None:
    from finetune import preflight, session
    from finetune.kernels.masks import spare_the_device
    from finetune.launching import processes, shutdown
    from finetune.plan import make_plan
    from finetune.reports import results
    from finetune.training import loop
    from models.pretrained import import_models

    asked = preflight.check(arguments)
    train, evaluate, predict = groups.tasks_to_do(arguments)
    data = load_data(arguments, train, evaluate, predict)
    plan = make_plan(arguments, len(data.train.texts), asked.world_size, asked.micro_batches_by_tokens) if train else None
    task = make_task(arguments, data)
    packed = leaves_padding_out(arguments, data, asked)
    if packed:
        data.notes.append("the encoder leaves padding out (--padding_free); its dropout is another sample than with padding")
    run = processes.start(asked, plan.batch if plan else None, arguments.report_to, arguments.output_dir)
    spare_the_device(run.device)
    import_models()
    identity = session.make_identity(arguments, plan, data.identity)
    # Before the folder is taken: what is wrong with a model harms nothing that is there.
    model = build_model(arguments, data, task, packed) if train else None
    opening = session.open_run(run, arguments, plan, identity, data.notes, describe_weights(task, data))

    figures: dict[str, Any] = {}
    if train:
        training, state = prepare_training(run, arguments, data, plan, task, model, opening, identity)
        del model
        figures |= loop.fit(run, plan, training, session.fit_options(arguments, task.headline, SHOWN), state)
        figures |= session.finish_training(run, training, state)
        session.release(run, training)
    if (evaluate and not train) or predict:
        model = load_trained(run, arguments, data, train)
    if evaluate and not train:
        figures |= score_split(run, arguments, data, task, model, data.validation, "eval")
    if predict:
        figures |= predict_test(run, arguments, data, task, model)
    results.write_metrics(run, arguments, figures)
    if train:
        write_card(run, arguments)
    results.push_to_hub(run, arguments)
    report(run, arguments, figures)
    shutdown.finish(run)


def load_data(arguments: Arguments, train: bool, evaluate: bool, predict: bool) -> Data:
    """The run's files (see `text.label_splits`). Raises `InputError` with what is wrong."""
    from text import label_splits

    return label_splits.load_data(arguments, train, evaluate, predict)


# Model and training --------------------------------------------------------------------------------------------------


def make_task(arguments: Arguments, data: Data) -> MultiLabelTask:
    """The task with its positive weights."""
    import numpy as np

    from models.multilabel import MultiLabelTask, check_headline, positive_weights

    weights = None
    if data.train is not None:
        positive = np.bincount(data.train.labels.values, minlength=len(data.labels))
        rows = len(data.train.labels)
        weights = positive_weights(arguments.pos_weight, arguments.pos_weight_cap, positive, rows, data.labels)
    headline = (arguments.metric_for_best_model or HEADLINE).removeprefix("eval_")
    task = MultiLabelTask(headline, len(data.labels), weights, arguments.label_smoothing_factor)
    if data.train is not None and data.validation is not None:
        check_headline(task, data.validation.labels)
    return task


def describe_weights(task: MultiLabelTask, data: Data) -> dict[str, Any]:
    """The positive weights by label, for run.json; a note says how far they reach."""
    if task.pos_weight is None:
        return {}
    low, high = task.pos_weight.min(), task.pos_weight.max()
    data.notes.append(f"positive targets weigh from {low:.2f} to {high:.2f} (--pos_weight; all in run.json)")
    return {"pos_weight": dict(zip(data.labels, task.pos_weight.tolist(), strict=True))}


def leaves_padding_out(arguments: Arguments, data: Data, asked: Launch) -> bool:
    """Whether the encoder computes on packed rows (--padding_free). Raises `InputError` if that is asked for in vain."""
    from finetune.kernels.padding_free.choice import packs_rows

    return packs_rows(arguments.padding_free, data.config, not asked.use_cpu, data.tokenizer.padding_side)


def build_model(arguments: Arguments, data: Data, task: MultiLabelTask, packed: bool = False) -> Any:
    """The encoder with a head for the run's labels, the same initial weights on every process. `packed`: see `train_steps`."""
    import numpy as np
    import torch
    from transformers import AutoModelForSequenceClassification

    from finetune.kernels.bigbird.layers import use_fast_attention
    from finetune.kernels.dropout.attention import use_fast_dropout
    from finetune.kernels.padding_free.encoders import pack_rows
    from models.classifier import configure, set_head_bias
    from models.multilabel import prior_bias
    from models.pretrained import check_vocabulary, drop_pooler, load_model_and_new_names, take_vocabulary

    configure(data.config, data.labels)
    if arguments.from_scratch:
        take_vocabulary(data.config, data.tokenizer)
    data.config.pad_token_id = data.tokenizer.pad_token_id
    torch.manual_seed(arguments.seed)
    model, new_names = load_model_and_new_names(AutoModelForSequenceClassification, arguments, data.config)
    check_vocabulary(model, data.tokenizer)
    if arguments.head_bias == "prior":
        positive = np.bincount(data.train.labels.values, minlength=len(data.labels))
        bias = prior_bias(positive, len(data.train.labels), task.pos_weight, arguments.label_smoothing_factor)
        set_head_bias(model, new_names, bias)
    if data.config.model_type == "big_bird":
        drop_pooler(model.bert)  # its classifier reads the first token itself
    use_fast_attention(model, arguments.attention)
    use_fast_dropout(model)
    if packed:
        pack_rows(model)
    return model


def prepare_training(
    run: Run,
    arguments: Arguments,
    data: Data,
    plan: Plan,
    task: MultiLabelTask,
    model: Any,
    opening: Opening,
    identity: dict,
) -> tuple[Any, Any]:
    """Everything that `loop.fit` works on, with a checkpoint's state if there is one."""
    from finetune import session
    from finetune.training.loop import Training

    steps = train_steps(arguments, data, plan, run.launch.rank, leaves_padding_out(arguments, data, run.launch))
    validation = eval_rows(run, arguments, data, data.validation) if data.validation is not None else None

    def make(model: Any, optimizer: Any, tracker: Any) -> Training:
        def on_best(records: Any, figures: dict) -> None:
            export(run, arguments, data, model, records)

        folder = Path(arguments.output_dir)
        return Training(model, optimizer, task, steps, validation, tracker, folder, identity, on_best)

    return session.prepare_training(run, arguments, plan, model, make, opening, identity)


def train_steps(arguments: Arguments, data: Data, plan: Plan, rank: int, packed: bool = False) -> Any:
    """A process's batches by optimizer step. `packed`: see `leaves_padding_out`."""
    from finetune.training.batches import TrainSteps
    from text.label_splits import collator

    lengths, grouping = data.train.tokens.lengths, arguments.length_grouping
    return TrainSteps(collator(data.train, data), lengths, plan, rank, arguments.seed, grouping, data.padding, packed)


def rehearsal(asked: Launch, arguments: Arguments, data: Data, plan: Plan) -> tuple[Any, Any, Any]:
    """(model without weights, task, batches): what scripts/plan.py needs to know the memory of a run."""
    import torch

    task, packed = make_task(arguments, data), leaves_padding_out(arguments, data, asked)
    with torch.device("meta"):
        model = build_model(arguments, data, task, packed)
    return model, task, train_steps(arguments, data, plan, asked.rank, packed)


def eval_rows(run: Run, arguments: Arguments, data: Data, split: Split) -> Any:
    """A file to be evaluated, longest texts first."""
    from finetune.plan import evaluation_pass
    from finetune.training.batches import EvalRows
    from text.label_splits import collator

    size = evaluation_pass(arguments, by_tokens=run.device.type == "cpu")
    return EvalRows(collator(split, data), split.tokens.lengths, *size, data.padding)


def export(run: Run, arguments: Arguments, data: Data, model: Any, records: list | None) -> None:
    """Writes best/ with the thresholds that `records` (of the validation rows) give, and checks it by loading it."""
    import numpy as np

    from finetune.checkpoints.saving import full_weights
    from finetune.output.run_folder import BEST
    from finetune.reports.results import merge_metrics
    from metrics.multilabel import per_label_table
    from metrics.thresholds import tune_thresholds
    from models.classifier import check_export, plain_model, rows_to_check
    from models.export import export_model
    from models.multilabel import probabilities

    weights = full_weights(run, model)

    def write() -> None:
        thresholds, chosen, table = np.full(len(data.labels), 0.5), [], []
        if records:
            chances = probabilities(np.stack([record["logits"] for record in records]))
            targets = np.stack([record["labels"] for record in records])
            thresholds = tune_thresholds(chances, targets)
            table = per_label_table(chances, targets, thresholds, data.labels)
            chosen = rows_to_check(data.validation.tokens.lengths)
        plain = plain_model(run.unwrapped(model), thresholds)

        def check(place: Path) -> None:
            texts = [data.validation.texts[row] for row in chosen]
            check_export(place, texts, [records[row] for row in chosen], run.launch.precision)

        folder = Path(arguments.output_dir)
        export_model(folder / BEST, plain, weights, data.tokenizer, data.max_length, check)
        merge_metrics(folder, {"eval_per_label": table})

    run.on_main(write)


# Evaluation and prediction -------------------------------------------------------------------------------------------


def load_trained(run: Run, arguments: Arguments, data: Data, trained: bool) -> Any:
    """The exported model, in plain transformers: what is reported is what a user of best/ gets."""
    from transformers import AutoModelForSequenceClassification

    from finetune.kernels.bigbird.layers import use_fast_attention
    from finetune.kernels.padding_free.encoders import pack_rows
    from finetune.session import load_best
    from models.pretrained import check_vocabulary, load_model_and_new_names

    if trained:
        model = load_best(run, arguments, AutoModelForSequenceClassification.from_pretrained)
    else:
        asked = replace(arguments, from_scratch=False)
        model, new_names = load_model_and_new_names(AutoModelForSequenceClassification, asked, data.config)
        if new_names:
            raise InputError(
                f"{arguments.model_name_or_path}: has no trained classifier ({min(new_names)} is missing); train first"
            )
    check_vocabulary(model, data.tokenizer)
    use_fast_attention(model, arguments.attention)
    if leaves_padding_out(arguments, data, run.launch):
        pack_rows(model)
    return run.accelerator.prepare_model(model.to(run.device), evaluation_mode=True)


def score_split(
    run: Run, arguments: Arguments, data: Data, task: MultiLabelTask, model: Any, split: Split, name: str
) -> dict[str, Any]:
    """The figures of a file under the model's own thresholds, named `name`_*."""
    from finetune.training import evaluation
    from models.classifier import thresholds_of

    fixed = replace(task, thresholds=thresholds_of(run.unwrapped(model).config))
    figures, _ = evaluation.evaluate(run, model, fixed, eval_rows(run, arguments, data, split))
    return {f"{name}_{key}": value for key, value in figures.items()}


def predict_test(run: Run, arguments: Arguments, data: Data, task: MultiLabelTask, model: Any) -> dict[str, Any]:
    """Writes labels and probabilities of every test row; returns test_* figures when the file has labels."""
    from finetune.reading.columns import ids_of
    from finetune.reports import results
    from finetune.training import evaluation
    from metrics.thresholds import decide
    from models.classifier import thresholds_of
    from models.multilabel import probabilities

    thresholds = thresholds_of(run.unwrapped(model).config)
    records, seconds = evaluation.predict(run, model, task, eval_rows(run, arguments, data, data.test))

    def lines() -> Iterator[dict]:
        for name, record in zip(ids_of(data.test.table, arguments.id_column), records, strict=True):
            chances = probabilities(record["logits"])
            chosen = [label for label, on in zip(data.labels, decide(chances[None], thresholds)[0], strict=True) if on]
            scores = {label: round(float(p), 6) for label, p in zip(data.labels, chances, strict=True)}
            yield {"id": name, "labels": chosen, "probabilities": scores}

    results.write_predictions(run, arguments, lines)
    figures = {"test_rows": len(data.test.texts), "test_samples_per_second": len(data.test.texts) / seconds}
    if data.test.labels is not None:
        scored = run.on_main(lambda: replace(task, thresholds=thresholds).score(records))
        figures |= {f"test_{key}": value for key, value in scored.items()}
    return figures


# Reports -------------------------------------------------------------------------------------------------------------


def write_card(run: Run, arguments: Arguments) -> None:
    """README.md of the run: figures, per-label table, curves."""
    from text.classifier_card import write_classifier_card

    run.on_main(lambda: write_classifier_card(Path(arguments.output_dir)))


def report(run: Run, arguments: Arguments, figures: dict[str, Any]) -> None:
    """The figures that a reader looks for first."""
    for split in ("eval", "test"):
        known = [f"{key} {figures[f'{split}_{key}']:.4f}" for key in SHOWN if figures.get(f"{split}_{key}") is not None]
        if known:
            run.print(f"{split:<15}{', '.join(known)}")
    run.print(f"done           {arguments.output_dir}")


if __name__ == "__main__":
    garbage_collection.begin()
    with failures_end_the_job(debug="--debug" in sys.argv):
        main(parse(Arguments, description=__doc__))
