"""`samerun verify` on a finished run of the common job, as a user runs it before a job moves."""

import shutil
from types import SimpleNamespace

import forks
import pytest
from launchers import free_port
from run_folders import contents

from samerun.files import write_json
from samerun.task_scripts import read_command, run_tool
from samerun.tools import verify
from samerun.tools.moving.outcome import first_difference, read_activations
from samerun.tools.trials import write_lines


@pytest.fixture
def check(launched, home, tmp_path, monkeypatch, capfd, forked_python):
    """A function (further words) -> (exit code, output) of `samerun verify` for a run of one process."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = launched("python").folder

    def run(*words, folder=folder):
        code = verify.main([str(folder), "--steps", "1", "--work_dir", str(tmp_path / "work"), *words])
        return code, capfd.readouterr().out

    run.folder, run.work = folder, tmp_path / "work"
    return run


@pytest.mark.slow
def test_a_run_goes_on_under_another_launcher(check):
    before = contents(check.folder)
    torchrun = str(forks.commands() / "torchrun")
    code, said = check("--", torchrun, "--nproc_per_node", "2", "--master_port", str(free_port()))
    assert code == 0, said
    assert "from checkpoint step_" in said
    assert "the same       losses of 1 logged step(s) agree to " in said
    assert contents(check.folder) == before
    assert not check.work.exists()


@pytest.mark.slow
def test_the_first_module_that_departs_and_the_reason_are_named(check):
    code, said = check("--dropout_by", "torch")
    assert code == 1, said
    assert "differs        step " in said
    assert "first module   bert.embeddings.dropout 1, row " in said
    assert "--dropout_by: None, torch" in said
    found = read_activations(check.work / "observed", "here")
    assert ("bert.encoder.layer.0 1" in found, "bert.encoder.layer.1 1" in found) == (True, False)


@pytest.mark.slow
def test_other_rows_are_a_job_that_fails_here(check, tmp_path):
    rows = (check.folder.parents[1] / "train.csv").read_text().splitlines(keepends=True)
    (tmp_path / "other.csv").write_text("".join(rows[:-1]))
    code, said = check("--train_file", str(tmp_path / "other.csv"))
    assert code == 1, said
    assert "the job fails here: " in said
    assert "is of another run" in said


def run_folder(folder, logged, saved, loss=1.0):
    folder.mkdir()
    arguments = {"model_name_or_path": "m", "train_file": ["there.csv"], "mirror_to": "file:///mine"}
    arguments |= {"push_to_hub": True, "hub_model_id": "me/mine"}
    run = {"fingerprint": {"task": "classify"}, "plan": {"batch": {"global_batch_size": 8}}}
    run |= {"arguments": arguments, "mixed_precision": "no"}
    write_json(folder / "run.json", run)
    events = [{"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 0.1} for step in logged]
    write_lines(folder / "history.jsonl", events)
    for step in saved:
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("logged", "saved", "steps", "name", "expected"),
    [
        ((10, 20, 30), (10, 20), 4, None, (20, 10)),  # up to the next logged step
        ((10, 20, 30), (20, 30), 4, None, (20, 10)),  # no step follows the last one
        ((10, 20, 30), (30,), 12, None, (0, 20)),
        ((10, 20, 30), (5, 20), 50, "step_5", (5, 25)),
        ((10, 20), (), 50, None, (0, 20)),
    ],
)
def test_steps_are_chosen_so_that_one_was_logged(tmp_path, logged, saved, steps, name, expected):
    run = verify.read_run(run_folder(tmp_path / "run", logged, saved))
    options = SimpleNamespace(run=tmp_path / "run", steps=steps, checkpoint=name)
    assert verify.choose_steps(options, run) == expected


@pytest.mark.parametrize(
    ("logged", "words", "message"),
    [
        ((2, 4), ["--checkpoint", "step_7"], "--checkpoint step_7: no such checkpoint; there are step_4"),
        ((2, 4), ["--checkpoint", "step_4"], "--checkpoint step_4: no step after it was logged"),
        ((), [], "has no step to compare with"),
        ((2, 4), ["--work_dir", "/dev/null"], "Not a directory: '/dev/null'"),
        ((2, 4), ["--tolerance", "0"], "--tolerance 0: expected more than 0"),
        (None, [], "holds no training"),
    ],
)
def test_a_run_without_steps_to_compare_is_refused(tmp_path, refusal, logged, words, message):
    folder = tmp_path if logged is None else run_folder(tmp_path / "run", logged, (4,))
    assert message in refusal(verify.main, [str(folder), *words])


def test_only_what_it_wrote_is_removed(tmp_path, monkeypatch, refusal):
    run, work = run_folder(tmp_path / "run", (2, 4), ()), tmp_path / "work"
    monkeypatch.setattr(
        verify, "run_observed", lambda *given, **_: shutil.copytree(run, work / "here") and None
    )
    words = [str(run), "--work_dir", str(work)]
    for file in (work / "here.json", work / "here" / "mine"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        assert "name another folder" in refusal(verify.main, words)
        assert file.exists()
        shutil.rmtree(work)
    shutil.copytree(run, work / "here")
    for name in (verify.MARK, "plain.log", "mine"):
        (work / name).touch()
    assert "holds RUN" in refusal(verify.main, [str(work / "here"), *words[1:]])
    assert run_tool(verify.main, words) == 0
    assert [path.name for path in work.iterdir()] == ["mine"]


def test_the_plain_run_reads_the_same_files_and_nothing_is_uploaded(tmp_path, monkeypatch):
    run, ran = run_folder(tmp_path / "run", (2, 4), ()), {}

    def observed(launcher, script, words, work, name, **_):
        ran[name] = read_command(script, words)[0]
        return "fails" if name == "plain" else run_folder(work / name, (2, 4), (), loss=2.0) and None

    monkeypatch.setattr(verify, "run_observed", observed)
    words = ["--train_file", "here.csv", "--dropout_by", "torch", "--mirror_to", "file:///new"]
    assert verify.main([str(run), "--work_dir", str(tmp_path / "work"), *words]) == 1
    here, plain = ran["here"], ran["plain"]
    assert [here.train_file, plain.train_file] == [("here.csv",)] * 2
    assert [here.dropout_by, plain.dropout_by] == ["torch", None]
    for each in ran.values():
        assert (each.mirror_to, each.push_to_hub, each.hub_model_id) == (None, False, None)


def test_the_first_module_is_that_of_the_forward_pass_and_its_worst_row():
    plain = {"embeddings 1": {"0": 1.0, "1": 2.0}, "layer 1": {"0": 1.0, "1": 2.0}, "head 1": {"0": 5.0}}
    assert first_difference(plain, plain, 1e-5) is None
    ours = {"layer 1": {"0": 1.001, "1": 2.4}, "embeddings 1": {"1": 2.0 + 1e-6}, "head 1": {"0": 50.0}}
    module, row, size = first_difference(ours, plain, 1e-5)
    assert (module, row, size) == ("layer 1", "1", pytest.approx(0.4 / 2.4))
    assert first_difference({"layer 1": {"1": float("nan")}}, plain, 1e-5)[:2] == ("layer 1", "1")


def test_a_null_gradient_norm_equals_only_itself():
    event = {"loss": 1.0, "grad_norm": None, "learning_rate": 0.1}
    assert verify.departure(event, {**event, "loss": 1.1}, 1e-5)[0] == "loss"
