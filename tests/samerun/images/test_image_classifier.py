import pytest

from samerun.errors import InputError
from samerun.images.classifier import sorted_classes


def test_classes_stand_as_they_are_declared_or_else_in_order():
    assert sorted_classes(["b", "a", "b"], ("b", "never", "a")) == ["b", "never", "a"]
    assert sorted_classes(["b", "a", "b"]) == ["a", "b"]
    assert sorted_classes(["10", "9"]) == ["9", "10"]
    with pytest.raises(InputError, match=r"one class only \('a'\)"):
        sorted_classes(["a"], ("a", "b"))
