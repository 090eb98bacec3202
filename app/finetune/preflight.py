"""What can be refused before any data is read, on one machine or between several."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from finetune import optimizers
from finetune.arguments.parsing import SpaceSeparated, names_of
from finetune.checkpoints import shards
from finetune.errors import InputError
from finetune.launching import deepspeed_config, rendezvous
from finetune.launching.launch import Launch, Machine, describe_launch
from finetune.output import predictions, run_folder, written
from finetune.output.files import file_record
from finetune.output.versions import code_version, library_versions
from finetune.reading.text_files import matching
from finetune.reports import results


def check(arguments: Any, machine: Machine | None = None) -> Launch:
    """Everything that can be refused before any data is read. Raises `InputError` with all of it. `machine`: the one to be
    launched on, if it is not this one."""
    problems: list[str] = []
    launch, train = None, arguments.modes.train
    try:
        launch = describe_launch(arguments, machine)
    except InputError as error:
        problems += error.problems
    # Only rank 0 writes, and other machines may have another disk: theirs may even lack the folder.
    if arguments.output_dir is not None and (launch is None or launch.rank == 0):
        folder = Path(arguments.output_dir)
        resume = arguments.resume_from_checkpoint is not None or run_folder.was_restarted(folder)
        try:
            run_folder.check_output_dir(folder, train, arguments.overwrite_output_dir, resume)
        except InputError as error:
            problems += error.problems
        problems += _places(arguments, folder, train)
    if launch is not None and train and arguments.checkpoint_format == "sharded":
        problems += shards.refusals(launch, arguments.shared_output_dir)
    if launch is not None and train:
        problems += optimizers.refusals(
            arguments.optim, launch.deepspeed_config, launch.deepspeed_file, launch.fsdp is not None
        )
        problems += _no_average(arguments, launch)
    problems += _missing_services(arguments)
    if problems:
        raise InputError(*problems)
    if machine is None and launch.rank == 0:
        results.check_upload(arguments)
    if launch.world_size > launch.local_world_size:
        rendezvous.wait_for_all_ranks(_compared(arguments, launch), arguments.start_timeout)
    return launch


def _no_average(arguments: Any, launch: Launch) -> list[str]:
    if not deepspeed_config.swaps_to_disk(launch.deepspeed_config or {}):
        return []
    return [
        f"--{name}: {launch.deepspeed_file} keeps the optimizer or the weights on a disk (nvme), where no average of them "
        f"is kept; offload to cpu, or leave --{name} out"
        for name in ("ema_decay", "average_checkpoints")
        if getattr(arguments, name) is not None
    ]


def _places(arguments: Any, folder: Path, train: bool) -> list[str]:
    """What would be lost, or found missing when everything is done, by where this run reads and writes. `folder`:
    --output_dir."""
    named = _paths(arguments, names_of(arguments, reads=True))
    # Not Path.resolve, which raises for links in a circle.
    read = {f"--{name} {path}": Path(os.path.realpath(path)) for name, path in named}
    found = []
    if train and arguments.overwrite_output_dir:
        removed = [Path(os.path.realpath(folder / name)) for name in run_folder.OURS]
        found += [
            f"--overwrite_output_dir would remove {name}, which is read; name another --output_dir"
            for name, path in read.items()
            if any(path.is_relative_to(place) for place in removed)
        ]
    metrics = predictions.metrics_name(arguments)
    try:
        if not train:  # else `check_output_dir` has looked
            written.check_foreign(folder, [metrics])
        if not (train and arguments.overwrite_output_dir):
            run_folder.read_metrics(folder / metrics)
    except InputError as error:
        found += error.problems
    if arguments.do_predict:
        path = predictions.path_of(arguments)
        what = f"--predictions_file {path}" if arguments.predictions_file is not None else str(path)
        problem = predictions.problem(path, folder, train and arguments.overwrite_output_dir)
        same = next((name for name, other in read.items() if other == Path(os.path.realpath(path))), None)
        if same:
            found.append(f"{what}: would replace {same}; name another")
        elif problem is not None:
            found.append(f"{what}: {problem}")
    return found


def _compared(arguments: Any, launch: Launch) -> dict[str, Any]:
    """What every machine must have alike, known before any file is parsed. The parts that cost something come from one
    process of each machine."""
    given = {f"--{name}": getattr(arguments, name) for name in names_of(arguments, per_machine=False)}
    of_launch = {"--mixed_precision": launch.precision, "the number of processes": launch.world_size}
    fsdp = {f"fsdp_{name}": str(value) for name, value in (asdict(launch.fsdp) if launch.fsdp else {}).items()}
    alike = {"arguments": given | of_launch, "DeepSpeed file": launch.deepspeed_config or {}, "fsdp_config": fsdp}
    if launch.local_rank == 0:
        names = names_of(arguments, reads=True, per_machine=True)
        if arguments.streaming:  # the first buffer is compared instead
            names.remove("train_file")
        files = _paths(arguments, names)
        contents: dict[str, str] = {}
        for name, path in files:
            shown = f"--{name} ({Path(path).name})"
            contents[shown] = "; ".join(
                filter(None, [contents.get(shown), _content(path)])
            )  # names may be equal in two folders
        alike |= {"files": contents, "code": code_version(), "libraries": library_versions()}
    return alike


def _paths(arguments: Any, names: list[str]) -> list[tuple[str, str]]:
    """(argument, path) of everything that arguments of these names name; the files of a pattern each by itself."""
    values = [(name, getattr(arguments, name)) for name in names if getattr(arguments, name) is not None]
    each = [(name, pattern) for name, value in values for pattern in (value if isinstance(value, SpaceSeparated) else (value,))]
    return [(name, path) for name, pattern in each for path in matching(pattern)]


def _content(path: str) -> str:
    """A file in one line. Its reader reports a missing file later, with more to say."""
    try:
        record = file_record(Path(path))
        return f"{record['bytes']} bytes, sha256 {record['sha256'][:12]}"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _missing_services(arguments: Any) -> list[str]:
    """Trackers that are not installed, and a hub that nobody is logged in to; better known now than after the training."""
    found = [
        f"--report_to {name}: not installed (pip install {name})"
        for name in arguments.report_to
        if name not in ("none", "html") and importlib.util.find_spec(name) is None
    ]
    if arguments.push_to_hub and not arguments.hub_dry_run and get_token() is None:
        found.append("--push_to_hub: no token; log in first (hf auth login)")
    return found
