"""Writing checkpoints beside the run: in one format whatever the launch, or in shards where gathering is too costly. Level 7.

A checkpoint is complete or not there: it is written beside its place, checksummed, flushed and renamed, by a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finetune.checkpoints import shards
from finetune.checkpoints.checkpoint import LEFT_BEHIND, MANIFEST, TrainState, list_checkpoints, list_left_behind, step_of
from finetune.errors import TrainingError, where
from finetune.launching import zero
from finetune.launching.processes import Run
from finetune.output import status
from finetune.output.run_folder import as_json, file_record, put_in_place, replace_folder, write_json, write_text
from finetune.output.writer_thread import Background


@dataclass(frozen=True)
class Shelf:
    """Where a run's checkpoints go, and how; each process has one, with a `writer` of its own."""

    folder: Path
    identity: dict[str, Any]
    limit: int  # checkpoints that are kept
    writer: Background
    first: Callable[[], None]  # called on rank 0 before anything is written
    in_shards: bool = False


def full_weights(run: Run, model: Any) -> dict[str, torch.Tensor]:
    """The model's weights and persistent buffers by name, fp32, in rank 0's memory; empty elsewhere. All processes must call
    it."""
    if run.deepspeed_config is None:
        if not run.is_main:
            return {}
        copies: dict[Any, torch.Tensor] = {}  # one of each memory, so that tied weights stay tied
        state = run.unwrapped(model).state_dict()
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


def save(run: Run, shelf: Shelf, model: Any, optimizer: Any, state: TrainState) -> None:
    """Copies what a checkpoint needs to host memory - rank 0's, or, for one in shards, each process's own part - and has the
    shelf's writer write step_N beside the run; removes the oldest beyond the limit. All processes must call it.

    Waits for the checkpoint before, if that is still being written (see `wait`).
    """
    wait(run, shelf.writer)
    (_save_shards if shelf.in_shards else _save_full)(run, shelf, model, optimizer, state)


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


def _save_full(run: Run, shelf: Shelf, model: Any, optimizer: Any, state: TrainState) -> None:
    weights = full_weights(run, model)
    moments = _moments(run, model, optimizer)
    state.loss_scale = _loss_scale(run, model)
    if not run.is_main:
        return
    flat = {f"{key}/{name}": tensor for key, tensors in moments.items() for name, tensor in tensors.items()}
    content = {"model.safetensors": _distinct(weights), "optimizer.safetensors": flat}
    step, path, texts = state.step, shelf.folder / f"step_{state.step}", _texts(state, shelf.identity)
    needed = sum(tensor.nbytes for tensors in content.values() for tensor in tensors.values())

    def fill(place: Path) -> None:
        for name, tensors in content.items():
            save_file(tensors, place / name)
        _write_manifest(place, step, texts, {name: file_record(place / name) for name in content}, {})

    def write() -> None:
        shelf.first()
        with _failures_explained(path, needed):
            _make_room(shelf.folder, needed)
            _leave_behind(shelf.folder, step)
            replace_folder(path, fill)
            _rotate(shelf, step)
        status.saved(step)

    shelf.writer.start(write)


def _save_shards(run: Run, shelf: Shelf, model: Any, _optimizer: Any, state: TrainState) -> None:
    rank, world_size, writer = run.launch.rank, run.launch.world_size, shelf.writer
    step, path = state.step, shelf.folder / f"step_{state.step}"
    content = zero.partition(model, state.updates)
    state.loss_scale = _loss_scale(run, model)
    texts = {shards.LAYOUT: as_json(shards.layout(model, run.launch)), **_texts(state, shelf.identity)} if run.is_main else {}
    needed = world_size * sum(tensor.nbytes for tensor in content.values())

    def begin() -> Path:
        with _failures_explained(path, needed):
            _make_room(shelf.folder, needed)
            # A name of its own: a process that outlived its run may still write to the folder that run began.
            place = path.with_name(f".{path.name}.{os.urandom(4).hex()}.unfinished")
            place.mkdir()
        return place

    def commit() -> None:
        shelf.first()
        written = shards.collect(place, world_size, run.launch.timeout_seconds, writer.is_hurried)
        _write_manifest(place, step, texts, written, {"shards": world_size})
        _leave_behind(shelf.folder, step)
        put_in_place(place, path)
        _rotate(shelf, step)
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
    write_json(place / MANIFEST, {"step": step, **more, "files": {**written, **{n: file_record(place / n) for n in texts}}})


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
    later = [path for path in list_checkpoints(folder) if step_of(path) > step]
    for path in later:
        aside = path.with_name(path.name + LEFT_BEHIND)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
    if later:
        names = ", ".join(path.name for path in later)
        print(f"note           {names}: later than this run; kept as step_N{LEFT_BEHIND} until it gets there", flush=True)


def _rotate(shelf: Shelf, step: int) -> None:
    passed = [path for path in list_left_behind(shelf.folder) if step_of(path) <= step]
    for path in [*list_checkpoints(shelf.folder)[: -shelf.limit], *passed]:
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


def _moments(run: Run, model: Any, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    if run.deepspeed_config is not None:
        return zero.full_moments(model, run.is_main)
    if not run.is_main:
        return {}
    states = optimizer.optimizer.state
    named = list(run.unwrapped(model).named_parameters())
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
