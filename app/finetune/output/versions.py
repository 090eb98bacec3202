"""What the run is made of: library versions and the application's own sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
from pathlib import Path

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "numpy")
APP = Path(__file__).resolve().parents[2]


def library_versions() -> dict[str, str | None]:
    """Python's version and those of the libraries that decide a run's numbers; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}


def code_version() -> dict[str, str]:
    """A short hash of each source file that a run is made of: the packages in app/ and the script that was started."""
    script = Path(sys.argv[0]).resolve()
    files = [*APP.glob("*/**/*.py"), *([script] if script.parent == APP and script.suffix == ".py" else [])]
    return {f"app/{f.relative_to(APP).as_posix()}": hashlib.sha256(f.read_bytes()).hexdigest()[:12] for f in sorted(files)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
