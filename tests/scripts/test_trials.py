"""`samerun sweep`, `cross-validate` and `learning-curve`, over a command that trains nothing."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tag
from launchers import CLASSIFY, as_words

from samerun.errors import InputError
from samerun.files import lock, read_lines
from samerun.task_scripts import run_tool
from samerun.tools import cross_validate, learning_curve, trials
from samerun.tools.moving.setups import APART
from samerun.tools.trials import Command, read_rows, write_lines

optuna = pytest.importorskip("optuna")  # requirements-sweep.txt
sweep = pytest.importorskip("samerun.tools.sweep")  # imports it

# Takes the place of a launcher: "trains" without starting anything. A learning rate of 1 diverges, one of 2
# is refused, one of 3 as torchrun reports it. The first run of `stopped` is asked to stop, that of
# `stopped_launcher` under a launcher with a code of its own.
COMMAND = """
import json, os, pathlib, sys
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = pathlib.Path(words["--output_dir"])
folder.mkdir(parents=True, exist_ok=True)
rate = float(words["--learning_rate"])
if rate in (1, 2):  # diverges; is refused
    sys.exit({1: 3, 2: 2}[rate])
if rate == 3:
    sys.exit("error: no\\nRoot Cause (first observed failure):\\n  exitcode  : 2 (pid: 7)\\n")
if "stopped" in words.get("--run_name", "") and not (folder / "begun").exists():
    (folder / "begun").touch()
    if words["--run_name"] == "stopped":
        sys.exit(75)
    (folder / "status.json").write_text(json.dumps({"state": "stopped"}))
    sys.exit(-2)
(folder / "runs").open("a").write(os.environ.get("GOMP_SPINCOUNT", "x"))
chosen = words.get("--metric_for_best_model", "average_precision_micro")
metrics = {"best_metric": 1 - rate, f"eval_{chosen}": 1 - rate}
if words.get("--run_name") == "fell back" and rate < 0.4:  # by the loss
    metrics = {"best_metric": 9.0, "eval_loss": 9.0}
if "--test_file" in words:
    assert words["--validation_file"].endswith("validation.jsonl") and words["--encoding"] == "utf-8"
    rows = [json.loads(line) for line in open(words["--test_file"])]
    assert not {row["id"] for row in rows} & {json.loads(line)["id"] for line in open(words["--train_file"])}
    with (folder / "predictions.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps({"id": row["id"], "labels": row["labels"]}, ensure_ascii=False) + chr(10))
    metrics |= {"test_loss": float(len(rows)), "test_rows": len(rows)}
if folder.name.startswith("rows_"):
    assert words["--do_train"] == "true"  # also where --do_predict asks for the test rows
    ids = [json.loads(line)["id"] for line in open(words["--train_file"])]
    seed, name = int(words["--seed"]), "average_precision_micro"
    score = len(ids) / 100 + seed / 1000 if len(ids) > 3 else None
    metrics |= {f"eval_{name}": score, f"eval_baseline_{name}": seed / 10, "ids": ids}
(folder / "metrics.json").write_text(json.dumps(metrics))
(folder / "status.json").write_text(json.dumps({"state": "done"}))
"""


@pytest.fixture
def command(tmp_path, token_cache, monkeypatch):
    """Words of a command behind the options of a script."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    (tmp_path / "command.py").write_text(COMMAND, encoding="utf-8")
    labels = [["often", "rare"] if row % 10 == 0 else ["often"] for row in range(30)]
    rows = [{"id": f"r{row}", "text": f"text {row}", "labels": names} for row, names in enumerate(labels)]
    write_lines(tmp_path / "train.jsonl", rows)
    launch = shlex.join([sys.executable, str(tmp_path / "command.py")])
    files = {"train_file": tmp_path / "train.jsonl", "output_dir": tmp_path / "runs"}
    words = as_words(**files, model_name_or_path="m", learning_rate=0.5)
    return ["--launch", launch, str(CLASSIFY), *words]


def test_a_sweep_goes_on_and_names_the_best_command(command, tmp_path, capsys, refusal):
    search = ["--search", "learning_rate=1e-3,0.25,1", "--search", "weight_decay=log:1e-3:1e-1"]
    search += ["--processes", "2"]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "command.json").write_text('["of a command whose input was rejected"]')
    assert run_tool(sweep.main, ["--trials", "3", *search, *command]) == 0
    assert run_tool(sweep.main, ["--trials", "9", *search, *command]) == 0
    said = capsys.readouterr().out
    again = shlex.split(said.splitlines()[-1])
    assert again[again.index("--learning_rate") + 1] == "1e-3"
    assert again.count("--learning_rate") == again.count("--output_dir") == 1
    runs = list((tmp_path / "runs").glob("trial_*"))
    assert sum(path.is_dir() for path in runs) == 9
    assert {path.read_text() for path in (tmp_path / "runs").glob("trial_*/runs")} == {"2000"}  # each once
    failed = [path for path in runs if path.is_dir() and not (path / "metrics.json").exists()]
    assert said.count("failed:") == len(failed)
    other = ["--trials", "9", *search, *command, "--seed", "7"]
    assert "has runs of another command" in refusal(sweep.main, other)


@pytest.mark.parametrize("name", ["stopped", "stopped_launcher"])
def test_a_stopped_trial_goes_on_first(name, command, tmp_path, capsys):
    words = ["--trials", "2", "--search", "weight_decay=0:1", *command, "--run_name", name]
    assert run_tool(sweep.main, words) == 75
    assert run_tool(sweep.main, words) == 75  # the second trial stops, too
    assert run_tool(sweep.main, words) == 0
    assert [path.read_text() for path in sorted((tmp_path / "runs").glob("trial_*/runs"))] == ["x", "x"]


def test_a_signal_stops_the_runs_too(command, tmp_path, capsys):
    """Not as with Ctrl-C, which a terminal sends to them as well."""
    lines = ["import os, signal, time", "os.kill(os.getppid(), signal.SIGTERM)", "time.sleep(600)"]
    (tmp_path / "command.py").write_text("\n".join(lines))
    assert run_tool(cross_validate.main, ["--folds", "3", *command]) == 75
    assert "stopped: by a signal; the same command resumes" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "fold_1.log").exists()


def test_a_sweep_needs_the_direction_of_a_metric_of_the_user(command, tmp_path, refusal):
    words = ["--trials", "1", "--search", "weight_decay=0:1", *command, "--metrics", "mine"]
    words += ["--metric_for_best_model", "error_rate"]
    assert "add --greater_is_better true or false" in refusal(sweep.main, words)
    assert run_tool(sweep.main, [*words, "--greater_is_better", "false"]) == 0
    study = sweep.open_study(tmp_path / "runs", sweep.read_space(words[2:4][1:]), "error_rate", False, 0)
    assert study.direction == optuna.study.StudyDirection.MINIMIZE


def test_a_sweep_goes_on_after_a_combination_that_only_the_run_refuses(command, tmp_path, capsys):
    words = ["--trials", "5", "--search", "learning_rate=2,0.25", *command]
    assert run_tool(sweep.main, words) == 0
    said = capsys.readouterr().out
    done = list((tmp_path / "runs").glob("trial_*/metrics.json"))
    assert said.count("failed:") == 5 - len(done) > 0 < len(done)
    assert run_tool(sweep.main, words) == 0
    assert "failed:" not in capsys.readouterr().out


def test_a_trial_whose_model_was_chosen_by_the_loss_has_no_score(command, tmp_path, capsys):
    words = ["--trials", "6", "--search", "learning_rate=0.25,0.5", *command, "--run_name", "fell back"]
    assert run_tool(sweep.main, words) == 0
    said = capsys.readouterr().out
    assert "failed:" in said
    assert "9.0" not in said


@pytest.mark.parametrize("rate", ["2", "3"])
def test_a_sweep_whose_every_combination_is_refused_ends(rate, command, tmp_path, refusal):
    search = ["--search", f"learning_rate={rate}:{rate}", "--search", "seed=0:9"]
    assert "failed (" in refusal(sweep.main, ["--trials", "9", *search, *command])
    assert len(list((tmp_path / "runs").glob("trial_?"))) == 3


def test_a_sweep_refuses_other_choices_and_a_folder_in_use(command, tmp_path, refusal):
    def words(trials, search="learning_rate=0.25,0.5"):
        return ["--trials", str(trials), "--search", search, *command]

    assert run_tool(sweep.main, words(1)) == 0
    for other in ("learning_rate=0.25,0.75", "learning_rate=0.1:0.5"):
        said = refusal(sweep.main, words(2, other))
        assert "(0.25,0.5); give those, or name another --output_dir" in said
    said = refusal(sweep.main, words(2, "num_train_epochs=1,2"))
    assert "does not have the same arguments (" in said
    with lock(tmp_path / "runs"):
        assert "in use by another run" in refusal(sweep.main, words(2))
    assert run_tool(sweep.main, words(2)) == 0
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("\n")
    assert "has runs with other data, content of --train_file; name" in refusal(sweep.main, words(3))


def test_a_settings_file_that_has_changed_begins_no_other_runs(command, tmp_path, refusal):
    """The words of the command are the same."""
    settings, names = tmp_path / "settings.yaml", tmp_path / "names.txt"
    settings.write_text("weight_decay: 0.1")
    names.write_text("often\nrare\n")
    files = {"config": settings, "label_file": names, "validation_file": tmp_path / "train.jsonl"}
    words = ["--folds", "3", *command, *as_words(**files)]
    assert run_tool(cross_validate.main, words) == 0
    settings.write_text("weight_decay: 0.2")
    assert "has runs with other --weight_decay; name" in refusal(cross_validate.main, words)
    settings.write_text("weight_decay: 0.1  # as before")
    assert run_tool(cross_validate.main, words) == 0
    file = tmp_path / "runs" / "command.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps({name: known[name] for name in known if name not in ("arguments", "files")}))
    assert run_tool(cross_validate.main, words) == 0  # as a version before wrote it
    names.write_text("often\nrare\nnew\n")
    assert "has runs with other content of --label_file; name" in refusal(cross_validate.main, words)


def test_a_trial_that_still_runs_is_not_taken_for_failed(command, tmp_path, capsys):
    """Such as one whose sweep was killed."""
    words = ["--trials", "1", "--search", "weight_decay=0:1", *command, "--run_name", "stopped"]
    assert run_tool(sweep.main, words) == 75
    with lock(tmp_path / "runs" / "trial_0"):
        assert run_tool(sweep.main, words) == 3
        assert "trial_0 is in use by another run" in capsys.readouterr().err
    assert run_tool(sweep.main, words) == 0
    assert "failed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "expected"), [(["2", "0", "1"], "0\n1\n2\n"), (["2", "0"], "2\n0\n"), (["b", "a"], "b\na\n")]
)
def test_numbers_of_labels_are_the_rows_of_a_head_in_every_part(names, expected, tmp_path, monkeypatch):
    asked = SimpleNamespace(text_column="text", mixing_weights=None, streaming=False, label_file=None)
    command = SimpleNamespace(arguments=lambda _: asked, task_class=lambda _: None)
    monkeypatch.setattr(trials, "read_rows", lambda *_: ({"train": []}, [], names))
    monkeypatch.setattr(trials, "claim", lambda *_, **__: None)
    trials.open_rows(command, tmp_path)
    assert (tmp_path / "labels.txt").read_text() == expected


def test_folds_hold_every_row_once_and_their_predictions_are_in_its_order(command, tmp_path, capsys, refusal):
    command += as_words(validation_file=tmp_path / "train.jsonl", max_eval_samples="3", encoding="latin-1")
    command += ["--predictions_file", str(tmp_path / "p.csv")]
    assert "expected from 2 to 15" in refusal(cross_validate.main, ["--folds", "20", *command])
    assert run_tool(cross_validate.main, ["--folds", "3", "--processes", "2", *command]) == 0
    folder = tmp_path / "runs"
    said = capsys.readouterr().out
    assert f"--predictions_file is not used: see {folder / 'predictions.jsonl'}" in said
    assert "test_loss  10.0000  0.0000" in said
    assert "3 of 3 validation texts are in the training rows too" in said
    found = list(read_lines(folder / "predictions.jsonl"))
    assert [line["id"] for line in found] == [f"r{row}" for row in range(30)]
    assert sorted(line["fold"] for line in found if "rare" in line["labels"]) == [0, 1, 2]  # one for each
    assert np.bincount([line["fold"] for line in found]).tolist() == [10, 10, 10]
    report = json.loads((folder / "cross_validation.json").read_text())
    assert report["metrics"] == {"test_loss": {"mean": 10.0, "std": 0.0, "folds": 3}}
    assert (folder / "labels.txt").read_text() == "often\nrare\n"
    assert len((folder / "validation.jsonl").read_text().splitlines()) == 3
    labels, group = [("a",)] * 7 + [()] * 5, np.arange(12)
    one, other = (cross_validate.assign_folds(group, labels, 4, seed) for seed in (1, 2))
    # Folds of a version before must stay: they had the labels of a text's first row.
    again = cross_validate.assign_folds(np.append(group, 11), [*labels, ("b",)], 4, 1)
    assert np.array_equal(again[:-1], one)
    assert not np.array_equal(one, other)


def test_a_metric_counts_the_folds_where_it_is_defined():
    folds = [
        {"test_mae": 1.0, "test_f1": 1.0},
        {"test_r2": 0.5, "test_mae": 3.0, "test_f1": None},
    ]
    found = cross_validate.summarise([*folds, {"test_r2": 0.7, "test_mae": 2.0, "test_f1": None}])
    assert found["test_r2"] == {"mean": 0.6, "std": pytest.approx(0.02**0.5), "folds": 2}
    assert found["test_mae"] == {"mean": 2.0, "std": 1.0, "folds": 3}
    assert "test_f1" not in found  # one value has no deviation


def test_equal_texts_are_in_one_fold(command, tmp_path, capsys):
    train = tmp_path / "train.jsonl"
    rows = list(read_lines(train))
    write_lines(train, [*rows, *({**row, "id": f"again {row['id']}"} for row in rows[:9])])
    words = ["--folds", "3", *command, *as_words(test_file=train, validation_file=train)]
    assert run_tool(cross_validate.main, words) == 0
    assert "--test_file is not read: each fold is tested on its own rows" in capsys.readouterr().out
    folds = [line["fold"] for line in read_lines(tmp_path / "runs" / "predictions.jsonl")]
    assert folds[30:] == folds[:9]
    assert np.bincount(folds[:30]).tolist() == [10, 10, 10]


def test_no_group_is_in_two_folds_or_in_training_and_validation_rows(command, tmp_path, refusal):
    train, folder = tmp_path / "train.jsonl", tmp_path / "runs"
    rows = [{**row, "patient": number // 3} for number, row in enumerate(read_lines(train))]
    rows[29]["text"] = rows[0]["text"]  # joins two groups
    write_lines(train, rows)
    words = ["--folds", "3", "--group_column", "patient", *command]
    # The command of these tests wants a file that all folds share.
    (folder / "validation.jsonl").parent.mkdir()
    assert run_tool(cross_validate.main, words) == 0
    fold = [line["fold"] for line in read_lines(folder / "predictions.jsonl")]
    assert sorted(set(fold)) == [0, 1, 2]
    for number in range(3):
        parts = [
            {row["patient"] % 9 for row in read_lines(folder / f"fold_{number}_{split}.jsonl")}
            for split in ("train", "validation", "test")
        ]
        assert all(parts)
        assert sum(map(len, parts)) == len(set.union(*parts)) == 9  # 0 and 9 are joined
    assert "expected from 2 to 4, half of the different groups" in refusal(
        cross_validate.main, ["--folds", "5", *words[2:], "--output_dir", str(tmp_path / "other")]
    )
    rows[4]["patient"] = None
    write_lines(train, rows)
    said = refusal(cross_validate.main, [*words, "--output_dir", str(tmp_path / "other")])
    assert "--group_column patient: empty in 1 training rows, such as row 4" in said


def test_a_share_of_the_rows_is_held_out_as_whole_groups():
    group = np.repeat(np.arange(20), 5)
    for share, groups in ((0.1, 2), (0.3, 6), (0.8, 16), (0.01, 1), (0.99, 19)):
        held = cross_validate.held_out(group, share, seed=0)
        assert len(set(group[held])) == groups
        assert not {*group[held]} & {*group[~held]}


def test_folds_of_other_rows_numbers_or_seeds_are_not_reused(command, tmp_path, refusal):
    command += as_words(validation_file=tmp_path / "train.jsonl", max_eval_samples=3)
    assert run_tool(cross_validate.main, ["--folds", "3", *command]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    for options, said in [
        (["--folds", "5"], "other --folds"),
        (["--folds", "2"], "other --folds"),
        (["--folds", "3", "--seed", "1"], "other --seed"),
        (["--folds", "3", "--group_column", "text"], "other --group_column"),
        (["--folds", "3"], "other rows"),
    ]:
        if said == "other rows":
            train = tmp_path / "train.jsonl"
            train.write_text(train.read_text().replace("text 7", "another text"), encoding="utf-8")
        assert said in refusal(cross_validate.main, [*options, *command])
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}


def test_rows_of_a_conll_file_have_its_tags(tmp_path, token_cache):
    (tmp_path / "train.conll").write_text("a B-X\nb O\n\nc O\n")
    files = {"train_file": (str(tmp_path / "train.conll"),), "output_dir": str(tmp_path)}
    rows, labels, names = read_rows(tag.TokenClassification(tag.Arguments(**files)))
    first, second = rows["train"]
    assert first == {"id": 0, "tokens": ["a", "b"], "tags": ["B-X", "O"]}
    assert (second["tokens"], labels, names) == (["c"], [("B-X", "O"), ("O",)], ["O", "B-X", "I-X"])


def test_a_learning_curve_has_the_scores_by_rows(command, tmp_path, capsys, refusal):
    words = ["--rows", "3,10,all,1000", "--repeats", "3", *command]
    assert run_tool(learning_curve.main, words) == 0
    assert run_tool(learning_curve.main, words) == 0  # nothing runs twice
    folder = tmp_path / "runs"
    assert [path.read_text() for path in folder.glob("rows_*/runs")] == ["x"] * 9  # 1000 is all
    found = json.loads((folder / "learning_curve.json").read_text())
    assert [point["rows"] for point in found["curve"]] == [10, 30]
    assert [point["highest"] for point in found["curve"]] == pytest.approx([0.102, 0.302])
    assert [found["curve"][0][name] for name in ("mean", "baseline")] == pytest.approx([0.101, 0.1])
    assert (folder / "learning_curve.png").is_file()
    few, all_rows, again = (
        json.loads((folder / f"rows_{name}" / "metrics.json").read_text())["ids"]
        for name in ("10_seed_0", "30_seed_0", "10_seed_1")
    )
    assert (len(set(few)), all_rows) == (10, [f"r{row}" for row in range(30)])
    assert few not in (all_rows[:10], again)
    said = capsys.readouterr().out
    assert "0.1010  0.1000  0.1020" in said
    assert "no --validation_file: each run is scored on rows of its own" in said
    assert "eval_average_precision_micro is undefined in 3 run(s) with 3 rows" in said
    undefined = ["--rows", "3", *command, "--output_dir", str(tmp_path / "few")]
    assert run_tool(learning_curve.main, undefined) == 2
    assert run_tool(learning_curve.main, ["--rows", "10", *command]) == 2
    assert "expected numbers and all" in refusal(learning_curve.main, ["--rows", "ten", *command])


def test_a_sweep_that_was_killed_while_it_drew_a_trial_goes_on(tmp_path):
    space = sweep.read_space(["learning_rate=0.25,0.5"])
    given = tmp_path, space, "loss", False, 0
    sweep.open_study(*given).ask({})
    (trial,) = sweep.open_study(*given).trials
    assert not trial.state.is_finished()


def test_a_space_has_the_kinds_that_are_written():
    space = sweep.read_space(["a=1,2", "b=1:8", "c=0.1:0.5", "d=log:1e-5:1e-3", "e=f1,cost:5"])
    assert (space["a"].choices, space["e"].choices) == (("1", "2"), ("f1", "cost:5"))
    assert (type(space["b"]).__name__, type(space["c"]).__name__) == ("IntDistribution", "FloatDistribution")
    assert (space["d"].log, space["d"].high) == (True, 1e-3)
    with pytest.raises(InputError, match="is given twice"):
        sweep.read_space(["a-b=1,2", "a_b=1,2"])
    with pytest.raises(InputError, match="each trial has a folder of its own"):
        sweep.read_space(["output_dir=a,b"])


@pytest.mark.parametrize("saved", [True, False])
def test_a_trial_without_a_checkpoint_starts_again(tmp_path, monkeypatch, saved):
    """As one with --save_strategy no that was stopped: its run cannot go on."""
    started, folder = [], tmp_path / "trial_000"
    run = lambda words, **_: started.append(words) or SimpleNamespace(returncode=1)  # noqa: E731
    monkeypatch.setattr(subprocess, "run", run)
    (folder / "checkpoints" / "step_3" if saved else folder).mkdir(parents=True)
    (folder / "status.json").write_text('{"state": "stopped"}')  # before
    own = ["--resume_from_checkpoint", "auto", "--seed", "1"]
    assert Command(["python"], Path("task.py"), own, None).run(folder, {"seed": 2}) is None
    start = ["--resume_from_checkpoint", "auto"] if saved else ["--overwrite_output_dir", "true"]
    changed = as_words(seed="2", **APART, output_dir=folder)
    assert started == [["python", "task.py", *start, *changed]]
