import copy
import json
import math
import multiprocessing
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from linear_task import LinearTask, collator, linear_layer, make_plan, points, split_of, train_steps

from samerun import checkpoint, signals, training
from samerun.checkpoint import TrainState, list_checkpoints, load_average, restore_optimizer
from samerun.data.batches import collate_share
from samerun.errors import InputError, StopRequested, TrainingError, in_short, is_out_of_memory
from samerun.files import finish_all
from samerun.optimizer import WeightAverage
from samerun.plan import BatchShape
from samerun.reports.tracker import SPEED, read_history
from samerun.run_folder import status
from samerun.runtime import Run
from samerun.start import OpenedRun
from samerun.task import Data
from samerun.training import SKIPPED_LIMIT, Training, _clip, seed_step, train_step

NOTHING = np.array([], dtype=int)


def torch_step(layer, x, y, max_norm):
    """One step of plain gradient descent on the mean over `x`; returns (loss, norm before clipping)."""
    layer.zero_grad()
    loss = (layer(x) - y).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), max_norm or math.inf)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter -= 0.1 * parameter.grad
    return loss.item(), norm.item()


@pytest.fixture
def prepare(start_run):
    """A function (batch shape) -> (run, linear layer, prepared model, prepared SGD)."""

    def make(shape=None):
        run, layer = start_run(shape), linear_layer()
        return run, layer, *run.accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))

    return make


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 100.0])
@pytest.mark.parametrize(
    "shares",
    [
        [range(8)],
        [range(5), range(5, 8)],
        [[0], [1, 2, 3, 4], [5, 6, 7]],
        [range(8), NOTHING],  # a pass without rows, as the last batch of an epoch has them
        [NOTHING, [0, 1, 2], range(3, 8)],
        [[row] for row in range(8)],
    ],
)
def test_a_step_is_that_of_one_big_batch(prepare, shares, max_norm):
    (x, y), plain, exchanged = points(16), linear_layer(), []
    run, ours, model, optimizer = prepare(BatchShape(8, 1, 8, len(shares)))

    class Looks(LinearTask):
        def loss_sum(self, model, batch):
            exchanged.append(run.accelerator.sync_gradients)
            return super().loss_sum(model, batch)

    for first in (0, 8):
        rows = [first + np.array(share, dtype=int) for share in shares]
        micro_batches = [collate_share(collator(x, y), share, np.arange(16)) for share in rows]
        loss, norm = train_step(run, model, optimizer, Looks(), micro_batches, max_norm)
        expected_loss, expected_norm = torch_step(plain, x[first : first + 8], y[first : first + 8], max_norm)
        assert float(loss) == pytest.approx(expected_loss, rel=1e-6)
        assert float(norm) == pytest.approx(expected_norm, rel=1e-6)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)
    assert 0.3 < expected_norm < 100  # one of the limits clips, the others do not
    assert exchanged == 2 * [*[False] * (len(shares) - 1), True]  # in the last pass only


def test_two_processes_make_the_step_of_one_big_batch(prepare):
    (x, y), plain, weights = points(8), linear_layer(), []
    for share in (range(5), range(5, 8)):  # the processes, one after the other; DDP would average gradients
        (run, layer, model, optimizer), times = prepare(), 8 / len(share)
        process = SimpleNamespace(
            accelerator=run.accelerator, device=run.device, deepspeed_config=None, fsdp=None,
            launch=SimpleNamespace(world_size=2), sum=lambda targets, times=times: targets * times,
        )  # fmt: skip
        train_step(process, model, optimizer, LinearTask(), [collator(x, y)(np.array(share))], 0.0)
        weights.append(layer.weight.detach())
    torch_step(plain, x, y, 0.0)
    torch.testing.assert_close(torch.stack(weights).mean(0), plain.weight.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [0.0, 0.1, 100.0, math.inf, math.nan])
def test_gradients_are_clipped_as_by_torch_and_not_written_to_in_vain(start_run, size):
    run, ours, theirs = start_run(), linear_layer(), linear_layer()
    for layer in (ours, theirs):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, size)
    written = ours.weight.grad._version
    norm, expected = _clip(run, ours, 1.0), torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0, equal_nan=True)
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-6, atol=0, equal_nan=True)
    assert (ours.weight.grad._version == written) == (size <= 0.1)


def test_the_norm_of_a_large_matrix_is_that_of_fp64(start_run):
    """As every launcher has it: torch's own fp32 sum over a whole matrix is 2.3e-4 off here."""
    layer = torch.nn.Linear(1000, 8000)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    exact = sum(float(parameter.grad.double().square().sum()) for parameter in layer.parameters()) ** 0.5
    assert float(_clip(start_run(), layer, math.inf)) == pytest.approx(exact, rel=1e-6)


def test_a_step_of_placeholders_moves_nothing(prepare):
    run, layer, model, optimizer = prepare()
    batch = collate_share(collator(*points(8)), NOTHING, np.arange(8))
    loss, norm = train_step(run, model, optimizer, LinearTask(), [batch], 1.0)
    torch.testing.assert_close(layer.state_dict(), linear_layer().state_dict(), rtol=0, atol=0)
    assert (float(norm), float(loss)) == (0, 0)


@pytest.mark.parametrize("by_row", [False, True])
def test_random_numbers_are_a_function_of_seed_and_step_and_for_torchs_dropout_of_the_rank(by_row):
    def numbers(*place):
        seed_step(*place, by_row)
        return *torch.rand(4).tolist(), np.random.random(), random.random()

    places = [(seed, step, rank) for seed in (0, 1, 2**31 - 1) for step in range(3) for rank in range(3)]
    assert len({numbers(*place) for place in places}) == len(places) // (3 if by_row else 1)
    assert numbers(1, 2, 0) == numbers(1, 2, 0)


class Scripted(LinearTask):
    """Has these scores, and losses if they are given, one evaluation after the other."""

    def __init__(self, scores, losses=None):
        super().__init__(best_metric="score")
        self.scores, self.losses = iter(scores), losses and iter(losses)

    def score(self, predictions, split):
        return {"score": next(self.scores), **({"loss": next(self.losses)} if self.losses else {})}


@pytest.fixture
def begin(start_run, tmp_path, arguments, monkeypatch):
    """Prepares a training with its linear `layer` and its `best` steps; its task counts as ours."""
    monkeypatch.setattr("samerun.task_scripts.is_ours", lambda task_class: True)

    def prepare(data=None, task=None, plan=None, **given):
        x, y = data or points(22)
        plan = plan or make_plan(len(x))
        run = start_run(plan.batch)
        layer = linear_layer()
        task = task or LinearTask()
        splits = {"train": split_of(x, y, np.arange(len(x)) % 7 + 1)}
        splits["validation"] = split_of(x, y, np.arange(len(x)) % 5 + 1)
        asked = {
            "seed": 1, "weight_decay": 0.0, "greater_is_better": False, "save_total_limit": 2,
            "per_device_eval_batch_size": 4, "output_dir": str(tmp_path), **given
        }  # fmt: skip
        opened = OpenedRun({"a": 1})
        task.arguments.greater_is_better = asked["greater_is_better"]
        training = Training(run, arguments(**asked), task, Data(splits, {}), plan, layer, opened=opened)
        training.layer, training.best = layer, []
        training._export = lambda predictions: training.best.append(training.state.step)
        return training

    return prepare


@pytest.mark.parametrize("logging_steps", [1, 4])
def test_training_is_that_of_plain_torch(begin, logging_steps):
    plan = make_plan(22, lr_scheduler_type="cosine", logging_steps=logging_steps)
    session = begin(plan=plan)
    figures = session.fit()
    x, y = points(22)
    layer = linear_layer()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=0.0)
    losses, steps = [], train_steps(x, y, plan)
    for step in range(6):
        rate = 0.05 * (1 if step == 0 else 0.5 * (1 + math.cos(math.pi * (step - 1) / 5)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        rows = steps.rows(step)
        loss = (layer(x[rows]) - y[rows]).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(session.layer.state_dict(), layer.state_dict(), rtol=1e-6, atol=1e-7)
    # Means since the last.
    logged = {1: [[step] for step in range(6)], 4: [[0, 1, 2, 3], [4, 5]]}[logging_steps]
    history, speed = (read_history(session.folder, *name) for name in ((), (SPEED,)))
    means = [np.mean([losses[step] for step in steps]) for steps in logged]
    assert [event["loss"] for event in history] == pytest.approx(means, rel=1e-6)
    for events in (history, speed):
        assert [event["step"] for event in events] == [steps[-1] + 1 for steps in logged]
    assert all(event["memory_mb"] > 10 for event in speed)
    # The last batch of an epoch has 6 rows in place of 8.
    trained = [sum(map(len, map(steps.rows, of_event))) for of_event in logged]
    seconds = [rows / event["samples_per_second"] for rows, event in zip(trained, speed, strict=True)]
    assert sum(seconds) == pytest.approx(figures["train_runtime"])
    if logging_steps == 1:
        assert np.quantile(seconds, 0.5) == pytest.approx(figures["train_step_time_p50"])
    assert history[-1]["learning_rate"] == pytest.approx(rate, rel=1e-9)
    assert figures["train_loss"] == pytest.approx(sum(losses) / 6, rel=1e-6)
    assert (figures["train_steps"], figures["train_skipped_steps"]) == (6, 0)
    assert figures["train_samples_per_second"] * figures["train_runtime"] == pytest.approx(44)


def test_the_first_steps_foretell_the_time_of_all(begin):
    session = begin(plan=make_plan(22, epochs=4))
    assert session.fit()["train_runtime_forecast"] > 0
    batches, state = session.batches, session.state
    state.step, state.train_seconds = 8, 50.0
    seconds = [40.0, *(0.1 * batches.work(step) for step in range(1, 6)), 3.0, 3.0]  # the first is left out
    left = 0.1 * batches.mean_work() * (12 - 8)
    assert session._forecast(seconds) == pytest.approx(50 + left)
    assert begin(plan=make_plan(22, epochs=1)).fit()["train_runtime_forecast"] is None


def test_the_learning_rate_follows_the_updates_not_the_steps(begin):
    session = begin(plan=make_plan(22))
    session.state.step, session.state.updates = 3, 2  # one fp16 step had overflowed
    session.fit()
    found = [event["learning_rate"] for event in read_history(session.folder)]
    assert found == [0.05 * session.plan.lr_multiplier(updates) for updates in (2, 3, 4)]


def test_a_loss_that_is_not_finite_ends_the_run_before_anything_of_it_is_saved(begin):
    x, y = points(22)
    x[5] = math.nan
    session = begin(data=(x, y), plan=make_plan(22, save_steps=1), save_total_limit=9)
    bad = next(step for step in range(3) if 5 in session.batches.rows(step))
    assert bad > 0  # or nothing is shown about what was saved before
    with pytest.raises(TrainingError) as caught:
        session.fit()
    rows = sorted(session.batches.rows(bad).tolist())
    assert str(caught.value).startswith(
        f"step {bad + 1}: the loss is nan; training rows of that batch (0-based): {rows[0]}, "
    )
    assert ", ".join(map(str, rows)) + ". The step was not saved." in str(caught.value)
    folder = session.folder / "checkpoints"
    finish_all()  # as the end of the process does
    assert [path.name for path in list_checkpoints(folder)] == [f"step_{step + 1}" for step in range(bad)]
    assert [event["step"] for event in read_history(session.folder)] == [*range(1, bad + 1)]


@pytest.mark.parametrize(
    ("loss", "norm", "told"),
    [(1.0, math.inf, "the gradient norm is inf"), (-math.inf, 1.0, "the loss is -inf")],
)
def test_loss_and_gradient_are_looked_at(begin, monkeypatch, loss, norm, told):
    monkeypatch.setattr(training, "train_step", lambda *_, **__: (torch.tensor(loss), torch.tensor(norm)))
    with pytest.raises(TrainingError, match=f"step 1: {told}"):
        begin().fit()


def test_weights_without_a_gradient_are_named(begin, monkeypatch):
    """Torch names their numbers, and an option of its own."""
    told = "Expected ...\nParameter indices which did not receive grad for rank 0: 1\n In addition, ..."
    monkeypatch.setattr(training, "train_step", Mock(side_effect=RuntimeError(told)))
    with pytest.raises(TrainingError, match=r"step 1: .*: the loss does not depend on bias\. Several"):
        begin().fit()


def test_workers_end_with_the_training_that_failed(begin):
    """A notebook keeps the error, and with it the frames."""
    x, y = points(22)
    x[5] = math.nan
    with pytest.raises(TrainingError) as kept:
        begin(data=(x, y), dataloader_num_workers=1).fit()
    assert kept.tb is not None
    assert multiprocessing.active_children() == []


def test_out_of_memory_says_what_to_make_smaller(begin):
    for text in (
        "DefaultCPUAllocator: can't allocate memory",
        "could not create a primitive",  # by oneDNN
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
    ):
        assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(MemoryError())
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    task, told = LinearTask(), re.escape(in_short(error))
    task.loss_sum = Mock(side_effect=error)
    message = rf"step 1: out of memory on a batch of 1 rows x 3\. Try --grad.*{told}\)$"
    with pytest.raises(TrainingError, match=message):
        begin(task=task).fit()


class Roomy(LinearTask):
    """Has memory for two rows, in the forward or in the backward pass."""

    def __init__(self, in_backward):
        super().__init__()
        self.in_backward, self.seen = in_backward, []

    def loss_sum(self, model, batch):
        self.seen.append(len(batch.rows))
        loss = super().loss_sum(model, batch)
        if len(batch.rows) > 2:
            if not self.in_backward:
                raise torch.OutOfMemoryError("CUDA out of memory")
            loss.register_hook(out_of_memory)
        return loss


def out_of_memory(_gradient):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("in_backward", [False, True])
def test_micro_batches_that_do_not_fit_are_halved_before_the_first_step(begin, tmp_path, capsys, in_backward):
    expected = begin()
    expected.fit()
    losses = [event["loss"] for event in read_history(tmp_path)]
    (tmp_path / "history.jsonl").unlink()
    status.begin(tmp_path, 0)
    task = Roomy(in_backward)
    session = begin(task=task)
    session.fit()
    assert [event["loss"] for event in read_history(tmp_path)] == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(session.layer.state_dict(), expected.layer.state_dict(), rtol=1e-5, atol=1e-6)
    assert max(task.seen[2:]) == 2, "after the dry run and one trial"
    assert json.loads((tmp_path / "status.json").read_text())["micro_batch_parts"] == 2
    said = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert said == [
        "note           out of memory: micro-batches have at most 2 rows; the global batch does not change"
    ]


def test_the_trial_reserves_memory_for_the_optimizers_state_only(begin, monkeypatch):
    """An average of the weights is there already."""
    session, reserved, real = begin(ema_decay=0.9), [], torch.empty

    def empty(*size, **given):
        if given.get("dtype") == torch.uint8:
            reserved.extend(size)
        return real(*size, **given)

    monkeypatch.setattr(torch, "empty", empty)
    session._fit_into_memory()
    assert reserved == [8 * sum(parameter.numel() for parameter in session.layer.parameters())]


def test_statistics_forbid_smaller_micro_batches(begin):
    session = begin(task=Roomy(False))
    session.model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), session.layer)
    message = r"step 1: out of memory on a batch of 4 rows x 3\. Try a smaller"
    with pytest.raises(TrainingError, match=message):
        session.fit()


@pytest.mark.parametrize(
    ("scores", "losses", "greater", "patience", "best", "last"),
    [
        ([3, 2, 1, 2, 3, 4], None, False, 2, [1, 2, 3], 5),
        ([1, 2, 1, 1, 3, 4], None, True, 2, [1, 2], 4),
        ([1, 1, 1, 1, 1, 1], None, True, 3, [1], 4),  # an equal score is no better one
        ([1, 0, 0, 0, 0, 2], None, True, None, [1, 6], 6),
        ([None, 2, None, 1, None, 0], None, False, None, [2, 4, 6], 6),
        ([None] * 6, None, False, 2, [], 2),
        # The F1 of rare labels stays 0 for the first epochs while the loss falls: that is progress.
        ([0.0] * 6, [0.5, 0.4, 0.4, 0.3, 0.6, 0.2], True, 2, [1, 2, 4, 6], 6),
    ],
)
def test_the_best_model_and_early_stopping(begin, scores, losses, greater, patience, best, last, capsys):
    asked = {"greater_is_better": greater, "early_stopping_patience": patience}
    session = begin(task=Scripted(scores, losses), plan=make_plan(22, eval_steps=1), **asked)
    session.fit()
    assert session.best == best
    if not best:
        assert "stopping early: no defined score in 2 evaluations" in capsys.readouterr().out
    assert session.state.step == last
    assert session.state.best_step == (best[-1] if best else None)
    assert session.state.best_metric == (scores[best[-1] - 1] if best else None)
    assert session.state.best_loss == (losses[best[-1] - 1] if losses else None)
    evaluated = [event for event in read_history(session.folder) if "eval_score" in event]
    assert [event["step"] for event in evaluated] == list(range(1, last + 1))


def test_a_metric_that_no_evaluation_has_is_refused(begin):
    """Such as a typing error in the name of one of --metrics."""
    task = Scripted([1, 2])
    task.arguments.metric_for_best_model = "scroe"
    session = begin(task=task, plan=make_plan(22, eval_steps=1))
    with pytest.raises(InputError, match=r"metric_for_best_model scroe: .* this evaluation has score"):
        session.fit()
    assert (session.state.step, session.best) == (1, [])


def test_a_run_that_stops_early_can_be_seen_to_have_stopped(begin, capsys):
    plan = make_plan(22, eval_steps=1, save_steps=100)
    session = begin(task=Scripted([1, 2, 3]), plan=plan, early_stopping_patience=2)
    session.fit()
    assert "stopping early: no better score in 2 evaluations" in capsys.readouterr().out
    (path,) = list_checkpoints(session.folder / "checkpoints")
    stored = json.loads((path / "state.json").read_text())
    assert (path.name, stored["evaluations_without_best"], stored["best_step"]) == ("step_3", 2, 1)
    assert session.fit()["train_steps"] == 3  # as when it is resumed: there is nothing left to do


def test_a_complete_run_has_nothing_left_to_do(begin, capsys):
    session = begin()
    figures = session.fit()
    before = {name: tensor.clone() for name, tensor in session.layer.state_dict().items()}
    again = session.fit()
    assert {"train_loss", "train_steps", "train_samples_per_second"} <= again.keys()
    assert again == {name: figures[name] for name in again}
    assert "is complete (6 steps)" in capsys.readouterr().out
    torch.testing.assert_close(session.layer.state_dict(), before, rtol=0, atol=0)


def test_an_idle_step_changes_neither_weights_nor_statistics(begin):
    session = begin()
    model = session.model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), session.layer).eval()
    before = copy.deepcopy(model.state_dict())
    session._idle_step()
    made = session.optimizer.state[session.layer.weight]
    assert (made["step"], made["exp_avg"].any()) == (1, False)
    assert model.training  # otherwise gradient checkpointing is off, and memory may not suffice
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("config", [None, {"fp16": {}}], ids=["torch", "DeepSpeed"])
def test_skipped_fp16_updates_are_counted_and_too_many_end_the_run(config):
    """Told by DeepSpeed, or by torch's loss scale, which falls then; the other one says the opposite here."""

    def count(skipped):
        accelerator = SimpleNamespace(optimizer_step_was_skipped=skipped if config else not skipped)
        run = SimpleNamespace(
            launch=SimpleNamespace(precision="fp16"), accelerator=accelerator, deepspeed_config=config
        )
        training = SimpleNamespace(
            run=run, state=state, average=None, unused_decay_rate=0.0, plan=make_plan(22)
        )
        Training._count_update(training, scale_fell=not skipped if config else skipped)

    state = TrainState()
    for _ in range(SKIPPED_LIMIT - 1):
        count(True)
    assert (state.updates, state.skipped_in_a_row) == (0, SKIPPED_LIMIT - 1)
    count(False)
    assert (state.updates, state.skipped_in_a_row) == (1, 0)
    for _ in range(SKIPPED_LIMIT - 1):
        count(True)
    with pytest.raises(TrainingError, match=f"{SKIPPED_LIMIT} fp16 updates in a row"):
        count(True)


# Requests to stop


def asks(monkeypatch, function, number):
    """A task that asks for a stop at the `number`-th call of one of its functions, as a signal would."""
    task = LinearTask()
    # A dry run and the trial of the largest micro-batch come before the first step.
    real, calls = getattr(task, function), iter(range(-2 if function == "loss_sum" else 0, 99))

    def counted(*given):
        if next(calls) + 1 == number:
            monkeypatch.setattr(signals, "requested", lambda: "SIGTERM")
        return real(*given)

    monkeypatch.setattr(task, function, counted)
    return task


def stopped(session, capsys):
    """Has the run stop; returns its one checkpoint's state."""
    with pytest.raises(StopRequested):
        session.fit()
    said = capsys.readouterr().err
    (path,) = list_checkpoints(session.folder / "checkpoints")
    assert said.startswith(
        f"stopped on request (SIGTERM; rank 0): step {session.state.step} of 6 is saved in {path}; the same"
    )
    assert (path.name, session.state.step) == (f"step_{session.state.step}", session.state.step)
    return json.loads((path / "state.json").read_text())


@pytest.mark.parametrize(
    ("function", "number", "eval_steps", "step", "unevaluated"),
    [
        ("loss_sum", 3, None, 2, False),
        ("loss_sum", 3, 2, 2, True),  # it is looked at before an evaluation, not behind it
        ("predict", 2, 2, 2, True),  # an evaluation is broken off
        ("score", 2, 3, 6, False),  # in the last evaluation
    ],
)
def test_a_run_that_is_asked_to_stop_saves_the_step_and_does(
    begin, monkeypatch, capsys, function, number, eval_steps, step, unevaluated
):
    task = asks(monkeypatch, function, number)
    if function == "loss_sum":
        task.predict = pytest.fail
    session = begin(task=task, plan=make_plan(22, eval_steps=eval_steps))
    stored = stopped(session, capsys)
    assert (stored["step"], stored["updates"], stored["unevaluated"]) == (step, step, unevaluated)
    evaluated = [event for event in read_history(session.folder) if "eval_loss" in event]
    assert (stored["best_step"] is not None) == bool(evaluated) == (function == "score")


def test_an_evaluation_that_was_broken_off_is_made_up_for(begin, monkeypatch, capsys, tmp_path):
    plan = make_plan(22, eval_steps=2, save_steps=2)
    whole = begin(plan=plan)
    whole.fit()
    history, best = (tmp_path / "history.jsonl").read_bytes(), whole.best
    (tmp_path / "history.jsonl").unlink()
    shutil.rmtree(tmp_path / "checkpoints")

    session = begin(task=asks(monkeypatch, "predict", 2), plan=plan)
    stopped(session, capsys)
    assert session.best == []
    monkeypatch.setattr(signals, "requested", lambda: None)
    session.fit()
    assert (tmp_path / "history.jsonl").read_bytes() == history
    assert session.best == best
    assert not session.state.unevaluated
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_4", "step_6"]


def test_the_last_evaluation_is_made_up_for_too_and_may_stop_the_run_early(begin, monkeypatch, capsys):
    session = begin(plan=make_plan(22, eval_steps=6))
    session.state.step, session.state.unevaluated = 6, True
    session.fit()
    assert session.best == [6]

    session = begin(task=Scripted([2]), plan=make_plan(22, eval_steps=2), early_stopping_patience=1)
    session.state.step, session.state.unevaluated = 2, True
    session.state.best_metric, session.state.best_step = 1, 1
    session.fit()
    assert session.state.step == 2


def test_a_run_that_is_asked_before_its_first_step_has_nothing_to_save(begin, monkeypatch, capsys):
    monkeypatch.setattr(signals, "requested", lambda: "SIGTERM")
    session = begin()
    with pytest.raises(StopRequested):
        session.fit()
    assert "before step 1; there was nothing new to save" in capsys.readouterr().err
    assert not (session.folder / "checkpoints").exists()


def test_a_checkpoint_that_could_not_be_written_ends_the_run(begin, monkeypatch):
    session = begin(plan=make_plan(22, save_steps=4))
    monkeypatch.setattr("samerun.checkpoint.save_file", lambda *_: 1 / 0)
    with pytest.raises(TrainingError, match=r"step_4 could not be written \(division by zero\)"):
        session.fit()
    assert session.state.step == 6  # told at the next save


def test_a_gpu_is_waited_for_every_other_second(begin, monkeypatch):
    """On a GPU nothing is read between two log lines, unless a request to stop would wait for too long."""
    seen, real = [], Training._read_losses
    session = begin(plan=make_plan(22, epochs=10, logging_steps=1000))

    def read(*given):
        seen.append(session.state.step)
        return real(*given)

    def read_clock(clock):
        new = [0.5] * (seen[-1] - (seen[-2] if len(seen) > 1 else 0))
        clock.seconds += new
        return sum(new)

    monkeypatch.setattr(Training, "_read_losses", read)
    monkeypatch.setattr(training, "SYNCHRONOUS", ())
    monkeypatch.setattr(training.StepClock, "read", read_clock)
    session.fit()
    assert seen == [1, 2, 7, 12, 17, 22, 27, 30]


def test_an_average_of_the_weights_is_evaluated_and_exported_and_does_not_move_the_training(begin, tmp_path):
    plan = make_plan(22, eval_steps=3, save_steps=3)
    alone = begin(plan=plan)
    alone.fit()
    losses = [event["eval_loss"] for event in read_history(tmp_path) if "eval_loss" in event]
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "history.jsonl").unlink()
    training, exported = begin(plan=plan), []
    training.average, layer = WeightAverage(training.run, training.model, 0.5), training.layer
    expected = [layer.weight.detach().double()]

    def follow(*_):
        updates = len(expected)
        decay = (1 + updates) / (10 + updates)  # 0.5 from step 8 on
        expected.append(decay * expected[-1] + (1 - decay) * layer.weight.detach().double())

    training.optimizer.optimizer.register_step_post_hook(follow)
    training._export = lambda predictions: exported.append(layer.weight.detach().clone())
    training.fit()
    torch.testing.assert_close(exported[0].double(), expected[3], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(layer.state_dict(), alone.layer.state_dict(), rtol=0, atol=0)
    found = [event["eval_loss"] for event in read_history(tmp_path) if "eval_loss" in event]
    assert found[0] != pytest.approx(losses[0], rel=1e-3)

    path, other = tmp_path / "checkpoints" / "step_6", begin(plan=plan)
    average = WeightAverage(other.run, other.model, 0.5)
    average.restore(load_average(path))
    assert torch.equal(average.parts[0], training.average.parts[0])
    torch.testing.assert_close(average.parts[0].double(), expected[6], rtol=1e-6, atol=1e-7)
    restore_optimizer(other.run, path, other.layer, other.optimizer, training.state)
    assert set(other.optimizer.optimizer.state[other.layer.weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("own", "of_rank_0", "waits"), [(None, "file:///a", 1), ("file:///a", None, 0)])
def test_only_the_mirror_of_rank_0_counts(begin, monkeypatch, own, of_rank_0, waits):
    """--mirror_to may differ between machines; all processes must wait for the checkpoint, or none."""
    training, calls = begin(mirror_to=own), []
    training._wait_for_checkpoint = lambda: calls.append("wait")
    training.state.best_step = training.state.step
    monkeypatch.setattr(Run, "broadcast", lambda run, value: of_rank_0)
    training._evaluate_and_save(eval_due=False)
    assert len(calls) == waits


def test_that_layerdrop_is_off_is_said(begin, capsys):
    session = begin()
    assert "LayerDrop" not in capsys.readouterr().out
    session.layer.layerdrop = 0.05
    session._prepare_model(session.layer)
    assert capsys.readouterr().out.count("note           LayerDrop: off") == 1


def test_a_checkpoint_is_copied_to_the_folder_of_this_machine(start_run, arguments, tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(checkpoint, "fetch", lambda run, *places: fetched.append(places) or tmp_path / "none")
    opened = OpenedRun({"a": 1}, resume=Path("/of/rank_0/checkpoints/step_3"))
    given = arguments(output_dir=str(tmp_path))
    with pytest.raises(FileNotFoundError):
        Training(start_run(), given, LinearTask(), None, make_plan(22), None, opened=opened)
    assert fetched == [(opened.resume, tmp_path / "checkpoints")]


def test_the_metric_that_chooses_the_best_model_is_in_the_tables():
    assert LinearTask(best_metric="auc").headline_metrics == ("loss", "auc")
    assert LinearTask(best_metric="loss").headline_metrics == ("loss",)
