"""Contenders that generate titles for the same documents with the same model and beam search."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarking import application
from benchmarking.contenders.titles import options
from benchmarking.watch import Watch
from samerun.text.tokenizer import join_chinese

CHECKED_TITLES = 8  # documents for `titles_alone`


def write_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/titlegen.py --do_predict, measured while it predicts. A step is one pass over all documents."""
    return application.predict("titlegen", prediction_options(settings), partial(watch_prediction, settings))


def watch_prediction(
    settings: dict[str, Any], predict: Any, run: Any, model: Any, task: Any, rows: Any
) -> dict[str, Any]:
    watch = Watch(settings)
    predictions, _ = watch.repeat(predict, settings["max_steps"])
    titles = [line["title"] for line in task.lines(predictions, rows.split)]
    alone = titles_alone(settings, task.tokenizer, rows.split, model.device)
    return watch.measurements() | {"titles": titles, "alone": alone}


@torch.no_grad()
def titles_alone(settings: dict[str, Any], tokenizer: Any, split: Any, device: torch.device) -> list[str]:
    """Titles of the first documents by plain transformers, one at a time, without padding, in the run's
    precision."""
    half = torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
    model = load_writer(settings).to(device, half).eval()
    titles = []
    for row in range(min(CHECKED_TITLES, len(split))):
        inputs = split.collate(np.array([row])).to(device).inputs
        real = int(inputs["attention_mask"].sum())
        alone = {name: tensor[:, :real] for name, tensor in inputs.items()}
        titles += decode(tokenizer, model.generate(**alone, **search(settings)))
    return titles


def decode(tokenizer: Any, ids: Any) -> list[str]:
    return [join_chinese(text).strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def write_with_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Seq2SeqTrainer.predict with predict_with_generate: documents in the file's order, or by length
    (trainer_sorted)."""
    from benchmarking.contenders import trainer  # slow to import

    task, data = application.load("titlegen", prediction_options(settings) | application.PREDICTION)
    split, tokenizer, watch = data.splits["test"], task.tokenizer, Watch(settings)
    by_length = settings["contender"] == "trainer_sorted"
    order = np.argsort(-split.lengths, kind="stable") if by_length else np.arange(len(split))
    # The Trainer fails without labels, because it computes a loss too. Ours does so if there are titles.
    rows = {name: [column[i] for i in order] for name, column in application.token_columns(split).items()}
    arguments = trainer.arguments_of(
        settings, True, per_device_eval_batch_size=settings["eval_batch_size"], predict_with_generate=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    hf_trainer = trainer.make_trainer(load_writer(settings), arguments, rows, tokenizer)
    predict = partial(hf_trainer.predict, hf_trainer.train_dataset, **search(settings))
    ids = watch.repeat(predict, settings["max_steps"]).predictions
    titles = decode(tokenizer, np.where(ids < 0, tokenizer.pad_token_id, ids))
    return watch.measurements() | {"titles": [titles[row] for row in np.argsort(order)]}


def prediction_options(settings: dict[str, Any]) -> application.Options:
    inputs = Path(settings["inputs"])
    return options(settings, new=False) | {
        "model_name_or_path": inputs / "writer", "test_file": inputs / "documents.jsonl",
        "max_length": settings["generate_length"], "per_device_eval_batch_size": settings["eval_batch_size"],
    }  # fmt: skip


def load_writer(settings: dict[str, Any]) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(Path(settings["inputs"], "writer"))


def search(settings: dict[str, Any]) -> dict[str, Any]:
    """The application's arguments of `generate`."""
    beams, longest = settings["beams"], settings["title_length"] + 2  # start and end tokens
    stop_early = {"early_stopping": True} if beams > 1 else {}  # `generate` warns about it without beams
    return {"do_sample": False, "num_beams": beams, "max_length": longest, **stop_early}


CONTENDERS = {"ours": write_ours, "trainer_sorted": write_with_trainer, "trainer": write_with_trainer}
