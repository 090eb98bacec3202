#!/usr/bin/env python3
"""Compares the working tree with the version before the rewrite, by running both.

    python scripts/oracle.py CACHE [--tree FOLDER] [--only PATTERN] [--jobs N] [--list]

About 75 small commands (guarding/commands.py) run by commit 7e83d99 and by the working tree, each in a folder
of its own: tasks x launchers x resumes x stops x bad input. Compared: exit code, messages, names of files,
numbers of metrics.json, history.jsonl and the predictions (1e-6), masks, and the weights of best/. In the end
each version predicts with the other's best/. Time of a step and memory are printed as ratios. The old
version's runs stay in CACHE, so that the next comparison runs only the new half.

Exit codes: 0 equal but for allowed differences; 1 something differs; 2 bad arguments.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))

from guarding.commands import ALLOWED, COMMANDS, MAKE_DATA, MAKE_MORE, OLD_COMMIT, Command

REPOSITORY = Path(__file__).resolve().parents[1]
FORK_SERVER = Path(__file__).parent / "guarding" / "fork_server.py"
TIMEOUT = 900  # seconds
TOLERANCE = 1e-6
COMPARED_TIMES = ("train_step_time_p50", "peak_memory_mb")
CROSSED = {  # data for the models of these runs
    "classify": "text/test.csv", "classify_lora": "text/test.csv", "titles": "titles/test.jsonl",
    "images": "images/valid", "segment": "masks/valid", "segment3d": "volumes",
}  # fmt: skip
RUN_ROWS = ("history.jsonl", "predictions.jsonl")
# Values that differ between two runs of one version.
CHANGING = re.compile(
    r"time|second|memory|stall|per_sec|_mb$|pace|date|versions|process$|hardware|padding_share"
)
# Lines of libraries, and of our own that hold times and sizes only.
NOISE = re.compile(
    r"^\s*$|^training +\d+ of \d+ steps|^\[?[IWE]?\d{4}[- ]|\[(INFO|WARNING|WARN|ERROR|rank\d)|"
    r"^\*+$|^memory  |it/s|^[=-]{5,}|"
    r"weights \d.*gradients|Warning: |warnings?\.warn|^  warn|Root Cause|Other Failures|"
    r"^\s+(time|host|rank|exitcode|error_file|traceback) *:|^\s+(File|raise|return|self\.|exec) |"
    r"torch[. ](distributed|elastic)|Setting ds_accelerator|ninja|deepspeed\.ops|DeepSpeed [A-Z]|"
    r"Gloo|Sending process|Killing subprocess|OMP_NUM_THREADS|Loading extension|Time to load|Emitting|"
    r"Building extension|Using .* as PyTorch ext|exits with return code|process_group|subprocess"
)
REPLACED = [
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"^\[?(rank)? ?\d\]?:|\r"), ""),
    (re.compile(r"\bfinetune\b"), "samerun"),
    (re.compile(r"\b\d+(\.\d+)? ?(s|ms|min|MiB|GiB|MB|rows/s|tokens/s)\b"), "N unit"),
    (re.compile(r"\d+\.\d+(e-?\d+)?"), "X"),  # numbers are compared in files
    (re.compile(r"\b(pid|process) \d+"), "process N"),
    (re.compile(r" +"), " "),
]


@dataclass(frozen=True)
class Half:
    """One of the two versions: its code, and the folder in which its commands run."""

    name: str
    repository: Path
    home: Path

    def result_file(self, command: Command) -> Path:
        return self.home / "results" / f"{command.name}.json"


def start(command: Command, half: Half) -> list[str]:
    """The command line."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    tool, _, file = command.launcher.partition(" ")
    folder = Path(sys.executable).parent
    launcher = {
        "python": [sys.executable],
        "torchrun": [folder / "torchrun", "--nproc_per_node", "2", "--master_port", port],
        "deepspeed": [folder / "deepspeed", "--num_gpus", "2", "--master_port", port],
        "accelerate": [
            *(folder / "accelerate-launch", "--config_file", half.repository / "accelerate_configs" / file),
            *("--num_processes", "2", "--main_process_port", port),
        ],
    }[tool]
    given = shlex.split(command.arguments.replace("{repo}", str(half.repository)))
    if command.output_dir:
        given += ["--output_dir", f"runs/{command.name}"]
    return [*map(str, launcher), str(half.repository / "app" / f"{command.script}.py"), *given]


def environment(half: Half) -> dict[str, str]:
    ours = re.compile(
        r"ACCELERATE_|TORCHELASTIC_|DEEPSPEED_|DS_|MASTER_|(LOCAL_|CROSS_)?(RANK|(WORLD_)?SIZE)$"
    )
    return {name: value for name, value in os.environ.items() if not ours.match(name)} | {
        "PYTHONPATH": str(half.home / "text" / "no_gpu"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(half.home / "cache"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_EXTENSIONS_DIR": str(half.home.parent / "compiled"),
        "TORCHDYNAMO_DISABLE": "1",  # saves two seconds of imports per process
        "COLUMNS": "200",
    }


def run(command: Command, half: Half) -> None:
    """Runs a command, unless the old version's run of it is stored. Writes its output to the half's logs/."""
    stored = half.result_file(command)
    if half.name == "old" and stored.exists() and json.loads(stored.read_text())["key"] == key(command):
        return
    folder = half.home / "runs" / command.name
    shutil.rmtree(folder, ignore_errors=True)
    if command.script == "predict":
        folder.mkdir()  # for the file of --output
    if command.first:
        shutil.copytree(half.home / "runs" / command.first, folder)
    started = time.monotonic()
    process = begin(command, half)
    waiting = command.stop
    while process.code() is None:
        if time.monotonic() - started > TIMEOUT:
            for member in [
                *psutil.Process(process.pid).children(recursive=True),
                psutil.Process(process.pid),
            ]:
                member.kill()
        history = folder / "history.jsonl"
        if waiting and history.exists() and history.read_bytes().count(b"\n") >= 3:
            os.kill(process.pid, getattr(signal, waiting))
            waiting = None
        time.sleep(0.05)
    ended = {"key": key(command), "code": process.code(), "seconds": time.monotonic() - started}
    half.result_file(command).write_text(json.dumps(ended))


class Started(NamedTuple):
    """A command that runs. `code()`: its exit code, None while it runs."""

    pid: int
    code: Callable[[], int | None]


def begin(command: Command, half: Half) -> Started:
    """Starts a command: a launcher's as users do, one of plain Python in a fork of the half's server."""
    logs = [half.home / "logs" / f"{command.name}.{kind}" for kind in ("out", "err")]
    if command.launcher != "python":
        with logs[0].open("w") as out, logs[1].open("w") as err:
            process = subprocess.Popen(
                start(command, half), cwd=half.home, env=environment(half),
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return Started(process.pid, process.poll)
    ended = half.home / "logs" / f"{command.name}.code"
    pid_file = Path(f"{ended}.pid")
    for path in (ended, pid_file):
        path.unlink(missing_ok=True)
    given = [start(command, half)[1:], *map(str, (*logs, ended))]
    request = dict(zip(("arguments", "output", "errors", "ended"), given, strict=True))
    server = server_of(half)
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.02)
    return Started(int(pid_file.read_text()), lambda: int(ended.read_text()) if ended.exists() else None)


@functools.cache
def server_of(half: Half) -> subprocess.Popen:
    """A process that forks commands (see guarding/fork_server.py). It ends with its standard input."""
    command = [sys.executable, str(FORK_SERVER)]
    return subprocess.Popen(command, cwd=half.home, env=environment(half), text=True, stdin=subprocess.PIPE)


def result(command: Command, half: Half) -> dict:
    """What is compared of a command that has run."""
    logs = [
        (half.home / "logs" / f"{command.name}.{kind}").read_text(errors="replace") for kind in ("out", "err")
    ]
    found = json.loads(half.result_file(command).read_text()) | {"messages": messages(logs, half)}
    if command.name.startswith("help_"):
        found["messages"] = re.findall(r"^  (--\w+)", logs[0], re.MULTILINE)
    found |= content(half.home / "runs" / command.name, command.stop is not None)
    printed = [json.loads(line) for line in logs[0].splitlines() if line.startswith("{")]
    found["numbers"] |= flat(printed, "standard output")
    return found


def key(command: Command) -> str:
    return hashlib.sha256(repr((command, MAKE_DATA)).encode()).hexdigest()


def messages(texts: list[str], half: Half) -> list[str]:
    """The lines that matter, without paths, times and numbers; of several processes each line once."""
    lines = {}
    for line in (
        "\n".join(texts).replace(str(half.repository), "REPO").replace(str(half.home), "HOME").split("\n")
    ):
        for pattern, text in REPLACED:
            line = pattern.sub(text, line)
        if not NOISE.search(line) and not line.startswith("{"):
            lines[line.strip()] = None
    return list(lines)


def content(folder: Path, stopped: bool) -> dict:
    """Names of a run's files, its numbers and sums of other files. A stopped run has any number of steps."""
    files = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []
    names = [
        re.sub(r"events\.out\.\S+|tensorboard/\d+\.\d+", "events", p.relative_to(folder).as_posix())
        for p in files
    ]
    if stopped:
        return {
            "files": sorted({re.sub(r"step_\d+", "step_N", name) for name in names}),
            "numbers": {},
            "times": {},
        }
    numbers, times = {}, {}
    for path, name in zip(files, names, strict=True):
        if name == "metrics.json":
            values = json.loads(path.read_text())
            numbers |= flat(values, name)
            times = {n: values[n] for n in COMPARED_TIMES if n in values}
        elif name in RUN_ROWS:
            numbers |= flat([json.loads(line) for line in path.read_text().split("\n") if line], name)
        elif name in ("best/config.json", "status.json"):
            numbers |= flat(json.loads(path.read_text()), name)
        elif name.startswith("predictions/") or name.endswith(".csv"):
            unpacked = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            numbers[f"{name}:"] = hashlib.sha256(unpacked).hexdigest()[:12]
        elif name.startswith("best/") and name.endswith(".safetensors"):
            numbers |= sums(path, name)
    return {"files": names, "numbers": numbers, "times": times}


def sums(path: Path, name: str) -> dict[str, float]:
    """Mean and root mean square of each tensor."""
    from safetensors.torch import load_file

    found = {}
    for key, tensor in load_file(path).items():
        found[f"{name}: {key} mean"] = tensor.double().mean().item()
        found[f"{name}: {key} rms"] = tensor.double().square().mean().sqrt().item()
    return found


def flat(value: object, name: str) -> dict[str, object]:
    """{place: value} of nested JSON, without times."""
    leaves: dict[str, object] = {}

    def add(item: object, place: str) -> None:
        if isinstance(item, dict | list):
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            for part, inner in pairs:
                if not CHANGING.search(str(part)):
                    add(inner, f"{place}.{part}" if place else str(part))
        else:
            leaves[f"{name}: {place}"] = item

    add(value, "")
    return leaves


def equal(old: object, new: object) -> bool:
    if isinstance(old, int | float) and isinstance(new, int | float) and not isinstance(old, bool):
        return math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return old == new


def differences(name: str, old: dict, new: dict) -> list[str]:
    """What differs and is not allowed, a line each; at most six numbers of a file."""
    found = [] if old["code"] == new["code"] else [f"exit code {old['code']} -> {new['code']}"]
    for kind, what in (("messages", "message"), ("files", "file")):
        before, after = Counter(old[kind]), Counter(new[kind])
        found += [f"{what} - {text}" for text in before - after] + [
            f"{what} + {text}" for text in after - before
        ]
    for place in sorted({*old["numbers"], *new["numbers"]}):
        pair = [half["numbers"].get(place, "missing") for half in (old, new)]
        if not equal(*pair):
            found.append(f"number {place}: {pair[0]} -> {pair[1]}")
    lines, counts = [], Counter()
    for line in found:
        if not any(re.search(pattern, f"{name}: {line}") for pattern, _ in ALLOWED):
            counts[line.split(":")[0]] += line.startswith("number")
            if counts[line.split(":")[0]] <= 6:
                lines.append(line)
    return lines + [f"{file}: {count} differ in all" for file, count in counts.items() if count > 6]


def crossed(names: Iterable[str], halves: list[Half]) -> list[str]:
    """Predicts with each half's best/ by both versions. Returns the differences."""
    found = []
    for name in names:
        for owner in halves:
            model = f"{owner.home}/runs/{name}/best"
            command = Command(f"cross_{name}_{owner.name}", "predict", f"{model} {CROSSED[name]}")
            if owner.name == "new":
                halves[0].result_file(command).unlink(missing_ok=True)  # its model has changed
            for reader in halves:
                run(command, reader)
            pair = [result(command, reader) for reader in halves]
            found += [f"{name}: best/ of {owner.name}: {line}" for line in differences(command.name, *pair)]
    return found


def prepare(cache: Path, tree: Path) -> list[Half]:
    """Makes the old version's tree and both working folders."""
    old, data = cache / "version", cache / "data"
    if not old.exists():
        old.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", OLD_COMMIT], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "x", "-C", str(old)], input=archive.stdout, check=True)
    for number, script in enumerate((MAKE_DATA, MAKE_MORE)):
        made, stamp = data / f"made_{number}", hashlib.sha256(script.encode()).hexdigest()
        if made.exists() and made.read_text() == stamp:
            continue
        if number == 0:
            for folder in (data, cache / "old", cache / "new"):
                shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(
            [sys.executable, "-c", script, str(data), str(old)], check=True, stdout=subprocess.DEVNULL
        )
        made.write_text(stamp)
    halves = [Half("old", old, cache / "old"), Half("new", tree, cache / "new")]
    shutil.rmtree(halves[1].home / "cache", ignore_errors=True)  # whatever the new version had stored
    for half in halves:
        shutil.copytree(data, half.home, dirs_exist_ok=True)
        for name in ("logs", "results", "runs"):
            (half.home / name).mkdir(exist_ok=True)
    return halves


def ordered(pattern: str) -> list[Command]:
    """The commands whose name matches, after the ones they need."""
    named, chosen = {command.name: command for command in COMMANDS}, {}

    def add(command: Command) -> None:
        for name in command.needs:
            add(named[name])
        chosen[command.name] = command

    for command in COMMANDS:
        if re.search(pattern, command.name):
            add(command)
    return list(chosen.values())


def run_all(commands: list[Command], halves: list[Half], jobs: int) -> dict[str, list[dict]]:
    """{command: [old result, new result]}. A command waits for those it needs."""
    running: dict[tuple[str, str], Future] = {}

    def do(command: Command, half: Half) -> None:
        for name in command.needs:
            running[name, half.name].result()
        run(command, half)

    results = {}
    for half in halves:
        server_of(half)  # not in two threads at the same time
    with ThreadPoolExecutor(jobs) as pool:
        for command in commands:
            for half in halves:
                running[command.name, half.name] = pool.submit(do, command, half)
        for command in commands:
            for half in halves:
                running[command.name, half.name].result()
            results[command.name] = [result(command, half) for half in halves]
            report(command.name, *results[command.name])
    return results


def ratios(what: str, results: Iterable[list[dict]]) -> list[float]:
    """New by old, of the commands that have this time or size."""
    return [new["times"][what] / old["times"][what] for old, new in results
            if old["times"].get(what) and new["times"].get(what)]  # fmt: skip


def report(name: str, old: dict, new: dict) -> None:
    lines = differences(name, old, new)
    times = [f"{what} x {value:.2f}" for what in COMPARED_TIMES for value in ratios(what, [[old, new]])]
    notes = ", ".join([f"code {new['code']}", f"{new['seconds']:.0f} s", *times])
    state = "differs" if lines else "equal"
    print(f"{state:8}{name:26}{notes}", *(f"    {line}" for line in lines), sep="\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path, nargs="?", help="folder of the old version's results")
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="the new version (default: this one)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="commands of such names")
    parser.add_argument("--jobs", type=int, default=1, help="commands at the same time (default: 1)")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    args = parser.parse_args()
    commands = ordered(args.only)
    if args.list:
        print(*(f"{c.name:26}{c.launcher:26}{c.script}" for c in commands), sep="\n")
        return 0
    if args.cache is None or not commands or args.jobs < 1:
        parser.error(
            "name a folder for the old version's results, and commands that exist; --jobs is 1 or more"
        )
    halves = prepare(args.cache.resolve(), args.tree.resolve())
    results = run_all(commands, halves, args.jobs)
    lines = crossed((name for name in CROSSED if name in results), halves)
    print(*lines, sep="\n")
    for what in COMPARED_TIMES:
        if found := ratios(what, results.values()):
            print(f"{what}: median of new / old {statistics.median(found):.3f}, largest {max(found):.3f}")
    wrong = [name for name, pair in results.items() if differences(name, *pair)]
    print(f"{len(results)} commands, {len(wrong)} differ: {' '.join(wrong)}")
    return 1 if wrong or lines else 0


if __name__ == "__main__":
    sys.exit(main())
