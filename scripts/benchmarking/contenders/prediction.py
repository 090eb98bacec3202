"""Contenders that predict the same texts with the same classifier."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarking.contenders.classification import load_model
from benchmarking.data import read_rows
from benchmarking.watch import Watch

WARM_UP_TEXTS = 8
Predict = Callable[[list[str]], Any]


def make_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Saves the model settings["model"] with a head for settings["labels"] labels in settings["classifier"],
    whose random weights are large enough that probabilities differ."""
    from transformers import AutoTokenizer

    model = load_model(settings, settings["labels"])
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(settings["classifier"])
    AutoTokenizer.from_pretrained(settings["model"]).save_pretrained(settings["classifier"])
    return {}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Predicts settings["rows"] texts in one turn, tokenization included. The result has the probabilities by
    label, if the contender gives them."""
    texts = [row["text"] for row in read_rows(settings["train_file"], settings["rows"])]
    watch = Watch(settings | {"steps_per_turn": 1})
    predict = PREDICTORS[settings["contender"]](settings)
    predict(texts[:WARM_UP_TEXTS])
    watch.mark()
    answer = predict(texts)
    watch.mark()
    return watch.measurements() | {"probabilities": answer if isinstance(answer, list) else None}


def ours(settings: dict[str, Any]) -> Predict:
    """What `samerun.load` and predict.py --text use. The choice is arguments of the task."""
    from samerun.serving.predictor import load_predictor
    from samerun.task_scripts import as_words

    options = {"max_length": settings["max_length"], "mixed_precision": settings["precision"]}
    argv = as_words(options | settings["choice"])
    predictor = load_predictor("classify", settings["classifier"], argv)
    return lambda texts: [line["probabilities"] for line in predictor(texts)]


def of_pipeline(settings: dict[str, Any]) -> Predict:
    """transformers' pipeline. Texts in their order, or sorted by length by its user."""
    from transformers import pipeline

    cut = {"truncation": True, "max_length": settings["max_length"]}
    classify = pipeline("text-classification", model=settings["classifier"], top_k=None, **cut)
    batch_size, by_length = settings["choice"]["batch_size"], settings["choice"]["sorted"]

    def predict(texts: list[str]) -> list[dict[str, float]]:
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]) if by_length else row)
        scores = classify([texts[row] for row in order], batch_size=batch_size)
        answer: list[dict[str, float]] = [{}] * len(texts)
        for row, each in zip(order, scores, strict=True):
            answer[row] = {one["label"]: one["score"] for one in each}
        return answer

    return predict


def of_sentence_transformers(settings: dict[str, Any]) -> Predict:
    """sentence-transformers' `encode`, which sorts by length: embeddings by the same encoder, without the
    head."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(settings["classifier"])
    model.max_seq_length = settings["max_length"]
    return partial(model.encode, batch_size=settings["choice"]["batch_size"])


PREDICTORS = {"ours": ours, "pipeline": of_pipeline, "sentence_transformers": of_sentence_transformers}
CONTENDERS = dict.fromkeys(PREDICTORS, measure) | {"model": make_model}
