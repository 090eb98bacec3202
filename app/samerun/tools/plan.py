"""Shows what a training command will do and how much memory it needs, without GPUs and process groups.

    samerun plan [--launch accelerate_configs/NAME.yaml] [--num_processes N] [--gpu_memory GIB] \\
        classify ARGS
    samerun plan --num_processes 8 titlegen --deepspeed ds_configs/zero2.json ARGS

ARGS are the training command's own. A laptop can plan for eight GPUs: the script reads and tokenizes the data
like a run, builds the model without weights, and makes a dry run: one forward and backward pass on meta
tensors. It prints batch sizes, steps, tokens, learning rates, the memory per GPU under every shipped launch
file, and the cheapest launch that fits --gpu_memory. If launch file, DeepSpeed file and arguments contradict
each other, it prints all contradictions instead.

    --launch FILE       the file for `accelerate launch --config_file` (default: python, or torchrun with
                        several processes)
    --num_processes N   processes on all machines (default: from FILE, else 1)
    --gpu_memory GIB    memory of one GPU; needed for the recommendation
    --like RUN          how long it will take, by the times of an earlier run: its folder
    --measure here      how long it will take, by a few steps on this machine under the planned launcher;
                        NAME,... or all: under setups of `samerun parity`, such as one, ddp and zero2

--measure runs the command in a folder of its own beside --output_dir, which it removes: five steps of
different lengths, repeated if they are short, with up to three sizes of micro-batches that fit; an evaluation
of some rows; a checkpoint; the reports.

Exit codes: 0 done, and the planned launch fits; 1 it does not fit --gpu_memory; 2 contradictions or bad
input.
"""

import argparse
import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from samerun import deepspeed, fsdp, optim_arguments, start, task_scripts
from samerun.console import plain_table
from samerun.errors import InputError, collecting
from samerun.files import shipped
from samerun.launch import Launch, Machine
from samerun.parsing import parse, validate
from samerun.plan import Plan, batch_of, describe, make_plan
from samerun.run_folder import RUN_FILE, read_metrics
from samerun.tools import parity
from samerun.tools.moving import forecast

DOES_NOT_FIT = 1
LAUNCH_FILES = shipped("accelerate_configs")
# Keys that Accelerate rejects beside a DeepSpeed file (`DeepSpeedPlugin` of accelerate 1.15).
DEEPSPEED_FILE_KEYS = (
    *("gradient_accumulation_steps", "gradient_clipping", "mixed_precision", "zero_stage"),
    *("zero3_save_16bit_model", "offload_optimizer_device", "offload_param_device"),
    *("offload_param_nvme_path", "offload_optimizer_nvme_path"),
)
PLANNED = "this setup"
KINDS = ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP")


@dataclass(frozen=True)
class LaunchFile:
    """The settings of an accelerate file that decide how a job runs."""

    name: str
    processes: int
    machines: int
    use_cpu: bool
    precision: str
    deepspeed_file: str | None
    kind: str  # one of KINDS
    variables: dict[str, str]  # set by `accelerate launch`


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = task_scripts.tool_parser(__doc__)
    parser.add_argument("--launch", metavar="FILE")
    parser.add_argument("--num_processes", type=task_scripts.at_least(1), metavar="N")
    parser.add_argument("--gpu_memory", type=gigabytes, metavar="GIB")
    parser.add_argument("--like", type=Path, metavar="RUN")
    parser.add_argument("--measure", metavar="here|all|NAME,...")
    options = parser.parse_args(argv)
    if options.like is not None and options.measure is not None:
        parser.error("--like RUN and --measure both say how long it takes; keep one")
    return options


def gigabytes(text: str) -> float:
    """24, 24GB or 24GiB -> 24.0 GiB: a GPU sold with 24 GB has 24 GiB."""
    number = float(text.lower().removesuffix("b").removesuffix("i").removesuffix("g"))
    if number <= 0:
        raise ValueError(text)
    return number


def main(argv: list[str]) -> int:
    """Prints the plan. Raises `InputError` with all contradictions. Returns the exit code."""
    options = read_options(argv)
    arguments_class, task_class = task_scripts.load(options.script)
    problems: list[str] = []
    launch_file = collect(problems, lambda: read_launch_file(options.launch)) if options.launch else None
    setups = collect(problems, lambda: forecast.choose(options.measure)) if options.measure else []
    arguments = collect(problems, lambda: parse(arguments_class, options.arguments))
    if problems:
        raise InputError(*problems)
    collect(problems, lambda: validate(arguments))
    problems += launch_problems(launch_file, options.num_processes) if launch_file is not None else []
    processes = options.num_processes or (launch_file.processes if launch_file else 1)
    use_cpu = launch_file is not None and launch_file.use_cpu
    # On the devices of what is measured.
    like = read_metrics(options.like / RUN_FILE) if options.like is not None else {}
    use_cpu = use_cpu or like.get("device") == "cpu" or (bool(setups) and not parity.gpus("any"))
    before = dict(os.environ)
    set_launch_variables(launch_file, processes, use_cpu)
    machine = Machine(0 if use_cpu else processes, True)
    launch = collect(problems, lambda: start.check(arguments, machine))
    task = collect(problems, lambda: task_class(arguments))
    # To look for problems of the data, too, if those of the launch end the plan.
    simple = Launch(world_size=processes, local_world_size=processes, use_cpu=use_cpu)
    data, steps = load(task, arguments, launch or simple, problems)
    if problems:
        raise InputError(*problems)
    print(*describe_run(launch, data, steps, launch_file), sep="\n")
    several_machines = launch_file is not None and launch_file.machines > 1
    code = memory_report(task, data, steps, launch, several_machines, options.gpu_memory)
    os.environ.clear()
    os.environ.update(before)
    file = None if launch_file is None else launch_path(launch_file.name)
    rows = {name: len(split) for name, split in data.splits.items()}
    job = forecast.Job(options.script, arguments, steps, rows, file, processes)
    if setups:
        if None in setups:
            check_machine(processes, several_machines)
        times, lines = forecast.measure(job, setups)
        print("", *lines, sep="\n")
    elif options.like is not None:
        from samerun.training import train_batches

        work = train_batches(arguments, data, steps, launch).mean_work()
        times = forecast.of_earlier_run(options.like, work, rows.get("validation", 0))
        print("", *forecast.lines(steps, times, "validation" in rows, datetime.datetime.now()), sep="\n")
    return code


def check_machine(processes: int, several_machines: bool) -> None:
    """Raises `InputError` if this machine cannot start the planned launch."""
    gpus = parity.gpus("any")
    devices, name = (gpus, "GPU(s)") if gpus else (os.cpu_count(), "core(s)")
    if several_machines or processes > devices:
        raise InputError(
            f"--measure {forecast.HERE}: {processes} process(es) are planned, this machine has {devices} "
            f"{name}; measure a launch of one machine with --num_processes {devices}"
        )


def collect(problems: list[str], work: Callable[[], Any]) -> Any:
    """The result of `work`; None if it raises an `InputError`, whose problems are added."""
    with collecting(problems):
        return work()


def launch_path(name: str) -> Path | None:
    """The accelerate file of that path or, as a shipped one, of that path in the package."""
    return next((p for p in (Path(name), LAUNCH_FILES.parent / name) if p.is_file()), None)


def read_launch_file(name: str) -> LaunchFile:
    """Reads an accelerate file. Raises `InputError` if it cannot be read or Accelerate would reject it."""
    path = launch_path(name)
    if path is None:
        shipped = ", ".join(sorted(file.name for file in LAUNCH_FILES.glob("*.yaml")))
        raise InputError(f"--launch {name}: no such file (in accelerate_configs/: {shipped})")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError(f"{name}{f':{mark.line + 1}' if mark else ''}: not valid YAML") from None
    if not isinstance(content, dict):
        raise InputError(f"{name}: expected `name: value` lines, found {type(content).__name__}")
    if "zero_optimization" in content:
        raise InputError(
            f"--launch {name}: is a DeepSpeed file; give it after the script, as --deepspeed {name}"
        )
    if problems := file_problems(name, content):
        raise InputError(*problems)
    return LaunchFile(
        name=name,
        processes=int(content.get("num_processes") or 1),
        machines=int(content.get("num_machines") or 1),
        use_cpu=bool(content.get("use_cpu", False)),
        precision=str(content.get("mixed_precision") or "no").lower(),
        deepspeed_file=(content.get("deepspeed_config") or {}).get("deepspeed_config_file"),
        kind=content.get("distributed_type") or "NO",  # YAML reads a bare NO as false
        variables=launch_variables(content),
    )


def launch_variables(content: dict[str, Any]) -> dict[str, str]:
    """The environment variables that `accelerate launch` sets, but for those of processes and devices."""
    inline, kind = content.get("deepspeed_config") or {}, content.get("distributed_type")
    variables = {"ACCELERATE_MIXED_PRECISION": str(content.get("mixed_precision") or "no").lower()}
    if kind == "DEEPSPEED":
        variables["ACCELERATE_USE_DEEPSPEED"] = "true"
    if inline.get("deepspeed_config_file"):
        variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = inline["deepspeed_config_file"]
    for name, variable in deepspeed.INLINE_SETTINGS.items():
        if name in inline:
            variables[variable] = str(inline[name]).lower()
    for name, value in (content.get("dynamo_config") or {}).items():
        variables[f"ACCELERATE_{name.upper()}"] = str(value)
    if kind == "FSDP":
        variables[fsdp.SWITCH] = "true"
    for name, value in (content.get("fsdp_config") or {}).items():
        if value is not None:
            name = name.removeprefix("fsdp_").replace("transformer_layer_cls", "transformer_cls")
            variables[f"FSDP_{name.upper()}"] = str(value)
    return variables


def file_problems(name: str, content: dict[str, Any]) -> list[str]:
    """The errors in an accelerate file."""
    from accelerate.commands.config.config_args import ClusterConfig

    unknown = sorted(set(content) - set(ClusterConfig.__dataclass_fields__))
    problems = [f"unknown key {key}" for key in unknown]
    kind = content.get("distributed_type") or "NO"
    if kind == "MULTI_CPU":
        problems.append(
            "MULTI_CPU starts one process without MPI; use MULTI_GPU with use_cpu: true (cpu_ddp.yaml)"
        )
    elif kind not in KINDS:
        problems.append(f"distributed_type {kind} is not supported; expected one of {', '.join(KINDS)}")
    section = content.get("deepspeed_config") or {}
    if kind != "FSDP" and content.get("fsdp_config"):
        problems.append(f"has an fsdp_config but distributed_type is {kind}; keep one")
    if kind != "DEEPSPEED" and section:
        problems.append(f"has a deepspeed_config but distributed_type is {kind}; keep one")
    if section.get("deepspeed_config_file"):
        twice = [key for key in DEEPSPEED_FILE_KEYS if key in section or key in content]
        problems += [f"Accelerate rejects {key} beside a DeepSpeed file; remove it" for key in twice]
    for key in ("num_processes", "num_machines"):
        if not isinstance(content.get(key, 1), int) or content.get(key, 1) < 1:
            problems.append(f"{key} is {content[key]!r}, expected a whole number from 1")
    return [f"{name}: {problem}" for problem in problems]


def launch_problems(file: LaunchFile, processes: int | None) -> list[str]:
    """Contradictions between an accelerate file and the number of processes."""
    number, problems = processes or file.processes, []
    if number % file.machines:
        problems.append(f"{number} processes cannot be divided evenly over {file.machines} machines")
    if number > 1 and file.kind == "NO":
        problems.append(f"starts one process, --num_processes is {number}; use ddp.yaml or cpu_ddp.yaml")
    return [f"{file.name}: {problem}" for problem in problems]


def set_launch_variables(file: LaunchFile | None, processes: int, use_cpu: bool) -> None:
    """Sets the environment variables that the launcher sets for rank 0, as if all processes were on one
    machine."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    if processes > 1:
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        os.environ.update(sizes, RANK="0", LOCAL_RANK="0")
    if file is not None:
        os.environ.update(file.variables, ACCELERATE_USE_CPU=str(use_cpu))
    elif processes > 1:
        os.environ["TORCHELASTIC_RUN_ID"] = "plan"


def load(task: Any, arguments: Any, launch: Launch, problems: list[str]) -> tuple[Any, Any]:
    """(the run's data, its plan). Adds errors to `problems`."""
    if not arguments.modes.train:
        raise InputError(*problems, "this command does not train; add --do_train")
    with collecting(problems):
        batch, config = batch_of(arguments, launch.world_size), launch.deepspeed_config
        numbers = batch, launch.max_grad_norm, launch.precision
        if config is not None:
            deepspeed.complete_config(config, launch.deepspeed_file, *numbers)
    from samerun.export import hide_library_bars  # imports transformers

    hide_library_bars()
    data = None if task is None else collect(problems, lambda: task.load(launch, arguments.modes))
    if data is None:
        return None, None
    return data, collect(problems, lambda: make_plan(arguments, data.splits["train"], launch))


def describe_run(launch: Launch, data: Any, plan: Plan, file: LaunchFile | None) -> list[str]:
    """Lines about processes, batches, steps, tokens and learning rates."""
    where = f"{launch.world_size} process(es) on {'CPU' if launch.use_cpu else 'GPUs'}"
    machines = f" of {file.machines} machines" if file and file.machines > 1 else ""
    stage = f"ZeRO-{launch.zero_stage} ({launch.deepspeed_file})" if launch.deepspeed_config else "no ZeRO"
    if launch.fsdp is not None:
        stage = "FSDP2"
    lines, idle = describe(plan), []
    if plan.batch.max_tokens is None:
        idle = [f"idle           {plan.batch.idle_share:.1%} of the processes' time, counted in rows"]
    return [
        f"launcher       {file.name if file else launch.launcher}: {where}{machines}, "
        f"{launch.backend}, {stage}",
        f"precision      {launch.precision if launch.precision != 'no' else 'fp32'}",
        *(line for line in lines if not line.startswith("note")),
        *describe_tokens(data.splits["train"], plan),
        *idle,
        *(line for line in lines if line.startswith("note")),
        *(f"note           {note}" for note in data.notes),
    ]


def describe_tokens(train: Any, plan: Plan) -> list[str]:
    """The line about the tokens of the training split; none for a task without tokens."""
    if train.lengths is None:
        return []
    tokens, longest, mixture = int(train.lengths.sum()), int(train.lengths.max()), train.mixture
    if mixture is not None:  # estimated by the mean length of each source
        means = np.bincount(mixture.source, train.lengths) / np.bincount(mixture.source)
        tokens = round(float(means @ mixture.counts))
    total = plan.total_steps / plan.steps_per_epoch * tokens
    return [
        f"tokens         {tokens:,} per epoch without padding, about {total:,.0f} in the run; "
        f"{longest} in the longest row"
    ]


@dataclass(frozen=True)
class Row:
    """A launch with its memory estimate."""

    name: str
    layout: Any
    estimate: Any

    @property
    def cost(self) -> tuple:
        """Sorting key, slowest last: offloading first, then communication."""
        sharded = 3 if self.layout.launch.fsdp is not None else self.layout.launch.zero_stage
        return self.layout.offload_parameters, self.layout.offload_optimizer, sharded


def memory_report(
    task: Any, data: Any, plan: Any, launch: Any, several_machines: bool, gpu_memory: float | None
) -> int:
    """Prints the memory table and, with `gpu_memory`, the cheapest launch that fits. Returns the exit
    code."""
    from samerun.embeddings import train_occurring
    from samerun.layers import checkpoint_activations
    from samerun.memory import Layout, dry_run, estimate
    from samerun.optimizer import state_bytes
    from samerun.training import train_batches

    model = model_of(task)
    if embedding := train_occurring(model, task, keeps_others=False):
        print(f"embeddings     {embedding.in_words()}")
    if task.arguments.gradient_checkpointing or launch.recomputes_activations:
        checkpoint_activations(model, dropout_by_row=launch.dropout_by_row)
    batch = train_batches(task.arguments, data, plan, launch).largest_micro_batch()
    layout = Layout(launch, plan.batch.accumulation, state_bytes(task.arguments, model))
    dry_runs: dict[tuple, Any] = {}

    def row(name: str, layout: Any) -> Row:
        kernels = (layout.own_precision, layout.autocast, layout.launch.fsdp)
        if kernels not in dry_runs:
            dry_runs[kernels] = dry_run(model, task, batch, layout)
        return Row(name, layout, estimate(dry_runs[kernels], layout))

    try:
        planned = row(PLANNED, layout)
    except InputError:  # FSDP settings that do not fit the model
        raise
    except Exception as error:  # the forward pass needs values
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        print(f"memory         not known in advance: a dry run of the model fails ({reason})")
        return 0
    optim, first, shipped = task.arguments.optim, next(iter(dry_runs.values())), []
    for name, other in shipped_launches(launch, several_machines):
        config = {} if other.zero_stage else None
        needs_whole = first.quantization_savings and (other.zero_stage or other.fsdp)  # which shard weights
        if not needs_whole and not optim_arguments.check_launch(optim, config, None, other.fsdp is not None):
            shipped.append(row(name, replace(layout, launch=other)))
    print(f"model          {first.parameters:,} weights, {first.trainable:,} of them trained")
    print(f"\nGiB per {'process' if launch.use_cpu else 'GPU'}, for micro-batches of {first.input_size}\n")
    print(*table([planned, *sorted(shipped, key=lambda r: r.cost)], gpu_memory), sep="\n")
    if gpu_memory is None:
        return 0
    return recommend(planned, shipped, gpu_memory)


def model_of(task: Any) -> Any:
    """The task's model, without values if its `build` reads no weights; transformers' `from_pretrained` does,
    and refuses the meta device."""
    import torch

    try:
        with torch.device("meta"):
            return task.build()
    except RuntimeError:
        return task.build()


def shipped_launches(planned: Any, several_machines: bool) -> list[tuple[str, Any]]:
    """(name, launch) of the shipped launch files that can run the job on GPUs with the planned precision and
    processes."""
    from samerun.launch import Launch

    launches, several = [], planned.world_size > 1
    plain = Launch(world_size=planned.world_size, precision=planned.precision, use_cpu=False)
    for path in sorted(LAUNCH_FILES.glob("*.yaml")):
        file = read_launch_file(f"{LAUNCH_FILES.name}/{path.name}")
        if file.use_cpu or (file.machines > 1) != several_machines:
            continue
        if file.kind == "FSDP" and planned.precision == "fp16":
            continue
        shards = file.kind in ("DEEPSPEED", "FSDP")
        usable_precision = file.precision in ("no", planned.precision)
        if not shards and ((file.processes > 1) != several or not usable_precision):
            continue
        same_precision = file.precision == planned.precision
        name = file.name if same_precision else f"{file.name} --mixed_precision {planned.precision}"
        if file.kind == "DEEPSPEED":
            config = deepspeed.read_config(file.deepspeed_file)
            launches.append((name, replace(plain, deepspeed_config=config)))
        elif file.kind == "FSDP":
            launches.append((name, replace(plain, fsdp=fsdp.read_settings(file.variables, []))))
        elif same_precision or not several or several_machines:  # or another file has this precision
            launches.append((name, plain))
    return launches


def table(rows: list[Row], gpu_memory: float | None) -> list[str]:
    """The memory table as lines: one launch each, in GiB."""
    from samerun import memory

    titles = ("weights", "gradients", "optimizer", "activations", "exchange", "  peak", "  host")
    names = [row.name if row.name == PLANNED else Path(row.name.partition(" ")[0]).name for row in rows]
    cells = []
    for name, row in zip(names, rows, strict=True):
        numbers = [f"{getattr(row.estimate, title.strip()) / memory.GIB:{len(title)}.2f}" for title in titles]
        needed = f"{row.estimate.needed / memory.GIB:5.1f}" if not row.layout.launch.use_cpu else ""
        cells.append([name, *numbers, *([needed] if gpu_memory else [])])
    lines = plain_table(["", *titles, *(["needs"] if gpu_memory else [])], cells)
    lines.append("peak: the maximum during a step; host: CPU memory per process")
    if gpu_memory:
        lines.append(
            f"needs: peak, {memory.FRAGMENTATION:.0%} for fragmentation (assumed) and "
            f"{memory.OUTSIDE_TENSORS / memory.GIB:g} GiB for CUDA context, libraries and NCCL (assumed)"
        )
    return lines


def recommend(planned: Row, shipped: list[Row], gpu_memory: float) -> int:
    """Prints whether the planned launch fits, and the cheapest shipped launch that fits. Returns the exit
    code."""
    from samerun import memory

    fitting = [row for row in [planned, *shipped] if row.estimate.needed <= gpu_memory * memory.GIB]
    print(f"\nthis setup {'fits' if planned in fitting else 'does not fit'} {gpu_memory:g} GiB")
    if fitting_shipped := sorted((row for row in fitting if row is not planned), key=lambda row: row.cost):
        print(f"the cheapest that fits is {fitting_shipped[0].name}")
    else:
        print(
            "no shipped launch fits: try a smaller --per_device_train_batch_size beside --global_batch_size, "
            "--gradient_checkpointing, --mixed_precision bf16, or a smaller model"
        )
    return 0 if planned in fitting else DOES_NOT_FIT
