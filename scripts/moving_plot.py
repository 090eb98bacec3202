"""Draws the README's plot: the losses of a run that moves between launchers beside those of the same run in
one process; for this project and for transformers' Trainer.

    python scripts/moving_plot.py [--steps 300]

Trains a small classifier on examples/xed, with dropout and the default settings, in fp32 on the CPU. One run
stays in one process; the other is stopped after each third of its steps and continued by the next launcher:
one process, two processes (torchrun), two processes with DeepSpeed ZeRO-2. Trainer trains the same model on
the same rows with the same global batch (`trainer_job.py`). Its third part is one process again, since it
does not continue its own checkpoints under ZeRO. Writes docs/images/moving.png and all losses to
benchmarks/moving.json. The runs are in runs/moving_plot, which must be new.
"""

import datetime
import json
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RUNS, DATA, RECIPES = ROOT / "runs" / "moving_plot", ROOT / "examples" / "xed", ROOT / "app" / "recipes"
TASK, TRAINER = str(ROOT / "app" / "classify.py"), str(ROOT / "scripts" / "trainer_job.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
ZERO2 = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
OURS = {
    "python\n1 process": [sys.executable, TASK],
    "torchrun\n2 processes": [*TORCHRUN, TASK],
    "DeepSpeed ZeRO-2\n2 processes": [*TORCHRUN, TASK, *ZERO2],
}
THEIRS = {
    "python\n1 process": [sys.executable, TRAINER],
    "torchrun\n2 processes": [*TORCHRUN, TRAINER],
    "python \n1 process": [sys.executable, TRAINER],
}
COLOURS = ("#1f6fb4", "#c97b2f", "#5a9367")
LEAST = 1e-9  # what equal losses are drawn as, on a logarithmic axis


def losses(folder: Path) -> dict[int, float]:
    """Step -> training loss, as far as the run has logged."""
    path = folder / "history.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    events = [json.loads(line) for line in lines]
    return {event["step"]: event["loss"] for event in events if "loss" in event}


def train_ours(folder: Path, steps: int, stop_after: int, launch: list[str]) -> None:
    """Trains with this project, stopped by SIGTERM after it has logged step `stop_after`."""
    settings = {"max_steps": steps, "logging_steps": 1, "save_steps": 0, "max_eval_samples": 64}
    settings |= {f"{split}_file": DATA / f"{split}.csv" for split in ("train", "validation")}
    settings |= {"config_name": RECIPES / "small_modernbert" / "config.json", "use_cpu": "true"}
    settings |= {"report_to": "none", "output_dir": folder, "resume_from_checkpoint": "auto"}
    named = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [*launch, "--config", str(RECIPES / "quickstart_classify.yaml"), *named]
    process = subprocess.Popen(command)
    if stop_after < steps:
        while process.poll() is None and max(losses(folder), default=0) < stop_after:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
    process.wait()
    state = json.loads((folder / "status.json").read_text(encoding="utf-8"))["state"]
    expected = "stopped" if stop_after < steps else "done"
    if state != expected:
        sys.exit(f"error: the run is {state}, expected {expected}: {shlex.join(command)}")


def train_theirs(folder: Path, steps: int, stop_after: int, launch: list[str]) -> None:
    """The same with Trainer, which takes configuration and tokenizer of our model."""
    inputs = [RUNS / "Samerun" / "never_moved" / "best", DATA / "train.csv", folder, steps, stop_after]
    subprocess.run([*launch, *map(str, inputs)], check=True)


PROGRAMS = {"Samerun": (train_ours, OURS), "transformers' Trainer": (train_theirs, THEIRS)}


def differences(pair: dict[str, Any]) -> list[float]:
    """Of each step's loss, relative to the run that never moved."""
    both = zip(pair["moved"]["losses"], pair["never_moved"]["losses"], strict=True)
    return [abs(moved - never) / never for moved, never in both]


def draw(pairs: dict[str, dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(10.0, 5.0), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 2))
    for column, (name, (_, launches)) in enumerate(PROGRAMS.items()):
        (upper, lower), pair = axes[:, column], pairs[name]
        moved, begins, apart = pair["moved"]["losses"], pair["moved"]["begins"], differences(pair)
        steps = range(1, len(moved) + 1)
        upper.plot(steps, pair["never_moved"]["losses"], color="#b4b9c1", linewidth=3.0, label="never moved")
        parts = zip(launches, begins, [*begins[1:], len(moved)], COLOURS, strict=True)
        for launcher, begin, end, colour in parts:
            first = max(begin - 1, 0)  # starts at the previous part's last point
            upper.plot(steps[first:end], moved[first:end], color=colour, linewidth=1.0)
            drawn = [max(LEAST, each) for each in apart[begin:end]]
            lower.plot(steps[begin:end], drawn, color=colour, linewidth=1.0)
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
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    RUNS.mkdir(parents=True)
    pairs: dict[str, dict[str, Any]] = {}
    for name, (train, launches) in PROGRAMS.items():
        pairs[name] = {}
        for kind, parts in (("never_moved", 1), ("moved", len(launches))):
            folder, begins = RUNS / name / kind, []
            for number, launch in enumerate(list(launches.values())[:parts], 1):
                begins.append(max(losses(folder), default=0))
                train(folder, steps, steps * number // parts, launch)
            pairs[name][kind] = {"losses": list(losses(folder).values()), "begins": begins}
    draw(pairs, ROOT / "docs" / "images" / "moving.png")
    record = {
        "command": f"python scripts/moving_plot.py --steps {steps}",
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")},
        "launchers": {name: list(launches) for name, (_, launches) in PROGRAMS.items()},
        "largest_difference": {name: max(differences(pair)) for name, pair in pairs.items()},
        **pairs,
    }
    (ROOT / "benchmarks" / "moving.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
