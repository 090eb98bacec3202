"""`samerun parity` as a user runs it: what it prints, leaves behind and returns."""

from __future__ import annotations

import json
import signal
import sys
from collections import OrderedDict
from types import SimpleNamespace

import launchers
import psutil
import pytest
import title_job
import torch
from launchers import CLASSIFY, training
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from samerun import task_scripts
from samerun.kernels.dropout import dropout_by_row
from samerun.task_scripts import run_tool
from samerun.tools import parity
from samerun.tools.moving import recorder, setups
from samerun.tools.moving.observer import read_steps

TITLES = [
    "setup",
    "launcher",
    "processes",
    "weights",
    "losses",
    "grad norms",
    "predictions",
    "metrics",
    "rates",
    "rows",
]


def columns(line, title_line):
    """The setups of a line of the table, which stand under the beginnings of their titles."""
    starts = [title_line.index(title) for title in TITLES]
    ends = [*starts[1:], None]
    return [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def test_a_signal_ends_the_observed_run_too(tmp_path):
    kills_us = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    before = psutil.Process().children()
    with pytest.raises(SystemExit) as ended:
        setups.run_observed([sys.executable, "-c", kills_us], CLASSIFY, [], tmp_path, "run", timeout=600)
    assert ended.value.code == 128 + signal.SIGTERM
    assert psutil.Process().children() == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_setup_leaves_the_mirror_and_the_hub_alone(tmp_path, monkeypatch):
    job = training(tmp_path / "a", mirror_to="file:///mine", push_to_hub="true", hub_model_id="me/mine")
    options, ran = parity.read_options(["--output_dir", str(tmp_path), *job]), []
    monkeypatch.setattr(parity, "run_observed", lambda *given, **_: ran.append(given))
    arguments, _ = task_scripts.read_command(options.script, options.arguments)
    assert parity.run_setup(options, parity.REFERENCE, 1, arguments) is None
    found, _ = task_scripts.read_command(*ran[0][1:3])
    assert (found.mirror_to, found.push_to_hub, found.hub_model_id) == (None, False, None)


@pytest.mark.slow
def test_a_job_that_is_the_same_everywhere(title_tokens):
    finished = title_tokens.finished
    assert finished.code == 0, finished.out + finished.err
    told, _, rest = finished.out.partition("\n\n")
    assert [line.split(maxsplit=1) for line in told.splitlines()] == [
        ["one", "reference"],
        ["zero2", "the same"],
        ["fsdp", "the same"],
    ]

    title_line, *lines = rest.splitlines()
    table = [columns(line, title_line) for line in lines[:3]]
    assert [row[:3] for row in table] == [
        ["one", "python", "1"],
        ["zero2", "deepspeed", "2"],
        ["fsdp", "accelerate", "2"],
    ]
    assert table[0][3:9] == ["-"] * 6
    assert lines[0].endswith("reference")
    report = json.loads((title_tokens.folder / "parity.json").read_text(encoding="utf-8"))
    for row, line, setup in zip(table[1:], lines[1:3], report["setups"][1:], strict=True):
        known = setup["difference"]
        numbers = ("weights", "losses", "grad_norms", "predictions", "metrics")
        assert row[3:8] == [f"{known[name]:.1e}" for name in numbers]
        assert 0 < known["weights"] <= title_job.WEIGHTS_TOLERANCE
        assert row[8] == "same"
        assert line.endswith("same  the same")
    assert "whose gradient is rounding alone" in lines[3]
    assert lines[-1] == "written to tokens/parity.json"


@pytest.mark.slow
def test_what_it_leaves(title_tokens):
    report = json.loads((title_tokens.folder / "parity.json").read_text(encoding="utf-8"))
    assert report["command"][0] == str(title_job.SCRIPT)
    assert (report["steps"], report["gpus"]) == (title_job.STEPS, 0)
    assert [(setup["name"], setup["passed"]) for setup in report["setups"]] == [
        ("one", True),
        ("zero2", True),
        ("fsdp", True),
    ]
    for name in ("one", "zero2", "fsdp"):
        lines = (title_tokens.folder / f"{name}.log").read_text(encoding="utf-8").splitlines()
        assert any(line.startswith("launcher       ") for line in lines)
        run = json.loads((title_tokens.folder / name / "run.json").read_text(encoding="utf-8"))
        assert (run["plan"]["total_steps"], run["arguments"]["report_to"]) == (title_job.STEPS, ["none"])
    assert not title_tokens.never.exists()


@pytest.mark.slow
def test_a_command_that_fails_has_nothing_to_compare(tmp_path, monkeypatch, capsys, forked_python):
    monkeypatch.chdir(tmp_path)
    launchers.write_corpus(tmp_path)
    job = training(tmp_path / "never", train_file="nothing.csv", test_file=None)
    assert run_tool(parity.main, ["--setups", "ddp", *job]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: the command fails in one process, so there is nothing to compare with: error: "
    )
    assert "nothing.csv" in error
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ["--setups", "ddp,dpp", str(CLASSIFY), "--output_dir", "x"],
            "error: --setups dpp: no such setup; choose from one, ",
        ),
        (
            [str(CLASSIFY), "--lerning_rate", "1"],
            "error: unknown argument --lerning_rate; did you mean --learning_rate?",
        ),
    ],
)
def test_bad_input_is_told_before_anything_is_run(given, told, capsys, monkeypatch):
    monkeypatch.setattr(parity, "run_setup", pytest.fail)
    assert run_tool(parity.main, given) == 2
    assert capsys.readouterr().err.startswith(told)


def outcomes(**changed):
    found = {"weights": 1e-7, "where": "a.weight", "losses": 1e-7, "grad_norms": 1e-7, "metrics": 0.0}
    return parity.Difference(**{**found, "same_learning_rates": True, "same_rows": True, **changed})


@pytest.mark.parametrize(
    ("precision", "changed", "told", "passed"),
    [
        ("no", {}, "the same", True),
        ("no", {"losses": 2e-5}, "differs", False),
        ("no", {"predictions": 2e-4}, "differs", False),
        ("no", {"same_rows": False}, "differs", False),
        ("no", {"weights": 2e-5}, "the same steps; a.weight shows rounding enlarged by Adam", True),
        ("no", {"weights": 2e-3}, "differs", False),
        (
            "no",
            {"metrics": 1e-4},
            "the same steps; rounding swaps rows of nearly equal scores in metrics",
            True,
        ),
        ("no", {"metrics": 1e-4, "eval_losses": 1e-4}, "differs", False),
        ("no", {"metrics": 2e-3}, "differs", False),
        ("bf16", {"losses": 2e-2}, "rounding of bf16", True),
        ("bf16", {"same_rows": False}, "rounding of bf16; other rows or learning rates", False),
    ],
)
def test_the_verdict_and_the_exit_code(precision, changed, told, passed, tmp_path, capsys, monkeypatch):
    first, second = parity.REFERENCE, parity.Setup("moved", "torchrun", several=True, precision=precision)
    difference = outcomes(**changed)
    assert parity.verdict(second, difference) == (told, passed)
    rows = [parity.Row(first, 1, None, "-", True), parity.Row(second, 2, difference, told, passed)]
    monkeypatch.setattr(parity, "run_setups", lambda *_: rows)
    assert parity.main(["--output_dir", str(tmp_path), str(CLASSIFY), "--output_dir", "x"]) == (
        0 if passed else 1
    )
    assert capsys.readouterr().out.splitlines()[3].endswith(told)


def trained(outcome, path, order):
    """What six steps of Adam leave of a network whose first bias a norm takes away again; rows are summed in
    this order."""
    torch.manual_seed(0)
    layers = {
        "conv": nn.Conv1d(2, 8, 3),
        "norm": nn.InstanceNorm1d(8, affine=True),
        "last": nn.Conv1d(8, 1, 3),
    }
    model = nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-8)
    inputs = torch.randn(8, 2, 20)
    for _ in range(6):
        optimizer.zero_grad()
        for row in order:
            (model(inputs[row : row + 1]) - 1).square().mean().backward()
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    moments = {
        f"exp_avg_sq/{name}": optimizer.state[weight]["exp_avg_sq"]
        for name, weight in model.named_parameters()
    }
    save_file(moments, path / "optimizer.safetensors")
    weights = dict(zip(names, (weight.detach().clone() for weight in model.parameters()), strict=True))
    return outcome.Outcome(
        weights, {1: {"loss": 1.0, "grad_norm": 1.0}}, {}, {1: [0]}, {1: [1e-2]}, outcome.read_gradients(path)
    )


def test_a_bias_before_a_norm_is_left_out_by_its_gradient(tmp_path):
    outcome = sys.modules["samerun.tools.moving.outcome"]
    one, other = (trained(outcome, tmp_path, rows) for rows in (range(8), range(7, -1, -1)))
    found = outcome.compare(other, one)
    assert outcome.weight_differences(other.weights, one.weights, {})["conv.bias"] > 1e-3
    assert found.left_out == 8 / sum(tensor.numel() for tensor in one.weights.values())
    assert parity.verdict(parity.REFERENCE, found) == ("the same", True)
    other.weights["last.bias"].add_(1e-2)  # which has one
    assert outcome.compare(other, one).where == "last.bias"
    assert parity.verdict(parity.REFERENCE, outcome.compare(other, one)) == ("differs", False)


def test_a_cell_that_fails_is_a_row(tmp_path, capsys, monkeypatch):
    rows = [
        parity.Row(parity.REFERENCE, 1, None, "-", True),
        parity.Row(parity.SETUPS[3], 2, None, "failed: error: no (x.log)", False),
    ]
    monkeypatch.setattr(parity, "run_setups", lambda *_: rows)
    assert parity.main(["--output_dir", str(tmp_path), str(CLASSIFY), "--output_dir", "x"]) == 1
    assert "failed: error: no (x.log)" in capsys.readouterr().out


class WithNoise(nn.Module):
    def forward(self, x):
        x = functional.dropout(x, 0.1, self.training) + functional.dropout(x[:2], 0.1, self.training)[:1]
        return x + torch.randn_like(x)


def test_random_numbers_that_are_not_by_row_are_named(tmp_path):
    def train_step(run, model, optimizer, task, micro_batches):
        with dropout_by_row(None, (0, 1, 2)):
            model(torch.ones(3, 4))

    def fit(training):
        for training.state.step in range(2):
            engine.train_step(None, WithNoise(), SimpleNamespace(param_groups=[{"lr": 0.5}]), None, [])

    run = SimpleNamespace(launch=SimpleNamespace(world_size=1, rank=0, dropout_by_row=True))
    engine = SimpleNamespace(Training=SimpleNamespace(fit=fit), evaluate=None, train_step=train_step)
    recorder.record(engine, tmp_path)
    engine.Training.fit(SimpleNamespace(folder=tmp_path / "one", run=run, state=SimpleNamespace(step=0)))
    line = {"rows": [], "learning_rates": [0.5]}
    assert read_steps(tmp_path, "one", 1) == {0: line, 1: line}
    of_rows, noise = (tmp_path / "one.random.txt").read_text().splitlines()
    assert "test_parity_script.py" in of_rows
    assert "whose first dimension is not of rows" in of_rows
    assert "randn_like" in noise or "normal" in noise
