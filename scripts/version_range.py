"""Finds the oldest and the newest version of a library that pass the fast tests, for the ranges in
pyproject.toml.

    python scripts/version_range.py transformers --oldest 5.15 [--newest 5.23] [-- pytest arguments]
    python scripts/version_range.py --floor [-- pytest arguments]

Tries the last patch of each minor version: from the pinned version down to --oldest, then up to --newest,
until one fails. Each is installed into a temporary folder before the environment's in PYTHONPATH, with its
dependencies but without torch. Run it in the environment of scripts/test.sh; every version takes as long as
the fast tests.

--floor makes an environment of all lower bounds. `pip install .` must replace nothing in it, and the fast
tests pass after the extras' lower bounds are added.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[1]
FAST = ["-q", "--numprocesses", "2", "--dist", "loadgroup", "-m", "not slow", "--maxfail", "5"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
AS_IN_TEST_SH = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
NEED_TORCH = ("accelerate", "deepspeed", "peft")  # without dependencies, to keep the environment's torch


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", nargs="?")
    parser.add_argument(
        "--floor", action="store_true", help="test the lower bounds of all libraries together"
    )
    parser.add_argument("--oldest", type=Version, help="oldest version to try (default: the pinned one)")
    parser.add_argument("--newest", type=Version, help="newest version to try (default: the latest)")
    split = (
        sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    )  # argparse cannot have them after an option
    options, tests = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :] or FAST
    if options.floor:
        return 0 if floor_passes(tests) else 1
    if options.library is None:
        parser.error("name a library, or give --floor")
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


def lower_bounds() -> tuple[list[str], list[str]]:
    """NAME==VERSION for the lower bound of each dependency in pyproject.toml, and of each extra's that is no
    dependency."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [project["dependencies"], *project["optional-dependencies"].values()]
    bounds: dict[str, str] = {}
    for requirement in (Requirement(line) for line in chain(*lines)):
        (bound,) = (part.version for part in requirement.specifier if part.operator == ">=")
        bounds.setdefault(requirement.name, bound)
    exact = [f"{name}=={bound}" for name, bound in bounds.items()]
    return exact[: len(lines[0])], exact[len(lines[0]) :]


def floor_passes(tests: list[str]) -> bool:
    """Whether an environment of all lower bounds needs no other version and passes the tests."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder) / "bin" / "python")
        install = [python, "-m", "pip", "--disable-pip-version-check", "install"]
        needed, extras = lower_bounds()
        subprocess.run([*install, "-q", *needed], check=True)
        dry = [*install, "--dry-run", "--quiet", "--report", "-", str(REPOSITORY)]
        report = json.loads(subprocess.run(dry, check=True, stdout=subprocess.PIPE, text=True).stdout)
        would_install = {item["metadata"]["name"] for item in report["install"]}
        print(f"pip install . would install {', '.join(sorted(would_install))}", flush=True)
        if would_install != {"samerun"}:
            return False
        # torchvision: for SegFormer before transformers 5.22
        pins = (REPOSITORY / "tests" / "requirements.txt").read_text(encoding="utf-8").splitlines()
        # MkDocs needs a newer Jinja2; only a slow test builds the site
        tools = [pin.partition("#")[0] for pin in pins if pin[:1] not in ("", "#") and "mkdocs" not in pin]
        subprocess.run([*install, "-q", *needed, *extras, "torchvision", *map(str.strip, tools)], check=True)
        no_onnx = ["--ignore", "tests/scripts/test_export_onnx.py"]  # this extra needs transformers 5.23
        variables = os.environ | AS_IN_TEST_SH | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
        command = [python, "-m", "pytest", *tests, *no_onnx]
        return subprocess.run(command, cwd=REPOSITORY, env=variables).returncode == 0


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
        variables = os.environ | AS_IN_TEST_SH | {"PYTHONPATH": folder}
        run = subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=REPOSITORY, env=variables)
    print(f"{library} {version}: {'passes' if run.returncode == 0 else 'fails'}", flush=True)
    return run.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
