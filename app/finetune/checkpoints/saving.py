"""Saves checkpoints while the run goes on: full ones from rank 0, sharded ones from every process of ZeRO.

Training waits only while the state is copied to host memory. A thread then writes the files to a temporary folder, computes
their checksums, flushes them and renames the folder: a checkpoint is complete or absent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finetune.checkpoints import checkpoint, shards
from finetune.checkpoints.checkpoint import LEFT_BEHIND, TrainState, list_checkpoints, step_of
from finetune.errors import TrainingError, process_name
from finetune.launching import deepspeed_state, fsdp_state
from finetune.launching.launch import Launch
from finetune.launching.processes import Run
from finetune.output import status, written
from finetune.output.console import say
from finetune.output.files import as_json, file_record, write_json, write_text
from finetune.output.run_folder import check_present, put_in_place, replace_folder
from finetune.output.writer_thread import Background


@dataclass(frozen=True)
class CheckpointTarget:
    """Where and how a process saves the checkpoints of a run."""

    folder: Path
    run_fingerprint: dict[str, Any]
    limit: int  # checkpoints to keep beside that of the best model
    writer: Background
    before_write: Callable[[], None]  # called by rank 0's writer before a checkpoint takes its place
    sharded: bool = False


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that the writer has yet to write.

    `texts`: file name -> content; made at once, since the run goes on changing its `TrainState`. `size`: bytes of all tensors.
    """

    target: CheckpointTarget
    step: int
    best_step: int | None
    texts: dict[str, str]
    size: int

    @property
    def path(self) -> Path:
        return self.target.folder / f"step_{self.step}"


def full_weights(run: Run, model: Any) -> dict[str, torch.Tensor]:
    """The model's weights and persistent buffers by name, fp32, in rank 0's host memory; empty on the other ranks. All
    processes must call it."""
    if run.fsdp is not None:
        return fsdp_state.full_weights(model, run.is_main)
    if run.deepspeed_config is None:
        if not run.is_main:
            return {}
        copies: dict[Any, torch.Tensor] = {}  # one copy per storage, so that tied weights stay tied
        state = run.unwrapped(model).state_dict()
        return {name: copies.setdefault((t.data_ptr(), t.shape), _to_host(t)) for name, t in state.items()}
    parameters = deepspeed_state.full_parameters(model, run.is_main)
    if not run.is_main:
        return {}
    module = model.module
    names = {parameter: name for name, parameter in module.named_parameters()}  # a tied weight has one name here, several below
    weights = {name: parameters[names[parameter]] for name, parameter in module.named_parameters(remove_duplicate=False)}
    return weights | {name: _to_host(tensor) for name, tensor in module.state_dict().items() if name not in weights}


def save(
    run: Run,
    target: CheckpointTarget,
    model: Any,
    optimizer: Any,
    state: TrainState,
    average: dict[str, torch.Tensor] | None = None,
) -> None:
    """Copies the state to host memory and has the target's writer save it as step_N, then remove the oldest checkpoints beyond
    the limit. All processes must call it. `average`: that of the weights, if the run keeps one (see `checkpoint.load_average`).

    Waits for the previous checkpoint if that is still being written; raises what `wait` raises.
    """
    wait(run, target.writer)
    average = {f"{checkpoint.AVERAGE}{name}": tensor for name, tensor in (average or {}).items()}
    if target.sharded:
        _save_sharded(run, target, model, state, average)
    else:
        _save_full(run, target, model, optimizer, state, average)


def wait(run: Run, writer: Background) -> None:
    """Waits until the checkpoint in flight, if there is one, is on disk. All processes must call it, also before the run ends.

    Raises `TrainingError` on every process if it could not be written.
    """
    problem = None
    if not run.is_main:
        try:
            writer.wait()
        except TrainingError as error:
            problem = f"{process_name()}: {error}"
    problems = [each for each in run.gather([problem]) if each]
    writer.hurry()  # the other processes' shards are there, or one of them never will be
    if problems:
        raise TrainingError("\n".join(problems))
    run.on_main(writer.wait)


# Full checkpoints


def _save_full(
    run: Run, target: CheckpointTarget, model: Any, optimizer: Any, state: TrainState, average: dict[str, torch.Tensor]
) -> None:
    frozen = checkpoint.frozen_names(run.unwrapped(model))
    weights = {name: tensor for name, tensor in full_weights(run, model).items() if name not in frozen}
    moments = _moments(run, model, optimizer)
    state.loss_scale = _loss_scale(run, model)
    if not run.is_main:
        return
    flat = {f"{key}/{name}": tensor for key, tensors in moments.items() for name, tensor in tensors.items()} | average
    files = {checkpoint.WEIGHTS: _without_duplicates(weights), checkpoint.OPTIMIZER: flat}
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    target.writer.start(partial(_write_full, _Pending(target, state.step, state.best_step, _texts(target, state), size), files))


def _write_full(pending: _Pending, files: dict[str, dict[str, torch.Tensor]]) -> None:
    with _explained_failures(pending):
        _check_free_space(pending)
        _commit(pending, partial(replace_folder, pending.path, partial(_fill, pending, files)))


def _fill(pending: _Pending, files: dict[str, dict[str, torch.Tensor]], place: Path) -> None:
    for name, tensors in files.items():
        save_file(tensors, place / name)
    _write_manifest(pending, place, {name: file_record(place / name) for name in files})


# Sharded checkpoints


def _save_sharded(run: Run, target: CheckpointTarget, model: Any, state: TrainState, average: dict[str, torch.Tensor]) -> None:
    shard = deepspeed_state.partition(model, state.updates) | average
    state.loss_scale = _loss_scale(run, model)
    texts = {shards.LAYOUT: as_json(shards.layout(model, run.launch)), **_texts(target, state)} if run.is_main else {}
    size = run.launch.world_size * sum(tensor.nbytes for tensor in shard.values())
    pending = _Pending(target, state.step, state.best_step, texts, size)
    place = run.on_main(partial(_begin_sharded, pending))
    target.writer.start(partial(_write_sharded, pending, run.launch, place, shard))


def _begin_sharded(pending: _Pending) -> Path:
    with _explained_failures(pending):
        _check_free_space(pending)
        # A unique name: a process that outlived its run may still write to the folder that run began.
        place = pending.path.with_name(f".{pending.path.name}.{os.urandom(4).hex()}.unfinished")
        place.mkdir()
    return place


def _write_sharded(pending: _Pending, launch: Launch, place: Path, shard: dict[str, torch.Tensor]) -> None:
    with _explained_failures(pending):
        try:
            shards.write(place, launch.rank, shard)
            if launch.rank == 0:
                records = shards.collect(place, launch.world_size, launch.timeout_seconds, pending.target.writer.is_hurried)
                _write_manifest(pending, place, records, shards=launch.world_size)
                _commit(pending, partial(put_in_place, place, pending.path))
        except Exception:
            if launch.rank == 0:
                shards.clear(place, launch.timeout_seconds, pending.target.writer.is_hurried)
            raise


# Both


def _commit(pending: _Pending, put: Callable[[], None]) -> None:
    """Has `put` put a checkpoint in its place, and moves others out of its way."""
    pending.target.before_write()
    _set_later_aside(pending)
    put()
    _rotate(pending)
    status.saved(pending.step)


def _texts(target: CheckpointTarget, state: TrainState) -> dict[str, str]:
    return {checkpoint.STATE: as_json(asdict(state)), checkpoint.RUN_FINGERPRINT: as_json(target.run_fingerprint)}


def _write_manifest(pending: _Pending, place: Path, records: dict[str, Any], **more: Any) -> None:
    for name, text in pending.texts.items():
        write_text(place / name, text)
        records = {**records, name: file_record(place / name)}
    write_json(place / checkpoint.MANIFEST, {"step": pending.step, **more, "files": records})


def _check_free_space(pending: _Pending) -> None:
    folder = pending.target.folder
    check_present(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < pending.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _set_later_aside(pending: _Pending) -> None:
    """Sets aside the checkpoints after this one's step: the run resumed from an earlier one, or they are damaged. "auto" must
    not find them again, and they must not push out the run's own; they are removed when the run has passed them."""
    later = [path for path in list_checkpoints(pending.target.folder) if step_of(path) > pending.step]
    for path in later:
        aside = path.with_name(path.name + LEFT_BEHIND)
        if aside.exists():
            written.remove_folder(aside)
        written.rename(path, aside)
    if later:
        names = ", ".join(path.name for path in later)
        say(f"note           {names}: later than this run; kept as step_N{LEFT_BEHIND} until it gets there")


def _rotate(pending: _Pending) -> None:
    target = pending.target
    passed = [path for path in list_checkpoints(target.folder, LEFT_BEHIND) if step_of(path) <= pending.step]
    old = [path for path in list_checkpoints(target.folder)[: -target.limit] if step_of(path) != pending.best_step]
    for path in [*old, *passed]:
        written.remove_folder(path)


@contextlib.contextmanager
def _explained_failures(pending: _Pending) -> Iterator[None]:
    """Turns any error into a `TrainingError` that says what remains and what to do."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:
        folder, size = pending.target.folder, pending.size
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        kept = list_checkpoints(folder)
        cause = str(error)
        if free < size or getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in cause:
            cause = f"the disk is full: a checkpoint takes {size / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
        remains = f"{kept[-1].name} is whole and stays" if kept else "There is no earlier one"
        raise TrainingError(
            f"checkpoint {pending.path} could not be written ({cause}). {remains}; when the cause is gone, run the same "
            "command with --resume_from_checkpoint auto"
        ) from error


# The state to save


def _moments(run: Run, model: Any, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    if run.deepspeed_config is not None:
        return deepspeed_state.full_moments(model, run.is_main)
    if run.fsdp is not None:
        return fsdp_state.full_moments(model, optimizer.optimizer, run.is_main)
    if not run.is_main:
        return {}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in run.unwrapped(model).named_parameters():
        for key, value in optimizer.optimizer.state.get(parameter, {}).items():
            if key != "step":  # follows from the state of the run
                moments.setdefault(key, {})[name] = _to_host(value)
    return moments


def _loss_scale(run: Run, model: Any) -> dict[str, Any] | None:
    if run.deepspeed_config is not None:
        return deepspeed_state.loss_scale(model)
    return run.accelerator.scaler.state_dict() if run.accelerator.scaler is not None else None


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _without_duplicates(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """safetensors refuses two names for one storage; a tied weight is saved under its first name."""
    names: dict[int, str] = {}
    return {name: t for name, t in weights.items() if names.setdefault(t.data_ptr(), name) == name or t.numel() == 0}
