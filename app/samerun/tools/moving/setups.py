"""The setups under which `samerun parity` compares a job: launcher, sharding and precision."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samerun.files import shipped
from samerun.run_folder import STATUS, read_metrics

OBSERVER = Path(__file__).resolve().with_name("observer.py")
# Of a run that is not the user's own job: it leaves that one's mirror, repository and predictions alone.
APART = {
    **dict.fromkeys(("mirror_to", "hub_model_id", "predictions_file"), "none"),
    **dict.fromkeys(("push_to_hub", "hub_private_repo"), "false"),
}
# Overrides the command's own values: a setup does not resume, predict, upload or report.
OVERRIDES = {
    **APART,
    **dict.fromkeys(("do_train", "do_eval", "overwrite_output_dir"), "true"),
    **dict.fromkeys(("resume_from_checkpoint", "report_to", "profile", "max_train_time"), "none"),
    **dict.fromkeys(("early_stopping_patience", "ddp_backend"), "none"),
    **{"do_predict": "false", "logging_steps": "1", "eval_strategy": "steps"},
}


@dataclass(frozen=True)
class Setup:
    """`memory`: the name of a file in ds_configs/, or for FSDP in accelerate_configs/."""

    name: str
    launcher: str  # python, torchrun, accelerate, deepspeed
    several: bool = False  # processes
    accumulation: int = 1
    memory: str | None = None
    precision: str = "no"
    usual: bool = True  # runs without --setups


SETUPS = (
    Setup("one", "python"),
    Setup("accumulate2", "python", accumulation=2),
    Setup("accumulate4", "python", accumulation=4, usual=False),
    Setup("ddp", "torchrun", several=True),
    Setup("ddp_accumulate2", "accelerate", several=True, accumulation=2, usual=False),
    Setup("zero1", "accelerate", several=True, memory="zero1"),
    Setup("zero2", "deepspeed", several=True, memory="zero2"),
    Setup("zero3", "deepspeed", several=True, memory="zero3"),
    Setup("fsdp", "accelerate", several=True, memory="fsdp"),
    Setup("fsdp_offload", "accelerate", several=True, memory="fsdp_offload", usual=False),
    Setup("zero2_offload", "torchrun", several=True, memory="zero2_offload", usual=False),
    Setup("zero3_offload", "accelerate", several=True, memory="zero3_offload", usual=False),
    Setup("bf16", "python", precision="bf16"),
    Setup("bf16_ddp", "accelerate", several=True, precision="bf16", usual=False),
    Setup("bf16_zero2", "deepspeed", several=True, memory="zero2", precision="bf16"),
    Setup("bf16_fsdp", "accelerate", several=True, memory="fsdp", precision="bf16", usual=False),
    Setup("fp16", "python", precision="fp16"),
    Setup("fp16_zero2", "deepspeed", several=True, memory="zero2", precision="fp16"),
)
REFERENCE = SETUPS[0]


def launcher(setup: Setup, processes: int, file: Path | None = None) -> list[str]:
    """The launcher with its options, up to the script. `file`: for accelerate, other than a shipped one.
    Raises `FileNotFoundError` if the launcher is not installed."""
    if setup.launcher == "python":
        return [sys.executable]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    if setup.launcher == "torchrun":
        return [_tool("torchrun"), "--nproc_per_node", str(processes), "--master_port", port]
    if setup.launcher == "deepspeed":
        # With --num_gpus it takes the first GPUs of the machine instead.
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        visible = list(filter(str.isdecimal, named))[:processes]
        chosen = ["--include", f"localhost:{','.join(visible)}"]
        number = ["--num_gpus", str(processes)]
        return [_tool("deepspeed"), *(chosen if len(visible) == processes else number), "--master_port", port]
    name = setup.memory or ("ddp_bf16" if setup.precision == "bf16" else "ddp")
    file = file or shipped("accelerate_configs") / f"{name}.yaml"
    config = ["--config_file", str(file), "--main_process_port", port]
    return [_tool("accelerate"), "launch", *config, "--num_processes", str(processes)]


def launch_arguments(setup: Setup) -> dict[str, str]:
    """The script's arguments for the setup's DeepSpeed file and precision."""
    file = f"ds_configs/{setup.memory}.json" if setup.memory and setup.launcher != "accelerate" else "none"
    return {"deepspeed": file, "mixed_precision": setup.precision}


def run_observed(
    start: list[str],
    script: Path,
    arguments: list[str],
    work: Path,
    name: str,
    *,
    steps: int = 0,
    timeout: float,
    device: str = "any",
) -> str | None:
    """Runs a task's script under the launcher `start` and `observer`, which writes into WORK/observed and
    knows `steps` and `device`. Returns the reason if the run fails. `work`/`name`: the run's --output_dir.
    WORK/NAME.log gets its output. After `timeout` seconds its process group is killed."""
    work.mkdir(parents=True, exist_ok=True)
    command = [*start, str(OBSERVER), device, str(work / "observed"), str(steps), str(script), *arguments]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
    with signals_unwind(), (work / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, env=environment, **options)
        try:
            failed = process.wait(timeout) != 0
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # workers outside of it end without their launcher
                process.wait()
    if steps > 0:  # launchers have exit codes of their own for a run that stopped as it was asked to
        failed = read_metrics(work / name / STATUS).get("state") not in ("stopped", "done")
    return first_error(work / f"{name}.log") if failed else None


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise `SystemExit`, so that nothing begun is left behind."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def first_error(log: Path) -> str:
    """The first error line of a log, or else the last line."""
    lines = map(str.strip, log.read_text(encoding="utf-8", errors="replace").splitlines())
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith(("error", "- "))]
    return (errors or lines[-1:] or ["no output"])[0][:300]


def _tool(name: str) -> str:
    """The path of a launcher in this Python's environment, or else in PATH."""
    own = Path(sys.executable).with_name(name)
    path = str(own) if own.exists() else shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed beside {sys.executable}")
    return path
