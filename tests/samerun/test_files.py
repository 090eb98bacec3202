import contextlib
import errno
import fcntl
import json
import os
import pickle
import resource
import shutil
import threading

import pytest
import torch
from in_process import ProcessExit
from safetensors.torch import save_file

from samerun.errors import InputError, is_out_of_space
from samerun.files import (
    LIST,
    Background,
    add_to_list,
    finish_all,
    foreign_files,
    lock,
    own_names,
    paths_in,
    read_lines,
    recover_folder,
    remove_folder,
    replace_folder,
    replace_listed,
    write_json,
    write_text,
)


def fill(text):
    def write(place):
        (place / "weights").write_text(text)
        (place / "part").mkdir()
        (place / "part" / "config").write_text(text)

    return write


def content(path):
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != LIST)
    assert [file.name for file in files] == ["config", "weights"]
    (text,) = {file.read_text() for file in files}
    return text


@contextlib.contextmanager
def small_files():
    """No file may have more than 4096 bytes, as by `ulimit -f`. No fixture: pytest's files may be longer."""
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
    replace_folder(tmp_path / "best", fill("old"))
    with small_files(), pytest.raises(OSError, match=r"best'$"):
        replace_folder(
            tmp_path / "best", lambda place: save_file({"x": torch.zeros(9999)}, place / "model.safetensors")
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "predictions.jsonl"]
    assert (path.read_text(), content(tmp_path / "best")) == ("old", "old")


def test_one_run_per_folder(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(InputError, match=rf"in use by another run \(process {os.getpid()} on "):
        lock(tmp_path)
    held.close()  # as the kernel does when a process dies
    lock(tmp_path).close()


def test_a_file_system_without_locks_does_not_end_a_run(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    lock(tmp_path).close()
    assert capsys.readouterr().out.endswith("its file system has no locks; use it for one run at a time\n")


def test_lines_end_at_line_feeds_only(tmp_path):
    values = ["a\u2028b", "c\x85d", "e\u2029"]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), encoding="utf-8"
    )
    assert list(read_lines(tmp_path / "a.jsonl")) == values


def test_files_of_the_user_in_a_folder_stay_when_it_is_replaced_or_removed(tmp_path):
    best = tmp_path / "best"
    recover_folder(best)  # there is none
    replace_folder(best, fill("old"))
    for name in ("part/mine", "notes"):
        (best / name).write_text("mine")
    (best / "link").symlink_to("gone")
    replace_folder(best, fill("new"))
    found = {path.relative_to(best).as_posix() for path in best.rglob("*")}
    assert found == {LIST, "weights", "part", "part/config", "part/mine", "notes", "link"}
    foreign = [best / name for name in ("link", "notes", "part/mine")]
    assert foreign_files(best) == foreign
    assert (best / "weights").read_text() == "new"
    remove_folder(best)
    assert sorted(path.name for path in best.rglob("*")) == ["link", "mine", "notes", "part"]
    assert foreign_files(best) == foreign


def test_a_list_names_files_of_its_own_folder_only(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "plots").mkdir()
    write_json(tmp_path / "plots" / LIST, ["../mine"])
    add_to_list(tmp_path / "plots", ["loss.png"])
    (tmp_path / "plots" / "loss.png").touch()
    remove_folder(tmp_path / "plots")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


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


def test_json_is_written_whole_not_through_a_link_and_without_what_json_cannot_hold(tmp_path):
    path, content = tmp_path / "a.json", {"title": "标题", "loss": None}
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".a.json.unfinished").symlink_to("mine")
    write_json(path, content)
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == content
    assert (tmp_path / "mine").read_text() == "mine"


DISK = ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree"))


def crashes(point, work):
    """Does `work`, in which the `point`-th call that touches the disk (from 0) and all after it do not come
    through.

    Returns (whether it crashed, the names of the calls).
    """
    calls = []

    def guard(real, name):
        def guarded(*args, **kwargs):
            calls.append(name)
            if len(calls) > point:
                raise ProcessExit
            return real(*args, **kwargs)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        for module, name in DISK:
            patch.setattr(module, name, guard(getattr(module, name), name))
        try:
            work()
        except ProcessExit:
            return True, calls
    return False, calls


def test_a_crash_while_replacing_a_folder_leaves_the_old_or_the_new(tmp_path):
    found, crashed = [], True
    while crashed:
        path = tmp_path / str(len(found)) / "best"
        replace_folder(path, fill("old"))
        crashed, calls = crashes(len(found), lambda path=path: replace_folder(path, fill("new")))
        recover_folder(path)  # also where the replacement is finished, but the old one is still there
        found.append(content(path))
        replace_folder(path, fill("again"))  # whatever lies about does not disturb the next
        assert content(path) == "again"
        assert [entry.name for entry in path.parent.iterdir()] == ["best"]
    assert found == sorted(found, reverse=True)  # old up to one point, new from there on
    assert set(found) == {"old", "new"}
    assert calls.count("rename") == 2
    assert calls.count("fsync") == 7  # three files, the list as it was written, their folders, the parent


def test_a_crash_while_writing_a_text_leaves_the_old(tmp_path):
    path = tmp_path / "run.json"
    write_text(path, "old")
    for point in (0, 1):
        assert crashes(point, lambda: write_text(path, "new")) == (True, ["fsync", "replace"][: point + 1])
        assert path.read_text() == "old"
    assert crashes(2, lambda: write_text(path, "new"))[0] is False
    assert path.read_text() == "new"


def test_what_a_kill_leaves_of_a_listed_file_is_the_runs_own(tmp_path):
    """Seen: killed before a folder had its list, a prediction could not be resumed."""
    masks = tmp_path / "predictions"
    masks.mkdir()
    (masks / f".{LIST}.unfinished").touch()
    assert foreign_files(masks) == []
    add_to_list(masks, ["a.nii.gz"])
    for name in (f".{LIST}.unfinished", ".unfinished_a.nii.gz", ".unfinished_b.nii.gz"):
        (masks / name).touch()
    assert foreign_files(masks) == [masks / ".unfinished_b.nii.gz"]


def test_files_of_an_earlier_list_are_removed_and_no_others(tmp_path):
    masks = tmp_path / "predictions"
    add_to_list(masks, ["a.png", "b.png", "c.png"])  # c.png: of another file of predictions
    for name in ("a.png", "b.png", "c.png", "mine.png"):
        (masks / name).touch()
    replace_listed(masks, ["b.png", "d.png"], ["a.png", "b.png", "mine.png"])
    assert paths_in(masks) == [masks / LIST, masks / "b.png", masks / "c.png", masks / "mine.png"]
    assert foreign_files(masks) == [masks / "mine.png"]
    assert own_names(masks) == {"b.png", "c.png", "d.png"}


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert paths_in(tmp_path) == [file]
    with pytest.raises(InputError, match=f"{file}: cannot be read .Not a directory"):
        paths_in(file)


# The thread


def test_an_error_of_the_thread_is_raised_once_where_the_run_next_looks():
    writer, done = Background(), []
    writer.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    writer.wait()
    writer.start(lambda: done.append("again"))
    writer.wait()
    assert done == ["again"]


def test_a_process_that_ends_waits_for_the_thread():
    go_on, done, writer = threading.Event(), [], Background()

    def work():
        go_on.wait()
        done.append(1)
        raise OSError

    writer.start(work)
    threading.Timer(0.05, go_on.set).start()
    finish_all()  # well or not
    assert done == [1]
