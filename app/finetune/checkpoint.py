"""Checkpoints in one format whatever the launch: full fp32 weights and Adam moments by parameter name. Level 6.

Where gathering these is too costly, the processes of ZeRO write shards instead (see `shards`). A checkpoint is complete or
not there: it is written beside its place, checksummed, flushed and renamed, by a thread while the run goes on. It holds no
random-number state and no order, since both are functions of (seed, step).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from finetune import shards, status, zero
from finetune.background import Background
from finetune.failure import InputError, TrainingError, where
from finetune.processes import Run
from finetune.run_folder import as_json, put_in_place, recover_folder, replace_folder, write_json, write_text

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
    in_shards: bool = False,
) -> None:
    """Copies what a checkpoint needs to host memory - rank 0's, or, for one `in_shards`, each process's own part - and has
    `writer` write checkpoints/step_N beside the run, after calling `first` on rank 0; removes the oldest beyond `limit`. All
    processes must call it, each with a `writer` of its own.

    Waits for the checkpoint before, if that is still being written (see `wait`).
    """
    wait(run, writer)
    (_save_shards if in_shards else _save_full)(run, folder, model, optimizer, state, identity, limit, writer, first)


def wait(run: Run, writer: Background) -> None:
    """Waits until the checkpoint in flight, if there is one, is on disk. All processes must call it, also before the run ends.

    Raises `TrainingError` on every process if it could not be written.
    """
    problem = None
    if not run.is_main:
        try:
            writer.wait()
        except TrainingError as error:
            problem = f"{where()}: {error}"
    told = [found for found in run.gather([problem]) if found]
    writer.hurry()  # the others' parts are there, or one of them never will be
    if told:
        raise TrainingError("\n".join(told))
    run.on_main(writer.wait)


def _save_full(
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
    weights = full_weights(run, model)
    moments = _moments(run, model, optimizer)
    state.loss_scale = _loss_scale(run, model)
    if not run.is_main:
        return
    flat = {f"{key}/{name}": tensor for key, tensors in moments.items() for name, tensor in tensors.items()}
    content = {"model.safetensors": _distinct(weights), "optimizer.safetensors": flat}
    step, texts = state.step, _texts(state, identity)
    needed = sum(tensor.nbytes for tensors in content.values() for tensor in tensors.values())

    def fill(place: Path) -> None:
        for name, tensors in content.items():
            save_file(tensors, place / name)
        _write_manifest(place, step, texts, {name: _listed(place / name) for name in content}, {})

    def write() -> None:
        first()
        with _failures_explained(folder / f"step_{step}", needed):
            _make_room(folder, needed)
            _leave_behind(folder, step)
            replace_folder(folder / f"step_{step}", fill)
            _rotate(folder, step, limit)
        status.saved(step)

    writer.start(write)


def _save_shards(
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
    rank, world_size = run.launch.rank, run.launch.world_size
    step, path = state.step, folder / f"step_{state.step}"
    content = zero.partition(model, state.updates)
    state.loss_scale = _loss_scale(run, model)
    texts = {shards.LAYOUT: as_json(shards.layout(model, run.launch)), **_texts(state, identity)} if run.is_main else {}
    needed = world_size * sum(tensor.nbytes for tensor in content.values())

    def begin() -> Path:
        with _failures_explained(path, needed):
            _make_room(folder, needed)
            # A name of its own: a process that outlived its run may still write to the folder that run began.
            place = path.with_name(f".{path.name}.{os.urandom(4).hex()}.unfinished")
            place.mkdir()
        return place

    def commit() -> None:
        first()
        written = shards.collect(place, world_size, run.launch.timeout_seconds, writer.is_hurried)
        _write_manifest(place, step, texts, written, {"shards": world_size})
        _leave_behind(folder, step)
        put_in_place(place, path)
        _rotate(folder, step, limit)
        status.saved(step)

    def write() -> None:
        with _failures_explained(path, needed):
            try:
                shards.write(place, rank, content)
                if rank == 0:
                    commit()
            except Exception:
                if rank == 0:
                    shards.clear(place, run.launch.timeout_seconds, writer.is_hurried)
                raise

    place = run.on_main(begin)
    writer.start(write)


def _texts(state: TrainState, identity: dict[str, Any]) -> dict[str, str]:
    """As text, since the run goes on counting in `state` while a checkpoint is written."""
    return {"state.json": as_json(asdict(state)), "identity.json": as_json(identity)}


def _write_manifest(place: Path, step: int, texts: dict[str, str], written: dict[str, Any], more: dict[str, Any]) -> None:
    for name, text in texts.items():
        write_text(place / name, text)
    write_json(place / MANIFEST, {"step": step, **more, "files": {**written, **{n: _listed(place / n) for n in texts}}})


def _listed(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _make_room(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _failures_explained(path: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise TrainingError(_not_written(path, needed, error)) from error


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
