"""Tasks and tools by name, and the task of an exported model. Imports no torch."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from samerun.errors import InputError

PACKAGE = Path(__file__).resolve().parent
# An installation has tasks in the package, a checkout in app/.
TASK_FOLDERS = (PACKAGE / "tasks", PACKAGE.parent)
BY_MODEL_TYPE = {"small_cnn": "image_classify", "monai_unet": "segment3d"}
BY_ENDING = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForImageClassification": "image_classify",
    "ForSemanticSegmentation": "segment",
    "ForConditionalGeneration": "titlegen",
    "EncoderDecoderModel": "titlegen",
}
BY_ADAPTER = {"SEQ_CLS": "classify", "SEQ_2_SEQ_LM": "titlegen", "TOKEN_CLS": "tag"}


def scripts() -> dict[str, Path]:
    """The files of the tasks, of predict and of serve, by name."""
    folder = next(folder for folder in TASK_FOLDERS if (folder / "predict.py").is_file())
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def tools() -> dict[str, Path]:
    """The files of the tools around a run, by name."""
    files = sorted((PACKAGE / "tools").glob("*.py"))
    return {path.stem: path for path in files if path.stem != "__init__"}


def shipped(name: str) -> Path:
    """The folder accelerate_configs/ or ds_configs/: an installation has it in the package, a checkout at its
    top."""
    return next(place for place in (PACKAGE / name, PACKAGE.parents[1] / name) if place.is_dir())


def path_of(task: str) -> Path:
    """The script of a task that is given by name, such as image-classify, or by path."""
    return scripts().get(task.replace("-", "_"), Path(task))


def load(script: Path) -> tuple[type, type]:
    """(the class `Arguments` of a task's script, its subclass of `samerun.task.Task`). Raises `InputError`
    for another file or none."""
    if not script.is_file():
        raise InputError(f"{script}: no such file; name a task's script, such as app/classify.py")
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


def task_of(folder: Path) -> str:
    """The task of an exported model folder. Raises `InputError` for a folder of no known task."""
    for name in ("adapter_config.json", "config.json"):
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise InputError(f"{folder / name}: cannot be read ({error})") from None
        task = _task_of_config(config)
        if task is None:
            known = ", ".join(sorted({*BY_ENDING.values(), *BY_MODEL_TYPE.values()}))
            raise InputError(
                f"{folder / name}: no task for a model of {config.get('architectures')}; the tasks "
                f"are {known}"
            )
        return task
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name the folder best/ of a run, or one like it")
    raise InputError(
        f"{folder} is no exported model: it has no config.json; name the folder best/ of a run, or "
        "one like it"
    )


def _task_of_config(config: dict[str, Any]) -> str | None:
    task = BY_MODEL_TYPE.get(config.get("model_type")) or BY_ADAPTER.get(config.get("task_type"))
    classes = config.get("architectures") or [""]
    return task or next((task for ending, task in BY_ENDING.items() if classes[0].endswith(ending)), None)
