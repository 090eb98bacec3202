"""What one of many processes does, found on one machine.

    python scripts/scale.py run --processes 1024 [--fsdp] [--count] [--config_name config.json]
    torchrun --nproc_per_node 4 scripts/scale.py run [--fsdp] [--count]
    python scripts/scale.py order --rows 1000000 10000000 100000000
    python scripts/scale.py shares --processes 8 64 512 1024
    python scripts/scale.py heartbeat --processes 8 64 512 1024
    python scripts/scale.py scores --rows 10000 100000 1000000
    python scripts/scale.py growth

`run` trains a small classifier as rank 0 of a process group that does not exist: torch's fake group returns
at once, and what would come from other processes is a copy of this process's own or stays as it was. So
counts, bytes, files, memory and this process's work are right, and losses and scores are not. The global
batch is the same for any number of processes. Under torchrun the processes are real. All times are CPU times,
of a phase's thread or of the process. Tables are Markdown.
"""

import itertools
import json
import os
import resource
import subprocess
import sys
import threading
import time
import tracemalloc
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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

from samerun import api, checkpoint, evaluate, machines, main, training
from samerun.data.batches import TrainBatches, evaluation_batches, share_out, share_out_tokens
from samerun.files import temporary_folder
from samerun.plan import BatchShape
from samerun.reports.card import markdown_table
from samerun.runtime import Run
from samerun.task import Split
from samerun.text import head
from samerun.text.multi_label_scores import multilabel_scores

MODELS = Path(__file__).resolve().parents[1] / "app" / "recipes"
SMALL_MODEL = MODELS / "small_modernbert" / "config.json"
GLOBAL_BATCH, STEPS, TRAINING_ROWS, VALIDATION_ROWS, LABELS = 1024, 4, 4096, 2048, 20
# A training whose time and memory are measured, and what grows in it.
BASE = {"rows": 1000, "labels": 20, "tokens": 32, "processes": 1}
GROWTH = {
    "rows": (10**3, 10**4, 10**5, 10**6),
    "labels": (10, 100, 1000, 10_000),
    "tokens": (128, 1024, 4096, 16_384),
    "processes": (1, 2, 4),
}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
COST = ("CPU s", "bytes a row, at most")
# What is measured: a name, and where its function is.
PHASES: tuple[tuple[str, Any, str], ...] = (
    ("opening the run", main, "open_run"),
    ("a step's rows", TrainBatches, "__getitem__"),
    ("a step", training, "train_step"),
    ("predicting", evaluate, "predict"),
    ("scores (rank 0)", evaluate, "score"),
    ("full weights", checkpoint, "full_weights"),
    ("export (rank 0)", training.Training, "_write_best"),
    ("a checkpoint", checkpoint, "collect"),
    ("its files (rank 0's thread)", checkpoint, "write"),
)


# One run


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


def write_rows(path: Path, rows: int, labels: int, words: tuple[int, int]) -> Path:
    """Random texts of so many words (lowest, highest + 1), each with two labels; every label occurs."""
    names = np.array([f"w{number}" for number in range(500)])
    generator = np.random.default_rng(rows)
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            text = " ".join(names[generator.integers(0, len(names), generator.integers(*words))])
            own = {f"label{number % labels}" for number in (2 * row, 2 * row + 1 + generator.integers(3))}
            file.write(json.dumps({"text": text, "labels": sorted(own)}) + "\n")
    return path


def fake_group(processes: int) -> None:
    """Makes this process rank 0 of a group of which it is the only real one."""
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    # Predictions of other processes do not come, so there is no sense in comparing them.
    evaluate.in_order = lambda parts, rows: {
        name: np.zeros((rows, *values.shape[1:]), values.dtype)
        for name, values in parts[-1].items()
        if name != evaluate.ROWS
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


def run(arguments: Namespace) -> list[str]:
    """What rank 0 does in a short training. --count: also collectives and bytes; that takes time."""
    real = "RANK" in os.environ
    processes = int(os.environ["WORLD_SIZE"]) if real else arguments.processes[0]
    if arguments.fsdp:
        os.environ.update(FSDP)
    if not real:
        fake_group(processes)
    measured, folder = Measured(), temporary_folder("scale_")
    for name, owner, function in PHASES:
        setattr(owner, function, measured.measuring(name, getattr(owner, function)))
    settings = {"config_name": arguments.config_name, "from_scratch": True, "tokenizer_type": "train"}
    settings |= {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": STEPS // 2, "use_cpu": True}
    settings |= {"save_steps": STEPS // 2, "report_to": "none", "output_dir": folder / "run"}
    settings |= {"global_batch_size": GLOBAL_BATCH, "max_tokens_per_micro_batch": 10**6}
    data = {
        name: write_rows(folder / f"{name}.jsonl", rows, LABELS, (4, 24))
        for name, rows in (("train_file", TRAINING_ROWS), ("validation_file", VALIDATION_ROWS))
    }
    with Traffic(measured, processes) if arguments.count else nullcontext():
        api.train("classify", **settings, **data)
    if os.environ.get("RANK", "0") != "0":
        os._exit(0)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    files = psutil.Process().num_fds()
    columns = ["", "calls", "CPU ms", "collectives", "KiB sent", "files opened"]
    head = f"{processes} processes: {memory:.0f} MB at most, {files} descriptors at the end"
    return [head, "", *markdown_table(columns, measured.rows())]


# Parts


def show_order(arguments: Namespace) -> list[str]:
    """Time and memory of an epoch's order, and of the batches of an evaluation on one of 1,024 processes."""
    rows = []
    for number in arguments.rows:
        lengths = np.random.default_rng(0).lognormal(3, 0.8, number).clip(1, 512).astype(np.int64)
        split = Split("", lambda rows: None, number, lengths=lengths, padding_multiple=8)
        plan = SimpleNamespace(batch=BatchShape(GLOBAL_BATCH, 1024, 1, 1), epoch_of=lambda step: (step, 0))
        steps = TrainBatches(split, plan, 0, 42, True)
        found = [cost(partial(steps.rows, epoch)) for epoch in (0, 1)]
        widths = steps._epoch_at(1).widths
        found.append(cost(partial(evaluation_batches, widths, 8, 2048, 1024, 0)))
        cells = [cell for seconds, peak in found for cell in (f"{seconds:.3f}", f"{peak / number:.1f}")]
        rows.append([f"{number:,}", *cells])
    names = ("first epoch", "next epoch", "evaluation")
    return markdown_table(["rows", *(f"{name}: {unit}" for name in names for unit in COST)], rows)


def show_shares(arguments: Namespace) -> list[str]:
    """Time in which a process finds its share of a global batch, as in each step."""
    widths = np.random.default_rng(0).lognormal(4.5, 0.8, 60 * GLOBAL_BATCH).clip(8, 512).astype(np.int64)
    rows = []
    for size, processes in itertools.product((32, GLOBAL_BATCH), arguments.processes):
        batch = np.random.default_rng(1).permutation(len(widths))[:size]
        by_rows = cpu_ms(lambda batch=batch, n=processes: share_out(batch, widths, n, 1).of(0))
        by_tokens = cpu_ms(lambda batch=batch, n=processes: share_out_tokens(batch, widths, n, 2048).of(0))
        rows.append([size, processes, f"{by_rows:.2f}", f"{by_tokens:.2f}"])
    return markdown_table(["global batch", "processes", "by rows: CPU ms", "by tokens: CPU ms"], rows)


def show_heartbeat(arguments: Namespace) -> list[str]:
    """What rank 0, with the store in its process, compares at the start, and what it and another process read
    in each second."""
    compared = {"arguments": {f"--argument_{number}": "a value" for number in range(200)}}
    rows = []
    for processes in arguments.processes:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
        record = json.dumps({"beat": 10**6, "collectives": 10**7, "host": "node-of-a-cluster-0001"})
        for rank in range(processes):
            store.set(f"heartbeat/{rank}", record)
            own = {"rank": rank, "host": "m", "address": "10.0.0.1", "problems": [], "compared": compared}
            store.set(f"met/{rank}", json.dumps(own))
        launch = SimpleNamespace(rank=0, world_size=processes)
        start, _ = cost(partial(machines._verdict, store, launch, 60))
        own = machines._Heartbeat(store, launch, answered=time.monotonic())
        records = cpu_ms(partial(machines._read_records, own))
        store.set(machines.SUMMARY, json.dumps(own.summary))
        summary, size = cpu_ms(partial(machines._read_summary, own)), len(json.dumps(own.summary))
        cells = [f"{start:.2f}", f"{records:.2f}", processes * len(record), f"{summary:.2f}", size]
        rows.append([processes, *cells])
    columns = [
        "rank 0, start: CPU s",
        "rank 0, a second: CPU ms",
        "bytes",
        "another process: CPU ms",
        "bytes",
    ]
    return markdown_table(["processes", *columns], rows)


def show_scores(arguments: Namespace) -> list[str]:
    """Time and memory of a multi-label classifier's scores, which rank 0 computes over all rows."""
    rows = []
    for number in arguments.rows:
        generator = np.random.default_rng(0)
        logits = generator.normal(size=(number, LABELS)).astype(np.float32)
        targets = generator.random((number, LABELS)) < 0.1
        multilabel_scores(logits[:100], targets[:100], None, logits[:100] > 0)  # imports scikit-learn
        seconds, peak = cost(partial(multilabel_scores, logits, targets, None, logits > 0))
        rows.append([f"{number:,}", f"{seconds:.2f}", f"{peak / number:.0f}"])
    return markdown_table(["rows", *COST], rows)


def show_growth(arguments: Namespace) -> list[str]:
    """Time and memory of a training against rows, labels, tokens and processes, with the exponent of growth:
    the slope of a straight line through the logarithms."""
    rows = []
    for name, sizes in GROWTH.items():
        sizes = sizes[: arguments.sizes[0]]
        found = [train_apart(**BASE | {name: size}) for size in sizes]
        for unit in found[0]:
            values = [measured[unit] for measured in found]
            exponent, _ = np.polyfit(np.log(sizes), np.log(values), 1)
            of_sizes = "; ".join(f"{size:,}" for size in sizes)
            rows.append([name, unit, of_sizes, "; ".join(f"{x:,.4g}" for x in values), f"{exponent:.2f}"])
    return markdown_table(["what grows", "measured", "sizes", "values", "exponent"], rows)


def train_apart(rows: int, labels: int, tokens: int, processes: int) -> dict[str, float]:
    """What `train_once` measures in rank 0 of so many real processes, with texts of so many tokens."""
    folder = temporary_folder("scale_")
    write_rows(folder / "train.jsonl", rows, labels, (tokens - 2, tokens - 1))
    (folder / "labels.txt").write_text("\n".join(f"label{number}" for number in range(labels)))
    config = json.loads((MODELS / "small_bigbird" / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": tokens}))
    start = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *start, __file__, "train", "--folder", str(folder)],
        env=os.environ | {"HF_DATASETS_CACHE": str(folder / "cache")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def train_once(arguments: Namespace) -> list[str]:
    """Eight steps of 16 rows with the data and the BigBird in a folder; prints rank 0's cost as JSON."""
    folder, measured = arguments.folder, Measured()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    training.train_step = measured.measuring("a step", training.train_step)
    settings = {"config_name": folder, "from_scratch": True, "tokenizer_type": "train", "use_cpu": True}
    settings |= {"max_length": config["max_position_embeddings"], "max_steps": 8, "global_batch_size": 16}
    settings |= {"eval_strategy": "no", "save_strategy": "no", "report_to": "none"}
    settings |= {"label_file": folder / "labels.txt", "output_dir": folder / "run"}
    api.train("classify", train_file=folder / "train.jsonl", **settings)
    if os.environ.get("RANK", "0") != "0":
        os._exit(0)
    steps = [call["seconds"] for call in measured.calls["a step"]]
    found = {
        "a step, CPU ms": 1000 * float(np.median(steps)),
        "all else, CPU s": time.process_time() - sum(steps),
        "memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return [json.dumps(found)]


def cost(work: Callable[[], Any]) -> tuple[float, int]:
    """(CPU seconds of the process, most bytes allocated by Python and numpy meanwhile)."""
    tracemalloc.start()
    started = time.process_time()
    work()
    seconds, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak


def cpu_ms(work: Callable[[], Any]) -> float:
    """The mean CPU time of the process in milliseconds, of 50 calls."""
    started = time.process_time()
    for _ in range(50):
        work()
    return 1000 * (time.process_time() - started) / 50


COMMANDS = {
    "run": (run, "processes", [8]),
    "order": (show_order, "rows", [10**6]),
    "shares": (show_shares, "processes", [8, 64, 512, 1024]),
    "heartbeat": (show_heartbeat, "processes", [8, 64, 512, 1024]),
    "scores": (show_scores, "rows", [10**4, 10**5]),
    "growth": (show_growth, "sizes", [4]),
    "train": (train_once, "folder", None),
}

if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, (action, numbers, default) in COMMANDS.items():
        command = commands.add_parser(name, help=action.__doc__)
        command.set_defaults(action=action)
        if action is train_once:
            command.add_argument("--folder", type=Path, required=True)
            continue
        command.add_argument(f"--{numbers}", type=int, nargs="+", default=default)
        if action is run:
            command.add_argument("--fsdp", action="store_true")
            command.add_argument("--count", action="store_true")
            command.add_argument("--config_name", default=SMALL_MODEL)
    given = parser.parse_args()
    print("", *given.action(given), sep="\n", flush=True)
    os._exit(0)  # as a run ends: gloo's threads may abort a process that is taken down slowly
