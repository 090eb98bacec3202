"""Saves checkpoints in the background: full ones from rank 0, sharded ones from every ZeRO process.

Training waits only while the state is copied to host memory. A thread then writes the files to a temporary
folder, computes their checksums, flushes them and renames the folder: a checkpoint is complete or absent.
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

from samerun.checkpoints import checkpoint, shards
from samerun.checkpoints.checkpoint import LEFT_BEHIND, TrainState, list_checkpoints, step_of
from samerun.errors import TrainingError, process_name
from samerun.launching import deepspeed_state, fsdp_state
from samerun.launching.launch import Launch
from samerun.launching.processes import Run
from samerun.output import status, written
from samerun.output.console import say
from samerun.output.files import as_json, file_record, write_json, write_text
from samerun.output.run_folder import check_present, put_in_place, replace_folder
from samerun.output.writer_thread import Background


@dataclass(frozen=True)
class CheckpointTarget:
    """Where and how a process saves the checkpoints of a run."""

    folder: Path
    run_fingerprint: dict[str, Any]
    limit: int  # checkpoints to keep besides the best model's
    writer: Background
    before_write: Callable[[], None]  # called by rank 0's writer before it renames the temporary folder
    sharded: bool = False


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is not written yet.

    `texts`: {file name: content}, built at once because training goes on changing the `TrainState`. `size`:
    bytes of all tensors.
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
    """The model's weights and persistent buffers by name, fp32, in rank 0's host memory; empty on the other
    ranks. All processes must call it."""
    if run.deepspeed_config is None:
        return fsdp_state.full_weights(run.unwrapped(model), run.is_main)
    parameters = deepspeed_state.full_parameters(model, run.is_main)
    if not run.is_main:
        return {}
    module = model.module
    first_names = {
        parameter: name for name, parameter in module.named_parameters()
    }  # a tied weight has several names
    weights = {
        name: parameters[first_names[parameter]]
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    buffers = {name: tensor for name, tensor in module.state_dict().items() if name not in weights}
    return weights | {name: fsdp_state.to_host(tensor) for name, tensor in buffers.items()}


def save(
    run: Run,
    target: CheckpointTarget,
    model: Any,
    optimizer: Any,
    state: TrainState,
    average: dict[str, torch.Tensor] | None = None,
) -> None:
    """Copies the state to host memory. The target's writer then saves it as step_N and removes the oldest
    checkpoints beyond the limit. All processes must call it. `average`: the averaged weights, as
    `checkpoint.load_average` returns them.

    First waits for the previous checkpoint; raises what `wait` raises.
    """
    wait(run, target.writer)
    average = {f"{checkpoint.AVERAGE_PREFIX}{name}": tensor for name, tensor in (average or {}).items()}
    if target.sharded:
        _save_sharded(run, target, model, state, average)
    else:
        _save_full(run, target, model, optimizer, state, average)


def wait(run: Run, writer: Background) -> None:
    """Waits until the checkpoint that is being written is on disk. All processes must call it, also before
    the run ends.

    Raises `TrainingError` on every process if the checkpoint could not be written.
    """
    problem = None
    if not run.is_main:
        try:
            writer.wait()
        except TrainingError as error:
            problem = f"{process_name()}: {error}"
    problems = list(filter(None, run.gather([problem])))
    writer.hurry()  # all other processes have written their shards, or have failed
    if problems:
        raise TrainingError("\n".join(problems))
    run.on_main(writer.wait)


# Full checkpoints


def _save_full(
    run: Run,
    target: CheckpointTarget,
    model: Any,
    optimizer: Any,
    state: TrainState,
    average: dict[str, torch.Tensor],
) -> None:
    frozen = checkpoint.frozen_names(run.unwrapped(model))
    weights = {name: tensor for name, tensor in full_weights(run, model).items() if name not in frozen}
    moments = _moments(run, model, optimizer)
    state.loss_scale = _loss_scale(run, model)
    if not run.is_main:
        return
    flat = {
        f"{key}/{name}": tensor for key, tensors in moments.items() for name, tensor in tensors.items()
    } | average
    files = {checkpoint.WEIGHTS: _without_tied(weights), checkpoint.OPTIMIZER: flat}
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    target.writer.start(
        partial(
            _write_full, _Pending(target, state.step, state.best_step, _texts(target, state), size), files
        )
    )


def _write_full(pending: _Pending, files: dict[str, dict[str, torch.Tensor]]) -> None:
    with _explain_failures(pending):
        _check_free_space(pending)
        _commit(pending, partial(replace_folder, pending.path, partial(_fill, pending, files)))


def _fill(pending: _Pending, files: dict[str, dict[str, torch.Tensor]], folder: Path) -> None:
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    _write_manifest(pending, folder, {name: file_record(folder / name) for name in files})


# Sharded checkpoints


def _save_sharded(
    run: Run, target: CheckpointTarget, model: Any, state: TrainState, average: dict[str, torch.Tensor]
) -> None:
    shard = deepspeed_state.partition(model, state.updates) | average
    state.loss_scale = _loss_scale(run, model)
    texts = (
        {shards.LAYOUT: as_json(shards.layout(model, run.launch)), **_texts(target, state)}
        if run.is_main
        else {}
    )
    size = run.launch.world_size * sum(tensor.nbytes for tensor in shard.values())
    pending = _Pending(target, state.step, state.best_step, texts, size)
    folder = run.on_main(partial(_begin_sharded, pending))
    target.writer.start(partial(_write_sharded, pending, run.launch, folder, shard))


def _begin_sharded(pending: _Pending) -> Path:
    with _explain_failures(pending):
        _check_free_space(pending)
        # A unique name: a process that outlived an earlier run may still write to that run's folder.
        folder = pending.path.with_name(f".{pending.path.name}.{os.urandom(4).hex()}.unfinished")
        folder.mkdir()
    return folder


def _write_sharded(pending: _Pending, launch: Launch, folder: Path, shard: dict[str, torch.Tensor]) -> None:
    with _explain_failures(pending):
        try:
            shards.write(folder, launch.rank, shard)
            if launch.rank == 0:
                records = shards.collect(
                    folder, launch.world_size, launch.timeout_seconds, pending.target.writer.is_hurried
                )
                _write_manifest(pending, folder, records, shards=launch.world_size)
                _commit(pending, partial(put_in_place, folder, pending.path))
        except Exception:
            if launch.rank == 0:
                shards.clear(folder, launch.timeout_seconds, pending.target.writer.is_hurried)
            raise


# Both kinds


def _commit(pending: _Pending, rename: Callable[[], None]) -> None:
    """Makes a checkpoint visible by `rename`. Sets later checkpoints aside before and removes old ones
    after."""
    pending.target.before_write()
    _set_aside_later(pending)
    rename()
    _remove_old(pending)
    status.saved(pending.step)


def _texts(target: CheckpointTarget, state: TrainState) -> dict[str, str]:
    return {
        checkpoint.STATE: as_json(asdict(state)),
        checkpoint.RUN_FINGERPRINT: as_json(target.run_fingerprint),
    }


def _write_manifest(pending: _Pending, folder: Path, records: dict[str, Any], **more: Any) -> None:
    for name, text in pending.texts.items():
        write_text(folder / name, text)
        records = {**records, name: file_record(folder / name)}
    write_json(folder / checkpoint.MANIFEST, {"step": pending.step, **more, "files": records})


def _check_free_space(pending: _Pending) -> None:
    folder = pending.target.folder
    check_present(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < pending.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _set_aside_later(pending: _Pending) -> None:
    """Renames the checkpoints of later steps: the run resumed from an earlier one, or they are damaged.
    "auto" must not find them, and they must not count for the limit. They are removed when the run reaches
    their step."""
    later = [path for path in list_checkpoints(pending.target.folder) if step_of(path) > pending.step]
    for path in later:
        aside = path.with_name(path.name + LEFT_BEHIND)
        if aside.exists():
            written.remove_folder(aside)
        written.rename(path, aside)
    if later:
        names = ", ".join(path.name for path in later)
        say(
            f"note           {names}: later than this run's step; kept as step_N{LEFT_BEHIND} until "
            "the run reaches it"
        )


def _remove_old(pending: _Pending) -> None:
    target = pending.target
    passed = [path for path in list_checkpoints(target.folder, LEFT_BEHIND) if step_of(path) <= pending.step]
    old = [
        path
        for path in list_checkpoints(target.folder)[: -target.limit]
        if step_of(path) != pending.best_step
    ]
    for path in [*old, *passed]:
        written.remove_folder(path)


@contextlib.contextmanager
def _explain_failures(pending: _Pending) -> Iterator[None]:
    """Turns any error into a `TrainingError` that names the newest complete checkpoint and says what to
    do."""
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
            cause = (
                f"the disk is full: a checkpoint takes {size / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
            )
        remains = f"{kept[-1].name} is complete and stays" if kept else "There is no earlier one"
        raise TrainingError(
            f"checkpoint {pending.path} could not be written ({cause}). {remains}; remove the "
            "cause, then run the same command "
            "with --resume_from_checkpoint auto"
        ) from error


# The state to save


def _moments(run: Run, model: Any, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    if run.deepspeed_config is not None:
        return deepspeed_state.full_moments(model, run.is_main)
    if run.fsdp is not None:
        fsdp_state.reshard(model)  # an evaluation leaves gathered weights
    return fsdp_state.full_moments(run.unwrapped(model), optimizer.optimizer, run.is_main)


def _loss_scale(run: Run, model: Any) -> dict[str, Any] | None:
    if run.deepspeed_config is not None:
        return deepspeed_state.loss_scale(model)
    return run.accelerator.scaler.state_dict() if run.accelerator.scaler is not None else None


def _without_tied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keeps only the first name of a tied weight: safetensors refuses two names for one storage."""
    names: dict[int, str] = {}
    return {
        name: t
        for name, t in weights.items()
        if names.setdefault(t.data_ptr(), name) == name or t.numel() == 0
    }
