"""Random combinations of arguments, drawn from the parser's own table, on small files: a command ends with
exit code 0, or with 2 and a message; it writes into its output folder only, and a refusal changes nothing. A
training that is stopped and resumed ends with the same bytes.

    MISUSE=200 python -m pytest tests/bad_input/test_misuse.py     more combinations than the suite's
"""

import dataclasses
import importlib
import os
import random
import shutil
from pathlib import Path

import launchers
import masks_job
import pytest
from images_job import write_folder
from launchers import as_words, write_csv
from run_folders import contents

from samerun import signals
from samerun.tools.soak import differences
from samerun.training import Training

NUMBER = int(os.environ.get("MISUSE", 12))
TASKS = ("classify", "titlegen", "image_classify", "segment")
# What starts other programs, waits, or is drawn for every command below.
LEFT_OUT = {
    "deepspeed", "ddp_backend", "start_timeout", "push_to_hub",
    "output_dir", "train_file", "validation_file", "config_name", "from_scratch", "max_steps", "use_cpu",
    "dataset_name", "tokenizer_type", "vocab_size", "profile", "torch_compile", "config", "log_level",
    "report_to", "test_file", "image_size", "max_train_time", "trust_remote_code", "num_train_epochs",
}  # fmt: skip
NUMBERS = ["0", "1", "2", "-1", "0.5", "1e-3", "1e9", "nan"]
WORDS = [*NUMBERS, "", "a", "a,b", "none", "true", "{}", "cosine", "é\u2028"]


def write_data(folder: Path) -> None:
    rows = [(f"word{n % 9} and word{n % 5}", "|".join("ab"[: n % 3]), f"title {n % 4}") for n in range(12)]
    write_csv(folder / "rows.csv", ["text", "labels", "title"], rows)
    write_folder(folder / "images", rows=8)
    masks_job.write(folder / "masks", rows=4)
    masks_job.segformer(folder / "segformer")
    launchers.write_bert_config(folder / "bert")


def usual(task: str, folder: Path) -> dict[str, object]:
    """Arguments with which the task trains for two steps."""
    text = {"config_name": folder / "bert" / "config.json", "tokenizer_type": "train", "vocab_size": 128}
    file, own = {
        "classify": ("rows.csv", text | {"from_scratch": "true"}),
        "titlegen": ("rows.csv", text | {"from_scratch": "true"}),
        "image_classify": ("images", {"image_size": "16"}),
        "segment": (
            "masks",
            {"config_name": folder / "segformer", "image_size": "32,48", "from_scratch": "true"},
        ),
    }[task]
    common = {"output_dir": folder / "run", "max_steps": 2, "use_cpu": "true", "report_to": "none"}
    return {**common, **own, "train_file": folder / file, "validation_file": folder / file}


def drawn(chance: random.Random, field: dataclasses.Field) -> str:
    """A value for an argument: mostly one that its declaration allows."""
    settings = field.metadata
    if settings["choices"] and chance.random() < 0.8:
        return chance.choice(settings["choices"])
    named = (settings[name] for name in ("at_least", "above", "at_most", "below"))
    limits = [limit for limit in named if limit is not None]
    if limits and chance.random() < 0.7:
        return f"{chance.choice(limits) + chance.choice([-1, 0, 0.25, 1, 3]):g}"
    if "bool" in str(field.type) and chance.random() < 0.8:
        return chance.choice(["true", "false"])
    if field.default is not None and chance.random() < 0.3:
        return str(field.default)
    return chance.choice(WORDS)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUMBER))
def test_a_command_of_random_arguments(number, script, monkeypatch, tmp_path):
    chance = random.Random(number)
    task = chance.choice(TASKS)
    write_data(tmp_path)
    fields = importlib.import_module(task).Arguments.__dataclass_fields__
    names = chance.sample(sorted(fields.keys() - LEFT_OUT), chance.randint(1, 6))
    more = {name: drawn(chance, fields[name]) for name in names}
    words = as_words(**usual(task, tmp_path) | more)
    if chance.random() < 0.3:  # the folder holds a run
        usually = as_words(**usual(task, tmp_path))
        script(task, usually).check()
    before = contents(tmp_path)
    ended = script(task, words)
    after = contents(tmp_path)
    said = f"{task} {more}\n{ended.err}"
    assert ended.code in (0, 2), said
    assert "Traceback" not in ended.err, said
    if ended.code == 2:
        assert ended.err.strip(), said
        assert {name: after.get(name) for name in before} == before, said
    # A path that the user gives may lie elsewhere.
    outside = {name for name in after.keys() - before.keys() if not name.startswith("run/")}
    assert not outside or any(fields[name].metadata["path"] for name in names), (outside, said)
    if "run/history.jsonl" in after.keys() - before.keys() and not outside:
        run = tmp_path / "run"
        straight = shutil.move(run, tmp_path / "straight")
        with monkeypatch.context() as patch:
            step, asked = Training.do_step, []
            patch.setattr(Training, "do_step", lambda *given: [step(*given), asked.append(True)][0])
            patch.setattr(signals, "requested", lambda: "a test" if asked else None)
            assert script(task, words).code == 75, said
        again = as_words(overwrite_output_dir="false", resume_from_checkpoint="auto")
        script(task, [*words, *again]).check()
        found = differences(straight, run)
        # A run that was stopped leaves a checkpoint, also without --save_strategy.
        assert [name for name in found if not name.startswith("checkpoints/")] == [], (found, said)
