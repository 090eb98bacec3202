import functools
import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from linear_task import LinearTask, linear_layer, make_plan, points
from safetensors import safe_open
from safetensors.torch import save_file

from samerun import checkpoint, signals, start
from samerun.errors import InputError
from samerun.files import write_json
from samerun.run_folder import status
from samerun.start import OpenedRun
from samerun.training import Training

FINGERPRINT = {"task": "linear", "rows": 22}
HUGE = 2.0**19  # a scale of losses at which fp16 gradients overflow
# --optim, --optim_args, and what a checkpoint holds of each weight
OPTIMIZERS = [
    ("adamw_torch_fused", None, ["exp_avg", "exp_avg_sq"]),
    ("adafactor", None, ["col_var", "row_var", "variance"]),
    ("sgd", None, []),
    ("sgd", "momentum=0.9,nesterov=true", ["momentum_buffer"]),
    ("adagrad", "lr_decay=0.1", ["sum"]),
    ("rmsprop", "alpha=0.5,momentum=0.5,centered=true", ["grad_avg", "momentum_buffer", "square_avg"]),
    ("muon", None, ["exp_avg", "exp_avg_sq", "momentum_buffer"]),
    ("adamw_bnb_8bit", None, ["state1", "state2"]),
    ("lion_32bit", None, ["state1"]),
]
FRESH = OpenedRun(FINGERPRINT)


class Exports(LinearTask):
    """Remembers what it exports."""

    def __init__(self, arguments):
        super().__init__(arguments)
        self.exported = []

    def export(self, path, model, weights, best):
        self.exported.append(best)
        return {}


def training(run, arguments, opened=FRESH, plan=None, model=None):
    """The linear layer's training, prepared."""
    task, plan = Exports(arguments), plan or make_plan(22, save_steps=3, eval_steps=3)
    data = task.load(run.launch, None)
    made = Training(run, arguments, task, data, plan, model or linear_layer(), opened=opened)
    return SimpleNamespace(made=made, state=made.state, task=task)


def fit(run, started):
    return started.made.fit()


# Before the run


def test_the_fingerprint_is_the_tasks_and_the_order_of_rows(arguments):
    plan = make_plan(22)
    found = start.make_fingerprint(arguments(seed=7, length_grouping=False), plan, {"labels": 3})
    order = {"global_batch_size": 8, "length_grouping": False, "seed": 7}
    assert found == {"labels": 3, **order, "optim": "adamw_torch_fused", "ema_decay": None}
    assert start.make_fingerprint(arguments(), None, {"labels": 3}) == {"labels": 3}


def test_the_direction_of_the_metric(start_run, arguments, tmp_path):
    def greater(metric, **given):
        asked = arguments(metric_for_best_model=metric, output_dir=str(tmp_path), **given)
        run = start_run(make_plan(22).batch)
        return training(run, asked).made.greater_is_better

    assert (greater("f1_macro"), greater("loss"), greater("eval_tuned_loss")) == (True, False, False)
    assert not greater("f1_macro", greater_is_better=False)
    assert greater("loss", greater_is_better=True)


# The run's folder


@pytest.fixture
def opened(start_run, arguments, tmp_path, monkeypatch):
    """Opens a run in tmp_path, as a second command would; returns the checkpoint to go on from."""
    run = start_run(make_plan(22).batch)

    def open_run(fingerprint=FINGERPRINT, plan=None, **given):
        asked = arguments(output_dir=str(tmp_path), **given)
        return start.open_run(run, asked, plan or make_plan(22), fingerprint, ["a note"], {"weights": [1]})

    yield open_run
    start.unlock()


def test_opening_writes_what_is_in_force(opened, tmp_path, capsys):
    assert opened(seed=5) == FRESH
    stored = json.loads((tmp_path / "run.json").read_text())
    assert stored["arguments"]["seed"] == 5
    assert (stored["world_size"], stored["launcher"], stored["device"], stored["zero_stage"]) == (
        1,
        "python",
        "cpu",
        0,
    )
    assert stored["plan"]["batch"]["global_batch_size"] == 8
    assert (stored["fingerprint"], stored["weights"]) == (FINGERPRINT, [1])
    assert stored["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    printed = capsys.readouterr().out
    assert "global batch   8 rows" in printed
    assert "note           a note" in printed


def test_a_folder_is_one_runs_at_a_time(opened):
    opened()
    with pytest.raises(InputError, match="in use by another run"):
        opened()
    start.unlock()
    opened()


def test_overwriting_clears_and_resuming_recovers(opened, tmp_path):
    opened(plan=make_plan(22, save_steps=3))
    start.unlock()
    (tmp_path / "metrics.json").write_text('{"eval_loss": 1.0}')
    (tmp_path / ".best.old").mkdir()
    opened(resume_from_checkpoint="auto")
    assert (tmp_path / "metrics.json").exists()
    assert (tmp_path / "best").is_dir()
    start.unlock()
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


def test_a_run_that_cannot_be_prepared_does_not_replace_another(
    opened, start_run, arguments, tmp_path, monkeypatch
):
    (tmp_path / "metrics.json").write_text('{"eval_loss": 1.0}')
    opening = opened(overwrite_output_dir=True)
    run = start_run(make_plan(22).batch)
    monkeypatch.setattr(
        type(run.accelerator), "prepare", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no room"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        training(run, arguments(output_dir=str(tmp_path)), opening)
    assert (tmp_path / "metrics.json").exists()


def test_auto_without_a_checkpoint_starts_from_the_beginning(opened, capsys):
    assert opened(resume_from_checkpoint="auto").resume is None
    assert "no checkpoint yet, starting from the beginning" in capsys.readouterr().out


def test_a_run_says_how_it_stands_and_may_take_so_long(opened, tmp_path):
    with signals.listen():
        opened(max_train_time=0.0001)
        assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
        assert signals.requested() == "--max_train_time 0.0001 is over"
    status.end("done")
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"


def test_what_a_crash_left_of_a_save_is_tidied_up(opened, tmp_path):
    opened(plan=make_plan(22, save_steps=3))
    start.unlock()
    (tmp_path / "checkpoints" / ".step_4.unfinished").mkdir(parents=True)
    (tmp_path / "history.jsonl").write_text("{}")
    opened(resume_from_checkpoint="auto")
    assert list((tmp_path / "checkpoints").iterdir()) == []


# Stop and go on


def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def mean_error(model):
    x, y = points(22)
    return (model(x) - y).square().mean().item()


@pytest.mark.parametrize(("optim", "optim_args", "kept"), OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_bytes(
    opened, start_run, arguments, tmp_path, optim, optim_args, kept
):
    if optim in ("adamw_bnb_8bit", "lion_32bit"):
        pytest.importorskip("bitsandbytes")
    asked = arguments(output_dir=str(tmp_path), optim=optim, optim_args=optim_args)
    run = start_run(make_plan(22).batch)
    whole = training(run, asked, model=two_layers())
    fit(run, whole)
    whole.made.tracker.close()
    history = (tmp_path / "history.jsonl").read_bytes()
    saved = (tmp_path / "checkpoints" / "step_6" / "optimizer.safetensors").read_bytes()

    opening = opened(resume_from_checkpoint=str(tmp_path / "checkpoints" / "step_3"))
    assert opening.resume.name == "step_3"
    run = start_run(make_plan(22).batch)
    torch.manual_seed(99)
    again = training(
        run, asked, opening, model=torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    )
    assert (again.state.step, again.state.updates) == (3, 3)
    fit(run, again)
    again.made.tracker.close()
    torch.testing.assert_close(again.made.model.state_dict(), whole.made.model.state_dict(), rtol=0, atol=0)
    assert (tmp_path / "history.jsonl").read_bytes() == history
    assert (tmp_path / "checkpoints" / "step_6" / "optimizer.safetensors").read_bytes() == saved
    assert len(history.splitlines()) == 8
    assert mean_error(whole.made.model) < mean_error(two_layers())
    with safe_open(tmp_path / "checkpoints" / "step_6" / "optimizer.safetensors", "pt") as file:
        assert sorted({name.partition("/")[0] for name in file.keys()}) == kept  # noqa: SIM118


def test_a_loss_scale_goes_on_where_it_was(opened, start_run, arguments, tmp_path):
    """fp16 as on a GPU, which the application refuses on a CPU: torch autocasts and scales there too, only
    slowly."""
    asked, plan = arguments(output_dir=str(tmp_path), seed=1), make_plan(22, save_steps=3, eval_steps=None)

    def scaled_run():
        run = start_run(plan.batch)
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=HUGE, growth_interval=2)
        run.accelerator.native_amp = True
        run.accelerator.state._mixed_precision = "fp16"
        return replace(run, launch=replace(run.launch, precision="fp16"))

    run = scaled_run()
    whole = training(run, asked, plan=plan, model=linear_layer())
    figures = fit(run, whole)
    whole.made.tracker.close()
    kept = json.loads((tmp_path / "checkpoints" / "step_3" / "state.json").read_text())
    assert 0 < figures["train_skipped_steps"] < 6
    assert kept["loss_scale"]["scale"] < HUGE
    assert kept["updates"] < 3  # the first ones overflowed
    end = run.accelerator.scaler.state_dict()
    assert end != kept["loss_scale"]  # it went on growing

    opening = opened(resume_from_checkpoint=str(tmp_path / "checkpoints" / "step_3"))
    run = scaled_run()
    again = training(run, asked, opening, plan=plan, model=torch.nn.Linear(3, 2))
    assert run.accelerator.scaler.state_dict() == kept["loss_scale"]
    assert fit(run, again)["train_skipped_steps"] == figures["train_skipped_steps"]
    again.made.tracker.close()
    assert run.accelerator.scaler.state_dict() == end
    torch.testing.assert_close(again.made.model.state_dict(), whole.made.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("best", ["there", "lost", "truncated", "of a later step"])
def test_a_best_model_that_is_lost_damaged_or_replaced_is_chosen_anew(start_run, arguments, tmp_path, best):
    asked = arguments(output_dir=str(tmp_path))
    run = start_run(make_plan(22).batch)
    fit(run, training(run, asked))
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"best_step": 6, "schema_version": 1}
    if best != "lost":
        (tmp_path / "best").mkdir()
        save_file({"weight": torch.zeros(9)}, tmp_path / "best" / "model.safetensors")
    if best == "truncated":
        os.truncate(tmp_path / "best" / "model.safetensors", 99)
    if best != "of a later step":
        write_json(tmp_path / "metrics.json", {"best_step": 3})
    state = training(run, asked, OpenedRun(FINGERPRINT, tmp_path / "checkpoints" / "step_3")).state
    assert (state.best_step, state.best_metric is None) == ((3, False) if best == "there" else (None, True))


@pytest.mark.parametrize("known", [True, False])
def test_a_best_model_is_never_compared_by_another_metric(start_run, arguments, tmp_path, capsys, known):
    asked = arguments(output_dir=str(tmp_path))
    run = start_run(make_plan(22).batch)
    fit(run, training(run, asked))
    (tmp_path / "best").mkdir()
    write_json(tmp_path / "metrics.json", {"best_step": 3})
    if known:
        path = tmp_path / "history.jsonl"
        path.write_text(path.read_text().replace('"eval_loss"', '"eval_f1": 0.75, "eval_loss"'))
    other = replace(asked, metric_for_best_model="f1")
    state = training(run, other, OpenedRun(FINGERPRINT, tmp_path / "checkpoints" / "step_3")).state
    assert (state.best_metric, state.best_metric_name, state.best_step) == (
        0.75 if known else None,
        "f1",
        3 if known else None,
    )
    assert "was chosen by loss" in capsys.readouterr().out


@pytest.mark.parametrize("chosen_before", ["loss", "f1"])
def test_losses_of_other_settings_are_never_compared(
    start_run, arguments, tmp_path, capsys, monkeypatch, chosen_before
):
    """Such as those of --loss bce and --loss focal: one is always lower."""
    asked = arguments(output_dir=str(tmp_path))
    run = start_run(make_plan(22).batch)
    monkeypatch.setattr(Exports, "loss_settings", {"kind": "bce"})
    fit(run, training(run, asked))
    (tmp_path / "best").mkdir()
    write_json(tmp_path / "metrics.json", {"best_step": 3})
    checkpoint_path = tmp_path / "checkpoints" / "step_3"
    if chosen_before == "f1":
        path = checkpoint_path / "state.json"
        write_json(path, {**json.loads(path.read_text()), "best_metric_name": "f1"})
    opened = OpenedRun(FINGERPRINT, checkpoint_path)
    if chosen_before == "loss":
        same = training(run, asked, opened).state
        assert (same.best_step, same.best_metric) == (3, same.best_loss)
    monkeypatch.setattr(Exports, "loss_settings", {"kind": "focal"})
    state = training(run, asked, opened).state
    assert (state.best_step, state.best_metric, state.best_loss) == (None, None, None)
    assert state.loss_settings == {"kind": "focal"}
    assert "has a loss of other settings" in capsys.readouterr().out


@pytest.mark.parametrize(("before", "told"), [("row", False), ("torch", True), (None, True)])
def test_a_checkpoint_of_another_dropout_is_gone_on_from_with_a_note(
    start_run, arguments, tmp_path, capsys, before, told
):
    """None: from before there was dropout by row."""
    asked, run = arguments(output_dir=str(tmp_path)), start_run(make_plan(22).batch)
    run = replace(run, launch=replace(run.launch, dropout_by_row=True))
    fit(run, training(run, asked))
    path = tmp_path / "checkpoints" / "step_3"
    state = json.loads((path / "state.json").read_text())
    assert state["dropout_by"] == "row"
    write_json(path / "state.json", {**state, "dropout_by": before})
    capsys.readouterr()
    assert training(run, asked, OpenedRun(FINGERPRINT, path)).state.dropout_by == "row"
    out = capsys.readouterr().out
    assert ("the checkpoint's steps had dropout by torch, from here on it is by row" in out) == told
    assert "dropout        by row" in out


def test_changed_arguments_are_named(opened, start_run, arguments, tmp_path, capsys):
    opened()
    start.unlock()
    run = start_run(make_plan(22).batch)
    fit(run, training(run, arguments(output_dir=str(tmp_path))))
    opened(resume_from_checkpoint="auto", learning_rate=0.5, gradient_checkpointing=True)
    changes = "--learning_rate was 5e-05, is now 0.5; --gradient_checkpointing was false, is now true"
    assert f"note           changed since the checkpoint: {changes}\n" in capsys.readouterr().out
    start.unlock()
    opened(resume_from_checkpoint="auto", learning_rate=0.5, gradient_checkpointing=True)
    assert "changed since" not in capsys.readouterr().out


def test_a_checkpoint_of_other_data_is_refused_before_run_json_is_written(
    opened, start_run, arguments, tmp_path
):
    asked = arguments(output_dir=str(tmp_path))
    run = start_run(make_plan(22).batch)
    fit(run, training(run, asked))
    with pytest.raises(InputError, match="rows was 22, is now 23"):
        opened({**FINGERPRINT, "rows": 23}, resume_from_checkpoint="auto")
    assert not (tmp_path / "run.json").exists()
    assert len(checkpoint.list_checkpoints(tmp_path / "checkpoints")) == 2


# What a run leaves


def test_the_best_models_figures_are_the_runs(start_run, arguments, tmp_path):
    asked = arguments(output_dir=str(tmp_path))
    run = start_run(make_plan(22).batch)
    started = training(run, asked)
    fit(run, started)
    metrics = started.made.finish()
    assert len(started.task.exported) >= 1
    assert (
        metrics["best_metric"]
        == metrics["eval_loss"]
        == started.task.score(started.task.exported[-1], None)["loss"]
    )


def test_without_an_evaluation_the_last_model_is_exported(start_run, arguments, tmp_path):
    asked = arguments(output_dir=str(tmp_path))
    run = start_run(make_plan(22).batch)
    started = training(run, asked, plan=make_plan(22))
    fit(run, started)
    assert started.task.exported == []
    assert started.made.finish() == {"best_step": 6, "best_metric": None}
    assert started.task.exported == [None]


def test_a_deepspeed_configuration_fits_into_run_json(tmp_path):
    plain = start._as_json_values({"a": math.inf, "b": {"dtype": torch.float32}})
    write_json(tmp_path / "run.json", plain)
    assert plain == {"a": "inf", "b": {"dtype": "torch.float32"}}
    assert start._as_json_values(None) is None


# --torch_compile


@pytest.mark.parametrize(("config", "compiled"), [(None, True), (2, True), (3, False)])
def test_layers_are_compiled_but_under_zero_3(
    start_run, arguments, tmp_path, monkeypatch, capsys, config, compiled
):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    run = start_run(make_plan(22).batch)
    stage = None if config is None else {"zero_optimization": {"stage": config}}
    run = replace(run, launch=replace(run.launch, deepspeed_config=stage))
    model = linear_layer()
    plain = model.forward
    training(run, arguments(output_dir=str(tmp_path), torch_compile=True), model=model)
    assert (model.forward != plain) == compiled
    assert ("--torch_compile is ignored under ZeRO-3" in capsys.readouterr().out) == (not compiled)
