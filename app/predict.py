"""Predictions of an exported model, whatever its task: the folder says which.

    python app/predict.py runs/mine/best --text "The team won the cup"
    python app/predict.py runs/mine/best new.csv --output predictions.csv
    cat new.jsonl | python app/predict.py runs/mine/best - > predictions.jsonl
    accelerate launch --config_file accelerate_configs/ddp.yaml app/predict.py runs/mine/best large.csv --output_dir predicted

Predictions go to standard output as JSON lines, or to --output: csv if the name ends so. A file that is there is replaced by
--overwrite only. The same command goes on where it was interrupted. Masks are files: segmentation needs --output_dir. Further
arguments are the task's own, such as --text_column or --per_device_eval_batch_size.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from finetune.command_line import prepare_process
from finetune.errors import InputError
from finetune.launching.shutdown import failures_end_the_job
from finetune.output import written
from finetune.output.predictions import as_line, is_regular_file

BY_MODEL_TYPE = {"small_cnn": "image_classify", "monai_unet": "segment3d"}
BY_ENDING = {
    "ForSequenceClassification": "classify",
    "ForImageClassification": "image_classify",
    "ForSemanticSegmentation": "segment",
    "ForConditionalGeneration": "titlegen",
    "EncoderDecoderModel": "titlegen",
}
BY_ADAPTER = {"SEQ_CLS": "classify", "SEQ_2_SEQ_LM": "titlegen"}
WRITE_FILES = ("segment", "segment3d")  # besides the lines


def task_of(folder: Path) -> str:
    """The task that an exported folder is of. Raises `InputError` for a folder that is of none."""
    for name in ("adapter_config.json", "config.json"):
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise InputError(f"{folder / name}: cannot be read ({error})") from None
        found = _task_of_config(config)
        if found is None:
            known = ", ".join(sorted({*BY_ENDING.values(), *BY_MODEL_TYPE.values()}))
            raise InputError(f"{folder / name} is of no task here ({config.get('architectures')}); known: {known}")
        return found
    raise InputError(f"{folder} is no exported model: it has no config.json; name the folder best/ of a run, or one like it")


def _task_of_config(config: dict[str, Any]) -> str | None:
    known = BY_MODEL_TYPE.get(config.get("model_type")) or BY_ADAPTER.get(config.get("task_type"))
    classes = config.get("architectures") or [""]
    return known or next((task for ending, task in BY_ENDING.items() if classes[0].endswith(ending)), None)


class Request(NamedTuple):
    """What is asked for: a task, this script's own arguments, and those of the task."""

    task: str
    given: argparse.Namespace
    rest: list[str]

    @property
    def answers_in_memory(self) -> bool:
        """Whether texts are to be predicted and nothing is to be written: reading and writing files takes longer to import."""
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        return self.given.text is not None and not (self.given.output or self.given.output_dir or several)


def read_request(argv: list[str] | None = None) -> Request:
    """Reads the command line. Raises `InputError`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL_FOLDER", help="the folder best/ of a run, or one like it")
    parser.add_argument("file", nargs="?", metavar="FILE", help="rows to predict, or - for standard input")
    parser.add_argument("--text", action="append", help="a text to predict, instead of a file; may be given several times")
    parser.add_argument("--output", metavar="FILE", help="where predictions go (default: standard output)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --output, if there is one")
    parser.add_argument("--output_dir", help="a folder for files that are predicted, such as masks")
    given, rest = parser.parse_known_args(argv)
    task = task_of(Path(given.model))
    if (given.file is None) == (given.text is None):
        raise InputError("give either a FILE (- for standard input) or --text")
    if given.text is not None and task not in ("classify", "titlegen"):
        raise InputError(f"--text: {given.model} is a model of {task}, which takes files")
    return Request(task, given, rest)


def command_line(request: Request) -> list[str]:
    """The task's own command for what is asked of this one. Raises `InputError`, also for a file that would be replaced."""
    task, given, rest = request
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if given.output_dir is None and (several or task in WRITE_FILES):
        raise InputError(f"--output_dir is missing: {'several processes share' if several else 'masks go to'} a folder")
    file = given.file if given.text is None else str(_texts(given.text))
    output = given.output or (None if given.output_dir else "/dev/stdout")
    output_dir = given.output_dir or str(_temporary())
    if given.output is not None and is_regular_file(Path(given.output)) and Path(given.output).is_file():
        _replace(Path(given.output), Path(output_dir), given)
    named = {
        "model_name_or_path": given.model,
        "test_file": file,
        "output_dir": output_dir,
        "predictions_file": output,
        "report_to": "none",
    }
    parts = [part for name, value in named.items() if value is not None for part in (f"--{name}", value)]
    script = str(Path(__file__).with_name(f"{task}.py"))
    return [script, "--do_predict", *parts, *(["--quiet"] if output == "/dev/stdout" else []), *rest]


def _replace(file: Path, output_dir: Path, given: argparse.Namespace) -> None:
    """Has the task take a file for one of its own. Raises `InputError` if --overwrite is not given."""
    if not given.overwrite and given.output_dir is None:  # else it may be of an earlier command with this folder
        raise InputError(f"--output {file}: is there already; add --overwrite to replace it, or name another file")
    if given.overwrite and os.environ.get("RANK", "0") == "0":
        output_dir.mkdir(parents=True, exist_ok=True)
        written.add_predictions(output_dir, file, file)


def print_lines(request: Request) -> None:
    """Predicts the texts of --text in this process: the lines that the task's command gives, sooner. Raises `InputError`."""
    from finetune.serving.imports import leave_out_the_unused

    leave_out_the_unused()
    from finetune.serving.predictor import load_predictor

    predictor = load_predictor(request.task, request.given.model, str(_temporary()), request.rest)
    for number, line in enumerate(predictor(request.given.text)):
        sys.stdout.write(as_line({"id": number, **line}))


def _texts(texts: list[str]) -> Path:
    path = _temporary() / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def _temporary() -> Path:
    folder = tempfile.mkdtemp(prefix="predict_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


if __name__ == "__main__":
    prepare_process()
    with failures_end_the_job(debug="--debug" in sys.argv):
        request = read_request()
        if request.answers_in_memory:
            print_lines(request)
        else:
            sys.argv = command_line(request)
    if not request.answers_in_memory:
        runpy.run_path(sys.argv[0], run_name="__main__")
