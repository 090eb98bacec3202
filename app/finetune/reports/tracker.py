"""What a run says while it runs: history.jsonl, the console, the progress bar, TensorBoard and other trackers.

history.jsonl holds only what the run computes, no clock, so that two equal runs write equal bytes.
"""

from __future__ import annotations

import glob
import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import TensorBoardTracker
from PIL import Image

from finetune.output import written
from finetune.output.console import say
from finetune.output.files import naming
from finetune.output.progress import Phase
from finetune.output.run_folder import PICTURES, check_present

HISTORY, TENSORBOARD = "history.jsonl", "tensorboard"


# Where services look for it themselves.
PROJECT_VARIABLES = ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "COMET_PROJECT_NAME")


class Tracker:
    """Writes on rank 0, does nothing elsewhere."""

    def __init__(self, accelerator: Any, output_dir: Path, total_steps: int, first_step: int, resuming: bool) -> None:
        self.accelerator, self.is_main = accelerator, accelerator.is_main_process
        self.output_dir = output_dir
        self.progress = Phase("training", "steps", total_steps, first_step, self.is_main)
        if not self.is_main:
            return
        self.path, self.folder = output_dir / HISTORY, output_dir
        written.add(output_dir, self.path)
        with naming(self.path):
            _keep_until(self.path, first_step if resuming else 0)
            self.history = self.path.open("a", encoding="utf-8")

    def start_trackers(self, project: str, run_name: str | None, arguments: dict[str, Any]) -> None:
        """Opens the trackers that the Accelerator was made with. TensorBoard writes to tensorboard/ in the run's folder, for
        others `project` names where runs are collected."""
        plain = {key: value if isinstance(value, int | float | str | bool) else str(value) for key, value in arguments.items()}
        kwargs = {"wandb": {"name": run_name}, "mlflow": {"run_name": run_name}} if run_name else {}
        if self.accelerator.log_with:
            if self.is_main:
                events = f"{TENSORBOARD}/*events.out.tfevents.*.{glob.escape(socket.gethostname())}.{os.getpid()}.*"
                written.add_patterns(self.folder, events, f"{TENSORBOARD}/[0-9]*/hparams.yml")
            # By its name alone Accelerate would make the project TensorBoard's folder.
            board = TensorBoardTracker(TENSORBOARD, self.output_dir)
            self.accelerator.log_with = [board if str(each) == TENSORBOARD else each for each in self.accelerator.log_with]
            self.accelerator.init_trackers(project, config=plain, init_kwargs=kwargs)

    def log(self, event: dict[str, Any], shown: tuple[str, ...] = (), speed: dict[str, float] | None = None) -> None:
        """Records one event, which has "step"; the keys `shown` go to the console too. `speed` is for trackers only."""
        if not self.is_main:
            return
        check_present(self.folder)
        with naming(self.path):
            self.history.write(json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n")
            self.history.flush()
        metrics = {key: value for key, value in event.items() if isinstance(value, int | float) and key != "step"}
        with naming(self.folder / TENSORBOARD):
            self.accelerator.log({**metrics, **(speed or {})}, step=event["step"])
        if shown:
            known = {key: event[key] for key in shown if event.get(key) is not None}
            shown_metrics = ", ".join(f"{key} {value:.4f}" for key, value in known.items())
            at = f"step {event['step']}"
            self.say(f"{at:<15}epoch {event['epoch']:.2f}, {shown_metrics}")

    def advance(self, loss: float | None, batch_size: int) -> float:
        """Counts a step in the progress that is shown. Returns samples per second, evaluations not counted."""
        before = self.progress.rate
        speed = f", {batch_size * before:,.1f} samples/s" if before else ""
        self.progress.update(note=None if loss is None else f"loss {loss:.4f}{speed}")
        return batch_size * self.progress.rate

    def say(self, line: str) -> None:
        """Prints a line on rank 0."""
        if self.is_main:
            say(line)

    def text(self, tag: str, markdown: str) -> None:
        """Shows a text in TensorBoard, if that is where the run reports to."""
        for tracker in self.accelerator.trackers if self.is_main else []:
            if tracker.name == TENSORBOARD:
                tracker.writer.add_text(tag, markdown)

    def picture(self, name: str, picture: np.ndarray) -> None:
        """`show_picture` on rank 0."""
        if self.is_main:
            show_picture(self.accelerator, self.folder, name, picture)

    def flush(self) -> None:
        """Forces the history so far to disk."""
        if self.is_main:
            with naming(self.path):
                os.fsync(self.history.fileno())

    def close(self) -> None:
        self.progress.stop()
        if self.is_main:
            self.history.close()


def project_of(arguments: Any, task: str) -> str:
    """What --project_name says, or else the environment, or else the name of the task."""
    given = (os.environ[name] for name in PROJECT_VARIABLES if os.environ.get(name))
    return arguments.project_name or next(given, task)


def show_picture(accelerator: Any, folder: Path, name: str, picture: np.ndarray) -> None:
    """Writes a picture, (height, width, 3) uint8, to pictures/NAME.png and, if the run reports there, TensorBoard."""
    path = folder / PICTURES / f"{name}.png"
    check_present(folder)
    written.add(folder, path)
    path.parent.mkdir(exist_ok=True)
    with naming(path):
        Image.fromarray(picture).save(path)
    for tracker in accelerator.trackers:
        if tracker.name == TENSORBOARD:
            tracker.writer.add_image(name, picture, dataformats="HWC")


def read_history(output_dir: Path) -> list[dict[str, Any]]:
    """The events of history.jsonl so far."""
    path = output_dir / HISTORY
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def _keep_until(path: Path, step: int) -> None:
    """Drops the events after `step`, and a last line that a crash cut short: the run that goes on writes them again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            break
        if event["step"] > step or step == 0:
            break
        kept.append(line.rstrip("\n") + "\n")
    path.write_text("".join(kept), encoding="utf-8")
