"""Imports that one process on a CPU can do without, which take a fifth of the time of a single text's prediction.

transformers imports SciPy and scikit-learn for losses and decoding that no task uses, torch's compiler for a few decorators,
and `torch.distributed.tensor` wherever torch has it. The compiler is imported after all when anything but a decorator is asked
of it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")


def leave_out_the_unused() -> None:
    """To be called before transformers is imported, in a process that stays alone. Does nothing where there is a GPU: kernels
    for it may be compiled."""
    sys.modules |= dict.fromkeys(("scipy", "sklearn"))
    if torch.cuda.is_available() or COMPILER in sys.modules:
        return
    compiler = importlib.util.module_from_spec(importlib.util.find_spec(COMPILER))
    compiler.__class__ = _Deferred
    sys.modules[COMPILER] = torch._dynamo = compiler
    torch.compiler.disable = torch.compiler.allow_in_graph = _unchanged
    torch.distributed.is_available = _no


class _Deferred(ModuleType):
    """A package that is imported when an attribute is asked for; its modules can be imported before."""

    def __getattr__(self, name: str) -> Any:
        if name in DECORATORS:
            return _unchanged
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _unchanged(function: Callable | None = None, *_: Any, **__: Any) -> Callable:
    """A decorator, with or without arguments, that does nothing."""
    return _unchanged if function is None else function


def _no() -> bool:
    return False
