import contextlib
import json
import os
import pickle
import resource
import shutil

import pytest
import torch
from safetensors.torch import save_file

from samerun.errors import InputError, TrainingError, is_out_of_space
from samerun.output import run_folder, written
from samerun.output.files import write_json, write_text
from samerun.output.run_folder import (
    OURS,
    check_output_dir,
    check_present,
    clear,
    lock,
    recover_folder,
    replace_folder,
)


@contextlib.contextmanager
def small_files():
    """No file may have more than 4096 bytes, as by `ulimit -f`. No fixture: pytest's own output may be a
    longer file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
    path = tmp_path / "predictions.jsonl"
    path.write_text("old")
    with small_files(), pytest.raises(OSError, match=r"predictions\.jsonl'$") as caught:
        write_text(path, ("x" * 1000 for _ in range(100)))
    assert is_out_of_space(pickle.loads(pickle.dumps(caught.value)))
    with small_files(), pytest.raises(OSError, match=r"best'$"):
        replace_folder(
            tmp_path / "best", lambda place: save_file({"x": torch.zeros(9999)}, place / "model.safetensors")
        )
    assert [each.name for each in tmp_path.iterdir()] == ["predictions.jsonl"]
    assert path.read_text() == "old"


def test_a_new_folder_is_made_and_left_empty(tmp_path):
    check_output_dir(tmp_path / "a" / "b", training=True, overwrite=False, resume=False)
    assert list((tmp_path / "a" / "b").iterdir()) == []


# Of a start that failed before the first step.
REMAINS = ("run.json", "status.json", "tensorboard", "profile", "speed.jsonl", "trackers.json")


@pytest.mark.parametrize("name", [name for name in OURS if name not in REMAINS])
def test_another_run_is_not_written_over(tmp_path, name):
    (tmp_path / name).write_text("x")
    written.add(tmp_path, tmp_path / name)
    with pytest.raises(InputError, match=rf"already holds a run \({name}\).*--overwrite_output_dir"):
        check_output_dir(tmp_path, training=True, overwrite=False, resume=False)
    check_output_dir(tmp_path, training=True, overwrite=True, resume=False)
    check_output_dir(tmp_path, training=False, overwrite=False, resume=False)
    assert (tmp_path / name).read_text() == "x"


@pytest.mark.parametrize(
    "name", ["README.md", "tensorboard/mine", "checkpoints/mine.ckpt", "best/step_1/mine", "run.json"]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_no_run_has_written_is_never_in_the_way_of_one(tmp_path, name, overwrite):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    written.add(tmp_path, path.with_name("ours"))
    with pytest.raises(
        InputError, match=rf"{name} would be replaced, but no run is known to have written it; move it away"
    ):
        check_output_dir(tmp_path, training=True, overwrite=overwrite, resume=False)
    check_output_dir(tmp_path, training=False, overwrite=False, resume=False)
    clear(tmp_path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["history.jsonl", "speed.jsonl", "run.json", "metrics.json"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"{name} is not a readable file; move it away"):
        run_folder.check_output_dir(tmp_path, training=True, overwrite=False, resume=True)


def test_a_resume_with_nothing_to_resume_replaces_nothing(tmp_path):
    (tmp_path / "run.json").write_text("mine")
    with pytest.raises(InputError, match=r"run\.json would be replaced"):
        check_output_dir(tmp_path, training=True, overwrite=False, resume=True)
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)  # a run's folder, copied without the list
    check_output_dir(tmp_path, training=True, overwrite=False, resume=True)


def test_a_start_that_failed_does_not_stand_in_the_way(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "history.jsonl").touch()
    (tmp_path / "tensorboard").mkdir()
    written.add(tmp_path, tmp_path / "run.json", tmp_path / "history.jsonl")
    check_output_dir(tmp_path, training=True, overwrite=False, resume=False)
    (tmp_path / "history.jsonl").write_text('{"step": 1}')
    with pytest.raises(InputError, match=r"already holds a run \(run.json, history.jsonl, tensorboard\)"):
        check_output_dir(tmp_path, training=True, overwrite=False, resume=False)


def test_files_of_others_do_not_disturb(tmp_path):
    (tmp_path / "notes.txt").touch()
    check_output_dir(tmp_path, training=True, overwrite=False, resume=False)


def test_clearing_removes_what_a_run_wrote_and_nothing_else(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    (tmp_path / "best").symlink_to(elsewhere)
    for name in ("run.json", "notes.txt", ".lock", "checkpoints/step_3/model", "checkpoints/mine"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints" / ".step_4.unfinished").mkdir()
    written.add(
        tmp_path, *(tmp_path / name for name in ("run.json", "checkpoints/step_3/model", "best/config.json"))
    )
    clear(tmp_path)
    kept = [".lock", ".written.json", "best", "checkpoints", "elsewhere", "notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["mine"]
    assert (elsewhere / "kept").exists()


def test_one_run_per_folder(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(InputError, match=rf"in use by another run \(process {os.getpid()} on "):
        lock(tmp_path)
    held.close()  # as the kernel does when a process dies
    lock(tmp_path).close()


def link_to_mine(folder):
    (folder / ".lock").symlink_to(folder / "mine")


def mine_itself(folder):
    os.link(folder / "mine", folder / ".lock")


@pytest.mark.parametrize("plant", [link_to_mine, mine_itself])
def test_a_lock_that_is_not_a_runs_is_left_alone(tmp_path, plant):
    (tmp_path / "mine").write_text("a text")
    plant(tmp_path)
    with pytest.raises(InputError, match=r"its file \.lock is (a link|not a run's)"):
        lock(tmp_path)
    assert (tmp_path / "mine").read_text() == "a text"


def test_a_text_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".a.json.unfinished").symlink_to("mine")
    write_text(tmp_path / "a.json", "ours")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("then", [lambda folder: None, lambda folder: folder.mkdir()])
def test_a_folder_that_was_moved_away_is_noticed(tmp_path, then):
    folder = tmp_path / "run"
    folder.mkdir()
    held = lock(folder)
    (folder / ".lock").unlink()  # does not matter
    check_present(folder / "best")
    folder.rename(tmp_path / "elsewhere")
    then(folder)
    check_present(tmp_path)
    for write in (lambda: check_present(folder), lambda: replace_folder(folder / "best", fill("new"))):
        with pytest.raises(TrainingError, match="was moved or removed while the run was writing to it"):
            write()
    assert not (folder / "best").exists()
    held.close()


def test_files_of_a_library_are_ours_by_their_pattern(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    written.add_patterns(tmp_path, "tensorboard/*.1")
    for name in ("ours.1", "mine.2"):
        (tmp_path / "tensorboard" / name).touch()
    assert written.foreign(tmp_path, ["tensorboard"]) == ["tensorboard/mine.2"]


def test_what_is_not_ours_in_a_folder_stays_when_it_is_replaced(tmp_path):
    written.add(tmp_path)
    replace_folder(tmp_path / "best", fill("old"))
    for name in ("part/mine", "notes"):
        (tmp_path / "best" / name).write_text("mine")
    (tmp_path / "best" / "link").symlink_to("gone")
    replace_folder(tmp_path / "best", fill("new"))
    found = {path.relative_to(tmp_path / "best").as_posix() for path in (tmp_path / "best").rglob("*")}
    assert found == {"weights", "part", "part/config", "part/mine", "notes", "link"}
    assert written.foreign(tmp_path, ["best"]) == ["best/link", "best/notes", "best/part/mine"]
    assert (tmp_path / "best" / "weights").read_text() == "new"
    written.remove_folder(tmp_path / "best")
    assert sorted(path.name for path in (tmp_path / "best").rglob("*")) == ["link", "mine", "notes", "part"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        replace_folder(
            tmp_path / "best", lambda place: os.close(os.open(place / "weights", os.O_CREAT, 0o600))
        )
    finally:
        os.umask(before)
    assert (tmp_path / "best" / "weights").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("content", ["", "oops", "[1]", "[" * 100_000, b"\xff"])
def test_a_file_that_holds_no_metrics(tmp_path, content):
    (tmp_path / "metrics.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=r"metrics\.json: (cannot be read|holds no metrics).*; move it away"):
        run_folder.read_metrics(tmp_path / "metrics.json")


def test_a_worker_that_outlives_its_run_does_not_hold_the_lock(tmp_path):
    held = lock(tmp_path)
    (go_on, may_end), (is_there, says_so) = os.pipe(), os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(may_end)
        os.write(says_so, b"1")
        os.read(go_on, 1)  # until the other end is closed
        os._exit(0)
    os.read(is_there, 1)
    held.close()
    lock(tmp_path).close()
    os.close(may_end)
    assert os.waitpid(worker, 0)[1] == 0


def test_json_is_written_whole_and_refuses_what_json_cannot_hold(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"title": "标题", "loss": None})
    assert json.loads(path.read_text(encoding="utf-8")) == {"title": "标题", "loss": None}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"title": "标题", "loss": None}


class Crash(BaseException):
    """The process is gone."""


DISK = ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree"))


def crashes(point, work, disk=DISK):
    """Does `work`, in which the `point`-th call that touches the disk (from 0) and all after it do not come
    through.

    Returns (whether it crashed, the names of the calls).
    """
    calls = []

    def guard(real, name):
        def guarded(*args, **kwargs):
            calls.append(name)
            if len(calls) > point:
                raise Crash
            return real(*args, **kwargs)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        for module, name in disk:
            patch.setattr(module, name, guard(getattr(module, name), name))
        try:
            work()
        except Crash:
            return True, calls
    return False, calls


def fill(text):
    def write(place):
        (place / "weights").write_text(text)
        (place / "part").mkdir()
        (place / "part" / "config").write_text(text)

    return write


def content(path):
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert [file.name for file in files] == ["config", "weights"]
    (text,) = {file.read_text() for file in files}
    return text


def test_a_crash_while_replacing_a_folder_leaves_the_old_or_the_new(tmp_path):
    found, crashed = [], True
    while crashed:
        path = tmp_path / str(len(found)) / "best"
        replace_folder(path, fill("old"))
        crashed, calls = crashes(len(found), lambda path=path: replace_folder(path, fill("new")))
        recover_folder(path)
        found.append(content(path))
        replace_folder(path, fill("again"))  # whatever lies about does not disturb the next
        assert content(path) == "again"
        assert [entry.name for entry in path.parent.iterdir()] == ["best"]
    assert found == sorted(found, reverse=True)  # old up to one point, new from there on
    assert set(found) == {"old", "new"}
    assert calls.count("rename") == 2
    assert calls.count("fsync") == 5  # two files, their folders, the parent


def test_a_failed_fill_leaves_the_old_and_no_rest(tmp_path):
    path = tmp_path / "best"
    replace_folder(path, fill("old"))

    def fail(place):
        (place / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_folder(path, fail)
    assert content(path) == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["best"]


def test_a_crash_while_writing_a_text_leaves_the_old(tmp_path):
    path = tmp_path / "run.json"
    write_text(path, "old")
    for point in (0, 1):
        assert crashes(point, lambda: write_text(path, "new")) == (True, ["fsync", "replace"][: point + 1])
        assert path.read_text() == "old"
    assert crashes(2, lambda: write_text(path, "new"))[0] is False
    assert path.read_text() == "new"


def test_recovering_does_not_undo_a_finished_replacement(tmp_path):
    path = tmp_path / "best"
    replace_folder(path, fill("new"))
    shutil.copytree(path, tmp_path / ".best.old")
    (tmp_path / ".best.old" / "weights").write_text("old")
    recover_folder(path)
    assert content(path) == "new"
    recover_folder(tmp_path / "never_there")


@pytest.mark.parametrize(
    ("job", "restarts", "restarted"),
    [("7", "1", True), ("7", "0", False), ("7", None, False), ("8", "1", False)],
)
def test_a_requeued_job_knows_its_own_run(tmp_path, monkeypatch, job, restarts, restarted):
    write_json(tmp_path / run_folder.RUN_FILE, {"launcher_process": 0, "slurm_job": "7"})
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert run_folder.was_restarted(tmp_path) == restarted
