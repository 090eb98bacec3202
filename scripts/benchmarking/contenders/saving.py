"""How long a step is held by a checkpoint of model and optimizer."""

from __future__ import annotations

import statistics
import time
from typing import Any

import classify

from benchmarking.contenders import classification
from benchmarking.contenders.classification_rows import labelled_rows


def ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/classify.py with --save_steps. What a save holds the step for; the writing goes on beside the next steps."""
    from benchmarking.watch import Done
    from finetune.arguments.parsing import parse
    from finetune.training import loop

    stalls: list[float] = []
    save, fit = loop._save, loop.fit

    def watched_save(*args: Any) -> None:
        started = time.perf_counter()
        save(*args)
        stalls.append(time.perf_counter() - started)

    def watched_fit(*args: Any) -> None:
        started = time.perf_counter()
        fit(*args)
        stalls.append(time.perf_counter() - started)
        raise Done

    loop._save, loop.fit = watched_save, watched_fit
    argv = classification.our_arguments(settings | {"contender": "ours"})
    argv += ["--max_steps", str(settings["steps"])]
    argv[argv.index("--save_steps") + 1] = str(settings["save_every"])
    try:
        classify.main(parse(classify.Arguments, argv=argv))
    except Done:
        *holds, seconds = stalls
        return {"holds": holds, "train_seconds": seconds, "mb": _size(settings)}
    raise RuntimeError("app/classify.py did not train")


def trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Trainer with save_strategy steps, from the end of a step to the end of its save."""
    from datasets import Dataset
    from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

    texts, targets, _, _ = labelled_rows(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    ids = tokenizer(texts, truncation=True, max_length=settings["max_length"])["input_ids"]
    holds: list[float] = []
    began = [0.0]

    class Marks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            began[0] = time.perf_counter()

        def on_save(self, *args: Any, **kwargs: Any) -> None:
            holds.append(time.perf_counter() - began[0])

    import torch

    cuda = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=settings["folder"], per_device_train_batch_size=settings["batch_size"], max_steps=settings["steps"],
        save_strategy="steps", save_steps=settings["save_every"], save_total_limit=2, report_to="none", disable_tqdm=True,
        use_cpu=not cuda, bf16=settings["precision"] == "bf16",
    )  # fmt: skip
    model = classification.load_model(settings, len(targets[0]))
    trainer = Trainer(
        model, arguments, data_collator=DataCollatorWithPadding(tokenizer), callbacks=[Marks()],
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": targets}),
    )  # fmt: skip
    started = time.perf_counter()
    trainer.train()
    return {"holds": holds, "train_seconds": time.perf_counter() - started, "mb": _size(settings)}


def _size(settings: dict[str, Any]) -> float:
    """MiB of the newest checkpoint."""
    from pathlib import Path

    folders = [
        path for path in Path(settings["folder"]).rglob("*") if path.is_dir() and path.name.startswith(("step_", "checkpoint-"))
    ]
    return statistics.median(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) for folder in folders) / 2**20


CONTENDERS = {"ours": ours, "trainer": trainer}
