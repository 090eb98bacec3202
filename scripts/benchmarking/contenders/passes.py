"""The same work again and again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from benchmarking.watch import Stopped, Watch


def passes(settings: dict[str, Any], work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Does the whole work again and again until it is stopped; returns what it gave last and the figures."""
    watch, found = Watch(settings), None
    with suppress(Stopped):
        watch.mark()
        for _ in range(settings["max_steps"]):
            found = work()
            watch.mark()
    return found, watch.figures()
