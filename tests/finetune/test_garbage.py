import gc

import pytest

from finetune.garbage import uncollected


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


def test_rows_are_not_searched_while_they_come_in_nor_later():
    before = gc.get_stats()[0]["collections"]
    with uncollected():
        assert not gc.isenabled()
        rows = [[number] for number in range(50_000)]  # enough for dozens of searches
        assert gc.get_stats()[0]["collections"] == before
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(rows)


def test_an_error_and_a_collector_that_was_off_already():
    with pytest.raises(ZeroDivisionError), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
