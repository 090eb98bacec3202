"""Keeps the models of a run's best evaluations (--keep_best) and averages their weights
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

from samerun import checkpoint, deepspeed, fsdp
from samerun.checkpoint import TrainState
from samerun.data.batches import EvalRows
from samerun.errors import InputError
from samerun.output import written
from samerun.output.progress import Phase
from samerun.output.run_folder import BEST, BEST_MODELS, CHECKPOINTS, KEPT_WEIGHTS, replace_folder
from samerun.runtime import Run
from samerun.task import Predictions, Task
from samerun.training.evaluation import evaluate

FILE = "model.safetensors"


@dataclass(frozen=True)
class BestModels:
    """The models of a run's best evaluations. `TrainState.kept` lists these evaluations, best first.

    The `keep_best` best models are exported to best_models/step_N. The weights of the `num_averaged` best
    models are in kept_weights/step_N: trained parameters and buffers by name, in fp32, as evaluated (with
    --ema_decay, the averaged ones). They do not depend on the launch.
    """

    run: Run
    folder: Path  # the run's
    task: Task
    model: Any  # prepared
    greater_is_better: bool
    keep_best: int = 1  # 1: only best/
    num_averaged: int = 0
    shared_output_dir: bool = False

    def add(
        self, state: TrainState, metric: float, loss: float | None, predictions: Predictions | None
    ) -> None:
        """Keeps the model of the evaluation at `state.step` if it is one of the best; removes models that no
        longer are. All processes must call it."""
        if self.keep_best == 1 and not self.num_averaged:
            return
        earlier = [evaluation for evaluation in state.kept if evaluation["step"] != state.step]
        evaluations = sorted([*earlier, {"step": state.step, "metric": metric, "loss": loss}], key=self.rank)
        state.kept = evaluations[: max(self.keep_best, self.num_averaged)]
        steps = [evaluation["step"] for evaluation in state.kept]
        exported, averaged = (
            steps[: self.keep_best] if self.keep_best > 1 else None,
            steps[: self.num_averaged],
        )
        if state.step in steps:
            with Phase("exporting", shown=self.run.is_main):
                weights = checkpoint.full_weights(self.run, self.model)
                if state.step in (exported or ()):
                    path, plain = (
                        self.folder / BEST_MODELS / f"step_{state.step}",
                        self.run.unwrapped(self.model),
                    )
                    self.run.on_main(partial(self.task.export, path, plain, weights, predictions))
                if state.step in averaged:
                    self.run.on_main(partial(self._write_weights, state.step, weights))
        self.run.on_main(partial(self._remove_others, exported, averaged))

    def rank(self, evaluation: Mapping[str, Any]) -> tuple[float, float, int]:
        """Sort key of evaluations, best first: metric, then loss, then step."""
        metric, loss = evaluation["metric"], evaluation["loss"]
        return (
            -metric if self.greater_is_better else metric,
            math.inf if loss is None else loss,
            evaluation["step"],
        )

    def forget_missing(self, state: TrainState) -> None:
        """Removes evaluations from `state.kept` whose files are gone, after a resume in another folder or
        from an earlier checkpoint. All processes must call it."""
        present = self.run.on_main(partial(self._present, state.kept))
        if missing := [str(evaluation["step"]) for evaluation in state.kept if evaluation not in present]:
            self.run.print(
                f"note           the kept models of step {', '.join(missing)} are missing in "
                f"{self.folder}: ignored"
            )
        state.kept = present

    def load_average(self, state: TrainState) -> list[int]:
        """Loads the averaged weights into the model. Returns the averaged steps, or [] and changes nothing if
        there are fewer than two. All processes must call it."""
        steps = [evaluation["step"] for evaluation in state.kept[: self.num_averaged]]
        if len(steps) < 2:
            return []
        folder = self.folder / KEPT_WEIGHTS
        place = checkpoint.fetch(self.run, folder, self.shared_output_dir)
        load_weights(self.run, self.model, AveragedFiles([place / f"step_{step}" / FILE for step in steps]))
        checkpoint.discard(self.run, place, folder)
        return sorted(steps)

    def export_average(
        self, state: TrainState, validation: EvalRows, export: Callable[[Predictions | None], None]
    ) -> dict[str, Any]:
        """Evaluates the averaged weights and exports them to best/ if they are not worse than the best model,
        which moves to best_models/. Returns entries for metrics.json. All processes must call it."""
        steps, name = self.load_average(state), state.best_metric_name
        if not steps:
            self.run.print(
                "note           --average_checkpoints: nothing to average, fewer than two "
                "evaluations are kept"
            )
            return self._restore_best(state)
        metrics, predictions = evaluate(self.run, self.model, self.task, validation)
        value, best = (
            metrics.get(name),
            {"metric": state.best_metric, "loss": state.best_loss, "step": state.best_step},
        )
        # Step 0: the average wins a tie.
        wins = value is not None and self.rank(
            {"metric": value, "loss": metrics.get("loss"), "step": 0}
        ) < self.rank(best)
        self.run.print(
            f"average        of steps {', '.join(map(str, steps))}: {name} "
            f"{'undefined' if value is None else f'{value:.4f}'}; "
            f"step {state.best_step} alone: {state.best_metric:.4f}; best/ is "
            f"{'the average' if wins else f'step {state.best_step}'}"
        )
        entries = {"averaged_steps": steps, "average_metric": value}
        if not wins:
            return {**entries, **self._restore_best(state)}
        self.run.on_main(partial(_copy, self.folder / BEST, self._best_model(state), replaces=False))
        if self.keep_best == 1:
            self.run.on_main(partial(self._remove_others, [state.best_step], steps))
        export(predictions)
        scores = {f"eval_{name}": score for name, score in metrics.items()}
        return {**entries, "exported": "average", "best_metric": value, **scores}

    def _restore_best(self, state: TrainState) -> dict[str, Any]:
        """Copies the best model back to best/ if an earlier end of this run exported an average."""
        self.run.on_main(partial(_copy, self._best_model(state), self.folder / BEST, replaces=True))
        return {"exported": "best"}

    def _best_model(self, state: TrainState) -> Path:
        return self.folder / BEST_MODELS / f"step_{state.best_step}"

    def _write_weights(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        plain = self.run.unwrapped(self.model)
        trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
        buffers = {name for name, _ in plain.named_buffers()}
        kept = {name: tensor for name, tensor in weights.items() if name in trained | buffers}
        replace_folder(
            self.folder / KEPT_WEIGHTS / f"step_{step}", lambda place: save_file(kept, place / FILE)
        )

    def _remove_others(self, exported: list[int] | None, averaged: list[int]) -> None:
        """Removes the models and weights of all other steps. `exported`: None leaves best_models/ alone."""
        for name, steps in ((BEST_MODELS, exported), (KEPT_WEIGHTS, averaged)):
            for path in checkpoint.list_checkpoints(self.folder / name):
                if steps is not None and checkpoint.step_of(path) not in steps:
                    written.remove_folder(path)

    def _present(self, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The evaluations, of `kept`, whose folders exist."""
        return [
            evaluation
            for position, evaluation in enumerate(kept)
            if all(folder.exists() for folder in self._folders(position, evaluation["step"]))
        ]

    def _folders(self, position: int, step: int) -> list[Path]:
        """The folders of the evaluation at `step`, which is in this position (0: best) of
        `TrainState.kept`."""
        models = [self.folder / BEST_MODELS] if 1 < self.keep_best > position else []
        weights = [self.folder / KEPT_WEIGHTS] if position < self.num_averaged else []
        return [folder / f"step_{step}" for folder in models + weights]


class AveragedFiles(Mapping):
    """Averaged tensors of safetensors files by name, computed lazily. Integers, such as batch counts, come
    from the first file."""

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
def load_weights(run: Run, model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Loads full trained weights and buffers into a prepared model. All processes must call it."""
    if run.fsdp is not None:
        fsdp.reshard(model)  # an evaluation leaves gathered weights
    plain = run.unwrapped(model)
    if run.deepspeed_config is not None:
        deepspeed.restore_weights(model, weights)
    else:
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                fsdp.to_local(parameter).copy_(fsdp.to_local(fsdp.distribute_like(weights[name], parameter)))
    for name, buffer in plain.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])


def check_space(folder: Path, arguments: Any, model: torch.nn.Module, state_bytes: float) -> None:
    """Raises `InputError` if the disk of the run's `folder` is too small for --keep_best or
    --average_checkpoints. `model`: not prepared; `state_bytes`: bytes of optimizer state per trained
    element."""
    several, num_averaged = arguments.keep_best > 1, arguments.average_checkpoints or 0
    if not several and not num_averaged:
        return
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    model_bytes = buffers + 4 * sum(parameter.numel() for parameter in model.parameters())
    elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    saves = arguments.save_strategy != "no" and arguments.save_steps != 0
    # best/, best_models/ (with an average, at least the best single model), and one written before another is
    # removed.
    models = 2 + (arguments.keep_best if several else 1)
    sizes = {
        "models": models * model_bytes,
        "weights to be averaged": (num_averaged + 1 if num_averaged else 0) * (buffers + 4 * elements),
        # --save_total_limit, the best model's, and one being written.
        "checkpoints": (arguments.save_total_limit + 2 if saves else 0)
        * (buffers + round((4 + state_bytes) * elements)),
    }
    folders = [folder / name for name in (BEST, BEST_MODELS, KEPT_WEIGHTS, CHECKPOINTS)]
    present = sum(path.stat().st_size for place in folders for path in place.rglob("*") if path.is_file())
    available = (
        shutil.disk_usage(folder).free + present
    )  # existing files are among `sizes` or will be replaced
    if sum(sizes.values()) > available:
        causes = [f"--keep_best {arguments.keep_best}"] if several else []
        causes += [f"--average_checkpoints {num_averaged}"] if num_averaged else []
        parts = ", ".join(f"{size / 1e9:.1f} GB of {what}" for what, size in sizes.items() if size)
        raise InputError(
            f"{' and '.join(causes)}: the run may need {parts}, but the disk of --output_dir "
            f"{folder} has room for "
            f"{available / 1e9:.1f} GB. Free space, choose a folder on another disk, or lower these "
            "arguments or "
            "--save_total_limit"
        )


def _copy(source: Path, target: Path, replaces: bool) -> None:
    if source.is_dir() and (replaces or not target.is_dir()):
        replace_folder(target, lambda place: shutil.copytree(source, place, dirs_exist_ok=True))
