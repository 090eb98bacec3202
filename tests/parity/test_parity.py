"""The same steps under any launch: one table over launchers, processes, accumulation, micro-batches by
tokens and ZeRO stages, for both tasks.

In fp32, with dropout, every setup is compared with one plain process: final weights to 1e-5 of a
tensor's largest element or a typical tensor's, losses and gradient norms of each step to 1e-5, its learning
rates and rows exactly, evaluation metrics to 1e-6. The setups are the jobs of `launchers` and `title_job`.
Several go on from another job's checkpoint, and end where one that never moved ends: from 1 process to 2
machines; from DDP to FSDP to 3 processes; from DDP to ZeRO-2 to ZeRO-3; titles from DDP to ZeRO-3 to 1
process.

Adam's epsilon and the head's first bias are the defaults. Left out of the weights are the elements whose
gradient is rounding alone (`outcome.GRADIENT_ROUNDING`): below 5 % of them.
"""

import functools
import json

import pytest
import torch
from golden import FILE
from run_folders import read_json
from safetensors.torch import load_file
from title_job import ALL_JOBS

from samerun.reports.tracker import read_history
from samerun.tools.moving.outcome import (
    METRICS_TOLERANCE,
    PREDICTIONS_TOLERANCE,
    TOLERANCE,
    compare,
    read_outcome,
)

LEFT_OUT = 0.05  # the largest share of weights with gradients of rounding alone: classifier 0.7 %, titles 4 %
COMPARED = [name for name, job in ALL_JOBS.items() if name != job.reference and job.precision == "no"]


@pytest.fixture(scope="module")
def outcome(home, launched):
    return functools.cache(lambda name: read_outcome(launched(name).folder, home / "observed"))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_nothing_but_rounding_differs_from_one_process(name, outcome, launched):
    job, ours = ALL_JOBS[name], outcome(name)
    found = compare(ours, outcome(job.reference))

    run = read_json(launched(name).folder / "run.json")
    assert (run["world_size"], run["zero_stage"]) == (job.processes, job.zero_stage)
    done = job.resumes[1] if job.resumes else 0
    assert list(ours.rows) == list(ours.steps) == list(range(done + 1, 7))
    assert found.same_rows
    assert found.same_learning_rates
    assert found.losses <= TOLERANCE
    assert found.grad_norms <= TOLERANCE
    assert found.weights <= TOLERANCE, found.where
    assert found.left_out <= LEFT_OUT
    assert found.predictions <= PREDICTIONS_TOLERANCE
    assert found.metrics <= METRICS_TOLERANCE
    if job.max_tokens is not None:  # it cut steps into several micro-batches
        state = read_json(launched(name).folder / "checkpoints" / "step_6" / "state.json")
        assert state["padded_tokens"] > 6 * job.max_tokens * job.processes
    if done < 3:  # it has both evaluations
        folders = [launched(each).folder for each in (name, job.reference)]
        check_best_model(*folders, job.averages)


def check_best_model(ours, theirs, averages):
    """Its scores, which are the exported model's, and its weights, if they are averages."""
    metrics, expected = (read_json(folder / "metrics.json") for folder in (ours, theirs))
    assert metrics["best_step"] == expected["best_step"]
    for key, value in expected.items():
        if key.startswith(("eval_", "test_")) and isinstance(value, float) and "per_second" not in key:
            # Rounding may swap two rows of nearly equal scores, seen under ZeRO-3.
            of_the_order = any(part in key for part in ("roc_auc", "average_precision", "lrap"))
            bound = 2e-3 if of_the_order else METRICS_TOLERANCE
            assert metrics[key] == pytest.approx(value, rel=0, abs=bound), key
    labels = [[row["label"] for row in each.get("eval_per_label", ())] for each in (metrics, expected)]
    assert labels[0] == labels[1]
    if averages:
        own, other = (load_file(folder / "best" / "model.safetensors") for folder in (ours, theirs))
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


# Golden metrics
# -------------------------------------------------------------------------------------------------------

# Another CPU adds in another order. Losses and metrics of the setups above are within 1e-7 and 1e-8 of each
# other after six steps, gradient norms within 1e-6, and with torch's and MKL's kernels for older CPUs
# (ATEN_CPU_CAPABILITY=default, MKL_ENABLE_INSTRUCTIONS=SSE4_2) they are as near; these bounds leave a factor
# of 100 to it, and no refactor hides in them.
GOLDEN_LOSS, GOLDEN_NORM = 1e-5, 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), [("classify", "python"), ("titlegen", "titles")])
def test_losses_and_metrics_are_the_golden_ones(task, name, launched):
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    found = read_history(launched(name).folder)

    hint = "python tests/parity/golden.py --write if that is meant; written with " + json.dumps(
        golden["versions"]
    )
    assert [event.keys() for event in found] == [event.keys() for event in golden[task]], hint
    for event, expected in zip(found, golden[task], strict=True):
        for key, value in expected.items():
            bounds = {
                "rel": GOLDEN_NORM if key == "grad_norm" else GOLDEN_LOSS,
                "abs": 1e-5 if key.startswith("eval_") else 0,
            }
            assert event[key] == (value if value is None else pytest.approx(value, **bounds)), (
                key,
                event["step"],
                hint,
            )
