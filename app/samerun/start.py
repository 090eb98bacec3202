"""Before a run: its command is checked, the processes are compared, its folder is locked and run.json
written."""

import contextlib
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import get_token

from samerun import checkpoint, deepspeed, machines, mirror, optim_arguments, predictions, run_folder, signals
from samerun.data.files import matching
from samerun.errors import InputError, collecting, raise_problems
from samerun.export import check_upload
from samerun.files import as_json, file_record, lock, recover_folder, write_json
from samerun.launch import Launch, Machine, describe_launch
from samerun.parsing import as_dict, is_given, is_installed, names_of, values_of
from samerun.plan import Plan, describe
from samerun.run_folder import BEST, RUN_FILE, STATUS, code_version, library_versions, status
from samerun.runtime import Run, connect
from samerun.task import Data

# Arguments of a single start, not of the training.
PER_START = ("resume_from_checkpoint", "overwrite_output_dir", "max_train_time")
_lock = contextlib.ExitStack()  # of the output folder; held until the process ends
unlock = _lock.close  # for a process that goes on after a run


# The command


def check(arguments: Any, machine: Machine | None = None) -> Launch:
    """Describes the launch. Raises `InputError` with everything that is wrong before any data is read.

    `machine`: the machine of a launch that is only planned; None for this one.
    """
    problems: list[str] = []
    launch, train = None, arguments.modes.train
    with collecting(problems):
        launch = describe_launch(arguments, machine)
    # Only rank 0 writes, and --output_dir need not exist on other machines.
    if arguments.output_dir is not None and (launch is None or launch.rank == 0):
        folder = Path(arguments.output_dir)
        resume = arguments.resume_from_checkpoint is not None or run_folder.was_restarted(folder)
        with collecting(problems):
            run_folder.check_output_dir(folder, train, arguments.overwrite_output_dir, resume)
        problems += _path_conflicts(arguments, folder, train)
    if launch is not None and train:
        config, file = launch.deepspeed_config, launch.deepspeed_file
        problems += optim_arguments.check_launch(arguments.optim, config, file, launch.fsdp is not None)
        if arguments.ema_decay is not None and deepspeed.uses_nvme(config or {}):
            problems.append(
                f"--ema_decay does not work with offloading to nvme ({file}); offload to cpu, or leave "
                "--ema_decay out"
            )
    trackers = [name for name in arguments.report_to if name not in ("none", "html")]
    missing = [name for name in trackers if not is_installed(name)]
    problems += [f"--report_to {name}: not installed (pip install {name})" for name in missing]
    with_deepspeed = launch is not None and launch.deepspeed_config is not None and machine is None
    if with_deepspeed and not is_installed("deepspeed"):
        problems.append(f"{launch.deepspeed_file}: DeepSpeed is not installed (pip install deepspeed)")
    if arguments.push_to_hub and get_token() is None:
        problems.append("--push_to_hub: no token; log in first (hf auth login)")
    if machine is None and launch is not None and launch.rank == 0:
        with collecting(problems):
            mirror.connect(arguments.mirror_to if train else None)
    encoding = sys.getfilesystemencoding()
    for name in ("output_dir", "model_name_or_path", "tokenizer_name"):
        if encoding != "utf-8" and not str(getattr(arguments, name, None) or "").isascii():
            problems.append(
                f"--{name}: safetensors and tokenizers take names of folders in UTF-8 alone, but the "
                f"locale's encoding is {encoding}; set PYTHONUTF8=1 or LC_ALL=C.UTF-8"
            )
    raise_problems(problems)
    if machine is None and launch.rank == 0:
        check_upload(arguments)
    if launch.world_size > launch.local_world_size:
        connect(launch, _facts_to_compare(arguments, launch), arguments.start_timeout)
    return launch


def _path_conflicts(arguments: Any, folder: Path, train: bool) -> list[str]:
    """Input files that this run would remove or replace, and result files that it could not write. `folder`:
    --output_dir."""
    # Not Path.resolve, which raises for circular links.
    read = _paths(arguments, names_of(arguments, reads=True))
    inputs = {f"--{name} {path}": Path(os.path.realpath(path)) for name, path in read}
    problems = []
    if train and arguments.overwrite_output_dir:
        removed = [Path(os.path.realpath(folder / name)) for name in run_folder.OURS]
        problems += [
            f"--overwrite_output_dir would remove {name}, which is read; name another --output_dir"
            for name, path in inputs.items()
            if any(path.is_relative_to(other) for other in removed)
        ]
    metrics = predictions.metrics_name(arguments)
    with collecting(problems):
        if not train:  # for training `check_output_dir` does it
            run_folder.check_foreign(folder, [metrics])
        if not (train and arguments.overwrite_output_dir):
            run_folder.read_metrics(folder / metrics)
    if arguments.do_predict:
        path = predictions.path_of(arguments)
        what = f"--predictions_file {path}" if arguments.predictions_file is not None else str(path)
        problem = predictions.problem(path, folder)
        same = next((name for name, other in inputs.items() if other == Path(os.path.realpath(path))), None)
        if same:
            problems.append(f"{what}: would replace {same}; name another")
        elif problem is not None:
            problems.append(f"{what}: {problem}")
    return problems


def _facts_to_compare(arguments: Any, launch: Launch) -> dict[str, Any]:
    """{section: {name: value}} of everything that must be equal on all machines and is known before files are
    parsed.

    Only local rank 0 adds the sections that take time: files, code and libraries.
    """
    values = {f"--{name}": getattr(arguments, name) for name in names_of(arguments, per_machine=False)}
    values |= {"--mixed_precision": launch.precision, "the number of processes": launch.world_size}
    settings = asdict(launch.fsdp) if launch.fsdp else {}
    fsdp = {f"fsdp_{name}": str(value) for name, value in settings.items()}
    facts = {"arguments": values, "DeepSpeed file": launch.deepspeed_config or {}, "fsdp_config": fsdp}
    if launch.local_rank == 0:
        names = names_of(arguments, reads=True, per_machine=True)
        if arguments.streaming:  # the first buffer is compared instead
            names.remove("train_file")
        files: dict[str, str] = {}
        for name, path in _paths(arguments, names):
            key = f"--{name} ({Path(path).name})"
            # Files of two folders may have the same name.
            files[key] = "; ".join(filter(None, [files.get(key), _file_summary(path)]))
        facts |= {"files": files, "code": code_version(), "libraries": library_versions()}
    return facts


def _paths(arguments: Any, names: list[str]) -> list[tuple[str, str]]:
    """(argument, path) of every file and folder that the named arguments give, with patterns expanded."""
    return [(name, path) for name, pattern in values_of(arguments, names) for path in matching(pattern)]


def _file_summary(path: str) -> str:
    """Size and hash of a file. A missing file is no error here: its reader reports it later in more
    detail."""
    try:
        record = file_record(Path(path))
        return f"{record['bytes']} bytes, sha256 {record['sha256'][:12]}"
    except OSError as error:
        return f"unreadable ({error.strerror})"


# The output folder


@dataclass(frozen=True)
class OpenedRun:
    """A run that holds the lock of its output folder.

    `complete`: the folder holds this run, finished and without a checkpoint, so that there is nothing to
    train. `replaces`, with --overwrite_output_dir: the content of run.json for `replace_run`, to be called
    just before training, so that an error in preparing the model does not cost the previous run.
    `description`: the content of run.json as soon as a resumed run trains."""

    fingerprint: dict[str, Any]
    resume: Path | None = None  # checkpoint
    complete: bool = False
    replaces: dict[str, Any] | None = None
    description: dict[str, Any] | None = None


def make_fingerprint(arguments: Any, plan: Plan | None, name: str, data: Data) -> dict[str, Any]:
    """What must be equal on all machines and in a checkpoint to resume from. `name`: the task's."""
    own = {"task": name, **data.fingerprint}
    if plan is None:
        return own
    train = data.splits["train"]
    if train.stream is None:  # for tasks that name nothing of their data
        own["training_rows"] = len(train)
    mixture = train.mixture
    if mixture is not None:
        own["mixing"] = [list(mixture.weights), np.bincount(mixture.source).tolist()]
    order = {"global_batch_size": plan.batch.global_batch_size, "length_grouping": arguments.length_grouping}
    # These decide which tensors a checkpoint has.
    state = {"optim": optim_arguments.in_words(arguments), "ema_decay": arguments.ema_decay}
    return {**own, **order, "seed": arguments.seed, **state}


def open_run(
    run: Run,
    arguments: Any,
    plan: Plan | None,
    fingerprint: dict[str, Any],
    notes: list[str],
    details: dict[str, Any],
) -> OpenedRun:
    """Compares the processes' data, locks the folder, writes run.json and prints the launch, the plan and
    `notes`.

    `details`: the task's own entries of run.json. Raises `InputError`.
    """
    own = {"rank": run.launch.rank, "host": platform.node(), "compared": {"data": fingerprint}}
    # With the first process's, which is sent once: with a thousand, everybody's would be a thousand lists of
    # labels on each.
    if run.any(bool(machines.differences([run.broadcast(own), own]))):
        raise InputError(*machines.differences(run.gather([own])))
    folder = Path(arguments.output_dir)
    description = {**_description(run, arguments, plan, fingerprint), **details} if plan is not None else {}
    signals.set_time_limit(arguments.max_train_time)
    opened, changes = run.from_rank0(partial(_take_folder, arguments, plan, fingerprint, description))
    lines = [*run.summary(), *(describe(plan) if plan else [])]
    if plan and arguments.max_steps and is_given(arguments, "num_train_epochs"):
        notes = [*notes, f"--max_steps {arguments.max_steps} decides; --num_train_epochs is not read"]
    lines += [f"note           {note}" for note in dict.fromkeys([*notes, *changes])]
    if opened.complete:
        lines.append(f"training       is complete in {folder}; nothing to do")
    elif plan and (opened.resume is not None or arguments.resume_from_checkpoint is not None):
        lines.append(f"resume         {opened.resume or 'no checkpoint yet, starting from the beginning'}")
    run.print(*lines)
    return opened


def _take_folder(
    arguments: Any, plan: Plan | None, fingerprint: dict[str, Any], description: dict[str, Any]
) -> tuple[OpenedRun, list[str]]:
    """Locks the folder and writes run.json, unless a previous run is to be replaced later or is complete;
    rank 0 only. Returns (the run, notes)."""
    folder = Path(arguments.output_dir)
    _lock.enter_context(lock(folder))
    if plan is None:
        return OpenedRun(fingerprint), []
    restarted = run_folder.was_restarted(folder)
    resume = "auto" if restarted else arguments.resume_from_checkpoint
    overwrite = arguments.overwrite_output_dir and not restarted
    # Another run may have used the folder since `check`.
    run_folder.check_output_dir(folder, True, arguments.overwrite_output_dir, resume is not None)
    notes = mirror.begin(folder, fingerprint, resume, overwrite)
    holds_a_run = run_folder.holds_a_run(folder)
    if overwrite and holds_a_run:
        return OpenedRun(fingerprint, replaces=description), notes
    if holds_a_run and resume not in (None, "auto"):  # histories and best models would be mixed
        given, own = Path(resume), (folder / checkpoint.FOLDER).resolve()
        if (given / checkpoint.MANIFEST).exists() and given.resolve().parent != own:
            raise InputError(
                f"--resume_from_checkpoint {given}: --output_dir {folder} already holds another run; name "
                "another --output_dir, or go on with that run by --resume_from_checkpoint auto"
            )
    if not holds_a_run:
        run_folder.clear(folder)
    recover_folder(folder / BEST)
    checkpoint.tidy(folder / checkpoint.FOLDER)
    path = None if resume is None else checkpoint.find(folder / checkpoint.FOLDER, resume)
    if path is None and restarted and arguments.resume_from_checkpoint is not None:
        # Stopped before its first checkpoint: begins where it began before.
        path = checkpoint.find(folder / checkpoint.FOLDER, arguments.resume_from_checkpoint)
    if path is None and holds_a_run and not restarted and _is_complete(folder, plan, fingerprint):
        changes = _changed_arguments(run_folder.read_if_whole(folder / RUN_FILE), arguments, plan)
        if changes:
            notes.append(
                f"not used, as the run is done and kept no checkpoint to go on from: {'; '.join(changes)}"
            )
        signals.on_immediate_stop(partial(mirror.wait, mirror.STOP_SECONDS))
        return OpenedRun(fingerprint, complete=True), notes
    step, later = 0, None
    if path is not None:
        step = checkpoint.load_state(path, fingerprint).step
        origin = run_folder.read_if_whole(path.parent.parent / RUN_FILE)
        changes = _changed_arguments(origin, arguments, plan)
        if changes:
            notes.append(f"changed since the checkpoint: {'; '.join(changes)}")
        by_step = {
            each["step"]: each["changes"] for each in origin.get("changes", []) if each["step"] <= step
        }
        if changes:
            by_step[step] = [*by_step.get(step, []), *changes]
        description["changes"] = [{"step": at, "changes": of_step} for at, of_step in by_step.items()]
        if before := run_folder.read_if_whole(folder / RUN_FILE):
            # Nothing is trained with these arguments yet. Only the data and the launch are new.
            paths = names_of(arguments, reads=True)
            own = before["arguments"] | {name: description["arguments"][name] for name in paths}
            launch = {name: description[name] for name in ("launcher_process", "slurm_job")}
            later, description = description, {**before, "arguments": own, **launch}
    _begin(folder, description, step)
    return OpenedRun(fingerprint, resume=path, description=later), notes


def _is_complete(folder: Path, plan: Plan, fingerprint: dict[str, Any]) -> bool:
    """Whether the run in `folder`, which has no checkpoint, is this one and finished. False if it ended
    before its first checkpoint was due.

    Raises `InputError` if it is another run, or if the checkpoint to go on from is missing.
    """
    way_out = "name another --output_dir, or replace that run by --overwrite_output_dir"
    try:
        before, state = (json.loads((folder / name).read_text("utf-8")) for name in (RUN_FILE, STATUS))
        saved, planned = before["fingerprint"], before["plan"]
        steps, saves = planned["total_steps"], planned["save_steps"]
        name, step = state["state"], state["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--output_dir {folder} holds a run without checkpoints, and its {RUN_FILE} or {STATUS} cannot "
            f"be read ({type(error).__name__}); {way_out}"
        ) from None
    now = json.loads(as_json(fingerprint))  # through JSON: a tuple was written as a list
    checkpoint.check_same_run(saved, now, f"--output_dir {folder} holds another run", f"; {way_out}")
    if name == "done" and (folder / BEST).is_dir() and steps == plan.total_steps:
        return True
    if name != "done" and step == 0 and saves is not None:
        return False
    ended = f"finished after {steps} steps" if name == "done" else "is not finished"
    raise InputError(
        f"--output_dir {folder} holds a run that {ended}, without a checkpoint to go on from to step "
        f"{plan.total_steps}; {way_out}"
    )


def _changed_arguments(run: dict[str, Any], arguments: Any, plan: Plan) -> list[str]:
    """Describes the arguments that differ from those in `run`, the run.json that the checkpoint's run wrote
    when it last started, and another number of steps if nobody asked for it."""
    if "plan" not in run:
        return []
    before, steps = run["arguments"], run["plan"]["total_steps"]
    now = json.loads(as_json(as_dict(arguments)))
    names = [name for name in names_of(arguments, per_machine=False, reads=False) if name not in PER_START]
    changed = [name for name in names if name in before and before[name] != now[name]]
    changes = [checkpoint.difference(f"--{name}", before[name], now[name]) for name in changed]
    if plan.chosen_epochs is not None and plan.total_steps != steps:
        number = checkpoint.difference("the number of steps", steps, plan.total_steps)
        changes.append(f"{number} (--num_train_epochs)")
    return changes


def replace_run(folder: Path, description: dict[str, Any]) -> None:
    """Removes the run in `folder` and begins the one with this content of run.json. Rank 0 only."""
    run_folder.clear(folder)
    _begin(folder, description, 0)


def _begin(folder: Path, description: dict[str, Any], step: int) -> None:
    write_json(folder / run_folder.RUN_FILE, description)
    status.begin(folder, step)
    signals.on_immediate_stop(partial(mirror.wait, mirror.STOP_SECONDS))


def _description(run: Run, arguments: Any, plan: Plan, fingerprint: dict[str, Any]) -> dict[str, Any]:
    launch, hardware = run.launch, run.device.type
    if hardware == "cuda":
        hardware = torch.cuda.get_device_name(run.device)
    elif hardware == "cpu":
        hardware = f"{os.cpu_count()} CPU cores"
    # DeepSpeed and Accelerate add infinities, and JSON has none.
    deepspeed_config = json.dumps(run.deepspeed_config, default=str).replace("Infinity", '"inf"')
    return {
        "schema_version": run_folder.SCHEMA_VERSION,
        "line_schema_versions": dict.fromkeys(run_folder.LINES, run_folder.SCHEMA_VERSION),
        "arguments": as_dict(arguments),
        "launcher": launch.launcher,
        "launcher_process": os.getppid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "world_size": launch.world_size,
        "device": run.device.type,
        "hardware": hardware,
        "backend": launch.backend,
        "mixed_precision": launch.precision,
        "zero_stage": launch.zero_stage,
        "fsdp": asdict(run.fsdp) if run.fsdp is not None else None,
        "deepspeed_file": launch.deepspeed_file,
        "deepspeed_config": json.loads(deepspeed_config),
        "plan": asdict(plan),
        "fingerprint": fingerprint,
        "versions": library_versions(),
    }
