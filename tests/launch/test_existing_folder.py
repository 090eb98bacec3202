"""What a command does with an output folder that holds something: which runs go on, which are refused, and
that a refusal changes no byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import launchers
import masks_job
import pytest
from launchers import as_words, write_csv

STATES = (
    "no run", "unfinished", "finished", "without checkpoints", "other task", "other data", "other labels",
    "foreign files",
)  # fmt: skip
ACTIONS = {
    "nothing": [],
    "auto": ["--resume_from_checkpoint", "auto"],
    "explicit": ["--resume_from_checkpoint", "FOLDER/checkpoints/step_2"],
    "overwrite": ["--overwrite_output_dir"],
    "predict": ["--do_predict"],
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
TRIED = [("classify", *case) for case in CASES if case[1] != "predict"][::2]
TRIED += [("classify", "without checkpoints", "auto"), ("classify", "finished", "overwrite")]
TRIED += [("classify", "finished", "predict"), ("classify", "foreign files", "predict")]
TRIED += [("segment", "unfinished", "auto"), ("segment", "other labels", "overwrite")]
TRIED += [("segment", "finished", "auto"), ("segment", "other task", "auto")]


class Jobs:
    """The data of both tasks, and a finished run of each, of other data and of other labels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, first in (("data", 0), ("other data", 7)):
            rows = [
                (f"word{n % 9} and word{n % 5}", "|".join("ab"[: n % 3])) for n in range(first, first + 12)
            ]
            (folder / name).mkdir()
            write_csv(folder / name / "train.csv", ["text", "labels"], rows)
            masks_job.write(folder / name / "masks", rows=4, first=first)
        masks_job.segformer(folder / "segformer")
        launchers.write_bert_config(folder / "bert")
        for name, labels in (("labels", "a\nb\n"), ("other labels", "b\na\n")):
            (folder / f"{name}.txt").write_text(labels)
        for name, classes in (("labels", masks_job.CLASSES), ("other labels", ("ground", "blue", "red"))):
            (folder / f"{name} of masks.txt").write_text("".join(f"{label}\n" for label in classes))
        self.runs: dict[tuple[str, str], Path] = {}

    def arguments(self, task: str, output_dir: Path, data: str = "data", labels: str = "labels") -> list[str]:
        values = {
            "output_dir": output_dir, "from_scratch": "true", "max_steps": 4, "save_steps": 1,
            "eval_strategy": "steps", "eval_steps": 2, "global_batch_size": 4, "learning_rate": 1e-3,
            "report_to": "none", "use_cpu": "true", "save_total_limit": 4,
        }  # fmt: skip
        if task == "classify":
            file = self.folder / data / "train.csv"
            values |= {"config_name": self.folder / "bert" / "config.json", "tokenizer_type": "train"}
            values |= {"label_file": self.folder / f"{labels}.txt", "vocab_size": 128}
        else:
            file = self.folder / data / "masks"
            values |= {"config_name": self.folder / "segformer", "image_size": "32,48"}
            values |= {"classes_file": self.folder / f"{labels} of masks.txt"}
        values |= {"train_file": file, "validation_file": file}
        return as_words(**values)

    def finished(self, run, task: str, kind: str = "data") -> Path:
        """A finished run of this task; `kind`: data, other data or other labels."""
        key = task, kind
        if key not in self.runs:
            folder = self.folder / "runs" / task / kind
            changes = {"other data": {"data": kind}, "other labels": {"labels": kind}}.get(kind, {})
            assert run(task, self.arguments(task, folder, **changes)).code == 0
            self.runs[key] = folder
        return self.runs[key]

    def prepare(self, run, task: str, state: str, folder: Path) -> None:
        """Brings `folder` into this state."""
        if state == "no run":
            return
        other = {"classify": "segment", "segment": "classify"}[task]
        kind = state if state.startswith("other") and state != "other task" else "data"
        shutil.copytree(self.finished(run, other if state == "other task" else task, kind), folder)
        if state == "unfinished":  # as if killed after its second step
            for path in (folder / "checkpoints").glob("step_[34]"):
                shutil.rmtree(path)
            status = json.loads((folder / "status.json").read_text())
            (folder / "status.json").write_text(json.dumps({**status, "state": "running", "step": 2}))
        elif state == "without checkpoints":
            shutil.rmtree(folder / "checkpoints")
        elif state == "foreign files":
            shutil.rmtree(folder)
            for name in ("best/mine.txt", "checkpoints/step_9/mine.txt", "notes.txt"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text("mine")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs(tmp_path_factory.mktemp("jobs"))


def content(folder: Path) -> dict[str, str]:
    """Name -> hash of every file, without the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "state", "action"), TRIED)
def test_what_a_command_does_in_a_folder(task, state, action, jobs, script, tmp_path):
    folder = tmp_path / "run"
    jobs.prepare(script, task, state, folder)
    before, expected = content(folder), EXPECTED[action].get(state, REFUSED)
    more = [word.replace("FOLDER", str(folder)) for word in ACTIONS[action]]
    arguments = jobs.arguments(task, folder)
    if action == "predict":
        model, file = jobs.finished(script, task) / "best", arguments[arguments.index("--train_file") + 1]
        more += ["--model_name_or_path", str(model), "--test_file", file, "--report_to", "none"]
        arguments = ["--output_dir", str(folder), "--use_cpu", "true"]
    ended = script(task, [*arguments, *more])
    after = content(folder)
    assert ended.code == (2 if expected == REFUSED else 0), ended.err
    assert "Traceback" not in ended.err
    unchanged = {
        REFUSED: before,
        COMPLETE: [name for name in before if name.startswith(("best/", "history", "checkpoints/"))],
        PREDICTS: [name for name in before if name.startswith(("best/", "history", "checkpoints/", "notes"))],
    }.get(expected, [name for name in before if "mine" in name or "notes" in name])
    assert {name: after.get(name) for name in unchanged} == {name: before[name] for name in unchanged}
    if expected == REFUSED:
        assert [name for name in after if name not in before and not name.startswith(".")] == []
        assert str(folder) in ended.err or "--resume_from_checkpoint" in ended.err
    elif expected == PREDICTS:
        assert list(folder.glob("predictions*.jsonl"))
    else:
        history = [json.loads(line) for line in (folder / "history.jsonl").open(encoding="utf-8")]
        assert max(event["step"] for event in history) == 4
        assert (folder / "best" / "config.json").exists()
