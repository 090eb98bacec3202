"""What a section of the benchmark works with: the options, the machine, a folder, and contenders to be run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarking.data import Source, draw_rows, source_of
from benchmarking.processes import WAIT_POLICY, Turns, run_group
from benchmarking.ratios import LEAST_TURNS, compare
from benchmarking.report import Row
from benchmarking.sizes import CPU, CUDA, QUICK

SCRIPT = Path(__file__).resolve().parents[1] / "bench.py"
STEPS_PER_TURN = {"cpu": 1, "cuda": 10}


@dataclass
class Bench:
    """One benchmark run. `loads`: shares of the CPU that other processes took while contenders ran."""

    options: argparse.Namespace
    folder: Path
    machine: dict[str, Any]
    loads: list[float] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """cpu or cuda."""
        return self.machine["kind"]

    @property
    def precision(self) -> str:
        return self.options.precision or self.machine["precision"]

    @property
    def per_turn(self) -> int:
        return 1 if self.options.quick else STEPS_PER_TURN[self.kind]

    @property
    def cost(self) -> str:
        """What growth is fitted to: seconds of the CPU where the CPU computes."""
        return "cpu_seconds" if self.kind == "cpu" else "seconds"

    def size(self, name: str) -> dict[str, Any]:
        return (QUICK if self.options.quick else {"cpu": CPU, "cuda": CUDA}[self.kind])[name]

    def turns(self, size: dict[str, Any], least: int) -> Turns:
        """As long as the options or else the section want."""
        return Turns(size["seconds"] if self.options.seconds is None else self.options.seconds, least)

    def source(self, kind: str) -> Source | None:
        return source_of(kind, self.options.data, self.folder)

    def rows(self, kind: str, count: int) -> str:
        """A jsonl file with `count` rows drawn from the source of `kind`."""
        path = self.folder / f"{kind}_{count}.jsonl"
        draw_rows(self.source(kind), count, self.options.seed, path)
        return str(path)

    def with_classifier(self, settings: dict[str, Any], size: dict[str, int] | None = None) -> tuple[dict[str, Any], str]:
        """(the settings with a model, the model in words): the one that is named, or one with random weights for the settings'
        rows."""
        if self.options.model is not None:
            return settings | {"model": self.options.model}, self.options.model_name
        size = size or self.size("classifier")
        settings = settings | {"model": str(self.folder / "classifier")}
        self.run(["classification.model"], settings | size)
        return settings, "BERT of {layers} layers, {hidden} wide, random weights".format(**size)

    def long_tailed(self, rows: int) -> tuple[dict[str, Any], str]:
        """(settings, model in words) of a short training on long-tailed texts, for sections that look into our step."""
        size = self.size("long_tailed")
        settings = {name: size[name] for name in ("batch_size", "max_length")}
        settings |= {"rows": rows, "held_rows": 0, "train_file": self.rows("long_tailed", rows), "learning_rate": 1e-4}
        return self.with_classifier(settings)

    def wants(self, contender: str) -> bool:
        """Whether --contenders leaves it in; ours always is."""
        return self.options.contenders is None or contender == "ours" or contender in self.options.contenders

    def others(self, section: str, names: Iterable[str]) -> list[str]:
        """Those of `names` that ours is compared with. Ends the benchmark if --contenders leaves nobody."""
        names = list(names)
        found = [name for name in names if self.wants(name)]
        if not found:
            raise SystemExit(f"error: --contenders leaves nobody in section {section}; there are {', '.join(names)}")
        return found

    def run(
        self, jobs: list[str], settings: dict[str, Any], turns: Turns | None = None, processes: int = 1
    ) -> list[dict[str, Any]]:
        """Results of contenders, MODULE.NAME of benchmarking.contenders each, in a process of its own (or in several, under
        torchrun)."""
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        common = {"seed": self.options.seed, "precision": self.precision, "steps_per_turn": self.per_turn}
        threads = max(1, self.options.threads // processes)
        results = run_group(
            [*command, str(SCRIPT)], jobs, common | settings, self.folder, threads, turns, all_gpus=processes > 1
        )
        self.loads.append(results[0]["others_cpu_share"])
        return results

    def repeat(self, jobs: dict[str, str], settings: dict[str, Any], rounds: int) -> dict[str, list[dict[str, Any]]]:
        """Name -> results of its job in each round, one after the other, in an order that changes. Of those that are wanted."""
        names = [name for name in jobs if self.wants(name)]
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                found[name] += self.run([jobs[name]], settings)
        return found

    def say(self, line: str) -> None:
        print(line, flush=True)

    def compare(
        self, module: str, mine: str, others: list[str], settings: dict[str, Any], size: dict[str, Any]
    ) -> tuple[dict[str, dict[str, Any]], list[Row]]:
        """(name -> its last result, a row for each of `others`): passes of a module's contenders in turns with `mine`."""
        runs, rows = {}, []
        for other in others:
            jobs = [f"{module}.{mine}", f"{module}.{other}"]
            pair = self.run(jobs, settings | {"steps_per_turn": 1}, self.turns(size, LEAST_TURNS))
            runs |= dict(zip((mine, other), pair, strict=True))
            rows.append({"": other, **compare(*pair)})
            self.say_speed(module, rows[-1])
        return runs, rows

    def say_speed(self, what: str, row: Row) -> None:
        self.say(f"{what}  {row['']:<16} {row['speed (quartiles)']['median']:.3f} times as fast")

    def machine_words(self) -> str:
        m = self.machine
        policy = os.environ.get("OMP_WAIT_POLICY", WAIT_POLICY)
        cores = f"{m['cores']} CPU cores ({m['architecture']}), {self.options.threads} thread(s), OMP_WAIT_POLICY={policy}"
        return f"{m['name']}, {cores}"
