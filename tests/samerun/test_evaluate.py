import pytest
import torch
from linear_task import LinearTask, eval_rows, linear_layer, points

from samerun.errors import TrainingError
from samerun.evaluate import evaluate, predict
from samerun.runtime import Run


def test_evaluation_gives_each_rows_arrays_in_file_order(start_run):
    (x, y), layer = points(11), linear_layer()
    metrics, predictions = evaluate(start_run(), layer, LinearTask(), eval_rows(x, y, 3))
    errors = (layer(x) - y).square().mean(1)
    assert predictions["error"].tolist() == pytest.approx(errors.tolist(), rel=1e-6)
    assert metrics == {"loss": pytest.approx(errors.mean().item(), rel=1e-6)}


class Hungry(LinearTask):
    def predict(self, model, batch):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")


def test_out_of_memory_says_what_to_make_smaller(start_run):
    told = (
        r"while predicting a batch of 4 rows x 3\. Try a smaller --per_device_eval_batch_size .*can't "
        r"allocate memory\)$"
    )
    with pytest.raises(TrainingError, match=told):
        evaluate(start_run(), linear_layer(), Hungry(), eval_rows(*points(11), 4))


@pytest.mark.parametrize("batch_size", [1, 4, 50])
def test_metrics_do_not_depend_on_the_batch_size(start_run, batch_size):
    (x, y), layer = points(11), linear_layer().double()
    x, y = x.double(), y.double()
    metrics, _ = evaluate(start_run(), layer, LinearTask(), eval_rows(x, y, batch_size))
    assert metrics["loss"] == pytest.approx((layer(x) - y).square().mean().item(), rel=1e-12)


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
