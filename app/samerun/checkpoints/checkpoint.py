"""Finds, checks and reads checkpoints; `saving` writes them.

A full checkpoint holds fp32 weights and the optimizer's moments by parameter name, so that every launch can
read it. A sharded one holds a shard of each ZeRO process (see `shards`). Neither holds random-number states
or the data order: both are functions of (seed, step).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from samerun.checkpoints import shards
from samerun.errors import InputError
from samerun.launching import deepspeed_state, fsdp_state
from samerun.launching.processes import Run
from samerun.output.console import say
from samerun.output.files import file_record
from samerun.output.run_folder import CHECKPOINTS, recover_folder

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
    "model": "the model's files",
    "decoder": "the decoder's files",
    "label_list": "the label list",
    "sampling": "how rows are drawn (--sampling)",
    "tokenizer": "the tokenizer",
    "stream": "what is streamed (--train_file, --dataset_name)",
    "mixing": "how the training files are mixed (--mixing_weights)",
    "train_content": "the content of the training rows (--train_file)",
    "validation_content": "the content of the validation rows (--validation_file)",
}
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
AVERAGE_PREFIX = "average/"  # of averaged weights in OPTIMIZER or in a shard
FULL_FILES = (WEIGHTS, OPTIMIZER, STATE, RUN_FINGERPRINT)
SHARDED_FILES = (shards.LAYOUT, STATE, RUN_FINGERPRINT)  # besides the shards
LEFT_BEHIND = ".left_behind"  # suffix of checkpoints that are set aside (see `saving`)


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
    evaluations_without_best: int = 0
    kept: list[dict[str, Any]] = field(
        default_factory=list
    )  # {"step", "metric", "loss"} of the best models (see `best_models`)
    unevaluated: bool = False  # the run stopped before it finished the evaluation due at `step`
    loss_scale: dict[str, Any] | None = None
    stream: Any = None  # start of the current epoch's rows (see batching/stream.py)

    def count_tokens(self, tokens: int | None, padded_tokens: int | None) -> None:
        """Adds the tokens of a step (None for rows without tokens)."""
        if tokens is not None:
            self.tokens = (self.tokens or 0) + tokens
        if padded_tokens is not None:
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
    if damaged:
        raise InputError(*damaged, "no complete checkpoint is left; --overwrite_output_dir starts again")
    return None


def damage(path: Path) -> str | None:
    """Describes what is wrong with a checkpoint's files; None if nothing is."""
    if not path.is_dir():
        return "is not a folder"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        records = manifest["files"]
        for name in (
            (*SHARDED_FILES, *shards.files(manifest["shards"])) if "shards" in manifest else FULL_FILES
        ):
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
    return sorted(
        (path for path in folder.glob("step_*") if name.fullmatch(path.name) and path.is_dir()), key=step_of
    )


def step_of(path: Path) -> int:
    """The N of a step_N folder, also of one that was set aside."""
    return int(path.name.removeprefix("step_").partition(".")[0])


def is_sharded(path: Path) -> bool:
    """Whether a complete checkpoint consists of shards."""
    return (path / shards.LAYOUT).exists()


def frozen_names(model: torch.nn.Module) -> set[str]:
    """Names of the frozen parameters. Full checkpoints leave them out: the pretrained model has them."""
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Loads a checkpoint's trained weights into a model that is not prepared yet. Does nothing for a sharded
    checkpoint: `restore_optimizer` loads its weights.

    Raises `InputError` for a checkpoint of another model.
    """
    if is_sharded(path):
        return
    try:
        # `load_model` handles tied weights, which are saved under one name.
        missing, unexpected = load_model(model, path / WEIGHTS, strict=False)
    except RuntimeError as error:
        raise InputError(
            f"checkpoint {path} is of another model: {' '.join(str(error).split())[:500]}"
        ) from None
    missing = sorted(set(missing) - frozen_names(model))
    if missing or unexpected:
        raise InputError(
            f"checkpoint {path} is of another model: missing {missing[:3]}, unexpected "
            f"{sorted(unexpected)[:3]}"
        )


def load_state(path: Path, run_fingerprint: dict[str, Any]) -> TrainState:
    """Reads a checkpoint's state. Raises `InputError` listing every difference to `run_fingerprint`."""
    saved = json.loads((path / RUN_FINGERPRINT).read_text(encoding="utf-8"))
    differences = [
        f"checkpoint {path} is of another run: {difference(key, saved.get(key), run_fingerprint.get(key))}"
        for key in {**run_fingerprint, **saved}
        if saved.get(key) != run_fingerprint.get(key)
    ]
    if differences:
        differences[-1] += (
            ". Resume with the original files and arguments, or start a new run: name another "
            "--output_dir, or replace this "
            "run with --overwrite_output_dir"
        )
        raise InputError(*differences)
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    unknown = state.keys() - {field.name for field in fields(TrainState)}
    if unknown:
        raise InputError(
            f"checkpoint {path} is of another version of this code: {STATE} has the unknown keys "
            f"{', '.join(sorted(unknown))}"
        )
    return TrainState(**state)


def restore_optimizer(
    run: Run, path: Path, model: Any, optimizer: Any, state: TrainState, idle_step: Callable[[], None]
) -> None:
    """Restores moments and loss scale after `prepare`. Also restores the weights of a sharded checkpoint, and
    DeepSpeed's fp32 master weights of a half-precision model.

    `idle_step` makes a step that changes no weight: DeepSpeed's optimizers have no state before their first
    step. Raises `InputError` for shards in another layout.
    """
    with_deepspeed = run.deepspeed_config is not None
    if with_deepspeed:
        idle_step()
    if is_sharded(path):
        shards.restore(path, run.launch, model, state.updates)
    elif with_deepspeed:
        deepspeed_state.restore_moments(model, _load_moments(path), state.updates)
        if run.launch.precision != "no":
            deepspeed_state.restore_weights(model, load_file(path / WEIGHTS))
    else:
        _restore_moments(run.unwrapped(model), optimizer.optimizer, _load_moments(path), state.updates)
    if state.loss_scale and with_deepspeed:
        deepspeed_state.restore_loss_scale(model, state.loss_scale)
    elif state.loss_scale and run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(state.loss_scale)


def load_average(path: Path, rank: int) -> dict[str, torch.Tensor]:
    """The averaged weights of a checkpoint by parameter name; of a sharded one this process's parts by group
    number."""
    with safe_open(path / (shards.name_of(rank) if is_sharded(path) else OPTIMIZER), "pt") as file:
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
    model: torch.nn.Module, optimizer: Any, moments: dict[str, dict[str, torch.Tensor]], updates: int
) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            restored = {
                key: fsdp_state.distribute_like(tensors[name], parameter)
                for key, tensors in moments.items()
                if name in tensors
            }
            if restored:
                optimizer.state[parameter] = {**_step_entry(optimizer, group, parameter, updates), **restored}


def _step_entry(
    optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, updates: int
) -> dict[str, Any]:
    """{"step": number of updates} in the type that the optimizer keeps for a parameter; empty if it keeps
    none."""
    if isinstance(optimizer, torch.optim.SGD) or group.get("hidden"):  # hidden: Muon's groups
        return {}
    if type(optimizer).__module__.startswith("bitsandbytes"):
        return {"step": updates}
    return {"step": torch.tensor(float(updates), device=parameter.device if group.get("fused") else "cpu")}


def difference(key: str, then: Any, now: Any) -> str:
    """Describes how the value of a fingerprint key, or of an argument, changed."""
    what = KEY_NAMES.get(key, key)
    if isinstance(then, list) and isinstance(now, list):
        pairs = enumerate(zip_longest(then, now), start=1)
        number, (before, after) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        changed = f"number {number}, which was {_brief(before)}, is now {_brief(after)}"
        return f"{what} had {len(then)} entries, has {len(now)}; the first difference is {changed}"
    if isinstance(then, dict) and isinstance(now, dict):
        changes = {part: "has changed" for part in now if now[part] != then.get(part)}
        changes |= dict.fromkeys(now.keys() - then.keys(), "is new")
        changes |= dict.fromkeys(then.keys() - now.keys(), "is missing")
        return f"{what} differ: {', '.join(f'{part} {change}' for part, change in sorted(changes.items()))}"
    if HASH.fullmatch(str(then)) and HASH.fullmatch(str(now)):
        return f"{what} has changed"
    return f"{what} was {_brief(then)}, is now {_brief(now)}"


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
