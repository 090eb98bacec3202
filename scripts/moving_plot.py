"""Draws the README's plot: the losses of a run that moves between launchers beside those of the same run in
one process; for this project and for transformers' Trainer.

    python scripts/make_sample_data.py --output_dir sample_data
    python scripts/moving_plot.py [--data sample_data] [--steps 300] [--runs runs/moving_plot]

Trains a small classifier on the sample data, with dropout and the default settings, in fp32 on the CPU. One
run stays in one process; the other is stopped after each third of its steps and continued by the next
launcher: one process, two processes (torchrun), two processes with DeepSpeed ZeRO-2. Trainer trains the same
model on the same rows with the same global batch (`trainer_job.py`). Its third part is one process
again, since it does not continue its own checkpoints under ZeRO. Writes docs/images/moving.png and all losses
to benchmarks/moving.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
TASK, TRAINER = str(ROOT / "app" / "classify.py"), str(ROOT / "scripts" / "trainer_job.py")
RECIPES = ROOT / "app" / "recipes"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
OURS = {
    "python\n1 process": [sys.executable, TASK],
    "torchrun\n2 processes": [*TORCHRUN, TASK],
    "DeepSpeed ZeRO-2\n2 processes": [
        *TORCHRUN,
        TASK,
        "--deepspeed",
        str(ROOT / "ds_configs" / "zero2.json"),
    ],
}
THEIRS = {
    "python\n1 process": [sys.executable, TRAINER],
    "torchrun\n2 processes": [*TORCHRUN, TRAINER],
    "python \n1 process": [sys.executable, TRAINER],
}
COLOURS = ("#1f6fb4", "#c97b2f", "#5a9367")
LEAST = 1e-9  # what equal losses are drawn as, on a logarithmic axis


def write_job(data: Path, steps: int) -> list[str]:
    """The job's arguments, which are the same under every launcher."""
    settings = {"max_steps": steps, "logging_steps": 1, "save_steps": 0, "max_eval_samples": 64}
    settings |= {f"{split}_file": data / f"{split}.jsonl" for split in ("train", "validation")}
    settings |= {"config_name": RECIPES / "small_modernbert" / "config.json", "use_cpu": "true"}
    settings |= {"report_to": "none"}
    named = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["--config", str(RECIPES / "quickstart_classify.yaml"), *named]


def losses(folder: Path) -> dict[int, float]:
    """Step -> training loss, as far as the run has logged."""
    path = folder / "history.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    events = [json.loads(line) for line in lines]
    return {event["step"]: event["loss"] for event in events if "loss" in event}


def train(command: list[str], folder: Path, stop_after: int | None = None) -> None:
    """Runs a launch to its end, or stops it by SIGTERM after it has logged step `stop_after`."""
    process = subprocess.Popen([*command, "--output_dir", str(folder), "--resume_from_checkpoint", "auto"])
    while stop_after and process.poll() is None and max(losses(folder), default=0) < stop_after:
        time.sleep(0.02)
    if stop_after:
        process.send_signal(signal.SIGTERM)
    process.wait()
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    expected = "stopped" if stop_after else "done"
    if status["state"] != expected:
        sys.exit(f"error: the run is {status['state']}, expected {expected}: {shlex.join(command)}")


def train_ours(job: list[str], folder: Path, steps: int, moves: bool) -> dict[str, Any]:
    """Trains with this project. Returns {"losses", "begins": the step before each launcher's first one}."""
    begins = []
    for number, launch in enumerate(OURS.values() if moves else [OURS["python\n1 process"]], 1):
        begins.append(max(losses(folder), default=0))
        last = number == len(OURS) or not moves
        train([*launch, *job], folder, None if last else steps * number // len(OURS))
    return {"losses": list(losses(folder).values()), "begins": begins}


def train_theirs(best: Path, data: Path, folder: Path, steps: int, moves: bool) -> dict[str, Any]:
    """The same with Trainer. `best`: a model whose configuration and tokenizer it takes."""
    begins = []
    for number, launch in enumerate(THEIRS.values() if moves else [THEIRS["python\n1 process"]], 1):
        begins.append(steps * (number - 1) // len(THEIRS))
        stop_after = steps * number // len(THEIRS) if moves else steps
        inputs = [best, best, data / "train.jsonl", folder, steps, stop_after]
        subprocess.run([*launch, *map(str, inputs)], check=True)
    lines = (folder / "losses.jsonl").read_text(encoding="utf-8").splitlines()
    return {"losses": [json.loads(line)["loss"] for line in lines], "begins": begins}


def differences(pair: dict[str, Any]) -> list[float]:
    """Of each step's loss, relative to the run that never moved."""
    both = zip(pair["moved"]["losses"], pair["never_moved"]["losses"], strict=True)
    return [abs(moved - never) / never for moved, never in both]


def draw(pairs: dict[str, dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(10.0, 5.0), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 2))
    for column, (name, launches) in enumerate((("Samerun", OURS), ("transformers' Trainer", THEIRS))):
        (upper, lower), pair = axes[:, column], pairs[name]
        moved, begins, apart = pair["moved"]["losses"], pair["moved"]["begins"], differences(pair)
        steps = range(1, len(moved) + 1)
        upper.plot(steps, pair["never_moved"]["losses"], color="#b4b9c1", linewidth=3.0, label="never moved")
        parts = zip(launches, begins, [*begins[1:], len(moved)], COLOURS, strict=True)
        for launcher, begin, end, colour in parts:
            first = max(begin - 1, 0)  # starts at the previous part's last point
            upper.plot(steps[first:end], moved[first:end], color=colour, linewidth=1.0)
            lower.plot(
                steps[begin:end], [max(LEAST, each) for each in apart[begin:end]], color=colour, linewidth=1.0
            )
            place = {"ha": "center", "va": "top", "transform": upper.get_xaxis_transform()}
            upper.text((begin + end) / 2, 0.97, launcher.strip(), color=colour, fontsize=8, **place)
            for axis in (upper, lower) if begin else ():
                axis.axvline(begin + 0.5, color="#8a8f98", linewidth=0.8, linestyle=":")
        upper.set_title(f"{name}: at most {max(apart):.1e} apart", fontsize=10, loc="left")
        upper.legend(frameon=False, fontsize=8, loc="lower left")
        lower.set_yscale("log")
        lower.set_xlabel("optimizer step", fontsize=9)
        for axis in (upper, lower):
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.01)
    axes[0, 0].set_ylim(top=1.25 * max(pairs["Samerun"]["moved"]["losses"]))
    axes[0, 0].set_ylabel("training loss", fontsize=9)
    axes[1, 0].set_ylabel("relative difference\nfrom never moved", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / "sample_data", help="folder with train.jsonl and validation.jsonl"
    )
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "moving_plot", help="new folder for all runs"
    )
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    options.runs.mkdir(parents=True)
    data, ours, theirs = options.data.resolve(), options.runs / "ours", options.runs / "trainer"
    job, pairs = write_job(data, options.steps), {"Samerun": {}, "transformers' Trainer": {}}
    for name, moves in (("never_moved", False), ("moved", True)):
        pairs["Samerun"][name] = train_ours(job, ours / name, options.steps, moves)
        best = (ours / "never_moved" / "best").resolve()
        pairs["transformers' Trainer"][name] = train_theirs(best, data, theirs / name, options.steps, moves)
    draw(pairs, ROOT / "docs" / "images" / "moving.png")
    record = {
        "command": f"python scripts/moving_plot.py --steps {options.steps}",
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")},
        "launchers": {"Samerun": list(OURS), "transformers' Trainer": list(THEIRS)},
        "largest_difference": {name: max(differences(pair)) for name, pair in pairs.items()},
        **pairs,
    }
    (ROOT / "benchmarks" / "moving.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
