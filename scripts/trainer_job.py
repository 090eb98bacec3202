"""A classifier's training by transformers' Trainer, for scripts/moving_plot.py. It can stop after a step and
go on from its checkpoint, with another number of processes.

    trainer_job.py MODEL TRAIN_FILE OUTPUT_DIR STEPS STOP_AFTER

Configuration and tokenizer are MODEL's, the weights random. The batch is 32 rows of all processes together,
as Trainer's users keep it: 32 / processes per device. Rows are grouped by length. Writes the losses, a line
per step, to OUTPUT_DIR/history.jsonl."""

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

BATCH, MAX_LENGTH, LEARNING_RATE, SEED = 32, 96, 3e-3, 42


class StopAndRecord(TrainerCallback):
    """Saves and stops after a step; writes each loss down."""

    def __init__(self, stop_after: int, path: Path) -> None:
        self.stop_after, self.path = stop_after, path

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.stop_after:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "loss": logs["loss"]}) + "\n")


def read_rows(path: str, labels: list[str], tokenizer: Any) -> Dataset:
    """The rows of a file of texts and labels: token ids and one number per label."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=MAX_LENGTH)["input_ids"]
    targets = [[float(label in row["labels"].split("|")) for label in labels] for row in rows]
    return Dataset.from_dict({"input_ids": ids, "labels": targets, "length": [len(row) for row in ids]})


def main() -> None:
    model_folder, train_file, output_dir, steps, stop_after = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    config = AutoConfig.from_pretrained(model_folder)  # with the labels and the kind of problem
    set_seed(SEED)
    model = AutoModelForSequenceClassification.from_config(config)
    arguments = TrainingArguments(
        output_dir=output_dir,
        max_steps=int(steps),
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=LEARNING_RATE,
        weight_decay=0.01,
        warmup_steps=int(steps) // 10,
        train_sampling_strategy="group_by_length",
        # Otherwise transformers 5.23 doubles this model's loss on two processes, as the model takes no count.
        average_tokens_across_devices=False,
        seed=SEED,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = read_rows(train_file, list(config.label2id), tokenizer)
    recorder = StopAndRecord(int(stop_after), Path(output_dir) / "history.jsonl")
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[recorder])
    trainer.train(resume_from_checkpoint=any(Path(output_dir).glob("checkpoint-*")) or None)


main()
