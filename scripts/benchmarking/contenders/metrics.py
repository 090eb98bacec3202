"""All metrics of an evaluation, against rows and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarking import application
from benchmarking.contenders.timing import summary, timed


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    found = []
    drawn = np.random.default_rng(settings["seed"])
    for rows, labels in settings["score_sizes"]:
        logits = drawn.normal(size=(rows, labels)).astype(np.float32)
        targets = (drawn.random((rows, labels)) < 0.02).astype(np.uint8)
        work = application.multilabel_metrics(logits, targets)
        samples = [timed(work, torch.device("cpu")) for _ in range(settings["repeats"])]
        found.append({"rows x labels": f"{rows} x {labels}"} | summary(samples))
    return {"measured": found}


CONTENDERS = {"ours": measure}
