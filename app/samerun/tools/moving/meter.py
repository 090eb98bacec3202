"""What `observer` measures for `samerun plan --measure`: a whole run, whose training is a few steps, two
evaluations and exports, of which the second count, and one checkpoint."""

import json
import math
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch

from samerun.memory import Estimate, estimate
from samerun.plan import BatchShape, derive_batch
from samerun.tools.moving.observer import TIMES

# Batches differ in length, the first one of a training has the longest row, and long rows take more seconds
# for each token. So the steps of an epoch, sorted by `TrainBatches.work`, are cut into five parts of equal
# work, and the middle of each is measured. The mean step follows from their mean seconds for a unit of work.
STEPS = 5
LEAST_SECONDS, MOST_STEPS = 4.0, 100  # short steps are repeated: a single one is mostly noise
PATIENCE = 60.0  # seconds of five steps from which on no other micro-batches are tried


def measure(engine: ModuleType, folder: Path) -> None:
    """Makes trainings of `engine`, `samerun.training`, measure. Rank 0 writes `TIMES` in `folder`."""
    estimates: list[tuple[Estimate, bool]] = []  # of the planned micro-batch; whether twice of it fits
    memory_lines = engine.memory_lines

    def memory_lines_noted(dry_run: Any, layout: Any) -> list[str]:
        expected = estimate(dry_run, layout)
        twice = replace(expected, peak=expected.peak + expected.activations)
        if not layout.launch.use_cpu:
            fits = twice.needed <= torch.cuda.mem_get_info()[1]
        else:
            fits = twice.peak * layout.launch.world_size <= psutil.virtual_memory().available
        estimates.append((expected, fits))
        return memory_lines(dry_run, layout)

    def train(training: Any, _clock: Any) -> None:
        started, once, plan = time.perf_counter(), 0.0, training.plan
        found = {"trials": trials(engine, training, estimates), "export": 0.0}
        if training.validation is not None and hasattr(training.task, "generation"):
            end_titles(training)
        if training.validation is not None and plan.eval_steps is not None:
            once, found["export"] = evaluate_twice(engine, training)
        if plan.save_steps is not None:
            training._save()
        found["seconds"] = time.perf_counter() - started - once
        if training.run.is_main:
            folder.mkdir(exist_ok=True)
            (folder / TIMES).write_text(json.dumps(found), encoding="utf-8")

    engine.memory_lines, engine.Training._run_steps = memory_lines_noted, train


def evaluate_twice(engine: ModuleType, training: Any) -> tuple[float, float]:
    """Evaluates and exports twice, because the first time also imports libraries. Notes the second evaluation
    with its export in `training.evaluation_stalls`. Returns (the first one's seconds above that; seconds of
    the second export)."""
    exports: list[float] = []
    export = training._export

    def export_twice(predictions: Any) -> None:
        for _ in range(2):
            started = time.perf_counter()
            export(predictions)
            exports.append(time.perf_counter() - started)

    training._export = export_twice
    started = time.perf_counter()
    engine.evaluate(training.run, training.model, training.task, training.validation)
    first = time.perf_counter() - started
    training._evaluate_and_save(eval_due=True)
    training._export = export
    training.evaluation_stalls[-1] -= exports[0]
    return max(0.0, first + exports[0] - training.evaluation_stalls[-1]), exports[1]


def end_titles(training: Any) -> None:
    """Gives each generated title as many tokens as the longest reference of an evaluation batch has on
    average: a batch of a trained model goes on until its last title ends, while an untrained model ends none,
    or all at once. The limit is the same for all batches, as the exported model gets it and is checked."""
    task, rows = training.task, training.validation
    lengths = np.diff(rows.split.targets.offsets)  # with the end token
    tokens = 1 + round(expected_maximum(lengths, rows.batch_size))  # with the start token
    config = deepcopy(task.generation.config)
    config.update(min_length=tokens, max_length=tokens)
    task.generation = replace(task.generation, config=config)


def expected_maximum(numbers: np.ndarray, draws: int) -> float:
    """The mean of the largest of so many random draws from `numbers`, which are put back. k of n numbers are
    not larger than the k-th in order, so the probability of a largest one up to it is (k / n)^draws."""
    up_to = (np.arange(len(numbers) + 1) / len(numbers)) ** draws
    return float(np.sort(numbers) @ np.diff(up_to))


def trials(engine: ModuleType, training: Any, estimates: list) -> list[dict[str, Any]]:
    """Seconds of a mean step by micro-batch, the planned one first."""
    run, plan, batches = training.run, training.plan, training.batches
    known = run.from_rank0(lambda: estimates)
    found, seen = [], []
    for shape in shapes(plan.batch, larger=bool(known) and known[0][1]):
        batches.plan = replace(plan, batch=shape)
        epoch = sorted(batches.sample(), key=batches.work)
        done = np.cumsum([batches.work(step) for step in epoch])
        middles = (np.arange(STEPS) + 0.5) / STEPS * done[-1]
        chosen = [epoch[index] for index in np.searchsorted(done, middles)]
        sizes = [batches.shares(step).bounds.tolist() for step in chosen]
        if sizes in seen:
            continue  # a step's rows fit into one micro-batch already
        seen.append(sizes)
        for step in (chosen[-1], chosen[0]):  # warm up
            seconds_of(engine, training, step)
        seconds: list[float] = []
        while not seconds or (len(seconds) < MOST_STEPS and run.any(sum(seconds) < LEAST_SECONDS)):
            seconds += [seconds_of(engine, training, step) for step in chosen]
        work = [batches.work(step) for step in chosen]
        step_seconds = float(np.mean(np.reshape(seconds, (-1, STEPS)) / work)) * batches.mean_work()
        memory = known[0][0].peak if known and not found else None
        found.append({**vars(shape), "step": step_seconds, "memory": memory})
        if run.any(sum(seconds[:STEPS]) > PATIENCE):
            break
    batches.plan = plan
    training.state.train_seconds = found[0]["step"] * plan.total_steps  # the baseline may take a share of it
    return found


def shapes(batch: BatchShape, larger: bool) -> list[BatchShape]:
    """The planned micro-batch, one of half its size and, if `larger`, of twice its size."""
    if batch.max_tokens is not None:
        twice = replace(batch, max_tokens=2 * batch.max_tokens)
    else:
        twice = derive_batch(batch.world_size, batch.global_batch_size, 2 * batch.micro_batch_size)
    return [batch, batch.halved(), *([twice] if larger else [])]


def seconds_of(engine: ModuleType, training: Any, step: int) -> float:
    """Does an optimizer step as `Training._run_steps` does. Returns its seconds; with workers, without
    collating."""
    batches, started = training.batches, time.perf_counter()
    micro_batches = batches[step]
    if training.arguments.dataloader_num_workers:
        started = time.perf_counter()
    loss, _ = training.do_step(micro_batches)
    if not math.isfinite(float(training.run.sum(loss))):
        raise engine.TrainingError(f"step {step + 1}: the loss is not finite")
    training.state.count_tokens(*batches.tokens(step))
    training.state.step += 1
    training._count_update(False)
    return time.perf_counter() - started
