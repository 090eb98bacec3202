import json
import sys

import pytest

from samerun import run_folder
from samerun.errors import InputError, TrainingError
from samerun.files import add_to_list, lock, replace_folder, write_json
from samerun.main import metrics_table
from samerun.run_folder import METRICS, OURS, begin_best, check_output_dir, clear, merge_metrics, status


def train(folder):
    folder.mkdir(exist_ok=True)
    for name in ("status.json", "history.jsonl", "speed.jsonl", "trackers.json", "report.html"):
        (folder / name).write_text('{"step": 1}\n')
    write_json(folder / "run.json", {"fingerprint": {}})
    merge_metrics(folder, {"eval_loss": 1.0})
    (folder / "README.md").write_text(f"# A model\n\n- {run_folder.CARD_MARK}, so\n")
    (folder / "predictions.jsonl").write_text("{}\n")
    run_folder.record_predictions(folder, folder / "predictions.jsonl")
    for name in ("best", "checkpoints/step_3", "checkpoints/step_5.left_behind"):
        replace_folder(folder / name, lambda place: (place / "model.safetensors").touch())
    for name in ("plots/loss.png", "predictions/a.png"):
        add_to_list((folder / name).parent, [(folder / name).name])
        (folder / name).touch()
    for name in (
        "tensorboard/events.out.tfevents.1.host.2.0",
        "tensorboard/17.3/hparams.yml",
        "profile/trace.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


FOREIGN = ["best/mine", "best/sub/mine", "checkpoints/mine.ckpt", "checkpoints/step_3/mine", "plots/mine.png",
           "predictions/b.png", "tensorboard/mine", "profile/mine",
           "README.md", "predictions.jsonl"]  # these two were the run's before  # fmt: skip


def test_a_run_is_replaced_only_on_request_and_leaves_nothing(tmp_path):
    tmp_path /= "new"
    check_output_dir(tmp_path, training=True, overwrite=False, resume=False)
    assert list(tmp_path.iterdir()) == []
    train(tmp_path)
    with pytest.raises(InputError, match=r"already holds a run \(run.json, .*--overwrite_output_dir"):
        check_output_dir(tmp_path, training=True, overwrite=False, resume=False)
    check_output_dir(tmp_path, training=True, overwrite=True, resume=False)
    check_output_dir(tmp_path, training=False, overwrite=False, resume=False)
    assert (tmp_path / "best").is_dir()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".predictions"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_the_user_among_those_of_a_run_is_refused_and_stays(tmp_path, name):
    train(tmp_path)
    for path in (tmp_path / name, tmp_path / "notes.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    message = rf"{name} would be replaced, but no run is known to have written it; move it away"
    with pytest.raises(InputError, match=message):
        check_output_dir(tmp_path, training=True, overwrite=True, resume=False)
    check_output_dir(tmp_path, training=True, overwrite=False, resume=True)
    clear(tmp_path)
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == sorted([".predictions", name, "notes.txt"])
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", [*OURS, "best/step_1/mine", "tensorboard/events.out.tfevents.1"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_no_run_keeps_its_files(tmp_path, name, overwrite):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"mine": 1}')
    with pytest.raises(InputError, match=rf"{name} would be replaced, but no run is known"):
        check_output_dir(tmp_path, training=True, overwrite=overwrite, resume=False)
    check_output_dir(tmp_path, training=False, overwrite=False, resume=False)
    clear(tmp_path)
    assert path.read_text() == '{"mine": 1}'


@pytest.mark.parametrize("name", ["best", "metrics.json", "run.json"])
def test_links_are_left_alone(tmp_path, name):
    train(tmp_path / "elsewhere")
    train(tmp_path / "run")
    linked = tmp_path / "run" / name
    linked.rename(tmp_path / "old")
    linked.symlink_to(tmp_path / "elsewhere" / name)
    with pytest.raises(InputError, match=f"{name} would be replaced"):
        check_output_dir(tmp_path / "run", training=True, overwrite=True, resume=False)
    clear(tmp_path / "run")
    assert linked.is_symlink()
    assert (tmp_path / "elsewhere" / name).exists()


def test_a_command_that_only_predicts_may_be_followed_by_a_training(tmp_path):
    merge_metrics(tmp_path, {"test_loss": 1.0})
    (tmp_path / "predictions.jsonl").write_text("{}\n")
    run_folder.record_predictions(tmp_path, tmp_path / "predictions.jsonl")
    check_output_dir(tmp_path, training=True, overwrite=True, resume=False)
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".predictions"]


def test_metrics_and_masks_of_a_prediction_replace_no_others(tmp_path):
    (tmp_path / "metrics_new.json").write_text('{"accuracy": 1}')
    (tmp_path / "predictions_new").mkdir()
    (tmp_path / "predictions_new" / "a.png").touch()
    for name in ("metrics_new.json", "predictions_new"):
        with pytest.raises(InputError, match=f"{name}.* would be replaced"):
            run_folder.check_foreign(tmp_path, [name])
    add_to_list(tmp_path / "predictions_new", ["a.png"])
    run_folder.check_foreign(tmp_path, ["predictions_new", "predictions"])


def test_a_resume_with_nothing_to_resume_replaces_nothing(tmp_path):
    (tmp_path / "run.json").write_text("mine")
    with pytest.raises(InputError, match=r"run\.json would be replaced"):
        check_output_dir(tmp_path, training=True, overwrite=False, resume=True)
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)  # a run's folder, copied without hidden files
    check_output_dir(tmp_path, training=True, overwrite=False, resume=True)


def test_a_start_that_failed_does_not_stand_in_the_way(tmp_path):
    train(tmp_path)
    (tmp_path / "history.jsonl").write_text("")
    for name in set(OURS) - {*run_folder.START_FILES, run_folder.RUN_FILE}:
        run_folder.remove(tmp_path, [name])
    check_output_dir(tmp_path, training=True, overwrite=False, resume=False)
    (tmp_path / "history.jsonl").write_text('{"step": 1}')
    with pytest.raises(InputError, match=r"already holds a run \(run.json, .*history.jsonl, "):
        check_output_dir(tmp_path, training=True, overwrite=False, resume=False)


@pytest.mark.parametrize("content", ["", "oops", "[1]", "[" * 100_000, b"\xff"])
def test_a_file_that_holds_no_metrics(tmp_path, content):
    (tmp_path / "metrics.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=r"metrics\.json: (cannot be read|holds no metrics).*; move it away"):
        run_folder.read_metrics(tmp_path / "metrics.json")


def test_a_new_best_model_removes_what_belongs_to_another(tmp_path):
    of_old = {
        "eval_f1": 0.5,
        "test_f1": 0.4,
        "best_metric": 0.5,
        "exported": "average",
        "average_metric": 0.5,
    }
    kept = {"best_step": 3, "train_loss": 0.1}
    train(tmp_path)
    write_json(tmp_path / METRICS, {**of_old, "train_loss": 0.2})
    merge_metrics(tmp_path, kept)
    (tmp_path / "validation_predictions.npz").touch()
    (tmp_path / "predictions" / "mine.png").touch()

    begin_best(tmp_path, 3)  # the same one, as after a resume from its checkpoint
    assert run_folder.read_metrics(tmp_path / METRICS) == {**of_old, **kept, "schema_version": 1}
    assert (tmp_path / "predictions.jsonl").exists()
    begin_best(tmp_path, 6)
    assert run_folder.read_metrics(tmp_path / METRICS) == {**kept, "best_step": 6, "schema_version": 1}
    assert not (tmp_path / "predictions.jsonl").exists()
    assert not (tmp_path / "validation_predictions.npz").exists()
    assert [path.name for path in (tmp_path / "predictions").iterdir()] == ["mine.png"]


@pytest.mark.parametrize(
    ("job", "restarts", "restarted"),
    [("7", "1", True), ("7", "0", False), ("7", None, False), ("8", "1", False)],
)
def test_a_requeued_job_knows_its_own_run(tmp_path, monkeypatch, job, restarts, restarted):
    write_json(tmp_path / "run.json", {"launcher_process": 0, "slurm_job": "7"})
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert run_folder.was_restarted(tmp_path) == restarted


def test_a_table_has_the_metrics_that_are_known():
    validation = {"eval_loss": 0.5, "eval_f1_micro": None, "eval_baseline_f1_micro": 0.25}
    metrics = {"train_loss": 1.0, **validation, "test_loss": 0.25, "test_f1_micro": 0.75, "test_rows": 3}
    assert metrics_table(run_folder.by_split(metrics), ("loss", "f1_micro", "accuracy")) == [
        "results                  validation    test  baseline",
        "               loss          0.5000  0.2500         -",
        "               f1_micro           -  0.7500    0.2500",
    ]
    # The baseline on test rows is shown if there is one.
    assert run_folder.by_split({**metrics, "test_baseline_f1_micro": 0.5})["baseline"] == {
        "f1_micro": 0.5,
        "split": "test",
    }
    assert metrics_table(run_folder.by_split({"train_loss": 1.0, "test_rows": 3}), ("loss",)) == []


# status.json


@pytest.fixture
def stored(tmp_path):
    """Reads state, step and reason; each is None before there is a status."""

    def read():
        found = run_folder.read_metrics(tmp_path / "status.json")
        return [found.get(key) for key in ("state", "step", "reason")]

    return read


def test_the_first_end_of_a_run_is_its_last_word(stored, tmp_path):
    status.end("failed", "bad input")
    assert stored() == [None] * 3
    status.begin(tmp_path, 4)
    status.saved(6)
    assert stored() == ["running", 6, None]
    status.failing("the loss is nan")
    assert stored() == ["failed", 6, "the loss is nan"]
    status.saved(7)  # by the thread that writes checkpoints
    assert stored() == ["failed", 7, "the loss is nan"]
    status.end("stopped", "SIGTERM")
    status.saved(8)
    status.end("done")
    assert stored() == ["stopped", 7, "SIGTERM"]


@pytest.mark.parametrize("then", [lambda folder: None, lambda folder: folder.mkdir()])
def test_a_run_whose_folder_was_moved_away_writes_nothing_at_its_place(tmp_path, then):
    folder = tmp_path / "run"
    folder.mkdir()
    lock(folder).close()
    status.begin(folder, 0)
    status.check_place()
    (folder / ".lock").unlink()  # does not matter
    status.check_place()
    folder.rename(tmp_path / "elsewhere")
    then(folder)
    status.failing("an error")
    with pytest.raises(TrainingError, match="was moved or removed while the run was writing to it"):
        run_folder.merge_metrics(folder, {"test_rows": 3})
    status.end("failed")
    assert not folder.is_dir() or list(folder.iterdir()) == []
    assert json.loads((tmp_path / "elsewhere" / "status.json").read_text())["state"] == "running"


def test_a_full_disk_does_not_change_how_a_run_ends(stored, tmp_path, monkeypatch):
    status.begin(tmp_path, 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "write_json", full)
    status.saved(3)
    assert stored() == ["running", 3, None]
    status.end("failed", "the disk is full")
    assert stored() == ["failed", 3, "the disk is full"]


# Versions


def test_code_version_is_of_the_package_and_the_script(monkeypatch, tmp_path):
    assert run_folder.library_versions().keys() == {"python", *run_folder.LIBRARIES}
    monkeypatch.setattr(run_folder, "LIBRARIES", ("no-such-library",))
    assert run_folder.library_versions()["no-such-library"] is None
    monkeypatch.setattr(sys, "argv", [str(run_folder.PACKAGE.parent / "classify.py")])
    found = run_folder.code_version()
    assert {"app/classify.py", "app/samerun/errors.py", "app/samerun/reports/card.py"} <= set(found)
    assert "app/titlegen.py" not in found
    script = tmp_path / "my_task.py"  # a task of the user's own, outside of the application
    script.write_text("1")
    monkeypatch.setattr(sys, "argv", [str(script)])
    before = run_folder.code_version()
    assert "my_task.py" in before
    script.write_text("2")
    assert run_folder.code_version() != before
