"""The weight files of a model's folder: checks before a run, and their fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from samerun.data.cache import sample_of
from samerun.errors import InputError
from samerun.models.adapters import WEIGHTS as ADAPTER_WEIGHTS
from samerun.models.adapters import base_of

# In the order in which transformers looks for them.
WEIGHTS = tuple(
    f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")
)


def check_weights(arguments: Any) -> None:
    """Raises `InputError` if no weights are named, or if a local folder lacks some of them. This comes before
    the run clears its output folder; loading would come after it."""
    name = arguments.model_name_or_path
    if arguments.from_scratch:
        return
    if name is None:
        raise InputError("no weights: give --model_name_or_path, or --from_scratch to start from random ones")
    folder = Path(name)
    if not folder.is_dir():
        return
    base = base_of(folder)
    if base is not None:
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise InputError(
                f"model {name}: the folder holds no {ADAPTER_WEIGHTS} (it holds: {files_in(folder)})"
            )
        _check_weight_file(folder / ADAPTER_WEIGHTS)
        folder, name = Path(base), f"{name}, base model {base}"
        if not folder.is_dir():
            return
    first = next((folder / file for file in WEIGHTS if (folder / file).is_file()), None)
    if first is None:
        raise InputError(
            f"model {name}: the folder holds no weights, such as {WEIGHTS[0]} (it holds: "
            f"{files_in(folder)}); name another, or start from random weights with --from_scratch"
        )
    for file in sorted(_weight_files(first)):
        _check_weight_file(file)


def model_content(configuration: str | None, weights: str | None) -> dict[str, Any]:
    """A fingerprint of a model's files, independent of their location: file name -> size and a hash of
    samples (`sample_of`), since weights may have gigabytes. For a model of the hub its name."""
    content: dict[str, Any] = {}
    if configuration is not None:
        path = Path(configuration)
        file = path / "config.json" if path.is_dir() else path
        content["config.json"] = sample_of(file) if file.is_file() else configuration
    base = None if weights is None else base_of(weights)
    if base is not None:
        file = Path(weights) / ADAPTER_WEIGHTS
        content |= {file.name: sample_of(file)} | model_content(None, base)
    elif weights is not None and Path(weights).is_dir():
        first = next(Path(weights) / file for file in WEIGHTS if (Path(weights) / file).is_file())
        content |= {file.name: sample_of(file) for file in sorted(_weight_files(first))}
    elif weights is not None:
        content["weights"] = weights
    return content


def check_finite_weights(name: str | Path, model: torch.nn.Module) -> None:
    """Raises `InputError` if a parameter, or a statistic of batch norm, is NaN or infinite: a model for masks
    would turn such logits into masks that look right. `name`: the model's."""
    statistics = [each for each in model.named_buffers() if each[0].endswith(("running_mean", "running_var"))]
    for key, weight in (*model.named_parameters(), *statistics):
        # Minimum and maximum are NaN if any value is; they need no temporary tensor of the weight's size.
        if weight.numel() and not torch.isfinite(torch.stack(weight.detach().aminmax())).all():
            raise InputError(
                f"model {name}: its weight {key} holds NaN or infinity: the model diverged or its "
                "file is damaged"
            )


def _weight_files(first: Path) -> set[Path]:
    """The weight files of a folder; `first`: its single weight file, or its index."""
    if first.suffix != ".json":
        return {first}
    try:
        index = json.loads(first.read_text(encoding="utf-8"))
        return {first.parent / file for file in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{first}: cannot be read as an index of weights ({type(error).__name__}); copy it again"
        ) from None


def _check_weight_file(file: Path) -> None:
    if not file.is_file():
        raise InputError(f"{file}: is missing; the folder's index of weights names it")
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt"):  # compares the header with the file's length
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{file}: is no whole safetensors file ({in_one_line(error)}); copy it again"
            ) from None


def files_in(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"


def in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
