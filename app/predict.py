"""Predictions of an exported model. The task is read from the model folder.

    python app/predict.py runs/mine/best --text "The team won the cup"
    python app/predict.py runs/mine/best new.csv --output predictions.csv
    cat texts.txt | python app/predict.py runs/mine/best - > predictions.jsonl
    accelerate launch --config_file accelerate_configs/ddp.yaml app/predict.py runs/mine/best large.csv \\
        --output_dir predicted

Standard input may be texts, one on each line; a csv file, whose first line names the column of the texts; or
JSON. Predictions go to standard output (--output -) as JSON lines, or to the file of --output (.csv or JSON
lines). An existing file is replaced only with --overwrite. With --output_dir the same command continues an
interrupted prediction. Segmentation writes masks, so it needs --output_dir. Further arguments are passed to
the task, such as --text_column or --per_device_eval_batch_size.
"""

import argparse
import json
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from samerun import task_scripts
from samerun.cli import set_up_host, shows_traces
from samerun.console import STDOUT, survive_a_lost_console
from samerun.errors import SHOWN_AS, InputError
from samerun.files import temporary_folder
from samerun.run_folder import record_predictions
from samerun.signals import failures_end_the_job

WRITE_FILES = ("segment", "segment3d")  # tasks that write masks besides the lines


def _is_distributed() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def read_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line, with `task`, and `task_arguments`: the further ones, for the task.
    Raises `InputError`."""
    parser = task_scripts.parser(__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL_FOLDER", help="the folder best/ of a run, or one like it")
    add("file", nargs="?", metavar="FILE", help="rows to predict, or - for standard input")
    add(
        "--text",
        action="append",
        help="a text to predict, instead of a file; may be given several times; - reads one from each line "
        "of standard input",
    )
    add("--text_pair", action="append", help="the second text of each --text, for a model of pairs of texts")
    add("--output", metavar="FILE", help="file for the predictions, or - for standard output (the default)")
    add("--overwrite", action="store_true", help="replace the file of --output if it exists")
    add("--output_dir", help="folder for predicted files, such as masks")
    options, further = parser.parse_known_args(argv)
    if further and not further[0].startswith("--") and options.file is None and options.text is None:
        options.file = further.pop(0)  # it stands behind an option
    task = task_scripts.task_of(Path(options.model))
    options.task, options.task_arguments = task, further
    if further and not further[0].startswith("--"):  # else it would become a value of some argument
        raise InputError(
            f"unexpected {further[0]!r}: name one FILE; give each text a --text of its own, in quotes"
        )
    if task_scripts.chosen_words(further, lambda name: name in ("model_name_or_path", "test_file")):
        raise InputError("leave --model_name_or_path and --test_file out: MODEL_FOLDER and FILE are these")
    if (options.file is None) == (options.text is None):
        raise InputError(
            "give either a FILE (- for standard input), in front of the task's arguments, or --text"
        )
    if options.text is not None and task not in ("classify", "titlegen", "tag"):
        raise InputError(f"--text: {options.model} is a model of {task}, which takes files; name a FILE")
    options.text, options.text_pair = map(_in_utf8, (options.text, options.text_pair))
    if options.text == ["-"]:
        try:
            given = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"--text -: standard input is no UTF-8 ({error})") from None
        options.text = [line.removesuffix("\r") for line in given.removesuffix("\n").split("\n") if given]
        if not options.text:
            raise InputError("--text -: standard input is empty; expected a text on each line")
    if options.text_pair is not None and (task != "classify" or options.text is None):
        raise InputError("--text_pair is the second text of a --text, for a model of classify; leave it out")
    if options.text_pair is not None and len(options.text_pair) != len(options.text):
        raise InputError(
            f"--text is given {len(options.text)} times, --text_pair {len(options.text_pair)}; give one for "
            "each"
        )
    return options


def _in_utf8(words: list[str] | None) -> list[str] | None:
    """Words of the command line, which Python has decoded by the locale, from UTF-8 if that is what they
    are."""

    def decoded(word: str) -> str:
        try:
            return os.fsencode(word).decode("utf-8")
        except UnicodeError:
            return word

    return None if words is None else list(map(decoded, words))


def runs_in_memory(options: argparse.Namespace) -> bool:
    """Whether only texts are predicted and no file is written. Then the slow imports for files are
    skipped."""
    writes_no_file = (options.output or "-") in STDOUT and not options.output_dir
    return options.text is not None and writes_no_file and not _is_distributed()


def task_command(options: argparse.Namespace) -> list[str]:
    """The command line of the task's script. Raises `InputError`, also for a file that would be replaced."""
    distributed = _is_distributed()
    if options.output_dir is None and (distributed or options.task in WRITE_FILES):
        raise InputError(
            f"--output_dir is missing: {'several processes share' if distributed else 'masks go to'} a folder"
        )
    file = options.file if options.text is None else _write_texts(options.text, options.text_pair)
    output = options.output or (None if options.output_dir else "-")
    output_dir = options.output_dir or str(temporary_folder("predict_"))
    if output is not None and output not in STDOUT and Path(output).is_file():
        # An earlier command with this folder may have written the file.
        if not options.overwrite and options.output_dir is None:
            raise InputError(
                f"--output {output}: is there already; add --overwrite to replace it, or name another file"
            )
        if options.overwrite and os.environ.get("RANK", "0") == "0":  # the task replaces its own files
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            record_predictions(Path(output_dir), Path(output))
    named = {
        "model_name_or_path": options.model,
        "test_file": file,
        "output_dir": output_dir,
        "predictions_file": output,
        "report_to": "none",
        "text_pair_column": None if options.text_pair is None else "text_pair",
    }
    SHOWN_AS["--predictions_file"] = "--output"
    parts = [part for name, value in named.items() if value is not None for part in (f"--{name}", value)]
    script = str(Path(__file__).with_name(f"{options.task}.py"))
    return [script, "--do_predict", *parts, *options.task_arguments]


def print_predictions(options: argparse.Namespace) -> None:
    """Predicts the texts of --text in this process. The output is that of the task's command. Raises
    `InputError`."""
    set_up_host()
    from samerun.predictions import write
    from samerun.serving.predictor import load_predictor

    pairs = options.text_pair
    predictor = load_predictor(options.task, options.model, options.task_arguments)
    items = options.text if pairs is None else list(zip(options.text, pairs, strict=True))
    lines = ({"id": number, **line} for number, line in enumerate(predictor(items)))
    write(Path("-"), Path(), lines, "")


def _write_texts(texts: list[str], pairs: list[str] | None) -> str:
    path = temporary_folder("predict_") / "texts.jsonl"
    rows = [{"text": text, "tokens": text} for text in texts]
    for row, pair in zip(rows, pairs or [], strict=False):
        row["text_pair"] = pair
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


if __name__ == "__main__":
    survive_a_lost_console()
    with failures_end_the_job(debug=shows_traces(sys.argv)):
        options = read_options()
        if runs_in_memory(options):
            print_predictions(options)
        else:
            sys.argv = task_command(options)
    if not runs_in_memory(options):
        runpy.run_path(sys.argv[0], run_name="__main__")
