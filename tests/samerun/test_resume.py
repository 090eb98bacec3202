"""Opening a run's folder, and a training that stops and goes on."""

import functools
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from classify import TextClassification
from linear_task import FINGERPRINT, LinearTask, linear_layer, make_plan, opener, points, split_of
from safetensors import safe_open
from safetensors.torch import save_file
from segment import Segmentation
from segment3d import VolumeSegmentation
from tag import TokenClassification

from samerun import checkpoint, start
from samerun.errors import InputError
from samerun.files import replace_folder, write_json
from samerun.start import OpenedRun
from samerun.task import Data, Mixture, higher_is_better
from samerun.training import Training

HUGE = 2.0**19  # a scale of losses at which fp16 gradients overflow
# --optim, --optim_args, and what a checkpoint holds of each weight
OPTIMIZERS = [
    ("adamw_torch_fused", None, ["exp_avg", "exp_avg_sq"]),
    ("adafactor", None, ["col_var", "row_var", "variance"]),
    ("sgd", None, []),
    ("sgd", "momentum=0.9,nesterov=true", ["momentum_buffer"]),
    ("adagrad", "lr_decay=0.1", ["sum"]),
    ("rmsprop", "alpha=0.5,momentum=0.5,centered=true", ["grad_avg", "momentum_buffer", "square_avg"]),
    ("adamw_bnb_8bit", None, ["state1", "state2"]),
    ("lion_32bit", None, ["state1"]),
]
FRESH = OpenedRun(FINGERPRINT)


class Exports(LinearTask):
    def __init__(self, arguments):
        super().__init__(arguments)
        self.exported = []

    def export(self, path, model, weights, best):
        self.exported.append(best)
        return {}


@pytest.fixture
def prepare(start_run, arguments, tmp_path):
    """Prepares the linear layer's training in tmp_path. `launch`: changes of it; `step`: where it goes on."""

    def make(opened=FRESH, plan=None, model=None, launch=None, step=None, set_up=None, **given):
        asked = arguments(output_dir=str(tmp_path), **given)
        plan = plan or make_plan(22, save_steps=3, eval_steps=3)
        run = start_run(plan.batch)
        if set_up is not None:
            set_up(run.accelerator)
        run, task = replace(run, launch=replace(run.launch, **(launch or {}))), Exports(asked)
        if step is not None:
            opened = OpenedRun(FINGERPRINT, tmp_path / "checkpoints" / f"step_{step}")
        data = task.load(run.launch, None)
        return Training(run, asked, task, data, plan, model or linear_layer(), opened=opened)

    return make


@pytest.fixture
def finished(prepare, tmp_path):
    """A training of six steps, evaluated and saved after three and six, whose best model is that of three."""
    training = prepare()
    training.fit()
    training.tracker.close()
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"best_step": 6, "schema_version": 1}
    (tmp_path / "best").mkdir()
    write_json(tmp_path / "metrics.json", {"best_step": 3})
    return training


# Before the run


def test_the_fingerprint_is_the_tasks_and_the_order_of_rows(arguments):
    split, own = split_of(*points(22)), {"task": "linear", "labels": 3}
    data, asked = Data({"train": split}, {"labels": 3}), arguments(seed=7, length_grouping=False)
    found = start.make_fingerprint(asked, make_plan(22), "linear", data)
    order = {"global_batch_size": 8, "length_grouping": False, "seed": 7}
    assert found == {**own, "training_rows": 22, **order, "optim": "adamw_torch_fused", "ema_decay": None}
    data.splits["train"] = replace(split, mixture=Mixture(np.arange(22) % 2, (0.25, 0.75)))
    assert start.make_fingerprint(asked, make_plan(22), "linear", data) == {
        **found, "mixing": [[0.25, 0.75], [11, 11]],
    }  # fmt: skip
    assert start.make_fingerprint(arguments(), None, "linear", data) == own


@pytest.mark.parametrize(
    ("task", "metric", "direction", "higher"),
    [
        (Exports, "f1_macro", None, True), (Exports, "tuned_loss", None, False),
        (Exports, "f1_macro", False, False), (Exports, "loss", True, True),
        (Exports, "rmse", None, False), (Exports, "perplexity", None, False),
        # The name of a class is no loss.
        (TokenClassification, "f1_loss", None, True), (Segmentation, "iou_blossom", None, True),
        (VolumeSegmentation, "dice_gloss", None, True), (VolumeSegmentation, "loss", None, False),
        (VolumeSegmentation, "mean_hd95", None, False), (VolumeSegmentation, "hd95_left", None, False),
        (TextClassification, "mse", None, False), (TextClassification, "mae_price", None, False),
        *((TextClassification, name, None, True) for name in ("r2", "pearson_price", "spearman_loss")),
    ],
)  # fmt: skip
def test_the_direction_of_the_metric(arguments, task, metric, direction, higher):
    asked = arguments(greater_is_better=direction)
    named = task.__new__(task)
    named.arguments = asked
    assert higher_is_better(named, metric) == higher


# The run's folder


@pytest.fixture
def opened(start_run, arguments, tmp_path):
    return opener(start_run, arguments, tmp_path)


def test_a_folder_is_one_runs_at_a_time(opened):
    opened(unlock=False)
    with pytest.raises(InputError, match="in use by another run"):
        opened()


def test_overwriting_clears_and_resuming_recovers(opened, tmp_path, capsys):
    opened()
    (tmp_path / "metrics.json").write_text('{"eval_loss": 1.0}')
    (tmp_path / ".best.old").mkdir()
    (tmp_path / "checkpoints" / ".step_4.unfinished").mkdir(parents=True)
    assert opened(resume_from_checkpoint="auto").resume is None
    assert "no checkpoint yet, starting from the beginning" in capsys.readouterr().out
    assert (tmp_path / "metrics.json").exists()
    assert (tmp_path / "best").is_dir()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    before = (tmp_path / "run.json").read_bytes()
    opening = opened(overwrite_output_dir=True, seed=7)
    assert opening.resume is None
    assert (tmp_path / "metrics.json").exists()  # until the training can begin
    assert (tmp_path / "run.json").read_bytes() == before
    start.replace_run(tmp_path, opening.replaces)
    assert not (tmp_path / "metrics.json").exists()
    assert not (tmp_path / "best").exists()
    assert json.loads((tmp_path / "run.json").read_text())["arguments"]["seed"] == 7
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"


def test_a_run_that_cannot_be_prepared_does_not_replace_another(opened, prepare, tmp_path):
    (tmp_path / "metrics.json").write_text('{"eval_loss": 1.0}')

    def fail(accelerator):
        accelerator.prepare = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no room"))

    with pytest.raises(torch.OutOfMemoryError):
        prepare(opened(overwrite_output_dir=True), set_up=fail)
    assert (tmp_path / "metrics.json").exists()


# Stop and go on


def two_layers(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def mean_error(model):
    x, y = points(22)
    return (model(x) - y).square().mean().item()


@pytest.mark.parametrize(("optim", "optim_args", "kept"), OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_bytes(opened, prepare, tmp_path, optim, optim_args, kept):
    if optim in ("adamw_bnb_8bit", "lion_32bit"):
        pytest.importorskip("bitsandbytes")
    asked = {"optim": optim, "optim_args": optim_args}
    files = tmp_path / "history.jsonl", tmp_path / "checkpoints" / "step_6" / "optimizer.safetensors"
    whole = prepare(model=two_layers(), **asked)
    whole.fit()
    whole.tracker.close()
    before = [file.read_bytes() for file in files]

    opening = opened(resume_from_checkpoint=str(tmp_path / "checkpoints" / "step_3"))
    again = prepare(opening, model=two_layers(seed=99), **asked)
    assert (again.state.step, again.state.updates) == (3, 3)
    again.fit()
    again.tracker.close()
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert [file.read_bytes() for file in files] == before
    assert len(before[0].splitlines()) == 8
    assert mean_error(whole.model) < mean_error(two_layers())
    with safe_open(files[1], "pt") as file:
        assert sorted({name.partition("/")[0] for name in file.keys()}) == kept  # noqa: SIM118


class SecondIsRare(torch.nn.Module):
    """Its second layer is used for few batches only, as an expert of a mixture."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x):
        rare = x[:, 0].sum() > 1
        return self.first(x) + (self.second(x) if rare else 0)


def test_a_weight_that_some_steps_do_not_use_goes_on_after_its_own_updates(prepare, tmp_path):
    whole = prepare(model=SecondIsRare(0), dropout_by="torch")
    whole.fit()
    kept = json.loads((tmp_path / "checkpoints" / "step_3" / "state.json").read_text())
    assert kept["fewer_updates"].keys() == {"second.weight", "second.bias"}
    assert 0 < kept["fewer_updates"]["second.bias"] < 3
    again = prepare(step=3, model=SecondIsRare(9))
    again.fit()
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_loss_scale_goes_on_where_it_was(prepare, tmp_path):
    """fp16 as on a GPU, which the application refuses on a CPU: torch autocasts and scales there too."""

    def scale(accelerator):
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=HUGE, growth_interval=2)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"

    plan = make_plan(22, save_steps=3, eval_steps=None)
    scaled = {"plan": plan, "launch": {"precision": "fp16"}, "set_up": scale, "seed": 1}
    whole = prepare(**scaled)
    figures = whole.fit()
    kept = json.loads((tmp_path / "checkpoints" / "step_3" / "state.json").read_text())
    assert 0 < figures["train_skipped_steps"] < 6
    assert kept["loss_scale"]["scale"] < HUGE
    assert kept["updates"] < 3  # the first ones overflowed
    end = whole.run.accelerator.scaler.state_dict()
    assert end != kept["loss_scale"]  # it went on growing

    again = prepare(step=3, model=torch.nn.Linear(3, 2), **scaled)
    assert again.run.accelerator.scaler.state_dict() == kept["loss_scale"]
    assert again.fit()["train_skipped_steps"] == figures["train_skipped_steps"]
    assert again.run.accelerator.scaler.state_dict() == end
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)

    of_zero = {"dynamic": True, "cur_scale": 8.0, "cur_iter": 9, "scale_window": 1000}
    write_json(tmp_path / "checkpoints" / "step_3" / "state.json", {**kept, "loss_scale": of_zero})
    moved = prepare(step=3, **scaled).run.accelerator.scaler.state_dict()
    assert (moved["scale"], moved["growth_interval"]) == (8.0, 2)


@pytest.mark.parametrize("best", ["there", "lost", "truncated", "of a later step"])
@pytest.mark.usefixtures("finished")
def test_a_best_model_that_is_lost_damaged_or_replaced_is_chosen_anew(prepare, tmp_path, best):
    if best == "lost":
        (tmp_path / "best").rmdir()
    else:
        save_file({"weight": torch.zeros(9)}, tmp_path / "best" / "model.safetensors")
    if best == "truncated":
        os.truncate(tmp_path / "best" / "model.safetensors", 99)
    if best == "of a later step":
        write_json(tmp_path / "metrics.json", {"best_step": 6})
    state = prepare(step=3).state
    assert (state.best_step, state.best_metric is None) == ((3, False) if best == "there" else (None, True))


def test_a_best_model_that_lacks_a_file_is_noted(tmp_path):
    replace_folder(tmp_path / "best", lambda folder: (folder / "model.txt").write_text("1"))
    state = checkpoint.TrainState(4, best_metric_name="loss", best_metric=0.25, best_step=4)
    assert checkpoint.recover_best(tmp_path, state, LinearTask(), False) == (state, [])
    (tmp_path / "best" / "model.txt").unlink()
    assert "lacks model.txt; later" in checkpoint.recover_best(tmp_path, state, LinearTask(), False)[1][0]


def test_losses_of_other_settings_are_never_compared(request, prepare, capsys, monkeypatch):
    """Such as those of --loss bce and --loss focal: one is always lower."""
    monkeypatch.setattr(Exports, "loss_settings", {"kind": "bce"})
    request.getfixturevalue("finished")
    same = prepare(step=3).state
    assert (same.best_step, same.best_metric) == (3, same.best_loss)
    monkeypatch.setattr(Exports, "loss_settings", {"kind": "focal"})
    state = prepare(step=3).state
    assert (state.best_step, state.best_metric, state.best_loss) == (None, None, None)
    assert state.loss_settings == {"kind": "focal"}
    assert "has a loss of other settings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metric", "loss", "said"),
    [("f1", "bce", "was chosen by loss, not by f1"), (None, "focal", "has a loss of other settings")],
)
def test_values_of_another_metric_or_loss_are_never_compared(tmp_path, metric, loss, said):
    state = checkpoint.TrainState(4, best_metric=0.25, best_metric_name="loss", best_loss=0.25, best_step=4)
    task = LinearTask(best_metric=metric)
    state.loss_settings, task.loss_settings = {"kind": "bce"}, {"kind": loss}
    (note,) = checkpoint.recover_best(tmp_path, replace(state), task, complete=True)[1]
    assert note.endswith(f"is not in {tmp_path}; the last model is exported")
    state, (note,) = checkpoint.recover_best(tmp_path, state, task, complete=False)
    assert (state.best_metric, state.best_loss, state.best_step) == (None, None, None)
    assert state.loss_settings == {"kind": loss}
    assert f"(step 4) {said}" in note
    assert note.endswith("; later evaluations choose a new one")


@pytest.mark.usefixtures("finished")
def test_a_checkpoint_of_another_dropout_is_gone_on_from_with_a_note(prepare, tmp_path, capsys):
    path = tmp_path / "checkpoints" / "step_3" / "state.json"
    state = json.loads(path.read_text())
    assert state["dropout_by"] == "torch"
    for before, told in (("row", False), ("torch", True), (None, True)):  # None: from before there was "row"
        write_json(path, {**state, "dropout_by": before})
        assert prepare(step=3, launch={"dropout_by_row": True}).state.dropout_by == "row"
        out = capsys.readouterr().out
        assert ("the checkpoint's steps had dropout by torch, from here on it is by row" in out) == told
        assert "dropout        by row" in out


@pytest.mark.parametrize("ended_early", [False, True])
def test_a_start_that_trains_nothing_keeps_the_arguments_of_the_run(
    opened, prepare, request, tmp_path, ended_early
):
    opened()
    request.getfixturevalue("finished")
    before = (tmp_path / "run.json").read_bytes()
    epochs = 3 if ended_early else 2
    again = opened(resume_from_checkpoint="auto", learning_rate=0.5, epochs=epochs)
    assert (tmp_path / "run.json").read_bytes() == before  # also if this start is stopped now
    training = prepare(again, plan=make_plan(22, epochs=epochs), early_stopping_patience=2)
    training.state.evaluations_without_best = 2 * ended_early
    training.state.unevaluated = not ended_early  # an evaluation trains nothing, either
    training.fit()
    assert (tmp_path / "run.json").read_bytes() == before
    more = prepare(
        opened(resume_from_checkpoint="auto", learning_rate=0.5, epochs=3), plan=make_plan(22, epochs=3)
    )
    more.fit()
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["arguments"]["learning_rate"] == 0.5
    assert [each["step"] for each in run["changes"]] == [6]


def test_run_json_tells_after_which_step_arguments_changed(opened, request, tmp_path):
    def changes(**given):
        run = opened(epochs=3, **given).description
        return run, [(each["step"], each["changes"]) for each in run["changes"]]

    opened(epochs=3)
    request.getfixturevalue("finished")
    rate, decay = "--learning_rate was 5e-05, is now 0.5", "--weight_decay was 0.01, is now 0.1"
    assert changes(resume_from_checkpoint="auto")[1] == []
    run, found = changes(resume_from_checkpoint="auto", learning_rate=0.5)
    assert found == [(6, [rate])]
    write_json(tmp_path / "run.json", run)  # it has trained
    given = {"resume_from_checkpoint": "auto", "learning_rate": 0.5}
    assert changes(**given)[1] == [(6, [rate])]
    assert changes(**given, weight_decay=0.1)[1] == [(6, [rate, decay])]
    # From an earlier step: the later change has trained nothing that is kept.
    earlier = str(tmp_path / "checkpoints" / "step_3")
    back = (3, ["--learning_rate was 0.5, is now 0.25"])
    assert changes(resume_from_checkpoint=earlier, learning_rate=0.25)[1] == [back]


def test_changed_arguments_are_named(opened, request, tmp_path, capsys):
    opened()
    request.getfixturevalue("finished")
    changed = {"resume_from_checkpoint": "auto", "learning_rate": 0.5, "gradient_checkpointing": True}
    first = opened(**changed, epochs=3)
    changes = "--learning_rate was 5e-05, is now 0.5; --gradient_checkpointing was false, is now true"
    assert f"note           changed since the checkpoint: {changes}\n" in capsys.readouterr().out
    write_json(tmp_path / "run.json", first.description)  # it has trained
    opened(**changed, epochs=3)
    assert "changed since" not in capsys.readouterr().out
    opened(**changed, epochs=4, chosen=4)
    number = "the number of steps was 9, is now 12 (--num_train_epochs)"
    assert f"note           changed since the checkpoint: {number}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("finished")
def test_an_evaluation_that_is_repeated_is_in_the_history_once(prepare, tmp_path):
    path, history = tmp_path / "checkpoints" / "step_3" / "state.json", tmp_path / "history.jsonl"
    before = history.read_bytes()
    write_json(path, {**json.loads(path.read_text()), "unevaluated": True})
    again = prepare(step=3)
    again.fit()
    again.tracker.close()
    assert history.read_bytes() == before


@pytest.mark.usefixtures("finished")
def test_a_run_killed_before_its_next_checkpoint_goes_on_from_where_it_resumed(prepare, tmp_path):
    """From a later one, steps would be missing in its history, which was cut."""
    prepare(step=3).tracker.close()
    folder = tmp_path / "checkpoints"
    assert checkpoint.find(folder, "auto") == folder / "step_3"


@pytest.mark.usefixtures("finished")
def test_a_run_that_saves_only_on_request_is_complete_when_it_ends(prepare, tmp_path):
    """A later start trained again from the checkpoint of the request."""
    prepare(step=3, plan=make_plan(22)).fit()
    assert checkpoint.find(tmp_path / "checkpoints", "auto") == tmp_path / "checkpoints" / "step_6"


@pytest.mark.usefixtures("finished")
def test_a_checkpoint_of_other_data_is_refused_before_run_json_is_written(opened, tmp_path):
    with pytest.raises(InputError, match="rows was 22, is now 23"):
        opened({**FINGERPRINT, "rows": 23}, resume_from_checkpoint="auto")
    assert not (tmp_path / "run.json").exists()
    assert len(checkpoint.list_checkpoints(tmp_path / "checkpoints")) == 2


# What a run leaves


def test_the_best_models_figures_are_the_runs(prepare):
    training = prepare()
    training.fit()
    metrics = training.finish()
    loss = training.task.score(training.task.exported[-1], None)["loss"]
    assert metrics["best_metric"] == metrics["eval_loss"] == loss


def test_without_an_evaluation_the_last_model_is_exported(prepare):
    training = prepare(plan=make_plan(22))
    training.fit()
    assert training.task.exported == []
    assert training.finish() == {"best_step": 6, "best_metric": None}
    assert training.task.exported == [None]


# --torch_compile


@pytest.mark.parametrize(("stage", "compiled"), [(None, True), (2, True), (3, False)])
def test_layers_are_compiled_but_under_zero_3(prepare, monkeypatch, capsys, stage, compiled):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model, config = linear_layer(), None if stage is None else {"zero_optimization": {"stage": stage}}
    plain = model.forward
    prepare(model=model, launch={"deepspeed_config": config}, torch_compile=True)
    assert (model.forward != plain) == compiled
    assert ("--torch_compile is ignored under ZeRO-3" in capsys.readouterr().out) == (not compiled)
