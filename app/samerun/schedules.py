"""Learning-rate schedules as pure functions of the step: checkpoints need no scheduler state.

Names, settings and curves after the warm-up are those of `transformers.get_scheduler`; `multistep` is torch's
MultiStepLR.
"""

from __future__ import annotations

import math
from typing import Any

# Schedules, their settings (--lr_scheduler_kwargs) and defaults; `lr_multiplier` derives those that are None.
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 1},
    "cosine_with_min_lr": {"num_cycles": 0.5, "min_lr_rate": 0.1},
    "polynomial": {"power": 1.0},
    "inverse_sqrt": {"timescale": None},
    "warmup_stable_decay": {"num_decay_steps": None, "min_lr_ratio": 0.0},
    "constant": {},
    "constant_with_warmup": {},
    "multistep": {"milestones": [0.25, 0.5, 0.75], "gamma": 0.1},
}


def problems(kind: str, settings: dict[str, Any]) -> list[str]:
    """Errors in --lr_scheduler_kwargs."""
    known = SCHEDULES[kind]
    errors = []
    for name, value in settings.items():
        numbers = value if isinstance(value, list) else [value]
        if name not in known:
            errors.append(
                f"--lr_scheduler_kwargs: {kind} has no {name}; it has {', '.join(known) or 'no settings'}"
            )
        elif isinstance(value, list) != isinstance(known[name], list) or not all(
            map(_is_non_negative, numbers)
        ):
            expected = "a list of numbers" if isinstance(known[name], list) else "a number of at least 0"
            errors.append(f"--lr_scheduler_kwargs: {name} is {value!r}, expected {expected}")
    return errors


def lr_multiplier(
    step: int, total_steps: int, warmup_steps: int, kind: str, settings: dict[str, Any] | None = None
) -> float:
    """The learning rate of optimizer step `step` (0-based) as a share of its peak.

    Warm-up is linear: step s of w has (s + 1) / w, so the first step already trains. `linear` and `cosine`
    (Loshchilov and Hutter, arXiv:1608.03983) reach 0 one step after the last. `multistep` multiplies by
    `gamma` at each of `milestones`, shares of all steps. `warmup_stable_decay` (arXiv:2404.06395) stays at
    the peak and falls by half a cosine in the last `num_decay_steps`, by default a tenth of the run.
    """
    s = {**SCHEDULES[kind], **(settings or {})}
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind in ("constant", "constant_with_warmup"):
        return 1.0
    if kind == "multistep":
        return s["gamma"] ** sum(step >= round(share * total_steps) for share in s["milestones"])
    if kind == "inverse_sqrt":
        timescale = s["timescale"] or warmup_steps or 10_000
        return 1 / math.sqrt((step + timescale - warmup_steps) / timescale)
    if kind == "warmup_stable_decay":
        decay = s["num_decay_steps"] or max(1, round(total_steps / 10))
        done = min(1.0, max(0.0, (step - (total_steps - decay)) / decay))
        return s["min_lr_ratio"] + (1 - s["min_lr_ratio"]) * 0.5 * (1 + math.cos(math.pi * done))
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if kind == "linear":
        return max(0.0, 1 - done)
    if kind == "polynomial":
        return max(0.0, 1 - done) ** s["power"]
    if kind == "cosine_with_restarts":
        return 0.0 if done >= 1 else 0.5 * (1 + math.cos(math.pi * (s["num_cycles"] * done % 1.0)))
    least = s.get("min_lr_rate", 0.0)
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * 2 * s["num_cycles"] * min(1.0, done)))


def _is_non_negative(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and math.isfinite(value)
    )
