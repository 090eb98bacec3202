"""What the run is made of: library versions and the application's own sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
from pathlib import Path

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "numpy")
PACKAGE = Path(__file__).resolve().parents[1]


def library_versions() -> dict[str, str | None]:
    """Python's version and those of the libraries that decide a run's numbers; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}


def code_version() -> dict[str, str]:
    """A short hash of each source file that a run is made of: the package `finetune` and the script that was started."""
    script = Path(sys.argv[0]).resolve()
    files = {f"app/finetune/{path.relative_to(PACKAGE).as_posix()}": path for path in PACKAGE.rglob("*.py")}
    if script.suffix == ".py" and script.is_file() and script not in files.values():
        files[f"app/{script.name}" if script.parent == PACKAGE.parent else script.name] = script
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for name, path in sorted(files.items())}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
