import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from samerun.plan import check_schedule, lr_multiplier


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1, 1, 0.5]),
        ("linear", 4, [0.25, 0.5, 0.75, 1]),
        ("constant", 0, [1, 1, 1, 1]),
        ("constant_with_warmup", 2, [0.5, 1, 1, 1]),
        ("cosine", 0, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        ("cosine", 2, [0.5, 1, 1, 0.5]),
        ("multistep", 0, [1, 0.1, 0.01, 0.001]),
        ("multistep", 2, [0.5, 1, 0.01, 0.001]),
    ],
)
def test_learning_rate_of_each_step(kind, warmup, expected):
    assert [lr_multiplier(step, 4, warmup, kind) for step in range(4)] == pytest.approx(expected, abs=1e-15)


@given(
    st.integers(1, 50), st.data(), st.sampled_from(["linear", "cosine", "constant", "constant_with_warmup"])
)
def test_learning_rate_rises_then_falls_and_never_is_zero(total, data, kind):
    warmup = data.draw(st.integers(0, total))
    rates = [lr_multiplier(step, total, warmup, kind) for step in range(total)]
    assert max(rates) == 1
    assert min(rates) > 0
    assert rates == sorted(rates[:warmup]) + sorted(rates[warmup:], reverse=True)
    if kind in ("linear", "cosine") and warmup < total:
        assert (
            lr_multiplier(total + 3, total, warmup, kind) == 0
        )  # a resumed run that is longer than its plan stays at 0


def test_multistep_is_torchs_multi_step_lr():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 18], gamma=0.3)
    for step in range(37):
        rate = lr_multiplier(step, 37, 0, "multistep", {"milestones": [0.2, 0.5], "gamma": 0.3})
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(
    ("kind", "settings", "theirs"),
    [
        ("cosine_with_restarts", {"num_cycles": 3}, {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}, {}),
        ("polynomial", {"power": 2.0}, {"lr_end": 0.0}),  # theirs ends above 0 by default
        ("inverse_sqrt", {}, {}),
        ("inverse_sqrt", {"timescale": 9}, {}),
        ("warmup_stable_decay", {"num_decay_steps": 5, "min_lr_ratio": 0.1}, {}),
    ],
)
def test_behind_the_warm_up_schedules_are_those_of_transformers(kind, settings, theirs, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(
        kind, optimizer, warmup, 20, scheduler_specific_kwargs={**settings, **theirs}
    ).lr_lambdas[0]
    for step in range(warmup, 20):
        assert lr_multiplier(step, 20, warmup, kind, settings) == pytest.approx(schedule(step), abs=1e-12), (
            step
        )


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        ("linear", {"power": 2}, "linear has no power; it has no settings"),
        ("cosine_with_restarts", {"cycles": 2}, "cosine_with_restarts has no cycles; it has num_cycles"),
        ("polynomial", {"power": "2"}, "power is '2', expected a number of at least 0"),
        ("multistep", {"milestones": 0.5}, "milestones is 0.5, expected a list of numbers"),
    ],
)
def test_settings_that_a_schedule_does_not_have(kind, settings, problem):
    assert check_schedule(kind, settings) == [f"--lr_scheduler_kwargs: {problem}"]
    assert check_schedule("polynomial", {"power": 2}) == []
