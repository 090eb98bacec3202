"""What is refused before a run, and --resume_from_checkpoint in a folder that already holds one."""

import functools
import json
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from linear_task import FINGERPRINT, opener
from refusals import problems_of
from run_folders import contents

from samerun import checkpoint, start
from samerun.errors import InputError
from samerun.files import add_to_list, write_json
from samerun.launch import Machine
from samerun.parsing import is_installed


def test_everything_that_can_be_refused_is_refused_at_once(arguments, environment, tmp_path, monkeypatch):
    (tmp_path / "metrics.json").write_text('{"eval_loss": 1.0}')
    asked = arguments(
        output_dir=str(tmp_path), mixed_precision="fp16", report_to=("wandb",), ddp_backend="nccl",
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = problems_of(start.check, asked)
    for word in ("fp16", "nccl", "already holds a run", "--report_to wandb: not installed"):
        assert sum(word in problem for problem in found) == 1
    assert len(found) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_folders_whose_names_other_libraries_could_not_read_are_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "gbk")
    asked = arguments(output_dir=str(tmp_path / "run"), model_name_or_path="模型")
    found = problems_of(start.check, asked)
    assert [problem.partition(":")[0] for problem in found] == ["--model_name_or_path"]
    assert "set PYTHONUTF8=1" in found[0]


def test_a_folder_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # as wandb leaves it
    monkeypatch.syspath_prepend(tmp_path)
    assert [is_installed(name) for name in ("wandb", "torch", "json", "no_such")] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("labels", "error"), [(["a", "c"], InputError), (["a", "b"], NotImplementedError)])
def test_everybodys_fingerprint_is_sent_only_if_one_is_unlike(arguments, tmp_path, labels, error):
    """It has the list of labels: a thousand processes' would be a gigabyte on each."""
    first = {"rank": 0, "host": "m0", "compared": {"data": {"labels": ["a", "b"]}}}
    run = Mock(launch=SimpleNamespace(rank=1), broadcast=lambda _: first, any=bool)
    run.gather.side_effect = lambda records: [first, *records]
    run.from_rank0.side_effect = NotImplementedError  # what follows
    with pytest.raises(error, match="labels is " if error is InputError else None):
        start.open_run(run, arguments(output_dir=str(tmp_path)), None, {"labels": labels}, [], {})
    assert run.gather.called == (error is InputError)


def test_no_average_of_weights_on_nvme(arguments, environment, tmp_path):
    environment.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    file = tmp_path / "nvme.json"
    swapped = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    file.write_text(json.dumps({"zero_optimization": swapped}))
    asked = arguments(output_dir=str(tmp_path / "run"), deepspeed=str(file), ema_decay=0.99)
    with pytest.raises(InputError, match=r"--ema_decay does not work with offloading to nvme .*nvme\.json"):
        start.check(asked, Machine(0, True))


def test_zero_without_deepspeed_is_refused_but_can_be_planned(arguments, environment, tmp_path, monkeypatch):
    environment.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    environment.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    asked = arguments(output_dir=str(tmp_path / "run"), deepspeed=str(tmp_path / "zero2.json"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert start.check(asked, Machine(0, True)).zero_stage == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = r"zero2\.json: DeepSpeed is not installed \(pip install deepspeed\)$"
    with pytest.raises(InputError, match=message):
        start.check(asked)


@pytest.fixture
def opened(start_run, arguments, tmp_path):
    (tmp_path / "run").mkdir()
    open_run = opener(start_run, arguments, tmp_path / "run")
    return functools.partial(open_run, save_steps=None, resume_from_checkpoint="auto")


def leave_run(opened, folder, state="done", step=6, **given):
    """A run without checkpoints."""
    opened(**given)
    for name in ("history.jsonl", "metrics.json", "best/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"eval_loss": 1.0}')
    add_to_list(folder / "best", ["model.safetensors"])
    write_json(folder / "status.json", {"state": state, "step": step})


def test_a_finished_run_without_checkpoints_is_complete_and_stays(opened, tmp_path, capsys):
    leave_run(opened, tmp_path / "run")
    before = contents(tmp_path / "run")
    assert opened(logging_steps=3).complete
    assert "training       is complete" in capsys.readouterr().out
    opened(max_steps=6, num_train_epochs=9.0)
    assert "note           --max_steps 6 decides; --num_train_epochs is not read" in capsys.readouterr().out
    assert contents(tmp_path / "run") == before


OTHER_ROWS = {"fingerprint": {**FINGERPRINT, "rows": 23}}


@pytest.mark.parametrize(
    ("state", "step", "changed", "message"),
    [
        ("done", 6, OTHER_ROWS, "another run: rows was 22, is now 23; name"),
        ("running", 0, OTHER_ROWS, "another run: rows was 22"),
        ("done", 6, {"epochs": 3}, "finished after 6 steps, without a checkpoint to go on from to step 9"),
        ("stopped", 3, {}, "is not finished, without a checkpoint"),
        ("running", 0, {}, "is not finished, without a checkpoint"),
    ],
)
def test_without_a_checkpoint_a_run_is_not_replaced(opened, tmp_path, state, step, changed, message):
    leave_run(opened, tmp_path / "run", state, step)
    before = contents(tmp_path / "run")
    with pytest.raises(InputError, match=message):
        opened(**changed)
    assert contents(tmp_path / "run") == before


def test_a_run_killed_before_its_first_checkpoint_starts_again(opened, tmp_path):
    leave_run(opened, tmp_path / "run", "running", 0, save_steps=3)
    found = opened(save_steps=3)
    assert (found.resume, found.complete) == (None, False)


def test_a_run_whose_facts_are_lost_is_not_replaced(opened, tmp_path):
    leave_run(opened, tmp_path / "run")
    (tmp_path / "run" / "status.json").write_text("{}")
    before = contents(tmp_path / "run")
    with pytest.raises(InputError, match=r"run\.json or status\.json cannot be read"):
        opened()
    (tmp_path / "run" / "run.json").unlink()
    del before["run.json"]
    with pytest.raises(InputError, match=r"status\.json, history\.jsonl would be replaced"):
        opened()
    assert contents(tmp_path / "run") == before


def test_a_checkpoint_of_another_run_is_not_mixed_with_this_one(opened, tmp_path):
    leave_run(opened, tmp_path / "run")
    other = tmp_path / "other" / "checkpoints" / "step_3"
    other.mkdir(parents=True)
    (other / checkpoint.MANIFEST).touch()
    before = contents(tmp_path / "run")
    with pytest.raises(InputError, match="already holds another run; name another --output_dir"):
        opened(resume_from_checkpoint=str(other))
    assert contents(tmp_path / "run") == before
