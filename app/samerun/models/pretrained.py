"""Configurations, models and weight files of transformers: checked and loaded, with clear errors."""

import copy
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# Every model needs modeling_utils; imported before garbage collection settles.
import transformers.modeling_utils  # noqa: F401
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from samerun.data.cache import sample_of
from samerun.errors import InputError, is_out_of_memory, nearest
from samerun.models.adapters import WEIGHTS as ADAPTER_WEIGHTS
from samerun.models.adapters import base_of, merge_adapter

LAYER_NUMBER = re.compile(r"\.\d+\.")
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# In the order in which transformers looks for them.
WEIGHTS = tuple(
    f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")
)


def load_config(arguments: Any, **overrides: Any) -> Any:
    """The model's configuration. Raises `InputError` if it cannot be loaded."""
    name = arguments.config_name or arguments.model_name_or_path
    if name is None:
        raise InputError("no model: give --model_name_or_path, or --from_scratch with --config_name")
    if not (Path(name) / "config.json").is_file():
        name = base_of(name) or name
    if arguments.attn_implementation is not None:
        overrides["attn_implementation"] = arguments.attn_implementation
    try:
        config = AutoConfig.from_pretrained(name, **arguments.hub_options(name), **overrides)
    except Exception as error:
        raise InputError(explain_failed_load("configuration", name, error)) from error
    for size in SIZES:
        value = getattr(config, size, None)
        if isinstance(value, int) and value < 1:
            raise InputError(f"configuration {name}: {size} is {value}, expected at least 1")
    return config


def check_model(arguments: Any, config: Any, mapping: Any, can: str) -> None:
    """Raises `InputError` unless transformers' `mapping` has a model for this configuration, and the weights
    are there. `can`: what its models can do, for the message. Models with code of their own
    (--trust_remote_code) may be of any kind."""
    if type(config) not in mapping and not arguments.trust_remote_code:
        name = arguments.config_name or arguments.model_name_or_path
        raise InputError(f"{name}: the model ({config.model_type}) cannot {can}; name another")
    check_weights(arguments)


def load_model(auto_class: Any, arguments: Any, config: Any) -> Any:
    """The model in fp32: pretrained, or with random weights (--from_scratch). The caller seeds torch. Raises
    `InputError` if the weights cannot be loaded."""
    return load_model_and_new_names(auto_class, arguments, config)[0]


def load_model_and_new_names(auto_class: Any, arguments: Any, config: Any) -> tuple[Any, set[str]]:
    """(model of `load_model`, names of its parameters without pretrained values). Under
    `torch.device("meta")` no weights are read."""
    if arguments.from_scratch or on_meta():
        try:
            model = auto_class.from_config(config, trust_remote_code=arguments.trust_remote_code).float()
        except (ImportError, ValueError) as error:
            if arguments.attn_implementation is None:
                name = arguments.config_name or arguments.model_name_or_path
                raise InputError(explain_failed_load("model", name, error)) from error
            problem = f"--attn_implementation {arguments.attn_implementation}: {in_one_line(error)}"
            raise InputError(f"{problem}; leave it out, or name one that the model has") from error
        names = {name for name, _ in model.named_parameters()}
        return model, names if arguments.from_scratch else head_names(model)
    check_weights(arguments)
    name = arguments.model_name_or_path
    # Without a dtype transformers would load a half-precision checkpoint in half precision.
    options = {"config": config, "dtype": torch.float32, **arguments.hub_options(name)}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    base = base_of(name)
    try:
        model, loading = auto_class.from_pretrained(base or name, **options)
        # Sines, as Pegasus' positions, are computed, so files need not have them.
        sines = [key for key, module in model.named_modules() if "Sinusoidal" in type(module).__name__]
        loading["missing_keys"] = set(loading["missing_keys"]) - {f"{key}.weight" for key in sines}
        model, adapter_names = merge_adapter(model, name) if base else (model, set())
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if base and "size mismatch" in str(error) and not Path(name, "config.json").exists():
            raise InputError(
                f"model {name}: weights of the adapter do not fit, and it has no config.json, which holds "
                "the labels; put the base model's there, with num_labels, id2label and problem_type"
            ) from error
        what = ("model", name) if base is None or Path(base).is_dir() else (f"{name}: its base model", base)
        raise InputError(explain_failed_load(*what, error)) from error
    _check_fit(name, model, loading)
    mismatched = {name for name, *_ in loading["mismatched_keys"]}
    return model, (set(loading["missing_keys"]) | mismatched) - adapter_names


def load_exported(
    auto_class: Any, arguments: Any, path: str | Path, has_head: bool = True, config: Any = None
) -> Any:
    """The trained model of a folder or of the hub. `config`: its configuration, if it is known. Raises
    `InputError`, also for a model that should have a trained head (`has_head`) and has none."""
    arguments = replace(arguments, model_name_or_path=str(path), config_name=None, from_scratch=False)
    config = load_config(arguments) if config is None else config
    model, new_names = load_model_and_new_names(auto_class, arguments, config)
    if has_head and new_names:
        raise InputError(f"{path}: has no trained classifier ({min(new_names)} is missing); train first")
    return model


def check_all_layers_used(name: str, model: Any, loading: dict[str, Any]) -> None:
    """Raises `InputError` if the weights have more layers than the configuration, which transformers would
    drop silently. `loading`: its loading info. Unexpected weights of other heads are no errors."""
    prefix = f"{model.base_model_prefix}."
    known = {LAYER_NUMBER.sub(".#.", key).removeprefix(prefix) for key, _ in model.named_parameters()}
    dropped = [key for key in loading["unexpected_keys"] if LAYER_NUMBER.search(key)]
    dropped = sorted(key for key in dropped if LAYER_NUMBER.sub(".#.", key).removeprefix(prefix) in known)
    if dropped:
        raise InputError(
            f"model {name}: the weights have more layers than its config.json: {len(dropped)} weights, such "
            f"as {dropped[0]}, would be left out; give config.json as many layers as the weights have"
        )


def _check_fit(name: str, model: Any, loading: dict[str, Any]) -> None:
    """Raises `InputError` unless every weight of the model's body, except a pooler, is there in the right
    shape and finite, and no layer is left over. The head may be new."""
    check_all_layers_used(name, model, loading)
    own = {key for key, _ in model.named_parameters() if "pooler" not in key}
    if loading["missing_keys"] or loading["mismatched_keys"]:
        own -= head_names(model)
    problems = [
        f"{key} is {tuple(in_file)} in the file, {tuple(in_config)} by the configuration"
        for key, in_file, in_config in loading["mismatched_keys"]
        if key in own
    ]
    if missing := sorted(own & set(loading["missing_keys"])):
        problems.append(f"{len(missing)} of {len(own)} are missing, such as {missing[0]}")
    if problems:
        raise InputError(
            f"model {name}: the weights are not those of its config.json: {problems[0]}; put the config.json "
            "that was saved with these weights beside them"
        )
    check_finite_weights(name, model)


def on_meta() -> bool:
    """Whether the code runs under `torch.device("meta")`."""
    return torch.get_default_device().type == "meta"


def take_vocabulary(config: Any, tokenizer: Any) -> None:
    """Sets the tokenizer's vocabulary size and special ids on the configuration of random weights."""
    config.vocab_size = len(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, getattr(tokenizer, name))


def set_labels(config: Any, labels: list[str]) -> None:
    """Sets the names of the labels in a configuration, in the order of the logits."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}


def labels_of(config: Any) -> list[str]:
    """The names of the labels in a configuration; equal ones, as ImageNet's two "crane", with their number.
    Raises `InputError` for ids with gaps."""
    if missing := [label_id for label_id in range(config.num_labels) if label_id not in config.id2label]:
        ids = ", ".join(map(str, sorted(config.id2label)[:20]))
        raise InputError(
            f"model {config.name_or_path}: id2label in its config.json numbers its "
            f"{config.num_labels} label(s) {ids}, so "
            f"number {missing[0]} has no name; number them from 0 to {config.num_labels - 1}"
        )
    names = [config.id2label[label_id] for label_id in range(config.num_labels)]
    count = Counter(names)
    return [name if count[name] == 1 else f"{name} ({label_id})" for label_id, name in enumerate(names)]


def own_labels(config: Any) -> list[str] | None:
    """The labels in a configuration; None for the placeholders LABEL_0, ... of a model without a head."""
    labels = labels_of(config)
    return labels if any(label != f"LABEL_{number}" for number, label in enumerate(labels)) else None


def head_names(model: Any) -> set[str]:
    """The parameters of a model's head: those outside of its body, or its classification layers if no module
    of its own is the body, as in CLIP, SigLIP and UperNet."""
    if model.base_model is model:
        return classification_names(model)
    body = f"{model.base_model_prefix}."
    return {name for name, _ in model.named_parameters() if not name.startswith(body)}


def classification_names(model: Any) -> set[str]:
    """The parameters of a model's classification layers: those whose size follows the number of labels."""
    config = copy.deepcopy(model.config)
    config.num_labels += 1
    with torch.device("meta"):
        larger = dict(type(model)(config).named_parameters())
    return {name for name, weight in model.named_parameters() if weight.shape != larger[name].shape}


def note_changed_classes(own: list[str], labels: list[str], notes: list[str]) -> None:
    """Notes what `change_classes` does, if the classes differ."""
    if kept := set(own) & set(labels):
        if own != labels:
            notes.append(
                f"the model's head keeps the rows of {len(kept)} label(s), by name; "
                f"{len(set(labels) - kept)} label(s) are new, {len(set(own) - kept)} are dropped"
            )
    else:
        notes.append(f"the model's head for {len(own)} label(s) is replaced by a new one for {len(labels)}")


def change_classes(model: Any, own: list[str], labels: list[str]) -> set[str]:
    """Replaces the classification layers, which were trained for the classes `own`, by layers for `labels`.
    Classes in both lists keep their weights. Returns the names of the layers' parameters. Raises `InputError`
    for a head without such layers, or with parameters that are not of one row a class."""
    config, names = copy.deepcopy(model.config), classification_names(model)
    set_labels(config, labels)
    with torch.device("meta"):
        changed = type(model)(config)
    parameters = dict(model.named_parameters())
    if not names or any(len(parameters[name]) != len(own) for name in names):
        raise InputError(
            f"model {model.name_or_path}: its head has no layer with a row for each of its {len(own)} "
            "labels, so its rows cannot be matched to other labels; give its own labels, in its order"
        )
    row_of = {label: row for row, label in enumerate(own)}
    kept = [row for row, label in enumerate(labels) if label in row_of]
    for layer in sorted({name.rpartition(".")[0] for name in names}):
        before = model.get_submodule(layer)
        after = changed.get_submodule(layer).to_empty(device=next(before.parameters()).device)
        model._init_weights(after)
        for name, parameter in before.named_parameters(recurse=False):
            with torch.no_grad():
                after.get_parameter(name)[kept] = parameter[[row_of[labels[row]] for row in kept]]
        model.set_submodule(layer, after)
    set_labels(model.config, labels)
    model.num_labels = len(labels)
    return names


def load_with_classes(
    auto_class: Any, arguments: Any, config: Any, own: list[str] | None, labels: list[str]
) -> tuple[Any, set[str]]:
    """As `load_model_and_new_names`, a model with the classes `labels`. `own`: those of the pretrained one;
    None if its head is not to be kept."""
    changes = own is not None and own != labels
    set_labels(config, own if changes else labels)
    model, new_names = load_model_and_new_names(auto_class, arguments, config)
    if changes:
        new_names |= change_classes(model, own, labels)
        set_labels(config, labels)
    return model, new_names


def check_vocabulary(model: Any, tokenizer: Any, what: str = "model") -> None:
    """Raises `InputError` if a token id has no embedding. On a GPU that would be an obscure device
    assertion."""
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise InputError(
            f"the tokenizer has token ids up to {highest}, the {what} only {rows} embeddings; they do not "
            "belong together (check --tokenizer_name)"
        )


def explain_failed_load(what: str, name: str, error: Exception) -> str:
    """The message for an exception of transformers while loading. `what`: "model", "tokenizer", ..."""
    path, hint, reason = Path(name).expanduser(), "", in_one_line(error)
    if not path.exists():
        if path.parent.is_dir() and path.name:
            near = nearest(path.name, [other.name for other in path.parent.iterdir() if other.is_dir()])
            hint = f" (did you mean {str(path.parent / near)!r}?)" if near else ""
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            return (
                f"{what} {name}: this folder does not exist{hint}; a model of the hub is named like "
                "google/bigbird-roberta-base"
            )
        return (
            f"{what} {name}: is no folder here{hint}, and could not be had from the hub either ({reason}); "
            "check the spelling, or give the path of a local folder"
        )
    if type(error).__name__ == "UnpicklingError":
        what_holds = "its weights are a pickle that is damaged or holds more than tensors, which is not read"
        reason = f"{what_holds}; convert them to safetensors, or copy them again"
    elif "trust_remote_code" in str(error):
        reason = "it has Python code of its own, which runs with --trust_remote_code only; read it first"
    return f"{what} {name}: {reason}{f' (the folder holds: {files_in(path)})' if path.is_dir() else ''}"


# Weight files


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
    files = _weight_files(folder)
    if not files:
        raise InputError(
            f"model {name}: the folder holds no weights, such as {WEIGHTS[0]} (it holds: "
            f"{files_in(folder)}); name another, or start from random weights with --from_scratch"
        )
    for file in sorted(files):
        _check_weight_file(file)


def fingerprint(arguments: Any, splits: dict[str, Any]) -> dict[str, Any]:
    """Entries of a run's fingerprint: the model, the arguments that decide which weights are trained, and the
    rows of training and validation."""
    weights = None if arguments.from_scratch else arguments.model_name_or_path
    found: dict[str, Any] = {
        "model": model_content(arguments.config_name or arguments.model_name_or_path, weights)
    }
    names = ("lora_r", "lora_alpha", "lora_target_modules", "use_dora", "freeze", "quantize")
    if trained := {name: str(getattr(arguments, name)) for name in names if getattr(arguments, name)}:
        found["trained"] = trained
    for name, split in splits.items():
        if name != "test":
            found |= {f"{name}_rows": len(split), f"{name}_content": split.content()[:16]}
    return found


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
        content |= {file.name: sample_of(file) for file in sorted(_weight_files(Path(weights)))}
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


def _weight_files(folder: Path) -> set[Path]:
    """The weight files of a folder: its single one, or those of its index; none if it has neither."""
    first = next((folder / file for file in WEIGHTS if (folder / file).is_file()), None)
    if first is None or first.suffix != ".json":
        return set() if first is None else {first}
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
