import errno
import json
import os
import threading
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from damage import cut, flip
from linear_task import LinearTask, collator, linear_layer, points
from refusals import problems_of

from samerun import checkpoint
from samerun.checkpoint import (
    TrainState,
    damage,
    find,
    list_checkpoints,
    load_state,
    load_weights,
    tidy,
)
from samerun.errors import InputError, TrainingError
from samerun.files import Background
from samerun.training import train_step

RUN_FINGERPRINT = {"task": "linear", "rows": 8, "labels": ["a", "b"]}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def trained(start_run, tmp_path):
    """A linear layer after two updates; `save` writes step N below tmp_path, `step` trains on."""
    run, layer = start_run(), linear_layer()
    model, optimizer = run.accelerator.prepare(layer, torch.optim.AdamW(layer.parameters(), lr=0.1))
    batch = collator(*points(8))(torch.arange(8).numpy())

    def step():
        train_step(run, model, optimizer, LinearTask(), [batch], 1.0)

    def save(number, limit=9, writer=None, **state):
        own = writer or Background()
        own.wait()
        progress = TrainState(step=number, updates=2, **state)
        files = checkpoint.collect(run, model, optimizer, progress)
        own.start(partial(checkpoint.write, tmp_path, progress, RUN_FINGERPRINT, files, limit, lambda: None))
        if writer is None:
            own.wait()
        return tmp_path / f"step_{number}"

    step()
    step()
    return SimpleNamespace(step=step, save=save)


def test_state_comes_back(trained):
    assert load_state(trained.save(2), RUN_FINGERPRINT).tokens is None  # of rows without tokens
    kept = {"losses": [0.5], "best_metric": 0.25, "best_step": 2, "evaluations_without_best": 1}
    state = TrainState(step=4, updates=2, **kept)
    for tokens in ((None, None), (5, 8), (2, 4)):
        state.count_tokens(*tokens)
    assert (state.tokens, state.padded_tokens) == (7, 12)
    path = trained.save(4, tokens=7, padded_tokens=12, **kept)
    assert load_state(path, RUN_FINGERPRINT) == state


def test_another_runs_checkpoint_is_refused_field_by_field(trained):
    found = problems_of(load_state, trained.save(4), {"rows": 9, "labels": ["b", "a"], "seed": 1})
    assert [problem.partition(": ")[2] for problem in found] == [
        "rows was 8, is now 9",
        'labels was ["a", "b"], is now ["b", "a"]',
        "seed was null, is now 1",
        'task was "linear", is now null. Resume with the original files and arguments, or start a '
        "new run: name another --output_dir, or replace this run with --overwrite_output_dir",
    ]


@pytest.mark.parametrize(
    ("key", "then", "now", "told"),
    [
        ("label_list", [*"a" * 99, "b"], [*"a" * 99, "c"],
         'the label list was ...a", AAA"b"], is now ...a", AAA"c"]'.replace("AAA", 7 * '"a", ')),
        ("optim", "adamw_torch_fused", "sgd momentum=0.9",
         'the optimizer (--optim, --optim_args) was "adamw_torch_fused", is now "sgd momentum=0.9"'),
        ("optim", "0" * 16, "1" * 16, "the optimizer (--optim, --optim_args) has changed"),
        ("model", {"config.json": "3 bytes", "a": "1"}, {"config.json": "4 bytes", "b": "1"},
         "the model's files or settings differ in a, b, config.json"),
    ],
)  # fmt: skip
def test_differences_are_told_in_words(key, then, now, told):
    assert checkpoint.difference(key, then, now) == told


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Linear(4, 2), r"size mismatch for weight: .*\[2, 3\].*\[2, 4\]"),
        (torch.nn.Linear(3, 2, bias=False), r"missing \[\], unexpected \['bias'\]"),
        (
            torch.nn.Sequential(torch.nn.Linear(3, 2)),
            r"missing \['0.bias', '0.weight'\], unexpected \['bias', 'weight'\]",
        ),
    ],
)
def test_another_models_weights_are_refused(trained, model, message):
    with pytest.raises(InputError, match=f"is of another model: .*{message}"):
        load_weights(trained.save(2), model)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for name in ("step_10", "step_9", "step_100", "step_x", ".step_11.unfinished", "step_12.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_13").touch()
    os.utime(tmp_path / "step_100", (0, 0))  # a clock that was set back
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_9", "step_10", "step_100"]
    assert list_checkpoints(tmp_path / "none") == []


def test_a_checkpoint_begins_the_count_of_lost_processes_anew(trained, tmp_path, monkeypatch):
    losses = tmp_path / "slurm-7.losses"
    losses.write_text("exit code 69\n")
    monkeypatch.setenv("SAMERUN_LOSSES", str(losses))
    for step in (2, 3):  # without the file, too
        trained.save(step)
        assert not losses.exists()


def test_the_checkpoint_of_the_best_model_is_kept(trained, tmp_path):
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5), (7, 5)):
        trained.save(step, limit=1, best_step=best)
        expected = {1: [1], 2: [2], 3: [2, 3], 4: [2, 4], 5: [5], 6: [5, 6], 7: [5, 7]}[step]
        assert [path.name for path in list_checkpoints(tmp_path)] == [f"step_{number}" for number in expected]


def test_later_checkpoints_stay_set_aside_until_the_run_has_passed_them(trained, tmp_path, capsys):
    for step in (2, 9, 10):
        trained.save(step)
    flip(tmp_path / "step_9" / "state.json")
    checkpoint.set_aside_later(tmp_path, 2)
    trained.save(4, limit=1)
    assert names(tmp_path) == ["step_10.left_behind", "step_4", "step_9.left_behind"]
    said = capsys.readouterr().out
    assert "step_9, step_10: later than this run's step; kept as step_N.left_behind" in said
    assert find(tmp_path, "auto") == tmp_path / "step_4"
    assert damage(tmp_path / "step_10.left_behind") is None
    trained.save(9, limit=1)
    assert names(tmp_path) == ["step_10.left_behind", "step_9"]
    trained.save(12, limit=1)
    assert names(tmp_path) == ["step_12"]


def test_the_last_that_is_left_behind_of_a_step_is_the_one_kept(trained, tmp_path):
    """A crash may leave two of a step: behind the commit, before the rotation."""
    trained.save(6)
    (tmp_path / "step_6.left_behind").mkdir()
    checkpoint.set_aside_later(tmp_path, 4)
    assert names(tmp_path) == ["step_6.left_behind"]
    assert damage(tmp_path / "step_6.left_behind") is None


def test_a_crash_between_the_renames_of_a_save_loses_no_checkpoint(trained, tmp_path):
    trained.save(4)
    (tmp_path / "step_4").rename(tmp_path / ".step_4.old")
    (tmp_path / ".step_4.unfinished").mkdir()
    trained.save(2)
    (tmp_path / ".step_2.old").mkdir()
    tidy(tmp_path)
    assert names(tmp_path) == ["step_2", "step_4"]
    assert damage(tmp_path / "step_4") is None
    tidy(tmp_path / "none")


FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "run_fingerprint.json")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, "bytes, expected"),
        (flip, "was changed after it was written"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_every_damaged_file_is_found(trained, harm, message):
    for step, name in enumerate(FILES):
        path = trained.save(step)
        assert damage(path) is None
        harm(path / name)
        assert damage(path).startswith(name)
        assert message in damage(path)


def test_a_garbled_manifest_is_damage(trained):
    path = trained.save(2)
    for content, expected in [
        *[(content, "cannot be read") for content in (b"", b"{", b"\xff", b"[]", b"{}", b'{"files": 3}')],
        (b'{"files": {}}', "does not list model.safetensors"),
        (b'{"files": []}', "does not list model.safetensors"),
        (b'{"files": {"model.safetensors": 3}}', "cannot be read"),
        (b'{"files": {}, "shards": 2}', "manifest.json does not list model.safetensors"),
    ]:
        (path / checkpoint.MANIFEST).write_bytes(content)
        assert expected in damage(path), content
    (path / checkpoint.MANIFEST).unlink()
    assert damage(path) == "manifest.json cannot be read (FileNotFoundError)"


def test_auto_finds_the_newest_that_is_whole(trained, tmp_path, capsys):
    assert find(tmp_path, "auto") is None
    paths = [trained.save(step) for step in (2, 9, 10)]
    assert find(tmp_path, "auto") == paths[2]
    flip(paths[2] / "model.safetensors")
    assert find(tmp_path, "auto") == paths[1]
    assert "step_10: model.safetensors was changed" in capsys.readouterr().out
    # Nothing is deleted.
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_2", "step_9", "step_10"]
    for path in paths[:2]:
        cut(path / "state.json")
    *others, last = problems_of(find, tmp_path, "auto")
    assert (len(others), "--overwrite_output_dir" in last) == (3, True)


def test_a_checkpoint_of_trainer_is_no_beginning(tmp_path):
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text("{}")
    with pytest.raises(InputError, match="checkpoint-6 is of transformers' Trainer and cannot be continued"):
        checkpoint.find(tmp_path / "checkpoints", "auto")
    (tmp_path / "run.json").write_text("{}")  # a run of ours that ended before its first checkpoint
    assert checkpoint.find(tmp_path / "checkpoints", "auto") is None


def test_a_checkpoint_is_requested_by_its_path(trained, tmp_path):
    path = trained.save(2)
    assert find(tmp_path / "elsewhere", str(path)) == path
    flip(path / "model.safetensors")
    message = r"--resume_from_checkpoint .*step_2: model\.safetensors was changed"
    with pytest.raises(InputError, match=message):
        find(tmp_path, str(path))


def test_a_disk_without_room_is_not_filled_up(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=95))
    monkeypatch.setattr(checkpoint, "save_file", pytest.fail)
    full = r"step_2 could not be written \(the disk is full: a checkpoint takes 0\.0 MB and 0\.0 MB are free"
    with pytest.raises(TrainingError, match=rf"{full}.*There is no earlier one"):
        trained.save(2)


STALE = OSError(errno.ESTALE, "Stale file handle")
FULL = RuntimeError("I/O error: No space left on device (os error 28)")  # what safetensors raises


@pytest.mark.parametrize(
    ("module", "name", "error", "told"),
    [
        (os, "rename", STALE, "Stale file handle"),
        (os, "fsync", STALE, "Stale file handle"),
        (checkpoint, "file_record", STALE, "Stale file handle"),
        (checkpoint, "save_file", FULL, r"the disk is full: a checkpoint takes 0\.0 MB"),
    ],
)
def test_a_failed_save_harms_no_earlier_one(trained, tmp_path, monkeypatch, module, name, error, told):
    trained.save(2, limit=1)
    for step in (2, 4):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, Mock(side_effect=error))
            message = rf"step_{step} could not be written \(.*{told}.*\. step_2 is complete"
            with pytest.raises(TrainingError, match=message):
                trained.save(step, limit=1)
        assert names(tmp_path) == ["step_2"]
        assert damage(tmp_path / "step_2") is None


def test_a_checkpoint_is_of_the_moment_of_its_request(trained, tmp_path, monkeypatch):
    """The run goes on while it is written, and is held only by the one before."""
    whole = {path.name: path.read_bytes() for path in trained.save(2).iterdir()}
    go_on, real, writer = threading.Event(), checkpoint.replace_folder, Background()

    def held(*given):
        go_on.wait()
        real(*given)

    monkeypatch.setattr(checkpoint, "replace_folder", held)
    trained.save(2, writer=writer)
    trained.step()
    go_on.set()
    trained.save(3, writer=writer)
    assert {path.name: path.read_bytes() for path in (tmp_path / "step_2").iterdir()} == whole
    writer.wait()
    assert damage(tmp_path / "step_3") is None
    assert (tmp_path / "step_3" / "model.safetensors").read_bytes() != whole["model.safetensors"]


def test_a_checkpoint_of_another_version_is_refused(trained):
    path = trained.save(2)
    stored = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**stored, "mood": 3}))
    with pytest.raises(InputError, match=r"state\.json has the unknown keys mood"):
        load_state(path, RUN_FINGERPRINT)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight


def test_tied_weights_may_be_kept_under_one_name(start_run, tmp_path):
    run, model = start_run(), Tied()
    weights = checkpoint.full_weights(run, model)
    assert set(weights) == {"first.weight", "second.weight"}
    weights["second.weight"] = weights["first.weight"]  # one memory, as a partitioned model's are
    checkpoint.save_file(checkpoint._without_tied(weights), tmp_path / "model.safetensors")
    other = Tied()
    load_weights(tmp_path, other)
    torch.testing.assert_close(other.second.weight, model.first.weight, rtol=0, atol=0)


def test_a_checkpoint_is_fp32_whatever_the_model_is(start_run):
    run, model = start_run(), torch.nn.BatchNorm1d(2).half()
    kinds = {name: tensor.dtype for name, tensor in checkpoint.full_weights(run, model).items()}
    assert kinds["weight"] == kinds["running_mean"] == torch.float32
    assert kinds["num_batches_tracked"] == torch.int64
