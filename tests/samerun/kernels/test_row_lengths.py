import pytest

from samerun.kernels.common import current_row_lengths, row_lengths


def test_lengths_are_known_inside_and_forgotten_outside():
    assert current_row_lengths(2, 9) is None
    with row_lengths((9, 4)):
        assert current_row_lengths(2, 9) == (9, 4)
        with row_lengths(None):
            assert current_row_lengths(2, 9) is None
        assert current_row_lengths(2, 12) == (9, 4)
    assert current_row_lengths(2, 9) is None


def test_lengths_of_another_batch_are_not_taken():
    with row_lengths((9, 4)):
        assert current_row_lengths(3, 9) is None
        assert current_row_lengths(2, 8) is None


def test_an_error_forgets_them_as_well():
    with pytest.raises(ZeroDivisionError), row_lengths((1,)):
        1 / 0  # noqa: B018
    assert current_row_lengths(1, 1) is None
