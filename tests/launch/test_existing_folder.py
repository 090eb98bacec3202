"""What a command does with an output folder that holds something: which runs go on, which are refused, and
that a refusal changes no byte."""

import json
import shutil

import pytest
from launchers import as_words, training
from run_folders import contents, read_json

from samerun.reports.tracker import read_history

STATES = (
    "no run", "unfinished", "finished", "without checkpoints", "other task", "other data", "other labels",
    "foreign files",
)  # fmt: skip
ACTIONS = {
    "nothing": [],
    "auto": ["--resume_from_checkpoint", "auto"],
    "explicit": ["--resume_from_checkpoint", "FOLDER/checkpoints/step_2"],
    "overwrite": ["--overwrite_output_dir"],
    "predict": [],  # with a finished run's model
}
TRAINS, GOES_ON, COMPLETE, REFUSED, PREDICTS = "trains", "goes on", "complete", "refused", "predicts"
# What each action does in the states that are not listed: REFUSED.
EXPECTED = {
    "nothing": {"no run": TRAINS},
    "auto": {
        "no run": TRAINS, "unfinished": GOES_ON, "finished": COMPLETE, "without checkpoints": COMPLETE,
    },
    "explicit": {"unfinished": GOES_ON, "finished": GOES_ON},
    "overwrite": {state: TRAINS for state in STATES if state != "foreign files"},
    "predict": dict.fromkeys(STATES, PREDICTS),
}  # fmt: skip
CASES = [(state, action) for state in STATES for action in ACTIONS]
TRIED = [case for case in CASES if case[1] != "predict"][::2]
TRIED += [("without checkpoints", "auto"), ("finished", "overwrite")]
TRIED += [("finished", "predict"), ("foreign files", "predict")]
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
            assert script("vector_task", words).code == 0
        else:
            assert script("classify", job(folder, **OTHERS.get(kind, {}))).code == 0
    return folder


def prepare(script, runs, state, folder):
    """Brings `folder` into this state."""
    if state == "foreign files":
        for name in ("best/mine.txt", "checkpoints/step_9/mine.txt", "notes.txt"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("mine")
    elif state != "no run":
        shutil.copytree(finished(script, runs, state if state.startswith("other") else "one"), folder)
    if state == "unfinished":  # as if killed after its second step
        for path in (folder / "checkpoints").glob("step_[34]"):
            shutil.rmtree(path)
        status = read_json(folder / "status.json") | {"state": "running", "step": 2}
        (folder / "status.json").write_text(json.dumps(status))
    elif state == "without checkpoints":
        shutil.rmtree(folder / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize(("state", "action"), TRIED)
def test_what_a_command_does_in_a_folder(state, action, home, runs, script, monkeypatch, tmp_path):
    monkeypatch.chdir(home)
    folder = tmp_path / "run"
    prepare(script, runs, state, folder)
    before, expected = contents(folder), EXPECTED[action].get(state, REFUSED)
    words = [*job(folder), *(word.replace("FOLDER", str(folder)) for word in ACTIONS[action])]
    if action == "predict":
        model = finished(script, runs, "one") / "best"
        words = as_words(do_predict=True, model_name_or_path=model, test_file="test.csv", output_dir=folder)
    ended = script("classify", words)
    after = contents(folder)
    assert ended.code == (2 if expected == REFUSED else 0), ended.err
    assert "Traceback" not in ended.err
    results = ("best/", "history", "checkpoints/")
    kept = {COMPLETE: results, PREDICTS: (*results, "notes"), REFUSED: ""}.get(expected, ("notes",))
    unchanged = {name: digest for name, digest in before.items() if name.startswith(kept) or "mine" in name}
    assert {name: after.get(name) for name in unchanged} == unchanged
    if expected == REFUSED:
        assert [name for name in after if name not in before and not name.startswith(".")] == []
        assert str(folder) in ended.err or "--resume_from_checkpoint" in ended.err
    elif expected == PREDICTS:
        assert list(folder.glob("predictions*.jsonl"))
    else:
        assert max(event["step"] for event in read_history(folder)) == 4
        assert (folder / "best" / "config.json").exists()
