"""The engine does not depend on the kind of data: a task without tokens has everything that the text tasks
have.

With batch norm a process sees the statistics of its own micro-batch, so the loss depends on the number of
processes and on accumulation, as everywhere without synchronized batch norm. Equal on all processes are the
weights and, whenever a model is evaluated or saved, the running statistics, which are rank 0's.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import launchers
import numpy as np
import pytest
import torch
import vector_task
from launchers import as_words, run, torchrun
from run_folders import read_json
from safetensors.torch import load_file
from torch import nn
from vector_task import Arguments, Regression

from samerun.errors import InputError
from samerun.evaluate import input_dtype
from samerun.files import read_lines
from samerun.layers import checkpoint_activations
from samerun.plan import Modes

SCRIPT = vector_task.__file__
JOB = vector_task.JOB | {
    "optim_args": "eps=1e-6", "max_grad_norm": 0.05, "warmup_steps": 2, "save_steps": 3,
    "per_device_eval_batch_size": 2,  # both processes have rows of the validation file
    "do_train": True, "do_predict": True,
}  # fmt: skip


def job(output_dir: Path, *more: str) -> list[str]:
    return [*as_words(**JOB, output_dir=output_dir), *more]


def make_task(model="linear"):
    """(the task, its training rows as one batch, its model)."""
    task = Regression(Arguments(output_dir="run", model=model))
    data = task.load(None, Modes(True, False, False))
    torch.manual_seed(0)
    return task, data.splits["train"].collate(np.arange(7)), task.build()


# Without a launch


def test_activations_are_computed_again_and_gradients_stay_the_same(monkeypatch):
    task, batch, model = make_task()
    calls, linear = [], nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *arguments: calls.append(1) or linear(*arguments))
    task.loss_sum(model, batch).backward()
    expected, plain = [parameter.grad.clone() for parameter in model.parameters()], len(calls)
    model.zero_grad()
    checkpoint_activations(model)
    task.loss_sum(model, batch).backward()
    for weight, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(weight.grad, gradient)
    assert (plain, len(calls)) == (2, 2 + 4)


def test_layers_with_batch_norm_are_not_computed_again():
    task, batch, model = make_task("cnn")
    checkpoint_activations(model)
    task.loss_sum(model, batch).backward()
    assert int(model[0][2].num_batches_tracked) == 1


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2))])
def test_a_model_without_layers_to_compute_again(model):
    said = f"{type(model).__name__} has no layers in an nn.ModuleList or nn.Sequential without"
    with pytest.raises(InputError, match=said):
        checkpoint_activations(model)


def test_inputs_take_the_precision_of_the_weights_and_labels_keep_theirs():
    """ZeRO keeps weights in half precision and casts nothing."""
    task, batch, model = make_task("cnn")
    cast = batch.to(torch.device("cpu"), input_dtype(SimpleNamespace(fsdp=None), model.bfloat16()))
    kinds = (cast.inputs["x"].dtype, cast.labels.dtype, cast.rows.dtype)
    assert kinds == (torch.bfloat16, torch.float32, torch.int64)
    loss = task.loss_sum(model, cast)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(task.loss_sum(model.float(), batch).item(), rel=0.02)


# Launched


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("any_task")
    launchers.hide_gpus(folder)
    return folder


@pytest.fixture
def train(script) -> Callable[..., str]:
    """A function that trains in this process: (output folder, more arguments) -> what the run said."""

    def start(output_dir: Path, *more: str) -> str:
        ended = script("vector_task", job(output_dir, *more)).check()
        return ended.out

    return start


@pytest.fixture
def one_process(place, train) -> Path:
    """A run of the CNN in one process, made once."""
    if not (place / "one").exists():
        train(place / "one", "--model", "cnn")
    return place / "one"


def test_the_exported_model_gives_the_predictions(one_process):
    names = {path.name for path in one_process.iterdir()}
    assert {"run.json", "history.jsonl", "metrics.json", "README.md", "best"} <= names
    model = vector_task.build_model("cnn").eval()
    model.load_state_dict(load_file(one_process / "best" / "model.safetensors"))
    rows = vector_task.generate("test", vector_task.ROWS["test"], seed=2)
    with torch.no_grad():
        expected = model(rows.collate(np.arange(len(rows))).inputs["x"])
    lines = list(read_lines(one_process / "predictions.jsonl"))
    assert [line["id"] for line in lines] == list(range(len(rows)))
    assert torch.tensor([line["outputs"] for line in lines]).sub(expected).abs().max() < 1e-6
    metrics = read_json(one_process / "metrics.json")
    assert metrics["test_loss"] == pytest.approx(metrics["eval_loss"], rel=0.5)
    assert "train_tokens_per_second" not in metrics


@pytest.mark.slow
def test_the_statistics_of_batch_norm_are_rank_0s_on_every_process(one_process, place):
    folder = place / "two"
    run([*torchrun(2), SCRIPT, *job(folder, "--model", "cnn")], place).check()
    evaluations = [event for event in read_lines(folder / "history.jsonl") if "eval_loss" in event]
    # Over the rows, which both processes evaluated.
    assert [event["eval_spread"] for event in evaluations] == [0, 0]
    saved = load_file(folder / "checkpoints" / "step_6" / "model.safetensors")
    statistics = [saved[name] for name in saved if "running" in name or "tracked" in name]
    of_rank_0 = sum(float(tensor.float().sum()) for tensor in statistics)
    assert evaluations[-1]["eval_statistics"] == pytest.approx(of_rank_0, rel=1e-6)
    # Another sample than one process sees, and much the same training.
    alone = [event for event in read_lines(one_process / "history.jsonl") if "eval_loss" in event]
    assert evaluations[-1]["eval_statistics"] != pytest.approx(alone[-1]["eval_statistics"], rel=1e-6)
    assert evaluations[-1]["eval_loss"] == pytest.approx(alone[-1]["eval_loss"], rel=0.5)


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_cuts_its_micro_batches_and_all_follow(place, train):
    """Rank 1 has no memory for the trial before the first step, backward, nor for the next one, forward."""
    train(place / "roomy")
    folder, asked = place / "full", ["--per_device_train_batch_size", "4", "--out_of_memory", "1,2"]
    said = run([*torchrun(2), SCRIPT, *job(folder, *asked)], place).check().out
    assert [line[15:] for line in said.splitlines() if "out of memory" in line] == [
        "out of memory: micro-batches have at most 1 rows; the global batch does not change"
    ]
    assert read_json(folder / "status.json")["micro_batch_parts"] == 4
    expected, found = (load_file(path / "best" / "model.safetensors") for path in (place / "roomy", folder))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
