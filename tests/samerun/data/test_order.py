import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.data.order import (
    _halve_largest,
    epoch_order,
    evaluation_batches,
    mixed_rows,
    share_out,
    share_out_tokens,
)
from samerun.task import Mixture

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


@given(LENGTHS, st.integers(1, 8), st.integers(1, 6), st.none() | st.integers(1, 4000))
def test_a_global_batch_is_shared_out_evenly_or_by_tokens(widths, world_size, accumulation, budget):
    rows = np.random.default_rng(0).permutation(len(widths))[: 1 + len(widths) // 2]
    if budget is None:
        shared = share_out(rows, widths, world_size, accumulation)
    else:
        shared = share_out_tokens(rows, widths, world_size, budget)
    micro_batches = by_process(shared)
    shares = [share for shares in micro_batches for share in shares]
    assert {len(shares) for shares in micro_batches} == {world_size}
    assert sorted(np.concatenate(shares)) == sorted(rows)
    np.testing.assert_array_equal(widths[np.concatenate(shares)], np.sort(widths[rows])[::-1])
    if budget is None:
        assert len(micro_batches) == accumulation
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        return
    used = [len(share) * max(widths[share], default=0) for share in shares]
    assert all(len(share) <= 1 or tokens <= budget for share, tokens in zip(shares, used, strict=True))
    assert any(map(len, micro_batches[-1]))  # no micro-batch without rows
    # A process has no rows only where every other has at most one.
    assert all(map(len, shares)) or max(map(len, shares)) == 1


def test_passes_are_as_few_and_as_even_as_the_budget_allows():
    widths, rows = np.array([100] * 6 + [10] * 10), np.arange(16)

    def sizes(world_size, budget):
        shares = by_process(share_out_tokens(rows, widths, world_size, budget))
        return [list(map(len, of_micro_batch)) for of_micro_batch in shares]

    assert sizes(1, 450) == [[3], [3], [10]]  # rather than 4, 4 and 8
    assert sizes(2, 300) == [[2, 2], [2, 10]]
    # Four passes' worth of rows for six processes: two are halved.
    assert sizes(3, 200) == [[1, 1, 1], [1, 2, 10]]
    assert sizes(1, 5) == [[1]] * 16  # rows that pass the budget go alone


def test_a_process_does_no_more_for_a_global_batch_the_more_processes_there_are():
    """With a million processes, a list of all shares would take seconds, and halving one share for each of
    them days."""
    widths, processes = np.array([10, 30, 20, 40]), 10**6
    rows = np.arange(4)
    for shares in (share_out(rows, widths, processes, 2), share_out_tokens(rows, widths, processes, 100)):
        own = [shares.rows[shares.of(rank)[0]].tolist() for rank in (0, 1, 2, 3, 4, processes - 1)]
        assert own == [[3], [1], [2], [0], [], []]
        assert shares.padded_tokens(widths) == 100
    starts = _halve_largest([0], np.full(4, 10), processes)
    assert starts == [0, 1, 2, 3]
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
