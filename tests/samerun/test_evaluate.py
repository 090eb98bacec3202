import json
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from in_process import ProcessExit
from linear_task import LinearTask, eval_rows, linear_layer, points
from titlegen import Arguments

from samerun import evaluate as evaluation
from samerun import signals
from samerun.data.batches import EvalBatches
from samerun.errors import TrainingError
from samerun.evaluate import PARTS, SavedParts, evaluate, open_saved_parts, predict
from samerun.runtime import Run


def test_placeholders_are_no_rows(start_run, monkeypatch):
    """A process whose share is smaller than the others' has them."""
    rows = eval_rows(*points(11), 3)
    batches = list(rows.batches(1, 0))
    batches.append(replace(batches[0], rows=torch.full_like(batches[0].rows, -1)))
    expected, _ = predict(start_run(), linear_layer(), LinearTask(), rows)
    monkeypatch.setattr(EvalBatches, "batches", lambda *_: iter(batches))
    found, _ = predict(start_run(), linear_layer(), LinearTask(), rows)
    assert found["error"].tolist() == expected["error"].tolist()


def test_a_score_that_is_no_number_is_none():
    task = LinearTask()
    task.score = lambda *_: {
        "auc": torch.tensor(torch.nan),
        "ppl": float("inf"),
        "f1": None,
        "r": np.float32(3),
    }
    scores = evaluation.score(task, {}, None)
    assert json.dumps(scores) == '{"auc": null, "ppl": null, "f1": null, "r": 3.0}'


class Wide(LinearTask):
    """Arrays as wide as the longest row of a batch: of each row its number, as often as it is long."""

    def predict(self, model, batch):
        sizes = batch.rows.clamp(min=0) % 5 + 1
        inside = torch.arange(int(sizes.max())) < sizes[:, None]
        numbers = batch.rows[:, None].expand(inside.shape)
        return {
            "numbers": numbers.where(inside, -7),
            "shares": numbers.where(inside, -7)[..., None].float(),
            "flags": inside.to(torch.uint8),
        }


def check_wide(predictions, rows):
    sizes = np.arange(rows) % 5 + 1
    assert predictions["numbers"].shape == predictions["flags"].shape == (rows, 5)
    assert predictions["shares"].shape == (rows, 5, 1)
    for row, size in enumerate(sizes):
        assert predictions["numbers"][row, :size].tolist() == [row] * size
        assert set(predictions["numbers"][row, size:].tolist()) <= {-100, -7}
        assert predictions["flags"][row].sum() == size
    assert -100 in predictions["numbers"]  # the widest batch is wider than the others
    assert (predictions["shares"][..., 0] == predictions["numbers"]).all()


def test_batches_of_different_widths_are_filled_up(start_run, tmp_path):
    rows, run = eval_rows(*points(13), 2), start_run()
    predictions, _ = predict(run, linear_layer(), Wide(), rows)
    check_wide(predictions, 13)
    assert predictions["numbers"].dtype == np.int64
    # Parts are joined like batches.
    saved, _ = predict(
        run, linear_layer(), Wide(), rows, saved=SavedParts(run, tmp_path / "parts", "key", rows)
    )
    for name, values in predictions.items():
        np.testing.assert_array_equal(saved[name], values)


def test_out_of_memory_says_what_to_make_smaller(start_run):
    task = LinearTask()
    task.predict = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore"))
    told = r"while predicting a batch of 4 rows x 3\. Try a smaller --per_device_eval_batch_size "
    with pytest.raises(TrainingError, match=rf"{told}.*can't allocate memory\)$"):
        evaluate(start_run(), linear_layer(), task, eval_rows(*points(11), 4))


@pytest.mark.parametrize(
    ("change", "count"), [(lambda rows: rows[rows != 4], 10), (lambda rows: rows.clip(max=9), 11)]
)
def test_a_row_that_is_missing_or_comes_twice_is_no_evaluation(start_run, monkeypatch, change, count):
    real = Run.gather_rows
    monkeypatch.setattr(
        Run, "gather_rows", lambda run, rows: real(run, rows if rows.is_floating_point() else change(rows))
    )
    with pytest.raises(TrainingError, match=f"saw {count} rows instead of each of 11 once"):
        evaluate(start_run(), linear_layer(), LinearTask(), eval_rows(*points(11)))


def test_evaluation_leaves_the_model_as_it_was(start_run):
    run, x = start_run(), points(11)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), linear_layer())
    model.train()
    first, _ = evaluate(run, model, LinearTask(), eval_rows(*x))
    again, _ = evaluate(run, model, LinearTask(), eval_rows(*x))
    assert first == again  # no dropout
    assert model.training
    model.eval()
    predict(run, model, LinearTask(), eval_rows(*x))
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_all_of_a_prediction_has_the_runs_precision(start_run, precision):
    """Also what does not go through the prepared model, such as a search for words."""
    found = []

    class Looks(LinearTask):
        def predict(self, model, batch):
            found.append(torch.is_autocast_enabled("cpu"))
            return super().predict(model, batch)

    predict(start_run(precision=precision), linear_layer(), Looks(), eval_rows(*points(3)))
    assert found == [precision == "bf16"]


ROWS, BATCH = 203, 2


class Counts(LinearTask):
    """Counts rows; is killed before it predicts another one."""

    def __init__(self, most=ROWS):
        super().__init__()
        self.done, self.most = 0, most

    def predict(self, model, batch):
        if self.done >= self.most:
            raise ProcessExit
        self.done += len(batch.rows)
        return {**super().predict(model, batch), "numbers": batch.rows}


@pytest.fixture
def attempt(start_run, tmp_path):
    """Predicts with a task that is killed after some rows, from what is kept: (task, predictions, kept)."""
    run, folder = start_run(), tmp_path / "predictions.jsonl.unfinished"

    def begin(most=ROWS, model=1):
        task, rows = Counts(most), eval_rows(*points(ROWS), BATCH)
        kept = SavedParts(run, folder, f"hash {model}", rows)
        try:
            predictions, _ = predict(run, linear_layer(), task, rows, saved=kept)
        except ProcessExit:
            predictions = None
        return task, predictions, kept

    return begin


def test_a_killed_prediction_loses_a_twentieth_and_ends_with_the_same_arrays(attempt, start_run, tmp_path):
    expected, _ = predict(start_run(), linear_layer(), Counts(), eval_rows(*points(ROWS), BATCH))
    first, nothing, _ = attempt(most=126)
    assert nothing is None
    second, _, _ = attempt(most=50)  # killed again
    last, predictions, kept = attempt()
    assert ROWS <= first.done + second.done + last.done <= ROWS + 2 * (ROWS / PARTS + BATCH)
    assert predictions.keys() == expected.keys()
    for name, values in expected.items():
        assert values.dtype == predictions[name].dtype
        np.testing.assert_array_equal(predictions[name], values)
    assert predictions["numbers"].tolist() == list(range(ROWS))
    kept.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_prediction_says_how_to_go_on(arguments, start_run, tmp_path, monkeypatch):
    monkeypatch.setattr(signals._requests, "stop_message", signals.NOTHING_TO_SAVE)
    rows = eval_rows(*points(ROWS), BATCH)
    rows = replace(rows, split=replace(rows.split, content=lambda: "hash"))
    for place, said in (("-", signals.NOTHING_TO_SAVE), ("a.jsonl", "goes on after the last part")):
        given = {"output_dir": str(tmp_path), "predictions_file": place, "do_predict": True}
        kept = open_saved_parts(start_run(), arguments(do_train=True, **given), {}, rows)
        assert said in signals._requests.stop_message
    assert "the same command with --resume_from_checkpoint auto" in signals._requests.stop_message
    kept.remove()
    assert signals._requests.stop_message == signals.NOTHING_TO_SAVE
    monkeypatch.setattr(Run, "broadcast", lambda run, value: "-")  # rank 0's, which decides for all
    assert open_saved_parts(start_run(), arguments(**given), {}, rows) is None


def test_another_prediction_begins_anew_and_is_not_mixed_with_the_old_parts(attempt):
    attempt(most=120)
    task, _, _ = attempt(model=2, most=50)  # writes over some of them
    assert task.done == 50
    last, predictions, _ = attempt(model=2)
    assert ROWS - 50 <= last.done < ROWS
    assert predictions["numbers"].tolist() == list(range(ROWS))


def test_a_file_of_settings_with_another_content_makes_another_prediction(start_run, tmp_path):
    search, hashes = tmp_path / "search.json", set()
    given = {"output_dir": "a", "model_name_or_path": "b", "generation_config": str(search)}
    rows = replace(eval_rows(*points(3)).split, content=lambda: "rows")
    for content in ("{}", '{"top_k": 1}'):
        search.write_text(content)
        hashes.add(evaluation._hash_of_causes(start_run(), Arguments(**given), {}, EvalBatches(rows, 2)))
    assert len(hashes) == 2


def test_a_damaged_part_is_predicted_again(attempt, tmp_path):
    attempt(most=120)
    folder = tmp_path / "predictions.jsonl.unfinished"
    part = folder / "part-2.npz"
    part.write_bytes(part.read_bytes()[:100])
    _, predictions, kept = attempt()
    assert predictions["numbers"].tolist() == list(range(ROWS))
    assert kept.num_batches > 0


def test_a_full_disk_keeps_nothing(attempt, tmp_path, capsys):
    folder = tmp_path / "predictions.jsonl.unfinished"
    folder.write_text("a file where the folder should be")
    _, predictions, _ = attempt()
    assert len(predictions["error"]) == ROWS
    assert capsys.readouterr().out.count("cannot be written (File exists)") == 1
    assert list(tmp_path.iterdir()) == [folder]
