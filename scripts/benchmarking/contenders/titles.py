"""Ways of training the same encoder-decoder on rows of one length, so that nobody pads: settings -> what it measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import titlegen
import torch

from benchmarking.contenders.classification import best_settings, reduce_tensor
from benchmarking.contenders.title_models import arguments_of, plain_model
from benchmarking.contenders.title_rows import batch_size
from benchmarking.watch import Done, Stopped, Watch, Watched
from finetune.arguments.parsing import parse
from finetune.kernels.row_lengths import row_lengths
from text.title_splits import collator

CHECKED_ROWS = 4  # training rows whose loss is taken before and after


def train_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/titlegen.py's own main, watched from where the batches are taken and left when the steps are done."""
    from finetune.training import loop

    watch, fit, answer = Watch(settings), loop.fit, {}

    def watched_fit(run: Any, plan: Any, training: Any, options: Any, state: Any) -> None:
        steps = training.steps
        checked = steps.collate(np.arange(min(CHECKED_ROWS, len(steps.lengths)))).to(run.device)
        before = mean_loss(settings, training.model, training.task, checked)
        training.steps = Watched(steps, watch)
        try:
            fit(run, plan, training, options, state)
            watch.mark()
        except Stopped:
            pass
        answer.update(watch.figures())
        after = mean_loss(settings, training.model, training.task, checked)
        units = [int(steps.lengths[steps.rows(step)].sum()) for step in range(len(answer["step_seconds"]))]
        answer.update(units=units, loss_before=before, loss_after=after, batch_size=plan.batch.global_batch_size)
        raise Done

    loop.fit = watched_fit
    arguments, _ = training_arguments(settings)
    try:
        titlegen.main(arguments)
    except Done:
        return answer
    raise RuntimeError("app/titlegen.py did not train")


def train_with_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Seq2SeqTrainer with the same model in plain transformers: as it comes; at its best here (trainer_best: fused AdamW, rows
    of similar length together); and so with full attention in place of sparse (trainer_full)."""
    from datasets import Dataset, disable_progress_bars
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

    from models.encoder_decoder import encoder_config

    disable_progress_bars()
    watch = Watch(settings)
    arguments, rows_per_step = training_arguments(settings)
    data = titlegen.load_data(arguments, True, False, False)
    if settings["contender"] == "trainer_full":
        encoder_config(data.config).attention_type = "original_full"
    model = plain_model(arguments, data)
    tokens, labels = data.train.tokens, data.train.labels
    columns = {name: [rows[i].tolist() for i in range(len(rows))] for name, rows in (("input_ids", tokens), ("labels", labels))}
    rows = Dataset.from_dict({**columns, "length": tokens.lengths.tolist()})

    class Marks(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.mark()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.mark()

    cuda = watch.device.type == "cuda"
    best = {} if settings["contender"] == "trainer" else best_settings(Seq2SeqTrainingArguments, cuda)
    trainer_arguments = Seq2SeqTrainingArguments(
        output_dir=settings["folder"], per_device_train_batch_size=rows_per_step, max_steps=settings["max_steps"],
        learning_rate=arguments.learning_rate, weight_decay=arguments.weight_decay, max_grad_norm=arguments.max_grad_norm,
        seed=settings["seed"], bf16=settings["precision"] == "bf16", save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=watch.device.type == "cpu", **best,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model, trainer_arguments, data_collator=DataCollatorForSeq2Seq(data.tokenizer), train_dataset=rows,
        processing_class=data.tokenizer, callbacks=[Marks()],
    )  # fmt: skip
    task = task_of(data)
    checked = collator(data.train, data)(np.arange(min(CHECKED_ROWS, len(rows)))).to(watch.device)
    before = mean_loss(settings, model.to(watch.device), task, checked)
    with suppress(Stopped):
        trainer.train()
    answer = watch.figures()
    units = [rows_per_step * settings["length"]] * len(answer["step_seconds"])
    after = mean_loss(settings, trainer.model, task, checked)
    return answer | {"units": units, "loss_before": before, "loss_after": after, "batch_size": rows_per_step}


def training_arguments(settings: dict[str, Any]) -> tuple[Any, int]:
    """The application's arguments, and the rows per optimizer step."""
    length, size = settings["length"], batch_size(settings, settings["length"])
    given = {
        "train_file": Path(settings["inputs"], f"train_{length}.jsonl"), "max_length": length, "global_batch_size": size,
        "max_steps": settings["max_steps"], "do_train": True, "do_eval": False, "eval_strategy": "no", "save_steps": 0,
        "torch_compile": settings["contender"] == "ours_compiled",
    }  # fmt: skip
    return parse(titlegen.Arguments, argv=arguments_of(settings, given)), size


def task_of(data: Any) -> Any:
    """A task for its loss alone."""
    from models.titles import TitleTask

    return TitleTask("loss", data.start_id, data.tokenizer.pad_token_id, None, None, None, "default")


@torch.no_grad()
def mean_loss(settings: dict[str, Any], model: Any, task: Any, batch: Any) -> float:
    """Loss per title token, without dropout."""
    model.eval()
    with autocast(settings, batch.rows.device), row_lengths(batch.lengths):
        loss = float(task.loss_sum(model, batch) / task.num_targets(batch))
    model.train()
    return loss


def train_bare(settings: dict[str, Any]) -> dict[str, Any]:
    """Our model over the same batches in the same order, and nothing but PyTorch around it."""
    from finetune.plan import make_plan

    watch = Watch(settings)
    arguments, rows_per_step = training_arguments(settings)
    data = titlegen.load_data(arguments, True, False, False)
    lengths = data.train.tokens.lengths
    plan = make_plan(arguments, len(lengths), 1, by_tokens=watch.device.type == "cpu")
    steps = titlegen.train_steps(arguments, data, plan, 0)
    model, task = titlegen.build_model(arguments, data).to(watch.device), task_of(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, fused=True)
    checked = steps.collate(np.arange(min(CHECKED_ROWS, len(lengths)))).to(watch.device)
    before = mean_loss(settings, model, task, checked)
    model.train()
    with suppress(Stopped):
        watch.mark()
        for step in range(len(steps)):
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * (1 - step / len(steps))
            batches = [batch.to(watch.device) for batch in steps[step]]
            targets = sum(task.num_targets(batch) for batch in batches)
            for batch in batches:
                with autocast(settings, watch.device), row_lengths(batch.lengths):
                    loss = task.loss_sum(model, batch) / targets
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            watch.mark()
    answer = watch.figures()
    units = [int(lengths[steps.rows(step)].sum()) for step in range(len(answer["step_seconds"]))]
    after = mean_loss(settings, model, task, checked)
    return answer | {"units": units, "loss_before": before, "loss_after": after, "batch_size": rows_per_step}


def train_padded(settings: dict[str, Any]) -> dict[str, Any]:
    """The hand-written loop of many repositories: transformers' model, rows padded to max_length, AdamW as it comes, the loss
    of every step read with reduce_tensor. One process, hence without DDP."""
    watch = Watch(settings)
    arguments, rows_per_step = training_arguments(settings)
    data = titlegen.load_data(arguments, True, False, False)
    tokens, labels, width = data.train.tokens, data.train.labels, settings["length"]
    model, task = plain_model(arguments, data).to(watch.device), task_of(data)
    longest = int(labels.lengths.max())

    def padded(row: int) -> dict[str, torch.Tensor]:
        ids, title = np.zeros(width, np.int64) + data.tokenizer.pad_token_id, np.full(longest, -100, np.int64)
        ids[: len(tokens[row])], title[: len(labels[row])] = tokens[row], labels[row]
        mask = np.arange(width) < len(tokens[row])
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask).long(), "labels": torch.tensor(title)}

    rows = [padded(row) for row in range(len(tokens))]
    loader = torch.utils.data.DataLoader(rows, rows_per_step, shuffle=True, pin_memory=watch.device.type == "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    checked = collator(data.train, data)(np.arange(min(CHECKED_ROWS, len(tokens)))).to(watch.device)
    before = mean_loss(settings, model, task, checked)
    model.train()
    with suppress(Stopped):
        watch.mark()
        for batch in loader:
            batch = {name: tensor.to(watch.device) for name, tensor in batch.items()}
            with autocast(settings, watch.device):
                loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
            optimizer.step()
            reduce_tensor(loss.detach(), 1).item()
            watch.mark()
    answer = watch.figures()
    after = mean_loss(settings, model, task, checked)
    units = [rows_per_step * width] * len(answer["step_seconds"])
    return answer | {"units": units, "loss_before": before, "loss_after": after, "batch_size": rows_per_step}


def autocast(settings: dict[str, Any], device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=settings["precision"] == "bf16")


CONTENDERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ours": train_ours,
    "ours_compiled": train_ours,
    "bare": train_bare,
    "trainer_best": train_with_trainer,
    "trainer": train_with_trainer,
    "trainer_full": train_with_trainer,
    "padded": train_padded,
}
