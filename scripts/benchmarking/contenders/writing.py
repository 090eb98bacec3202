"""Ways of writing titles for the same documents with the same model, by the same beam search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import titlegen
import torch

from benchmarking.contenders.passes import passes
from benchmarking.contenders.title_models import arguments_of, load_writer
from benchmarking.watch import Done
from finetune.arguments.parsing import parse

CHECKED_TITLES = 8  # documents that plain transformers gives a title one at a time


def generate_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/titlegen.py --do_predict, watched where it predicts; each pass goes over all documents."""
    from finetune.training import evaluation

    predict, answer = evaluation.predict, {}

    def watched_predict(run: Any, model: Any, task: Any, rows: Any) -> None:
        with torch.no_grad():  # a small batch first: what is made on first use belongs to no pass
            model.eval()
            task.predict(model, rows.collate(np.arange(1)).to(run.device))
        titles, figures = passes(settings, lambda: [r["titles"][0] for r in predict(run, model, task, rows)[0]])
        answer.update(figures, titles=titles, alone=titles_alone(settings, rows, task, run.device))
        raise Done

    evaluation.predict = watched_predict
    try:
        titlegen.main(predicting_arguments(settings))
    except Done:
        return answer
    raise RuntimeError("app/titlegen.py did not predict")


def titles_alone(settings: dict[str, Any], rows: Any, task: Any, device: Any) -> list[str]:
    """Titles that plain transformers writes for the first documents, one at a time, without padding, in the run's precision."""
    half = torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
    model = load_writer(settings).to(device, half).eval()
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

    from text.chinese_decoding import join_chinese

    disable_progress_bars()
    data = titlegen.load_data(predicting_arguments(settings), False, False, True)
    tokens, tokenizer = data.test.tokens, data.tokenizer
    order = np.arange(len(tokens))
    if settings["contender"] == "trainer_sorted":
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
    return parse(titlegen.Arguments, argv=arguments_of(settings, given))


def search(settings: dict[str, Any]) -> dict[str, Any]:
    """What `models.titles` asks of generate, start and end counted."""
    beams, longest = settings["beams"], settings["title_length"] + 2
    stop_early = {"early_stopping": True} if beams > 1 else {}  # a greedy search complains about it
    return {"do_sample": False, "num_beams": beams, "max_length": longest, **stop_early}


CONTENDERS = {"ours": generate_ours, "trainer_sorted": generate_with_trainer, "trainer": generate_with_trainer}
