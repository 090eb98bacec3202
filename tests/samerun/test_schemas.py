"""The schemas of a run's files, and folders of released versions. Runs of today: tests/in_process.py."""

import json
from pathlib import Path

import jsonschema
import pytest
from run_folders import SCHEMAS, check_run_folder, validator

from samerun.run_folder import SCHEMA_VERSION
from samerun.tools import diff

FROZEN = sorted((Path(__file__).parents[1] / "fixtures" / "runs").glob("*/*"))
FILES = {"run.json", "status.json", "metrics.json", "history.jsonl", "predictions.jsonl"}


@pytest.mark.parametrize("folder", FROZEN, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_folders_of_every_version_can_be_read(folder, monkeypatch):
    monkeypatch.setattr(diff, "RESAMPLES", diff.FEWEST)
    assert check_run_folder(folder) == FILES
    run = diff.read_run(folder)
    known = {name.removeprefix("test_"): value for name, value in run["metrics"].items()}
    assert run["resampled"]
    for name in run["resampled"].keys() & known.keys():
        near = 0.02 if name == "spearman" else 0.01  # early versions rounded values, so that some are equal
        assert run["resampled"][name][0] == pytest.approx(known[name], abs=near, nan_ok=True)


def test_there_is_a_frozen_folder_of_each_kind_of_predictions():
    kinds = validator("predictions").schema["oneOf"]
    files = [(folder / "predictions.jsonl").read_text(encoding="utf-8") for folder in FROZEN]
    lines = [json.loads(text.splitlines()[0]) for text in files]
    for kind in kinds:
        assert any(set(kind["required"]) <= line.keys() for line in lines), kind["title"]


def test_every_schema_has_this_version():
    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text(encoding="utf-8"))
        assert schema["$id"].endswith(f":{SCHEMA_VERSION}")
        assert schema["title"].endswith(f"version {SCHEMA_VERSION}")
        version = schema["properties"].get("schema_version", {"const": SCHEMA_VERSION})
        assert version == {"const": SCHEMA_VERSION}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("run", {"launcher": "mpirun"}),
        ("run", {"plan": {}}),
        ("run", {"line_schema_versions": {"history.jsonl": 2}}),
        ("status", {"state": "finished"}),
        ("status", {"mood": "good"}),
        ("metrics", {"eval_loss": "low"}),
        ("metrics", {"schema_version": 0}),
        ("history", {"grad_norm": "nan"}),
        ("history", {"step": None}),
        ("predictions", {"id": None}),
        ("predictions", {"labels": "joy"}),
        ("predictions", {"reference": "joy"}),
    ],
)
def test_another_content_is_refused(name, changes):
    folder = next(folder for folder in FROZEN if folder.name == "classify")
    path = next(folder.glob(f"{name}.json*"))
    content = json.loads(
        path.read_text(encoding="utf-8").splitlines()[0] if path.suffix == ".jsonl" else path.read_text()
    )
    validator(name).validate(content)
    with pytest.raises(jsonschema.ValidationError):
        validator(name).validate(content | changes)


def test_a_line_of_the_history_is_of_a_logging_or_of_an_evaluation():
    place = {"step": 3, "epoch": 1.0}
    for values in ({"loss": 0.5, "learning_rate": 0.1, "grad_norm": 1.0}, {"eval_score": 0.5}):
        validator("history").validate(place | values)
    for values in ({}, {"loss": 0.5}, {"score": 0.5}):
        with pytest.raises(jsonschema.ValidationError):
            validator("history").validate(place | values)
