"""`samerun parity` as a user runs it: what it prints, leaves behind and returns."""

import json
import re
import signal
import sys
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import launchers
import psutil
import pytest
import torch
import vector_task
from launchers import CLASSIFY, as_words, tool, training
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from samerun import task_scripts
from samerun.kernels.dropout import dropout_by_row
from samerun.tools import parity
from samerun.tools.moving import outcome, recorder, setups
from samerun.tools.moving.observer import read_steps

SETUPS = ("one", "zero2", "fsdp")


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
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,3,5", ["--include", "localhost:2,3"]),
        ("0", ["--num_gpus", "2"]),
        ("", ["--num_gpus", "2"]),
        ("GPU-12,GPU-34", ["--num_gpus", "2"]),
    ],
)
def test_deepspeed_takes_the_gpus_that_are_visible(visible, expected, monkeypatch):
    """With --num_gpus it takes the first ones of the machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    setup = next(setup for setup in setups.SETUPS if setup.launcher == "deepspeed")
    assert setups.launcher(setup, 2)[1:3] == expected


def test_a_job_that_is_the_same_everywhere(tmp_path):
    """A task without tokens, with SGD and momentum, on streamed rows, which are others in the second epoch.
    Its evaluations are those of averaged weights."""
    given = {"global_batch_size": 15, "optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1}
    given |= {"max_grad_norm": 0.05, "ema_decay": 0.5, "streamed": True, "output_dir": tmp_path / "never"}
    options = as_words(setups="zero2,fsdp", steps=6, output_dir="table")
    command = [*tool("parity"), *options, vector_task.__file__, *as_words(**given)]
    told, _, rest = launchers.run(command, tmp_path).check().out.partition("\n\n")
    verdicts = dict(zip(SETUPS, ("reference", "the same", "the same"), strict=True))
    assert [line.split(maxsplit=1) for line in told.splitlines()] == [[*each] for each in verdicts.items()]
    titles, reference, *rows, note, _, written = [re.split(" {2,}", line) for line in rest.splitlines()]
    assert reference == ["one", "python", "1", *["-"] * 7, "reference"]
    assert "whose gradient is rounding alone" in note[0]
    assert written == ["written to table/parity.json"]
    report = json.loads((tmp_path / "table" / "parity.json").read_text(encoding="utf-8"))
    for row, launcher, setup in zip(rows, ("deepspeed", "accelerate"), report["setups"][1:], strict=True):
        numbers = [f"{setup['difference'][title.replace(' ', '_')]:.1e}" for title in titles[3:8]]
        assert row == [setup["name"], launcher, "2", *numbers, "same", "same", "the same"]
        assert 0 < setup["difference"]["weights"] <= outcome.TOLERANCE

    assert report["command"][0] == vector_task.__file__
    assert (report["steps"], report["gpus"]) == (6, 0)
    assert {setup["name"]: setup["passed"] for setup in report["setups"]} == dict.fromkeys(SETUPS, True)
    for name in SETUPS:
        assert "launcher       " in (tmp_path / "table" / f"{name}.log").read_text(encoding="utf-8")
        run = json.loads((tmp_path / "table" / name / "run.json").read_text(encoding="utf-8"))
        assert (run["plan"]["total_steps"], run["arguments"]["report_to"]) == (6, ["none"])
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_a_command_that_fails_has_nothing_to_compare(tmp_path, monkeypatch, refusal, forked_python):
    monkeypatch.chdir(tmp_path)
    launchers.write_corpus(tmp_path)
    job = training(tmp_path / "never", train_file="nothing.csv", test_file=None)
    error = refusal(parity.main, ["--setups", "ddp", *job])
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
def test_bad_input_is_told_before_anything_is_run(given, told, refusal, monkeypatch):
    monkeypatch.setattr(parity, "run_setup", pytest.fail)
    assert refusal(parity.main, given).startswith(told)


SWAPS = "rounding swaps rows of nearly equal scores in metrics"


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
        ("no", {"metrics": 1e-4}, f"the same steps; {SWAPS}", True),
        ("no", {"metrics": 1e-4, "eval_losses": 1e-4}, "differs", False),
        ("no", {"metrics": 2e-3}, "differs", False),
        ("bf16", {"losses": 2e-2}, "rounding of bf16", True),
        ("bf16", {"losses": 0.3}, "differs", False),
        ("bf16", {"same_rows": False}, "rounding of bf16; other rows or learning rates", False),
        ("no", None, "failed: error: no (x.log)", False),
    ],
)
def test_the_verdict_and_the_exit_code(precision, changed, told, passed, tmp_path, capsys, monkeypatch):
    first, second = parity.REFERENCE, parity.Setup("moved", "torchrun", several=True, precision=precision)
    difference = None
    if changed is not None:
        difference = outcomes(**changed)
        assert parity.verdict(second, difference) == (told, passed)
    rows = [parity.Row(first, 1, None, "-", True), parity.Row(second, 2, difference, told, passed)]
    monkeypatch.setattr(parity, "run_setups", lambda *_: rows)
    words = ["--output_dir", str(tmp_path), str(CLASSIFY), "--output_dir", "x"]
    assert parity.main(words) == (0 if passed else 1)
    assert capsys.readouterr().out.splitlines()[3].endswith(told)


def trained(path, order):
    """What six steps of Adam leave, rows summed in this order; a norm takes the first bias away."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 8, 3), nn.InstanceNorm1d(8, affine=True), nn.Conv1d(8, 1, 3)]
    model = nn.Sequential(OrderedDict(zip(("conv", "norm", "last"), layers, strict=True)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-8)
    inputs = torch.randn(8, 2, 20)
    for _ in range(6):
        optimizer.zero_grad()
        for row in order:
            (model(inputs[row : row + 1]) - 1).square().mean().backward()
        optimizer.step()
    weights = dict(model.named_parameters())
    moments = {f"exp_avg_sq/{name}": optimizer.state[x]["exp_avg_sq"] for name, x in weights.items()}
    save_file(moments, path / "optimizer.safetensors")
    weights = {name: weight.detach() for name, weight in weights.items()}
    return outcome.Outcome(
        weights, {1: {"loss": 1.0, "grad_norm": 1.0}}, {}, {1: [0]}, {1: [1e-2]}, outcome.read_gradients(path)
    )


def test_a_bias_before_a_norm_is_left_out_by_its_gradient(tmp_path):
    one, other = (trained(tmp_path, rows) for rows in (range(8), range(7, -1, -1)))
    found = outcome.compare(other, one)
    assert outcome.weight_differences(other.weights, one.weights, {})["conv.bias"] > 1e-3
    assert found.left_out == 8 / sum(tensor.numel() for tensor in one.weights.values())
    assert parity.verdict(parity.REFERENCE, found) == ("the same", True)
    other.weights["last.bias"].add_(1e-2)  # which has one
    assert outcome.compare(other, one).where == "last.bias"
    assert parity.verdict(parity.REFERENCE, outcome.compare(other, one)) == ("differs", False)
    other.weights["last.weight"][0] = float("nan")
    assert outcome.compare(other, one).where == "last.weight"


def test_every_kind_of_difference_is_seen(tmp_path):
    one = replace(trained(tmp_path, range(8)), evaluations={1: {"eval_loss": 0.4}})
    same = outcome.compare(one, one)
    assert same.is_rounding()
    for what, changed in {
        "losses": {"steps": {1: {"loss": 1.00002, "grad_norm": 1.0}}},
        "grad_norms": {"steps": {1: {"loss": 1.0, "grad_norm": None}}},
        "same_learning_rates": {"learning_rates": {1: [1e-2 + 1e-12]}},
        "same_rows": {"rows": {1: [1]}},
        "metrics": {"evaluations": {1: {"eval_loss": 0.5}}},
    }.items():
        found = outcome.compare(replace(one, **changed), one)
        assert not found.is_rounding(), what
        differs = [name for name, value in vars(found).items() if value != getattr(same, name)]
        assert differs == [what] + ["eval_losses"] * (what == "metrics")


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
