"""Ways of writing titles for the same documents with the same model, by the same beam search."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarking import application
from benchmarking.contenders.titles import options
from benchmarking.watch import Watch
from finetune.text.chinese import join_chinese

CHECKED_TITLES = 8  # documents that plain transformers gives a title one at a time


def write_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/titlegen.py --do_predict, watched where it predicts; each pass goes over all documents."""
    return application.predict("titlegen", prediction_options(settings), partial(watch_prediction, settings))


def watch_prediction(settings: dict[str, Any], predict: Any, run: Any, model: Any, task: Any, rows: Any) -> dict[str, Any]:
    watch = Watch(settings)
    predictions, _ = watch.repeat(predict, settings["max_steps"])
    titles = [line["title"] for line in task.prediction_lines(predictions, rows.split)]
    alone = titles_alone(settings, task.tokenizer, rows.split, model.device)
    return watch.measurements() | {"titles": titles, "alone": alone}


@torch.no_grad()
def titles_alone(settings: dict[str, Any], tokenizer: Any, split: Any, device: torch.device) -> list[str]:
    """Titles that plain transformers writes for the first documents, one at a time, without padding, in the run's precision."""
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
    """Seq2SeqTrainer.predict with predict_with_generate: the documents in their order, or (trainer_sorted) by length."""
    from benchmarking.contenders import trainer  # ours must not wait for it

    task, data = application.load("titlegen", prediction_options(settings) | application.PREDICTION)
    split, tokenizer, watch = data.splits["test"], task.tokenizer, Watch(settings)
    by_length = settings["contender"] == "trainer_sorted"
    order = np.argsort(-split.lengths, kind="stable") if by_length else np.arange(len(split))
    # Without labels the Trainer fails: it asks for a loss beside the title, and so does ours where there are titles.
    rows = {name: [column[i] for i in order] for name, column in application.token_columns(split).items()}
    given = {"per_device_eval_batch_size": settings["eval_batch_size"], "predict_with_generate": True}
    arguments = trainer.arguments_of(settings, True, **given, dataloader_pin_memory=torch.cuda.is_available())
    made = trainer.make_trainer(load_writer(settings), arguments, rows, tokenizer)
    ids = watch.repeat(partial(made.predict, made.train_dataset, **search(settings)), settings["max_steps"]).predictions
    titles = decode(tokenizer, np.where(ids < 0, tokenizer.pad_token_id, ids))
    return watch.measurements() | {"titles": [titles[place] for place in np.argsort(order)]}


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
    """What the application asks of generate, start and end counted."""
    beams, longest = settings["beams"], settings["title_length"] + 2
    stop_early = {"early_stopping": True} if beams > 1 else {}  # a greedy search complains about it
    return {"do_sample": False, "num_beams": beams, "max_length": longest, **stop_early}


CONTENDERS = {"ours": write_ours, "trainer_sorted": write_with_trainer, "trainer": write_with_trainer}
