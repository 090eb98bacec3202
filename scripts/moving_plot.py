"""Draws the README's plot: the losses of a run that moves between launches and of the same run in one
process.

    python scripts/make_sample_data.py --output_dir sample_data
    python scripts/moving_plot.py [--data sample_data] [--steps 90] [--runs runs/moving_plot]

Trains a small classifier twice on the sample data, without dropout. The first run stays in one process. The
second one is stopped by SIGTERM after each third of its steps and resumed under the next launch: one process,
two processes (torchrun), two processes with DeepSpeed ZeRO-2. Writes docs/images/moving.png and the losses of
both runs to benchmarks/moving.json.
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

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
TASK = str(ROOT / "app" / "classify.py")
RECIPE = ROOT / "app" / "recipes"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", TASK]
LAUNCHES = {
    "python\n1 process": [sys.executable, TASK],
    "torchrun\n2 processes": TORCHRUN,
    "DeepSpeed ZeRO-2\n2 processes": [*TORCHRUN, "--deepspeed", str(ROOT / "ds_configs" / "zero2.json")],
}
COLOURS = ("#1f6fb4", "#c97b2f", "#5a9367")


def write_job(data: Path, runs: Path, steps: int) -> list[str]:
    """The job's arguments, which are the same under every launch."""
    config = json.loads((RECIPE / "small_modernbert" / "config.json").read_text(encoding="utf-8"))
    config |= {
        name: 0.0 for name in config if name.endswith("dropout")
    }  # masks depend on the number of processes
    runs.mkdir(parents=True)
    (runs / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = {"config_name": runs / "config.json", "max_steps": steps, "logging_steps": 1, "save_steps": 0}
    settings |= {f"{split}_file": data / f"{split}.jsonl" for split in ("train", "validation")}
    settings |= {"max_eval_samples": 64, "report_to": "none"}
    named = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["--config", str(RECIPE / "quickstart_classify.yaml"), *named]


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


def draw(never_moved: list[float], moved: list[float], moves: list[int], path: Path) -> None:
    axes = Figure(figsize=(8.0, 3.4), layout="constrained").add_subplot()
    steps = range(1, len(moved) + 1)
    axes.plot(steps, never_moved, color="#c8ccd2", linewidth=6, label="never moved: one process throughout")
    ends = [*moves[1:], len(moved)]
    for (name, begin), end, colour in zip(zip(LAUNCHES, moves, strict=True), ends, COLOURS, strict=True):
        first = max(begin - 1, 0)  # starts at the previous launch's last point
        axes.plot(steps[first:end], moved[first:end], color=colour, linewidth=1.8)
        axes.text(
            (begin + end) / 2,
            0.93,
            name,
            color=colour,
            fontsize=9,
            ha="center",
            va="top",
            transform=axes.get_xaxis_transform(),
        )
        if begin:
            axes.axvline(begin + 0.5, color="#8a8f98", linewidth=0.8, linestyle=":")
    difference = max(abs(a - b) / b for a, b in zip(moved, never_moved, strict=True))
    axes.set_title(
        f"One training run, moved twice: its losses differ by at most {difference:.1e} of their value",
        fontsize=10,
        loc="left",
    )
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.set_ylabel("training loss", fontsize=9)
    axes.margins(x=0.01)
    axes.set_ylim(top=1.12 * max(moved))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / "sample_data", help="folder with train.jsonl and validation.jsonl"
    )
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "moving_plot", help="new folder for both runs"
    )
    parser.add_argument("--steps", type=int, default=90)
    options = parser.parse_args()
    job = write_job(options.data.resolve(), options.runs, options.steps)
    train([*LAUNCHES["python\n1 process"], *job], options.runs / "never_moved")
    moves = []
    for number, launch in enumerate(LAUNCHES.values(), 1):
        moves.append(max(losses(options.runs / "moved"), default=0))
        last = number == len(LAUNCHES)
        train(
            [*launch, *job], options.runs / "moved", None if last else options.steps * number // len(LAUNCHES)
        )
    never_moved, moved = (list(losses(options.runs / name).values()) for name in ("never_moved", "moved"))
    draw(never_moved, moved, moves, ROOT / "docs" / "images" / "moving.png")
    record = {
        "command": f"python scripts/moving_plot.py --steps {options.steps}",
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")},
        "steps_before_each_launch": dict(
            zip([name.replace("\n", ", ") for name in LAUNCHES], moves, strict=True)
        ),
        "never_moved": never_moved,
        "moved": moved,
    }
    (ROOT / "benchmarks" / "moving.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
