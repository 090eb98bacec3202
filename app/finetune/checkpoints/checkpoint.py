"""Checkpoints in one format whatever the launch: full fp32 weights and Adam moments by parameter name. Level 6.

Where gathering these is too costly, the processes of ZeRO write shards instead (see `shards`). It holds no random-number state
and no order, since both are functions of (seed, step). `saving` writes what is found and read here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from finetune.checkpoints import shards
from finetune.errors import InputError
from finetune.launching import zero
from finetune.launching.processes import Run
from finetune.output.run_folder import file_record, recover_folder

FOLDER = "checkpoints"  # of the run's folder
MANIFEST = "manifest.json"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "identity.json")
IN_SHARDS = (shards.LAYOUT, "state.json", "identity.json")  # and the shards
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
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        for name in IN_SHARDS + tuple(shards.files(manifest["shards"])) if "shards" in manifest else FILES:
            if name not in files:
                return f"{MANIFEST} does not list {name}"
            file, expected = path / name, files[name]
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, expected {expected['bytes']}"
            if file_record(file)["sha256"] != expected["sha256"]:
                return f"{name} was changed after it was written (checksum)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The step_N folders, oldest step first."""
    return _folders(folder, "")


def list_left_behind(folder: Path) -> list[Path]:
    """Those that were set aside (see `saving`), oldest step first."""
    return _folders(folder, re.escape(LEFT_BEHIND))


def _folders(folder: Path, ending: str) -> list[Path]:
    found = [path for path in folder.glob("step_*") if re.fullmatch(rf"step_\d+{ending}", path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The N of a step_N folder, set aside or not."""
    return int(path.name.removeprefix("step_").partition(".")[0])


def is_in_shards(path: Path) -> bool:
    """Whether a whole checkpoint is one that ZeRO's processes wrote a part of each."""
    return (path / shards.LAYOUT).exists()


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Puts a checkpoint's weights into a model that is not prepared yet; those in shards come with the optimizer's state.

    Raises `InputError` for another model's.
    """
    if is_in_shards(path):
        return
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
    """Puts the moments back after the model and the optimizer were prepared; with them the weights of a checkpoint in shards,
    and those that DeepSpeed keeps beside a model in half precision. `idle_step` makes a step that moves nothing: DeepSpeed's
    optimizers have no state to put anything into before their first.

    Raises `InputError` for shards in another layout.
    """
    if is_in_shards(path):
        idle_step()
        shards.restore(path, run.launch, model, state.updates)
        if state.loss_scale:
            zero.restore_loss_scale(model, state.loss_scale)
        return
    flat = load_file(path / "optimizer.safetensors")
    moments: dict[str, dict[str, torch.Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for name, tensor in flat.items():
        key, _, parameter = name.partition("/")
        moments[key][parameter] = tensor
    if run.deepspeed_config is not None:
        idle_step()
        zero.restore_moments(model, moments, state.updates)
        if run.launch.precision != "no":
            zero.restore_weights(model, load_file(path / "model.safetensors"))
        if state.loss_scale:
            zero.restore_loss_scale(model, state.loss_scale)
        return
    for name, parameter in run.unwrapped(model).named_parameters():
        if name in moments["exp_avg"]:
            slots = {key: tensors[name].to(parameter.device) for key, tensors in moments.items()}
            count = torch.tensor(float(state.updates), device=parameter.device)
            optimizer.optimizer.state[parameter] = {"step": count, **slots}
    if state.loss_scale and run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(state.loss_scale)


def _tied_to(known: dict[str, torch.Tensor], name: str, loaded: dict[str, torch.Tensor]) -> bool:
    return any(other in loaded and known[other].data_ptr() == known[name].data_ptr() for other in known if other != name)


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
