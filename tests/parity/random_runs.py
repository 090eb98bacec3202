"""Random small trainings, launched at random: are they the same training?

    python tests/parity/random_runs.py [--runs 20] [--seed 0]

Each run draws a task, arguments, two ways to cut a batch and a launch of two processes. Compared are
- losses (1e-5, relative) and metrics (2e-3: rounding swaps rows of nearly equal scores) of the two processes
  with those of one;
- the bytes of weights and moments, if one process goes on from one of its checkpoints;
- metrics of the training and of an evaluation of best/ alone.
Arguments that the program refuses together are drawn again. Prints a line for each run; exit code 1 if one
differs. Its folder is kept.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "app")]
# ruff: noqa: E402

import launchers
import title_job
from launchers import APP, Finished, accelerate, as_words, torchrun

from samerun.checkpoint import step_of
from samerun.errors import EXIT_BAD_INPUT
from samerun.reports.tracker import read_history
from samerun.tools.trials import REFUSED

JOBS = {"classify": launchers, "titlegen": title_job}
LOSSES, METRICS = 1e-5, 2e-3
LEAVES_OUT = ("per_second", "runtime", "tuned", "baseline", "ece", "entropy", "folds", "per_label")
OF_ALL = {
    "seed": (7,), "weight_decay": (0, 0.3), "max_grad_norm": (0, 0.05), "warmup_steps": (0, 0.4),
    "ema_decay": (0.8,), "gradient_checkpointing": ("true",), "learning_rate": (1e-3,),
    "lr_scheduler_type": ("cosine", "constant", "inverse_sqrt", "polynomial", "warmup_stable_decay"),
    "lr_scaling": ("sqrt",), "optim": ("sgd", "adafactor", "adagrad", "rmsprop"),
    "dataloader_num_workers": (1,), "per_device_eval_batch_size": (3, 5), "max_length": (32, 60),
    "truncation_side": ("left",), "length_grouping": ("false",), "attn_implementation": ("eager",),
    "max_train_samples": (25,), "streaming": (10,), "label_smoothing_factor": (0.1,),
}  # fmt: skip
OF_TASK = {
    "classify": {
        "long_documents": ("head_tail", "windows:stride=4,max=3,pooling=mean"), "pos_weight": ("none",),
        "loss": ("focal", "asymmetric", "distribution_balanced"), "sampling": ("class_balanced",),
        "threshold": ("precision_at_recall:0.8", "0.3", "cost:3"), "head_learning_rate": (1e-2,),
        "metric_for_best_model": ("f1_micro", "average_precision_macro"),
    },
    "titlegen": {
        "num_beams": (1,), "no_repeat_ngram_size": (2,), "length_penalty": (0.5,),
        "source_prefix": ("a: ",), "max_length": (40, 160), "decoder_layers": (2,),
    },
}  # fmt: skip
LAUNCHES = {
    "ddp": lambda: torchrun(2),
    **{name: lambda name=name: accelerate(f"{name}.yaml", 2) for name in ("zero1", "zero2", "zero3", "fsdp")},
}
SHARE = 0.2  # of the arguments that a run draws


def draw(chance: random.Random) -> tuple[str, dict[str, object]]:
    """(task, arguments that differ from the common job's)."""
    task = chance.choice(sorted(JOBS))
    pool = OF_ALL | OF_TASK[task]
    values = {name: chance.choice(choices) for name, choices in pool.items() if chance.random() < SHARE}
    if values.get("num_beams") == 1:
        values["num_return_sequences"] = 1
    if task == "titlegen":
        values.setdefault("streaming", None)  # the common job streams
    return task, {"global_batch_size": chance.choice((6, 8, 15)), **values}


@dataclass
class Drawn:
    """A random training. `cuts`: rows of a micro-batch, of one process and of two."""

    number: int
    home: Path
    task: str
    values: dict[str, object]
    launch: str
    cuts: list[int | None]

    def folder(self, name: str) -> Path:
        return self.home / "runs" / f"{self.number}_{name}"

    def remove(self) -> None:
        for folder in (self.home / "runs").glob(f"{self.number}_*"):
            shutil.rmtree(folder)

    def train(self, name: str, launcher: list[str], rows: int | None, **more: object) -> Finished:
        changed = {**self.values, "per_device_train_batch_size": rows, "save_steps": 2, "save_total_limit": 9}
        words = JOBS[self.task].training(self.folder(name), **changed, **more)
        return launchers.run([*launcher, *words], self.home)

    def compare(self) -> list[str]:
        """Goes on from a checkpoint, evaluates alone, and returns what differs."""
        one, resumed, alone = map(self.folder, ("one", "resumed", "alone"))
        found = compared(one, self.folder("two"), "two processes")
        steps = sorted((one / "checkpoints").iterdir(), key=step_of)
        begin = random.Random(self.number).choice(steps[:-1] or steps)
        self.train("resumed", launchers.python(), self.cuts[0], resume_from_checkpoint=begin).check()
        for file in ("model.safetensors", "optimizer.safetensors"):
            own, other = (folder / "checkpoints" / steps[-1].name / file for folder in (one, resumed))
            if own.read_bytes() != other.read_bytes():
                found.append(f"resumed from {begin.name}: {file} has other bytes")
        words = as_words(model_name_or_path=one / "best", do_eval="true", output_dir=alone, report_to="none")
        words += ["--validation_file", "valid.csv" if self.task == "classify" else "valid.jsonl"]
        launchers.run([*launchers.python(), str(APP / f"{self.task}.py"), *words], self.home).check()
        return found + compared(one, alone, "evaluation alone", only="eval_")


def one_run(number: int, home: Path) -> tuple[Drawn, list[str]]:
    """(what was drawn, differences)."""
    chance = random.Random(number)
    while True:
        launch, cuts = chance.choice(sorted(LAUNCHES)), [chance.choice((None, 1, 2, 3)) for _ in range(2)]
        drawn = Drawn(number, home, *draw(chance), launch, cuts)
        ended = drawn.train("one", launchers.python(), cuts[0])
        if not is_refused(ended):
            ended.check()
            ended = drawn.train("two", LAUNCHES[launch](), cuts[1])
        if not is_refused(ended):
            break
        drawn.remove()
    ended.check()
    found = drawn.compare()
    if not found:
        drawn.remove()
    return drawn, found


def is_refused(ended: Finished) -> bool:
    return ended.code == EXIT_BAD_INPUT or REFUSED.search(ended.out + ended.err) is not None


def compared(ours: Path, theirs: Path, what: str, only: str = "") -> list[str]:
    """The numbers that differ between two runs."""
    found, both = [], [json.loads((folder / "metrics.json").read_text("utf-8")) for folder in (ours, theirs)]
    names = (name for name in both[0].keys() | both[1].keys() if not any(x in name for x in LEAVES_OUT))
    for name in sorted(name for name in names if name.startswith(only or ("eval_", "test_", "best_"))):
        value, other = (metrics.get(name) for metrics in both)
        if isinstance(value, float) and isinstance(other, float):
            differs = abs(value - other) > METRICS * max(1, abs(value))
        else:
            differs = value != other
        if differs:
            found.append(f"{what}: {name} {value} and {other}")
    if not only:
        for own, other in zip(*map(read_history, (ours, theirs)), strict=True):
            if "loss" in own and abs(own["loss"] - other["loss"]) > LOSSES * abs(own["loss"]):
                found.append(f"{what}: step {own['step']}: loss {own['loss']} and {other['loss']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    home, differs = Path(tempfile.mkdtemp(prefix="random_runs")), False
    for job in (launchers, title_job):
        job.write_corpus(home)
    for number in range(options.seed, options.seed + options.runs):
        drawn, found = one_run(number, home)
        differs |= bool(found)
        what = f"{number} {drawn.task} {drawn.launch} {drawn.cuts} {drawn.values}"
        print(what, *(found or ["the same"]), sep="\n    ", flush=True)
    print(f"files: {home}")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
