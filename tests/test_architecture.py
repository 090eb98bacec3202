"""Who may import whom, read from the sources: what is written at the top of a file and what is imported inside functions."""

import ast
import graphlib
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
APP = ROOT / "app"
LEVELS = {
    "blocks": 0,
    "collector": 0,
    "failure": 0,
    "activations": 1,
    "background": 1,
    "clock": 1,
    "compiling": 1,
    "config": 1,
    "embeddings": 1,
    "file_problems": 1,
    "fingerprint": 1,
    "lengths": 1,
    "network": 1,
    "order": 1,
    "plan": 1,
    "profiling": 1,
    "pulse": 1,
    "ragged": 1,
    "run_folder": 1,
    "stop": 1,
    "textfile": 1,
    "transfer": 1,
    "versions": 1,
    "waiting": 1,
    "arguments": 2,
    "build_lock": 2,
    "cache": 2,
    "jsonfile": 2,
    "meeting": 2,
    "status": 2,
    "stored_rows": 2,
    "task": 2,
    "tracker": 2,
    "data": 3,
    "optim": 3,
    "tables": 3,
    "zero": 3,
    "columns": 4,
    "launch": 4,
    "memory": 4,
    "processes": 5,
    "shards": 5,
    "checkpoint": 6,
    "ending": 6,
    "local_copy": 6,
    "outputs": 6,
    "precheck": 6,
    "step": 6,
    "evaluation": 7,
    "saving": 7,
    "engine": 8,
    "session": 9,
}


def imports(path):
    """Dotted names of everything a file imports, wherever in it; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def packages(path):
    return {name.partition(".")[0] for name in imports(path)}


SOURCES = sorted(APP.rglob("*.py"))
ENGINE = {path.stem: path for path in sorted((APP / "finetune").glob("*.py")) if path.stem != "__init__"}
PACKAGES = {path.parent.name for path in APP.glob("*/__init__.py")}
TASKS = {path.stem for path in APP.glob("*.py")}


def test_the_walk_sees_imports_at_the_top_and_inside_functions():
    assert "finetune.plan.BatchShape" in imports(ENGINE["processes"])
    assert "deepspeed.utils" in imports(ENGINE["zero"])
    assert {"classify", "finetune", "multilabel"} <= TASKS | PACKAGES


def test_every_module_of_the_engine_has_a_level_and_says_so():
    assert set(ENGINE) == set(LEVELS)
    for name, path in ENGINE.items():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert re.findall(r"\bLevel (\d)", docstring) == [str(LEVELS[name])], path


@pytest.mark.parametrize("name", ENGINE)
def test_a_module_of_the_engine_imports_lower_levels_only(name):
    used = {dotted.split(".")[1] for dotted in imports(ENGINE[name]) if dotted.startswith("finetune.")}
    assert {other for other in used if LEVELS[other] >= LEVELS[name]} == set()


def test_the_engine_knows_no_task():
    ours = PACKAGES | TASKS
    assert {
        name: packages(path) & ours - {"finetune"} for name, path in ENGINE.items() if packages(path) & ours - {"finetune"}
    } == {}


@pytest.mark.parametrize("library", ["deepspeed", "transformers"])
def test_one_module_of_the_engine_knows_the_library(library):
    assert [name for name, path in ENGINE.items() if library in packages(path)] == ["zero"]


def test_nothing_outside_the_engine_knows_deepspeed_or_zero():
    for path in SOURCES:
        if path.parent.name != "finetune":
            assert "deepspeed" not in packages(path), path
            assert "finetune.launching.zero" not in imports(path), path


def test_the_engine_takes_one_thing_of_transformers():
    assert {name for name in imports(ENGINE["zero"]) if name.startswith("transformers")} == {
        "transformers.integrations",
        "transformers.integrations.unset_hf_deepspeed_config",
    }


def test_packages_do_not_import_each_other_in_a_circle():
    graph = {name: set().union(*map(packages, (APP / name).glob("*.py"))) & PACKAGES - {name} for name in PACKAGES}
    graphlib.TopologicalSorter(graph).prepare()
    assert graph["multilabel"] >= {"finetune", "metrics"}


def test_a_task_is_imported_by_nothing_in_the_application_and_a_script_by_nobody():
    scripts = {"scripts"} | {path.stem for path in (ROOT / "scripts").glob("*.py")}
    parts_of_scripts = {path.parent.name for path in (ROOT / "scripts").glob("*/__init__.py")}
    assert len(scripts) > 1
    assert parts_of_scripts
    for path in SOURCES:
        assert not packages(path) & (TASKS | scripts | parts_of_scripts), path
    for path in (ROOT / "scripts").rglob("*.py"):
        assert not packages(path) & scripts, path


def test_no_module_hides_an_installed_one():
    # app/ is the first folder that Python looks into, under every launcher.
    taken = set(importlib.metadata.packages_distributions()) | sys.stdlib_module_names
    assert {"torch", "datasets", "logging"} <= taken
    assert not (TASKS | PACKAGES) & taken
    assert not {path.stem for path in SOURCES} & sys.stdlib_module_names
