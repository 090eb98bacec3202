import errno
import multiprocessing
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from linear_task import collator, eval_rows, make_plan, points, split_of, train_steps

from samerun.data.batches import EvalRows, TrainSteps, collate_share, train_loader
from samerun.data.order import share_out
from samerun.errors import TrainingError
from samerun.plan import BatchShape
from samerun.task import Batch, Mixture


def test_a_worker_that_is_killed_ends_the_training_where_it_waits_for_it_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    batches = iter(train_loader(train_steps(*points(80), make_plan(80)), 0, 2, False))
    next(batches)
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()  # SIGCHLD has come, and did not raise here
    with pytest.raises(
        TrainingError, match=r"a data loader worker died: DataLoader worker .*--dataloader_num_workers$"
    ):
        list(batches)


def test_a_worker_that_dies_while_others_start_ends_the_training(monkeypatch):
    def dies(_):
        raise RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 1.")

    monkeypatch.setattr(torch.utils.data.DataLoader, "_get_iterator", dies)
    with pytest.raises(TrainingError, match="a data loader worker died: DataLoader worker"):
        list(train_loader(train_steps(*points(80), make_plan(80)), 0, 2, False))


@pytest.mark.slow
def test_a_batch_that_cannot_be_handed_over_ends_the_training(monkeypatch, capfd):
    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)  # as where /dev/shm is full
    with pytest.raises(TrainingError, match=r"/dev/shm is too small"):
        list(train_loader(train_steps(*points(80), make_plan(80)), 0, 2, False))
    assert (
        "a batch cannot be sent to the training process: [Errno 28] No space left on device"
        in capfd.readouterr().err
    )


def test_a_step_has_the_micro_batches_of_every_rank():
    x, y = points(21)
    plan, lengths = replace(make_plan(21, epochs=2), batch=BatchShape(8, 3, 2, 2)), np.arange(21)
    shared = [TrainSteps(split_of(x, y, lengths), plan, rank, 1, True) for rank in range(3)]
    for step in range(len(shared[0])):
        rows = shared[0].rows(step)
        found = list(chain.from_iterable(micro.rows.tolist() for steps in shared for micro in steps[step]))
        assert sorted(row for row in found if row >= 0) == sorted(rows)
        assert [len(steps[step]) for steps in shared] == [2, 2, 2]
        expected = share_out(rows, lengths, 3, 2)
        assert shared[1][step][0].rows.tolist() == (expected[0][1].tolist() or [-1])
    assert sorted(np.concatenate([shared[0].rows(step) for step in range(3)])) == list(range(21))
    assert len(shared[0].rows(2)) == 5


def test_training_augments_rows_by_their_epoch_under_any_number_of_processes():
    x, y = points(21)

    def augment(rows, epoch):
        return Batch(torch.as_tensor(rows), {"x": x[rows] + 10 * epoch}, y[rows])

    for processes in (1, 2):
        plan, seen = replace(make_plan(21, epochs=2), batch=BatchShape(8, processes, 2, 2)), {}
        for rank in range(processes):
            steps = TrainSteps(replace(split_of(x, y), augment=augment), plan, rank, 1, True)
            for step in range(len(steps)):
                for batch in steps[step]:
                    seen |= {
                        (step // 3, row): inputs
                        for row, inputs in zip(batch.rows.tolist(), batch.inputs["x"], strict=True)
                    }
        for epoch, row in np.ndindex(2, 21):
            torch.testing.assert_close(seen[epoch, row], x[row] + 10 * epoch)


def test_an_empty_share_becomes_a_placeholder():
    x, y = points(5)
    batch = collate_share(collator(x, y), np.array([], dtype=int), np.array([2, 4]))
    assert batch.rows.tolist() == [-1]
    assert not batch.is_real.any()
    torch.testing.assert_close(batch.inputs["x"], x[[4]])
    assert collate_share(collator(x, y), np.array([3]), np.array([2, 4])).rows.tolist() == [3]


def test_loader_goes_on_from_any_step():
    x, y = points(22)
    steps = train_steps(x, y, make_plan(22))
    all_rows = [[micro.rows.tolist() for micro in step] for step in train_loader(steps, 0, 0, False)]
    later = [[micro.rows.tolist() for micro in step] for step in train_loader(steps, 4, 0, False)]
    assert len(all_rows) == 6
    assert later == all_rows[4:]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_evaluation_batches_of_all_ranks_are_the_file(world_size):
    x, y = points(11)
    rows = eval_rows(x, y, batch_size=3)
    batches = [list(rows.batches(world_size, rank)) for rank in range(world_size)]
    assert len({len(found) for found in batches}) == 1
    found = [row for found in batches for batch in found for row in batch.rows.tolist() if row >= 0]
    assert sorted(found) == list(range(len(rows))) == list(range(11))


def test_padding_free_micro_batches_have_no_padding():
    x, y = points(21)
    plan = make_plan(21)
    plan = replace(plan, batch=replace(plan.batch, max_tokens=30))
    lengths = np.arange(21) % 7 + 1
    padded, padding_free = (
        TrainSteps(split_of(x, y, lengths), plan, 0, 1, False, kind) for kind in (False, True)
    )
    assert [steps.tokens(0)[0] for steps in (padded, padding_free)] == [lengths[padded.rows(0)].sum()] * 2
    assert padded.tokens(0)[1] > padding_free.tokens(0)[1] == padding_free.tokens(0)[0]
    assert all(lengths[share].sum() <= 30 for shares in padding_free.shares(0) for share in shares)


def test_the_largest_micro_batch_has_the_longest_rows():
    x, y = points(5)
    plan = replace(make_plan(5), batch=BatchShape(6, 2, 3, 1))
    steps = TrainSteps(split_of(x, y, np.array([3, 9, 1, 9, 4])), plan, 0, 1, True)
    assert steps.largest_micro_batch().rows.tolist() == [1, 3, 4]


def test_rows_without_tokens_are_shuffled_and_shared_out_by_number():
    x, y = points(21)
    steps = TrainSteps(split_of(x, y), make_plan(21), 0, 1, True)
    assert sorted(np.concatenate([steps.rows(step) for step in range(3)])) == list(range(21))
    assert steps.rows(0).tolist() != sorted(steps.rows(0))
    assert (steps.has_tokens, steps.tokens(0)) == (False, (None, None))
    assert len(steps.largest_micro_batch().rows) == 4
    rows = EvalRows(split_of(x, y), 8, max_tokens=2)
    assert [len(batch.rows) for batch in rows.batches(1, 0)] == [8, 8, 5]


def test_evaluation_passes_are_bounded_by_tokens_as_they_are_padded():
    x, y = points(11)
    rows = eval_rows(x, y)
    rows = replace(
        rows, max_tokens=24, split=replace(rows.split, padding_multiple=4)
    )  # rows of 1 to 5 tokens
    assert [len(batch.rows) for batch in rows.batches(1, 0)] == [3, 6, 2]


def test_a_mixture_has_the_same_steps_under_any_number_of_processes():
    x, y = points(21)
    split = replace(split_of(x, y, np.arange(21)), mixture=Mixture(np.repeat([0, 1], [15, 6]), (0.4, 0.6)))
    plan = make_plan(21, epochs=2)
    one, *ranks = [
        TrainSteps(split, replace(plan, batch=BatchShape(8, world, 2, 4)), rank, 1, True)
        for world, rank in [(1, 0), *((3, rank) for rank in range(3))]
    ]
    for step in range(len(one)):
        rows = [row for steps in ranks for micro in steps[step] for row in micro.rows.tolist() if row >= 0]
        assert sorted(rows) == sorted(one.rows(step).tolist())
    epochs = [np.concatenate([one.rows(step) for step in range(first, first + 3)]) for first in (0, 3)]
    assert [(rows < 15).sum() for rows in epochs] == [8, 8]  # 0.4 of 21
    assert (
        np.bincount(np.concatenate(epochs)[np.concatenate(epochs) >= 15] - 15).max() == 5
    )  # 26 over 6 rows: 4 or 5 times
