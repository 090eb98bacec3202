"""The same steps under any launch: weights, losses, gradient norms and figures agree with one plain process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launchers import JOBS, REFERENCES
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

COMPARED = [name for name, job in JOBS.items() if name not in REFERENCES.values() and job.precision == "no"]


def read_history(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]


def weights(folder: Path, step: int = 6) -> dict:
    found = load_file(folder / "checkpoints" / f"step_{step}" / "model.safetensors")
    # Adding a constant to all scores of a softmax changes nothing, so a key's bias has a true gradient of zero. Adam divides
    # what round-off makes of it by its own size, and moves the bias by whole learning rates in directions of no meaning.
    return {name: tensor for name, tensor in found.items() if not name.endswith(".key.bias")}


@pytest.mark.parametrize("name", COMPARED)
def test_weights_agree_with_one_process(name, launched):
    ours = weights(launched(name).folder)
    theirs = weights(launched(REFERENCES[JOBS[name].global_batch_size]).folder)

    assert ours.keys() == theirs.keys()
    assert len(ours) > 30
    differences = {key: float((ours[key] - theirs[key]).abs().max() / theirs[key].abs().max()) for key in theirs}
    worst = max(differences, key=differences.get)
    assert differences[worst] <= 1e-5, f"{worst}: {differences[worst]:.1e}"


@pytest.mark.parametrize("name", COMPARED)
def test_history_agrees_with_one_process(name, launched):
    job = JOBS[name]
    ours = read_history(launched(name).folder)
    theirs = read_history(launched(REFERENCES[job.global_batch_size]).folder)
    if job.goes_on_from:
        first = job.goes_on_from[1] + 1
        assert ours[0]["step"] == first
        theirs = [event for event in theirs if event["step"] >= first]

    assert [event.keys() for event in ours] == [event.keys() for event in theirs]
    for our, their in zip(ours, theirs, strict=True):
        for key, value in their.items():
            if key in ("step", "epoch", "learning_rate"):
                assert our[key] == value, (key, our)
            else:
                assert our[key] == pytest.approx(value, rel=1e-6, abs=1e-6 if key.startswith("eval_") else 0), (key, our)


@pytest.mark.parametrize("reference", REFERENCES.values())
def test_the_job_is_the_hard_case_it_is_meant_to_be(reference, launched):
    run = json.loads((launched(reference).folder / "run.json").read_text(encoding="utf-8"))
    steps = [event for event in read_history(launched(reference).folder) if "loss" in event]

    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5, 6]
    assert all(event["grad_norm"] > run["arguments"]["max_grad_norm"] for event in steps)
    assert run["plan"]["steps_per_epoch"] == 3
    assert run["plan"]["num_rows"] % run["plan"]["batch"]["global_batch_size"] != 0
    before, after = (weights(launched(reference).folder, step) for step in (2, 6))
    assert all((before[key] != after[key]).any() for key in after)


def test_every_weight_was_partitioned(launched):
    config = json.loads((launched("partitioned_zero3").folder / "run.json").read_text(encoding="utf-8"))["deepspeed_config"]

    assert config["zero_optimization"]["stage3_param_persistence_threshold"] == 0
