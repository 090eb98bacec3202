"""Who may import whom, which file knows which library, and how large the whole may become."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
APP = ROOT / "app"
SOURCES = sorted(APP.rglob("*.py"))
TOOLS = "samerun.tools"  # and its packages: what users run beside a training
TASKS = {path.stem for path in APP.glob("*.py")} - {"predict", "serve"}  # which start one of them
# Packages beside the engine: kinds of data, and what tasks take from elsewhere.
KINDS = {f"samerun.{name}" for name in ("text", "images", "volumes", "models")}
# Lines of Python by folder, rounded up to a hundred, and modules in app/ without __init__. Both are to fall.
MOST_LINES = {"app": 32_500, "scripts": 3_300, "tests": 28_800}
MOST_MODULES = 122
# Everything that is imported inside a function, and why. What is not here stands at the top of its file.
IMPORTED_LATER = {
    "deepspeed": "takes seconds, and must find DS_ACCELERATOR set; only launches that ask for it need it",
    "transformers.integrations": "as deepspeed",
    "samerun.kernels.loops": "imports numba, half a second; only training needs it",
    "samerun.data.files": "imports pyarrow; cli.py needs it only for lines of standard input",
    "fsspec": "a third of a second; only --mirror_to needs it",
    "datasets": "takes half a second, with pandas; only files need it",
    "samerun.serving.predictor": "imports torch; only predict.py's --text and serve.py need it",
    **dict.fromkeys(
        [
            *("samerun.export", "samerun.launch", "samerun.main", "samerun.mirror", "samerun.predictions"),
            *("samerun.runtime", "samerun.start", "samerun.task"),
        ],
        "import torch; a script sets the environment before",
    ),
    "samerun.serving.web": "imports aiohttp, which is optional (requirements-serve.txt)",
    "evaluate": "takes up to a second; only --metrics needs it",
    "bitsandbytes": "optional (requirements-8bit.txt)",
    "matplotlib": "half a second; figures are drawn once, at the end",
    "jinja2": "as matplotlib",
    "sklearn": "a second; only scores and figures need it",
    "scipy": "as sklearn",
    "rich": "for bars on a terminal and tables at the end",
    "peft": "optional (requirements-lora.txt)",
    "samerun.models.quantized": "imports bitsandbytes",
    "rouge_score": "imports nltk, a second; only titles are scored by it",
    "rjieba": "its dictionary takes a third of a second; only Chinese words need it",
    "torch.distributed": "only jobs of several machines meet before torch is imported",
}


MODULES = {
    ".".join(path.relative_to(APP).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
}


def package_of(module):
    """A module directly in app/ or in samerun/ counts as one; the kernels' packages count as one."""
    if module.startswith("samerun.kernels"):
        return "samerun.kernels"
    is_package = MODULES[module].name == "__init__.py"
    parent = module if is_package else module.rpartition(".")[0]
    return module if parent in ("", "samerun") else parent


def is_tool(module):
    return f"{module}.".startswith(f"{TOOLS}.")


def walk(tree):
    """All nodes but those that only type checkers see."""
    waiting = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if not isinstance(child, ast.If) or getattr(child.test, "id", None) != "TYPE_CHECKING":
                waiting.append(child)
                yield child


def imports_of(node):
    """Dotted names of what an import statement imports; `from a import b` gives a.b."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    assert node.level == 0, f"line {node.lineno}: a relative import"
    return {f"{node.module}.{alias.name}" for alias in node.names}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path):
    """Dotted names of everything a file imports, wherever in it."""
    nodes = walk(parsed(path))
    return set().union(*(imports_of(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)))


def ours(dotted):
    """The module of ours that a dotted name is in; None for others'."""
    while dotted and dotted not in MODULES:
        dotted = dotted.rpartition(".")[0]
    return dotted or None


GRAPH: dict[str, set[str]] = {}
for name, file in MODULES.items():
    used = {package_of(found) for found in map(ours, imports(file)) if found}
    GRAPH.setdefault(package_of(name), set()).update(used - {package_of(name)})


def test_the_walk_sees_imports_at_the_top_and_inside_functions():
    assert "deepspeed.utils.groups" in imports(MODULES["samerun.deepspeed"])
    assert {"samerun.runtime", "samerun.data", "samerun.additional_metrics"} <= set(GRAPH)
    assert {"classify", "titlegen", "segment", "segment3d"} <= TASKS


def test_packages_import_downwards_only():
    graphlib.TopologicalSorter(GRAPH).prepare()  # raises for a circle
    assert GRAPH["samerun.errors"] == set()


@pytest.mark.parametrize("folder", MOST_LINES)
def test_the_whole_stays_small(folder):
    files = list((ROOT / folder).rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert lines <= MOST_LINES[folder], "remove as many lines as you add, or raise MOST_LINES with a reason"
    if folder == "app":
        assert sum(path.name != "__init__.py" for path in files) <= MOST_MODULES


def test_the_engine_knows_no_task_and_no_kind_of_data():
    for package in GRAPH.keys() - KINDS - TASKS - {"predict", "serve"}:
        if not is_tool(package):
            assert not GRAPH[package] & (TASKS | KINDS), package
    text_fields = ("max_length", "text_column", "tokenizer", "head_learning_rate", "base_model_prefix")
    for name, path in MODULES.items():
        if name in ("samerun.main", "samerun.training", "samerun.evaluate", "samerun.plan"):
            source = path.read_text(encoding="utf-8")
            assert [word for word in text_fields if word in source] == [], name


def importers(library):
    return [name for name, path in MODULES.items() if library in {d.split(".")[0] for d in imports(path)}]


ONLY = {"deepspeed": "deepspeed", "monai": "volumes.network", "nibabel": "volumes.nifti"}


@pytest.mark.parametrize("library", ONLY)
def test_a_library_is_imported_by_one_module(library):
    assert importers(library) == [f"samerun.{ONLY[library]}"]


def test_two_modules_of_the_engine_know_transformers():
    others = TASKS | KINDS | {"samerun.kernels"}
    engine = [name for name in importers("transformers") if package_of(name) not in others]
    assert [name for name in engine if not is_tool(name)] == ["samerun.deepspeed", "samerun.export"]


def test_imports_inside_functions_have_a_reason():
    seen = set()
    for name, path in MODULES.items():
        if is_tool(name):
            continue  # answers --help, and finds wrong arguments, before it imports torch
        functions = [node for node in walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
        for node in {inner for function in functions for inner in ast.walk(function)}:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for dotted in imports_of(node):
                    reasons = [known for known in IMPORTED_LATER if f"{dotted}.".startswith(f"{known}.")]
                    assert reasons, f"{name}:{node.lineno} imports {dotted} inside a function"
                    seen.update(reasons)
    assert seen == set(IMPORTED_LATER)


def test_only_the_cache_reads_a_clock_that_may_jump():
    readers = [name for name, path in MODULES.items() if "time.time" in path.read_text(encoding="utf-8")]
    assert [name for name in readers if not is_tool(name)] == ["samerun.data.cache"]


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_task_is_one_class_in_one_file(task):
    classes = [node for node in parsed(APP / f"{task}.py").body if isinstance(node, ast.ClassDef)]
    assert len(classes) == 2  # its arguments and itself
    methods = [node.name for node in classes[1].body if isinstance(node, ast.FunctionDef)]
    order = [
        "build", "num_targets", "loss_sum", "predict", "score", "export", "load_exported", "lines", "card"
    ]  # fmt: skip
    assert [name for name in methods if name in order] == order  # as a run calls them


def test_the_run_of_any_task_is_a_table_of_contents():
    tree = parsed(MODULES["samerun.main"])
    (function,) = (node for node in tree.body if getattr(node, "name", None) == "run_task")
    assert function.end_lineno - function.lineno < 60


def test_a_tool_is_imported_by_tools_only():
    assert is_tool("samerun.tools.moving")
    assert TOOLS in GRAPH
    assert [package for package in GRAPH if any(map(is_tool, GRAPH[package])) and not is_tool(package)] == []


def test_a_task_is_imported_by_nothing_in_the_application_and_a_script_by_nobody():
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    parts_of_scripts = {path.parent.name for path in (ROOT / "scripts").glob("*/__init__.py")}
    assert len(scripts) > 1
    assert parts_of_scripts
    for path in SOURCES:
        first = {dotted.split(".")[0] for dotted in imports(path)}
        assert not first & (TASKS | {"scripts"} | scripts | parts_of_scripts), path
    for path in (ROOT / "scripts").rglob("*.py"):
        assert not {dotted.split(".")[0] for dotted in imports(path)} & scripts, path
