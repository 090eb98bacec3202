"""Jobs that something happens to while they run."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
from launchers import TIMEOUT, environment


@dataclass
class Job:
    """A command that runs: its process, its descendants as of the moment that it trained, and what it says."""

    process: subprocess.Popen
    family: list[psutil.Process]
    said: IO[str]

    def worker(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        return next(member for member in self.family if member.environ().get("RANK") == str(rank) and _is_script(member))

    def ended(self) -> int:
        """The launcher's exit code, once everything that belonged to the job is gone."""
        code = self.process.wait(TIMEOUT)
        _, alive = psutil.wait_procs(self.family, TIMEOUT)
        assert alive == []
        return code

    def text(self) -> str:
        self.said.seek(0)
        return self.said.read()


@contextlib.contextmanager
def running() -> Iterator[Callable[..., Job]]:
    """A function that starts a command in `home` and waits until `folder` shows that it has trained for some steps (None: does
    not wait). In the end what is left of the jobs is killed."""
    jobs: list[Job] = []

    def begin(home: Path, command: list[str], folder: Path | None, steps: int = 3) -> Job:
        said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        process = subprocess.Popen(
            command, cwd=home, env=environment(home), stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        job = Job(process, [], said)
        jobs.append(job)
        if folder is None:
            return job
        wait_for(lambda: lines_of(folder / "history.jsonl") >= steps, job)
        job.family = psutil.Process(process.pid).children(recursive=True)
        return job

    try:
        yield begin
    finally:
        for job in jobs:
            for member in [*job.family, psutil.Process(job.process.pid)] if job.process.poll() is None else job.family:
                if member.is_running():
                    member.kill()
            job.said.close()


def wait_for(condition: Callable[[], bool], job: Job) -> None:
    """Waits for something that a running job does; fails with what the job said if it ends before."""
    until = time.monotonic() + TIMEOUT
    while not condition():
        assert job.process.poll() is None, job.text()
        assert time.monotonic() < until, job.text()
        time.sleep(0.01)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _is_script(process: psutil.Process) -> bool:
    """Whether a process runs a task's script itself, rather than launches it."""
    command = process.cmdline()
    return len(command) > 1 and any(part.endswith(("classify.py", "titlegen.py")) for part in command[1:3])
