"""What is said where input is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from samerun.errors import InputError
from samerun.task_scripts import run_tool


def problems_of(work: Callable[..., Any], *given: Any, **named: Any) -> list[str]:
    """The problems that `work` raises as an `InputError`."""
    with pytest.raises(InputError) as caught:
        work(*given, **named)
    return caught.value.problems


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """A function (a tool's `main`, its words) -> what it says on standard error, ending with exit code 2."""

    def call(main: Callable[[list[str]], int], words: list[str]) -> str:
        assert run_tool(main, words) == 2
        return capsys.readouterr().err

    return call
