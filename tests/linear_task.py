"""The smallest task, for tests of the engine: least squares with a linear layer."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from samerun import start
from samerun.data.batches import EvalBatches, TrainBatches
from samerun.plan import BatchShape, Plan
from samerun.task import Batch, Data, Split, Task

FINGERPRINT = {"task": "linear", "rows": 22}


class LinearTask(Task):
    name, default_metric = "linear", "loss"

    def __init__(self, arguments=None, best_metric=None):
        own = SimpleNamespace(metric_for_best_model=best_metric, metrics=None, greater_is_better=None)
        super().__init__(arguments or own)

    def load(self, launch, modes):
        split = split_of(*points(22), np.arange(22) % 7 + 1)
        return Data({"train": split, "validation": split}, FINGERPRINT)

    def build(self):
        return linear_layer()

    def num_targets(self, batch):
        return batch.is_real.sum() * batch.labels.shape[1]

    def loss_sum(self, model, batch):
        return ((model(batch.inputs["x"]) - batch.labels).square() * batch.is_real[:, None]).sum()

    def predict(self, model, batch):
        return {"error": (model(batch.inputs["x"]) - batch.labels).square().mean(1)}

    def score(self, predictions, split):
        return {"loss": float(np.mean(predictions["error"].tolist()))}

    def export(self, path, model, weights, best):
        return {}

    def load_exported(self, path):
        return linear_layer()

    def lines(self, predictions, split):
        return [{"error": error} for error in predictions["error"].tolist()]


def points(rows=22, seed=0):
    """(rows, 3) inputs and (rows, 2) targets."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


def collator(x, y):
    return lambda rows: Batch(torch.as_tensor(rows, dtype=torch.int64), {"x": x[rows]}, y[rows])


def split_of(x, y, lengths=None):
    return Split("points", collator(x, y), len(x), lengths=lengths)


def linear_layer():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def make_plan(rows, epochs=2, global_batch_size=8, accumulation=2, **changes):
    batch = BatchShape(global_batch_size, 1, -(-global_batch_size // accumulation), accumulation)
    per_epoch = -(-rows // global_batch_size)
    fields = {
        "warmup_steps": 1, "learning_rate": 0.05, "lr_scheduler_type": "linear", "eval_steps": None,
        "save_steps": None,
        "logging_steps": 1, **changes,
    }  # fmt: skip
    return Plan(batch, rows, per_epoch, per_epoch * epochs, **fields)


def opener(start_run, arguments, folder):
    """A function that opens a run in `folder`, as a new process would."""
    run = start_run(make_plan(22).batch)

    def open_run(fingerprint=FINGERPRINT, epochs=2, chosen=None, save_steps=3, unlock=True, **given):
        plan = replace(make_plan(22, epochs=epochs, save_steps=save_steps), chosen_epochs=chosen)
        try:
            return start.open_run(run, arguments(output_dir=str(folder), **given), plan, fingerprint, [], {})
        finally:
            if unlock:
                start.unlock()

    return open_run


def train_steps(x, y, plan, seed=1):
    return TrainBatches(split_of(x, y, np.arange(len(x)) % 7 + 1), plan, 0, seed, True)


def eval_rows(x, y, batch_size=4):
    return EvalBatches(split_of(x, y, np.arange(len(x)) % 5 + 1), batch_size)
