"""Finds the oldest and the newest version of a library that pass the fast tests, for the ranges in
pyproject.toml.

    python scripts/version_range.py transformers --oldest 5.15 [--newest 5.23] [-- pytest arguments]

Tries the last patch of each minor version: from the pinned version down to --oldest, then up to --newest,
until one fails. Each is installed into a temporary folder before the environment's in PYTHONPATH, with its
dependencies but without torch. Run it in the environment of scripts/test.sh; every version takes as long as
the fast tests.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[1]
FAST = ["-q", "--numprocesses", "2", "--dist", "loadgroup", "-m", "not slow", "--maxfail", "5"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
NEED_TORCH = (
    "accelerate",
    "deepspeed",
    "peft",
)  # installed without dependencies, to keep the environment's torch


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library")
    parser.add_argument("--oldest", type=Version, help="oldest version to try (default: the pinned one)")
    parser.add_argument("--newest", type=Version, help="newest version to try (default: the latest)")
    split = (
        sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    )  # argparse cannot have them after an option
    options, tests = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :] or FAST
    pinned = Version(importlib.metadata.version(options.library))
    versions = last_patches(options.library)
    up = [v for v in versions if v > pinned and (options.newest is None or v <= options.newest)]
    down = [
        v
        for v in reversed(versions)
        if (options.oldest or pinned) <= v < pinned and v.release[:2] != pinned.release[:2]
    ]
    ends = [last_that_passes(options.library, tests, pinned, direction) for direction in (down, up)]
    print(f"{options.library}: {ends[0]} to {ends[1]}")
    return 0


def last_patches(library: str) -> list[Version]:
    """The last release of each minor version, oldest first."""
    listed = subprocess.run(
        [*PIP, "index", "versions", library], check=True, capture_output=True, text=True
    ).stdout
    versions = [Version(text) for text in re.search("Available versions: (.*)", listed)[1].split(", ")]
    return list(
        {version.release[:2]: version for version in sorted(versions) if not version.is_prerelease}.values()
    )


def last_that_passes(library: str, tests: list[str], pinned: Version, candidates: list[Version]) -> Version:
    passed = pinned
    for version in candidates:
        if not passes(library, version, tests):
            break
        passed = version
    return passed


def passes(library: str, version: Version, tests: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        no_deps = ["--no-deps"] if library in NEED_TORCH else []
        subprocess.run(
            [*PIP, "install", "-q", "--target", folder, *no_deps, f"{library}=={version}"], check=True
        )
        variables = {
            "PYTHONPATH": folder,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *tests], cwd=REPOSITORY, env=os.environ | variables
        )
    print(f"{library} {version}: {'passes' if run.returncode == 0 else 'fails'}", flush=True)
    return run.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
