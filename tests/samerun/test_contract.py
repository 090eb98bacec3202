"""What a task of one's own may get wrong is found before the first step."""

import random
import re
from dataclasses import replace

import pytest
import torch
from linear_task import LinearTask, linear_layer, points, split_of

from samerun.contract import losses_add_up
from samerun.errors import TrainingError


class Own(LinearTask):
    """`change`: (the rows' losses, the batch) -> loss_sum; `count`: (targets, the batch) -> num_targets."""

    def __init__(self, change=lambda losses, batch: (losses * batch.is_real).sum(), count=lambda n, batch: n):
        super().__init__()
        self.change, self.count = change, count

    def loss_sum(self, model, batch):
        return self.change((model(batch.inputs["x"]) - batch.labels).square().sum(1), batch)

    def num_targets(self, batch):
        return self.count(super().num_targets(batch), batch)


@pytest.fixture
def check(start_run):
    """A function (task, number of rows, changes of the batch) -> `losses_add_up`."""

    def run_check(task, rows=3, precision="no", **changes):
        batch = replace(split_of(*points()).collate(range(rows)), **changes)
        return losses_add_up(start_run(precision=precision), linear_layer(), task, batch)

    return run_check


def test_sums_of_rows_pass_without_a_word(check, capsys):
    assert check(Own())
    assert check(Own(), rows=1)
    assert capsys.readouterr().out == ""


def test_rounding_passes(check, capsys):
    slightly = lambda losses, batch: (losses * batch.is_real).sum() * (1 + 1e-3 * batch.is_real.sum())  # noqa: E731
    assert check(Own(slightly), precision="bf16")
    assert capsys.readouterr().out == ""


def test_random_numbers_and_weights_as_targets_pass(check, capsys):
    assert check(Own(lambda losses, batch: (losses * batch.is_real).sum() * random.random()))
    assert check(Own(count=lambda n, batch: ((batch.rows + 1) * 0.1).sum()))  # 0.1 and 0.2 are not 0.3
    assert capsys.readouterr().out == ""


def test_a_loss_that_cannot_be_tried_is_noted(check, capsys):
    assert check(Own(lambda losses, batch: torch.autograd.grad(losses.sum(), losses)[0].sum()))
    assert re.search(r"note +loss_sum is not tried .* \(RuntimeError: element 0", capsys.readouterr().out)


def test_two_rows_are_not_compiled_for(start_run):
    model = linear_layer()
    model.forward = torch.compile(model.forward, backend=lambda *_: pytest.fail("compiled"))
    assert losses_add_up(start_run(), model, Own(), split_of(*points()).collate(range(3)))


@pytest.mark.parametrize(
    "change",
    [
        lambda losses, batch: (losses * batch.is_real).sum() / batch.is_real.sum().clamp(min=1),
        lambda losses, batch: (torch.cdist(losses[:, None], losses[:, None]) * batch.is_real).sum(),
        # As the balance of the experts of a mixture, with a small weight.
        lambda losses, batch: (losses * batch.is_real).sum() * (1 + 1e-3 * batch.is_real.sum()),
    ],
    ids=["a mean", "coupled rows", "slightly coupled rows"],
)
def test_losses_that_do_not_add_up_are_noted(check, capsys, change):
    assert not check(Own(change))
    assert re.search(
        r"note +loss_sum of two rows is [\d.]+, of each alone [\d.]+ and", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            Own(lambda losses, batch: losses.sum()),
            r"a placeholder has loss [\d.]+ and 0 targets, expected 0 and 0",
        ),
        (Own(count=lambda n, batch: torch.tensor(len(batch.rows))), "a placeholder has loss 0 and 1 targets"),
        (Own(count=lambda n, batch: -n), "num_targets: -4 for rows with a loss of"),
        (Own(count=lambda n, batch: 0 * n), "num_targets: 0 for rows with a loss of"),
        (
            Own(count=lambda n, batch: n.clamp(max=2)),
            r"num_targets: 2 for two rows, \(2.0, 2.0\) for each of them",
        ),
        (Own(lambda losses, batch: None), r"loss_sum: gives NoneType, expected a tensor of shape \(\)"),
        (
            Own(lambda losses, batch: losses),
            r"loss_sum: gives torch.Size\(\[2\]\), expected a tensor of shape",
        ),
        (Own(count=lambda n, batch: 2), "num_targets: gives int, expected a tensor"),
    ],
)
def test_what_cannot_be_added_up_is_refused(check, task, message):
    with pytest.raises(TrainingError, match=message):
        check(task)


def test_an_input_without_rows_is_refused(check):
    with pytest.raises(TrainingError, match=r"collate: heat has the shape \(\), expected \(3, \.\.\.\)"):
        check(Own(), inputs={"x": torch.ones(3, 3), "heat": torch.tensor(1.0)})
