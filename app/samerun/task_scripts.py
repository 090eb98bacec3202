"""Tasks and tools by name, the command lines of tools, and the task of a model. Imports no torch."""

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samerun.errors import EXIT_BAD_INPUT, EXIT_STOPPED, InputError, StopRequested, TrainingError
from samerun.files import write_json
from samerun.parsing import parse, validate
from samerun.plan import Modes
from samerun.trainer_names import TRAINER_NAMES

PACKAGE = Path(__file__).resolve().parent
# An installation has tasks in the package, a checkout in app/.
TASK_FOLDERS = (PACKAGE / "tasks", PACKAGE.parent)
BY_MODEL_TYPE = {"small_cnn": "image_classify", "monai_unet": "segment3d"}
# Part of the model class -> task.
BY_CLASS = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForImageClassification": "image_classify",
    "ForSemanticSegmentation": "segment",
    "ForConditionalGeneration": "titlegen",
    "EncoderDecoderModel": "titlegen",
    "MarianMTModel": "titlegen",
}
BY_ADAPTER = {"SEQ_CLS": "classify", "SEQ_2_SEQ_LM": "titlegen", "TOKEN_CLS": "tag"}
_loaded: dict[str, tuple[Path, bytes]] = {}  # name of a module -> the script that it was made of
NO_OUTPUT_DIR = "no_output"  # a value for --output_dir; nothing is written there


def scripts() -> dict[str, Path]:
    """The files of the tasks, of predict and of serve, by name."""
    folder = next(folder for folder in TASK_FOLDERS if (folder / "predict.py").is_file())
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def is_ours(task_class: type) -> bool:
    """Whether a task comes with the application."""
    file = getattr(sys.modules[task_class.__module__], "__file__", None)  # none in a notebook
    return file is not None and Path(file).resolve() in scripts().values()


def tools() -> dict[str, Path]:
    """The files of the tools around a run, by name."""
    files = sorted((PACKAGE / "tools").glob("*.py"))
    return {path.stem: path for path in files if path.stem != "__init__"}


def path_of(task: str) -> Path:
    """The script of a task that is given by name, such as image-classify, or by path."""
    return scripts().get(task.replace("-", "_"), Path(task))


def load(script: Path) -> tuple[type, type]:
    """(the class `Arguments` of a task's script, its subclass of `samerun.task.Task`). Raises `InputError`
    for another file or none."""
    if not script.is_file():
        raise InputError(f"{script}: no such file; name a task's script, such as app/classify.py")
    source = script.resolve(), script.read_bytes()
    if _loaded.get(script.stem, source) != source:  # a notebook calls `train` again after an edit
        sys.modules.pop(script.stem, None)
        # Python compares size and second only.
        Path(importlib.util.cache_from_source(source[0])).unlink(missing_ok=True)
    _loaded[script.stem] = source
    folder = str(script.resolve().parent)
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(script.stem)
    finally:
        sys.path.remove(folder)
    if Path(module.__file__).resolve() != script.resolve():
        raise InputError(f"{script}: {module.__file__} is loaded by the same name; rename one of them")
    from samerun.task import Task  # imports torch: after the script has set its environment

    classes = [value for value in vars(module).values() if isinstance(value, type)]
    tasks = [cls for cls in classes if cls.__module__ == module.__name__ and issubclass(cls, Task)]
    if not hasattr(module, "Arguments") or len(tasks) != 1:
        raise InputError(
            f"{script}: not a task's script; expected a class Arguments and one subclass of samerun.task.Task"
        )
    return module.Arguments, tasks[0]


def parser(description: str, **settings: Any) -> argparse.ArgumentParser:
    """A parser whose --help is `description`, with its lines as they are."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=layout, **settings)


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option for whole numbers."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: expected at least {least}")
        return int(text)

    return number


def tool_parser(description: str) -> argparse.ArgumentParser:
    """A `parser` for a tool's own options, then TASK and the command's ARGS."""
    made = parser(description)
    made.add_argument("script", type=path_of, metavar="TASK")
    made.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    return made


def read_command(script: Path, words: list[str]) -> tuple[Any, type]:
    """(the command's arguments, the class of its task). Raises `InputError`."""
    arguments_class, task_class = load(script)
    arguments = parse(arguments_class, words)
    validate(arguments)
    return arguments, task_class


def as_words(arguments: dict[str, Any]) -> list[str]:
    """Arguments as words of a command line."""
    return [word for name, value in arguments.items() for word in (f"--{name}", str(value))]


def with_changes(words: list[str], changes: dict[str, Any]) -> list[str]:
    """The words of a command line with changed arguments, each given once: the changed ones are last. None
    leaves an argument out."""
    kept = chosen_words(words, lambda name: name not in changes)
    return [*kept, *as_words({name: value for name, value in changes.items() if value is not None})]


def chosen_words(words: list[str], is_chosen: Callable[[str], bool]) -> list[str]:
    """The words of a command line that belong to arguments which are chosen by name, also where another name
    of them is written."""
    found, is_kept = [], True
    for word in words:
        if word.startswith("--"):  # all words up to the next argument are values of this one
            name = word[2:].partition("=")[0].replace("-", "_")
            other = TRAINER_NAMES.get(name)
            is_kept = is_chosen((other and other.argument) or name)
        if is_kept:
            found.append(word)
    return found


def task_to_read(script: Path, words: list[str]) -> tuple[Any, Modes]:
    """(the task of a training command whose data are read without training, modes that read all its files).
    Raises `InputError`."""
    arguments, task_class = read_command(script, ["--output_dir", NO_OUTPUT_DIR, *words])
    has_test = arguments.test_file is not None or "test" in getattr(arguments, "dataset_splits", ())
    return task_class(arguments), Modes(train=True, evaluate=True, predict=has_test)


def write_settings(file: Path, arguments: dict[str, Any]) -> None:
    """Writes arguments, as run.json has them, to a file for --config."""
    objects = {name: json.dumps(value) for name, value in arguments.items() if isinstance(value, dict)}
    write_json(file, arguments | objects)


def run_tool(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit code of a tool. Prints why it failed, such as the problems of its input, or was stopped."""
    try:
        return main(argv)
    except (InputError, TrainingError) as error:
        problems = getattr(error, "problems", [str(error)])
        print(*(f"error: {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return error.exit_code
    except (StopRequested, KeyboardInterrupt) as error:
        print(f"stopped: {error}", file=sys.stderr)
        return EXIT_STOPPED
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error}", file=sys.stderr)  # such as a file in place of a folder
        return EXIT_BAD_INPUT


def task_of(folder: Path) -> str:
    """The task of an exported model folder. Raises `InputError` for a folder of no known task."""
    problem = " is no exported model: it has no config.json" if folder.is_dir() else ": no such folder"
    problem = f"{folder}{problem}; name the folder best/ of a run, or one like it"
    for name in ("adapter_config.json", "config.json"):
        try:
            config = dict(json.loads((folder / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            continue
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{folder / name}: cannot be read ({error})") from None
        task = BY_MODEL_TYPE.get(config.get("model_type")) or BY_ADAPTER.get(config.get("task_type"))
        model_class = (config.get("architectures") or [""])[0]
        task = task or next((task for part, task in BY_CLASS.items() if part in model_class), None)
        if task is not None:
            return task
        known, found = sorted({*BY_CLASS.values(), *BY_MODEL_TYPE.values()}), config.get("architectures")
        problem = f"{folder / name}: no task for a model of {found}; the tasks are {', '.join(known)}"
    raise InputError(problem)
