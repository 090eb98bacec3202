"""A task without tokens: regression on generated vectors, or on 8x8 images with --model cnn, a CNN with batch
norm.

    python tests/vector_task.py --do_train --do_predict --output_dir runs/vectors [--model cnn]

Shows that the engine does not depend on the kind of data. Runs under every launcher.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app"))

from samerun.arguments import BatchArguments, LaunchArguments, OptimizationArguments, RunArguments
from samerun.cli import read_arguments
from samerun.files import replace_folder
from samerun.parsing import option


@dataclass(frozen=True, kw_only=True)
class Arguments(LaunchArguments, RunArguments, OptimizationArguments, BatchArguments):
    """Vectors"""

    model: str = option(
        "linear", choices=("linear", "cnn"), help="linear, or a CNN with batch norm on 8x8 images"
    )
    model_name_or_path: str | None = option(reads=True, help="folder of an exported model, to predict with")
    num_rows: int = option(31, at_least=1, help="generated training rows")
    streamed: bool = option(False, help="other training rows in each epoch")
    out_of_memory: tuple[int, ...] = option(
        (),
        help="losses of rank 1, counted from 1, for which there is no memory: the first's backward pass, "
        "the others' forward",
    )


if __name__ == "__main__":
    arguments = read_arguments(Arguments, __doc__)

import json
import os
from functools import partial

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from samerun.data.stream import Stream
from samerun.main import run
from samerun.task import Batch, Data, Split, Task

FEATURES, TARGETS, ROWS = 64, 3, {"validation": 15, "test": 23}
# The arguments of a short training, for tests.
JOB = {
    "learning_rate": 1e-2, "max_steps": 6, "global_batch_size": 15, "eval_strategy": "steps", "eval_steps": 3,
    "save_steps": 2, "logging_steps": 1, "report_to": "none",
}  # fmt: skip


def build_model(kind: str) -> nn.Module:
    if kind == "linear":
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Linear(16, TARGETS))
    convolution = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU()
    )
    convolution.unused = nn.Parameter(torch.ones(3))  # which DDP would wait for
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(36, TARGETS))


def run_out_of_memory(_gradient: torch.Tensor | None = None) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def collate(x: torch.Tensor, y: torch.Tensor, rows: np.ndarray) -> Batch:
    return Batch(torch.as_tensor(rows, dtype=torch.int64), {"x": x[rows]}, y[rows])


def generate(name: str, num_rows: int, seed: int) -> Split:
    """Random rows with targets that are functions of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_rows, FEATURES, generator=generator)
    y = torch.stack([x[:, :32].mean(1), x[:, 32:].mean(1), x.amax(1)], 1)
    return Split(path=name, collate=partial(collate, x, y), num_rows=num_rows)


class Rows(Stream):
    """Training rows that differ in each epoch."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(0)
        self.num_rows = num_rows

    def read(self, epoch: int, start: int) -> tuple[Split, int]:
        return generate("train", self.num_rows, seed=3 + start), start + 1


class Regression(Task):
    """Every number of every row is one target."""

    name = "vectors"
    default_metric = "loss"
    losses = 0

    def load(self, launch, modes):
        wanted = dict(zip(("train", "validation", "test"), modes, strict=True))
        sizes = {"train": self.arguments.num_rows, **ROWS}
        splits = {
            name: generate(name, sizes[name], seed)
            for seed, (name, needed) in enumerate(wanted.items())
            if needed
        }
        if "train" in splits and self.arguments.streamed:
            splits["train"] = replace(splits["train"], stream=Rows(self.arguments.num_rows))
        return Data(
            splits, {"task": self.name, "model": self.arguments.model, "rows": self.arguments.num_rows}
        )

    def build(self):
        return build_model(self.arguments.model)

    def num_targets(self, batch):
        return batch.is_real.sum() * TARGETS

    def loss_sum(self, model, batch):
        outputs = model(batch.inputs["x"]).float()
        self.losses += model.training and os.environ.get("RANK") == "1"
        if self.losses in self.arguments.out_of_memory[1:]:
            run_out_of_memory()
        if self.losses in self.arguments.out_of_memory[:1]:
            outputs.register_hook(run_out_of_memory)
        return ((outputs - batch.labels).square() * batch.is_real[:, None]).sum()

    def predict(self, model, batch):
        statistics = [buffer.float().sum() for buffer in model.buffers()]  # of batch norm, in this process
        seen = torch.stack(statistics).sum() if statistics else torch.zeros((), device=batch.rows.device)
        outputs = model(batch.inputs["x"]).float()
        return {
            "outputs": outputs,
            "labels": batch.labels,
            "statistics": seen.expand(len(batch.rows)).clone(),
        }

    def score(self, predictions, split):
        loss = float(np.square(predictions["outputs"] - predictions["labels"]).mean())
        seen = predictions["statistics"]
        return {"loss": loss, "statistics": float(seen[0]), "spread": float(np.ptp(seen))}

    def export(self, path, model, weights, best):
        def fill(place: Path) -> None:
            save_file(weights, place / "model.safetensors")
            (place / "config.json").write_text(json.dumps({"model": self.arguments.model}))
            self.load_exported(place)

        replace_folder(path, fill)
        return {}

    def load_exported(self, path):
        model = build_model(json.loads((Path(path) / "config.json").read_text())["model"])
        model.load_state_dict(load_file(Path(path) / "model.safetensors"))
        return model

    def lines(self, predictions, split):
        return ({"outputs": outputs.tolist()} for outputs in predictions["outputs"])


if __name__ == "__main__":
    run(Regression, arguments)
