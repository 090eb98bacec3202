"""Logging during training: history.jsonl, speed.jsonl, the console, the progress bar, TensorBoard and other
trackers.

history.jsonl holds no times, so that equal runs write equal bytes. Speed and memory go to speed.jsonl.
"""

import contextlib
import os
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from accelerate.tracking import TensorBoardTracker
from PIL import Image

from samerun.console import Phase, number_text, say
from samerun.files import add_to_list, as_line, path_in_errors, read_lines, write_json, write_text
from samerun.run_folder import HISTORY, PLOTS, SPEED, TENSORBOARD, TRACKERS, read_metrics, status

DVCLIVE = "dvclive"
# Environment variables of services for the project.
PROJECT_VARIABLES = (
    *("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "COMET_PROJECT_NAME", "CLEARML_PROJECT"),
    "SWANLAB_PROJ_NAME",
)
# How Accelerate's trackers name and resume a run: (attribute that holds its id, keyword that takes the id,
# further keywords of a resumed run, keyword for --run_name).
KEYWORDS: dict[str, tuple[str, str, dict[str, Any], str | None]] = {
    "wandb": ("id", "id", {"resume": "allow"}, "name"),
    "mlflow": ("info.run_id", "run_id", {}, "run_name"),
    "comet_ml": ("id", "experiment_key", {}, None),
    "aim": ("hash", "run_hash", {}, None),
    "clearml": ("id", "reuse_last_task_id", {"continue_last_task": 0}, "task_name"),
    "swanlab": ("id", "id", {"resume": "allow"}, "experiment_name"),
    "trackio": ("name", "name", {"resume": "allow"}, "name"),
}
LAST_LOGGED = "given_until"  # key in trackers.json: for each value, the last step that was sent to trackers
IMAGE_LISTS = ("wandb", "swanlab")  # trackers whose `log_images` takes lists


class Tracker:
    """Writes on rank 0, does nothing elsewhere."""

    def __init__(
        self, accelerator: Any, output_dir: Path, total_steps: int, first_step: int, unevaluated: bool = False
    ) -> None:
        """`first_step`: of the checkpoint, or 0; `unevaluated`: the run repeats that step's evaluation."""
        self.accelerator, self.is_main = accelerator, accelerator.is_main_process
        self.folder, self.first_step = output_dir, first_step
        self.progress = Phase("training", "steps", total_steps, first_step, self.is_main)
        if not self.is_main:
            return
        # A run resumed from an earlier step repeats values; most trackers would keep both.
        self.last_logged: dict[str, int] = {}
        if self.first_step:
            self.last_logged |= read_metrics(output_dir / TRACKERS).get(LAST_LOGGED, {})
        self.files: dict[str, TextIO] = {}
        for path in (output_dir / HISTORY, output_dir / SPEED):
            events = read_history(output_dir, path.name) if self.first_step else []
            for event in events:
                self.last_logged |= {key: max(event["step"], self.last_logged.get(key, 0)) for key in event}
            kept = [event for event in events if event["step"] <= self.first_step]
            if unevaluated:
                kept = [
                    event
                    for event in kept
                    if event["step"] < self.first_step or not any(key.startswith("eval_") for key in event)
                ]
            with path_in_errors(path):
                write_text(path, map(as_line, kept))
                self.files[path.name] = path.open("a", encoding="utf-8")

    def start_trackers(self, project: str, run_name: str | None, arguments: dict[str, Any]) -> None:
        """Starts the Accelerator's trackers, or resumes their runs. TensorBoard writes to tensorboard/ in the
        run's folder. `project`: the other trackers' project."""
        if not self.accelerator.log_with:
            return
        config = {key: x if isinstance(x, int | float | str) else str(x) for key, x in arguments.items()}
        # Runs in one working directory would overwrite each other's folder "dvclive".
        dvclive = {"dir": str(self.folder / DVCLIVE), "resume": self.first_step > 0}
        kwargs: dict[str, dict[str, Any]] = {DVCLIVE: dvclive}
        if run_name:
            kwargs |= {name: {keyword: run_name} for name, (*_, keyword) in KEYWORDS.items() if keyword}
        tensorboard_kwargs: dict[str, Any] = {}
        if self.is_main and self.first_step:
            tensorboard_kwargs["purge_step"] = self.first_step + 1  # later events are logged again
            ids = read_metrics(self.folder / TRACKERS)
            for name in KEYWORDS.keys() & ids.keys():
                _, key, more, _ = KEYWORDS[name]
                kwargs[name] = {**kwargs.get(name, {}), key: ids[name], **more}
            if any((self.folder / name).exists() for name in (TRACKERS, TENSORBOARD)):
                config = None  # trackers already have the arguments, and some refuse changed ones
        # If it gets only the name, Accelerate uses the project as TensorBoard's folder.
        tensorboard = TensorBoardTracker(TENSORBOARD, self.folder, **tensorboard_kwargs)
        names = self.accelerator.log_with
        self.accelerator.log_with = [tensorboard if str(name) == TENSORBOARD else name for name in names]
        self.accelerator.init_trackers(project, config=config, init_kwargs=kwargs)
        if self.is_main and any(tracker.name != TENSORBOARD for tracker in self.accelerator.trackers):
            ids = {LAST_LOGGED: self.last_logged}
            for tracker in self.accelerator.trackers:
                # A tracker without ids starts a new run after a resume.
                with contextlib.suppress(AttributeError, KeyError):
                    ids[tracker.name] = str(attrgetter(KEYWORDS[tracker.name][0])(tracker.tracker))
            write_json(self.folder / TRACKERS, ids)

    def log(
        self, event: dict[str, Any], shown: tuple[str, ...] = (), speed: dict[str, float] | None = None
    ) -> None:
        """Logs one event, which has "step". `shown`: keys to print. `speed`: values for speed.jsonl."""
        if not self.is_main:
            return
        status.check_place()
        lines = {HISTORY: event} | ({SPEED: {"step": event["step"], **speed}} if speed else {})
        for name, line in lines.items():
            with path_in_errors(self.folder / name):
                self.files[name].write(as_line(line))
                self.files[name].flush()
        metrics = {key: x for key, x in event.items() if isinstance(x, int | float) and key != "step"}
        metrics |= speed or {}
        new = {key: value for key, value in metrics.items() if event["step"] > self.last_logged.get(key, -1)}
        for tracker in self.accelerator.trackers:
            writes_files = tracker.name == TENSORBOARD
            if values := metrics if writes_files and event["step"] > self.first_step else new:
                with path_in_errors(self.folder / TENSORBOARD) if writes_files else contextlib.nullcontext():
                    tracker.log(values, step=event["step"])
        if shown:
            values = ", ".join(f"{key} {number_text(event[key])}" for key in shown if key in event)
            step = f"step {event['step']}"
            self.say(f"{step:<15}epoch {event['epoch']:.2f}, {values}")

    def advance(self, loss: float | None, rows_per_step: float) -> None:
        self.progress.done += 1  # before the rate is read: it counts this step
        speed = f", {rows_per_step * self.progress.rate:,.1f} samples/s"
        self.progress.update(0, None if loss is None else f"loss {number_text(loss)}{speed}")

    def say(self, line: str) -> None:
        if self.is_main:
            say(line)

    def text(self, tag: str, markdown: str) -> None:
        """Adds a text to TensorBoard, if the run reports to it. Rank 0 only."""
        for tracker in self.accelerator.trackers:
            if tracker.name == TENSORBOARD:
                tracker.writer.add_text(tag, markdown)

    def flush(self) -> None:
        """Rank 0 only."""
        with path_in_errors(self.folder / HISTORY):
            os.fsync(self.files[HISTORY].fileno())

    def close(self) -> None:
        self.progress.stop()
        if self.is_main:
            for file in self.files.values():
                file.close()


def project_of(arguments: Any, task: str) -> str:
    """The project: --project_name, else the environment's, else the name of the task."""
    from_environment = (os.environ[name] for name in PROJECT_VARIABLES if os.environ.get(name))
    return arguments.project_name or next(from_environment, task)


def show_image(accelerator: Any, folder: Path, name: str, pixels: np.ndarray, step: int) -> None:
    """Writes an image, `pixels` (height, width, 3) uint8, to plots/NAME.png, and sends it to trackers that
    take images. Rank 0 only."""
    path = folder / PLOTS / f"{name}.png"
    add_to_list(path.parent, [path.name])
    with path_in_errors(path):
        image = Image.fromarray(pixels)
        image.save(path)
    for tracker in accelerator.trackers:
        if tracker.name == TENSORBOARD:
            tracker.writer.add_image(name, pixels, dataformats="HWC")
        elif hasattr(tracker, "log_images"):
            tracker.log_images({name: [image] if tracker.name in IMAGE_LISTS else image}, step=step)


def read_history(output_dir: Path, name: str = HISTORY) -> list[dict[str, Any]]:
    """The events of history.jsonl or speed.jsonl, without a last line that a crash truncated; [] without the
    file."""
    events: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for event in read_lines(output_dir / name):
            events.append(event)
    return events
