"""What one of many processes does, found on one machine.

    python scripts/scale.py --processes 1024 [--fsdp] [--count]
    torchrun --nproc_per_node 4 scripts/scale.py [--fsdp] [--count]

Trains a small classifier as rank 0 of a process group that does not exist: torch's fake group returns at
once, and what would come from other processes is a copy of this process's own or stays as it was. So counts,
bytes, files, memory and this process's work are right, and losses and scores are not. The global batch is the
same for any number of processes. Under torchrun the processes are real. All times are CPU times of a phase's
thread. The table is Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app"))

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from samerun import api, checkpoint, evaluate, main, training
from samerun.data.batches import TrainBatches
from samerun.files import temporary_folder
from samerun.reports.card import markdown_table
from samerun.runtime import Run
from samerun.text import head

SMALL_MODEL = Path(__file__).resolve().parents[1] / "app" / "recipes" / "small_modernbert" / "config.json"
GLOBAL_BATCH, STEPS, LABELS = 1024, 4, 20
ROWS = {"train_file": 4096, "validation_file": 2048}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
# What is measured: a name, and where its function is.
PHASES: tuple[tuple[str, Any, str], ...] = (
    ("opening the run", main, "open_run"),
    ("a step's rows", TrainBatches, "__getitem__"),
    ("a step", training, "train_step"),
    ("predicting", evaluate, "predict"),
    ("scores (rank 0)", evaluate, "score"),
    ("full weights", checkpoint, "full_weights"),
    ("export (rank 0)", training.Training, "_write_best"),
    ("a checkpoint", checkpoint, "save"),
    ("its files (rank 0's thread)", checkpoint, "_write"),
)


class Measured:
    """CPU seconds, collectives, bytes sent and opened files of each call of the phases."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Counter]] = {"start": [Counter()], "between": [Counter()]}
        self.stacks = {threading.get_ident(): [self.calls["start"][0]]}
        sys.addaudithook(self._on_event)

    def stack(self) -> list[Counter]:
        """The calls that this thread is in, the innermost last."""
        return self.stacks.setdefault(threading.get_ident(), [self.calls["between"][0]])

    def _on_event(self, event: str, _: tuple) -> None:
        if event == "open":
            self.stack()[-1]["files"] += 1

    def measuring(self, name: str, function: Callable) -> Callable:
        def measured(*args: Any, **named: Any) -> Any:
            stack, call, started = self.stack(), Counter(), time.thread_time()
            if name == "a step":
                stack[0] = self.calls["between"][0]
            self.calls.setdefault(name, []).append(call)
            stack.append(call)
            try:
                return function(*args, **named)
            finally:
                call["seconds"] = time.thread_time() - started
                stack.pop()

        return measured

    def rows(self) -> list[list[str]]:
        """A row for each phase: its calls, then the median of each number."""
        units = {"seconds": 1000, "collectives": 1, "bytes": 1 / 1024, "files": 1}
        return [
            [
                name,
                str(len(calls)),
                *(f"{unit * np.median([c[key] for c in calls]):.5g}" for key, unit in units.items()),
            ]
            for name, calls in self.calls.items()
        ]


class Traffic(TorchDispatchMode):
    """Counts the collectives of the phases, and the bytes that this process sends in them, if they go round a
    ring: for n bytes and P processes, an all-reduce 2 n (P - 1) / P, an all-gather or a reduce-scatter
    (P - 1) times this process's part."""

    def __init__(self, measured: Measured, processes: int) -> None:
        super().__init__()
        self.measured, self.processes = measured, processes

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        is_collective = name.startswith(("c10d::", "_c10d_functional::"))
        if is_collective and "wait" not in name and "wrap" not in name:
            self.measured.stack()[-1].update({"collectives": 1, "bytes": self._sent(name, args)})
        return function(*args, **(kwargs or {}))

    def _sent(self, name: str, args: tuple) -> float:
        others = self.processes - 1
        if "allreduce" in name or "all_reduce" in name:
            return 2 * size_of(args[0]) * others / self.processes
        if "reduce_scatter" in name:
            return size_of(args[0 if name.startswith("c10d") else 1]) * others
        if "c10d::gather" in name:
            return size_of(args[1])
        if "allgather" in name:
            return size_of(args[1]) * others
        return size_of(args[0]) * (others if "all_gather" in name else 1)


def size_of(value: Any) -> int:
    """Bytes of the tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 0


def write_rows(path: Path, rows: int) -> Path:
    """Random texts, each with two labels."""
    names = np.array([f"w{number}" for number in range(500)])
    generator = np.random.default_rng(rows)
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            text = " ".join(names[generator.integers(0, len(names), generator.integers(4, 24))])
            own = {f"label{number % LABELS}" for number in (2 * row, 2 * row + 1 + generator.integers(3))}
            file.write(json.dumps({"text": text, "labels": sorted(own)}) + "\n")
    return path


def fake_group(processes: int) -> None:
    """Makes this process rank 0 of a group of which it is the only real one."""
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    # Predictions of other processes do not come, so there is no sense in comparing them.
    evaluate.in_order = lambda parts, rows: {
        name: np.zeros((rows, *values.shape[1:]), values.dtype) for name, values in parts[-1].items()
    }
    head.check_agreement = lambda *_: None
    prepare = Run.prepare
    Run.prepare = lambda run, *parts: with_hook(*prepare(run, *parts))


def with_hook(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Has DDP's all-reduces made by Python: its own expect a result, which the fake group does not give."""
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, reduce_bucket)
    return model, optimizer


def reduce_bucket(_, bucket):  # DDP refuses annotations that are texts
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def train(processes: int, fsdp: bool, count: bool) -> None:
    """Prints what rank 0 does in a short training."""
    real = "RANK" in os.environ
    processes = int(os.environ["WORLD_SIZE"]) if real else processes
    if fsdp:
        os.environ.update(FSDP)
    if not real:
        fake_group(processes)
    measured, folder = Measured(), temporary_folder("scale_")
    for name, owner, function in PHASES:
        setattr(owner, function, measured.measuring(name, getattr(owner, function)))
    settings = {"config_name": SMALL_MODEL, "from_scratch": True, "tokenizer_type": "train"}
    settings |= {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": STEPS // 2, "use_cpu": True}
    settings |= {"save_steps": STEPS // 2, "report_to": "none", "output_dir": folder / "run"}
    settings |= {"global_batch_size": GLOBAL_BATCH, "max_tokens_per_micro_batch": 10**6}
    data = {name: write_rows(folder / f"{name}.jsonl", rows) for name, rows in ROWS.items()}
    with Traffic(measured, processes) if count else nullcontext():
        api.train("classify", **settings, **data)
    if os.environ.get("RANK", "0") == "0":
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        files = psutil.Process().num_fds()
        print(f"\n{processes} processes: {memory:.0f} MB at most, {files} descriptors at the end\n")
        columns = ["", "calls", "CPU ms", "collectives", "KiB sent", "files opened"]
        print(*markdown_table(columns, measured.rows()), sep="\n", flush=True)
    os._exit(0)  # as a run ends: gloo's threads may abort a process that is taken down slowly


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--count", action="store_true", help="collectives and bytes too; that takes time")
    train(**vars(parser.parse_args()))
