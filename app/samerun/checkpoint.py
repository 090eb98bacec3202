"""Checkpoints: format, saving, restoring, and copies for machines without a shared disk.

A checkpoint holds fp32 weights, their average and the optimizer's moments by parameter name, so that every
launcher can read it. It holds neither random-number states nor the data order: both are functions of (seed,
step). On a CPU a run that resumes under the same launcher ends with the same bytes as an uninterrupted one.

Training waits only while the state is copied to host memory. A thread then writes the files to a temporary
folder, computes their checksums, flushes them and renames the folder: a checkpoint is complete or absent.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model, save_file

from samerun import deepspeed, fsdp
from samerun.console import say
from samerun.embeddings import with_others, without_others
from samerun.errors import InputError, TrainingError, process_name, where_different
from samerun.files import (
    as_json,
    file_record,
    own_names,
    recover_folder,
    remove_folder,
    replace_folder,
    write_json,
)
from samerun.run_folder import BEST, CHECKPOINTS, LOSSES, METRICS, RUN_FILE, read_metrics, status
from samerun.runtime import Run
from samerun.task import Task

FOLDER = CHECKPOINTS  # in the run's folder
MANIFEST = "manifest.json"
STATE = "state.json"
RUN_FINGERPRINT = "run_fingerprint.json"
HASH = re.compile("[0-9a-f]{16,}")
# Names of fingerprint keys in messages; other keys appear as they are.
KEY_NAMES = {
    "global_batch_size": "the global batch (--global_batch_size)",
    "optim": "the optimizer (--optim, --optim_args)",
    "ema_decay": "the average of the weights (--ema_decay)",
    "model": "the model's files or settings",
    "decoder": "the decoder's files",
    "label_list": "the label list",
    "threshold": "--threshold",
    "calibration": "--calibration",
    "sampling": "how rows are drawn (--sampling)",
    "tokenizer": "the tokenizer",
    "stream": "what is streamed (--train_file, --dataset_name)",
    "mixing": "how the training files are mixed (--mixing_weights)",
    "training_rows": "the number of training rows",
    "train_content": "the content of the training rows (--train_file, or --seed)",
    "validation_content": "the content of the validation rows (--validation_file, or --seed)",
}
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
AVERAGE_PREFIX = "average/"  # of averaged weights in OPTIMIZER
LEFT_BEHIND = ".left_behind"  # suffix of checkpoints that are set aside (see `set_aside_later`)
CHUNK_BYTES = 16 * 1024 * 1024  # of a file, per broadcast to other machines


@dataclass
class TrainState:
    """The progress of a run apart from weights and moments. Everything else follows from the arguments and
    the data."""

    step: int = 0  # global batches trained on
    updates: int = 0  # optimizer updates (steps without an fp16 overflow); the learning rate follows these
    skipped_in_a_row: int = 0
    loss_total: float = 0.0  # sum of the steps' mean losses
    losses: list[float] = field(default_factory=list)  # of the steps since the last line of history.jsonl
    train_seconds: float = 0.0
    tokens: int | None = None  # without padding; None if rows have no tokens
    padded_tokens: int | None = None  # with padding
    best_metric: float | None = None
    best_metric_name: str | None = None
    best_loss: float | None = None  # of the best model; None if the task's scores have no "loss"
    best_step: int | None = None
    loss_settings: dict[str, Any] | None = None  # `Task.loss_settings` of `best_loss`
    evaluations_without_best: int = 0
    unevaluated: bool = False  # the run stopped before it finished the evaluation due at `step`
    loss_scale: dict[str, Any] | None = None
    stream: Any = None  # start of the current epoch's rows (see `data.stream`)
    unused_decay: float = 1.0  # product of the updates' weight decay, for embeddings that do not occur
    dropout_by: str | None = None  # row, torch; None in checkpoints from before there was dropout by row
    fewer_updates: dict[str, int] = field(default_factory=dict)  # of weights that some steps did not use

    def count_tokens(self, tokens: int | None, padded_tokens: int | None) -> None:
        """Adds the tokens of a step (both None for rows without tokens)."""
        if tokens is not None:
            self.tokens = (self.tokens or 0) + tokens
            self.padded_tokens = (self.padded_tokens or 0) + padded_tokens


def tidy(folder: Path) -> None:
    """Restores checkpoints that a crash left half renamed and removes unfinished ones; rank 0 only."""
    for old in folder.glob(".step_*.old"):
        recover_folder(folder / old.name.removeprefix(".").removesuffix(".old"))
        shutil.rmtree(old, ignore_errors=True)
    for unfinished in folder.glob(".step_*.unfinished"):
        shutil.rmtree(unfinished, ignore_errors=True)


def find(folder: Path, requested: str) -> Path | None:
    """Returns the checkpoint to resume from: the requested path, or for "auto" the newest complete one (None
    without any).

    Raises `InputError` if the path is not a complete checkpoint, or if "auto" finds only damaged ones.
    """
    if requested != "auto":
        path = Path(requested)
        problem = damage(path) if (path / MANIFEST).exists() else "is not a checkpoint"
        if problem:
            known = ", ".join(map(str, list_checkpoints(folder))) or "none"
            raise InputError(
                f"--resume_from_checkpoint {path}: {problem}; give auto or a checkpoint of this run ({known})"
            )
        return path
    damaged = []
    for path in reversed(list_checkpoints(folder)):
        problem = damage(path)
        if problem is None:
            for line in damaged:
                say(f"warning: {line}; resuming from {path.name}")
            return path
        damaged.append(f"checkpoint {path}: {problem}")
    trainers = sorted(folder.parent.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime)
    if trainers and not damaged and not (folder.parent / RUN_FILE).exists():
        raise InputError(
            f"--resume_from_checkpoint: {trainers[-1].parent} is of transformers' Trainer and cannot be "
            "continued; name it by --model_name_or_path, and another --output_dir, to start from its weights"
        )
    if damaged:
        raise InputError(*damaged, "no complete checkpoint is left; --overwrite_output_dir starts again")
    return None


def damage(path: Path) -> str | None:
    """Describes what is wrong with a checkpoint's files; None if nothing is."""
    try:
        records = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name in (WEIGHTS, OPTIMIZER, STATE, RUN_FINGERPRINT):
            if name not in records:
                return f"{MANIFEST} does not list {name}"
            file, expected = path / name, records[name]
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, expected {expected['bytes']}"
            if file_record(file)["sha256"] != expected["sha256"]:
                return f"{name} was changed after it was written (checksum)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def list_checkpoints(folder: Path, suffix: str = "") -> list[Path]:
    """The step_N folders by ascending step; with the suffix `LEFT_BEHIND` those that were set aside."""
    name = re.compile(rf"step_\d+{re.escape(suffix)}")
    found = [path for path in folder.glob("step_*") if name.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The N of a step_N folder, also of one that was set aside."""
    return int(path.name.removeprefix("step_").partition(".")[0])


def frozen_names(model: torch.nn.Module) -> set[str]:
    """Names of the frozen parameters. Full checkpoints leave them out: the pretrained model has them."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Loads a checkpoint's trained weights into a model that is not prepared yet. Raises `InputError` for a
    checkpoint of another model."""
    try:
        # `load_model` handles tied weights, which are saved under one name.
        missing, unexpected = load_model(model, path / WEIGHTS, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:500]
        raise InputError(f"checkpoint {path} is of another model: {reason}") from None
    missing = sorted(set(missing) - frozen_names(model))
    if missing or unexpected:
        raise InputError(
            f"checkpoint {path} is of another model: missing {missing[:3]}, unexpected "
            f"{sorted(unexpected)[:3]}"
        )


def load_state(path: Path, run_fingerprint: dict[str, Any]) -> TrainState:
    """Reads a checkpoint's state. Raises `InputError` listing every difference to `run_fingerprint`."""
    saved = json.loads((path / RUN_FINGERPRINT).read_text(encoding="utf-8"))
    advice = (
        ". Resume with the original files and arguments, or start a new run: name another --output_dir, or "
        "replace this run with --overwrite_output_dir"
    )
    check_same_run(saved, run_fingerprint, f"checkpoint {path} is of another run", advice)
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    state.pop("best_files", None)  # of earlier versions
    unknown = state.keys() - {field.name for field in fields(TrainState)}
    if unknown:
        raise InputError(
            f"checkpoint {path} is of another version of this code: {STATE} has the unknown keys "
            f"{', '.join(sorted(unknown))}"
        )
    return TrainState(**state)


def recover_best(folder: Path, state: TrainState, task: Task, complete: bool) -> tuple[TrainState, list[str]]:
    """(a checkpoint's state, adapted to the best model that the run's `folder` holds; notes). Rank 0 only:
    machines may not share the folder. With another --metric_for_best_model or loss the best model is chosen
    anew, unless the run is `complete`: values of two metrics, or of losses of two scales, are never
    compared."""
    notes, changed, losses = [], None, json.loads(as_json(task.loss_settings))
    if not complete and state.best_metric_name not in (None, task.best_metric):
        changed = f"was chosen by {state.best_metric_name}, not by {task.best_metric}"
    elif not complete and state.loss_settings not in (None, losses):
        changed = "has a loss of other settings, which cannot be compared"
    if changed is not None:
        state.loss_settings = losses
    problem = changed or (None if state.best_step is None else _problem_of_best(folder, state.best_step))
    if problem is not None:
        if state.best_step is not None:
            what_now = "the last model is exported" if complete else "later evaluations choose a new one"
            notes.append(f"the best model so far (step {state.best_step}) {problem}; {what_now}")
        state.best_metric, state.best_loss, state.best_step = None, None, None
        state.evaluations_without_best = 0
    return state, notes


def _problem_of_best(folder: Path, best_step: int) -> str | None:
    """Why best/ is not the model of `best_step`, undamaged; None if it is."""
    if not (folder / BEST).is_dir():
        return f"is not in {folder}"
    exported = read_metrics(folder / METRICS).get("best_step")
    if exported not in (None, best_step):
        return f"was replaced by that of step {exported}"
    missing = [name for name in own_names(folder / BEST) if not (folder / BEST / name).exists()]
    if missing:
        return f"lacks {min(missing)}"
    for file in (folder / BEST).glob("*.safetensors"):
        try:
            with safe_open(file, "pt"):  # checks the file size against its header
                pass
        except (OSError, SafetensorError):
            return f"is damaged: {file} cannot be read"
    return None


def restore_optimizer(run: Run, path: Path, model: Any, optimizer: Any, state: TrainState) -> None:
    """Restores moments and loss scale after `prepare`, and DeepSpeed's fp32 master weights of a model in half
    precision. A DeepSpeed engine must have made a step before."""
    with_deepspeed, plain = run.deepspeed_config is not None, run.unwrapped(model)
    moments = {key: without_others(plain, tensors) for key, tensors in _load_moments(path).items()}
    if with_deepspeed:
        deepspeed.restore_moments(model, moments, state.updates)
        if run.launch.precision != "no":
            deepspeed.restore_weights(model, without_others(plain, load_file(path / WEIGHTS)))
    else:
        _restore_moments(plain, optimizer.optimizer, moments, state)
    kept, scaler = state.loss_scale, run.accelerator.scaler
    if not kept:
        return
    scale = kept.get("scale", kept.get("cur_scale"))  # torch's name for it, and DeepSpeed's
    if with_deepspeed:
        deepspeed.restore_loss_scale(model, {**kept, "cur_scale": scale})
    elif scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), **kept, "scale": scale})


def load_average(path: Path) -> dict[str, torch.Tensor]:
    """The averaged weights of a checkpoint by parameter name."""
    with safe_open(path / OPTIMIZER, "pt") as file:
        names = [name for name in file.keys() if name.startswith(AVERAGE_PREFIX)]  # noqa: SIM118
        return {name.removeprefix(AVERAGE_PREFIX): file.get_tensor(name) for name in names}


def _load_moments(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """{key: {parameter name: tensor}}, where the keys are the optimizer's: "exp_avg" and "exp_avg_sq" for
    Adam."""
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(path / OPTIMIZER).items():
        key, _, parameter = name.partition("/")
        if not name.startswith(AVERAGE_PREFIX):
            moments.setdefault(key, {})[parameter] = tensor
    return moments


def _restore_moments(
    model: torch.nn.Module, optimizer: Any, moments: dict[str, dict[str, torch.Tensor]], state: TrainState
) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            own = {key: tensors[name] for key, tensors in moments.items() if name in tensors}
            restored = {key: fsdp.distribute_like(tensor, parameter) for key, tensor in own.items()}
            if restored:
                updates = state.fewer_updates.get(name, state.updates)
                optimizer.state[parameter] = {**_step_entry(optimizer, group, parameter, updates), **restored}


def _step_entry(
    optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, updates: int
) -> dict[str, Any]:
    """{"step": number of updates} in the type that the optimizer keeps for a parameter; empty if it keeps
    none."""
    if isinstance(optimizer, torch.optim.SGD):
        return {}
    if type(optimizer).__module__.startswith("bitsandbytes"):
        return {"step": updates}
    return {"step": torch.tensor(float(updates), device=parameter.device if group.get("fused") else "cpu")}


def check_same_run(then: dict[str, Any], now: dict[str, Any], where: str, advice: str) -> None:
    """Raises `InputError` listing every difference of two fingerprints; `advice` ends the message."""
    changed = [key for key in {**now, **then} if then.get(key) != now.get(key)]
    problems = [f"{where}: {difference(key, then.get(key), now.get(key))}" for key in changed]
    if problems:
        raise InputError(*problems[:-1], problems[-1] + advice)


def difference(key: str, then: Any, now: Any) -> str:
    """Describes how the value of a fingerprint key, or of an argument, changed."""
    what = KEY_NAMES.get(key, key)
    if isinstance(then, dict) and isinstance(now, dict):
        changed = sorted(part for part in then.keys() | now.keys() if then.get(part) != now.get(part))
        return f"{what} differ in {', '.join(changed)}"
    if HASH.fullmatch(str(then)) and HASH.fullmatch(str(now)):
        return f"{what} has changed"
    before, after = where_different(*(json.dumps(value, ensure_ascii=False) for value in (then, now)))
    return f"{what} was {before}, is now {after}"


# Saving


def full_weights(run: Run, model: Any) -> dict[str, torch.Tensor]:
    """The model's weights and persistent buffers by name, fp32, in rank 0's host memory; empty on the other
    ranks. All processes must call it."""
    if run.deepspeed_config is None:
        plain = run.unwrapped(model)
        return with_others(plain, fsdp.full_weights(plain, run.is_main))
    parameters = deepspeed.full_parameters(model, run.is_main)
    if not run.is_main:
        return {}
    module = model.module
    # A tied weight has several names.
    first_names = {parameter: name for name, parameter in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    weights = {name: parameters[first_names[parameter]] for name, parameter in named}
    buffers = {name: tensor for name, tensor in module.state_dict().items() if name not in weights}
    weights |= {name: fsdp.to_host(tensor) for name, tensor in buffers.items()}
    return with_others(module, weights)


def collect(
    run: Run, model: Any, optimizer: Any, state: TrainState, average: dict[str, torch.Tensor] | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """Copies weights, moments and `average`, as `load_average` returns it, to rank 0's host memory, and the
    loss scale to `state`. Returns the tensors of each file; none except on rank 0. All processes must call
    it."""
    frozen = frozen_names(run.unwrapped(model))
    weights = {name: tensor for name, tensor in full_weights(run, model).items() if name not in frozen}
    if run.deepspeed_config is not None:
        moments = deepspeed.full_moments(model, run.is_main)
        state.loss_scale, state.fewer_updates = deepspeed.loss_scale(model), {}
    else:
        if run.fsdp is not None:
            fsdp.reshard(model)  # an evaluation leaves gathered weights
        moments = fsdp.full_moments(run.unwrapped(model), optimizer.optimizer, run.is_main)
        state.fewer_updates = _fewer_updates(run.unwrapped(model), optimizer.optimizer, state.updates)
        scaler = run.accelerator.scaler
        state.loss_scale = None if scaler is None else scaler.state_dict()
    if not run.is_main:
        return {}
    flat = {
        f"{key}/{name}": tensor
        for key, tensors in moments.items()
        for name, tensor in with_others(run.unwrapped(model), tensors, are_weights=False).items()
    }
    flat |= {f"{AVERAGE_PREFIX}{name}": tensor for name, tensor in (average or {}).items()}
    return {WEIGHTS: _without_tied(weights), OPTIMIZER: flat}


def _fewer_updates(model: torch.nn.Module, optimizer: Any, updates: int) -> dict[str, int]:
    """{name: number of updates} of the weights that missed some: a step without a gradient, such as one in
    which no row calls an expert, is no update."""
    states = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    steps = {name: torch.as_tensor(state["step"]) for name, state in states.items() if "step" in state}
    if not steps:
        return {}
    counts = torch.stack([*steps.values()]).tolist()  # of a fused optimizer they are on the GPU
    return {name: int(count) for name, count in zip(steps, counts, strict=True) if count != updates}


def write(
    folder: Path,
    state: TrainState,
    run_fingerprint: dict[str, Any],
    files: dict[str, dict[str, torch.Tensor]],
    limit: int,
    before_write: Callable[[], None],
) -> Path:
    """Writes step_N to `folder` and returns it; then removes the oldest checkpoints beyond `limit`, except
    the best model's. `files`: as `collect` returns them; `before_write` is called before the first is
    written. Raises `TrainingError` naming the newest complete checkpoint."""
    path = folder / f"step_{state.step}"
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    status.check_place()
    try:
        folder.mkdir(exist_ok=True)
        if shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        before_write()
        replace_folder(path, partial(_fill, state, run_fingerprint, files))
        old = [kept for kept in list_checkpoints(folder)[:-limit] if step_of(kept) != state.best_step]
        passed = [aside for aside in list_checkpoints(folder, LEFT_BEHIND) if step_of(aside) <= state.step]
        for each in [*old, *passed]:
            remove_folder(each)
        status.saved(state.step)
        with contextlib.suppress(KeyError, OSError):
            Path(os.environ[LOSSES]).unlink()
    except Exception as error:
        free = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.is_dir())).free
        cause, kept = str(error), list_checkpoints(folder)
        if free < size or getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in cause:
            cause = (
                f"the disk is full: a checkpoint takes {size / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
            )
        remains = f"{kept[-1].name} is complete and stays" if kept else "There is no earlier one"
        raise TrainingError(
            f"checkpoint {path} could not be written ({cause}). {remains}; remove the cause, then run the "
            "same command with --resume_from_checkpoint auto"
        ) from error
    return path


def _fill(
    state: TrainState,
    run_fingerprint: dict[str, Any],
    files: dict[str, dict[str, torch.Tensor]],
    folder: Path,
) -> None:
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    write_json(folder / STATE, asdict(state))
    write_json(folder / RUN_FINGERPRINT, run_fingerprint)
    records = {name: file_record(folder / name) for name in (*files, STATE, RUN_FINGERPRINT)}
    write_json(folder / MANIFEST, {"step": state.step, "files": records})


def set_aside_later(folder: Path, step: int) -> None:
    """Renames the checkpoints of later steps: the run resumes from an earlier one, or they are damaged.
    "auto" must not find them, and they must not count for the limit. They are removed when the run reaches
    their step. Rank 0 only; call it before the history is cut at this step."""
    later = [path for path in list_checkpoints(folder) if step_of(path) > step]
    for path in later:
        aside = path.with_name(path.name + LEFT_BEHIND)
        if aside.exists():
            remove_folder(aside)
        os.rename(path, aside)
    if later:
        names = ", ".join(path.name for path in later)
        say(
            f"note           {names}: later than this run's step; kept as step_N{LEFT_BEHIND} until "
            "the run reaches it"
        )


def _without_tied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keeps only the first name of a tied weight: safetensors refuses two names for one storage."""
    names: dict[int, str] = {}
    return {
        name: t
        for name, t in weights.items()
        if names.setdefault(t.data_ptr(), name) == name or t.numel() == 0
    }


# Only rank 0 writes results. Files that every process must read again (the checkpoint to resume from, the
# best model) are sent to machines without a shared disk through the process group.


def fetch(run: Run, folder: Path, beside: Path | None = None) -> Path:
    """Returns a path where this process can read rank 0's `folder`: the folder itself, if all machines share
    it, or a copy on its machine (see `discard`), in `beside` or, by default, beside `folder`.

    All processes must call this. Raises `InputError` on every process if a machine cannot store its copy.
    """
    launch = run.launch
    if launch.world_size == launch.local_world_size:
        return folder
    files = run.from_rank0(partial(_states, folder))
    if all(run.gather([_states(folder) == files])):
        return folder
    leader = launch.rank - launch.local_rank
    copy = (beside or folder.parent) / f".{folder.name}.of_rank_0_for_{leader}"
    local = copy if leader else folder
    target = local if leader and launch.local_rank == 0 else None
    problems = [problem for problem in run.gather([_receive(run, folder, files, target)]) if problem]
    if problems:
        if target is not None:
            shutil.rmtree(target, ignore_errors=True)
        raise InputError(*problems)
    return local


def discard(run: Run, local: Path, folder: Path) -> None:
    """Removes the copy that `fetch` made, once all processes of its machine have read it."""
    if run.launch.world_size == run.launch.local_world_size:
        return
    run.wait()
    if local != folder and run.launch.local_rank == 0:
        shutil.rmtree(local, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.removedirs(local.parent)  # stops at the first folder that is not empty


def _states(folder: Path) -> dict[str, tuple[int, ...]]:
    """File -> size, time and number on its disk, which machines that share a folder see alike."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    states = {path.relative_to(folder).as_posix(): path.stat() for path in files}
    return {name: (state.st_size, state.st_mtime_ns, state.st_ino) for name, state in states.items()}


def _receive(run: Run, folder: Path, files: Iterable[str], target: Path | None) -> str | None:
    """Takes part in the broadcasts of rank 0's files and writes them to `target`, if not None. Returns the
    reason if they cannot be written, instead of raising: the other processes wait for this one in the
    broadcasts."""
    problem = None
    if target is not None:
        shutil.rmtree(target, ignore_errors=True)
    for name in files:
        with (folder / name).open("rb") if run.is_main else contextlib.nullcontext() as reader:
            chunk = None
            while chunk != b"":
                chunk = run.from_rank0(lambda reader=reader: reader.read(CHUNK_BYTES))
                if target is not None and problem is None:
                    try:
                        (target / name).parent.mkdir(parents=True, exist_ok=True)
                        with (target / name).open("ab") as writer:
                            writer.write(chunk)
                    except OSError as error:
                        problem = (
                            f"{process_name()} cannot store rank 0's {folder / name} "
                            f"({error.strerror}); make room there"
                        )
    return problem
