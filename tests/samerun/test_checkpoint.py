import errno
import json
import os
import threading
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from damage import cut, flip
from linear_task import LinearTask, collator, linear_layer, points

from samerun import checkpoint
from samerun.checkpoint import (
    CheckpointTarget,
    TrainState,
    damage,
    find,
    list_checkpoints,
    load_state,
    load_weights,
    restore_optimizer,
    save,
    tidy,
)
from samerun.errors import InputError, TrainingError
from samerun.files import Background
from samerun.training import train_step

RUN_FINGERPRINT = {"task": "linear", "rows": 8, "labels": ["a", "b"]}


def target(folder, writer, limit=9):
    return CheckpointTarget(folder, RUN_FINGERPRINT, limit, writer, lambda: None, lambda path: None)


@pytest.fixture
def trained(start_run, tmp_path):
    """(run, model, optimizer) after two updates, and what saves them as step N below tmp_path."""
    run = start_run()
    layer = linear_layer()
    model, optimizer = run.accelerator.prepare(layer, torch.optim.AdamW(layer.parameters(), lr=0.1))
    batch = collator(*points(8))(torch.arange(8).numpy())
    for _ in range(2):
        train_step(run, model, optimizer, LinearTask(), [batch], 1.0)

    def save_step(step, limit=9, **state):
        writer = Background()
        save(
            run, target(tmp_path, writer, limit), model, optimizer, TrainState(step=step, updates=2, **state)
        )
        writer.wait()
        return tmp_path / f"step_{step}"

    return run, model, optimizer, save_step


def test_weights_and_moments_come_back(trained, tmp_path):
    run, model, optimizer, save_step = trained
    path = save_step(2)
    other = torch.nn.Linear(3, 2)
    load_weights(path, other)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    new_model, new_optimizer = run.accelerator.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.1))
    restore_optimizer(run, path, new_model, new_optimizer, TrainState(updates=2), idle_step=pytest.fail)
    for before, after in zip(
        optimizer.optimizer.state.values(), new_optimizer.optimizer.state.values(), strict=True
    ):
        assert {key: value.tolist() for key, value in before.items()} == {
            key: value.tolist() for key, value in after.items()
        }


def test_state_comes_back(trained):
    *_, save_step = trained
    kept = {"losses": [0.5], "best_metric": 0.25, "best_step": 2, "tokens": 7, "evaluations_without_best": 1}
    path = save_step(4, **kept)
    assert asdict(load_state(path, RUN_FINGERPRINT)) == asdict(TrainState(step=4, updates=2, **kept))


def test_tokens_are_counted_where_there_are_any(trained):
    *_, save_step = trained
    assert load_state(save_step(4), RUN_FINGERPRINT).tokens is None
    state = TrainState()
    state.count_tokens(None, None)
    assert (state.tokens, state.padded_tokens) == (None, None)
    state.count_tokens(5, 8)
    state.count_tokens(2, 4)
    assert (state.tokens, state.padded_tokens) == (7, 12)


def test_another_runs_checkpoint_is_refused_field_by_field(trained):
    *_, save_step = trained
    with pytest.raises(InputError) as caught:
        load_state(save_step(4), {"rows": 9, "labels": ["b", "a"], "seed": 1})
    differences = [problem.partition(": ")[2] for problem in caught.value.problems]
    assert differences == [
        "rows was 8, is now 9",
        'labels had 2 entries, has 2; the first difference is number 1, which was "a", is now "b"',
        "seed was null, is now 1",
        'task was "linear", is now null. Resume with the original files and arguments, or start a '
        "new run: name another --output_dir, or replace this run with --overwrite_output_dir",
    ]


@pytest.mark.parametrize(
    ("key", "then", "now", "told"),
    [
        ("label_list", ["a"], ["a", "b"],
         'the label list had 1 entries, has 2; the first difference is number 2, which was null, is now "b"'),
        ("optim", "adamw_torch_fused", "sgd momentum=0.9",
         'the optimizer (--optim, --optim_args) was "adamw_torch_fused", is now "sgd momentum=0.9"'),
        ("train_content", "0" * 16, "1" * 16, "the content of the training rows (--train_file) has changed"),
        ("model", {"config.json": "3 bytes", "a": "1"}, {"config.json": "4 bytes", "b": "1"},
         "the model's files differ: a is missing, b is new, config.json has changed"),
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
    *_, save_step = trained
    with pytest.raises(InputError, match=f"is of another model: .*{message}"):
        load_weights(save_step(2), model)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for name in ("step_10", "step_9", "step_100", "step_x", ".step_11.unfinished", "step_12.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_13").touch()
    os.utime(tmp_path / "step_100", (0, 0))  # a clock that was set back
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_9", "step_10", "step_100"]
    assert list_checkpoints(tmp_path / "none") == []


def test_a_checkpoint_begins_the_count_of_lost_processes_anew(trained, tmp_path, monkeypatch):
    *_, save_step = trained
    losses = tmp_path / "slurm-7.losses"
    losses.write_text("exit code 69\n")
    monkeypatch.setenv("SAMERUN_LOSSES", str(losses))
    for step in (2, 3):  # without the file, too
        save_step(step)
        assert not losses.exists()


def test_the_checkpoint_of_the_best_model_is_kept(trained, tmp_path):
    *_, save_step = trained
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5), (7, 5)):
        save_step(step, limit=1, best_step=best)
        expected = {1: [1], 2: [2], 3: [2, 3], 4: [2, 4], 5: [5], 6: [5, 6], 7: [5, 7]}[step]
        assert [path.name for path in list_checkpoints(tmp_path)] == [f"step_{number}" for number in expected]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_later_checkpoints_stay_set_aside_until_the_run_has_passed_them(trained, tmp_path, capsys):
    *_, save_step = trained
    for step in (2, 9, 10):
        save_step(step)
    flip(tmp_path / "step_9" / "state.json")
    save_step(4, limit=1)
    assert names(tmp_path) == ["step_10.left_behind", "step_4", "step_9.left_behind"]
    assert (
        "step_9, step_10: later than this run's step; kept as step_N.left_behind" in capsys.readouterr().out
    )
    assert find(tmp_path, "auto") == tmp_path / "step_4"
    assert damage(tmp_path / "step_10.left_behind") is None
    save_step(9, limit=1)
    assert names(tmp_path) == ["step_10.left_behind", "step_9"]
    save_step(12, limit=1)
    assert names(tmp_path) == ["step_12"]


def test_the_last_that_is_left_behind_of_a_step_is_the_one_kept(trained, tmp_path):
    """A crash may leave two of a step: behind the commit, before the rotation."""
    *_, save_step = trained
    save_step(6)
    (tmp_path / "step_6.left_behind").mkdir()
    save_step(4)
    assert names(tmp_path) == ["step_4", "step_6.left_behind"]
    assert damage(tmp_path / "step_6.left_behind") is None


def test_a_crash_between_the_renames_of_a_save_loses_no_checkpoint(trained, tmp_path):
    *_, save_step = trained
    save_step(4)
    (tmp_path / "step_4").rename(tmp_path / ".step_4.old")
    (tmp_path / ".step_4.unfinished").mkdir()
    save_step(2)
    (tmp_path / ".step_2.old").mkdir()
    tidy(tmp_path)
    assert names(tmp_path) == ["step_2", "step_4"]
    assert damage(tmp_path / "step_4") is None
    tidy(tmp_path / "none")


FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "run_fingerprint.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, "bytes, expected"),
        (flip, "was changed after it was written"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_every_damaged_file_is_found(trained, name, harm, message):
    *_, save_step = trained
    path = save_step(2)
    assert damage(path) is None
    harm(path / name)
    assert damage(path).startswith(name)
    assert message in damage(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        *[
            (content, "cannot be read")
            for content in (None, b"", b"{", b"\xff", b"[]", b"{}", b'{"files": 3}')
        ],
        (b'{"files": {}}', "does not list model.safetensors"),
        (b'{"files": []}', "does not list model.safetensors"),
        (b'{"files": {"model.safetensors": 3}}', "cannot be read"),
    ],
)
def test_a_garbled_manifest_is_damage(trained, content, expected):
    *_, save_step = trained
    path = save_step(2)
    (path / checkpoint.MANIFEST).unlink()
    if content is not None:
        (path / checkpoint.MANIFEST).write_bytes(content)
    assert damage(path).startswith(f"manifest.json {expected}")


def test_auto_finds_the_newest_that_is_whole(trained, tmp_path, capsys):
    *_, save_step = trained
    assert find(tmp_path, "auto") is None
    paths = [save_step(step) for step in (2, 9, 10)]
    assert find(tmp_path, "auto") == paths[2]
    flip(paths[2] / "model.safetensors")
    assert find(tmp_path, "auto") == paths[1]
    assert "step_10: model.safetensors was changed" in capsys.readouterr().out
    # Nothing is deleted.
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_2", "step_9", "step_10"]
    for path in paths[:2]:
        cut(path / "state.json")
    with pytest.raises(InputError) as caught:
        find(tmp_path, "auto")
    assert len(caught.value.problems) == 4
    assert "--overwrite_output_dir" in caught.value.problems[-1]


def test_a_checkpoint_is_requested_by_its_path(trained, tmp_path):
    *_, save_step = trained
    path = save_step(2)
    assert find(tmp_path / "elsewhere", str(path)) == path
    flip(path / "model.safetensors")
    with pytest.raises(
        InputError, match=r"--resume_from_checkpoint .*step_2: model\.safetensors was changed"
    ):
        find(tmp_path, str(path))


def test_a_failed_save_harms_no_earlier_one(trained, tmp_path, monkeypatch):
    *_, save_step = trained
    path = save_step(2, limit=1)
    real = checkpoint.save_file

    def full_disk(tensors, place):
        real(tensors, place)
        if place.name == "optimizer.safetensors":
            raise RuntimeError("I/O error: No space left on device (os error 28)")  # what safetensors raises

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    for step in (2, 4):
        with pytest.raises(
            TrainingError, match=r"the disk is full: a checkpoint takes 0\.0 MB .* step_2 is complete"
        ):
            save_step(step, limit=1)
    assert list(tmp_path.iterdir()) == [path]
    assert damage(path) is None


def test_a_disk_without_room_is_not_filled_up(trained, tmp_path, monkeypatch):
    *_, save_step = trained
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=95))
    begun = []
    monkeypatch.setattr(checkpoint, "save_file", lambda tensors, place: begun.append(place))
    with pytest.raises(TrainingError) as caught:
        save_step(2)
    assert begun == []
    assert (
        "step_2 could not be written (the disk is full: a checkpoint takes 0.0 MB and 0.0 MB are free)"
        in str(caught.value)
    )
    assert "There is no earlier one" in str(caught.value)


@pytest.mark.parametrize(("module", "name"), [(os, "rename"), (os, "fsync"), (checkpoint, "file_record")])
def test_whatever_fails_the_earlier_checkpoint_stays(trained, tmp_path, monkeypatch, module, name):
    *_, save_step = trained
    save_step(2, limit=1)

    def refuse(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        with pytest.raises(
            TrainingError, match=r"step_4 could not be written \(.*Stale file handle.*\)\. step_2 is complete"
        ):
            save_step(4, limit=1)
    assert names(tmp_path) == ["step_2"]
    assert damage(tmp_path / "step_2") is None


def test_a_checkpoint_is_of_the_moment_of_its_request(trained, tmp_path, monkeypatch):
    """The run goes on while it is written, and is held only by the one before."""
    run, model, optimizer, save_step = trained
    whole = {path.name: path.read_bytes() for path in save_step(2).iterdir()}
    go_on, real, state, writer = (
        threading.Event(),
        checkpoint.replace_folder,
        TrainState(step=2, updates=2),
        Background(),
    )

    def held(*given):
        go_on.wait()
        real(*given)

    monkeypatch.setattr(checkpoint, "replace_folder", held)
    save(run, target(tmp_path, writer), model, optimizer, state)
    state.step, state.updates = 3, 3
    train_step(run, model, optimizer, LinearTask(), [collator(*points(8))(torch.arange(8).numpy())], 1.0)
    go_on.set()
    save(run, target(tmp_path, writer), model, optimizer, state)
    assert {path.name: path.read_bytes() for path in (tmp_path / "step_2").iterdir()} == whole
    writer.wait()
    assert damage(tmp_path / "step_3") is None
    assert (tmp_path / "step_3" / "model.safetensors").read_bytes() != whole["model.safetensors"]


def test_a_checkpoint_of_a_later_version_is_refused(trained):
    *_, save_step = trained
    path = save_step(2)
    stored = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**stored, "mood": 3}))
    with pytest.raises(InputError, match=r"state\.json has the unknown keys mood"):
        load_state(path, RUN_FINGERPRINT)


def test_a_sharded_checkpoint_of_before_is_refused_with_the_way_out(trained, tmp_path):
    *_, save_step = trained
    path = save_step(2)
    stored = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**stored, "shards": 2}))
    for requested in ("auto", str(path)):
        with pytest.raises(InputError, match=r"step_2.* is sharded, .* --checkpoint_format full"):
            find(tmp_path, requested)


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
