"""Passes that are replayed as CUDA graphs: the same numbers; passes that cannot be recorded are done."""

from functools import partial

import pytest
from tiny_models import KINDS, batches, build, prepared

from samerun.data.batches import train_loader
from samerun.graphs import Passes
from samerun.training import add_gradient, seed_step, train_step

STEPS = 12  # three epochs: shapes come back


@pytest.fixture
def train(start_gpu_run, arguments):
    """A function that trains, and returns the losses and, if `records`, the passes and what they said."""

    def train(kind, precision, records):
        steps, model, said = batches(kind), build(kind), []
        run, task = start_gpu_run(steps.plan.batch, precision), KINDS[kind][0]
        model, optimizer = prepared(run, model, arguments())
        work, losses = partial(add_gradient, run, model, task), []
        passes = Passes(work, model, said.append) if records else None
        for step, micro_batches in zip(range(STEPS), train_loader(steps, 0, 0, True), strict=False):
            seed_step(1, step, 0, False)
            loss, _ = train_step(run, model, optimizer, task, micro_batches, 1.0, passes=passes)
            losses.append(loss.item())
        return losses, passes, said

    return train


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", ["padded", "titles"])
def test_replayed_passes_give_the_same_numbers(kind, precision, train):
    losses, passes, said = train(kind, precision, True)
    assert said == []
    assert passes.recorded
    plain, *_ = train(kind, precision, False)
    # Attention over the 500 tokens of "titles" adds gradients in any order.
    assert losses == (
        plain if kind == "padded" else pytest.approx(plain, rel=1e-4 if precision == "no" else 2e-2)
    )


def test_passes_that_depend_on_lengths_are_done_one_by_one(train):
    losses, passes, said = train("blocks", "no", True)
    assert not passes.active
    assert "no CUDA graphs" in said[0]
    assert losses == pytest.approx(train("blocks", "no", False)[0], rel=1e-4)
