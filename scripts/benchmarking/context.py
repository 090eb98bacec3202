"""The context of a benchmark's sections: options, machine, working folder, and the methods that run
contenders."""

import argparse
import math
import os
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarking.data import Source, find_source, sample_rows
from benchmarking.processes import REPOSITORY, run_group
from benchmarking.sizes import CPU, CUDA, QUICK

COMMAND = [sys.executable, str(REPOSITORY / "scripts" / "bench.py")]
TOOLS = ("lightning", "sentence_transformers")  # optional: scripts/benchmarking/requirements-tools.txt
STEPS_PER_TURN = {"cpu": 1, "cuda": 10}


@dataclass
class Bench:
    """One benchmark run. `other_loads`: the CPU shares of other processes while contenders ran."""

    options: argparse.Namespace
    folder: Path
    machine: dict[str, Any]
    other_loads: list[float] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """cpu or cuda."""
        return self.machine["kind"]

    @property
    def precision(self) -> str:
        return self.options.precision or self.machine["precision"]

    def size(self, name: str) -> dict[str, Any]:
        """A section's sizes, with those that the command line gives."""
        sizes = (QUICK if self.options.quick else {"cpu": CPU, "cuda": CUDA}[self.kind])[name]
        given = {key: getattr(self.options, key, None) for key in sizes}
        return sizes | {key: value for key, value in given.items() if value is not None}

    def source(self, kind: str) -> Source:
        return find_source(kind, self.options.data, self.folder)

    def rows(self, kind: str, count: int) -> str:
        """The path of a jsonl file with `count` random rows of the source of `kind`."""
        path = self.folder / f"{kind}_{count}.jsonl"
        sample_rows(self.source(kind), count, self.options.seed, path)
        return str(path)

    def with_classifier(self, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """(settings with a model, its description): the model of --model, or a new one with random
        weights."""
        if self.options.model is not None:
            return settings | {"model": self.options.model}, self.options.model_name
        size, settings = self.size("classifier"), settings | {"model": str(self.folder / "classifier")}
        self.run([("classification.model", {})], settings | size)
        return settings, "BERT of {layers} layers, {hidden} wide, random weights".format(**size)

    def others(self, section: str, names: tuple[str, ...]) -> list[str]:
        """The contenders among `names` that --contenders selects (default: all that are installed). Raises
        `SystemExit` if none is left."""
        selected = self.options.contenders or [name for name in names if name not in TOOLS or find_spec(name)]
        others = [name for name in names if name in selected]
        if not others:
            raise SystemExit(
                f"error: --contenders selects nothing in section {section}; choose from {', '.join(names)}"
            )
        return others

    def run(
        self, jobs: list[tuple[str, dict[str, Any]]], settings: dict[str, Any], may_fail: bool = False
    ) -> list[Any]:
        """Runs contenders ("MODULE.NAME" of benchmarking.contenders, and settings of its own), each in a
        process, which take turns. Returns their results; with `may_fail` None for one that failed."""
        common = {"seed": self.options.seed, "precision": self.precision, "choice": {}}
        common["steps_per_turn"] = math.gcd(STEPS_PER_TURN[self.kind], settings.get("steps", 1))
        jobs = [(name, common | settings | own) for name, own in jobs]
        results = run_group(COMMAND, jobs, self.folder, self.options.threads, may_fail)
        self.other_loads += [result["others_cpu_share"] for result in results if result][:1]
        return results

    def machine_text(self) -> str:
        m = self.machine
        set_by_user = [
            f"{name}={os.environ[name]}"
            for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OPENBLAS_CORETYPE")
            if name in os.environ
        ]
        cores = f"{m['cores']} CPU cores ({m['architecture']}), {self.options.threads} thread(s)"
        return ", ".join([m["name"], cores, *set_by_user])
