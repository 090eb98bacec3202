"""The contenders of bench_titlegen.py, each in a child: settings -> what it measured."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import titlegen
import torch

from benchmarking.memory import PeakMemory
from benchmarking.title_models import arguments_of, load_writer, plain_model
from benchmarking.title_rows import batch_size
from benchmarking.watch import Stopped, Watch, Watched
from finetune.config import parse

CHECKED_ROWS = 4  # training rows whose loss is taken before and after
CHECKED_TITLES = 8  # documents that plain transformers gives a title one at a time


class TitleWatch(Watch):
    """Also takes the memory, from the first step on."""

    def begin(self) -> None:
        self.memory = PeakMemory(self.device)

    def figures(self) -> dict[str, Any]:
        return {**super().figures(), **self.memory.figures()}


class Done(Exception):  # noqa: N818 - no error
    """Leaves the application once the measured part is over."""


# Training --------------------------------------------------------------------------------------------------------------


def train_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/titlegen.py's own main, watched from where the batches are taken and left when the steps are done."""
    from finetune import engine

    watch, fit, answer = TitleWatch(settings), engine.fit, {}

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

    engine.fit = watched_fit
    arguments, _ = training_arguments(settings)
    try:
        titlegen.main(arguments)
    except Done:
        return answer
    raise RuntimeError("app/titlegen.py did not train")


def train_with_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Seq2SeqTrainer at its best here: the same model in plain transformers, fused AdamW, rows of similar length together."""
    from datasets import Dataset, disable_progress_bars
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

    from titles.model import encoder_config

    disable_progress_bars()
    watch = TitleWatch(settings)
    arguments, rows_per_step = training_arguments(settings)
    data = titlegen.load_data(arguments, True, False, False)
    if settings["contender"].endswith("trainer_full"):
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

    trainer_arguments = Seq2SeqTrainingArguments(
        output_dir=settings["folder"], per_device_train_batch_size=rows_per_step, max_steps=settings["max_steps"],
        learning_rate=arguments.learning_rate, weight_decay=arguments.weight_decay, max_grad_norm=arguments.max_grad_norm,
        seed=settings["seed"], bf16=settings["precision"] == "bf16", save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=watch.device.type == "cpu", optim="adamw_torch_fused", **by_length(Seq2SeqTrainingArguments),
        dataloader_pin_memory=watch.device.type == "cuda",
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model, trainer_arguments, data_collator=DataCollatorForSeq2Seq(data.tokenizer), train_dataset=rows,
        processing_class=data.tokenizer, callbacks=[Marks()],
    )  # fmt: skip
    task = task_of(data)
    checked = titlegen.collator(data.train, data)(np.arange(min(CHECKED_ROWS, len(rows)))).to(watch.device)
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
    }  # fmt: skip
    return parse(titlegen.Arguments, argv=arguments_of(settings, given)), size


def by_length(arguments_class: Any) -> dict[str, Any]:
    """Length grouping, whose name changed with transformers 5."""
    import dataclasses

    known = {field.name for field in dataclasses.fields(arguments_class)}
    return {"train_sampling_strategy": "group_by_length"} if "train_sampling_strategy" in known else {"group_by_length": True}


def task_of(data: Any) -> Any:
    """A task for its loss alone."""
    from titles.task import TitleTask

    return TitleTask("loss", data.start_id, data.tokenizer.pad_token_id, None, None, None, "default")


@torch.no_grad()
def mean_loss(settings: dict[str, Any], model: Any, task: Any, batch: Any) -> float:
    """Loss per title token, without dropout."""
    model.eval()
    with torch.autocast(batch.rows.device.type, torch.bfloat16, enabled=settings["precision"] == "bf16"):
        loss = float(task.loss_sum(model, batch) / task.num_targets(batch))
    model.train()
    return loss


# Generation ------------------------------------------------------------------------------------------------------------


def generate_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/titlegen.py --do_predict, watched where it predicts; each pass goes over all documents."""
    from finetune import engine

    predict, answer = engine.predict, {}

    def watched_predict(run: Any, model: Any, task: Any, rows: Any) -> None:
        with torch.no_grad():  # a small batch first: what is made on first use belongs to no pass
            model.eval()
            task.predict(model, rows.collate(np.arange(1)).to(run.device))
        titles, figures = passes(settings, lambda: [r["titles"][0] for r in predict(run, model, task, rows)[0]])
        answer.update(figures, titles=titles, alone=titles_alone(settings, rows, task, run.device))
        raise Done

    engine.predict = watched_predict
    try:
        titlegen.main(predicting_arguments(settings))
    except Done:
        return answer
    raise RuntimeError("app/titlegen.py did not predict")


def titles_alone(settings: dict[str, Any], rows: Any, task: Any, device: Any) -> list[str]:
    """Titles that plain transformers writes for the first documents, one at a time, without padding, in fp32."""
    model = load_writer(settings).to(device).eval()
    titles = []
    for row in range(min(CHECKED_TITLES, len(rows))):
        batch = rows.collate(np.array([row])).to(device)
        real = int(batch.inputs["attention_mask"].sum())
        alone = {name: tensor[:, :real] for name, tensor in batch.inputs.items()}
        with torch.no_grad():
            titles += task.decode(model.generate(**alone, **search(settings)).tolist())
    return titles


def generate_with_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Seq2SeqTrainer.predict with predict_with_generate: the documents in their order, or (trainer_sorted) by length."""
    from datasets import Dataset, disable_progress_bars
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from chinese.decode import join_chinese

    disable_progress_bars()
    data = titlegen.load_data(predicting_arguments(settings), False, False, True)
    tokens, tokenizer = data.test.tokens, data.tokenizer
    order = np.arange(len(tokens))
    if settings["contender"].endswith("trainer_sorted"):
        order = np.argsort(-tokens.lengths, kind="stable")
    # Without labels the Trainer fails: it asks the model for a loss beside the title, and so does ours where there are titles.
    columns = {"input_ids": tokens, "labels": data.test.labels}
    rows = Dataset.from_dict({name: [column[i].tolist() for i in order] for name, column in columns.items()})
    cuda = torch.cuda.is_available()
    arguments = Seq2SeqTrainingArguments(
        output_dir=settings["folder"], per_device_eval_batch_size=settings["eval_batch_size"], predict_with_generate=True,
        bf16=settings["precision"] == "bf16", report_to="none", disable_tqdm=True, use_cpu=not cuda, dataloader_pin_memory=cuda,
    )  # fmt: skip
    collate = DataCollatorForSeq2Seq(tokenizer)
    trainer = Seq2SeqTrainer(load_writer(settings), arguments, data_collator=collate, processing_class=tokenizer)
    asked = search(settings)

    def predict() -> list[str]:
        ids = trainer.predict(rows, **asked).predictions
        found = tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
        titles = [""] * len(found)
        for place, title in zip(order, found, strict=True):
            titles[place] = join_chinese(title).strip()
        return titles

    trainer.predict(rows.select(range(1)), **asked)
    titles, figures = passes(settings, predict)
    return figures | {"titles": titles}


def predicting_arguments(settings: dict[str, Any]) -> Any:
    given = {
        "model_name_or_path": Path(settings["inputs"], "writer"), "test_file": Path(settings["inputs"], "documents.jsonl"),
        "max_length": settings["generate_length"], "do_predict": True,
        "per_device_eval_batch_size": settings["eval_batch_size"],
    }  # fmt: skip
    return parse(titlegen.Arguments, argv=arguments_of({**settings, "model": "writer"}, given))


def search(settings: dict[str, Any]) -> dict[str, Any]:
    """What `titles.task` asks of generate, start and end counted."""
    beams, longest = settings["beams"], settings["title_length"] + 2
    stop_early = {"early_stopping": True} if beams > 1 else {}  # a greedy search complains about it
    return {"do_sample": False, "num_beams": beams, "max_length": longest, **stop_early}


# Tokenization ----------------------------------------------------------------------------------------------------------


def tokenize(settings: dict[str, Any]) -> dict[str, Any]:
    """`--tokenizer_type jieba`, or BERT's tokenizer in Rust or in Python, over one vocabulary; each pass takes new texts."""
    folder = Path(settings["inputs"], "chinese")
    slices = json.loads((folder / "slices.json").read_text(encoding="utf-8"))
    encode = encoder_of(settings["contender"].partition("-")[2], folder)
    encode(slices[0][:2])
    numbers = itertools.count()
    tokens, characters = [], []

    def one() -> None:
        texts = slices[next(numbers) % len(slices)]
        tokens.append(sum(map(len, encode(texts))))
        characters.append(sum(map(len, texts)))

    _, figures = passes(settings, one)
    return figures | {"units": tokens, "characters": characters}


def encoder_of(name: str, folder: Path) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to ids. Nothing is cut."""
    from pretrained.tokenizer import saved_tokenizer, text_encoder

    longest = 10**9
    if name == "bert_python":
        from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

        tokenizer = BertTokenizerLegacy(str(folder / "vocab.txt"))
        return lambda texts: tokenizer(texts)["input_ids"]
    if name == "jieba":
        from chinese.words import jieba_tokenizer

        encode = text_encoder(jieba_tokenizer(folder), longest)
    else:
        encode = text_encoder(saved_tokenizer(folder), longest)
    return lambda texts: encode(texts)["input_ids"]


def passes(settings: dict[str, Any], work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Does the whole work again and again until it is stopped; returns what it gave last and the figures."""
    watch, found = TitleWatch(settings), None
    try:
        watch.mark()
        for _ in range(settings["max_steps"]):
            found = work()
            watch.mark()
    except Stopped:
        pass
    return found, watch.figures()


TRAINING = {"ours": train_ours, "trainer": train_with_trainer, "trainer_full": train_with_trainer}
GENERATION = {"ours": generate_ours, "trainer_sorted": generate_with_trainer, "trainer": generate_with_trainer}
TOKENIZATION = dict.fromkeys(("jieba", "bert_rust", "bert_python"), tokenize)


def contend(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs the contender that settings["contender"] names as part-name."""
    part, _, name = settings["contender"].partition("-")
    return {"train": TRAINING, "generate": GENERATION, "tokenize": TOKENIZATION}[part][name](settings)
