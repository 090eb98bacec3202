"""README.md of a run: a model card with metadata for the hub."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from samerun.console import number_text, say
from samerun.data.splits import parts_of
from samerun.files import write_text
from samerun.run_folder import BEST, CARD, CARD_MARK, METRICS, PLOTS, RUN_FILE, foreign, read_metrics
from samerun.task import ModelCard

SELECTED = (
    "The best model was selected on the validation rows, so their metrics are optimistic. The test rows "
    "selected nothing."
)
CALIBRATED = (
    "Validation metrics are of the model before --calibration; test metrics, and best/, are after it."
)
# Before a task's code, where best/ holds an adapter: transformers' pipelines do not read that.
MERGE = """import shutil
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, {model}
base, config = PeftConfig.from_pretrained("best").base_model_name_or_path, AutoConfig.from_pretrained("best")
model = {model}.from_pretrained(base, config=config, ignore_mismatched_sizes=True)
PeftModel.from_pretrained(model, "best").merge_and_unload().save_pretrained("merged")
shutil.copytree("best", "merged", ignore=shutil.ignore_patterns("adapter_*"), dirs_exist_ok=True)
"""
MAX_ROWS = 100  # of a table of labels; metrics.json has all
SPLITS = {"eval": "validation", "test": "test"}  # prefix of metrics -> split
ROWS = {"eval": "train_evaluation_rows", "test": "test_rows"}  # prefix of metrics -> number of its rows


def write_card(folder: Path, card: ModelCard, arguments: Any) -> None:
    """Writes the model card of the run in `folder` from its run.json, metrics.json and plots/, and from the
    task's part.

    `arguments`: for their defaults; the card shows the run's that differ from these.
    """
    run, values = read_metrics(folder / RUN_FILE), read_metrics(folder / METRICS)
    resolved = run["arguments"]
    base = None if resolved.get("from_scratch") else _hub_id(resolved.get("model_name_or_path"))
    dataset = _hub_id(parts_of(resolved.get("dataset_name") or "")[0])
    metadata = resolved.get("model_card") or []
    results = [] if card.pipeline_tag is None else _results(card.pipeline_tag, dataset, values, card.metrics)
    is_adapter = (folder / BEST / "adapter_config.json").exists()
    library = "peft" if is_adapter else "transformers"
    data = ModelCardData(
        library_name=library if card.pipeline_tag else None,
        pipeline_tag=card.pipeline_tag,
        license=next((part.removeprefix("license=") for part in metadata if "=" in part), None),
        language=[part for part in metadata if "=" not in part] or None,
        base_model=base,
        base_model_relation="adapter" if is_adapter and base else None,
        datasets=dataset,
        model_name=card.title if results else None,
        eval_results=results or None,
    )
    front = ["---", data.to_yaml(), "---", ""] if data.to_dict() else []
    usage, limits = card.usage, [*card.limits]
    if values.get("best_metric") is not None:
        limits.append(SELECTED)
    if resolved.get("calibration", "none") != "none":
        limits.append(CALIBRATED)
    limits.append(CARD_MARK)
    if is_adapter:
        config = json.loads((folder / BEST / "config.json").read_text(encoding="utf-8"))
        if Path(resolved.get("model_name_or_path") or "").exists():
            limits.append("The adapter's base was a local folder: name yours in best/adapter_config.json.")
        usage = MERGE.format(model=config["architectures"][0]) + usage.replace('"best"', '"merged"')
        if resolved.get("quantize"):
            bits = f"The adapter was trained on the base model in {resolved['quantize']} bits; the code above"
            limits.append(f"{bits} merges it into the unrounded one, which gives slightly other numbers.")
    code = ["```python", usage, "```", ""] if usage else []
    prefixes = [p for p in SPLITS if any(values.get(f"{p}_{metric}") is not None for metric in card.metrics)]
    rows = [["rows", *(values.get(ROWS[prefix]) for prefix in prefixes)]]
    rows += [[metric, *(values.get(f"{prefix}_{metric}") for prefix in prefixes)] for metric in card.metrics]
    body = [*front, f"# {card.title}", "", *code, "## Metrics", ""]
    body += markdown_table(["metric", *(SPLITS[prefix] for prefix in prefixes)], rows)
    plots = [f"![{path.stem}]({PLOTS}/{path.name})\n" for path in sorted((folder / PLOTS).glob("*.png"))]
    body += ["", *plots, *card.sections, "", "## Training", "", *_facts(run, values), ""]
    changed = yaml.safe_dump(_changed(arguments, resolved), allow_unicode=True, sort_keys=False)
    body += ["```yaml", changed.strip(), "```", ""]
    body += ["## Limits", "", *(f"- {limit}" for limit in limits), ""]
    if foreign(folder, CARD):
        say(f"note           no model card is written: {folder / CARD} is not a run's file")
        return
    write_text(folder / CARD, "\n".join(body) + "\n")


def _hub_id(name: str | None) -> str | None:
    """The name if it can be a repository on the hub; None for a local path, which the hub rejects and others
    must not see."""
    if not name or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _changed(arguments: Any, resolved: dict[str, Any]) -> dict[str, Any]:
    """The values in `resolved`, of run.json, that differ from the defaults of `arguments`, without those of a
    single machine. Paths are shortened to file names."""
    changed = {}
    for field in dataclasses.fields(arguments):
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        value = resolved.get(field.name, default)
        if value != default and (field.metadata["reads"] or not field.metadata["per_machine"]):
            parts = value if isinstance(value, list) else [value]
            if field.metadata["path"]:
                parts = [_hub_id(part) or Path(part).name for part in parts]
            changed[field.name] = parts if isinstance(value, list) else parts[0]
    return changed


def _results(
    pipeline_tag: str, dataset: str | None, values: dict[str, Any], metrics: Sequence[str]
) -> list[EvalResult]:
    data, results = dataset or "custom", []
    for prefix, split in SPLITS.items():
        for metric in metrics:
            name, value = f"{prefix}_{metric}", values.get(f"{prefix}_{metric}")
            if value is not None:
                own = {"metric_type": metric, "metric_name": name, "metric_value": value}
                results.append(EvalResult(pipeline_tag, data, data, dataset_split=split, **own))
    return results


def markdown_table(header: list[str], rows: list[list[Any]]) -> list[str]:
    """Lines of a Markdown table. Floats get four decimals, None is a dash."""
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in [header, *rows]]
    return [lines[0], "|" + " --- |" * len(header), *lines[1:]]


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """`markdown_table` of rows with the same keys, of which "support" counts examples: of many, the MAX_ROWS
    most frequent ones; [] without rows."""
    if not rows:
        return []
    shown = sorted(rows, key=lambda row: -row["support"])[:MAX_ROWS] if len(rows) > MAX_ROWS else rows
    table = markdown_table(list(rows[0]), [list(row.values()) for row in shown])
    return table if shown is rows else [f"The {MAX_ROWS} most frequent of {len(rows)}.", "", *table]


def section(title: str, rows: Sequence[dict[str, Any]] | None) -> list[str]:
    """`table_of` under a heading; [] without rows."""
    return [f"## {title}", "", *table_of(rows), ""] if rows else []


def class_tables(folder: Path, classes: Sequence[str], columns: dict[str, str]) -> list[str]:
    """Markdown tables of the metrics of each class, for validation and test, of the run in `folder`.
    `columns`: metric -> header."""
    metrics, lines = read_metrics(folder / METRICS), []
    for prefix, split in SPLITS.items():
        if any(f"{prefix}_mean_{metric}" in metrics for metric in columns):
            rows = [[name, *(metrics.get(f"{prefix}_{x}_{name}") for x in columns)] for name in classes]
            lines += [f"## Classes ({split})", "", *markdown_table(["class", *columns.values()], rows), ""]
    return lines


def _cell(value: Any) -> str:
    """The text of a cell, in which names and texts are no HTML, links or further cells."""
    return re.sub(r"([|\[\]<>])", r"\\\1", number_text(value)).replace("\n", " ")


def _facts(run: dict[str, Any], values: dict[str, Any]) -> list[str]:
    plan, resolved = run["plan"], run["arguments"]
    sharded = f", ZeRO-{run['zero_stage']}" if run["zero_stage"] else ", FSDP2" if run.get("fsdp") else ""
    best = f"best at step {values.get('best_step')}"
    return [
        f"- {plan['num_rows']} training rows, {values.get('train_steps')} optimizer steps of "
        f"{plan['batch']['global_batch_size']} rows, {best}",
        f"- learning rate {plan['learning_rate']:g} ({plan['lr_scheduler_type']}, {plan['warmup_steps']} "
        f"warm-up steps), weight decay {resolved['weight_decay']:g}, clipping {resolved['max_grad_norm']:g}, "
        f"seed {resolved['seed']}",
        f"- {run['world_size']} process(es) on {run.get('hardware', run['device'])}, "
        f"{run['launcher']}{sharded}, mixed precision {run['mixed_precision']}",
        "- " + ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version),
        *(f"- changed after step {x['step']}: {'; '.join(x['changes'])}" for x in run.get("changes", [])),
    ]
