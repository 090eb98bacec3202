"""What is kept of a run's best evaluations: their exported models (--keep_best) and their weights' mean
(--average_checkpoints)."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from finetune.batching.batches import EvalRows
from finetune.checkpoints import checkpoint, local_copy, saving
from finetune.checkpoints.checkpoint import TrainState
from finetune.errors import InputError
from finetune.launching import deepspeed_state, fsdp_state
from finetune.launching.processes import Run
from finetune.output import written
from finetune.output.progress import Phase
from finetune.output.run_folder import BEST, BEST_MODELS, CHECKPOINTS, KEPT_WEIGHTS, replace_folder
from finetune.task import Predictions, Task
from finetune.training.evaluation import evaluate

FILE = "model.safetensors"


@dataclass(frozen=True)
class BestModels:
    """The best evaluations of a run, at most as many as are needed, in `TrainState.kept`.

    The exported models of the `keep_best` best are best_models/step_N, the weights of the `average` best, as they were
    evaluated (those of --ema_decay, if it is given), kept_weights/step_N: all that is trained, and buffers, in fp32 by name, so
    that the mean does not depend on the launch. `model`: prepared.
    """

    run: Run
    folder: Path  # the run's
    task: Task
    model: Any
    greater_is_better: bool
    keep_best: int = 1  # 1: best/ alone
    average: int | None = None
    shared_output_dir: bool = False

    def add(self, state: TrainState, metric: float, loss: float | None, predictions: Predictions | None) -> None:
        """Keeps the model of the evaluation at `state.step` if it is one of the best, and removes what is not any more. All
        processes must call it."""
        if self.keep_best == 1 and self.average is None:
            return
        others = [each for each in state.kept if each["step"] != state.step]
        found = sorted([*others, {"step": state.step, "metric": metric, "loss": loss}], key=self.rank)
        state.kept = found[: max(self.keep_best, self.average or 0)]
        steps = [each["step"] for each in state.kept]
        exported, averaged = steps[: self.keep_best] if self.keep_best > 1 else None, steps[: self.average or 0]
        if state.step in steps:
            with Phase("exporting", shown=self.run.is_main):
                weights = saving.full_weights(self.run, self.model)
                if state.step in (exported or ()):
                    path, plain = self.folder / BEST_MODELS / f"step_{state.step}", self.run.unwrapped(self.model)
                    self.run.on_main(partial(self.task.export, path, plain, weights, predictions))
                if state.step in averaged:
                    self.run.on_main(partial(self._write_weights, state.step, weights))
        self.run.on_main(partial(self._remove_others, exported, averaged))

    def rank(self, evaluation: Mapping[str, Any]) -> tuple[float, float, int]:
        """Sorts evaluations, best first: by metric, then loss, then step."""
        metric, loss = evaluation["metric"], evaluation["loss"]
        return -metric if self.greater_is_better else metric, math.inf if loss is None else loss, evaluation["step"]

    def forget_lost(self, state: TrainState) -> None:
        """Leaves out evaluations whose files are gone: the run was resumed in another folder, or from an earlier checkpoint.
        All processes must call it."""
        kept = self.run.on_main(partial(self._present, state.kept))
        if lost := [str(each["step"]) for each in state.kept if each not in kept]:
            self.run.print(f"note           what was kept of step {', '.join(lost)} is not in {self.folder} any more: left out")
        state.kept = kept

    def load_mean(self, state: TrainState) -> list[int]:
        """Gives the model the mean of the weights and returns the steps that it is of; [] if there are no two. All processes
        must call it."""
        steps = [each["step"] for each in state.kept[: self.average]]
        if len(steps) < 2:
            return []
        folder = self.folder / KEPT_WEIGHTS
        place = local_copy.fetch(self.run, folder, self.shared_output_dir)
        set_weights(self.run, self.model, MeanOfFiles([place / f"step_{step}" / FILE for step in steps]))
        local_copy.discard(self.run, place, folder)
        return sorted(steps)

    def export_mean(
        self, state: TrainState, validation: EvalRows, export: Callable[[Predictions | None], None]
    ) -> dict[str, Any]:
        """Evaluates the mean of the best weights, and has it replace best/ if it is not worse than the best model alone, which
        is then in best_models. Returns what metrics.json says of it. All processes must call it."""
        steps, name = self.load_mean(state), state.best_metric_name
        if not steps:
            self.run.print("note           --average_checkpoints: fewer than two evaluations are kept, so there is no mean")
            return self._export_single(state)
        metrics, predictions = evaluate(self.run, self.model, self.task, validation)
        value, single = metrics.get(name), {"metric": state.best_metric, "loss": state.best_loss, "step": state.best_step}
        # Equal in both, the mean, as of step 0, comes first.
        wins = value is not None and self.rank({"metric": value, "loss": metrics.get("loss"), "step": 0}) < self.rank(single)
        self.run.print(
            f"average        of the weights of steps {', '.join(map(str, steps))}: {name} "
            f"{'undefined' if value is None else f'{value:.4f}'}, of step {state.best_step} alone {state.best_metric:.4f}; "
            f"best/ is {'the average' if wins else 'the latter'}"
        )
        found = {"averaged_steps": steps, "average_metric": value}
        if not wins:
            return {**found, **self._export_single(state)}
        self.run.on_main(partial(_copy, self.folder / BEST, self._single(state), replaces=False))
        if self.keep_best == 1:
            self.run.on_main(partial(self._remove_others, [state.best_step], steps))
        export(predictions)
        scores = {f"eval_{name}": score for name, score in metrics.items()}
        return {**found, "exported": "average", "best_metric": value, **scores}

    def _export_single(self, state: TrainState) -> dict[str, Any]:
        """Puts the best model alone back, where an earlier end of this run had exported a mean."""
        self.run.on_main(partial(_copy, self._single(state), self.folder / BEST, replaces=True))
        return {"exported": "best"}

    def _single(self, state: TrainState) -> Path:
        return self.folder / BEST_MODELS / f"step_{state.best_step}"

    def _write_weights(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        plain = self.run.unwrapped(self.model)
        trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
        buffers = {name for name, _ in plain.named_buffers()}
        kept = {name: tensor for name, tensor in weights.items() if name in trained | buffers}
        replace_folder(self.folder / KEPT_WEIGHTS / f"step_{step}", lambda place: save_file(kept, place / FILE))

    def _remove_others(self, exported: list[int] | None, averaged: list[int]) -> None:
        """`exported`: None if best_models holds no more than a mean's best part."""
        for place, steps in ((BEST_MODELS, exported), (KEPT_WEIGHTS, averaged)):
            for path in checkpoint.list_checkpoints(self.folder / place):
                if steps is not None and checkpoint.step_of(path) not in steps:
                    written.remove_folder(path)

    def _present(self, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [each for place, each in enumerate(kept) if all(path.exists() for path in self._needed(place, each["step"]))]

    def _needed(self, place: int, step: int) -> list[Path]:
        """What is kept of the evaluation at `step` that is in this `place` among the best, counted from 0."""
        models = [self.folder / BEST_MODELS] if 1 < self.keep_best > place else []
        weights = [self.folder / KEPT_WEIGHTS] if place < (self.average or 0) else []
        return [folder / f"step_{step}" for folder in models + weights]


class MeanOfFiles(Mapping):
    """Means of the tensors of safetensors files by name, each computed when it is asked for: integers, such as counts of
    batches, are those of the first file."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [safe_open(path, "pt") for path in paths]

    def __getitem__(self, name: str) -> torch.Tensor:
        tensors = [file.get_tensor(name) for file in self._files]
        if not tensors[0].is_floating_point():
            return tensors[0]
        return (sum(tensor.double() for tensor in tensors) / len(tensors)).to(tensors[0].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files[0].keys())

    def __len__(self) -> int:
        return len(self._files[0].keys())

    def __contains__(self, name: object) -> bool:
        return name in self._files[0].keys()  # noqa: SIM118


@torch.no_grad()
def set_weights(run: Run, model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Gives a prepared model the trained weights and buffers of these names, full ones. All processes must call it."""
    if run.fsdp is not None:
        fsdp_state.reshard(model)  # an evaluation leaves gathered weights
    plain = run.unwrapped(model)
    if run.deepspeed_config is not None:
        deepspeed_state.restore_weights(model, weights)
    else:
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                fsdp_state.to_local(parameter).copy_(fsdp_state.to_local(fsdp_state.distribute_like(weights[name], parameter)))
    for name, buffer in plain.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])


def check_space(folder: Path, arguments: Any, model: torch.nn.Module, moments: float) -> None:
    """Raises `InputError` if the disk of the run's `folder` has no room for the best models that are to be kept and the run's
    other files. `model`: not prepared yet; `moments`: bytes that the optimizer keeps of a trained element."""
    several, average = arguments.keep_best > 1, arguments.average_checkpoints or 0
    if not several and not average:
        return
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    whole = buffers + 4 * sum(parameter.numel() for parameter in model.parameters())
    elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    saves = arguments.save_strategy != "no" and arguments.save_steps != 0
    # best/, those beside it (a mean's best part at least), and one that is written before another is removed.
    models = 2 + (arguments.keep_best if several else 1)
    sizes = {
        "models": models * whole,
        "weights to be averaged": (average + 1 if average else 0) * (buffers + 4 * elements),
        # The newest, that of the best model, and one that is written.
        "checkpoints": (arguments.save_total_limit + 2 if saves else 0) * (buffers + round((4 + moments) * elements)),
    }
    places = [folder / name for name in (BEST, BEST_MODELS, KEPT_WEIGHTS, CHECKPOINTS)]
    present = sum(path.stat().st_size for place in places for path in place.rglob("*") if path.is_file())
    room = shutil.disk_usage(folder).free + present  # what is there is of this run, or will be replaced
    if sum(sizes.values()) > room:
        given = [f"--keep_best {arguments.keep_best}"] * several + [f"--average_checkpoints {average}"] * bool(average)
        parts = ", ".join(f"{size / 1e9:.1f} GB of {what}" for what, size in sizes.items() if size)
        raise InputError(
            f"{' and '.join(given)}: the run may take {parts}, and the disk of --output_dir {folder} has room for "
            f"{room / 1e9:.1f} GB. Make room, name a folder on another disk, or give smaller numbers there or for "
            "--save_total_limit"
        )


def _copy(source: Path, target: Path, replaces: bool) -> None:
    if source.is_dir() and (replaces or not target.is_dir()):
        replace_folder(target, lambda place: shutil.copytree(source, place, dirs_exist_ok=True))
