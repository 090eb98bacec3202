"""Imports that a single text does not need are left until something asks for them."""

from importlib.util import find_spec, module_from_spec
from types import ModuleType

import pytest

from samerun.serving.imports import _LazyModule, _no_op_decorator


def test_a_package_is_imported_when_more_than_a_decorator_is_asked_of_it():
    package = module_from_spec(find_spec("dbm"))
    package.__class__ = _LazyModule
    assert package.allow_in_graph(len) is package.disable(len, True, wrapping=False) is len
    assert "whichdb" not in vars(package)
    with pytest.raises(AttributeError):
        package.__wrapped__  # noqa: B018 - what inspect looks for imports nothing
    assert package.whichdb("no such file") is None
    assert type(package) is ModuleType
    with pytest.raises(AttributeError, match="nothing_like_it"):
        package.nothing_like_it  # noqa: B018


def test_decorators_with_and_without_arguments_change_nothing():
    assert _no_op_decorator(len) is len
    assert _no_op_decorator(recursive=False)(len) is len
