"""Checkpoints in one format whatever the launch: full fp32 weights and Adam moments by parameter name. Level 6.

A checkpoint is complete or not there: it is written beside its place, checksummed, flushed and renamed, by a thread while the
run goes on. It holds no random-number state and no order, since both are functions of (seed, step).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from finetune import status, zero
from finetune.background import Background
from finetune.failure import InputError, TrainingError
from finetune.processes import Run
from finetune.run_folder import as_json, recover_folder, replace_folder, write_json, write_text

FOLDER = "checkpoints"  # of the run's folder
MANIFEST = "manifest.json"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "identity.json")
LEFT_BEHIND = ".left_behind"


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
    padded_tokens: int = 0  # the same with padding
    best_metric: float | None = None
    best_step: int | None = None
    evaluations_without_best: int = 0
    unevaluated: bool = False  # the run was stopped before or inside the evaluation that was due at `step`
    loss_scale: dict[str, Any] | None = None


def full_weights(run: Run, model: Any) -> dict[str, torch.Tensor]:
    """The model's weights and persistent buffers by name, fp32, in rank 0's memory; empty elsewhere. All processes must call
    it."""
    if run.deepspeed_config is None:
        if not run.is_main:
            return {}
        copies: dict[Any, torch.Tensor] = {}  # one of each memory, so that tied weights stay tied
        state = run.accelerator.unwrap_model(model).state_dict()
        return {name: copies.setdefault((t.data_ptr(), t.shape), _host(t)) for name, t in state.items()}
    parameters = zero.full_parameters(model, run.is_main)
    if not run.is_main:
        return {}
    buffers = {name: tensor for name, tensor in model.module.state_dict().items() if name not in parameters}
    named = {**parameters, **{name: _host(tensor) for name, tensor in buffers.items()}}
    # Tied weights have one parameter and several names.
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        named[name] = parameters[_first_name(model.module, parameter)]
    return named


def save(
    run: Run,
    folder: Path,
    model: Any,
    optimizer: Any,
    state: TrainState,
    identity: dict[str, Any],
    limit: int,
    writer: Background,
    first: Callable[[], None],
) -> None:
    """Copies what a checkpoint needs to rank 0's memory and has `writer` write checkpoints/step_N beside the run, after calling
    `first`; removes the oldest beyond `limit`. All processes must call it.

    Waits for the checkpoint before, if that is still being written, and raises `TrainingError` if it could not be. The
    same holds for `writer.wait()`, which is to be called (on rank 0) before the run ends.
    """
    run.on_main(writer.wait)
    weights = full_weights(run, model)
    moments = _moments(run, model, optimizer)
    state.loss_scale = _loss_scale(run, model)
    if run.is_main:
        flat = {f"{key}/{name}": tensor for key, tensors in moments.items() for name, tensor in tensors.items()}
        content = {"model.safetensors": _distinct(weights), "optimizer.safetensors": flat}
        # As text, since the run goes on counting in `state` meanwhile.
        step, texts = state.step, {"state.json": as_json(asdict(state)), "identity.json": as_json(identity)}

        def write() -> None:
            first()
            _write(folder, step, content, texts, limit)

        writer.start(write)


def _write(folder: Path, step: int, content: dict[str, dict[str, torch.Tensor]], texts: dict[str, str], limit: int) -> None:
    path = folder / f"step_{step}"

    def fill(place: Path) -> None:
        for name, tensors in content.items():
            save_file(tensors, place / name)
        for name, text in texts.items():
            write_text(place / name, text)
        files = {name: {"bytes": (place / name).stat().st_size, "sha256": _sha256(place / name)} for name in FILES}
        write_json(place / MANIFEST, {"step": step, "files": files})

    needed = sum(tensor.nbytes for tensors in content.values() for tensor in tensors.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _leave_behind(folder, step)
        replace_folder(path, fill)
        _rotate(folder, step, limit)
    except Exception as error:
        raise TrainingError(_not_written(path, needed, error)) from error
    status.saved(step)


def _leave_behind(folder: Path, step: int) -> None:
    """Sets aside the checkpoints after `step`: the run was made to go on from an earlier one, or they are damaged. "auto" must
    not find them again, and they must not push out the run's own; they go when the run has passed them."""
    later = [path for path in list_checkpoints(folder) if _step_of(path) > step]
    for path in later:
        aside = path.with_name(path.name + LEFT_BEHIND)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
    if later:
        names = ", ".join(path.name for path in later)
        print(f"note           {names}: later than this run; kept as step_N{LEFT_BEHIND} until it gets there", flush=True)


def _rotate(folder: Path, step: int, limit: int) -> None:
    behind = _folders(folder, re.escape(LEFT_BEHIND))
    for path in [*list_checkpoints(folder)[:-limit], *(path for path in behind if _step_of(path) <= step)]:
        shutil.rmtree(path)


def _not_written(path: Path, needed: int, error: Exception) -> str:
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    kept = list_checkpoints(path.parent)
    full = free < needed or getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)
    sizes = f"a checkpoint takes {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
    what = f"the disk is full: {sizes}" if full else str(error)
    return (
        f"checkpoint {path} could not be written ({what}). "
        + (f"{kept[-1].name} is whole and stays" if kept else "There is no earlier one")
        + "; when the cause is gone, run the same command with --resume_from_checkpoint auto"
    )


def tidy(folder: Path) -> None:
    """Puts back what a crash inside a save left under its other name, and removes what it left unfinished; rank 0 only."""
    for old in folder.glob(".step_*.old"):
        recover_folder(folder / old.name.removeprefix(".").removesuffix(".old"))
        shutil.rmtree(old, ignore_errors=True)
    for unfinished in folder.glob(".step_*.unfinished"):
        shutil.rmtree(unfinished, ignore_errors=True)


def find(folder: Path, asked: str) -> Path | None:
    """The checkpoint to resume from: the newest complete one for "auto" (None if there is none), or the one asked for.

    Raises `InputError` for a path that holds no complete checkpoint, and when all that "auto" finds are damaged.
    """
    if asked != "auto":
        problem = damage(Path(asked)) if (Path(asked) / MANIFEST).exists() else "is no checkpoint's folder"
        if problem:
            known = ", ".join(map(str, list_checkpoints(folder))) or "none"
            raise InputError(f"--resume_from_checkpoint {asked}: {problem}; those of this run: {known}; or give auto")
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
        for name in FILES:
            if name not in files:
                return f"{MANIFEST} does not list {name}"
            file, expected = path / name, files[name]
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
    return _folders(folder, "")


def _folders(folder: Path, ending: str) -> list[Path]:
    found = [path for path in folder.glob("step_*") if re.fullmatch(rf"step_\d+{ending}", path.name) and path.is_dir()]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_").partition(".")[0])


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
    stored = json.loads((path / "state.json").read_text(encoding="utf-8"))
    unknown = stored.keys() - {field.name for field in fields(TrainState)}
    if unknown:
        raise InputError(f"checkpoint {path} is of another version of this code: it knows {', '.join(sorted(unknown))}")
    return TrainState(**stored)


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
        return zero.full_moments(model, run.is_main)
    if not run.is_main:
        return {}
    states = optimizer.optimizer.state
    named = list(run.accelerator.unwrap_model(model).named_parameters())
    return {key: {n: _host(states[p][key]) for n, p in named if p in states} for key in ("exp_avg", "exp_avg_sq")}


def _loss_scale(run: Run, model: Any) -> dict[str, Any] | None:
    if run.deepspeed_config is not None:
        return zero.loss_scale(model)
    return run.accelerator.scaler.state_dict() if run.accelerator.scaler is not None else None


def _host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


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
