"""Checks a command before any data is read, on each machine and across machines."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from samerun import deepspeed, machines, optimizers
from samerun.errors import InputError, collecting
from samerun.output import predictions, run_folder, written
from samerun.output.files import file_record
from samerun.output.versions import code_version, library_versions
from samerun.parsing import SpaceSeparated, names_of
from samerun.reading.text_files import matching
from samerun.reports import results
from samerun.runtime import Launch, Machine, describe_launch


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
        problems += optimizers.refusals(
            arguments.optim, launch.deepspeed_config, launch.deepspeed_file, launch.fsdp is not None
        )
        problems += _averages_on_nvme(arguments, launch)
    problems += _missing_services(arguments)
    if problems:
        raise InputError(*problems)
    if machine is None and launch.rank == 0:
        results.check_upload(arguments)
    if launch.world_size > launch.local_world_size:
        machines.wait_for_all_ranks(_facts_to_compare(arguments, launch), arguments.start_timeout)
    return launch


def _averages_on_nvme(arguments: Any, launch: Launch) -> list[str]:
    if not deepspeed.uses_nvme(launch.deepspeed_config or {}):
        return []
    return [
        f"--{name} does not work with offloading to nvme ({launch.deepspeed_file}); offload to cpu, "
        f"or leave --{name} out"
        for name in ("ema_decay", "average_checkpoints")
        if getattr(arguments, name) is not None
    ]


def _path_conflicts(arguments: Any, folder: Path, train: bool) -> list[str]:
    """Input files that this run would remove or replace, and result files that it could not write. `folder`:
    --output_dir."""
    # Not Path.resolve, which raises for circular links.
    inputs = {
        f"--{name} {path}": Path(os.path.realpath(path))
        for name, path in _paths(arguments, names_of(arguments, reads=True))
    }
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
            written.check_foreign(folder, [metrics])
        if not (train and arguments.overwrite_output_dir):
            run_folder.read_metrics(folder / metrics)
    if arguments.do_predict:
        path = predictions.path_of(arguments)
        what = f"--predictions_file {path}" if arguments.predictions_file is not None else str(path)
        problem = predictions.problem(path, folder, train and arguments.overwrite_output_dir)
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
    fsdp = {
        f"fsdp_{name}": str(value) for name, value in (asdict(launch.fsdp) if launch.fsdp else {}).items()
    }
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
    values = [(name, getattr(arguments, name)) for name in names if getattr(arguments, name) is not None]
    patterns = [
        (name, pattern)
        for name, value in values
        for pattern in (value if isinstance(value, SpaceSeparated) else (value,))
    ]
    return [(name, path) for name, pattern in patterns for path in matching(pattern)]


def _file_summary(path: str) -> str:
    """Size and hash of a file. A missing file is no error here: its reader reports it later in more
    detail."""
    try:
        record = file_record(Path(path))
        return f"{record['bytes']} bytes, sha256 {record['sha256'][:12]}"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _missing_services(arguments: Any) -> list[str]:
    """Trackers that are not installed, and a missing token for the hub."""
    problems = [
        f"--report_to {name}: not installed (pip install {name})"
        for name in arguments.report_to
        if name not in ("none", "html") and importlib.util.find_spec(name) is None
    ]
    if arguments.push_to_hub and not arguments.hub_dry_run and get_token() is None:
        problems.append("--push_to_hub: no token; log in first (hf auth login)")
    return problems
