"""Anything at all, given to everything that reads input: a result or an `InputError` in words."""

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import classify
import numpy as np
import pytest
import tables
import titlegen
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_models import sizes

from samerun import deepspeed
from samerun.arguments import ModelArguments
from samerun.errors import InputError
from samerun.models.pretrained import load_config
from samerun.parsing import parse, validate
from samerun.plan import BatchShape
from samerun.text.labels import label_ids, read_label_file, read_labels
from samerun.text.losses import positive_weights
from samerun.trainer_names import TRAINER_NAMES

quick = settings(
    max_examples=40, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def result_or_words(work: Callable[[], Any]) -> Any:
    """What `work` gives, or None where it refuses in complete lines."""
    try:
        return work()
    except InputError as error:
        problems = error.problems
    assert problems
    assert all(problem.strip() and len(problem.splitlines()) == 1 for problem in problems), problems
    return None


def write(name: str, data: bytes) -> str:
    with open(name, "wb") as file:
        file.write(data)
    return name


def json_files(contents: st.SearchStrategy) -> st.SearchStrategy[bytes]:
    """Files of these contents, or of anything."""
    return st.binary(max_size=40) | contents.map(lambda content: json.dumps(content).encode())


# Cells, label lists, weights

ODD = st.sampled_from(["a|b", "|", "[]", "['a']", " "])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@quick
@given(st.lists(json_values, min_size=1, max_size=5), st.booleans())
def test_any_label_cell_is_labels_or_refused(cells, as_columns):
    table = tables.table({"labels": cells}, "a.jsonl", "jsonl", range(1, len(cells) + 1))
    columns = ("labels",) if as_columns else None
    asked = SimpleNamespace(label_columns=columns, label_column="labels", label_separator="|")
    found = result_or_words(lambda: read_labels(table, asked, []))
    if found is not None:
        labels = sorted(found.names)
        assert all(name.strip() for name in labels)
        ids = label_ids(table, found, labels, False, [])
        read = [[labels[i] for i in ids[row]] for row in range(len(ids))]
        assert read == [sorted(names) for names in found.rows]


LINES = st.lists(st.sampled_from(["red", "green", " ", "['a']", "\u2028"])).map("\n".join)


@quick
@given(st.binary(max_size=30) | LINES.map(str.encode))
def test_any_label_file_is_a_list_or_refused(data):
    names = result_or_words(lambda: read_label_file(write("labels.txt", data)))
    assert names is None or len(set(names)) == len(names) > 0


@quick
@given(json_files(st.dictionaries(st.sampled_from("ab"), json_values) | json_values))
def test_any_weights_are_positive_or_refused(data):
    asked = SimpleNamespace(pos_weight=write("w.json", data), pos_weight_cap=20.0)
    weights = result_or_words(lambda: positive_weights(asked, np.zeros(2), 0, ["a", "b"]))
    assert weights is None or ((weights > 0) & (weights <= 1e6)).all()


# Arguments, run configurations, DeepSpeed files, model configurations

MODULES = st.sampled_from([classify, titlegen])
NAMES = [field.name for module in (classify, titlegen) for field in dataclasses.fields(module.Arguments)]
ARGUMENTS = st.sampled_from([*dict.fromkeys(NAMES), *TRAINER_NAMES, "config", "lerning_rate", "", "-"])
NUMBERS = ["1", "0", "-1", "0.5", "1e-3", "1e999", "nan"]
WORDS = [*NUMBERS, "none", "true", "no", "steps", "a,b", "train", ",", "a|b", "fp16"]
VALUES = st.sampled_from(WORDS) | st.text(max_size=6)
YAML_VALUES = st.sampled_from(["!!int ''", "!!bool x", "&a [*a]", "2020-99-01", "[1, [2]]"])


@quick
@given(MODULES, st.lists(st.builds("--{}={}".format, ARGUMENTS, VALUES) | VALUES, max_size=6))
@example(classify, ["--seed", "1" * 5000])
@example(classify, ["--long_documents=windows", "--adam_beta1", "4", "5", "--dataset_config_name="])
def test_any_command_line_is_read_or_refused(module, argv):
    arguments = result_or_words(lambda: parse(module.Arguments, argv))
    if arguments is not None:
        result_or_words(lambda: validate(arguments))


YAML_FILES = st.dictionaries(ARGUMENTS, json_values | VALUES, max_size=5).map(yaml.safe_dump)
YAML_LINES = st.lists(st.builds("{}: {}".format, ARGUMENTS, VALUES | YAML_VALUES), max_size=4).map("\n".join)


@quick
@given(MODULES, (YAML_FILES | YAML_LINES).map(str.encode) | st.binary(max_size=30))
@example(classify, b"seed: !!timestamp x")
def test_any_run_configuration_is_read_or_refused(module, data):
    result_or_words(lambda: parse(module.Arguments, ["--config", write("run.yaml", data)]))


ZERO = deepspeed.read_config("ds_configs/zero3_offload.json")
KEYS = [*ZERO, *ZERO["zero_optimization"], "optimizer", "steps_per_print", "zero_optimisation"]
KEYS += ["enabled", "device"]
ZERO_VALUES = st.recursive(
    st.sampled_from([1, 2, 3, True, False, None, "auto", "cpu", 1.0, 0, -1, "2", float("nan"), []]),
    lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=4) | st.lists(inner, max_size=2),
    max_leaves=8,
)
DEEPSPEED = st.dictionaries(st.sampled_from(KEYS), ZERO_VALUES, max_size=5).map(
    lambda found: {"zero_optimization": {"stage": 2}, **found}
)


@settings(quick, max_examples=60)
@given(json_files(DEEPSPEED))
def test_any_deepspeed_file_is_completed_or_refused(data):
    config = result_or_words(lambda: deepspeed.read_config(write("ds.json", data)))
    if config is None or deepspeed.problems(config, "ds.json", 1.0, "no"):
        return
    full = result_or_words(
        lambda: deepspeed.complete_config(config, "ds.json", BatchShape(8, 2, 2, 2), 1.0, "no")
    )
    if full is not None:
        assert (full["train_batch_size"], full["gradient_clipping"]) == (8, 1.0)
        assert full["fp16"]["enabled"] is full["bf16"]["enabled"] is False


SIZES = [*sizes(8), "model_type", "id2label", "num_labels"]
MODELS = st.dictionaries(
    st.sampled_from(SIZES),
    st.sampled_from([1, 0, -1, "8", None, True, {"0": "a"}, [1]]) | json_values,
    max_size=4,
)


@quick
@given(json_files(MODELS.map(lambda found: {"model_type": "bert", **found})))
def test_any_model_configuration_is_read_or_refused(data):
    asked = ModelArguments(config_name=write("config.json", data))
    result_or_words(lambda: load_config(asked))
