"""From the launch of a command to the end of its first step, over a large file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarking.contenders import classification
from benchmarking.watch import Stopped, Watch


def write(settings: dict[str, Any]) -> dict[str, Any]:
    """The file."""
    from benchmarking.contenders.growth import write_rows

    path = Path(settings["train_file"])
    write_rows(path, settings["rows"], np.random.default_rng(settings["seed"]))
    return {"mb": path.stat().st_size / 2**20}


def ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/classify.py until its first step is done."""
    import classify

    from benchmarking.watch import Done, Watched
    from finetune.arguments.parsing import parse
    from finetune.training import loop

    watch, fit = Watch(settings), loop.fit

    def watched_fit(run: Any, plan: Any, training: Any, options: Any, state: Any) -> None:
        training.steps = Watched(training.steps, watch)
        fit(run, plan, training, options, state)
        watch.mark()
        raise Done

    loop.fit = watched_fit
    argv = [*classification.our_arguments(settings | {"contender": "ours"}), "--max_steps", "1"]
    with suppress(Done):
        classify.main(parse(classify.Arguments, argv=argv))
    return watch.figures()


def trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Trainer until its first step is done, over tokens that `datasets` makes and keeps."""
    import torch
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

    disable_progress_bars()
    watch = Watch(settings)
    names = [f"label {number}" for number in range(20)]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    longest = settings["max_length"]

    def encode(rows: dict[str, list]) -> dict[str, list]:
        ids = tokenizer(rows["text"], truncation=True, max_length=longest)["input_ids"]
        return {"input_ids": ids, "labels": [[float(name in found) for name in names] for found in rows["labels"]]}

    rows = load_dataset("json", data_files=settings["train_file"], split="train")
    rows = rows.map(encode, batched=True, remove_columns=["text", "labels"])

    class Marks(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.mark()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.mark()

    arguments = TrainingArguments(
        output_dir=settings["folder"], per_device_train_batch_size=settings["batch_size"], max_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), bf16=settings["precision"] == "bf16",
    )  # fmt: skip
    model = classification.load_model(settings, len(names))
    marked = Trainer(
        model, arguments, data_collator=DataCollatorWithPadding(tokenizer), train_dataset=rows, callbacks=[Marks()]
    )
    with suppress(Stopped):
        marked.train()
    return watch.figures()


CONTENDERS = {"write": write, "ours": ours, "trainer": trainer}
