"""A model that stays in memory and predicts without files, for predict.py --text and serve.py."""

import shutil
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from samerun import task_scripts
from samerun.data.batches import EvalBatches
from samerun.errors import InputError
from samerun.evaluate import ROWS, in_order
from samerun.export import hide_library_bars
from samerun.files import temporary_folder
from samerun.kernels.common import row_lengths
from samerun.launch import describe_launch
from samerun.parsing import parse, validate
from samerun.plan import Modes, evaluation_batch
from samerun.runtime import quiet_libraries, set_products
from samerun.task import Predictions, Split, Task

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Predictor:
    """Texts, or images as bytes -> the task's lines of predictions.jsonl, without ids. A mask is the bytes of
    a PNG file."""

    def __init__(self, task: Task) -> None:
        """Raises `InputError` for a model that the task cannot load."""
        arguments, launch = task.arguments, describe_launch(task.arguments)
        if launch.world_size > 1:
            raise InputError(
                f"{launch.world_size} processes were launched, but this needs one; start it with python"
            )
        quiet_libraries(launch.rank)
        set_products(launch)
        hide_library_bars()
        self.task = task
        task.load(launch, Modes(False, False, False))  # reads no rows, only configuration and tokenizer
        self.device, self.half = torch.device(launch.device_type), HALF.get(launch.precision)
        self.model = task.load_exported(arguments.model_name_or_path).to(self.device).eval()
        self.batch = evaluation_batch(arguments, task.evaluates_by_tokens and self.device.type == "cpu")

    def __call__(self, items: Iterable[Any]) -> list[dict[str, Any]]:
        """One line per item. Raises `InputError` for a bad item."""
        # Characters, keys and the names of columns would be predicted.
        if isinstance(items, str | bytes | dict) or hasattr(items, "columns"):
            example = '["a text"] or frame["text"]'
            raise InputError(f"expected texts or images, such as {example}, found a {type(items).__name__}")
        items = list(items)
        if not items:
            return []
        split = self.task.rows_in_memory(items)
        return [self._with_mask(line) for line in self.task.lines(self._predict(split), split)]

    def _with_mask(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line with the mask instead of its file, and without the name of the image, which has none."""
        line.pop("image", None)
        if "mask" in line:
            file = Path(self.task.arguments.output_dir) / line["mask"]
            line["mask"] = file.read_bytes()
            file.unlink()
        return line

    def explain(self, item: Any, line: dict[str, Any]) -> dict[str, Any]:
        return self.task.explain(self.model, item, line)

    @torch.no_grad()
    def _predict(self, split: Split) -> Predictions:
        """As `evaluate.predict`, in one process without an Accelerator."""
        parts = []
        for batch in EvalBatches(split, *self.batch).batches(1, 0):
            autocast = torch.autocast(self.device.type, self.half, enabled=self.half is not None)
            with autocast, row_lengths(batch.lengths):
                output = self.task.predict(self.model, batch.to(self.device))
            real = batch.is_real
            arrays = {name: tensor.cpu()[real].numpy() for name, tensor in output.items()}
            parts.append({ROWS: batch.rows[real].numpy(), **arrays})
        return in_order(parts, len(split))


def load_predictor(name: str, model: str, argv: Sequence[str]) -> Predictor:
    """The predictor of the task script app/`name`.py. `argv`: arguments of the task. Raises `InputError`."""
    arguments_class, task = task_scripts.load(task_scripts.scripts()[name])
    if task.input_kind is None:
        raise InputError(
            f"{model}: a model of {name} predicts files only; use python app/predict.py {model} "
            "FILE --output_dir FOLDER"
        )
    folder = str(temporary_folder("predict_")) if task.input_kind == "images" else "."  # masks are files
    fixed = ["--do_predict", "--report_to", "none", "--model_name_or_path", model, "--output_dir", folder]
    arguments = parse(arguments_class, [*fixed, *argv])
    validate(arguments)
    predictor = Predictor(task(arguments))
    if task.input_kind == "images":
        weakref.finalize(predictor, shutil.rmtree, folder, ignore_errors=True)
    return predictor
