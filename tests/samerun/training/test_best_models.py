import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from linear_task import LinearTask, eval_rows, points
from safetensors.torch import load_file, save_file

from samerun.checkpoint import TrainState
from samerun.errors import InputError
from samerun.output.run_folder import replace_folder
from samerun.training.best_models import AveragedFiles, BestModels, check_space


class Model(torch.nn.Module):
    """A weight, one that is frozen, and batch norm."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.norm = torch.nn.BatchNorm1d(1, affine=False)


class NearOne(LinearTask):
    """Its loss is the weight's distance from 1."""

    def predict(self, model, batch):
        return {"error": (model.weight - 1).abs().expand(len(batch.rows))}

    def export(self, path, model, weights, best):
        replace_folder(path, lambda place: save_file(weights, place / "model.safetensors"))
        return {}


@pytest.fixture
def best_models(start_run, tmp_path):
    """(BestModels, its model, what evaluates a weight at a step as a run does)."""
    run, task, model = start_run(), NearOne(), Model()

    def make(**given):
        made = BestModels(run=run, folder=tmp_path, task=task, model=model, greater_is_better=False, **given)

        def evaluated(state, step, weight):
            model.weight.data.fill_(weight)
            model.norm.running_mean.fill_(10 * weight)
            model.norm.num_batches_tracked.fill_(step)
            state.step, loss = step, abs(weight - 1)
            if state.best_metric is None or loss < state.best_metric:
                state.best_step, state.best_metric, state.best_loss, state.best_metric_name = (
                    step,
                    loss,
                    loss,
                    "loss",
                )
                export(made)(None)
            made.add(state, loss, loss, None)

        return made, model, evaluated

    return make


def export(made):
    return lambda best: made.task.export(
        made.folder / "best", made.model, dict(made.model.state_dict()), best
    )


def steps(folder):
    return sorted(path.name for path in folder.glob("step_*"))


def exported_weight(folder):
    return load_file(folder / "model.safetensors")["weight"].item()


def end(made, state):
    return made.export_average(state, eval_rows(*points(22)), export(made))


def test_the_best_models_are_kept(best_models, tmp_path):
    (_, _, evaluated), state = best_models(keep_best=2), TrainState()
    for step, weight in enumerate([0.0, 0.5, 0.25, 0.75], start=1):
        evaluated(state, step, weight)
    assert state.kept == [{"step": 4, "metric": 0.25, "loss": 0.25}, {"step": 2, "metric": 0.5, "loss": 0.5}]
    assert steps(tmp_path / "best_models") == ["step_2", "step_4"]
    assert exported_weight(tmp_path / "best_models" / "step_2") == 0.5
    assert exported_weight(tmp_path / "best_models" / "step_4") == exported_weight(tmp_path / "best") == 0.75
    assert not (tmp_path / "kept_weights").exists()


def test_nothing_more_is_kept_by_default(best_models, tmp_path):
    (_, _, evaluated), state = best_models(), TrainState()
    evaluated(state, 1, 0.5)
    assert state.kept == []
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_equal_metrics_are_ordered_by_loss_then_by_step(best_models):
    made, _, _ = best_models(keep_best=2)
    found = [
        {"step": s, "metric": 0.5, "loss": loss} for s, loss in ((1, None), (2, 0.3), (3, 0.2), (4, 0.2))
    ]
    assert [each["step"] for each in sorted(found, key=made.rank)] == [3, 4, 2, 1]


def test_a_mean_that_is_better_is_exported_and_the_best_model_alone_stays_beside_it(
    best_models, tmp_path, capsys
):
    (made, model, evaluated), state = best_models(num_averaged=2), TrainState()
    for step, weight in enumerate([5.0, 0.5, 1.75], start=1):
        evaluated(state, step, weight)
    assert set(load_file(tmp_path / "kept_weights" / "step_2" / "model.safetensors")) == {
        "weight", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
    }  # fmt: skip
    model.frozen.data.fill_(3.0)
    found = end(made, state)
    of_the_mean = dict.fromkeys(("average_metric", "best_metric", "eval_loss"), 0.125)
    assert found == {"averaged_steps": [2, 3], "exported": "average", **of_the_mean}
    exported = load_file(tmp_path / "best" / "model.safetensors")
    assert {name: tensor.item() for name, tensor in exported.items()} == {
        "weight": 1.125, "frozen": 3.0, "norm.running_mean": 11.25, "norm.running_var": 1.0,
        "norm.num_batches_tracked": 2
    }  # fmt: skip
    assert exported_weight(tmp_path / "best_models" / "step_2") == 0.5
    assert "of steps 2, 3: loss 0.1250; step 2 alone: 0.5000; best/ is the average" in capsys.readouterr().out
    assert end(made, state) == found  # as the command does when it is given again


def test_a_mean_that_is_worse_is_not_exported(best_models, tmp_path):
    (made, _, evaluated), state = best_models(num_averaged=2, keep_best=3), TrainState()
    for step, weight in enumerate([1.25, 0.0, 3.5], start=1):
        evaluated(state, step, weight)
    assert steps(tmp_path / "kept_weights") == ["step_1", "step_2"]
    made.task.export(tmp_path / "best", None, {"weight": torch.tensor([9.0])}, None)  # an earlier end's mean
    assert end(made, state) == {"averaged_steps": [1, 2], "average_metric": 0.375, "exported": "best"}
    assert exported_weight(tmp_path / "best") == 1.25


def test_one_evaluation_has_no_mean(best_models, capsys):
    (made, _, evaluated), state = best_models(num_averaged=3), TrainState()
    evaluated(state, 1, 0.5)
    assert end(made, state) == {"exported": "best"}
    assert "fewer than two evaluations" in capsys.readouterr().out


def test_a_resumed_run_forgets_what_is_gone(best_models, tmp_path, capsys):
    (made, _, evaluated), state = best_models(num_averaged=2, keep_best=3), TrainState()
    for step, weight in enumerate([0.5, 0.25, 0.0], start=1):
        evaluated(state, step, weight)
    again = TrainState(**json.loads(json.dumps({"kept": state.kept})))
    made.forget_missing(again)
    assert again.kept == state.kept
    assert capsys.readouterr().out == ""
    shutil.rmtree(tmp_path / "kept_weights" / "step_2")
    shutil.rmtree(tmp_path / "best_models" / "step_3")
    made.forget_missing(again)
    assert [each["step"] for each in again.kept] == [1]
    assert "the kept models of step 2, 3 are missing in" in capsys.readouterr().out


def test_means_are_of_floating_point_numbers_in_double_precision(tmp_path):
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        save_file({"w": torch.tensor([1e8, 1.0, -1e8])[[number]], "n": torch.tensor([number + 5])}, path)
    mean = AveragedFiles(paths)
    assert {name: tensor.item() for name, tensor in mean.items()} == {"n": 5, "w": pytest.approx(1 / 3)}
    assert "w" in mean
    assert "v" not in mean


@pytest.mark.parametrize(
    ("given", "needed"),
    # a model has 24 bytes, 16 of them batch norm's; 20 are averaged, and a checkpoint has 8 of moments
    # besides
    [
        ({}, 0),
        ({"keep_best": 3}, 5 * 24 + 4 * 28),
        ({"average_checkpoints": 3, "save_strategy": "no"}, 3 * 24 + 4 * 20),
        ({"average_checkpoints": 2, "keep_best": 2, "save_total_limit": 1}, 4 * 24 + 3 * 20 + 3 * 28),
    ],
)
def test_room_for_what_is_kept_is_needed_before_the_training(arguments, tmp_path, monkeypatch, given, needed):
    asked, model = arguments(output_dir=str(tmp_path), **given), Model()
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "model.safetensors").write_bytes(bytes(30))  # which the run's own replaces
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 30))
    check_space(tmp_path, asked, model, 8.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 31))
    if given:
        with pytest.raises(InputError, match=r"--(keep_best|average_checkpoints) \d.*Free space"):
            check_space(tmp_path, asked, model, 8.0)
