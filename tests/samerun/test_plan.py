import math
from types import SimpleNamespace

import image_classify
import numpy as np
import pytest
import torch
from classify import Arguments
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from samerun.errors import InputError
from samerun.plan import (
    CPU_PASS_TOKENS,
    CPU_TOKENS,
    BatchShape,
    batch_of,
    check_schedule,
    derive_batch,
    describe,
    evaluation_batch,
    lr_multiplier,
    make_plan,
)
from samerun.task import Split

SIZES = st.integers(1, 300)


def plan_of(arguments, rows, processes, use_cpu=False, deepspeed=None, enough=400):
    split = Split("rows", None, rows, lengths=np.ones(rows), enough_updates=enough)
    launch = SimpleNamespace(world_size=processes, use_cpu=use_cpu, deepspeed_config=deepspeed)
    return make_plan(arguments, split, launch)


def check_shape(batch):
    """The passes hold the global batch; one row a pass less, or one pass less, would not."""
    passes = batch.world_size * batch.accumulation
    assert (batch.micro_batch_size - 1) * passes < batch.global_batch_size <= batch.micro_batch_size * passes
    assert 1 <= batch.accumulation <= math.ceil(batch.global_batch_size / batch.world_size)


@given(SIZES, SIZES, SIZES)
def test_accumulation_is_derived_from_an_upper_bound(world_size, total, most):
    batch = derive_batch(world_size, total, per_device_train_batch_size=most)
    check_shape(batch)
    assert (batch.global_batch_size, batch.world_size) == (total, world_size)
    assert batch.micro_batch_size <= most
    assert (batch.accumulation - 1) * most * world_size < total  # no pass more than needed


@given(SIZES, SIZES, SIZES)
def test_micro_batch_is_derived_from_the_accumulation(world_size, total, accumulation):
    batch = derive_batch(world_size, total, gradient_accumulation_steps=accumulation)
    check_shape(batch)
    assert batch.accumulation == min(accumulation, math.ceil(total / world_size))


@given(SIZES, SIZES, SIZES)
def test_global_batch_is_the_product_of_the_others_as_in_transformers(world_size, micro, accumulation):
    assert derive_batch(world_size, None, micro, accumulation) == BatchShape(
        world_size * micro * accumulation, world_size, micro, accumulation, follows_processes=True
    )
    assert image_classify.Arguments(per_device_train_batch_size=8).global_batch_size is None
    assert image_classify.Arguments(model_name_or_path="a", output_dir="b").global_batch_size == 32


@given(SIZES, SIZES, SIZES, SIZES)
def test_all_three_agree_or_are_refused(world_size, total, micro, accumulation):
    agree = accumulation == derive_batch(world_size, total, micro).accumulation
    if agree:
        assert derive_batch(world_size, total, micro, accumulation) == derive_batch(world_size, total, micro)
    else:
        with pytest.raises(InputError, match="contradict each other"):
            derive_batch(world_size, total, micro, accumulation)


def test_plan_of_a_run(arguments):
    plan = plan_of(
        arguments(global_batch_size=10, num_train_epochs=2.5, warmup_steps=0.1, save_steps=0), 101, 2
    )
    assert (plan.steps_per_epoch, plan.total_steps, plan.warmup_steps) == (11, 28, 3)
    assert (plan.eval_steps, plan.save_steps, plan.logging_steps) == (11, None, 10)
    assert [plan.epoch_of(step) for step in (0, 10, 11, 27)] == [(0, 0), (0, 10), (1, 0), (2, 5)]
    assert plan.batch == derive_batch(2, 10)


@pytest.mark.parametrize(
    ("rows", "epochs", "steps", "enough"),
    [
        (64, 30, 60, 400), (640, 20, 400, 400), (650, 20, 420, 400), (100_000, 3, 9375, 400),
        (7006, 7, 1533, 1350),
    ],
)  # fmt: skip
@pytest.mark.parametrize("processes", [1, 8])
def test_a_task_chooses_its_epochs_by_the_data_and_global_batch(rows, epochs, steps, enough, processes):
    given = {"output_dir": "runs/a", "learning_rate": 1e-4, "global_batch_size": 32}
    plan = plan_of(Arguments(**given), rows, processes, enough=enough)
    assert (plan.chosen_epochs, plan.total_steps) == (epochs, steps)
    assert f"of {rows} rows x {epochs}; --num_train_epochs sets it" in describe(plan)[1]
    for rate in (2e-4, 3e-4):
        asked = Arguments(**given | {"num_train_epochs": 2, "learning_rate": rate})
        plan = plan_of(asked, rows, processes, enough=enough)
        notes = [line for line in describe(plan) if line.endswith(f"there are {steps}")]
        assert len(notes) == (rate == 2e-4 and plan.total_steps < min(enough, steps))


def test_steps_asked_for_win_over_epochs(arguments):
    plan = plan_of(
        arguments(max_steps=7, eval_strategy="steps", eval_steps=3, save_steps=4, warmup_steps=7), 1000, 1
    )
    assert (plan.total_steps, plan.warmup_steps, plan.eval_steps, plan.save_steps) == (7, 7, 3, 4)
    assert plan_of(arguments(eval_strategy="no", do_eval=False), 5, 1).eval_steps is None
    at_the_end = plan_of(arguments(eval_strategy="no", max_steps=7), 5, 1)
    assert [step for step in range(1, 8) if at_the_end.due(step, at_the_end.eval_steps)] == [7]
    assert [step for step in range(1, 8) if plan.due(step, 3)] == [3, 6, 7]
    assert not any(plan.due(step, None) for step in range(1, 8))
    assert plan_of(arguments(num_train_epochs=0.01), 40, 1).total_steps == 1


def test_shares_of_all_steps_and_the_strategy_of_saving(arguments):
    given = {"warmup_steps": 0.1, "eval_steps": 0.25, "save_steps": 0.5, "logging_steps": 0.01}
    plan = plan_of(arguments(max_steps=50, eval_strategy="steps", **given), 100, 1)  # 4 steps of 32
    assert (plan.warmup_steps, plan.eval_steps, plan.save_steps, plan.logging_steps) == (5, 13, 25, 1)
    strategies = [({}, 4), ({"save_strategy": "epoch"}, 4), ({"save_strategy": "no"}, None)]
    for given, saved in [*strategies, ({"save_steps": 3}, 3)]:
        assert plan_of(arguments(**given), 100, 1).save_steps == saved


@pytest.mark.parametrize(
    ("kind", "rate"), [("none", 1e-3), ("linear:16", 4e-3), ("sqrt:16", 2e-3), ("linear", 2e-3)]
)
def test_learning_rate_scales_with_the_batch(arguments, kind, rate):
    asked = arguments(learning_rate=1e-3, lr_scaling=kind, global_batch_size=64)
    assert plan_of(asked, 1000, 1).learning_rate == pytest.approx(rate, rel=1e-12)


def test_batch_arithmetic_in_words(arguments):
    lines = describe(plan_of(arguments(global_batch_size=9), 90, 8))
    assert lines[0] == "global batch   9 rows = 8 process(es) x at most 2 rows x 1 micro-batch(es)"
    assert "times" not in lines[2]  # the learning rate is as given
    assert lines[-1].endswith(
        "9 rows do not divide evenly among 8 processes; use --global_batch_size 8 or 16"
    )
    assert len(describe(plan_of(arguments(global_batch_size=16), 90, 8))) == 4
    assert describe(plan_of(arguments(global_batch_size=3), 90, 8))[-1].endswith("--global_batch_size 8")
    first, *_, last = describe(plan_of(arguments(per_device_train_batch_size=4), 90, 8))
    assert first == "global batch   32 rows = 8 process(es) x at most 4 rows x 1 micro-batch(es)"
    assert (
        last == "note           the global batch depends on the number of processes; --global_batch_size 32 "
        "fixes it"
    )


def test_a_cpu_works_in_passes_of_so_many_tokens_unless_told_otherwise(arguments):
    assert batch_of(arguments(), 2, by_tokens=True) == BatchShape(32, 2, 16, 16, CPU_TOKENS, CPU_PASS_TOKENS)
    assert batch_of(arguments(), 2) == BatchShape(32, 2, 16, 1)
    assert batch_of(arguments(max_tokens_per_micro_batch=99), 2) == BatchShape(32, 2, 16, 16, 99)
    for asked in (
        arguments(global_batch_size=32, per_device_train_batch_size=8),
        arguments(gradient_accumulation_steps=2),
    ):
        assert batch_of(asked, 2, by_tokens=True) == batch_of(asked, 2) == BatchShape(32, 2, 8, 2)
    line = describe(plan_of(arguments(global_batch_size=9), 90, 8, use_cpu=True))[0]
    assert (
        line == "global batch   9 rows = 8 process(es) x micro-batches of at most 2048 tokens, as many as a "
        "step's rows need"
    )
    assert plan_of(arguments(), 90, 8, use_cpu=True, deepspeed={}).batch.max_tokens is None


def test_an_evaluation_batch_has_rows_or_tokens(arguments):
    assert evaluation_batch(arguments()) == (32, None)
    assert evaluation_batch(arguments(), by_tokens=True) == (32, CPU_TOKENS)
    assert evaluation_batch(arguments(per_device_eval_batch_size=5), by_tokens=True) == (5, None)


@given(size=st.integers(1, 100), processes=st.integers(1, 5), micro=st.integers(1, 20))
def test_smaller_micro_batches_make_up_the_same_global_batch(size, processes, micro):
    shape = derive_batch(processes, size, micro)
    while shape.micro_batch_size > 1:
        smaller = shape.halved()
        assert smaller.micro_batch_size < shape.micro_batch_size
        assert smaller == derive_batch(processes, size, None, smaller.accumulation)
        shape = smaller
    assert derive_batch(processes, size, max_tokens=99).halved().max_tokens == 49


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
        # A resumed run that is longer than its plan stays at 0.
        assert lr_multiplier(total + 3, total, warmup, kind) == 0


def test_multistep_is_torchs_multi_step_lr():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 18], gamma=0.3)
    for step in range(37):
        rate = lr_multiplier(step, 37, 0, "multistep", {"milestones": [0.2, 0.5], "gamma": 0.3})
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    # Unless it is told otherwise, and with a warm-up.
    rates = [lr_multiplier(step, 4, 2, "multistep") for step in range(4)]
    assert rates == pytest.approx([0.5, 1, 0.01, 0.001])


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(
    ("kind", "settings", "theirs"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("constant_with_warmup", {}, {}),
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
    rates = [lr_multiplier(step, 20, warmup, kind, settings) for step in range(20)]
    assert rates[:warmup] == [0.25, 0.5, 0.75, 1][:warmup]
    assert rates[warmup:] == pytest.approx([schedule(step) for step in range(warmup, 20)], abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        ("linear", {"power": 2}, "linear has no power; it has no settings"),
        ("cosine_with_restarts", {"cycles": 2}, "cosine_with_restarts has no cycles; it has num_cycles"),
        ("polynomial", {"power": "2"}, "power is '2', expected a number of at least 0"),
        ("polynomial", {"power": float("inf")}, "power is inf, expected a number of at least 0"),
        ("multistep", {"milestones": 0.5}, "milestones is 0.5, expected a list of numbers"),
        (
            "multistep",
            {"milestones": [0.5, 40]},
            "milestones is [0.5, 40], expected a share of all steps, from 0 to 1",
        ),
        (
            "cosine_with_min_lr",
            {"min_lr_rate": 3},
            "min_lr_rate is 3, expected a share of the peak, from 0 to 1",
        ),
    ],
)
def test_settings_that_a_schedule_does_not_have(kind, settings, problem):
    assert check_schedule(kind, settings) == [f"--lr_scheduler_kwargs: {problem}"]
    assert check_schedule("polynomial", {"power": 2}) == []
