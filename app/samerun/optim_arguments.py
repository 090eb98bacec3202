"""Optimizers by transformers' names (--optim) and their settings (--optim_args), without torch: wrong
arguments are reported before it is imported.
"""

from dataclasses import dataclass
from typing import Any

from samerun.parsing import Setting, is_installed, read_settings

DEFAULT = "adamw_torch_fused"
UNDER_FSDP = (DEFAULT, "sgd", "rmsprop")  # those that were tried
SMALL_8BIT = 4096  # smaller weights keep 32-bit state (bitsandbytes' min_8bit_size)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's settings and requirements."""

    settings: dict[str, Setting]
    unshardable: str | None = None  # why it needs whole weights, not shards; None if it does not
    package: str | None = None  # that must be installed


MOMENTUM, EPSILON = Setting(0.0, below=1), Setting(1e-8)
BETAS = {"beta1": Setting(0.9, below=1), "beta2": Setting(0.999, below=1)}
ADAM = {**BETAS, "eps": Setting(1e-8, at_least=None, above=0)}
# Names are transformers', but those of adafactor's settings are torch's. Defaults are torch's.
OPTIMIZERS = {
    DEFAULT: Optimizer(ADAM),
    "adafactor": Optimizer(
        {"beta2_decay": Setting(-0.8, at_least=None, below=0), "d": Setting(1.0, at_least=1)},
        unshardable="it averages over the rows and columns of whole matrices",
    ),
    "sgd": Optimizer(
        {"momentum": MOMENTUM, "dampening": Setting(0.0, below=1), "nesterov": Setting(False, at_least=None)}
    ),
    "adagrad": Optimizer(
        {"lr_decay": Setting(0.0), "initial_accumulator_value": Setting(0.0), "eps": Setting(1e-10)},
        unshardable="DeepSpeed builds it anew with one weight decay for all weights, "
        "biases and norms among them",
    ),
    "rmsprop": Optimizer(
        {
            "alpha": Setting(0.99, below=1),
            "eps": EPSILON,
            "momentum": MOMENTUM,
            "centered": Setting(False, at_least=None),
        }
    ),
    "adamw_bnb_8bit": Optimizer(
        ADAM, unshardable="it scales its 8-bit state by blocks of whole weights", package="bitsandbytes"
    ),
    "lion_32bit": Optimizer(BETAS, package="bitsandbytes"),
}


def settings_of(arguments: Any) -> dict[str, Any]:
    """The settings of --optim: defaults, overridden by --optim_args."""
    defaults = {name: setting.default for name, setting in OPTIMIZERS[arguments.optim].settings.items()}
    return defaults | _parse(arguments, [])


def check_settings(arguments: Any) -> list[str]:
    """Errors in --optim_args for --optim."""
    errors: list[str] = []
    values = _parse(arguments, errors)
    if values.get("nesterov") and not errors:
        settings = settings_of(arguments)
        if not settings["momentum"] or settings.get("dampening"):
            errors.append("--optim_args: nesterov=true needs a momentum above 0, and no dampening")
    return errors


def check_launch(
    optim: str, deepspeed_config: dict[str, Any] | None, deepspeed_file: str | None, with_fsdp: bool = False
) -> list[str]:
    """Errors if this launch cannot use the optimizer. `deepspeed_config`: the content of DeepSpeed's file, if
    there is one."""
    optimizer, errors = OPTIMIZERS[optim], []
    if optimizer.package is not None and not is_installed(optimizer.package):
        errors.append(
            f"--optim {optim}: {optimizer.package} is not installed (pip install -r requirements-8bit.txt)"
        )
    if with_fsdp and optim not in UNDER_FSDP:
        why = f": {optimizer.unshardable}" if optimizer.unshardable and optim != "adagrad" else ""
        errors.append(
            f"--optim {optim} does not work under FSDP{why}. Choose {', '.join(UNDER_FSDP)}, or "
            "launch without FSDP"
        )
    if deepspeed_config is not None and optimizer.unshardable is not None:
        errors.append(
            f"--optim {optim} does not work under ZeRO: {optimizer.unshardable}. Launch without DeepSpeed "
            "(accelerate_configs/ddp.yaml), or choose "
            + ", ".join(name for name, other in OPTIMIZERS.items() if other.unshardable is None)
        )
    elif deepspeed_config is not None and "optimizer" in deepspeed_config and optim != DEFAULT:
        errors.append(
            f"{deepspeed_file}: its section 'optimizer' asks for AdamW but --optim is {optim}; "
            "remove the section"
        )
    return errors


def moments(optim: str, settings: dict[str, Any]) -> int:
    """The number of fp32 values that an optimizer keeps per element, where it is the same for all weights."""
    if optim == "sgd":
        return int(settings["momentum"] > 0)
    if optim == "rmsprop":
        return 1 + (settings["momentum"] > 0) + settings["centered"]
    return {"adafactor": 0, "adagrad": 1, "lion_32bit": 1}.get(optim, 2)


def in_words(arguments: Any) -> str:
    """The optimizer's name and changed settings, such as "sgd momentum=0.9"."""
    known, values = OPTIMIZERS[arguments.optim].settings, settings_of(arguments)
    changed = [f"{name}={value}" for name, value in values.items() if value != known[name].default]
    return " ".join([arguments.optim, *changed])


def describe(arguments: Any) -> str:
    """The optimizer and the size of its state, for the plan."""
    special = {
        "adafactor": "a number per row and column; --learning_rate is relative to the size of each weight",
        "adamw_bnb_8bit": f"2 bytes per element, 8 in weights of fewer than {SMALL_8BIT}",
    }
    regular = f"{4 * moments(arguments.optim, settings_of(arguments))} bytes per trained element"
    return f"{in_words(arguments)}; its state: {special.get(arguments.optim, regular)}"


def _parse(arguments: Any, errors: list[str]) -> dict[str, Any]:
    """Parses --optim_args; appends to `errors`."""
    optim, text = arguments.optim, arguments.optim_args
    elsewhere = {"weight_decay": "--weight_decay", "lr": "--learning_rate", "betas": "beta1 and beta2"}
    return read_settings("optim_args", optim, OPTIMIZERS[optim].settings, text, errors, elsewhere)
