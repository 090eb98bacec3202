"""Does a run go on here as it did there? Repeats steps of it on this machine and compares the losses.

    samerun verify RUN [--steps N] [ARGS] [-- LAUNCHER ...]

Call it before a job moves. RUN is the output folder of a training; nothing in it changes. The newest
checkpoint after which steps were logged is resumed under LAUNCHER (default: python), such as
torchrun --nproc_per_node 2, with the run's own arguments. ARGS override them, such as
--deepspeed ds_configs/zero2.json. Without such a checkpoint the run begins anew. It does at least N steps, up
to a logged one. Losses, gradient norms and learning rates are compared with RUN's history.jsonl. If they
depart, one process on the CPU in fp32 computes a step, too; the first module whose outputs differ from it is
named, and what else differs.

    --steps N             steps to repeat (default 10)
    --tolerance X         relative difference of losses that is rounding (default 1e-5; bf16 and fp16: 1e-2)
    --checkpoint NAME     another checkpoint, such as step_40
    --timeout SECONDS     time limit (default 1800)
    --work_dir FOLDER     folder of the repeated steps, new or of an earlier call; removed if they agree
                          (default runs/verify)

Exit codes: 0 the losses agree; 1 they depart, or the job fails here; 2 bad input.
"""

import argparse
import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from samerun import task_scripts
from samerun.errors import InputError
from samerun.files import write_json
from samerun.parsing import names_of
from samerun.reports.tracker import read_history
from samerun.run_folder import CHECKPOINTS, HISTORY, RUN_FILE
from samerun.tools import diff
from samerun.tools.moving.outcome import first_difference, read_activations, relative
from samerun.tools.moving.setups import APART, OVERRIDES, run_observed

DEPARTS = 1
MARK = "verify.json"  # in the work folder
# What a call leaves in the work folder. The mark is the last to be removed.
MADE = ("observed", *(f"{run}{end}" for run in ("here", "plain") for end in ("", ".json", ".log")), MARK)
ROUNDING = {"no": 1e-5, "bf16": 1e-2, "fp16": 1e-2}  # of losses, relative, by precision
NORM_FACTOR = 10  # how much more gradient norms may differ
# Not part of the job's steps.
CHANGES = {
    name: value
    for name, value in OVERRIDES.items()
    if name not in ("logging_steps", "eval_strategy", "do_eval", "resume_from_checkpoint")
}
# What can change a number. Of `samerun.tools.diff.facts_of` and `arguments_of`.
REASONS = (
    *("versions.", "device", "hardware", "mixed_precision", "zero_stage", "fsdp", "plan.", "fingerprint."),
    *("--dropout_by", "--tf32", "--torch_compile", "--attn_implementation", "--optim"),
)


def main(argv: list[str]) -> int:
    options = read_options(argv)
    run = read_run(options.run)
    options.start, options.steps = choose_steps(options, run)
    claim(options)
    return verify(options, run)


def read_options(argv: list[str]) -> argparse.Namespace:
    split = argv.index("--") if "--" in argv else len(argv)
    parser = task_scripts.parser(__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--steps", type=task_scripts.at_least(1), default=10, metavar="N")
    parser.add_argument("--tolerance", type=float, metavar="X")
    parser.add_argument("--checkpoint", metavar="NAME")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/verify"), metavar="FOLDER")
    options, options.arguments = parser.parse_known_args(argv[:split])
    options.launcher = argv[split + 1 :] or [sys.executable]
    if options.tolerance is not None and not options.tolerance > 0:
        raise InputError(f"--tolerance {options.tolerance:g}: expected more than 0")
    return options


def read_run(folder: Path) -> dict[str, Any]:
    """run.json, and as "history" the logged steps. Raises `InputError`."""
    try:
        run = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        history = {event["step"]: event for event in read_history(folder) if "loss" in event}
        script = task_scripts.path_of(run["fingerprint"]["task"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{folder}: holds no training ({error}); name a run's --output_dir") from None
    if not history:
        raise InputError(f"{folder}: {HISTORY} has no step to compare with")
    return {**run, "history": history, "script": script}


def choose_steps(options: argparse.Namespace, run: dict[str, Any]) -> tuple[int, int]:
    """(the step of the checkpoint to resume from, 0 to begin anew; how many steps to do). Raises
    `InputError`."""
    saved = {int(path.name.removeprefix("step_")) for path in (options.run / CHECKPOINTS).glob("step_*[0-9]")}
    logged = sorted(run["history"])
    if options.checkpoint is not None:
        chosen = {step for step in saved if f"step_{step}" == options.checkpoint}
        if not chosen:
            known = ", ".join(f"step_{step}" for step in sorted(saved)) or "none"
            raise InputError(f"--checkpoint {options.checkpoint}: no such checkpoint; there are {known}")
        saved = chosen
    start = max((step for step in saved if step < logged[-1]), default=0)
    if options.checkpoint is not None and start == 0:
        raise InputError(f"--checkpoint {options.checkpoint}: no step after it was logged")
    last = next((step for step in logged if step >= start + options.steps), logged[-1])
    return start, last - start


def claim(options: argparse.Namespace) -> None:
    """Makes the work folder, or empties that of an earlier call. Raises `InputError` for another folder."""
    work = options.work_dir
    is_others = work.exists() and any(work.iterdir()) and not (work / MARK).exists()
    if is_others or options.run.resolve().is_relative_to(work.resolve()):
        raise InputError(
            f"--work_dir {work} holds RUN, or files that samerun verify has not written; name another folder"
        )
    remove_made(work)
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / MARK, {"run": str(options.run)})


def remove_made(work: Path) -> None:
    for name in MADE:
        path = work / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or the user's files are in it
        work.rmdir()


def verify(options: argparse.Namespace, run: dict[str, Any]) -> int:
    """Repeats the steps and prints the verdict. Returns the exit code."""
    start, end = options.start, options.start + options.steps
    where = f"checkpoint step_{start}" if start else "the beginning"
    print(f"repeating      steps {start + 1} to {end} from {where}", flush=True)
    problem, both = repeat(options, run, "here", options.steps, options.launcher, options.arguments), []
    with contextlib.suppress(InputError):
        again = read_run(options.work_dir / "here")
        both = [step for step in again["history"] if start < step <= end and step in run["history"]]
    if problem is not None or not both:
        print(f"differs        the job fails here: {problem or 'no step was logged'}")
        return DEPARTS
    tolerance = options.tolerance or max(ROUNDING[each["mixed_precision"]] for each in (run, again))
    for step in both:
        name, size = departure(again["history"][step], run["history"][step], tolerance)
        if size > 1:
            values = [each["history"][step][name] for each in (again, run)]
            print(
                f"differs        step {step}: {name} {values[0]:.7g} here, {values[1]:.7g} there "
                f"({relative(*values):.1e}; rounding: {tolerance:.0e})"
            )
            print(*explain(options, run, again, tolerance), sep="\n")
            return DEPARTS
    loss = max(relative(again["history"][step]["loss"], run["history"][step]["loss"]) for step in both)
    print(f"the same       losses of {len(both)} logged step(s) agree to {loss:.1e}; the run can go on here")
    remove_made(options.work_dir)
    return 0


def repeat(
    options: argparse.Namespace,
    run: dict[str, Any],
    name: str,
    steps: int,
    launcher: list[str],
    words: list[str],
) -> str | None:
    """Does steps of the run in the folder `name` of the work folder, with `words` as further arguments.
    Returns the reason if that fails."""
    folder, file = options.work_dir / name, options.work_dir / f"{name}.json"
    checkpoint = str(options.run / CHECKPOINTS / f"step_{options.start}") if options.start else None
    settings = {
        **run["arguments"], **CHANGES, "output_dir": str(folder), "overwrite_output_dir": False,
        "gradient_accumulation_steps": None, "resume_from_checkpoint": checkpoint,
        "global_batch_size": run["plan"]["batch"]["global_batch_size"],
    }  # fmt: skip
    task_scripts.write_settings(file, settings)
    words = ["--config", str(file), *words, *task_scripts.as_words(APART)]
    limits = {"steps": steps, "timeout": options.timeout}
    problem = run_observed(launcher, run["script"], words, options.work_dir, name, **limits)
    return problem and f"{problem} ({folder}.log)"


def departure(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> tuple[str, float]:
    """(the name of the value that differs most, its difference in tolerances)."""
    allowed = {"learning_rate": tolerance, "loss": tolerance, "grad_norm": NORM_FACTOR * tolerance}
    found = {name: relative(ours[name], theirs[name]) / limit for name, limit in allowed.items()}
    name = max(found, key=found.get)
    return name, found[name]


def explain(
    options: argparse.Namespace, run: dict[str, Any], again: dict[str, Any], tolerance: float
) -> list[str]:
    """Lines on where the first step departs and why."""
    files = names_of(task_scripts.load(run["script"])[0], reads=True)  # they may be in another place here
    words = task_scripts.chosen_words(options.arguments, lambda name: name in files)
    words += ["--use_cpu", "true", "--mixed_precision", "no", "--deepspeed", "none"]
    problem = repeat(options, run, "plain", 1, [sys.executable], words)
    runs = (read_activations(options.work_dir / "observed", name) for name in ("here", "plain"))
    if problem is not None:
        first = f"not found: the plain run fails: {problem}"
    elif found := first_difference(*runs, tolerance):
        first = "{}, row {}: {:.1e} from one process on the CPU in fp32".format(*found)
    else:
        first = (
            "none: one process on this machine's CPU in fp32 computes the same first step; data, checkpoint "
            "or libraries are not those of the run"
        )
    described = [{key: value for key, value in each.items() if key != "script"} for each in (run, again)]
    lines = [line for of in (diff.facts_of, diff.arguments_of) for line in diff.differing(described, of)]
    changed = [line for line in lines if line.strip().startswith(REASONS)] or ["  none is recorded"]
    return [f"first module   {first}", "likely reasons (there, here):", *changed]
