"""A copy of a run at a URL, such as a bucket (--mirror_to), for machines that lose their disk.

The local folder stays the place of work. After each checkpoint rank 0 keeps the state of the folder (hard
links, and copies of files that change in place), and a process (`transfers`) uploads it as a snapshot, a new
folder:

    owner.json                the process that writes here: a second one takes over, and the first one stops
    000003_step_40_1f2e3d4c/  the files of the run, with one checkpoint
        manifest.json         uploaded last: the run's fingerprint, size and hash of every file

A snapshot counts if its manifest is there. Names never repeat, so nothing that counts is overwritten. A start
with --resume_from_checkpoint auto fetches the newest one if the local folder has no later step. Rank 0 only;
without --mirror_to the functions at the end do nothing.
"""

import contextlib
import json
import math
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samerun import checkpoint, run_folder
from samerun.checkpoint import LEFT_BEHIND, MANIFEST, check_same_run, list_checkpoints, step_of
from samerun.console import say
from samerun.errors import InputError
from samerun.files import as_json, files_at
from samerun.run_folder import BEST, CHECKPOINTS, OURS, RECORDS, RUN_FILE, STATUS
from samerun.transfers import Transfers, described

OWNER = "owner.json"
SNAPSHOT = re.compile(r"(\d{6,})_step_\d+_[0-9a-f]{8}")
KEPT = 2  # complete snapshots
FETCHED = ".mirror_fetched"  # in the run's folder
# Files that grow or are written in place; others are replaced.
GROWING = (run_folder.HISTORY, run_folder.SPEED, run_folder.TENSORBOARD, run_folder.PLOTS, STATUS)
START_SECONDS = 20.0  # for the first answer
# For the last upload after a request to stop; clouds announce the end 30 to 120 s before.
STOP_SECONDS = 100.0
END_SECONDS = 3600.0  # for the last upload of a finished run
RETRY_SECONDS = 10.0
ATTEMPTS = 5  # that may fail while the end of the process waits
PASSWORD = re.compile(r"://[^@]*:[^@]*@|\?|::")  # or a signed query, or several protocols


@dataclass
class Snapshot:
    """`files`: {path in the run's folder: size and hash, as `file_record`} of what is in the mirror. `place`:
    the local folder with the files to upload."""

    name: str
    step: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    place: Path | None = None


class Mirror:
    """The mirror of this process's run."""

    def __init__(self, url: str) -> None:
        """Connects and writes a probe. Raises `InputError` within `START_SECONDS`."""
        if PASSWORD.search(url) or "://" not in url:
            raise InputError(
                "--mirror_to: expected a URL such as s3://BUCKET/runs/a or file:///mnt/runs/a, without a "
                "password or a query, which logs would show: give secrets by the service's own variables or "
                "files, or by those of fsspec, such as FSSPEC_SFTP_PASSWORD"
            )
        self.url, self.token = url, uuid.uuid4().hex[:8]
        self.fingerprint: dict[str, Any] = {}
        self.number = 0  # of the last snapshot
        self.first = 0  # snapshots before this one are of a run that was replaced
        self.complete: list[Snapshot] = []  # in the mirror, oldest first
        self.completed_at = time.monotonic()  # when the last one was
        self.pending: Snapshot | None = None  # the newest one that is not there yet
        self.uploading: Snapshot | None = None
        self.problem: str | None = None  # of the last attempt
        self.failures = 0
        self.taken_by: str | None = None  # another process that writes to this mirror now
        self.changed = threading.Condition()
        self.transfers: Transfers | None = None
        try:
            self._connect()
        except Exception as error:
            advice = "check the address, the network and the credentials"
            raise InputError(f"--mirror_to {url}: cannot be written ({described(error)}); {advice}") from None

    def _connect(self) -> None:
        """Starts the process that transfers, in place of an earlier one."""
        if self.transfers is not None:
            self.transfers.close()
        self.transfers = Transfers()
        try:
            self.transfers.call("connect", self.url, seconds=START_SECONDS)
        except Exception:
            self.transfers.close()
            raise

    def _names(self) -> list[str]:
        """The names of all snapshots, complete or not, oldest first."""
        return sorted(filter(SNAPSHOT.fullmatch, self.transfers.call("names")), key=_number)

    # Before a training

    def begin(self, folder: Path, fingerprint: dict[str, Any], resume: str | None, overwrite: bool) -> str:
        """Takes over the mirror. With `resume` "auto" replaces the run in `folder` by the newest snapshot, if
        that is of a later step. Returns a note.

        Raises `InputError` if the mirror has another run, or one that is neither resumed nor replaced.
        """
        self.fingerprint, note = json.loads(as_json(fingerprint)), f"mirror: {self.url}"
        try:
            self.first = (self.transfers.call("read", OWNER) or {"first": 0})["first"]
            for name in self._names():
                self.number, manifest = _number(name), self.transfers.call("read", f"{name}/{MANIFEST}")
                if manifest is not None and self.number >= self.first and not overwrite:
                    self._check_run(manifest["fingerprint"], resume)
                    self.complete.append(Snapshot(name, manifest["step"], manifest["files"]))
            if overwrite:
                self.first = self.number + 1
            if resume == "auto" and self.complete:
                note = self._fetch_newest(folder) or note
            owner = {"token": self.token, "host": socket.gethostname(), "process": os.getpid()}
            self.transfers.call("write", OWNER, as_json({**owner, "first": self.first}))
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"--mirror_to {self.url}: cannot be read ({described(error)})") from None
        return note

    def _check_run(self, before: dict[str, Any], resume: str | None) -> None:
        place = f"--mirror_to {self.url} has"
        advice = "; name another URL, or replace that run by --overwrite_output_dir"
        check_same_run(before, self.fingerprint, f"{place} another run", advice)
        if resume is None:
            raise InputError(f"{place} this run; go on by --resume_from_checkpoint auto{advice}")

    def _fetch_newest(self, folder: Path) -> str | None:
        """Fetches the newest whole snapshot, if it is of a later step than `folder`. Returns a note, if it
        did. Raises `InputError` if neither has a whole checkpoint."""
        local_step, damaged = _local_step(folder, self.fingerprint), []
        newest = local_step
        if local_step >= 0:  # the run may have gone back to an earlier step, and was lost before an upload
            left_behind = map(step_of, list_checkpoints(folder / CHECKPOINTS, LEFT_BEHIND))
            newest = max([local_step, *left_behind])
        while self.complete and self.complete[-1].step > newest:
            snapshot = self.complete[-1]
            problem = self._fetch(snapshot, folder)
            if problem is None:
                return f"step {snapshot.step} was fetched from the mirror {self.url}"
            damaged.append(f"{snapshot.name} in the mirror {self.url}: {problem}")
            say(f"warning: {damaged[-1]}")
            self.complete.pop()
        if local_step < 0:
            raise InputError(*damaged, "the mirror has no whole run; --overwrite_output_dir starts again")
        return None

    def _fetch(self, snapshot: Snapshot, folder: Path) -> str | None:
        """Replaces the run in `folder` by a snapshot. Returns what is wrong with the snapshot; then nothing
        has changed."""
        fetched, size = folder / FETCHED, sum(record["bytes"] for record in snapshot.files.values())
        say(f"mirror         fetching step {snapshot.step} ({size / 1e6:.1f} MB)")
        shutil.rmtree(fetched, ignore_errors=True)
        try:
            for path, record in snapshot.files.items():
                if path.split("/")[0] not in (*OURS, RECORDS) or ".." in path.split("/"):
                    return f"lists {path}, which is no file of a run"  # others may have written to the mirror
                (fetched / path).parent.mkdir(parents=True, exist_ok=True)
                found = self.transfers.call("get", f"{snapshot.name}/{path}", fetched / path)
                if found is None:
                    return f"{path} is missing"
                if found != record:
                    return f"{path} was changed after it was written (checksum)"
            run_folder.clear(folder)
            # run.json first: it says that the others are a run's. Checkpoints last: without one, a later
            # start fetches again.
            for path in sorted(snapshot.files, key=lambda x: (x != RUN_FILE, x.startswith(CHECKPOINTS))):
                if not os.path.lexists(folder / path):  # else it is the user's
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(fetched / path, folder / path)
        finally:
            shutil.rmtree(fetched, ignore_errors=True)
        return None

    # During and after a training

    def stage(self, folder: Path, step: int) -> Snapshot:
        """Keeps the state of the run's files but its checkpoints. Call it in the thread that writes them."""
        self.number += 1
        # Named as what a crash leaves of a checkpoint, so that the next start removes it.
        place = folder / CHECKPOINTS / f".step_{step}.mirror_{self.number}.unfinished"
        for name in (*OURS, RECORDS):
            if name != CHECKPOINTS and os.path.lexists(folder / name):
                foreign = [] if name == RECORDS else run_folder.foreign(folder, name)
                for path in files_at(folder / name):
                    if path not in foreign and path.is_file() and not path.is_symlink():
                        _keep(path, place / path.relative_to(folder), link=name not in GROWING)
        return Snapshot(f"{self.number:06d}_step_{step}_{self.token}", step, place=place)

    def submit(self, snapshot: Snapshot, saved: Path | None) -> None:
        """Adds the checkpoint `saved` and lets the thread upload the snapshot, in place of one that waits."""
        for path in files_at(saved) if saved is not None else []:
            _keep(path, snapshot.place / path.relative_to(saved.parents[1]), link=True)
        with self.changed:
            passed, self.pending = self.pending, snapshot
            self.changed.notify_all()
            if passed is None:
                threading.Thread(target=self._work, name="mirror", daemon=True).start()
            elif passed is not self.uploading:
                shutil.rmtree(passed.place, ignore_errors=True)

    def wait(self, seconds: float) -> None:
        """Waits until everything is uploaded, at most this long or for some failed attempts."""
        with self.changed:
            if self.pending is not None:
                say(f"mirror         uploading step {self.pending.step}, for at most {seconds:g} s")
                last = self.failures + ATTEMPTS
                self.changed.notify_all()  # tries at once
                self.changed.wait_for(
                    lambda: self.pending is None or self.taken_by or self.failures >= last, seconds
                )
                if self.pending is None:
                    say(f"mirror         {self.url} has step {self.complete[-1].step}")
            if self.pending is None:
                self.transfers.close()  # a later upload starts it again
            else:
                say(f"note           {self._behind(self.pending)}. The local folder has it; the same command "
                    "with --resume_from_checkpoint auto uploads it")  # fmt: skip

    def _work(self) -> None:
        """Uploads until nothing is pending."""
        while self.taken_by is None:
            with self.changed:
                self.uploading = snapshot = self.pending
            problem = None
            try:
                self._upload(snapshot)
            except Exception as error:
                problem = described(error)
            with self.changed:
                before, self.problem, self.uploading = self.problem, problem, None
                if problem is None or self.pending is not snapshot:
                    shutil.rmtree(snapshot.place, ignore_errors=True)
                if problem is not None:
                    self.failures += 1
                    if before is None:
                        say(f"note           {self._behind(snapshot)}; trying again")
                elif self.taken_by is None:
                    if before is not None:
                        say(f"note           mirror: {self.url} has step {snapshot.step} again")
                    if self.pending is snapshot:
                        self.pending = None
                self.changed.notify_all()
                if problem is not None:
                    self.changed.wait(RETRY_SECONDS)
                if self.pending is None:
                    return
        self.transfers.close()

    def _behind(self, snapshot: Snapshot) -> str:
        """Says that a snapshot is not uploaded, why, and how old the mirror is."""
        reason, age = self.taken_by or self.problem or "it takes longer", time.monotonic() - self.completed_at
        has = f"has step {self.complete[-1].step}, since {age:.0f} s" if self.complete else "has no step"
        return f"mirror: step {snapshot.step} is not uploaded ({reason}); {self.url} {has}"

    def _upload(self, snapshot: Snapshot) -> None:
        if self.problem is not None or self.transfers.pipe.closed:
            self._connect()  # the network or the credentials may have changed
        if not self._is_ours(snapshot):
            return
        call = self.transfers.call
        before = self.complete[-1] if self.complete else None
        hashed = {  # size and hash of the checkpoints' files, by their manifests
            (path.parent / name).relative_to(snapshot.place).as_posix(): record
            for path in snapshot.place.glob(f"{CHECKPOINTS}/*/{MANIFEST}")
            for name, record in json.loads(path.read_text(encoding="utf-8"))["files"].items()
        }
        for path in files_at(snapshot.place):
            name = path.relative_to(snapshot.place).as_posix()
            if name in snapshot.files:
                continue  # by an earlier attempt
            record, target = hashed.get(name) or call("record", path), f"{snapshot.name}/{name}"
            is_there = before is not None and before.files.get(name) == record
            if not (is_there and call("copy", f"{before.name}/{name}", target)):
                call("put", path, target)
            snapshot.files[name] = record
        if not self._is_ours(snapshot):
            return
        content = {"fingerprint": self.fingerprint, "step": snapshot.step, "files": snapshot.files}
        call("write", f"{snapshot.name}/{MANIFEST}", as_json(content))
        self.complete, self.completed_at = [*self.complete, snapshot][-KEPT:], time.monotonic()
        kept, names = [kept.name for kept in self.complete], self._names()
        for name in names[: names.index(snapshot.name)]:
            if name not in kept:
                call("remove", name, MANIFEST)  # first, so that it no longer counts

    def _is_ours(self, snapshot: Snapshot) -> bool:
        """Whether no other process has taken over the mirror."""
        owner = self.transfers.call("read", OWNER)
        # None: another one may be about to write it.
        if owner is not None and owner["token"] != self.token:
            self.taken_by = f"process {owner['process']} on {owner['host']} writes there now"
            say(f"note           {self._behind(snapshot)}; nothing more is uploaded")
        return self.taken_by is None


_mirror: Mirror | None = None


def connect(url: str | None) -> None:
    """Connects to --mirror_to; None: this process has no mirror. Raises `InputError`."""
    global _mirror
    if _mirror is not None and _mirror.pending is None:  # of an earlier run in this process, which failed
        _mirror.transfers.close()
    _mirror = None if url is None else Mirror(url)


def begin(folder: Path, fingerprint: dict[str, Any], resume: str | None, overwrite: bool) -> list[str]:
    """Takes over the mirror and fetches its run if that is later (`Mirror.begin`). Returns notes."""
    return [] if _mirror is None else [_mirror.begin(folder, fingerprint, resume, overwrite)]


def snapshot(folder: Path, step: int) -> Callable[[Path | None], None]:
    """Keeps the run's files as they are now. Returns a function that uploads them with a checkpoint."""
    mirror = _mirror
    if mirror is None or mirror.taken_by is not None:
        return lambda saved: None
    staged = mirror.stage(folder, step)
    return lambda saved: mirror.submit(staged, saved)


def upload(folder: Path) -> None:
    """Uploads the run's files as they are now with the newest checkpoint, which is complete."""
    if _mirror is not None:
        saved = checkpoint.list_checkpoints(folder / CHECKPOINTS)
        step = json.loads((folder / STATUS).read_text(encoding="utf-8"))["step"]
        snapshot(folder, step)(saved[-1] if saved else None)


def wait(seconds: float) -> None:
    """Waits for the upload, before the process ends."""
    if _mirror is not None:
        _mirror.wait(seconds)


def _local_step(folder: Path, fingerprint: dict[str, Any]) -> float:
    """The newest step from which the run in `folder` can go on; -1 for none. Infinite for another run, which
    is refused later."""
    run = run_folder.read_if_whole(folder / RUN_FILE)
    state = run_folder.read_if_whole(folder / STATUS) if run else {}
    if run.get("fingerprint", fingerprint) != fingerprint:
        return math.inf
    for path in reversed(checkpoint.list_checkpoints(folder / CHECKPOINTS)):
        if checkpoint.damage(path) is None:
            return checkpoint.step_of(path)
    return state["step"] if state.get("state") == "done" and (folder / BEST).is_dir() else -1


def _number(name: str) -> int:
    return int(SNAPSHOT.fullmatch(name)[1])


def _keep(path: Path, target: Path, link: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        with contextlib.suppress(OSError):  # the file system has no hard links
            os.link(path, target)
            return
    shutil.copy2(path, target)
