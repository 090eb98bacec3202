"""A process that reads and writes the files of a mirror (`mirror`), so that an upload takes neither a core
nor Python's interpreter lock from the training.

It has the lowest priority, does not import torch, and ends when its pipe closes: with the training, however
that ends. A request is the name of a method of `Storage` with its arguments.
"""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from typing import Any

from samerun.errors import in_short
from samerun.files import file_record

PROGRAM = (sys.executable, "-P", "-m", "samerun.transfers")  # -P: no modules of the working directory
WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")  # there fsspec would create a bucket
SECRET = re.compile("SECRET|PASSWORD|PASSPHRASE|TOKEN|KEY|CONNECTION", re.IGNORECASE)  # names of variables


class TransferError(Exception):
    """A request failed. The message may be shown: see `described`."""


class Transfers:
    """The process, for the training. Used by one thread at a time."""

    def __init__(self) -> None:
        self.pipe, other = Pipe()
        self.process = _start(other)
        other.close()
        os.register_at_fork(after_in_child=self.pipe.close)  # a worker may outlive the training

    def call(self, method: str, *given: Any, seconds: float | None = None) -> Any:
        """Returns what a method of `Storage` returns. Raises `TransferError` if that fails, if the process
        has ended, or without an answer within `seconds`."""
        try:
            self.pipe.send((method, given))
            if not self.pipe.poll(seconds):
                raise TransferError(f"no answer within {seconds:g} s")
            result, problem = self.pipe.recv()
        except (OSError, EOFError):
            raise TransferError(f"the process that uploads ended with code {self.process.wait()}") from None
        if problem is not None:
            raise TransferError(problem)
        return result

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self.pipe.close()
        self.process.kill()
        self.process.wait()


def _start(pipe: Connection) -> subprocess.Popen:
    return subprocess.Popen(
        [*PROGRAM, str(pipe.fileno())],
        pass_fds=[pipe.fileno()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Signals to the training's group, such as Ctrl-C, leave it time for the last upload. It stays in the
        # session: where Linux shares the CPU among sessions (autogroup), priorities count only inside one.
        process_group=0,
    )


class Storage:
    """A folder at a URL. Names are relative to it."""

    def connect(self, url: str) -> None:
        """Opens the folder and writes a probe."""
        import fsspec

        self.fs, root = fsspec.core.url_to_fs(url)
        self.root, self.has_folders = root.rstrip("/"), url.partition("://")[0] not in WITHOUT_FOLDERS
        self.write(".probe", "samerun")
        self.fs.rm_file(self._at(".probe"))
        _give_way()

    def names(self) -> list[str]:
        """The names in the folder; none if it is missing."""
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return [PurePosixPath(path).name for path in self.fs.ls(self.root, detail=False)]
        return []

    def read(self, name: str) -> Any:
        """The content of a JSON file; None if it is missing or only half there."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return json.loads(self.fs.cat_file(self._at(name)))
        return None

    def write(self, name: str, text: str) -> None:
        self.fs.pipe_file(self._new(name), text.encode())

    def get(self, name: str, path: Path) -> dict[str, Any] | None:
        """Fetches a file. Returns its size and hash; None if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.get_file(self._at(name), str(path))
            return file_record(path)
        return None

    def put(self, path: Path, name: str) -> None:
        self.fs.put_file(str(path), self._new(name))

    def record(self, path: Path) -> dict[str, Any]:
        return file_record(path)

    def copy(self, source: str, target: str) -> bool:
        """Copies a file within the folder. False if it is missing, or if the service cannot copy."""
        target = self._new(target)
        with contextlib.suppress(Exception):
            self.fs.cp_file(self._at(source), target)
            return True
        return False

    def remove(self, name: str, first: str) -> None:
        """Removes a folder, beginning with its file `first`."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._at(f"{name}/{first}"))
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _new(self, name: str) -> str:
        """The address of a new file, in a folder that exists."""
        if self.has_folders:
            self.fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        return self._at(name)


def _give_way() -> None:
    """Gives all threads of this process the lowest priority, on Linux also for reading and writing. Not
    before it is connected: on a busy machine the training would wait for it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, 0, 19)  # its group is this process; PRIO_PROCESS would be one thread


def described(error: Exception) -> str:
    """An error in short, without the values of variables that look like secrets."""
    if isinstance(error, TransferError):
        return str(error)
    text = f"{type(error).__name__}: {in_short(error)}"
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return text


def serve(pipe: Connection) -> None:
    """Answers requests until the pipe closes, also in the middle of one."""
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(pipe, requests), daemon=True).start()
    with contextlib.suppress(OSError, EOFError):
        while True:
            requests.put(pipe.recv())


def _answer(pipe: Connection, requests: queue.SimpleQueue) -> None:
    storage = Storage()
    while True:
        method, given = requests.get()
        try:
            answer = getattr(storage, method)(*given), None
        except Exception as error:
            answer = None, described(error)
        with contextlib.suppress(OSError):  # the training has ended
            pipe.send(answer)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends a request to stop to every process of a job
    serve(Connection(int(sys.argv[-1])))
    os._exit(0)  # a transfer may be under way


if __name__ == "__main__":
    main()
