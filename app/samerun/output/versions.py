"""Versions of the libraries and of the application's source files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
from pathlib import Path

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "numpy")
PACKAGE = Path(__file__).resolve().parents[1]


def library_versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that influence a run's numbers; None for a library that is not
    installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}


def code_version() -> dict[str, str]:
    """A short hash of each source file: the package `samerun` and the started script."""
    script = Path(sys.argv[0]).resolve()
    files = {f"app/samerun/{path.relative_to(PACKAGE).as_posix()}": path for path in PACKAGE.rglob("*.py")}
    if script.suffix == ".py" and script.is_file() and script not in files.values():
        files[f"app/{script.name}" if script.parent == PACKAGE.parent else script.name] = script
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for name, path in sorted(files.items())}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
