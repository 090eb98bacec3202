"""Training a part of a model: low-rank adapters by peft, and frozen weights.

LoRA (Hu et al., arXiv:2106.09685) adds a product B A of rank r to each adapted matrix and trains only A and
B. DoRA (Liu et al., arXiv:2402.09353) also trains the norms of the matrix's columns. New weights, such as a
new head, are always trained.
"""

import copy
import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig

from samerun.errors import InputError, in_short, listed
from samerun.layers import has_statistics
from samerun.parsing import is_installed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # names of peft
LAYER = re.compile(r"\.(?:layers?|blocks?|h)\.(\d+)\.")
BASE, ADAPTED = ".base_layer.", ".lora_"  # in peft's parameter names
BASE_BITS = "base_model_bits"  # key of the config.json beside an adapter: bits of the quantized base model
EMBEDDINGS = re.compile(r"(^|\.)(\w*embed\w*|shared|wte|wpe)\.")


def limit_training(model: Any, arguments: Any, new_names: set[str]) -> Any:
    """Adds adapters (--lora_r) or freezes weights (--freeze). `new_names`: parameters without pretrained
    values. Raises `InputError` for modules or weights that the model does not have."""
    if arguments.lora_r is not None:
        new_modules = {name.rpartition(".")[0] for name in new_names}
        if arguments.export == "adapter" and any(
            has_statistics(module) and name not in new_modules for name, module in model.named_modules()
        ):
            raise InputError("--export adapter: an adapter has no statistics of batch norms; leave it out")
        return _add_adapters(model, arguments, new_names)
    pretrained = [(name, p) for name, p in model.named_parameters() if name not in new_names]
    numbers = [int(found[1]) for found in (LAYER.search(name) for name, _ in pretrained) if found]
    layers = max(numbers, default=-1) + 1
    for entry in arguments.freeze or ():
        if entry.isdecimal() and int(entry) > layers:
            raise InputError(
                f"--freeze {entry}: the model has {layers or 'no'} numbered layers; give a lower number, or "
                f"a pattern of names; it has {_examples(model)}"
            )
        frozen = [parameter for name, parameter in pretrained if _matches(entry, name)]
        if not frozen:
            raise InputError(
                f"--freeze {entry}: the model has no such pretrained weights; it has {_examples(model)}"
            )
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("--freeze: nothing is left to train; name fewer parts of the model")
    return model


def check_quantization(arguments: Any, launch: Any) -> None:
    """Raises `InputError` if --quantize does not work here. `launch`: a `launch.Launch`."""
    bits = _bits(arguments)
    if bits is None:
        return
    if not is_installed("bitsandbytes"):
        raise InputError(f"--quantize {bits} needs bitsandbytes: pip install -r requirements-8bit.txt")
    if launch.deepspeed_config is not None or launch.fsdp is not None:
        launcher = "FSDP" if launch.fsdp else "DeepSpeed"
        raise InputError(
            f"--quantize {bits} does not work with {launcher}, which would split or cast packed weights; "
            "launch with accelerate_configs/ddp.yaml, or leave it out"
        )


def rounded_as(arguments: Any, launch: Any) -> str:
    """The precision that limits how well an fp32 export agrees with the trained model. 8-bit layers also
    round their inputs, about as bf16 does; TF32 has the mantissa of fp16. `launch`: a `launch.Launch`."""
    if arguments.quantize == "8":
        return "bf16"
    return "fp16" if launch.tf32 and launch.precision == "no" else launch.precision


def numbered_layers(model: Any, head: set[str]) -> int:
    """The number of layers of a model, without its `head`; 0 unless they are numbered in one row."""
    names = (name for name, _ in model.named_parameters() if name not in head)
    found = [match for match in map(LAYER.search, names) if match]
    rows = {match.string[: match.start()] for match in found}
    return len({match[1] for match in found}) if len(rows) == 1 else 0


def layerwise_scale(name: str, layers: int, decay: float) -> float:
    """`decay` to the power of the number of layers above a parameter: 1 for a head, lowest for embeddings
    (discriminative fine-tuning of ULMFiT, Howard and Ruder, arXiv:1801.06146)."""
    if layer := LAYER.search(name):
        return decay ** (layers - int(layer[1]))
    return decay ** (layers + 1) if EMBEDDINGS.search(name) else 1.0


def to_export(
    model: Any, plain: Any, weights: dict[str, torch.Tensor], arguments: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(object with `save_pretrained`, weights to save).

    `model`: the trained model; `weights`: its full weights; `plain`: a model of its class on the meta device.
    Adapters are merged into the base weights, or saved alone with --export adapter. Quantized weights are
    exported in fp32: quantizing the merged weights again would change the model.
    """
    vars(plain.config).pop(BASE_BITS, None)
    if not hasattr(model, "peft_config"):
        return plain, weights
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    settings, bits = model.peft_config["default"], _bits(arguments)
    if arguments.export == "adapter":
        if bits is not None:
            setattr(plain.config, BASE_BITS, bits)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        settings, base = copy.deepcopy(settings), arguments.model_name_or_path
        settings.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
        full = {name.rpartition(".")[0] for name in trained if ADAPTED not in name}
        # Adapters that `DryRun.unused` froze are not saved, and peft must not expect them.
        adapters = {name for name, _ in model.named_parameters() if ADAPTED in name}
        unused = {name.partition(ADAPTED)[0] for name in adapters - trained}
        settings.exclude_modules = sorted({*(settings.exclude_modules or ()), *unused}) or None
        settings.modules_to_save = sorted(full) or None
        settings.inference_mode = True
        # Of the modules to save also buffers, such as the statistics of a batch norm.
        saved = {n: weight for n, weight in weights.items() if n in trained or n.rpartition(".")[0] in full}
        return _AdapterExport(plain, settings), saved
    if bits is not None:
        from samerun.models.quantized import dequantized_weights

        weights = weights | dequantized_weights(model)
    adapted = inject_adapter_in_model(settings, copy.deepcopy(plain))
    adapted.load_state_dict(weights, strict=False, assign=True)
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
    state = adapted.state_dict()
    return plain, {name.replace(BASE, "."): state[name] for name in weights if ADAPTED not in name}


def base_of(folder: str | Path) -> str | None:
    """The base model of an adapter's folder; None for others. Raises `InputError` if it names none."""
    file = Path(folder) / CONFIG
    if not file.is_file():
        return None
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{file}: names no base model ({type(error).__name__}); copy the adapter again"
        ) from None


def load_plain(folder: Path, auto_class: Any) -> Any:
    """The model of an exported folder by plain transformers; an adapter is merged."""
    base = base_of(folder)
    if base is None:
        return auto_class.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    model = auto_class.from_pretrained(base, config=config, dtype=torch.float32, ignore_mismatched_sizes=True)
    if model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return merge_adapter(model, folder)[0]


def merge_adapter(model: Any, folder: str | Path) -> tuple[Any, set[str]]:
    """(base model with the folder's adapter merged into it, names of the weights in the adapter's
    modules_to_save, such as a head's). Raises peft's exceptions for an adapter of another model."""
    from peft import PeftConfig, PeftModel

    settings = PeftConfig.from_pretrained(folder)
    if settings.is_prompt_learning:
        raise ValueError(f"an adapter of type {settings.peft_type.value}, which no weights can hold")
    full_modules = settings.modules_to_save or []
    if (bits := getattr(model.config, BASE_BITS, None)) is not None:
        from samerun.models.quantized import round_weights

        round_weights(model, bits, full_modules)
    adapted = PeftModel.from_pretrained(model, folder, config=settings)
    merged = adapted.merge_and_unload()
    merged.requires_grad_(True)
    names = merged.state_dict()
    return merged, {name for name in names if any(f".{module}." in f".{name}" for module in full_modules)}


class _AdapterExport:
    """Saves an adapter in peft's format, with the model's own configurations, which hold the labels."""

    def __init__(self, plain: Any, settings: Any) -> None:
        self.plain, self.settings = plain, settings

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        self.plain.config.architectures = [type(self.plain).__name__]  # tells the task; not the base's
        self.plain.config.save_pretrained(folder)
        if self.plain.can_generate():
            self.plain.generation_config.save_pretrained(folder)
        self.settings.save_pretrained(folder)
        named = {f"base_model.model.{name.replace('.default', '')}": t for name, t in state_dict.items()}
        save_file(named, folder / WEIGHTS)


def _add_adapters(model: Any, arguments: Any, new_names: set[str]) -> Any:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InputError("--lora_r needs peft: pip install -r requirements-lora.txt") from None
    if arguments.export == "adapter" and base_of(arguments.model_name_or_path or ""):
        raise InputError(
            f"--export adapter: {arguments.model_name_or_path} is an adapter, on which no other can stand; "
            "export the merged model, or train from its base model"
        )
    new_modules = sorted({name.rpartition(".")[0] for name in new_names})
    if (bits := _bits(arguments)) is not None:
        from samerun.models.quantized import quantize

        quantize(model, bits, new_modules)
    targets = arguments.lora_target_modules or ("all-linear",)
    settings = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha or 2 * arguments.lora_r,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        exclude_modules=new_modules or None,
        use_dora=arguments.use_dora,
    )
    try:
        model = inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise InputError(
            f"--lora_target_modules {','.join(targets)}: no such layer to adapt ({in_short(error)}); the "
            f"model has {_examples(model)}"
        ) from None
    _check_targets(model, targets)
    for name, parameter in model.named_parameters():
        if name in new_names:
            parameter.requires_grad_(True)
    return model


def _check_targets(model: Any, targets: tuple[str, ...]) -> None:
    """Raises `InputError` for targets that adapt nothing, and for adapted layers that share their weights:
    merged, an adapter would change the others, too."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {n: module for n, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    found = [f".{name}" for name in adapted]
    unused = [target for target in targets if not any(name.endswith(f".{target}") for name in found)]
    if unused and targets != ("all-linear",):
        raise InputError(
            f"--lora_target_modules {','.join(targets)}: there is no layer {listed(unused)}; the model has "
            f"{_examples(model)}"
        )
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name.replace(BASE, ".").rpartition(".")[0])
    for name, module in adapted.items():
        weight = getattr(module.get_base_layer(), "weight", None)
        if others := owners.get(id(weight), set()) - {name}:
            raise InputError(
                f"--lora_target_modules {','.join(targets)}: {name} shares its weights with {min(others)}, "
                "which a merged adapter would change, too; name other layers"
            )


def _bits(arguments: Any) -> int | None:
    return int(arguments.quantize) if arguments.quantize else None


def _matches(entry: str, name: str) -> bool:
    """Whether an entry of --freeze ("embeddings", a number of layers, or a pattern) matches a parameter."""
    if entry == "embeddings":
        return EMBEDDINGS.search(name) is not None
    if entry.isdecimal():
        layer = LAYER.search(name)
        return layer is not None and int(layer[1]) < int(entry)
    return fnmatch.fnmatchcase(name, entry)


def _examples(model: Any) -> str:
    names = [name for name, _ in model.named_parameters()]
    return ", ".join(names[:: max(1, len(names) // 4)][:4]) + ", ..."
