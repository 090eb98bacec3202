import shutil
from dataclasses import replace

import pytest
import torch
from linear_task import LinearTask, make_plan, points, split_of
from safetensors.torch import load_file, save_file

from samerun.best_models import ranked, recover
from samerun.files import replace_folder
from samerun.start import OpenedRun
from samerun.task import Data
from samerun.training import Training

EVALUATIONS = [(1, 0.0), (2, 0.5), (3, 0.25), (4, 0.75)]  # (step, weight)


class NearOne(LinearTask):
    """Its loss is the weight's distance from 1."""

    def predict(self, model, batch):
        return {"error": (model.weight - 1).abs().expand(len(batch.rows))}

    def export(self, path, model, weights, best):
        replace_folder(path, lambda place: save_file(weights, place / "model.safetensors"))
        return {}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


@pytest.fixture
def begin(start_run, arguments, tmp_path):
    """A function that makes a training of `Model` and evaluates it with the weights of `EVALUATIONS`."""

    def prepare(evaluations=EVALUATIONS, resume=None, **given):
        split, plan = split_of(*points(22)), make_plan(22, save_steps=100)
        asked = arguments(output_dir=str(tmp_path), **given)
        run, opened = start_run(plan.batch), OpenedRun({}, resume=resume)
        data = Data({"train": split, "validation": split}, {})
        training = Training(run, asked, NearOne(), data, plan, Model(), opened=opened)
        for step, weight in evaluations:
            training.state.step = step
            training.model.weight.data.fill_(weight)
            training._evaluate()
        return training

    return prepare


def kept(folder):
    models = sorted((folder / "best_models").glob("step_*"))
    return {path.name: load_file(path / "model.safetensors")["weight"].item() for path in models}


def test_the_best_models_are_kept(begin, tmp_path):
    state = begin(keep_best=2).state
    assert state.kept == [{"step": 4, "metric": 0.25, "loss": 0.25}, {"step": 2, "metric": 0.5, "loss": 0.5}]
    assert kept(tmp_path) == {"step_2": 0.5, "step_4": 0.75}
    assert load_file(tmp_path / "best" / "model.safetensors")["weight"].item() == 0.75


def test_nothing_more_is_kept_by_default(begin, tmp_path):
    assert begin().state.kept == []
    assert not (tmp_path / "best_models").exists()


def test_equal_metrics_are_ordered_by_loss_then_by_step():
    found = [
        {"step": s, "metric": 0.5, "loss": loss} for s, loss in ((1, None), (2, 0.3), (3, 0.2), (4, 0.2))
    ]
    assert [each["step"] for each in ranked(found, False)] == [3, 4, 2, 1]


def test_a_resumed_run_forgets_what_is_gone(begin, tmp_path, capsys):
    training = begin(keep_best=3)
    training._save()
    training._wait_for_checkpoint()
    checkpoint = tmp_path / "checkpoints" / "step_4"
    assert begin((), checkpoint, keep_best=3).state.kept == training.state.kept
    assert "missing" not in capsys.readouterr().out
    shutil.rmtree(tmp_path / "best_models" / "step_2")
    again = begin((), checkpoint, keep_best=3)
    assert [each["step"] for each in again.state.kept] == [4, 3]
    assert "the kept models of step 2 are missing in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metric", "loss", "said"),
    [("f1", "bce", "was chosen by loss, not by f1"), (None, "focal", "has a loss of other settings")],
)
def test_values_of_another_metric_or_loss_are_never_compared(begin, tmp_path, metric, loss, said):
    state, task = begin(keep_best=2).state, NearOne(best_metric=metric)
    state.loss_settings, task.loss_settings = {"kind": "bce"}, {"kind": loss}
    shutil.rmtree(tmp_path / "best")
    (note,) = recover(tmp_path, replace(state), task, 2, complete=True)[1]
    assert note.endswith(f"is not in {tmp_path}; the last model is exported")
    state, (note,) = recover(tmp_path, state, task, 2, False)
    assert (state.kept, state.best_metric, state.best_step) == ([], None, None)
    assert f"(step 4) {said}" in note
    assert note.endswith("; later evaluations choose a new one")
