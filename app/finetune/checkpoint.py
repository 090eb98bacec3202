"""Checkpoints in one format whatever the launch: full fp32 weights and Adam moments by parameter name. Level 5.

A checkpoint is complete or not there: it is written beside its place, checksummed, flushed and renamed. It holds no
random-number state and no order, since both are functions of (seed, step).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from finetune import zero
from finetune.failure import InputError
from finetune.launch import Run
from finetune.run_folder import replace_folder, write_json

MANIFEST = "manifest.json"


@dataclass
class TrainState:
    """Where a run stands, apart from weights and moments. Everything else follows from the arguments and the data."""

    step: int = 0  # global batches trained on
    updates: int = 0  # of these, updates that were not skipped for an fp16 overflow; the learning rate follows these
    skipped_in_a_row: int = 0
    loss_total: float = 0.0  # sum of the steps' mean losses
    losses: list[float] = field(default_factory=list)  # of the steps since the last line of history.jsonl
    train_seconds: float = 0.0
    tokens: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    evaluations_without_best: int = 0
    loss_scale: dict[str, Any] | None = None


def full_weights(run: Run, model: Any) -> dict[str, torch.Tensor]:
    """The model's weights and persistent buffers by name, fp32, on the CPU. All processes must call it."""
    if run.deepspeed_config is None:
        copies: dict[Any, torch.Tensor] = {}  # one of each memory, so that tied weights stay tied
        state = run.accelerator.unwrap_model(model).state_dict()
        return {name: copies.setdefault((t.data_ptr(), t.shape), _host(t)) for name, t in state.items()}
    parameters = zero.full_parameters(model)
    buffers = {name: tensor for name, tensor in model.module.state_dict().items() if name not in parameters}
    named = {**parameters, **{name: _host(tensor) for name, tensor in buffers.items()}}
    # Tied weights have one parameter and several names.
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        named[name] = parameters[_first_name(model.module, parameter)]
    return named


def save(run: Run, folder: Path, model: Any, optimizer: Any, state: TrainState, identity: dict[str, Any], limit: int) -> None:
    """Writes checkpoints/step_N; removes the oldest beyond `limit` and those after step N. All processes must call it."""
    weights = full_weights(run, model)
    moments = _moments(run, model, optimizer)
    state.loss_scale = _loss_scale(run, model)

    def fill(place: Path) -> None:
        save_file(_distinct(weights), place / "model.safetensors")
        flat = {f"{key}/{name}": tensor for key, tensors in moments.items() for name, tensor in tensors.items()}
        save_file(flat, place / "optimizer.safetensors")
        write_json(place / "state.json", asdict(state))
        write_json(place / "identity.json", identity)
        files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(place.iterdir())}
        write_json(place / MANIFEST, {"step": state.step, "files": files})

    def write() -> None:
        replace_folder(folder / f"step_{state.step}", fill)
        known = list_checkpoints(folder)
        count = known.index(folder / f"step_{state.step}") + 1
        # Later ones are damaged or were left behind on purpose, else this run had gone on from them; counted with the rest they
        # would push out this one, and "auto" would find them again.
        for path in [*known[: max(0, count - limit)], *known[count:]]:
            shutil.rmtree(path)

    run.on_main(write)


def find(folder: Path, asked: str) -> Path | None:
    """The checkpoint to resume from: the newest complete one for "auto" (None if there is none), or the one asked for.

    Raises `InputError` for a path that holds no complete checkpoint, and when all that "auto" finds are damaged.
    """
    if asked != "auto":
        problem = damage(Path(asked))
        if problem:
            raise InputError(f"--resume_from_checkpoint {asked}: {problem}")
        return Path(asked)
    damaged = []
    for path in reversed(list_checkpoints(folder)):
        problem = damage(path)
        if problem is None:
            for line in damaged:
                print(f"warning: {line}; going back to {path.name}", flush=True)
            return path
        damaged.append(f"checkpoint {path}: {problem}")
    if damaged:
        raise InputError(*damaged, "no complete checkpoint is left; --overwrite_output_dir starts afresh")
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    if not path.is_dir():
        return "is not a folder"
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, expected {expected['bytes']}"
            if _sha256(file) != expected["sha256"]:
                return f"{name} was changed after it was written (checksum)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The step_N folders, oldest step first."""
    steps = {int(m[1]): p for p in folder.glob("step_*") if (m := re.fullmatch(r"step_(\d+)", p.name)) and p.is_dir()}
    return [steps[step] for step in sorted(steps)]


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Puts a checkpoint's weights into a model that is not prepared yet. Raises `InputError` for another model's."""
    weights, known = load_file(path / "model.safetensors"), model.state_dict()
    for name in sorted(weights.keys() & known.keys()):
        if weights[name].shape != known[name].shape:
            then, now = tuple(weights[name].shape), tuple(known[name].shape)
            raise InputError(f"checkpoint {path} is of another model: {name} was {then}, is now {now}")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not _tied_to(known, name, weights)]
    if missing or unexpected:
        raise InputError(f"checkpoint {path} is of another model: missing {missing[:3]}, unexpected {unexpected[:3]}")


def load_state(path: Path, identity: dict[str, Any]) -> TrainState:
    """A checkpoint's state. Raises `InputError` with both values of whatever makes it another run's."""
    saved = json.loads((path / "identity.json").read_text(encoding="utf-8"))
    differing = [
        f"checkpoint {path} is of another run: {key} was {_brief(saved.get(key))}, is now {_brief(value)}"
        for key, value in identity.items()
        if saved.get(key) != value
    ]
    if differing:
        raise InputError(*differing)
    return TrainState(**json.loads((path / "state.json").read_text(encoding="utf-8")))


def restore_optimizer(
    run: Run, path: Path, model: Any, optimizer: Any, state: TrainState, idle_step: Callable[[], None]
) -> None:
    """Puts the moments back after the model and the optimizer were prepared. `idle_step` makes a step that moves nothing:
    DeepSpeed's optimizers have no state to put anything into before their first."""
    flat = load_file(path / "optimizer.safetensors")
    moments: dict[str, dict[str, torch.Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for name, tensor in flat.items():
        key, _, parameter = name.partition("/")
        moments[key][parameter] = tensor
    if run.deepspeed_config is not None:
        idle_step()
        zero.restore_moments(model, moments, state.updates)
        if state.loss_scale:
            zero.restore_loss_scale(model, state.loss_scale)
        return
    for name, parameter in run.accelerator.unwrap_model(model).named_parameters():
        if name in moments["exp_avg"]:
            slots = {key: tensors[name].to(parameter.device) for key, tensors in moments.items()}
            count = torch.tensor(float(state.updates), device=parameter.device)
            optimizer.optimizer.state[parameter] = {"step": count, **slots}
    if state.loss_scale and run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(state.loss_scale)


def _moments(run: Run, model: Any, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    if run.deepspeed_config is not None:
        return zero.full_moments(model)
    states = optimizer.optimizer.state
    named = list(run.accelerator.unwrap_model(model).named_parameters())
    return {key: {n: _host(states[p][key]) for n, p in named if p in states} for key in ("exp_avg", "exp_avg_sq")}


def _loss_scale(run: Run, model: Any) -> dict[str, Any] | None:
    if run.deepspeed_config is not None:
        return zero.loss_scale(model)
    return run.accelerator.scaler.state_dict() if run.accelerator.scaler is not None else None


def _host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).cpu().clone()


def _first_name(module: torch.nn.Module, wanted: torch.nn.Parameter) -> str:
    return next(name for name, parameter in module.named_parameters() if parameter is wanted)


def _distinct(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """safetensors refuses two names for one memory; a tied weight is kept under its first name."""
    seen: dict[int, str] = {}
    return {name: t for name, t in weights.items() if seen.setdefault(t.data_ptr(), name) == name or t.numel() == 0}


def _tied_to(known: dict[str, torch.Tensor], name: str, loaded: dict[str, torch.Tensor]) -> bool:
    return any(other in loaded and known[other].data_ptr() == known[name].data_ptr() for other in known if other != name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
