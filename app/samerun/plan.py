"""The plan of a run: batch arithmetic, steps, learning rate, and when to log, evaluate and save. Pure
functions.

Users set `global_batch_size`; the number of micro-batches per process follows from the number of processes
and the micro-batch that fits. The learning rate is a function of the number of updates (fp16 may skip one),
so checkpoints need no scheduler state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from samerun import optim_arguments
from samerun.errors import InputError
from samerun.parsing import with_settings

if TYPE_CHECKING:
    from samerun.launch import Launch
    from samerun.task import Split

DEFAULT_GLOBAL_BATCH_SIZE = 32
# Tokens of a micro-batch on a CPU. Larger ones pad more and overflow the CPU's caches: 640 Reuters rows in
# batches of 16 train 1.4 times as fast as with one micro-batch per step, in half the memory (2026-11).
CPU_TOKENS = 2048
# What a micro-batch costs on a CPU besides its tokens, in tokens: 57 for MiniLM on one thread, more for
# smaller models, in bf16 and with more threads (2026-11).
CPU_PASS_TOKENS = 200
# Tasks whose --num_train_epochs is chosen: so many updates, from three epochs to so many
# (benchmarks/quality.md, "How many updates").
EPOCHS, ENOUGH_UPDATES, MOST_EPOCHS = 3, 400, 30
HIGH_RATE = 2e-4  # above it fewer updates suffice, and nothing is advised

# Schedules, their settings (--lr_scheduler_kwargs) and defaults; `lr_multiplier` derives those that are None.
# Names and curves after the warm-up are those of `transformers.get_scheduler`, but `polynomial` ends at 0;
# `multistep` is torch's MultiStepLR.
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 1},
    "cosine_with_min_lr": {"num_cycles": 0.5, "min_lr_rate": 0.1},
    "polynomial": {"power": 1.0},
    "inverse_sqrt": {"timescale": None},
    "warmup_stable_decay": {"num_decay_steps": None, "min_lr_ratio": 0.0},
    "constant": {},
    "constant_with_warmup": {},
    "multistep": {"milestones": [0.25, 0.5, 0.75], "gamma": 0.1},
}
# Settings that are shares, and of what.
SHARES = {
    "milestones": "all steps, from 0 to 1",
    "min_lr_rate": "the peak, from 0 to 1",
    "min_lr_ratio": "the peak, from 0 to 1",
}


class Modes(NamedTuple):
    """Which of training, evaluation and prediction a run does."""

    train: bool
    evaluate: bool
    predict: bool


@dataclass(frozen=True)
class BatchShape:
    """How an optimizer step divides its rows among `world_size` processes and `accumulation` micro-batches
    each."""

    global_batch_size: int
    world_size: int
    micro_batch_size: int  # maximum rows
    accumulation: int  # micro-batches per process and optimizer step; a maximum if `max_tokens` is set
    max_tokens: int | None = None  # maximum tokens of a micro-batch, padding included
    # What a micro-batch costs besides its tokens, in tokens; None: as few as `max_tokens` allows are taken.
    pass_tokens: int | None = None
    # Whether the global batch is a process's batch times the number of processes.
    follows_processes: bool = False

    @property
    def idle_share(self) -> float:
        """The idle share of the processes' time if the global batch does not divide evenly, counted in
        rows."""
        per_process = math.ceil(self.global_batch_size / self.world_size)
        return 1 - self.global_batch_size / (per_process * self.world_size)

    def halved(self) -> BatchShape:
        """About half the micro-batch, and as many more of them as make up the same global batch."""
        if self.max_tokens is not None:
            return replace(self, max_tokens=self.max_tokens // 2)
        accumulation = min(2 * self.accumulation, math.ceil(self.global_batch_size / self.world_size))
        micro_batch_size = math.ceil(self.global_batch_size / (self.world_size * accumulation))
        return replace(self, accumulation=accumulation, micro_batch_size=micro_batch_size)


def derive_batch(
    world_size: int,
    global_batch_size: int | None = None,
    per_device_train_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    max_tokens: int | None = None,
) -> BatchShape:
    """Derives the batch sizes that are None.

    With a global batch, `per_device_train_batch_size` is an upper bound. Without one it is exact, and the
    global batch is its product with `gradient_accumulation_steps` (default 1) and the number of processes, as
    in transformers. `max_tokens` replaces both.

    Raises `InputError` if the three contradict each other.
    """
    total, micro, accumulation = global_batch_size, per_device_train_batch_size, gradient_accumulation_steps
    if total is None and micro:
        accumulation = accumulation or 1
        total = world_size * micro * accumulation
        return BatchShape(total, world_size, micro, accumulation, follows_processes=True)
    total = total or DEFAULT_GLOBAL_BATCH_SIZE
    per_process = math.ceil(total / world_size)
    if max_tokens is not None:  # at most one micro-batch per row, if all rows are long
        return BatchShape(total, world_size, per_process, per_process, max_tokens)
    needed = math.ceil(per_process / micro) if micro else accumulation or 1
    if accumulation and needed != accumulation:
        raise InputError(
            f"batch arguments contradict each other: --global_batch_size {total} on {world_size} process(es) "
            f"is {per_process} rows each, which --per_device_train_batch_size {micro} makes {needed} "
            f"micro-batch(es), but --gradient_accumulation_steps is {accumulation}; leave one of the three "
            "out"
        )
    accumulation = min(needed, per_process)  # no empty micro-batches
    return BatchShape(total, world_size, math.ceil(total / (world_size * accumulation)), accumulation)


@dataclass(frozen=True)
class Plan:
    """All numbers of a training that follow from its arguments, rows and processes."""

    batch: BatchShape
    num_rows: int  # of an epoch
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    learning_rate: float  # the peak, after --lr_scaling
    lr_scheduler_type: str
    eval_steps: int | None  # None: never during training
    save_steps: int | None  # None: never
    logging_steps: int
    lr_factor: float = 1.0  # of --lr_scaling
    lr_scheduler_kwargs: dict[str, Any] | None = None
    optimizer: str = optim_arguments.DEFAULT  # its description
    ema_decay: float | None = None
    chosen_epochs: int | None = None  # if neither epochs nor steps are given
    advised_steps: int | None = None  # of a task that chooses its epochs, if too few are given

    def epoch_of(self, step: int) -> tuple[int, int]:
        """(epoch, step within the epoch) of optimizer step `step`, all 0-based."""
        return divmod(step, self.steps_per_epoch)

    def rows_before(self, step: int) -> int:
        """The number of rows trained on before optimizer step `step` (0-based), counted again in every
        epoch."""
        epoch, position = self.epoch_of(step)
        return epoch * self.num_rows + position * self.batch.global_batch_size

    def lr_multiplier(self, updates: int) -> float:
        """The learning rate after so many updates, as a share of its peak."""
        schedule = (self.lr_scheduler_type, self.lr_scheduler_kwargs)
        return lr_multiplier(updates, self.total_steps, self.warmup_steps, *schedule)

    def due(self, step: int, interval: int | None) -> bool:
        """Whether an action of every `interval` steps is due after `step` steps. The last step is always
        one."""
        return interval is not None and (step % interval == 0 or step == self.total_steps)


def batch_of(arguments: Any, world_size: int, by_tokens: bool = False) -> BatchShape:
    """`derive_batch` for BatchArguments. `by_tokens`: limits micro-batches by tokens unless an argument sets
    their size."""
    a = arguments
    sizes = a.per_device_train_batch_size, a.gradient_accumulation_steps, a.max_tokens_per_micro_batch
    is_free = by_tokens and sizes == (None, None, None)
    if is_free:
        sizes = None, None, CPU_TOKENS
    batch = derive_batch(world_size, a.global_batch_size, *sizes)
    return replace(batch, pass_tokens=CPU_PASS_TOKENS) if is_free else batch


def evaluation_batch(
    arguments: Any, by_tokens: bool = False, default_rows: int | None = None
) -> tuple[int, int | None]:
    """(rows, maximum tokens or None) of an evaluation batch. `by_tokens`: as in `batch_of`; `default_rows`:
    of the split."""
    rows = arguments.per_device_eval_batch_size
    tokens = CPU_TOKENS if by_tokens and rows is None else None
    return rows or default_rows or arguments.evaluation_rows, tokens


def make_plan(arguments: Any, split: Split, launch: Launch) -> Plan:
    """Derives the plan of a training on `split`. `arguments` has the fields of BatchArguments,
    OptimizationArguments and RunArguments. Raises `InputError` for contradicting batch arguments and for a
    warm-up longer than the run.
    """
    num_rows = len(split)
    a = arguments
    # On CPUs without DeepSpeed, whose file may set the rows.
    by_tokens = launch.use_cpu and launch.deepspeed_config is None and split.lengths is not None
    batch = batch_of(arguments, launch.world_size, by_tokens)
    steps_per_epoch = math.ceil(num_rows / batch.global_batch_size)
    enough = math.ceil(split.enough_updates / steps_per_epoch)
    chosen = min(max(EPOCHS, enough), MOST_EPOCHS)
    epochs = a.num_train_epochs or chosen
    total_steps = a.max_steps or max(1, math.ceil(steps_per_epoch * epochs))
    advised = chosen * steps_per_epoch
    is_short = total_steps < min(advised, split.enough_updates) and not a.max_steps
    is_chosen = a.__dataclass_fields__["num_train_epochs"].default is None  # where it is not given
    advises = is_chosen and is_short and a.learning_rate <= HIGH_RATE
    warmup = _steps(a.warmup_steps or 0, total_steps)
    if warmup > total_steps:
        raise InputError(f"--warmup_steps {warmup} is longer than the run ({total_steps} optimizer steps)")
    scaling, base = with_settings(a, "lr_scaling")
    scale = batch.global_batch_size / base.get("", 32)
    factor = {"none": 1.0, "linear": scale, "sqrt": math.sqrt(scale)}[scaling]
    only_at_end = total_steps if a.modes.evaluate else None
    evaluations = {"epoch": steps_per_epoch, "steps": _steps(a.eval_steps, total_steps), "no": only_at_end}
    saves = {"epoch": steps_per_epoch, "steps": _steps(a.save_steps, total_steps) or None, "no": None}
    save_strategy = a.save_strategy or ("epoch" if a.save_steps is None else "steps")
    return Plan(
        batch=batch,
        num_rows=num_rows,
        steps_per_epoch=steps_per_epoch,
        chosen_epochs=None if a.max_steps or a.num_train_epochs else epochs,
        advised_steps=advised if advises else None,
        total_steps=total_steps,
        warmup_steps=warmup,
        learning_rate=a.learning_rate * factor,
        lr_factor=factor,
        lr_scheduler_type=a.lr_scheduler_type,
        lr_scheduler_kwargs=a.lr_scheduler_kwargs,
        eval_steps=evaluations[a.eval_strategy],
        save_steps=saves[save_strategy],
        logging_steps=_steps(a.logging_steps, total_steps),
        optimizer=optim_arguments.describe(a),
        ema_decay=a.ema_decay,
    )


def _steps(number: float | None, total_steps: int) -> int | None:
    """Converts a share of all steps, below 1, into a number of steps."""
    if number is None or number >= 1:
        return number
    return math.ceil(total_steps * number)


def describe(plan: Plan) -> list[str]:
    """The plan as lines for the console."""
    b = plan.batch
    first, last = (plan.learning_rate * plan.lr_multiplier(step) for step in (0, plan.total_steps - 1))
    scaled = f" (--learning_rate times {plan.lr_factor:g}, --lr_scaling)" if plan.lr_factor != 1 else ""
    if b.max_tokens is None:
        share = f"at most {b.micro_batch_size} rows x {b.accumulation} micro-batch(es)"
    else:
        share = f"micro-batches of at most {b.max_tokens} tokens, as many as a step's rows need"
    lines = [
        f"global batch   {b.global_batch_size} rows = {b.world_size} process(es) x {share}",
        f"steps          {plan.total_steps} optimizer steps, {plan.steps_per_epoch} per epoch of "
        f"{plan.num_rows} rows"
        + (f" x {plan.chosen_epochs}; --num_train_epochs sets it" if plan.chosen_epochs else ""),
        f"learning rate  {plan.learning_rate:g} at its peak{scaled}, {first:.3g} in the first step, "
        f"{last:.3g} in the last; {plan.warmup_steps} warm-up step(s), {plan.lr_scheduler_type}",
        f"optimizer      {plan.optimizer}",
    ]
    if plan.ema_decay is not None:
        lines.append(
            f"note           --ema_decay {plan.ema_decay:g}: the averaged weights are evaluated and "
            "exported; they take 4 bytes per trained element"
        )
    if plan.advised_steps is not None:
        lines.append(
            f"note           {plan.total_steps} updates may be too few at this learning rate; "
            f"without --num_train_epochs there are {plan.advised_steps}"
        )
    if b.follows_processes:
        lines.append(
            "note           the global batch depends on the number of processes; --global_batch_size "
            f"{b.global_batch_size} fixes it"
        )
    if b.max_tokens is None and b.idle_share > 0.1:
        below = b.global_batch_size // b.world_size * b.world_size
        even = [size for size in (below, below + b.world_size) if size > 0]
        lines.append(
            f"note           {b.idle_share:.0%} of the processes' time is idle: "
            f"{b.global_batch_size} rows do not divide "
            f"evenly among {b.world_size} processes; use --global_batch_size {' or '.join(map(str, even))}"
        )
    return lines


# Learning-rate schedules


def check_schedule(kind: str, settings: dict[str, Any]) -> list[str]:
    """Errors in --lr_scheduler_kwargs."""
    known = SCHEDULES[kind]
    errors = []
    for name, value in settings.items():
        numbers = value if isinstance(value, list) else [value]
        if name not in known:
            errors.append(
                f"--lr_scheduler_kwargs: {kind} has no {name}; it has {', '.join(known) or 'no settings'}"
            )
        elif isinstance(value, list) != isinstance(known[name], list) or not all(
            type(number) in (int, float) and 0 <= number < math.inf for number in numbers
        ):
            expected = "a list of numbers" if isinstance(known[name], list) else "a number of at least 0"
            errors.append(f"--lr_scheduler_kwargs: {name} is {value!r}, expected {expected}")
        elif name in SHARES and max(numbers, default=0) > 1:
            errors.append(f"--lr_scheduler_kwargs: {name} is {value!r}, expected a share of {SHARES[name]}")
    return errors


def lr_multiplier(
    step: int, total_steps: int, warmup_steps: int, kind: str, settings: dict[str, Any] | None = None
) -> float:
    """The learning rate of optimizer step `step` (0-based) as a share of its peak.

    Warm-up is linear: step s of w has (s + 1) / w, so the first step already trains. `linear` and `cosine`
    (Loshchilov and Hutter, arXiv:1608.03983) reach 0 one step after the last. `multistep` multiplies by
    `gamma` at each of `milestones`, shares of all steps. `warmup_stable_decay` (arXiv:2404.06395) stays at
    the peak and falls by half a cosine in the last `num_decay_steps`, by default a tenth of the run.
    """
    s = {**SCHEDULES[kind], **(settings or {})}
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind in ("constant", "constant_with_warmup"):
        return 1.0
    if kind == "multistep":
        return s["gamma"] ** sum(step >= round(share * total_steps) for share in s["milestones"])
    if kind == "inverse_sqrt":
        timescale = s["timescale"] or warmup_steps or 10_000
        return 1 / math.sqrt((step + timescale - warmup_steps) / timescale)
    if kind == "warmup_stable_decay":
        decay = s["num_decay_steps"] or max(1, round(total_steps / 10))
        done = min(1.0, max(0.0, (step - (total_steps - decay)) / decay))
        return s["min_lr_ratio"] + (1 - s["min_lr_ratio"]) * 0.5 * (1 + math.cos(math.pi * done))
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if kind == "linear":
        return max(0.0, 1 - done)
    if kind == "polynomial":
        return max(0.0, 1 - done) ** s["power"]
    if kind == "cosine_with_restarts":
        return 0.0 if done >= 1 else 0.5 * (1 + math.cos(math.pi * (s["num_cycles"] * done % 1.0)))
    least = s.get("min_lr_rate", 0.0)
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * 2 * s["num_cycles"] * min(1.0, done)))
