"""--metrics: additional metrics of `evaluate`, from the hub or a local folder."""

import ast
import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from samerun.console import say
from samerun.errors import InputError, collecting, raise_problems


@dataclass(frozen=True)
class AdditionalMetric:
    """`spec`: as given by the user. `module`: an `evaluate.Metric`. `settings`: further arguments of
    `compute`."""

    spec: str
    name: str
    module: Any
    settings: Mapping[str, Any]


def load_metrics(specs: Sequence[str]) -> list[AdditionalMetric]:
    """The metrics of --metrics.

    A spec is `NAME[:CONFIG][:SETTING=VALUE ...]`: `accuracy`, `f1:multilabel:average=macro`,
    `bertscore:lang=en`. NAME is a metric of `evaluate` (from the hub or its cache), a folder `path/my_metric`
    with `my_metric.py`, or a .py file; folders and files need no network. The file's code is executed.

    Raises `InputError` for metrics that cannot be loaded.
    """
    twice = sorted({spec for spec in specs if specs.count(spec) > 1})
    metrics, problems = [], [f"--metrics {spec}: named twice" for spec in twice]
    for spec in specs:
        with collecting(problems):
            metrics.append(_load(spec))
    raise_problems(problems)
    return metrics


def compute_additional(
    metrics: Sequence[AdditionalMetric], predictions: Any, references: Any, taken: Collection[str] = ()
) -> dict[str, float | None]:
    """Scores of the metrics, each computed on all rows; None for NaN and infinity.

    `predictions` and `references` as the metrics take them: (rows, labels) of 0 and 1 at the tuned thresholds
    for labels, texts for titles. A score keeps the metric's key, or is called METRIC_KEY if the key is
    `taken` or another metric's. Results that are no numbers are left out with a note. Raises `InputError`
    if a metric fails.
    """
    scores: dict[str, float | None] = {}
    for metric in metrics:
        try:
            results = metric.module.compute(predictions=predictions, references=references, **metric.settings)
        except Exception as error:  # third-party code
            raise InputError(
                f"--metrics {metric.spec}: cannot score these rows ({_summary(error)})"
            ) from error
        for key, value in results.items() if isinstance(results, Mapping) else [(metric.name, results)]:
            if not isinstance(value, Real):
                say(f"note           --metrics {metric.spec}: {key} is not a number and is left out")
                continue
            name = str(key)
            for prefix in (metric.name, re.sub(r"\W+", "_", metric.spec)):
                if name in taken or name in scores:
                    name = f"{prefix}_{key}"
            scores[name] = float(value) if math.isfinite(value) else None
    return scores


def _load(spec: str) -> AdditionalMetric:
    import evaluate  # slow, and most runs have no additional metrics

    path, *options = [spec] if Path(spec).exists() else spec.split(":")
    given = dict(option.split("=", 1) for option in options if "=" in option)
    settings = {name: _value(text) for name, text in given.items()}
    configs = [option for option in options if "=" not in option]
    if not path or len(configs) > 1:
        raise InputError(f"--metrics {spec}: expected NAME_OR_FOLDER[:CONFIG][:SETTING=VALUE ...]")
    location = Path(path).expanduser()
    script = location if location.suffix == ".py" else location / f"{location.name}.py"
    try:
        path = str(script) if script.is_file() else path
        module = evaluate.load(path, *configs, module_type="metric", keep_in_memory=True)
    except Exception as error:  # third-party code
        raise InputError(
            f"--metrics {spec}: cannot be loaded as an evaluate.Metric ({_summary(error)}); give a name of "
            f"the hub or of evaluate's cache, or a folder that holds {script.name}"
        ) from error
    return AdditionalMetric(spec, location.stem, module, settings)


def _value(text: str) -> Any:
    """A number, True, False or None; otherwise the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _summary(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)
