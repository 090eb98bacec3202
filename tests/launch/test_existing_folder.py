"""What a command does with the folder of a run: which runs go on, which are refused, and that a refusal
changes no byte. Others' files: tests/bad_input/ and tests/samerun/test_run_folder.py."""

import json
import shutil

import pytest
from launchers import as_words, training
from run_folders import contents, read_json

from samerun.reports.tracker import read_history

GOES_ON, COMPLETE, REFUSED = "goes on", "complete", "refused"
AUTO, EXPLICIT = "auto", "FOLDER/checkpoints/step_2"
# State of the folder, --resume_from_checkpoint, and what happens.
CASES = [
    ("unfinished", AUTO, GOES_ON), ("finished", AUTO, COMPLETE), ("finished", EXPLICIT, GOES_ON),
    ("without checkpoints", EXPLICIT, REFUSED), ("other task", AUTO, REFUSED), ("other data", AUTO, REFUSED),
    ("other labels", EXPLICIT, REFUSED),
]  # fmt: skip
# How another run differs from the one that is started.
OTHERS = {"other data": {"train_file": "valid.csv"}, "other labels": {"label_file": "labels.txt"}}


def job(folder, **changed):
    given = {"max_steps": 4, "save_steps": 1, "eval_steps": 2, "save_total_limit": 4, "test_file": None}
    words = training(folder, **given, **changed)[1:]
    words.remove("--do_predict")
    return words


@pytest.fixture(scope="module")
def runs(home, tmp_path_factory):
    """The folder of finished runs, which `finished` makes."""
    (home / "labels.txt").write_text("\n".join("fedcba"))
    return tmp_path_factory.mktemp("runs")


def finished(script, runs, kind):
    """The folder of a finished run."""
    folder = runs / kind
    if not folder.exists():
        if kind == "other task":
            words = as_words(do_train=True, max_steps=4, save_steps=1, report_to="none", output_dir=folder)
            script("vector_task", words).check()
        else:
            script("classify", job(folder, **OTHERS.get(kind, {}))).check()
    return folder


def prepare(script, runs, state, folder):
    """Brings `folder` into this state."""
    shutil.copytree(finished(script, runs, state if state.startswith("other") else "one"), folder)
    if state == "unfinished":  # as if killed after its second step
        for path in (folder / "checkpoints").glob("step_[34]"):
            shutil.rmtree(path)
        status = read_json(folder / "status.json") | {"state": "running", "step": 2}
        (folder / "status.json").write_text(json.dumps(status))
    elif state == "without checkpoints":
        shutil.rmtree(folder / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize(("state", "resumes", "expected"), CASES)
def test_what_a_command_does_in_a_folder(state, resumes, expected, home, runs, script, monkeypatch, tmp_path):
    monkeypatch.chdir(home)
    folder = tmp_path / "run"
    prepare(script, runs, state, folder)
    before = contents(folder)
    checkpoint = resumes.replace("FOLDER", str(folder))
    ended = script("classify", [*job(folder), "--resume_from_checkpoint", checkpoint])
    after = contents(folder)
    assert ended.code == (2 if expected == REFUSED else 0), ended.err
    assert "Traceback" not in ended.err
    if expected != GOES_ON:
        kept = ("best/", "history", "checkpoints/") if expected == COMPLETE else ""
        unchanged = {name: digest for name, digest in before.items() if name.startswith(kept)}
        assert {name: after.get(name) for name in unchanged} == unchanged
    if expected == REFUSED:
        assert [name for name in after if name not in before and not name.startswith(".")] == []
        assert str(folder) in ended.err or "--resume_from_checkpoint" in ended.err
    else:
        assert max(event["step"] for event in read_history(folder)) == 4
        assert (folder / "best" / "config.json").exists()
