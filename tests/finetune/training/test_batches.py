from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linear_task import collator, eval_rows, make_plan, points, train_steps

from finetune.plan import BatchShape
from finetune.reading.ragged import Ragged
from finetune.task import Batch
from finetune.training.batches import TrainSteps, collate_share, lengths_of, one_hot, pad_rows, train_loader
from finetune.training.order import share_out


def test_rows_are_padded_on_either_side():
    rows = [np.array([1, 2, 3]), np.array([4])]
    assert pad_rows(rows, 9).tolist() == [[1, 2, 3], [4, 9, 9]]
    assert pad_rows(rows, 9, "left").tolist() == [[1, 2, 3], [9, 9, 4]]
    assert pad_rows(rows, 0, "right", 4).tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert pad_rows(rows, 0, "left", 3).shape == (2, 3)
    assert pad_rows([rows[1][:0]], 0, multiple=4).shape == (1, 4)
    assert pad_rows(rows, 0).dtype == torch.int64


@given(st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=6))
def test_one_hot_labels(labels):
    rows = np.arange(len(labels))[::-1]
    dense = one_hot(Ragged.of([sorted(names) for names in labels]), rows, 5)
    assert dense.tolist() == [[float(label in labels[row]) for label in range(5)] for row in rows]
    assert dense.dtype == torch.float32


def test_a_step_has_the_micro_batches_of_every_rank():
    x, y = points(21)
    plan, lengths = replace(make_plan(21, epochs=2), batch=BatchShape(8, 3, 2, 2)), np.arange(21)
    shared = [TrainSteps(collator(x, y), lengths, plan, rank, 1, True) for rank in range(3)]
    for step in range(len(shared[0])):
        rows = shared[0].rows(step)
        found = list(chain.from_iterable(micro.rows.tolist() for steps in shared for micro in steps[step]))
        assert sorted(row for row in found if row >= 0) == sorted(rows)
        assert [len(steps[step]) for steps in shared] == [2, 2, 2]
        expected = share_out(rows, lengths, 3, 2)
        assert shared[1][step][0].rows.tolist() == (expected[0][1].tolist() or [-1])
    assert sorted(np.concatenate([shared[0].rows(step) for step in range(3)])) == list(range(21))
    assert len(shared[0].rows(2)) == 5


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


def test_packed_passes_have_no_padding_and_say_so():
    x, y = points(21)
    plan = make_plan(21)
    plan = replace(plan, batch=replace(plan.batch, max_tokens=30))
    lengths = np.arange(21) % 7 + 1
    padded, packed = (TrainSteps(collator(x, y), lengths, plan, 0, 1, False, 1, kind) for kind in (False, True))
    assert [steps.tokens(0)[0] for steps in (padded, packed)] == [lengths[padded.rows(0)].sum()] * 2
    assert padded.tokens(0)[1] > packed.tokens(0)[1] == packed.tokens(0)[0]
    assert all(lengths[share].sum() <= 30 for shares in packed.shares(0) for share in shares)


def test_lengths_are_those_of_rows_that_begin_with_their_tokens():
    rows = [np.ones(5), np.ones(2)]
    assert lengths_of(rows, "right") == (5, 2)
    assert lengths_of(rows, "left") is None
    assert lengths_of([*rows, np.ones(0)], "right") is None
    batch = Batch(torch.tensor([3, 4]), {}, None, (5, 2))
    assert batch.to(torch.device("cpu")).lengths == (5, 2)
    assert collate_share(lambda _: batch, np.array([], dtype=int), np.array([2])).lengths == (5, 2)


def test_evaluation_passes_are_bounded_by_tokens_as_they_are_padded():
    x, y = points(11)
    rows = replace(eval_rows(x, y), max_tokens=24, multiple=4)  # rows of 1 to 5 tokens
    assert [len(batch.rows) for batch in rows.batches(1, 0)] == [3, 6, 2]
