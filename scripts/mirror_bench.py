"""What --mirror_to costs the steps of a training: their time while a checkpoint is uploaded to an S3 server
on this machine, against that of the steps between uploads, in turns. In every second turn between uploads
another process hashes bytes: cores that share caches and memory slow each other, whatever they do.

    pip install -r examples/requirements-mirror.txt
    OMP_NUM_THREADS=1 python scripts/mirror_bench.py --steps 600 --save_steps 50

The server (moto) and that process have the lowest priority, as the process that uploads. The model is a
perceptron with random weights. Steps during which a checkpoint is written do not count: that is not the
mirror's time. The CPU time of uploading is printed too; it hardly depends on what else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app"))

import boto3
import psutil
import torch
import vector_task
from launchers import as_words, free_port

from samerun import checkpoint, mirror, training
from samerun.main import run_task
from samerun.parsing import parse, validate

LAYERS, WIDTH, ROWS = 4, 2048, 128  # 17 million weights: a checkpoint of 202 MB
FEWEST_STEPS = 3  # of a turn
QUIET, BESIDE, UPLOAD = "alone", "beside a process", "with an upload"
NEIGHBOUR = "import hashlib\nblock = bytes(50_000_000)\nwhile True: hashlib.sha256(block).digest()"


class Perceptron(vector_task.Regression):
    def build(self) -> torch.nn.Module:
        hidden = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        ends = torch.nn.Linear(vector_task.FEATURES, WIDTH), torch.nn.Linear(WIDTH, vector_task.TARGETS)
        return torch.nn.Sequential(ends[0], *hidden, ends[1])

    def export(self, path, model, weights, best):
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--save_steps", type=int, default=120)
    options = parser.parse_args()
    port = free_port()
    credentials = {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "mine", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**credentials, "ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        os.environ[f"AWS_{name}"] = value
    with low_priority("-m", "moto.server", "-p", str(port)), low_priority("-c", NEIGHBOUR) as neighbour:
        report(measure(options, boto3.client("s3"), Neighbour(neighbour)))


@contextlib.contextmanager
def low_priority(*words: str) -> Iterator[subprocess.Popen]:
    """A Python process of the lowest priority, killed at the end."""
    command = ["nice", "-n", "19", sys.executable, *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()


class Neighbour:
    """A process that runs in every second turn between uploads and stands still otherwise."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process, self.runs, self.turn = process, False, 0
        process.send_signal(signal.SIGSTOP)

    def follow(self, is_uploading: bool) -> None:
        """Called before each step."""
        self.turn += is_uploading == (self.turn % 2 == 0)  # odd turns are uploads
        runs = self.turn % 4 == 2
        if runs != self.runs:
            self.process.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
            self.runs = runs

    def kind(self) -> str:
        return UPLOAD if self.turn % 2 else BESIDE if self.runs else QUIET


def measure(options: argparse.Namespace, client, neighbour: Neighbour) -> list[tuple[str, float]]:
    """(kind of its turn, seconds) of each step that counts."""
    create_bucket(client)
    steps, step, writing = [], training.train_step, []

    def is_uploading() -> bool:
        return mirror._mirror.uploading is not None

    def timed(*given, **named):
        before = is_uploading()
        neighbour.follow(before)
        began = time.perf_counter()
        result = step(*given, **named)
        if not writing and is_uploading() == before:
            steps.append((neighbour.kind(), time.perf_counter() - began))
        return result

    write = checkpoint._write

    def noted(*given):
        writing.append(True)
        write(*given)
        writing.clear()

    upload, uploaded, seconds = mirror.Mirror._upload, [], []

    def counted(self, snapshot):
        process = psutil.Process(self.transfers.process.pid)
        before = sum(process.cpu_times()[:2])
        upload(self, snapshot)
        seconds.append(sum(process.cpu_times()[:2]) - before)
        uploaded.append(sum(record["bytes"] for record in snapshot.files.values()))

    training.train_step, checkpoint._write, mirror.Mirror._upload = timed, noted, counted
    with tempfile.TemporaryDirectory() as folder:
        words = as_words(
            global_batch_size=ROWS, num_rows=ROWS * 40, max_steps=options.steps, eval_strategy="no",
            save_steps=options.save_steps, report_to="none", output_dir=folder, mirror_to="s3://mine/a",
        )  # fmt: skip
        arguments = parse(vector_task.Arguments, ["--do_train", *words])
        validate(arguments)
        run_task(Perceptron(arguments), arguments)
    print(
        f"{len(uploaded)} uploads, {sum(uploaded) / 1e6:.0f} MB; CPU time of the process that uploads: "
        f"{sum(seconds) / (sum(uploaded) / 1e9):.2f} s per GB",
        flush=True,
    )
    return steps


def create_bucket(client) -> None:
    for _ in range(100):  # until the server listens
        try:
            return client.create_bucket(Bucket="mine")
        except Exception:
            time.sleep(0.2)
    raise SystemExit("the server does not start")


def report(steps: list[tuple[str, float]]) -> None:
    """Compares the median step of each turn of uploads with those of the turns before and after it."""
    turns: list[tuple[str, list[float]]] = []
    for kind, seconds in steps:
        if not turns or turns[-1][0] != kind:
            turns.append((kind, []))
        turns[-1][1].append(seconds)
    medians = [(kind, statistics.median(times)) for kind, times in turns if len(times) >= FEWEST_STEPS]
    ratios: dict[str, list[float]] = {QUIET: [], BESIDE: []}
    for pair in itertools.pairwise(medians):
        kinds, times = {kind for kind, _ in pair}, dict(pair)
        if UPLOAD in kinds and len(kinds) == 2:
            (other,) = kinds - {UPLOAD}
            ratios[other].append(times[UPLOAD] / times[other])
    if min(map(len, ratios.values())) < 2:
        raise SystemExit("too few turns: give more --steps and --save_steps")
    for other, values in ratios.items():
        lower, middle, upper = statistics.quantiles(values, n=4)
        print(
            f"step {UPLOAD} / {other}: median {middle:.3f}, quartiles {lower:.3f} and {upper:.3f} "
            f"({len(values)} pairs of turns)"
        )


if __name__ == "__main__":
    main()
