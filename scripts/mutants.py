#!/usr/bin/env python3
"""Puts faults into a copy of the code, one at a time, and counts those that the fast tests find.

    python scripts/mutants.py FOLDER [--commit REF] [--random N] [--seed N] [--files N] [--only PATTERN]
        [--list]

FOLDER gets the tree of the commit (default: HEAD). The faults are those of guarding/faults.py and N drawn at
random from the modules of order, step, checkpoints, readers, thresholds and launching: a comparison is
changed, a number is one more, `and` becomes `or`, a `not` or the value of a `return` is dropped. The fast
tests that import the module run until one fails, in a fork of a process that has imported the libraries.
Prints each fault and, last, the shares found.

Exit codes: 0 done; 2 bad arguments.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from guarding.faults import FAULTS

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT = 300  # seconds; a fault that hangs the tests is found
MODULES = re.compile(
    r"samerun/.*(order|batches|training|optimizer|schedules|plan|checkpoint|average|best_models|"
    r"evaluate|tables|splits|stream|labels|multi_label\w*|predictions|export|start|"
    r"runtime|deepspeed|fsdp|signals|machines|run_folder|"
    r"files)\.py$"
)
SLOW_FOLDERS = {"launch", "faults", "gpu", "parity", "docs", "scripts", "bad_input"}
OPPOSITE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


class Mutant(NamedTuple):
    """A fault: the file's text with it, and where it is."""

    name: str
    path: Path
    text: str


def by_hand(tree: Path) -> Iterator[Mutant | str]:
    """The faults of `FAULTS`; the name alone of one whose place is gone."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((tree / "app").rglob("*.py"))}
    for name, pattern, replacement in FAULTS:
        found = next((path for path, text in sources.items() if re.search(pattern, text)), None)
        yield (
            name
            if found is None
            else Mutant(name, found, re.sub(pattern, replacement, sources[found], count=1))
        )


def at_random(tree: Path, count: int, seed: int) -> list[Mutant]:
    """`count` faults from the modules of `MODULES`."""
    places = []
    for path in sorted((tree / "app").rglob("*.py")):
        if MODULES.search(path.as_posix()):
            text = path.read_text(encoding="utf-8")
            places += [(path, text, *change) for change in changes(ast.parse(text))]
    chosen = random.Random(seed).sample(places, min(count, len(places)))
    return [Mutant(f"line {node.lineno}: {what}", path, with_change(text, node, new))
            for path, text, node, new, what in chosen]  # fmt: skip


def changes(module: ast.Module) -> Iterator[tuple[ast.expr, ast.expr, str]]:
    """(node, its wrong form, both in words) of every place of a module."""
    skipped = set()  # texts of messages, types, defaults of arguments
    for node in ast.walk(module):
        ignored = []
        if isinstance(node, ast.JoinedStr | ast.Raise):
            ignored = [node]
        elif isinstance(node, ast.FunctionDef):
            ignored = [*filter(None, [node.returns]), *(a.annotation for a in node.args.args if a.annotation)]
        elif isinstance(node, ast.AnnAssign):
            ignored = [node.annotation]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("option", "say"):
            ignored = [node]
        skipped.update(inner for part in ignored for inner in ast.walk(part))
    for node in ast.walk(module):
        if node in skipped:
            continue
        new = None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            new = ast.Compare(node.left, [OPPOSITE[type(node.ops[0])]()], node.comparators)
        elif isinstance(node, ast.BoolOp):
            new = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            new = node.operand
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            new = ast.Constant(node.value + 1)
        elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
            node, new = node.value, ast.Constant(None)
        if new is not None:
            yield node, new, f"{ast.unparse(node)[:60]} -> {ast.unparse(new)[:60]}"


def with_change(text: str, node: ast.expr, new: ast.expr) -> str:
    """The text with `new` in the place of `node`."""
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return (text.encode()[:begin] + f"({ast.unparse(new)})".encode() + text.encode()[end:]).decode()


@functools.cache
def tests_of(tree: Path, path: Path, count: int) -> list[str]:
    """`count` files of fast tests that import a module: those of its name first, then the smallest. If they
    are few, also tests of the modules that import it."""
    own = importing(path.relative_to(tree / "app"))
    found = []
    for test in (tree / "tests").rglob("test_*.py"):
        if not SLOW_FOLDERS & set(test.relative_to(tree / "tests").parts):
            text = test.read_text(encoding="utf-8")
            if own.search(text) or path.stem in test.stem:
                found.append((test.stem != f"test_{path.stem}", len(text), str(test)))
    names = [test for _, _, test in sorted(found)]
    if len(names) < count:
        for user in sorted((tree / "app").rglob("*.py")):
            if own.search(user.read_text(encoding="utf-8")):
                names += [str(test) for test in (tree / "tests").rglob(f"test_{user.stem}.py")]
    return list(dict.fromkeys(names))[:count]


def importing(path: Path) -> re.Pattern:
    """A pattern of imports of a module, from its path in app/."""
    dotted = path.with_suffix("").as_posix().replace("/", ".")
    package, _, name = dotted.rpartition(".")
    within = rf"|from {re.escape(package)} import (\([^)]*)?.*\b{name}\b" if package else ""
    return re.compile(rf"(import|from) {re.escape(dotted)}\b{within}")


def passes(tree: Path, tests: list[str]) -> bool:
    """Whether tests pass, in a forked process. The libraries are imported here, the application is not."""
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(tree / "last_tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        import pytest

        options = [
            "-q",
            "-x",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        code = 1
        try:
            code = int(pytest.main([*options, *tests]))
        finally:
            os._exit(code)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) in (0, 5)  # 5: no fast test
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def outcome(
    tree: Path, mutant: Mutant, tests: list[str], baseline: dict[tuple[str, ...], bool], number: int
) -> str:
    """ "found", "survives", or why the fault says nothing."""
    if not tests:
        return "no test"
    if tuple(tests) not in baseline:
        baseline[tuple(tests)] = passes(tree, tests)
    if not baseline[tuple(tests)]:
        return "tests fail anyway"
    text = mutant.path.read_text(encoding="utf-8")
    now = time.time()
    try:
        mutant.path.write_text(mutant.text, encoding="utf-8")
        os.utime(mutant.path, (now, now + 10 * number))  # compiled files are compared by time and size
        return "survives" if passes(tree, tests) else "found"
    finally:
        mutant.path.write_text(text, encoding="utf-8")
        os.utime(mutant.path, (now, now + 10 * number + 5))


def export(folder: Path, commit: str) -> Path:
    tree = folder / "tree"
    subprocess.run(["rm", "-rf", str(tree)], check=True)
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "x", "-C", str(tree)], input=archive.stdout, check=True)
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for the copy of the code")
    parser.add_argument("--commit", default="HEAD", help="whose code and tests (default: HEAD)")
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="faults drawn at random (default: 0)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=5, help="files of tests per fault (default: 5)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="faults whose name matches")
    parser.add_argument("--list", action="store_true", help="print the faults and their tests, and end")
    args = parser.parse_args()
    tree = export(args.folder.resolve(), args.commit)
    kinds = {"by hand": list(by_hand(tree)), "at random": at_random(tree, args.random, args.seed)}
    if not args.list:
        sys.path[:0] = [str(tree / name) for name in ("app", "scripts", "tests")]
        import datasets  # noqa: F401
        import pytest  # noqa: F401
        import sklearn.metrics  # noqa: F401
        import transformers.models.bert.modeling_bert  # noqa: F401
    counts, baseline, number = Counter(), {}, 0
    for kind, mutants in kinds.items():
        for mutant in mutants:
            if not re.search(args.only, mutant if isinstance(mutant, str) else mutant.name):
                continue
            number += 1
            if isinstance(mutant, str):
                state, place = "gone", ""
            else:
                place = mutant.path.relative_to(tree / "app").as_posix()
                tests = tests_of(tree, mutant.path, args.files)
                state = " ".join(tests) if args.list else outcome(tree, mutant, tests, baseline, number)
            counts[kind, state] += 1
            print(f"{state:18}{place}  {mutant if isinstance(mutant, str) else mutant.name}", flush=True)
    for kind in kinds:
        found, survived = counts[kind, "found"], counts[kind, "survives"] + counts[kind, "no test"]
        others = {state: count for (k, state), count in counts.items() if k == kind}
        if found + survived:
            print(f"{kind}: {found} of {found + survived} found, {found / (found + survived):.0%}; {others}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
