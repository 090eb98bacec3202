"""A run and its mirror, in this process and by file:// URLs.

Its process: test_transfers.py; real services: tests/launch/test_mirror_servers.py; kills:
tests/faults/test_mirror_kills.py.
"""

import json
import os
import shutil
import threading
import time
from functools import partialmethod
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from launchers import as_words
from vector_task import JOB, Regression

from samerun import mirror, signals, transfers
from samerun.files import read_lines
from samerun.reports.tracker import show_image
from samerun.tools.soak import differences

pytestmark = pytest.mark.slow

SUBMIT = mirror.Mirror.submit
SECRET = "correct horse battery"


@pytest.fixture
def in_a_thread(monkeypatch):
    """What the process does is done in a thread, where tests can replace it."""

    def start(pipe):
        own = Connection(os.dup(pipe.fileno()))
        threading.Thread(target=transfers.serve, args=(own,), daemon=True).start()
        return SimpleNamespace(kill=lambda: None, wait=lambda: None)

    monkeypatch.setattr(transfers, "_start", start)
    monkeypatch.setattr(transfers, "_give_way", lambda: None)


@pytest.fixture
def train(script, in_a_thread, tmp_path, monkeypatch):
    """A function that trains vectors in `folder`, with a mirror. `until`: the step at which the run is
    requested to stop. Steps wait for the upload, or all would be over before the first one."""

    def submit_and_wait(self, snapshot, saved):
        SUBMIT(self, snapshot, saved)
        while self.pending is snapshot and self.problem is None and self.taken_by is None:
            time.sleep(0.01)

    monkeypatch.setattr(mirror.Mirror, "submit", submit_and_wait)
    monkeypatch.setattr(mirror, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "_mirror", None)  # no other test has this one

    def begin(folder="run", *more, until=None, to=None):
        def requested():
            path = tmp_path / folder / "history.jsonl"
            steps = [event["step"] for event in read_lines(path)] if path.exists() else [0]
            return "a test" if until is not None and max(steps, default=0) >= until - 1 else None

        with monkeypatch.context() as patch:
            patch.setattr(signals, "requested", requested)
            url = (tmp_path / "mirror").as_uri() if to is None else to
            words = as_words(**JOB, output_dir=tmp_path / folder, mirror_to=url or None)
            return script("vector_task", ["--do_train", "--do_predict", *words, *more])

    return begin


@pytest.fixture
def straight(train, tmp_path):
    """The folder of the run without a mirror that was never stopped."""
    assert train("straight", to="").code == 0
    return tmp_path / "straight"


RESUME = ("--resume_from_checkpoint", "auto")
OVERWRITE = ("--overwrite_output_dir",)


def snapshots(tmp_path):
    """The complete ones, oldest first."""
    return sorted(path.parent for path in (tmp_path / "mirror").glob("*_step_*/manifest.json"))


def test_an_empty_folder_goes_on_from_the_mirror(train, straight, tmp_path):
    stopped = train(until=5)
    assert stopped.code == 75
    assert [path.name.split("_")[2] for path in snapshots(tmp_path)] == ["4", "5"]
    shutil.rmtree(tmp_path / "run")
    ended = train("run", *RESUME).check()
    assert "note           step 5 was fetched from the mirror file:///" in ended.out
    assert differences(straight, tmp_path / "run") == []
    assert list((tmp_path / "run").glob("**/*mirror*")) == []
    # A snapshot is a folder of a run.
    assert differences(straight, snapshots(tmp_path)[-1]) == []
    assert len(snapshots(tmp_path)) == len(list((tmp_path / "mirror").glob("*_step_*"))) == mirror.KEPT
    # A finished run comes back, too.
    shutil.rmtree(tmp_path / "run")
    assert "training       is complete (6 steps)" in train("run", *RESUME).out
    assert differences(straight, tmp_path / "run") == []


def test_of_the_folder_and_the_mirror_the_later_one_wins(train, straight, tmp_path):
    assert train(until=2).code == 75
    shutil.copytree(tmp_path / "run", tmp_path / "earlier")
    shutil.copytree(tmp_path / "mirror", tmp_path / "earlier mirror")
    assert train("run", *RESUME, until=5).code == 75
    shutil.copytree(tmp_path / "run", tmp_path / "later")
    (tmp_path / "earlier" / "best").mkdir()
    (tmp_path / "earlier" / "best" / "mine.txt").write_text("of the user")
    (tmp_path / "earlier" / "notes.txt").write_text("of the user")
    ended = train("earlier", *RESUME)
    assert "note           step 5 was fetched" in ended.out
    assert (tmp_path / "earlier" / "best" / "mine.txt").exists()
    assert (tmp_path / "earlier" / "notes.txt").exists()
    assert [path for path in snapshots(tmp_path) if (path / "best" / "mine.txt").exists()] == []
    (tmp_path / "earlier" / "best" / "mine.txt").unlink()
    assert differences(straight, tmp_path / "earlier") == []
    shutil.rmtree(tmp_path / "mirror")
    shutil.move(tmp_path / "earlier mirror", tmp_path / "mirror")
    ended = train("later", *RESUME)
    assert "resume         " + str(tmp_path / "later" / "checkpoints" / "step_5") in ended.out
    assert "fetched" not in ended.out
    assert differences(straight, tmp_path / "later") == []


def test_an_earlier_checkpoint_of_the_folder_wins_over_the_steps_that_it_leaves_behind(train, tmp_path):
    assert train().code == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    earlier = "--resume_from_checkpoint", str(checkpoints / "step_4")
    rate = "--learning_rate", "0.02"
    assert train("run", *earlier, *rate, until=4, to="").code == 75  # lost before an upload
    assert (checkpoints / "step_6.left_behind").exists()
    ended = train("run", *RESUME, *rate)
    assert f"resume         {checkpoints / 'step_4'}" in ended.out
    assert "fetched" not in ended.out


def test_a_mirror_has_one_run(train, tmp_path):
    assert train(until=2).code == 75
    before = snapshots(tmp_path)
    for more, message in [
        (("--seed", "7", *RESUME), "has another run: seed was 42, is now 7; name another URL, or replace"),
        ((), "has this run; go on by --resume_from_checkpoint auto"),
    ]:
        refused = train("other", *more)
        assert refused.code == 2
        assert message in refused.err
    # The folder of another run is refused as without a mirror, and stays.
    assert train("other", "--seed", "7", to="").code == 0
    refused = train("other", *RESUME)
    assert "is of another run: seed was 7, is now 42" in refused.err
    assert (tmp_path / "other" / "checkpoints" / "step_6").is_dir()
    assert snapshots(tmp_path) == before
    assert train("other", "--seed", "7", *OVERWRITE, until=2).code == 75
    assert not set(before) & set(snapshots(tmp_path))
    assert len(snapshots(tmp_path)) == 1
    # A replaced run does not come back, even before the first upload of the new one.
    assert train("other", "--seed", "7", *OVERWRITE, until=1).code == 75
    shutil.rmtree(tmp_path / "other")
    ended = train("other", "--seed", "7", *RESUME)
    assert "resume         no checkpoint yet, starting from the beginning" in ended.out


def damage_weights(snapshot):
    path = snapshot / "checkpoints" / "step_5" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda snapshot: (snapshot / "history.jsonl").unlink(), "history.jsonl is missing"),
        (damage_weights, "was changed after it was written (checksum)"),
        (lambda snapshot: (snapshot / "manifest.json").unlink(), ""),  # half an upload
        (lambda snapshot: (snapshot / "manifest.json").write_text('{"step": 4, "fi'), ""),
        (lambda snapshot: lists(snapshot, "checkpoints/../../../mine"), "which is no file of a run"),
        (lambda snapshot: lists(snapshot, "notes.txt"), "lists notes.txt, which is no file of a run"),
    ],
)
def test_what_is_not_whole_is_passed_over(spoil, message, train, straight, tmp_path):
    assert train(until=5).code == 75
    spoil(snapshots(tmp_path)[-1])
    shutil.rmtree(tmp_path / "run")
    ended = train("run", *RESUME).check()
    assert "note           step 4 was fetched" in ended.out
    assert message in ended.out
    assert differences(straight, tmp_path / "run") == []


def lists(snapshot, name):
    path = snapshot / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][name] = content["files"].pop("history.jsonl")
    path.write_text(json.dumps(content))


def test_a_mirror_without_anything_whole_is_an_error(train, tmp_path):
    assert train(until=5).code == 75
    for snapshot in snapshots(tmp_path):
        (snapshot / "run.json").unlink()
    refused = train("other", *RESUME)
    assert refused.code == 2
    assert "the mirror has no whole run; --overwrite_output_dir starts again" in refused.err
    assert not (tmp_path / "other" / mirror.FETCHED).exists()


def test_a_figure_that_is_drawn_again_is_not_changed_in_a_snapshot(tmp_path):
    def draw(shade):
        pixels = np.full((2, 2, 3), shade, np.uint8)
        show_image(SimpleNamespace(trackers=[]), tmp_path, "figure", pixels, step=1)

    draw(0)
    staged = mirror.Mirror.stage(SimpleNamespace(number=0, token="a"), tmp_path, 1).place / "plots"
    before = {path.name: path.read_bytes() for path in staged.iterdir()}
    assert "figure.png" in before
    draw(99)
    assert {path.name: path.read_bytes() for path in staged.iterdir()} == before


@pytest.fixture
def failing(monkeypatch):
    """A set of methods of local files; those in it fail, and their messages hold a secret."""
    names: set[str] = set()
    monkeypatch.setenv("SOME_SERVICE_TOKEN", SECRET)

    def call(self, *given, name, method, **named):
        if name in names:
            raise ConnectionError(f"no route to host by {SECRET}")
        return method(self, *given, **named)

    for name in ("put_file", "pipe_file", "cp_file"):
        method = getattr(LocalFileSystem, name)
        monkeypatch.setattr(LocalFileSystem, name, partialmethod(call, name=name, method=method))
    return names


def test_without_the_network_training_goes_on(failing, train, straight, tmp_path, monkeypatch):
    upload = mirror.Mirror._upload

    def fail_from_step_4(self, snapshot):
        if snapshot.step >= 4:
            failing.update({"put_file", "cp_file"})
        upload(self, snapshot)

    monkeypatch.setattr(mirror.Mirror, "_upload", fail_from_step_4)
    ended = train().check()
    assert ended.out.count("; trying again") == 1
    assert "step 4 is not uploaded (ConnectionError: no route to host by ***)" in ended.out
    last = ended.out.splitlines()[-1]
    assert last.startswith("note           mirror: step 6 is not uploaded (ConnectionError: no route")
    assert "has step 2, since " in last
    assert differences(straight, tmp_path / "run") == []
    assert SECRET not in ended.out + ended.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    # The next start uploads what is missing, with what is left of the half upload removed.
    mirror._mirror.taken_by = "the end of its process"
    for thread in threading.enumerate():
        if thread.name == "mirror":
            thread.join()
    monkeypatch.setattr(mirror.Mirror, "_upload", upload)
    failing.clear()
    train("run", *RESUME).check()
    assert differences(straight, snapshots(tmp_path)[-1]) == []
    assert len(list((tmp_path / "mirror").glob("*_step_*"))) == len(snapshots(tmp_path)) == mirror.KEPT


def test_a_network_that_comes_back_is_said(failing, train, tmp_path, monkeypatch):
    connect = mirror.Mirror._connect

    def reconnect(self):
        if self.fingerprint:  # not at the start
            failing.clear()
        connect(self)

    monkeypatch.setattr(mirror.Mirror, "_connect", reconnect)
    failing.add("put_file")
    ended = train()
    assert "is not uploaded (ConnectionError: no route to host by ***); file:///" in ended.out
    assert "has no step; trying again" in ended.out
    assert "/mirror has step 2 again\n" in ended.out
    assert snapshots(tmp_path)[-1].name.split("_")[2] == "6"


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("runs/a", "--mirror_to: expected a URL such as s3://BUCKET/runs/a"),
        (f"sftp://me:{SECRET}@host/runs", "without a password or a query, which logs would show"),
        (f"s3://bucket/a?secret={SECRET}", "without a password or a query, which logs would show"),
        (f"simplecache::sftp://me:{SECRET}@host/runs", "without a password or a query"),
        ("nothing://a/b", "Protocol not known: nothing"),
        ("file:///proc/a", "cannot be written (FileNotFoundError: "),
    ],
)
def test_what_is_wrong_at_the_start_is_said_before_data_is_read(to, message, train, monkeypatch, tmp_path):
    monkeypatch.delattr(Regression, "load")
    ended = train(to=to)
    assert ended.code == 2
    assert message in ended.err
    assert SECRET not in ended.out + ended.err


def test_wrong_credentials_or_no_answer_are_errors(failing, train, monkeypatch):
    failing.add("pipe_file")
    ended = train()
    assert ended.code == 2
    assert "(ConnectionError: no route to host by ***); check the address" in ended.err
    assert SECRET not in ended.err
    monkeypatch.setattr(mirror, "START_SECONDS", 0.1)
    monkeypatch.setattr(LocalFileSystem, "pipe_file", lambda *given, **named: time.sleep(2))
    assert "cannot be written (no answer within 0.1 s); check the address" in train().err


def test_the_second_run_takes_over_and_the_first_one_says_so(train, straight, tmp_path, monkeypatch):
    upload, file = mirror.Mirror._upload, tmp_path / "mirror" / "owner.json"
    owner = json.dumps({"token": "another", "host": "node7", "process": 1234})
    written = ["", owner, None]

    def another_begins(self, snapshot):
        upload(self, snapshot)
        assert len(written) == 3 or file.read_text() == ""  # not claimed back while the other one writes
        if written[0] is not None:
            file.write_text(written.pop(0))

    monkeypatch.setattr(mirror.Mirror, "_upload", another_begins)
    ended = train().check()
    taken = "is not uploaded (process 1234 on node7 writes there now); "
    assert f"{taken}{(tmp_path / 'mirror').as_uri()} has step 2, since " in ended.out
    assert "; nothing more is uploaded" in ended.out
    assert [path.name.split("_")[2] for path in snapshots(tmp_path)] == ["2", "2"]
    assert differences(straight, tmp_path / "run") == []


def test_a_removed_object_is_uploaded_again(train, straight, tmp_path):
    assert train(until=5).code == 75
    (tmp_path / "mirror" / "owner.json").unlink()
    for snapshot in snapshots(tmp_path):
        (snapshot / "best" / "model.safetensors").unlink()
    assert train("run", *RESUME).code == 0
    assert differences(straight, snapshots(tmp_path)[-1]) == []


@pytest.fixture
def slow(train, monkeypatch):
    """Uploads take longer than steps, and these do not wait for them."""
    put_file = LocalFileSystem.put_file

    def put_slowly(self, *given, **named):
        time.sleep(0.05)
        put_file(self, *given, **named)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_slowly)
    monkeypatch.setattr(mirror.Mirror, "submit", SUBMIT)


@pytest.mark.usefixtures("slow")
def test_a_request_to_stop_waits_for_the_upload_and_says_how_long(train, tmp_path, monkeypatch):
    stopped = train(until=5)
    assert stopped.code == 75
    assert "\nmirror         uploading step 5, for at most 100 s\n" in stopped.out
    assert stopped.out.endswith("/mirror has step 5\n")
    assert snapshots(tmp_path)[-1].name.split("_")[2] == "5"
    monkeypatch.setattr(mirror, "STOP_SECONDS", 0.01)
    stopped = train("run", *OVERWRITE, until=5)
    assert stopped.code == 75
    assert "step 5 is not uploaded (it takes longer); file:///" in stopped.out


@pytest.mark.usefixtures("slow")
def test_a_request_after_the_last_step_waits_too(train, tmp_path, monkeypatch):
    def stop(*_):
        with monkeypatch.context() as patch:
            patch.setattr(signals, "requested", lambda: "--max_train_time 9 is over")  # is no earlier request
            signals._request("SIGTERM")

    monkeypatch.setattr("samerun.main.load_exported", stop)
    stopped = train()
    assert stopped.code == 75
    assert "mirror         uploading step 6, for at most 100 s\n" in stopped.out
    assert snapshots(tmp_path)[-1].name.split("_")[2] == "6"


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("saves", [(), ("--save_steps", "0")])
def test_a_request_during_the_last_upload_waits_for_it(train, tmp_path, monkeypatch, saves):
    wait = mirror.Mirror.wait

    def wait_and_be_stopped(self, seconds):
        if seconds == mirror.END_SECONDS:
            signals._request("SIGTERM")
        wait(self, seconds)

    monkeypatch.setattr(mirror.Mirror, "wait", wait_and_be_stopped)
    for again in ((), RESUME):  # the second start finds a run that is complete
        stopped = train("run", *saves, *again)
        assert stopped.code == 75
        assert "mirror         uploading step 6, for at most 100 s\n" in stopped.out
        assert "stopped: SIGTERM: ended at once, the run is done; the same command" in stopped.err
        assert json.loads((snapshots(tmp_path)[-1] / "status.json").read_text())["state"] == "done"
        assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"
