"""Skips imports that one process on a CPU does not need: a fifth of the time of a single text's prediction.

transformers imports SciPy and scikit-learn for losses and decoding that no task uses, torch's compiler for a
few decorators, and `torch.distributed.tensor`. The compiler is imported later if anything but a decorator is
used.
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


def skip_unused_imports() -> None:
    """Call it before transformers is imported, in a process that is not distributed. On a GPU the compiler
    stays, since kernels may be compiled."""
    sys.modules |= dict.fromkeys(("scipy", "sklearn"))
    if torch.cuda.is_available() or COMPILER in sys.modules:
        return
    compiler = importlib.util.module_from_spec(importlib.util.find_spec(COMPILER))
    compiler.__class__ = _LazyModule
    sys.modules[COMPILER] = torch._dynamo = compiler
    torch.compiler.disable = torch.compiler.allow_in_graph = _no_op_decorator
    torch.distributed.is_available = _false


class _LazyModule(ModuleType):
    """A package that is executed on the first access to an attribute. Its submodules can be imported
    before."""

    def __getattr__(self, name: str) -> Any:
        if name in DECORATORS:
            return _no_op_decorator
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _no_op_decorator(function: Callable | None = None, *_: Any, **__: Any) -> Callable:
    """Works with and without arguments."""
    return _no_op_decorator if function is None else function


def _false() -> bool:
    return False
