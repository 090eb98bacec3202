import errno
import multiprocessing
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from linear_task import make_plan, points, split_of, train_steps

from samerun.data.batches import (
    EvalBatches,
    TrainBatches,
    _halve_largest,
    epoch_order,
    evaluation_batches,
    mixed_rows,
    share_out,
    share_out_cheaply,
    share_out_tokens,
    train_loader,
)
from samerun.errors import TrainingError
from samerun.plan import BatchShape
from samerun.task import Batch, Mixture


def test_a_worker_that_is_killed_ends_the_training_where_it_waits_for_it_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    loaded = iter(train_loader(train_steps(*points(80), make_plan(80)), 0, 2, False))
    next(loaded)
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()  # SIGCHLD has come, and did not raise here
    message = r"a data loader worker died: DataLoader worker .*--dataloader_num_workers$"
    with pytest.raises(TrainingError, match=message):
        list(loaded)


def test_a_worker_that_dies_while_others_start_ends_the_training(monkeypatch):
    def dies(_):
        raise RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 1.")

    monkeypatch.setattr(torch.utils.data.DataLoader, "_get_iterator", dies)
    with pytest.raises(TrainingError, match="a data loader worker died: DataLoader worker"):
        list(train_loader(train_steps(*points(80), make_plan(80)), 0, 2, False))


def test_the_work_of_a_step_is_its_padded_tokens_or_its_rows(monkeypatch):
    steps = train_steps(*points(22), make_plan(22, epochs=2))
    work = [steps.tokens(step)[1] for step in (3, 4, 5)]
    assert [steps.work(step) for step in (3, 4, 5)] == work
    assert steps.mean_work(4) == pytest.approx(sum(work) / 3)  # of the second epoch
    monkeypatch.setattr("samerun.data.batches.SAMPLE", 5)
    many = train_steps(*points(80), make_plan(80))  # 10 steps
    assert many.sample(12) == [11, 13, 15, 17, 19]
    assert many.mean_work() == pytest.approx(np.mean([many.work(step) for step in (1, 3, 5, 7, 9)]))
    without = TrainBatches(split_of(*points(22)), make_plan(22), 0, 1, True)
    assert without.mean_work() == pytest.approx(22 / 3)


@pytest.mark.slow
def test_a_batch_that_cannot_be_handed_over_ends_the_training(monkeypatch, capfd):
    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)  # as where /dev/shm is full
    with pytest.raises(TrainingError, match=r"/dev/shm is too small"):
        list(train_loader(train_steps(*points(80), make_plan(80)), 0, 2, False))
    sent = "a batch cannot be sent to the training process: [Errno 28] No space left on device"
    assert sent in capfd.readouterr().err


def test_training_augments_rows_by_their_epoch_under_any_number_of_processes():
    x, y = points(21)

    def augment(rows, epoch):
        return Batch(torch.as_tensor(rows), {"x": x[rows] + 10 * epoch}, y[rows])

    for processes in (1, 2):
        plan, seen = replace(make_plan(21, epochs=2), batch=BatchShape(8, processes, 2, 2)), {}
        for rank in range(processes):
            steps = TrainBatches(replace(split_of(x, y), augment=augment), plan, rank, 1, True)
            for step in range(len(steps)):
                for batch in steps[step]:
                    numbers = [(step // 3, row) for row in batch.rows.tolist()]
                    seen |= dict(zip(numbers, batch.inputs["x"], strict=True))
        for epoch, row in np.ndindex(2, 21):
            torch.testing.assert_close(seen[epoch, row], x[row] + 10 * epoch)


def test_the_largest_micro_batch_has_the_longest_rows():
    x, y = points(5)
    plan = replace(make_plan(5), batch=BatchShape(6, 2, 3, 1))
    steps = TrainBatches(split_of(x, y, np.array([3, 9, 1, 9, 4])), plan, 0, 1, True)
    assert steps.largest_micro_batch().rows.tolist() == [1, 3, 4]


def test_rows_without_tokens_are_shuffled_and_shared_out_by_number():
    x, y = points(21)
    steps = TrainBatches(split_of(x, y), make_plan(21), 0, 1, True)
    assert sorted(np.concatenate([steps.rows(step) for step in range(3)])) == list(range(21))
    assert steps.rows(0).tolist() != sorted(steps.rows(0))
    assert (steps.has_tokens, steps.tokens(0)) == (False, (None, None))
    assert len(steps.largest_micro_batch().rows) == 4
    rows = EvalBatches(split_of(x, y), 8, max_tokens=2)
    assert [len(batch.rows) for batch in rows.batches(1, 0)] == [8, 8, 5]


def real_rows(batches):
    return [row for batch in batches for row in batch.rows.tolist() if row >= 0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_laws_of_training_batches(data):
    """The global batches are the same under any number of processes, each row is on one process,
    micro-batches keep to their limit, and a resumed run has the remaining steps."""
    lengths = np.array(data.draw(st.lists(st.integers(0, 30), min_size=2, max_size=60)))
    rows, seed = len(lengths), data.draw(st.integers(0, 3))
    size, world = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 8))
    accumulation, limit = data.draw(st.integers(1, 3)), data.draw(st.none() | st.integers(1, 60))
    grouping = data.draw(st.booleans())
    split = split_of(*points(rows), lengths)
    if data.draw(st.booleans()):
        split = replace(split, mixture=Mixture(np.arange(rows) % 2, (0.5, 0.5)))
    plan = make_plan(rows, global_batch_size=size)
    pass_tokens = None if limit is None else data.draw(st.none() | st.integers(1, 60))
    shape = BatchShape(size, world, -(-size // (world * accumulation)), accumulation, limit, pass_tokens)
    alone = TrainBatches(split, plan, 0, seed, grouping)
    ranks = [
        TrainBatches(split, replace(plan, batch=shape), rank, seed, grouping, by_row=True)
        for rank in range(world)
    ]
    steps = range(plan.total_steps)
    micro_batches = [[list(rank[step]) for rank in ranks] for step in steps]
    for step in steps:
        expected = alone.rows(step)
        np.testing.assert_array_equal(ranks[-1].rows(step), expected)
        shares = [real_rows([batch]) for batch in chain(*zip(*micro_batches[step], strict=True))]
        flat, sizes = list(chain(*shares)), list(map(len, shares))
        assert sorted(flat) == sorted(expected.tolist())
        assert (np.diff(np.maximum(lengths[flat], 1)) <= 0).all()  # rows are with others of their length
        if limit is None:
            assert max(sizes) - min(sizes) <= 1
        else:  # no micro-batch without rows, and no process where another has two
            assert any(sizes[-world:])
            assert min(sizes) > 0 or max(sizes) == 1
        placed = [
            (place, row)
            for batch in chain(*micro_batches[step])
            for place, row in zip(batch.places, batch.rows.tolist(), strict=True)
            if row >= 0
        ]
        assert sorted(placed) == list(enumerate(expected.tolist()))
        tokens, computed = ranks[0].tokens(step)
        assert tokens == lengths[expected].sum() <= computed
        for batch in chain(*micro_batches[step]) if limit is not None else ():
            widths = np.maximum(lengths[real_rows([batch])], 1)
            used = len(widths) * widths.max(initial=0)
            assert len(widths) <= 1 or used <= limit
    per_epoch = plan.steps_per_epoch
    for epoch in (steps[:per_epoch], steps[per_epoch:]) if split.mixture is None else ():
        assert sorted(np.concatenate([alone.rows(step) for step in epoch])) == list(range(rows))
    first = data.draw(st.integers(0, len(steps) - 1))
    resumed = train_loader(TrainBatches(split, plan, 0, seed, grouping), first, 0, False)
    assert [real_rows(step) for step in resumed] == [real_rows(alone[step]) for step in steps[first:]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=60).map(np.array),
    st.integers(1, 9),
    st.none() | st.integers(1, 60),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_the_laws_of_evaluation_batches(lengths, size, limit, world, multiple):
    split = replace(split_of(*points(len(lengths)), lengths), padding_multiple=multiple)
    rows = EvalBatches(split, size, limit)
    ranks = [list(rows.batches(world, rank)) for rank in range(world)]
    assert {len(batches) for batches in ranks} == {rows.num_batches(world)}
    assert sorted(real_rows(chain(*ranks))) == list(range(len(rows)))
    later = [batch.rows.tolist() for batch in rows.batches(world, 0, 1)]
    assert later == [batch.rows.tolist() for batch in ranks[0][1:]]
    for batch in chain(*ranks):
        widths = -(-np.maximum(lengths[real_rows([batch])], 1) // multiple) * multiple
        used = len(widths) if limit is None else len(widths) * widths.max(initial=0)
        assert len(widths) <= 1 or used <= (size if limit is None else limit)


# Order and shares


LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=200).map(np.array)
SIZES = st.integers(1, 40)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=100), SIZES, st.integers(0, 5), st.booleans())
def test_weighted_rows_are_there_as_often_as_their_weights_say(weights, size, seed, grouping):
    weights = np.array(weights) / np.sum(weights)
    lengths = np.arange(len(weights)) + 1
    order = epoch_order(seed, 1, lengths, size, grouping, weights)
    times, expected = np.bincount(order, minlength=len(weights)), len(weights) * weights
    assert times.sum() == len(weights)
    assert (times >= np.floor(expected - 1e-6)).all()
    assert (times <= np.ceil(expected + 1e-6)).all()
    np.testing.assert_array_equal(order, epoch_order(seed, 1, lengths, size, grouping, weights))


@given(LENGTHS, SIZES, st.integers(0, 5))
def test_the_first_batch_of_a_run_has_the_longest_row(lengths, size, seed):
    first = epoch_order(seed, 0, lengths, size, True)[:size]
    assert lengths[first].max() == lengths.max()
    batches = epoch_order(seed, 0, np.arange(64), 8, True).reshape(8, 8)
    assert (np.diff(batches) < 0).all()  # a whole batch came first, and rows are with others of their length


@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("weights", [None, np.full(100, 0.01)])
def test_order_changes_with_seed_and_epoch(grouping, weights):
    keys = [(seed, epoch) for seed in range(3) for epoch in range(3)]
    orders = [epoch_order(*key, np.arange(100), 8, grouping, weights) for key in keys]
    assert len(set(map(tuple, orders))) == 9
    source, counts = np.repeat([0, 1], 50), np.array([30, 70])
    assert len({tuple(mixed_rows(*key, source, counts)) for key in keys}) == 9


def padding(order, lengths, size):
    batches = [lengths[order[start : start + size]] for start in range(0, len(order), size)]
    return sum(int((batch.max() - batch).sum()) for batch in batches)


@pytest.mark.parametrize(("rows", "share"), [(400, 0.5), (5000, 0.15)])
def test_grouping_reduces_padding(rows, share):
    lengths = np.random.default_rng(0).integers(1, 500, rows)
    grouped, plain = (
        padding(epoch_order(0, 1, lengths, 16, grouping), lengths, 16) for grouping in (True, False)
    )
    assert grouped < share * plain


def test_rows_meet_others_in_the_next_epoch():
    lengths = np.random.default_rng(0).integers(1, 500, 400)
    batches = [
        {frozenset(batch) for batch in epoch_order(0, epoch, lengths, 8, True).reshape(-1, 8).tolist()}
        for epoch in range(4)
    ]
    assert len(set.union(*batches)) == sum(map(len, batches))


def by_process(shares):
    """[micro-batch][process] -> rows."""
    ranks = ([shares.rows[share] for share in shares.of(rank)] for rank in range(shares.world_size))
    return list(zip(*ranks, strict=True))


def test_passes_are_as_few_and_as_even_as_the_budget_allows():
    widths, rows = np.array([100] * 6 + [10] * 10), np.arange(16)

    def sizes(world_size, budget):
        shares = by_process(share_out_tokens(rows, widths, world_size, budget))
        return [list(map(len, of_micro_batch)) for of_micro_batch in shares]

    assert sizes(1, 450) == [[3], [3], [10]]  # rather than 4, 4 and 8
    assert sizes(2, 300) == [[2, 2], [2, 10]]
    # Four passes' worth of rows for six processes: two are halved.
    assert sizes(3, 200) == [[1, 1, 1], [1, 2, 10]]
    assert sizes(12, 999) == [[1] * 8 + [2] * 4]
    assert sizes(1, 5) == [[1]] * 16  # rows that pass the budget go alone


@example(np.array([38, 31, 16, 19, 3, 5, 1]), 1, 2)
@example(np.array([1, 1, 17]), 1, 16)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 300))
def test_more_micro_batches_are_taken_where_their_padding_would_cost_more(widths, world_size, pass_tokens):
    rows, batch = np.arange(len(widths)), BatchShape(len(widths), world_size, 1, 1, 400, pass_tokens)
    parts = [share_out_tokens(rows, widths, world_size, 400 // part) for part in (1, 2, 4, 8)]
    costs = []
    for passes in map(by_process, parts):
        largest = [max(len(share) * max(widths[share], default=0) for share in each) for each in passes]
        costs.append(sum(largest) + pass_tokens * len(passes))
    shares = share_out_cheaply(rows, widths, batch)
    assert shares.cost(widths, pass_tokens) == min(costs)


def test_a_process_does_no_more_for_a_global_batch_the_more_processes_there_are():
    """With a million processes a list of all shares would take seconds, halving one for each days."""
    widths, processes = np.array([10, 30, 20, 40]), 10**6
    rows = np.arange(4)
    for shares in (share_out(rows, widths, processes, 2), share_out_tokens(rows, widths, processes, 100)):
        own = [shares.rows[shares.of(rank)[0]].tolist() for rank in (0, 1, 2, 3, 4, processes - 1)]
        assert own == [[3], [1], [2], [0], [], []]
        assert shares.padded_tokens(widths) == 100
    starts = _halve_largest(np.array([0]), np.full(4, 10), processes)
    assert starts.tolist() == [0, 1, 2, 3]
    assert len(evaluation_batches(widths, 1, None, processes, 3)) == 1


def test_evaluation_by_tokens_takes_more_rows_the_shorter_they_are():
    batches = evaluation_batches(np.array([64] * 2 + [128] + [640]), 1, 256, 1, 0)
    assert [batch.tolist() for batch in batches] == [[3], [2, 0], [1]]


MIXTURES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 10)), min_size=1, max_size=4)


@given(MIXTURES, st.integers(0, 3))
def test_a_mixture_gives_each_source_its_share_of_every_epoch(sources, seed):
    sizes, weights = zip(*sources, strict=True)
    source = np.repeat(np.arange(len(sizes)), sizes)
    mixture = Mixture(source, tuple(weight / sum(weights) for weight in weights))
    assert mixture.counts.sum() == len(source)
    assert np.abs(mixture.counts - len(source) * np.array(mixture.weights)).max() < 1
    epochs = [mixed_rows(seed, epoch, source, mixture.counts) for epoch in range(4)]
    for epoch, rows in enumerate(epochs):
        np.testing.assert_array_equal(np.bincount(source[rows], minlength=len(sizes)), mixture.counts)
        np.testing.assert_array_equal(rows, mixed_rows(seed, epoch, source, mixture.counts))
    seen = np.bincount(np.concatenate(epochs), minlength=len(source))
    for number in range(len(sizes)):  # no row comes again before all the others of its source
        assert np.ptp(seen[source == number]) <= 1
