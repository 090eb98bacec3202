#!/usr/bin/env python3
"""An exported model as ONNX, compared with torch on inputs of several sizes.

    python scripts/export_onnx.py runs/mine/best                  writes runs/mine/best_onnx
    python scripts/export_onnx.py runs/mine/best --int8           writes runs/mine/best_onnx_int8: int8 weights
    python scripts/export_onnx.py runs/mine/best --int8 --test_file test.csv [ARGS]

Classifiers of texts and pictures and segmentation of pictures; the graph takes any batch size and any length of texts. With
--test_file it prints what ONNX Runtime, and int8, cost in quality and gain in time on your rows, beside torch; ARGS are the
task's own, such as --text_column. Needs requirements-onnx.txt.

    --output_dir FOLDER   where model.onnx goes (default: MODEL_FOLDER_onnx or MODEL_FOLDER_onnx_int8)

Exit codes: 0 done; 1 ONNX Runtime's logits differ from torch's by more than 1e-4; 2 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY / "app")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from moving.task_script import load_task_script  # noqa: E402
from PIL import Image  # noqa: E402
from predict import task_of  # noqa: E402
from transformers import AutoImageProcessor, AutoTokenizer  # noqa: E402

from finetune import preflight  # noqa: E402
from finetune.arguments.parsing import parse, validate  # noqa: E402
from finetune.errors import EXIT_BAD_INPUT, InputError, in_short  # noqa: E402
from finetune.launching import processes  # noqa: E402
from finetune.models.adapters import loadable  # noqa: E402
from finetune.models.small_cnn import load_small_cnn, read_config  # noqa: E402
from finetune.training.evaluation import predict  # noqa: E402
from finetune.training_setup import eval_rows  # noqa: E402

DIFFERS = 1
TOLERANCE = 1e-4  # of logits; absolute, and relative for those above 1
CLASSES = {
    "classify": transformers.AutoModelForSequenceClassification,
    "image_classify": transformers.AutoModelForImageClassification,
    "segment": transformers.AutoModelForSemanticSegmentation,
}
QUANTIZED = ["Gather", "Gemm", "MatMul"]  # embeddings and linear layers; ONNX Runtime computes int8 convolutions slowly
MOST_TOKENS = 512  # of a text that is compared


class OnnxModel(torch.nn.Module):
    """An exported graph under ONNX Runtime on the CPU, in as many threads as torch, called like the model that it is of."""

    def __init__(self, exported: Any) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.exported = exported.to("cpu", session_options=options)
        (component,) = exported.components.values()
        self.taken = list(component.metadata.kwargs)

    def forward(self, **inputs: torch.Tensor) -> Any:
        missing = [name for name in self.taken if name not in inputs]  # token types, which a run leaves out: all are 0
        return self.exported(**inputs, **{name: torch.zeros_like(inputs["input_ids"]) for name in missing})


def load(folder: Path, task: str) -> tuple[torch.nn.Module, Any]:
    """(the model of an exported folder, its tokenizer or image processor; None for the small CNN). Raises `InputError` for a
    model that ONNX cannot hold."""
    small = read_config(folder)
    if small is not None:
        return load_small_cnn(folder, small).eval(), None
    found = loadable(folder, CLASSES[task])
    model = CLASSES[task].from_pretrained(found) if isinstance(found, str) else found
    if task != "classify":
        return model.eval(), AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if getattr(model.config, "attention_type", None) == "block_sparse":
        full = (5 + 2 * model.config.num_random_blocks) * model.config.block_size  # up to here BigBird's attention is full
        if tokenizer.model_max_length > full:
            raise InputError(
                f"{folder}: BigBird's attention to texts of {tokenizer.model_max_length} tokens is sparse, in blocks that "
                f"depend on the length; an ONNX graph cannot. Train with --max_length {full} or less, or another encoder"
            )
        model.bert.set_attention_type("original_full")
    return model.eval(), tokenizer


def inputs_of(model: Any, processor: Any, rows: int, size: int) -> dict[str, torch.Tensor]:
    """Inputs of so many random rows: texts of `size` tokens, the last one half as long, or pictures of the model's own size."""
    chance = np.random.default_rng(size)
    if processor is None:
        shape = (rows, model.config.num_channels, *model.config.image_size)
        return {"pixel_values": torch.from_numpy(chance.standard_normal(shape, dtype=np.float32))}
    if not hasattr(processor, "model_max_length"):
        edges = (96, 128) if processor.do_resize else (processor.size["height"], processor.size["width"])
        pictures = [Image.fromarray(chance.integers(0, 256, (*edges, 3), dtype=np.uint8)) for _ in range(rows)]
        return {"pixel_values": processor(pictures, return_tensors="pt")["pixel_values"]}
    ids = torch.from_numpy(chance.integers(len(processor) // 2, len(processor), (rows, size)))
    mask = torch.ones_like(ids)
    mask[-1, (size + 1) // 2 :] = 0
    known = {"input_ids": ids.where(mask.bool(), torch.tensor(processor.pad_token_id)), "attention_mask": mask}
    return {name: known.get(name, torch.zeros_like(ids)) for name in processor.model_input_names}


def export(folder: Path, model: Any, processor: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(the model as a graph for any batch size and any length of texts, the inputs that it was traced with). Raises
    `InputError`."""
    try:
        from transformers.exporters import OnnxConfig
        from transformers.exporters.exporter_onnx import OnnxExporter

        exporter = OnnxExporter()
    except ImportError as error:
        raise InputError(f"{in_short(error)}: pip install -r requirements-onnx.txt") from None
    inputs = inputs_of(model, processor, 2, min(64, longest(model, processor) // 2 + 1))
    free = {
        name: {0: torch.export.Dim.AUTO, **({1: torch.export.Dim.AUTO} if x.ndim == 2 else {})} for name, x in inputs.items()
    }
    try:
        return exporter.export(model, inputs, OnnxConfig(dynamic_shapes=free)), inputs
    except Exception as error:  # torch's, onnxscript's and transformers' own
        raise InputError(f"{folder}: torch cannot export {type(model).__name__} to ONNX ({in_short(error)})") from error


def longest(model: Any, processor: Any) -> int:
    """Tokens of the longest texts that are compared."""
    known = (getattr(processor, "model_max_length", None), getattr(model.config, "max_position_embeddings", None), MOST_TOKENS)
    return min(number for number in known if number is not None)


@torch.no_grad()
def difference(model: Any, onnx: OnnxModel, processor: Any) -> float:
    """How far ONNX Runtime's logits are from torch's at most, for several lengths and batch sizes; relative for logits above
    1."""
    most, largest = longest(model, processor), 0.0
    for rows, size in ((1, 1), (1, most), (3, most // 2 + 1), (5, min(17, most))):
        inputs = inputs_of(model, processor, rows, size)
        expected = model(**inputs).logits
        largest = max(largest, float(((onnx(**inputs).logits - expected).abs() / expected.abs().clamp(min=1)).max()))
    return largest


def quantized(exported: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """The graph with int8 weights, one scale per channel; activations are quantized as they come."""
    from transformers.exporters import OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer
    from transformers.exporters.base import ExportedComponent, ExportedModel

    (component,) = exported.components.values()
    quantizer = OnnxRuntimeQuantizer(OnnxRuntimeDynamicConfig(op_types_to_quantize=QUANTIZED, per_channel=True))
    program = quantizer.quantize(component.program, inputs, exported.export_format)
    return ExportedModel({"model": ExportedComponent(program, component.metadata)}, exported.export_format, exported.config)


def save(exported: Any, folder: Path, source: Path, processor: Any) -> float:
    """Writes graph, weights, configuration and tokenizer or image processor to a folder that is whole or absent. Returns the
    megabytes of graph and weights."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as unfinished:
        place = Path(unfinished) / folder.name
        exported.config, config = None, exported.config
        exported.save_pretrained(place)
        exported.config = config
        shutil.copy(source / "config.json", place)
        if processor is not None:
            processor.save_pretrained(place)
        place.rename(folder)
    return sum(file.stat().st_size for file in folder.glob("model.onnx*")) / 1e6


def measure(folder: Path, task_name: str, graphs: dict[str, OnnxModel], argv: list[str]) -> list[str]:
    """Lines of a table: the task's metrics of torch's model and of the graphs on a test file, and rows per second of CPU
    time."""
    arguments_class, task_class = load_task_script(REPOSITORY / "app" / f"{task_name}.py")
    with tempfile.TemporaryDirectory() as place:
        known = ["--do_predict", "--use_cpu", "--model_name_or_path", str(folder), "--output_dir", place, "--report_to", "none"]
        arguments = parse(arguments_class, [*known, *argv])
        validate(arguments)
        task, launch = task_class(arguments), preflight.check(arguments)
        split = task.load(launch, arguments.modes).splits["test"]
        if task_name == "classify":  # a graph takes one window; a document's are pooled around it
            graphs = {name: task.long_documents.prepare(graph, task.tokenizer.padding_side) for name, graph in graphs.items()}
        run = processes.start(launch, None)
        rows, models = eval_rows(run, arguments, task, split), {"torch": task.load_exported(folder), **graphs}
        seconds, scores = {}, {}
        for name, model in models.items():
            began = time.process_time()  # what else the machine does meanwhile counts for nothing
            predictions, _ = predict(run, model, task, rows)
            seconds[name] = time.process_time() - began
            scores[name] = task.all_scores(predictions, split) if split.labelled else {}
    shown = [metric for metric in task.shown_metrics if metric in scores["torch"]]
    table = {metric: [scores[name][metric] for name in models] for metric in shown}
    table["rows per second of CPU time"] = [len(split) / seconds[name] for name in models]
    width = max(map(len, table)) + 2
    lines = [f"{'':<{width}}{''.join(f'{name:>12}' for name in models)}"]
    for row, values in table.items():
        lines.append(f"{row:<{width}}{''.join('           -' if v is None else f'{v:>12.4f}' for v in values)}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code. Raises `InputError`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, metavar="MODEL_FOLDER", help="the folder best/ of a run, or one like it")
    parser.add_argument("--output_dir", type=Path, help="default: MODEL_FOLDER_onnx or MODEL_FOLDER_onnx_int8")
    parser.add_argument("--int8", action="store_true", help="int8 weights: a quarter of the size")
    parser.add_argument("--test_file", help="rows to compare quality and time on")
    given, rest = parser.parse_known_args(argv)
    if rest and given.test_file is None:
        raise InputError(f"unknown arguments without --test_file: {' '.join(rest)}")
    task = task_of(given.model)
    if task not in CLASSES:
        why = "its decoder writes token by token" if task == "titlegen" else "MONAI's network is not of transformers"
        raise InputError(
            f"{given.model} is a model of {task}, which is not exported to ONNX: {why}. Known: {', '.join(CLASSES)}"
        )
    name = given.model.resolve().name + ("_onnx_int8" if given.int8 else "_onnx")
    output = given.output_dir or given.model.resolve().with_name(name)
    if output.exists():
        raise InputError(f"{output} is there already; remove it, or name another --output_dir")
    transformers.utils.logging.disable_progress_bar()
    model, processor = load(given.model, task)
    with quiet():
        exported, inputs = export(given.model, model, processor)
    graphs = {"onnx": OnnxModel(exported)}
    found = difference(model, graphs["onnx"], processor)
    print(f"difference     {found:.1e} from torch's logits at most")
    if not found <= TOLERANCE:
        print(f"error: more than {TOLERANCE:g}; nothing was written. Please report this with config.json", file=sys.stderr)
        return DIFFERS
    if given.int8:
        with quiet():
            exported = quantized(exported, inputs)
        graphs["int8"] = OnnxModel(exported)
    size = save(exported, output, given.model, processor)
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    print(f"written        {output} ({size:.1f} MB; torch's weights are {weights:.1f} MB)")
    if given.test_file is not None:
        print(*measure(given.model, task, graphs, ["--test_file", given.test_file, "--quiet", *rest]), sep="\n")
    return 0


@contextlib.contextmanager
def quiet() -> Any:
    """Keeps to itself what the exporters say of their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as problem:
        print(*(f"error: {line}" for line in problem.problems), sep="\n", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
