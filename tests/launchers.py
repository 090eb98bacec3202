"""Starts the application as users do: by real launchers in subprocesses, on tiny generated data.

Everything runs on the CPU, offline, from a folder outside of the repository. `JOBS` is one small training job
under every launcher and launch file, which tests/launch/ checks.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import forks
import psutil
import yaml
from run_folders import check_run_folder

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = REPOSITORY / "scripts"
APP = REPOSITORY / "app"
CLASSIFY = APP / "classify.py"
ACCELERATE_CONFIGS = REPOSITORY / "accelerate_configs"
DS_CONFIGS = REPOSITORY / "ds_configs"
# Seconds. On two idle cores, the slowest launch takes 20 s and DeepSpeed's first compilation 40 s; beside the
# suite's other process 140 s were seen, and some machines have a third of the speed.
TIMEOUT = 1200
LAUNCHER_PREFIXES = ("ACCELERATE_", "TORCHELASTIC_", "DEEPSPEED_", "DS_")
RANK_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip


@dataclass(frozen=True)
class Finished:
    command: list[str]
    code: int
    out: str
    err: str

    def check(self) -> Finished:
        """Fails with the end of the output if the exit code is not 0. Returns itself."""
        assert self.code == 0, (
            f"exit code {self.code} of {' '.join(self.command)}\n{self.out[-3000:]}\n{self.err[-6000:]}"
        )
        return self


def run(command: list[str], home: Path, real: bool = False) -> Finished:
    """Runs a command in `home`. Kills it and its descendants after TIMEOUT. Unless `real`, Python and
    launchers begin with the libraries imported (see `forks`)."""
    return run_together([command], home, real)[0]


def run_together(commands: list[list[str]], home: Path, real: bool = False) -> list[Finished]:
    """Like `run`, for several commands at the same time, such as the launchers of several machines."""
    until = time.monotonic() + TIMEOUT
    jobs = []
    for command in commands:
        # Files, because a worker that outlives its launcher would keep a pipe open.
        out, err = (tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in range(2))  # noqa: SIM115
        process = subprocess.Popen(
            command if real else forked(command), cwd=home, env=environment(home), stdin=subprocess.DEVNULL,
            stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
        jobs.append((command, process, out, err))
    try:
        for _, process, _, _ in jobs:
            process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for _, process, _, _ in jobs:
            _kill_family(process)
    return [
        Finished(command, process.returncode, _text(out), _text(err)) for command, process, out, err in jobs
    ]


def forked(command: list[str]) -> list[str]:
    """The command by the forks of its Python or launcher; itself if it begins with another program."""
    place, name = os.path.split(command[0])
    if place != os.path.dirname(sys.executable) or "-X" in command:
        return command
    name = "python" if command[0] == sys.executable else name
    return [str(forks.commands() / name), *command[1:]]


def _kill_family(process: subprocess.Popen) -> None:
    """Kills a running process and its descendants. (torchrun's workers have their own process groups.)"""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def _text(file) -> str:
    with file:
        file.seek(0)
        return file.read()


def without_launcher() -> dict[str, str]:
    """This process's environment without the variables that launchers set."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in RANK_VARIABLES
    }


def environment(home: Path) -> dict[str, str]:
    """This process's environment without launcher variables and GPUs, with caches in `home`."""
    return {
        **without_launcher(),
        "PYTHONPATH": f"{home / 'no_gpu'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(home / "cache"),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(home / "compiled"),
        # DeepSpeed imports an optimizer that imports torch.compile: saves two seconds per process.
        "TORCHDYNAMO_DISABLE": "1",
    }


def free_port() -> int:
    """An unused port, above those of the tests' Slurm jobs and below those that the system gives away."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def as_words(**given: object) -> list[str]:
    """Arguments on a command line, without those that are None."""
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]


# The functions below return a launcher with its options, up to the script.


def python() -> list[str]:
    return [sys.executable]


def tool(name: str) -> list[str]:
    """The command `samerun NAME`, as an installation starts it."""
    code = f"import sys; sys.path[0] = {str(APP)!r}\nfrom samerun.__main__ import main\nmain()"
    return [sys.executable, "-c", code, name]


def check_parity(setups: str, steps: int, home: Path, script: str, words: list[str]) -> None:
    """Compares the first steps of a task's command under these setups of `samerun parity`, which fails where
    more than rounding differs from one process."""
    options = as_words(setups=setups, steps=steps, output_dir="table")
    run([*tool("parity"), *options, script, *words], home).check()


def torchrun(processes: int) -> list[str]:
    return [_tool("torchrun"), "--nproc_per_node", str(processes), "--master_port", str(free_port())]


def accelerate(file: str, processes: int, *options: str) -> list[str]:
    """`accelerate launch` with a shipped file, by the name that skips the imports of other commands."""
    port = [] if "--main_process_port" in options else ["--main_process_port", str(free_port())]
    config = ["--config_file", str(ACCELERATE_CONFIGS / file), "--num_processes", str(processes)]
    return [_tool("accelerate-launch"), *config, *port, *options]


def machines(file: str, count: int, processes: int) -> list[list[str]]:
    """`accelerate launch` for `count` machines, all of them this one. `processes`: on all machines."""
    rendezvous = as_words(main_process_ip="127.0.0.1", main_process_port=free_port(), num_machines=count)
    return [accelerate(file, processes, *rendezvous, "--machine_rank", str(rank)) for rank in range(count)]


def deepspeed(processes: int) -> list[str]:
    return [_tool("deepspeed"), "--num_gpus", str(processes), "--master_port", str(free_port())]


def _tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


LABELS = "abcdef"
TRAIN_ROWS, VALIDATION_ROWS, TEST_ROWS = 31, 15, 23


def write_corpus(home: Path) -> None:
    """Writes train.csv, valid.csv, test.csv (with ids and labels), one.csv (one row) and unlabelled.csv:
    texts of 3 to 60 words that fit their labels, some without a label; a configuration in bert/."""
    chance = random.Random(0)

    def row() -> tuple[str, str]:
        labels = [label for label in LABELS if chance.random() < 0.4]
        count = chance.randint(3, 60)
        words = [f"{chance.choice(labels or LABELS)}{chance.randrange(20)}" for _ in range(count)]
        return " ".join(words), "|".join(labels)

    write_csv(home / "train.csv", ["text", "labels"], [row() for _ in range(TRAIN_ROWS)])
    write_csv(home / "valid.csv", ["text", "labels"], [row() for _ in range(VALIDATION_ROWS)])
    test = [(f"doc {number * 7 % TEST_ROWS}", *row()) for number in range(TEST_ROWS)]
    test[5] = (test[5][0], " ", "")
    write_csv(home / "test.csv", ["id", "text", "labels"], test)
    write_csv(home / "one.csv", ["text", "labels"], [row()])
    write_csv(home / "unlabelled.csv", ["id", "text"], [cells[:2] for cells in test])
    hide_gpus(home)
    write_bert_config(home / "bert")


def hide_gpus(home: Path) -> None:
    """Hides GPUs from Python with `environment`, also if a launcher sets CUDA_VISIBLE_DEVICES for workers."""
    (home / "no_gpu").mkdir()
    hide = 'import os\n\nos.environ["CUDA_VISIBLE_DEVICES"] = ""\n'
    (home / "no_gpu" / "sitecustomize.py").write_text(hide)


OBSERVER = """
import sys
from pathlib import Path
sys.path.insert(0, {app!r})  # before an installed samerun
from samerun.tools.moving import observer
del sys.path[0]
observer.observe_steps(Path({folder!r}))
"""


def observe_steps(home: Path) -> None:
    """Makes trainings with `environment` record their steps in observed/ (`tools.moving.observer`)."""
    with (home / "no_gpu" / "sitecustomize.py").open("a", encoding="utf-8") as file:
        file.write(OBSERVER.format(app=str(APP), folder=str(home / "observed")))


def write_csv(path: Path, header: list[str], rows: list[tuple[str, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def write_bert_config(folder: Path, dropout: float = 0.1) -> None:
    folder.mkdir()
    config = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "vocab_size": 900,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def training(output_dir: Path, **changed: object) -> list[str]:
    """The arguments of the common job: six steps with evaluations and checkpoints, then predictions."""
    arguments = {
        "config_name": "bert/config.json",
        "tokenizer_type": "train",
        "vocab_size": 300,
        "train_file": "train.csv",
        "validation_file": "valid.csv",
        "test_file": "test.csv",
        "per_device_eval_batch_size": 7,
        "pos_weight": "balanced",
        "label_smoothing_factor": 0.1,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "max_steps": 6,
        "max_grad_norm": 0.05,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "metric_for_best_model": "loss",
        "save_steps": 2,
        "save_total_limit": 3,
        "report_to": "none",
        "output_dir": output_dir,
    } | changed
    return [str(CLASSIFY), "--from_scratch", "--do_train", "--do_predict", *as_words(**arguments)]


def write_settings(path: Path, words: list[str], here: Path, there: Path | None = None) -> Path:
    """Writes arguments for --config. What exists in `here` gets an absolute path, below `there` if given."""
    settings: dict[str, object] = {}
    for word in words:
        if word.startswith("--"):
            settings[name := word.removeprefix("--")] = True
        else:
            settings[name] = str((there or here) / word) if (here / word).exists() else word
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


# Global batch sizes. The third batch of the 31 rows has one row for 15, so that only one process has a row; 7
# rows for 12.
UNEVEN, EVEN = 15, 12
# A global batch has about 400 tokens, a row at most 64.
MICRO_BATCH_TOKENS = 100


@dataclass(frozen=True)
class Job:
    """One launch of the common job. `launch` returns the launchers' commands, one per machine; `arguments`
    the script and its arguments."""

    launch: Callable[[], list[list[str]]]
    processes: int
    global_batch_size: int
    micro_batch_size: int | None = None
    max_tokens: int | None = None  # of a micro-batch
    deepspeed_file: str | None = None  # an argument of the script
    zero_stage: int = 0
    precision: str = "no"
    resumes: tuple[str, int] | None = None  # (job, step) of the checkpoint
    averages: bool = False  # the weights: --ema_decay
    arguments: Callable[..., list[str]] = training
    compared_with: str | None = None  # by default a job of classification

    @property
    def reference(self) -> str:
        """The name of the job to compare with: one process, no accumulation."""
        if self.compared_with is not None:
            return self.compared_with
        if self.global_batch_size == EVEN:
            return "single_gpu"
        return "averaged" if self.averages else "python"


def one(launcher: Callable[..., list[str]], *options: object) -> Callable[[], list[list[str]]]:
    return lambda: [launcher(*options)]


JOBS = {
    "python": Job(one(python), 1, UNEVEN),
    "averaged": Job(one(python), 1, UNEVEN, averages=True),
    "cpu": Job(one(accelerate, "cpu.yaml", 1), 1, UNEVEN, micro_batch_size=4),
    "single_gpu": Job(one(accelerate, "single_gpu.yaml", 1), 1, EVEN, averages=True),
    "cpu_ddp": Job(one(accelerate, "cpu_ddp.yaml", 2), 2, UNEVEN, max_tokens=MICRO_BATCH_TOKENS,
                   averages=True),
    "ddp": Job(one(accelerate, "ddp.yaml", 2), 2, UNEVEN, averages=True),
    "ddp_bf16": Job(one(accelerate, "ddp_bf16.yaml", 2), 2, EVEN, precision="bf16"),
    "multi_node_ddp": Job(
        lambda: machines("multi_node_ddp.yaml", 2, 2), 2, UNEVEN, micro_batch_size=4, resumes=("python", 2)
    ),
    "fsdp": Job(one(accelerate, "fsdp.yaml", 2), 2, UNEVEN, micro_batch_size=4, resumes=("ddp", 2),
                averages=True),
    "fsdp_offload": Job(one(accelerate, "fsdp_offload.yaml", 2), 2, EVEN, resumes=("zero3_offload", 2),
                        averages=True),
    "torchrun": Job(one(torchrun, 3), 3, UNEVEN, resumes=("fsdp", 4), averages=True),
    "zero1": Job(one(accelerate, "zero1.yaml", 2), 2, UNEVEN, zero_stage=1),
    "zero2": Job(one(accelerate, "zero2.yaml", 2), 2, EVEN, max_tokens=MICRO_BATCH_TOKENS, zero_stage=2,
                 averages=True),
    "zero3": Job(one(accelerate, "zero3.yaml", 2), 2, UNEVEN, micro_batch_size=4, zero_stage=3),
    "zero2_offload": Job(one(accelerate, "zero2_offload.yaml", 2), 2, UNEVEN, zero_stage=2),
    "zero3_offload": Job(one(accelerate, "zero3_offload.yaml", 2), 2, EVEN, zero_stage=3, averages=True),
    "deepspeed_zero2": Job(
        one(deepspeed, 2), 2, UNEVEN, deepspeed_file="ds_configs/zero2.json", zero_stage=2,
        resumes=("ddp", 2), averages=True,
    ),
    "deepspeed_zero3": Job(
        one(deepspeed, 2), 2, UNEVEN, deepspeed_file="partitioned.json", zero_stage=3,
        resumes=("deepspeed_zero2", 4), averages=True,
    ),
}  # fmt: skip
REAL = ("ddp",)  # nothing is imported before it starts; real python and deepspeed: tests/faults


def write_partitioned(home: Path) -> None:
    """Writes partitioned.json: ZeRO-3 that also partitions small weights, unlike the shipped file."""
    config = json.loads((DS_CONFIGS / "zero3.json").read_text(encoding="utf-8"))
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (home / "partitioned.json").write_text(json.dumps(config), encoding="utf-8")


@dataclass(frozen=True)
class Launched:
    """A finished job: its folder, and the launchers, one per machine."""

    folder: Path
    finished: list[Finished]

    def check(self) -> Launched:
        for finished in self.finished:
            finished.check()
        return self


def launch(name: str, job: Job, home: Path) -> Launched:
    """Runs a job in runs/NAME. The job that it resumes must have run in the same `home`."""
    folder = home / "runs" / name
    changed: dict[str, object] = {
        "global_batch_size": job.global_batch_size,
        "per_device_train_batch_size": job.micro_batch_size,
        "max_tokens_per_micro_batch": job.max_tokens,
        "ema_decay": 0.5 if job.averages else None,
        # Both spellings must work.
        "deepspeed_config" if job.zero_stage == 1 else "deepspeed": job.deepspeed_file,
    }
    if job.resumes:
        other, step = job.resumes
        changed["resume_from_checkpoint"] = home / "runs" / other / "checkpoints" / f"step_{step}"
    arguments = job.arguments(folder, **changed)
    commands = [[*launcher, *arguments] for launcher in job.launch()]
    finished = run_together(commands, home, real=name in REAL)
    check_run_folder(folder)
    return Launched(folder, finished)
