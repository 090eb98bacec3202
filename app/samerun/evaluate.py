"""Evaluation and prediction. Every row of a file counts exactly once, whatever the number of processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samerun import predictions as output
from samerun import signals
from samerun.additional_metrics import compute_additional
from samerun.arguments import FileArguments
from samerun.console import STDOUT, Phase
from samerun.data.batches import EvalBatches
from samerun.data.cache import sample_of
from samerun.errors import StopRequested, TrainingError, in_short, is_out_of_memory
from samerun.kernels.common import row_lengths
from samerun.parsing import as_dict, names_of
from samerun.plan import evaluation_batch
from samerun.run_folder import BEST, code_version, library_versions
from samerun.runtime import Run, join_rows
from samerun.signals import stop_requested
from samerun.start import PER_START
from samerun.task import Batch, Predictions, Split, Task

PARTS = 20
ROWS = ""  # name of the (n,) numbers of rows in the file, beside the arrays of `Task.predict`, (n, ...)


def evaluate(
    run: Run, model: Any, task: Task, rows: EvalBatches, stoppable: bool = False
) -> tuple[dict[str, float | None], Predictions | None]:
    """Evaluates all rows. Returns (metrics, on every process; predictions, None except on rank 0)."""
    predictions, _ = predict(run, model, task, rows, stoppable, label="evaluating")
    with Phase("scoring", shown=run.is_main):
        return run.from_rank0(lambda: score(task, predictions, rows.split)), predictions


def score(task: Task, predictions: Predictions, split: Split) -> dict[str, float | None]:
    """The metrics of the task and of --metrics; None for NaN and infinity. Rank 0 only."""
    scores = task.score(predictions, split)
    if task.additional_metrics:
        references = task.for_evaluate(predictions, split)
        scores |= compute_additional(task.additional_metrics, *references, taken=scores)
    scores = {name: x.item() if hasattr(x, "item") else x for name, x in scores.items()}  # of numpy or torch
    return {name: x if x is not None and math.isfinite(x) else None for name, x in scores.items()}


@torch.no_grad()
def predict(
    run: Run,
    model: Any,
    task: Task,
    rows: EvalBatches,
    stoppable: bool = False,
    *,
    label: str = "predicting",
    saved: SavedParts | None = None,
) -> tuple[Predictions | None, float]:
    """Predicts all rows. Returns (`Task.predict`'s arrays in the file's order, None except on rank 0; rows
    per second). `label`: for the progress bar; `saved`: parts to go on from, and to add to.

    Raises `StopRequested` after a batch if `stoppable` and any process was requested to stop, and
    `TrainingError` if a row is missing or duplicated.
    """
    started = time.perf_counter()
    was_training, dtype = model.training, input_dtype(run, model)
    model.eval()
    arrays: list[dict[str, torch.Tensor]] = []  # of batches of this process that are not gathered yet
    first, before = (0, 0) if saved is None else (saved.num_batches, saved.num_rows)
    processes, done = run.launch.world_size, before
    with Phase(label, "rows", len(rows), before, shown=run.is_main) as phase:
        for num_batches, batch in enumerate(rows.batches(processes, run.launch.rank, first), first + 1):
            predictions = _predict_batch(run, model, task, batch, dtype)
            real = batch.is_real
            predictions = {name: tensor.cpu()[real] for name, tensor in predictions.items()}
            arrays.append({ROWS: batch.rows[real], **predictions})
            if stoppable and stop_requested(run):
                model.train(was_training)
                raise StopRequested("stop requested during an evaluation")
            done += processes * len(arrays[-1][ROWS])
            phase.update(min(done, len(rows)) - phase.done)
            if saved is not None and num_batches % saved.batches == 0 and num_batches < saved.total_batches:
                saved.add(_gather(run, arrays))
                arrays = []
    model.train(was_training)
    last, rate = _gather(run, arrays), (len(rows) - before) / (time.perf_counter() - started)
    if last is None:
        return None, rate
    return in_order([*(saved.parts if saved is not None else []), last], len(rows)), rate


def _gather(run: Run, arrays: list[dict[str, torch.Tensor]]) -> Predictions | None:
    """Gathers the predictions of several batches from all processes; None except on rank 0. Empties
    `arrays`."""
    names = list(arrays[0])
    gathered = {name: run.gather_rows(join_rows([batch.pop(name) for batch in arrays])) for name in names}
    return {name: tensor.numpy() for name, tensor in gathered.items()} if run.is_main else None


def in_order(parts: list[Predictions], num_rows: int) -> Predictions:
    """Joins the parts in the file's order, and empties them. Raises `TrainingError` if a row is missing or
    duplicated."""
    order = np.concatenate([arrays.pop(ROWS) for arrays in parts])
    if not np.array_equal(np.sort(order), np.arange(num_rows)):
        raise TrainingError(
            f"evaluation saw {len(order)} rows instead of each of {num_rows} once: `collate` must give a "
            "batch the numbers of its rows (Batch.rows)"
        )
    places = np.argsort(order)
    return {
        name: join_rows([torch.from_numpy(arrays.pop(name)) for arrays in parts]).numpy()[places]
        for name in list(parts[0])
    }


def _predict_batch(
    run: Run, model: Any, task: Task, batch: Batch, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Calls `Task.predict`. Raises `TrainingError` if memory does not suffice."""
    try:
        # generate() bypasses the prepared model's forward, which would switch autocast on.
        with run.accelerator.autocast(), row_lengths(batch.lengths):
            return task.predict(model, batch.to(run.device, dtype))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        rows, *sizes = batch.shape
        raise TrainingError(
            f"out of memory while predicting a batch of {rows} rows x {'x'.join(map(str, sizes))}. Try a "
            f"smaller --per_device_eval_batch_size ({in_short(error)})"
        ) from error


def eval_rows(run: Run, arguments: Any, task: Task, split: Split) -> EvalBatches:
    """The batches of an evaluation, longest rows first."""
    by_tokens = task.evaluates_by_tokens and run.device.type == "cpu"
    return EvalBatches(split, *evaluation_batch(arguments, by_tokens, split.evaluation_rows))


def input_dtype(run: Run, model: torch.nn.Module) -> torch.dtype | None:
    """The dtype of a model's inputs: that of its weights, which DeepSpeed keeps in half precision. Under FSDP
    fp32, although gathered weights may be in half precision."""
    if run.fsdp is not None:
        return torch.float32
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)


# Parts of a long prediction


class SavedParts:
    """Parts of a large file's predictions, `PREDICTIONS_FILE.unfinished/part-N.npz`, so that an interruption
    costs a twentieth of them. All processes must call the methods; only rank 0 reads and writes, so machines
    need not share a disk."""

    def __init__(self, run: Run, folder: Path, key: str, rows: EvalBatches) -> None:
        """`key`: a hash of everything that the predictions depend on. Parts with another one do not count."""
        self.run, self.folder, self.key = run, folder, key
        self.total_batches = rows.num_batches(run.launch.world_size)  # of a process
        self.batches = -(-self.total_batches // PARTS)  # of a part
        self.parts: list[Predictions] = []  # on rank 0
        num_parts, self.num_rows = run.from_rank0(self._read)
        self.num_batches, self.has_room = num_parts * self.batches, True
        if self.num_rows:
            run.print(f"note           {self.num_rows} of {len(rows)} rows are predicted already ({folder})")

    def _read(self) -> tuple[int, int]:
        # Up to the first part that is missing, damaged by a crash, or of another prediction.
        with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            while True:
                with np.load(self.folder / f"part-{len(self.parts)}.npz") as file:
                    if str(file["key"]) != self.key:
                        self.run.print(f"note           {self.folder} is of another prediction: ignored")
                        break
                    self.parts.append({name[1:]: file[name] for name in file.files if name != "key"})
        return len(self.parts), sum(len(part[ROWS]) for part in self.parts)

    def add(self, part: Predictions | None) -> None:
        """Saves the predictions since the last part; None except on rank 0. Without room on the disk the
        prediction continues, but no more parts are saved."""
        if part is None:
            return
        path = self.folder / f"part-{len(self.parts)}.npz"
        self.parts.append(part)
        if not self.has_room:
            return
        try:
            self.folder.mkdir(exist_ok=True)
            with path.with_suffix(".npz.unfinished").open("wb") as file:
                np.savez(file, key=self.key, **{f"_{name}": values for name, values in part.items()})
            path.with_suffix(".npz.unfinished").replace(path)
        except OSError as error:
            self.has_room = False
            self.run.print(f"note           {path}: cannot be written ({error.strerror})")

    def remove(self) -> None:
        """Removes the parts, once all predictions are written."""
        signals.set_stop_message(signals.NOTHING_TO_SAVE)
        if self.run.is_main:
            with contextlib.suppress(OSError):  # the folder may be missing, or hold other files
                for path in self.folder.glob("*.npz*"):
                    path.unlink()
                self.folder.rmdir()


def open_saved_parts(
    run: Run, arguments: Any, fingerprint: dict[str, Any], rows: EvalBatches
) -> SavedParts | None:
    """Opens the saved parts of this command's test predictions. Returns None if the predictions go to
    standard output, or the rows have no content hash. `fingerprint`: `Data.fingerprint`."""
    path = output.path_of(arguments)
    if rows.split.content is None or run.broadcast(str(path)) in STDOUT:  # on other machines it may differ
        return None
    key = run.from_rank0(lambda: _hash_of_causes(run, arguments, fingerprint, rows))
    resume = " with --resume_from_checkpoint auto" if arguments.modes.train else ""
    signals.set_stop_message(f"the same command{resume} goes on after the last part that was saved")
    return SavedParts(run, path.with_name(f"{path.name}.unfinished"), key, rows)


def _hash_of_causes(run: Run, arguments: Any, fingerprint: dict[str, Any], rows: EvalBatches) -> str:
    """A hash of everything that predictions depend on. The contents of the model and of other files are part
    of it; paths are not."""
    trained = arguments.modes.train
    model = Path(arguments.output_dir) / BEST if trained else Path(arguments.model_name_or_path)
    files = [path for path in sorted(model.iterdir()) if path.is_file()] if model.is_dir() else []
    given, names = as_dict(arguments), names_of(arguments, per_machine=False, reads=False)
    # The files of rows have a content of their own below; others are such as --generation_config.
    settings = set(names_of(arguments, reads=True)) - {field.name for field in fields(FileArguments)}
    files += [Path(given[name]) for name in sorted(settings) if given[name] is not None]
    causes = [
        {name: given[name] for name in sorted({*names} - {*PER_START})},
        [(path.name, sample_of(path)) for path in files if path.is_file()],
        [fingerprint, rows.split.content()],
        [run.launch.world_size, run.device.type, run.launch.precision, code_version(), library_versions()],
    ]
    return hashlib.sha256(json.dumps(causes, default=str).encode()).hexdigest()
