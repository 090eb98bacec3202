#!/usr/bin/env python3
"""Kills a training command again and again, lets it go on, and compares what is left with the run that was never killed.

    python scripts/soak.py [--kills N] [--launch "LAUNCHER ..."] [--output_dir FOLDER] app/classify.py ARGS

ARGS are the training command's own, unchanged but for its --output_dir. It runs once straight through; then with
`--resume_from_checkpoint auto` it is ended by SIGKILL (nothing can be caught, nothing is tidied up) and started again until it
is done, as many times over as N kills take. Half of the kills come at a random moment of the run's duration, half at a random
one of its calls that flush or rename a file: inside a checkpoint, the export of the best model, the predictions, the metrics.
At each end everything that two equal runs have in common must be equal to the byte: the best model, the last checkpoint's
weights, moments and state, history.jsonl, predictions, metrics but for those of clocks and memory.

    --kills N           how many (default 25)
    --seed N            decides the moments (default 0)
    --launch "..."      a launcher with its options, such as "torchrun --nproc_per_node 2"; kills come at random moments and
                        hit the whole job or, every other time, one rank, and then the rest must end by itself.
                        Without it the runs are forked from one process that has imported the libraries: same code, no start-up
    --timeout SECONDS   for one run, before it counts as hanging (default 600)
    --output_dir FOLDER the runs with their logs, and soak.json (default runs/soak)

Exit codes: 0 every run ended with the same bytes; 1 one did not, or failed, or hung; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY / "app")]

from soaking.comparison import differences  # noqa: E402

KILLED = -signal.SIGKILL
DISK_CALLS = ("fsync", "rename", "replace")


@dataclass(frozen=True)
class Moment:
    """When a run is killed: `seconds` after its start, or at its `disk_call`-th call that flushes or renames a file."""

    seconds: float | None = None
    disk_call: int | None = None
    one_rank: bool = False  # only one process of the job


@dataclass(frozen=True)
class Ended:
    """A run that is over: its exit code (negative: the signal), how long it took, its calls that reached the disk."""

    code: int
    seconds: float
    disk_calls: list[str]  # with the file, relative to the run's folder


Start = Callable[[Path, Moment | None], Ended]


class Soak:
    """The runs of one command. `start` runs it once into a folder, and kills it at a moment if there is one."""

    def __init__(self, folder: Path, start: Start, seed: int, by_disk: bool) -> None:
        self.folder, self.start, self.by_disk = folder, start, by_disk
        self.chance = random.Random(seed)
        self.where: Counter[str] = Counter()  # what kills hit
        self.wrong: list[str] = []
        self.kills = self.runs = 0

    def go(self, kills: int) -> None:
        """Runs straight through once, then kills until there were enough."""
        self.straight = self.start(self.folder / "straight", None)
        if self.straight.code:
            raise SystemExit(f"error: the command fails without being killed; see {self.folder / 'straight.log'}")
        print(f"straight       {self.straight.seconds:.1f} s, {len(self.straight.disk_calls) or 'unknown'} call(s) to disk")
        while self.kills < kills and not self.wrong:
            self._one_run(self.folder / f"run_{self.runs}", kills)

    def _one_run(self, place: Path, kills: int) -> None:
        """One run that is killed until it is done; its folder stays only if something is wrong with it."""
        before = self.kills
        while True:
            moment = self._moment() if self.kills < kills else None
            ended = self.start(place, moment)
            if ended.code == 0:
                break
            if ended.code != KILLED:
                self.wrong.append(f"{place.name}: ended with exit code {ended.code} after {self.kills - before} kill(s)")
                return
            self.kills += 1
            self.where[self._hit(place, moment, ended)] += 1
        self.runs += 1
        found = differences(self.folder / "straight", place)
        self.wrong += [f"{place.name}: {difference}" for difference in found]
        print(f"{place.name:<15}{self.kills - before} kill(s), {'the same' if not found else ', '.join(found)}", flush=True)
        if not found:
            shutil.rmtree(place)

    def _moment(self) -> Moment:
        if self.by_disk and self.chance.random() < 0.5:
            return Moment(disk_call=self.chance.randrange(len(self.straight.disk_calls)))
        # A run that goes on has less to do, so late moments would find it done.
        one_rank = not self.by_disk and self.chance.random() < 0.5
        earliest = 0.0 if self.by_disk else 0.25  # a launcher takes its time to start
        return Moment(seconds=self.chance.uniform(earliest, 1) * self.straight.seconds, one_rank=one_rank)

    def _hit(self, place: Path, moment: Moment, ended: Ended) -> str:
        if moment.disk_call is not None:
            call, _, file = ended.disk_calls[-1].partition(" ")
            return f"{call} in {Path(file).parts[0].strip('.').removesuffix('.unfinished')}"
        try:
            state = json.loads((place / "status.json").read_text(encoding="utf-8"))["state"]
        except FileNotFoundError:
            state = "before the run began"
        return f"{'one rank, ' if moment.one_rank else ''}by the clock: {state}"


def main(argv: list[str]) -> int:
    options = read_options(argv)
    folder = options.output_dir
    if folder.exists():
        shutil.rmtree(folder) if (folder / "soak.json").exists() or not any(folder.iterdir()) else stop_at(folder)
    folder.mkdir(parents=True)
    (folder / "soak.json").write_text("{}\n", encoding="utf-8")
    if options.launch:
        soak = Soak(folder, launched(options), options.seed, by_disk=False)
    else:
        soak = Soak(folder, forked(options), options.seed, by_disk=True)
    soak.go(options.kills)
    report = {
        "kills": soak.kills,
        "runs": soak.runs,
        "where": dict(soak.where.most_common()),
        "wrong": soak.wrong,
        "launch": options.launch,
        "seed": options.seed,
    }
    (folder / "soak.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(*(f"{count:>5} x {where}" for where, count in soak.where.most_common()), sep="\n")
    print(f"{soak.kills} kill(s) over {soak.runs} run(s): {len(soak.wrong)} difference(s)", *soak.wrong, sep="\n")
    return 1 if soak.wrong else 0


def stop_at(folder: Path) -> NoReturn:
    raise SystemExit(f"error: --output_dir {folder} is not empty and not of an earlier soak; name another")


def read_options(argv: list[str]) -> argparse.Namespace:
    """The options before the script, the script, and its arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--launch", type=shlex.split, metavar="LAUNCHER ...")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS")
    parser.add_argument("--output_dir", type=lambda p: Path(p).expanduser(), default=Path("runs/soak"), metavar="FOLDER")
    parser.add_argument("script", type=Path, metavar="app/TASK.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    found = parser.parse_args(argv)
    if found.kills < 1:
        parser.error(f"--kills {found.kills}: at least 1")
    if not found.script.is_file():
        parser.error(f"{found.script}: is no file; name a task's script, such as app/classify.py")
    found.script = found.script.resolve()
    return found


def arguments_for(options: argparse.Namespace, place: Path) -> list[str]:
    """The command's arguments, with another folder, going on from what is there."""
    return [*options.arguments, "--output_dir", str(place), "--resume_from_checkpoint", "auto"]


# Forked runs ----------------------------------------------------------------------------------------------------------


def forked(options: argparse.Namespace) -> Start:
    """Runs that are forked from this process, which has imported what they need and computed nothing."""
    # Only forked runs import these, for their children.
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
    from soaking.child import run_script

    def start(place: Path, moment: Moment | None) -> Ended:
        reader, writer = os.pipe()
        started = time.monotonic()
        log = place.with_suffix(".log").open("ab")
        process = os.fork()
        if process == 0:
            os.close(reader)
            disk_call = None if moment is None else moment.disk_call
            run_script(options.script, arguments_for(options, place), log.fileno(), writer, DISK_CALLS, disk_call)
        os.close(writer)
        log.close()
        if moment is not None and moment.seconds is not None:
            time.sleep(moment.seconds)
            _kill(process)
        calls = _read(reader, process, started + options.timeout)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        seconds = time.monotonic() - started
        inside = [call.replace(f"{place.resolve()}/", "").replace(f"{place}/", "") for call in calls]
        return Ended(code, seconds, inside)

    return start


def _read(reader: int, process: int, until: float) -> list[str]:
    """What the child wrote until it ended; a child that does not is killed and reported as hanging."""
    import select

    data = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            _kill(process)
            raise SystemExit("error: a run hung, and was killed")
        part = os.read(reader, 65536)
        if not part:
            os.close(reader)
            return data.decode(errors="replace").splitlines()
        data += part


def _kill(process: int) -> None:
    """The child's whole group: also the workers of its DataLoader."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(process, signal.SIGKILL)  # it has not made its group yet


# Launched runs --------------------------------------------------------------------------------------------------------


def launched(options: argparse.Namespace) -> Start:
    """Runs by a real launcher, in processes of their own."""
    chance = random.Random(options.seed)

    def start(place: Path, moment: Moment | None) -> Ended:
        command = [*options.launch, str(options.script), *arguments_for(options, place)]
        started = time.monotonic()
        with place.with_suffix(".log").open("ab") as log:
            process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        was_killed = False
        if moment is not None:
            try:
                process.wait(moment.seconds)
            except psutil.TimeoutExpired:
                was_killed = True
                family = [*process.children(recursive=True), process]
                ranks = [member for member in family if _is_rank(member, options.script)]
                hit = [chance.choice(ranks)] if moment.one_rank and ranks else family
                for member in hit:
                    _end(member)
        code = _wait(process, started + options.timeout)
        return Ended(KILLED if was_killed else code, time.monotonic() - started, [])

    return start


def _is_rank(process: psutil.Process, script: Path) -> bool:
    try:
        return str(script) in process.cmdline() and "RANK" in process.environ()
    except psutil.Error:
        return False


def _end(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _wait(process: psutil.Popen, until: float) -> int:
    """The exit code, once the launcher and everything it started is gone; raises `SystemExit` if it does not go."""
    family = process.children(recursive=True) if process.is_running() else []
    try:
        code = process.wait(max(1.0, until - time.monotonic()))
    except psutil.TimeoutExpired:
        left = [process, *family]
    else:
        _, left = psutil.wait_procs(family, timeout=60)
    if left:
        for member in left:
            _end(member)
        raise SystemExit(f"error: a run hung: {len(left)} process(es) had to be killed")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
