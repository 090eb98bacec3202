"""What a section of the benchmark works with: the options, the machine, a folder, and contenders to be run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarking.data import Source, draw_rows, source_of
from benchmarking.processes import WAIT_POLICY, run_group
from benchmarking.sizes import CPU, CUDA, QUICK, Sizes

SCRIPT = Path(__file__).resolve().parents[1] / "bench.py"
STEPS_PER_TURN = {"cpu": 1, "cuda": 10}


@dataclass
class Bench:
    """One benchmark run. `loads`: shares of the CPU that other processes took while contenders ran."""

    options: argparse.Namespace
    folder: Path
    machine: dict[str, Any]
    say: Callable[[str], None]
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

    def size(self, name: str) -> dict[str, Any]:
        sizes: Sizes = QUICK if self.options.quick else {"cpu": CPU, "cuda": CUDA}[self.kind]
        return sizes[name]

    def source(self, kind: str) -> Source | None:
        return source_of(kind, self.options.data, self.folder)

    def rows(self, kind: str, count: int) -> str:
        """A jsonl file with `count` rows drawn from the source of `kind`."""
        path = self.folder / f"{kind}_{count}.jsonl"
        draw_rows(self.source(kind), count, self.options.seed, path)
        return str(path)

    def classification(self, rows: int) -> dict[str, Any]:
        """Settings of a short training on long-tailed texts, for sections that look into our step. Makes its model if the
        command names none."""
        longest, model = self.size("long_tailed"), self.options.model or str(self.folder / "step_model")
        settings = {name: longest[name] for name in ("batch_size", "max_length")}
        settings |= {"rows": rows, "held_rows": 16, "train_file": self.rows("long_tailed", rows + 16), "learning_rate": 1e-4}
        settings["model"] = model
        if self.options.model is None:
            self.run("classification", ["model"], settings | self.size("classifier"))
        return settings

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
        self, part: str, names: list[str], settings: dict[str, Any], in_turns: bool = False, seconds: float | None = None,
        least_turns: int = 0, processes: int = 1,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Results of contenders of benchmarking.contenders.PART, each in a process of its own (or in several, under torchrun).

        In turns they go on for `seconds` and at least `least_turns`; None: until they are done.
        """
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        threads = max(1, self.options.threads // processes)
        jobs = [f"{part}-{name}" for name in names]
        results = run_group(
            [*command, str(SCRIPT)], jobs, self._common() | settings, self.folder, threads, in_turns, seconds, least_turns,
            all_gpus=processes > 1,
        )  # fmt: skip
        self.loads += [result["others_cpu_share"] for result in results[:1] if result["others_cpu_share"] is not None]
        return results

    def run_together(self, first: str, second: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """Results of two contenders, PART-NAME each, that take turns until the first is done."""
        command, common = [sys.executable, str(SCRIPT)], self._common() | settings
        return run_group(command, [first, second], common, self.folder, self.options.threads, True, until_first=True)

    def _common(self) -> dict[str, Any]:
        return {"seed": self.options.seed, "precision": self.precision, "steps_per_turn": self.per_turn}

    def machine_words(self) -> str:
        m = self.machine
        policy = os.environ.get("OMP_WAIT_POLICY", WAIT_POLICY)
        cores = f"{m['cores']} CPU cores ({m['architecture']}), {self.options.threads} thread(s), OMP_WAIT_POLICY={policy}"
        return f"{m['name']}, {cores}"
