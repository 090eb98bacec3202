"""Exports a model to ONNX and compares ONNX Runtime's logits with torch's on inputs of several sizes.

    samerun export-onnx runs/mine/best            writes runs/mine/best_onnx
    samerun export-onnx runs/mine/best --int8     writes runs/mine/best_onnx_int8, with int8 weights
    samerun export-onnx runs/mine/best --int8 --test_file test.csv [ARGS]

Supports classifiers of texts, of words and of images, and image segmentation. The graph accepts any batch
size and text length. With --test_file it also compares metrics and speed of torch, ONNX Runtime and int8 on
your rows; ARGS are the task's own, such as --text_column. Needs requirements-onnx.txt.

    --output_dir FOLDER   folder for model.onnx (default: MODEL_FOLDER_onnx or MODEL_FOLDER_onnx_int8)

Exit codes: 0 done; 1 ONNX Runtime's logits differ from torch's by more than 1e-4; 2 bad input.
"""

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

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from samerun import runtime, start, task_scripts
from samerun.errors import InputError, in_short
from samerun.evaluate import eval_rows, predict, score
from samerun.main import metrics_table
from samerun.models.adapters import load_plain
from samerun.models.small_cnn import SmallCNN

DIFFERS = 1
TOLERANCE = 1e-4  # of logits; absolute, and relative for those above 1
CLASSES = {
    "classify": transformers.AutoModelForSequenceClassification,
    "tag": transformers.AutoModelForTokenClassification,
    "image_classify": transformers.AutoModelForImageClassification,
    "segment": transformers.AutoModelForSemanticSegmentation,
}
NOT_SUPPORTED = {
    "titlegen": "its decoder generates token by token",
    "segment3d": "MONAI's network is not from transformers",
}
QUANTIZED = ["Gather", "Gemm", "MatMul"]  # int8 convolutions are slow in ONNX Runtime
MAX_TOKENS = 512  # of a text in the comparison
SPEED = "rows per second of CPU time"  # which is independent of other processes


class OnnxModel(torch.nn.Module):
    """An exported graph under ONNX Runtime on the CPU, with torch's number of threads. Called like the torch
    model."""

    def __init__(self, exported: Any) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.exported = exported.to("cpu", session_options=options)
        (component,) = exported.components.values()
        self.input_names = list(component.metadata.kwargs)

    def forward(self, **inputs: torch.Tensor) -> Any:
        missing = set(self.input_names) - inputs.keys()  # token_type_ids, which a run leaves out
        return self.exported(**inputs, **{name: torch.zeros_like(inputs["input_ids"]) for name in missing})


def load(folder: Path, task: str) -> tuple[torch.nn.Module, Any]:
    """(the model of an exported folder; its tokenizer or image processor, None for the small CNN). Raises
    `InputError` for a model that cannot be exported to ONNX."""
    model = load_plain(folder, CLASSES[task])
    if isinstance(model, SmallCNN):
        return model.eval(), None
    if task not in ("classify", "tag"):
        return model.eval(), AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if getattr(model.config, "attention_type", None) == "block_sparse":
        # The longest text with full attention.
        full = (5 + 2 * model.config.num_random_blocks) * model.config.block_size
        if tokenizer.model_max_length > full:
            raise InputError(
                f"{folder}: BigBird's sparse attention to texts of {tokenizer.model_max_length} tokens "
                "cannot be exported: its blocks depend on the length. Train with --max_length "
                f"{full} or less, or with another encoder"
            )
        model.bert.set_attention_type("original_full")
    return model.eval(), tokenizer


def inputs_of(model: Any, processor: Any, rows: int, size: int) -> dict[str, torch.Tensor]:
    """Random inputs: `rows` texts of `size` tokens, the last one half as long, or `rows` images of the
    model's own size."""
    generator = np.random.default_rng(size)
    if processor is None:
        shape = (rows, model.config.num_channels, *model.config.image_size)
        return {"pixel_values": torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))}
    if not hasattr(processor, "model_max_length"):
        edges = (96, 128) if processor.do_resize else (processor.size["height"], processor.size["width"])
        images = list(map(Image.fromarray, generator.integers(0, 256, (rows, *edges, 3), dtype=np.uint8)))
        return {"pixel_values": processor(images, return_tensors="pt")["pixel_values"]}
    ids = torch.from_numpy(generator.integers(len(processor) // 2, len(processor), (rows, size)))
    mask = torch.ones_like(ids)
    mask[-1, (size + 1) // 2 :] = 0
    ids = ids.where(mask.bool(), torch.tensor(processor.pad_token_id))
    inputs = {"input_ids": ids, "attention_mask": mask}
    return {name: inputs.get(name, torch.zeros_like(ids)) for name in processor.model_input_names}


def export(folder: Path, model: Any, processor: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(the model as an ONNX graph for any batch size and text length, the inputs that it was traced with).
    Raises `InputError`."""
    try:
        from transformers.exporters import OnnxConfig
        from transformers.exporters.base import ExportedModel  # noqa: F401 - new in transformers 5.23
        from transformers.exporters.exporter_onnx import OnnxExporter

        exporter = OnnxExporter()
    except ImportError as error:
        raise InputError(f"{in_short(error)}: pip install -r requirements-onnx.txt") from None
    inputs = inputs_of(model, processor, 2, min(64, longest(model, processor) // 2 + 1))
    dynamic = {
        name: {0: torch.export.Dim.AUTO, **({1: torch.export.Dim.AUTO} if x.ndim == 2 else {})}
        for name, x in inputs.items()
    }
    try:
        exported = exporter.export(model, inputs, OnnxConfig(dynamic_shapes=dynamic))
    except Exception as error:  # torch's, onnxscript's and transformers' own
        raise InputError(
            f"{folder}: torch cannot export {type(model).__name__} to ONNX ({in_short(error)})"
        ) from error
    for component in exported.components.values():
        for node in component.program.graph:
            node.metadata_props.clear()  # traces, with the folders of this machine
    return exported, inputs


def longest(model: Any, processor: Any) -> int:
    """Tokens of the longest text in the comparison."""
    positions = getattr(model.config, "max_position_embeddings", None) or MAX_TOKENS
    return min(getattr(processor, "model_max_length", MAX_TOKENS), positions, MAX_TOKENS)


@torch.no_grad()
def difference(model: Any, onnx: OnnxModel, processor: Any) -> float:
    """The largest difference of ONNX Runtime's logits from torch's over several lengths and batch sizes;
    relative for logits above 1."""
    tokens, differences = longest(model, processor), []
    for rows, size in ((1, 1), (1, tokens), (3, tokens // 2 + 1), (5, min(17, tokens))):
        inputs = inputs_of(model, processor, rows, size)
        expected = model(**inputs).logits
        differences.append(((onnx(**inputs).logits - expected).abs() / expected.abs().clamp(min=1)).max())
    return float(torch.stack(differences).max())


def quantized(exported: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """The graph with int8 weights, one scale per channel, and dynamically quantized activations."""
    from transformers.exporters import OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer
    from transformers.exporters.base import ExportedComponent, ExportedModel

    (component,) = exported.components.values()
    config = OnnxRuntimeDynamicConfig(op_types_to_quantize=QUANTIZED, per_channel=True)
    program = OnnxRuntimeQuantizer(config).quantize(component.program, inputs, exported.export_format)
    components = {"model": ExportedComponent(program, component.metadata)}
    return ExportedModel(components, exported.export_format, exported.config)


def save(exported: Any, folder: Path, source: Path, processor: Any) -> float:
    """Writes graph, weights, configuration and tokenizer or image processor; `folder` appears only when all
    are complete. Returns the size of graph and weights in megabytes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as parent:
        unfinished = Path(parent) / folder.name
        exported.config, config = None, exported.config
        exported.save_pretrained(unfinished)
        exported.config = config
        shutil.copy(source / "config.json", unfinished)
        if processor is not None:
            processor.save_pretrained(unfinished)
        unfinished.rename(folder)
    return sum(file.stat().st_size for file in folder.glob("model.onnx*")) / 1e6


def measure(folder: Path, task_name: str, graphs: dict[str, OnnxModel], argv: list[str]) -> list[str]:
    """The lines of a table: metrics and `SPEED`, for torch's model and the graphs, on a test file."""
    with tempfile.TemporaryDirectory() as run_folder:
        fixed = ["--do_predict", "--use_cpu", "--model_name_or_path", str(folder), "--output_dir", run_folder]
        script, words = task_scripts.scripts()[task_name], [*fixed, "--report_to", "none", *argv]
        arguments, task_class = task_scripts.read_command(script, words)
        task, launch = task_class(arguments), start.check(arguments)
        split = task.load(launch, arguments.modes).splits["test"]
        if task_name == "classify":  # a graph computes one window; this pools the windows of a document
            graphs = {
                name: task.long_documents.prepare(graph, task.tokenizer.padding_side)
                for name, graph in graphs.items()
            }
        run = runtime.start(launch, None)
        rows, models = eval_rows(run, arguments, task, split), {"torch": task.load_exported(folder), **graphs}
        scores = {}
        for name, model in models.items():
            began = time.process_time()
            predictions, _ = predict(run, model, task, rows)
            speed = len(split) / (time.process_time() - began)
            scores[name] = (score(task, predictions, split) if split.labelled else {}) | {SPEED: speed}
    return metrics_table(scores, (*task.shown_metrics, SPEED))


def main(argv: list[str]) -> int:
    """Returns the exit code. Raises `InputError`."""
    parser = task_scripts.parser(__doc__, allow_abbrev=False)
    parser.add_argument("model", type=Path, metavar="MODEL_FOLDER", help="best/ of a run, or one like it")
    parser.add_argument("--output_dir", type=Path, metavar="FOLDER")
    parser.add_argument("--int8", action="store_true", help="int8 weights: a quarter of the size")
    parser.add_argument("--test_file", help="rows to compare quality and time on")
    options, rest = parser.parse_known_args(argv)
    if rest and options.test_file is None:
        raise InputError(f"unknown arguments {' '.join(rest)}; a task's own arguments need --test_file")
    task = task_scripts.task_of(options.model)
    if task not in CLASSES:
        raise InputError(
            f"{options.model} is a model of {task}, which cannot be exported: {NOT_SUPPORTED[task]}. "
            f"Supported: {', '.join(CLASSES)}"
        )
    name = options.model.resolve().name + ("_onnx_int8" if options.int8 else "_onnx")
    output = options.output_dir or options.model.resolve().with_name(name)
    if output.exists():
        raise InputError(f"{output} already exists; remove it or name another --output_dir")
    transformers.utils.logging.disable_progress_bar()
    model, processor = load(options.model, task)
    with quiet():
        exported, inputs = export(options.model, model, processor)
    graphs = {"onnx": OnnxModel(exported)}
    largest = difference(model, graphs["onnx"], processor)
    print(f"difference     {largest:.1e} from torch's logits at most")
    if not largest <= TOLERANCE:
        problem = f"more than {TOLERANCE:g}; nothing was written. Please report this with config.json"
        print(f"error: {problem}", file=sys.stderr)
        return DIFFERS
    if options.int8:
        with quiet():
            exported = quantized(exported, inputs)
        graphs["int8"] = OnnxModel(exported)
    size = save(exported, output, options.model, processor)
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    print(f"written        {output} ({size:.1f} MB; torch's weights are {weights:.1f} MB)")
    if options.test_file is not None:
        words = ["--test_file", options.test_file, "--log_level=warning", *rest]
        print(*measure(options.model, task, graphs, words), sep="\n")
    return 0


@contextlib.contextmanager
def quiet() -> Any:
    """Hides the exporters' logs, output and warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
