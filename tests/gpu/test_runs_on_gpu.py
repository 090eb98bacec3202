"""Whole runs on one GPU: as on a CPU, the same under every launcher; checkpoints that move; kills."""

import json
import shutil

import launchers
import pytest
import torch
import transformers.exporters
from gpu_job import LAUNCHERS, TASKS, WITHOUT_GPU, losses
from launchers import LABELS
from run_folders import read_json
from safetensors.torch import load_file

from samerun.kernels.dropout import DropoutMask, dropout_by_row
from samerun.reports.tracker import read_history
from samerun.tools.soak import differences

pytestmark = pytest.mark.slow
TOLERANCE = {"no": 1e-4, "bf16": 5e-2, "fp16": 1e-2}  # of losses, beside fp32 under plain python
SOME = ("python", "torchrun", "zero2", "zero3", "fsdp")
MATRIX = [
    *(("classify", launcher, precision) for launcher in LAUNCHERS for precision in TOLERANCE),
    *((task, launcher, "bf16") for task in TASKS if task != "classify" for launcher in SOME),
]


@pytest.mark.parametrize("task", TASKS)
def test_fp32_on_a_gpu_and_on_a_cpu_agree(runs, task):
    cpu, gpu = runs.train(task, "cpu", WITHOUT_GPU), runs.train(task, "exact")
    assert read_json(gpu / "run.json")["device"] == "cuda"
    assert len(losses(gpu)) == 6
    for ours, theirs in zip(read_history(gpu), read_history(cpu), strict=True):
        assert ours.keys() == theirs.keys()
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    if task == "classify":  # the others amplify rounding
        found, expected = (load_file(place / "best" / "model.safetensors") for place in (gpu, cpu))
        for name, weight in expected.items():
            if not name.endswith("key.bias"):
                assert (found[name] - weight).norm() <= 1e-2 * weight.norm().clamp(min=1), name


@pytest.mark.parametrize(("task", "launcher", "precision"), MATRIX)
def test_the_job_is_the_same_under_every_launcher(runs, task, launcher, precision):
    if launcher.startswith("fsdp") and precision == "fp16":
        pytest.skip("refused")
    file = launchers.DS_CONFIGS / "zero2.json" if launcher == "deepspeed" else None
    settings = {"mixed_precision": precision, "deepspeed": file}
    found = losses(runs.train(task, f"{launcher}_{precision}", None, launcher, **settings))
    near_zero = 0.0 if task == "classify" else 5e-3
    exact = losses(runs.train(task, "exact"))
    assert found == pytest.approx(exact, rel=TOLERANCE[precision], abs=near_zero)


def test_tensorfloat_passes_the_check_of_the_export(runs):
    found = losses(runs.train("classify", "tf32", tf32=True))
    assert found == pytest.approx(losses(runs.train("classify", "exact")), rel=1e-2)


def test_compiled_layers_train_as_they_are(runs):
    plain, compiled = (
        runs.train(
            "classify", f"compiled_{compiles}", config_name="without_dropout/config.json",
            torch_compile=compiles, dropout_by="torch",
        )
        for compiles in (False, True)
    )  # fmt: skip
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-3)


def resumed(runs, place, name, *where, **changed):
    """A run that goes on from step 3 of the run in `place`."""
    start = runs.home / f"for_{name}" / "step_3"
    shutil.copytree(place / "checkpoints" / "step_3", start)
    return runs.train("classify", name, *where, resume_from_checkpoint=start, **changed)


@pytest.mark.parametrize(("first", "then"), [("cpu", None), ("exact", WITHOUT_GPU)])
def test_a_checkpoint_moves_between_cpu_and_gpu(runs, first, then):
    """Dropout by row: both devices draw the same masks."""
    place = runs.train("classify", first, WITHOUT_GPU if first == "cpu" else None)
    moved = resumed(runs, place, f"moved_from_{first}", then)
    assert losses(moved)[-3:] == pytest.approx(losses(place)[-3:], rel=1e-3)


@pytest.mark.parametrize(
    ("first", "then"), [("python", "python"), ("zero2", "python"), ("python", "zero2"), ("zero2", "zero3")]
)
def test_an_fp16_run_moves_with_its_loss_scale(runs, first, then):
    settings = {"mixed_precision": "fp16", "deepspeed": None}
    place = runs.train("classify", f"{first}_fp16", None, first, **settings)
    moved = resumed(runs, place, f"{then}_of_{first}", None, then, **settings)
    states = [read_json(run / "checkpoints" / "step_6" / "state.json") for run in (place, moved)]
    scales = [state["loss_scale"].get("scale", state["loss_scale"].get("cur_scale")) for state in states]
    assert scales[0] == scales[1]
    for key in ("updates", "step", "skipped_in_a_row"):
        assert states[0][key] == states[1][key], key
    assert losses(moved)[-3:] == pytest.approx(losses(place)[-3:], rel=1e-2)  # added in any order
    skipped = [read_json(run / "metrics.json")["train_skipped_steps"] for run in (place, moved)]
    assert skipped[0] == skipped[1]


def test_a_run_that_goes_on_has_the_same_bytes(runs):
    place = runs.train("classify", "straight", full_determinism=True, dropout_by="torch")
    other = runs.home / "classify_other"
    shutil.copytree(place, other)
    shutil.rmtree(other / "checkpoints" / "step_6")
    settings = {"full_determinism": True, "dropout_by": "torch", "resume_from_checkpoint": "auto"}
    assert differences(place, runs.train("classify", "other", **settings)) == []


def test_killed_runs_end_with_the_same_bytes(runs):
    words = TASKS["classify"]({"output_dir": runs.home / "unused", "full_determinism": True})
    soak = [*launchers.tool("soak"), "--kills", "5", "--output_dir", str(runs.home / "soak")]
    assert "the same" in runs.call([*soak, "classify", *words])


def test_a_model_trained_on_a_gpu_predicts_and_exports(runs):
    model = runs.train("classify", "python_bf16", mixed_precision="bf16", deepspeed=None) / "best"
    assert len(read_json(model / "config.json")["id2label"]) == len(LABELS)
    script = str(launchers.REPOSITORY / "app" / "predict.py")
    predict = [*launchers.python(), script, str(model), "--text", "a1 b2 c3"]
    on_gpu, on_cpu = (json.loads(runs.call(predict, device)) for device in (None, WITHOUT_GPU))
    assert on_gpu["probabilities"] == pytest.approx(on_cpu["probabilities"], abs=1e-2)
    if hasattr(transformers.exporters, "ExportedModel"):  # transformers 5.23
        runs.call([*launchers.tool("export-onnx"), str(model)])
        assert (model.parent / "best_onnx" / "model.onnx").exists()


@pytest.mark.parametrize("shape", [(3, 50), (3, 4, 7, 9), (12, 129), (1, 13)])
def test_masks_are_those_of_a_cpu(shape):
    masks = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        kept = torch.full(shape, 7, dtype=torch.uint8, device=device)
        with dropout_by_row(None, (4, 9, 11)):
            DropoutMask.draw(0.3).fill(kept)
        masks.append(kept.cpu())
    assert torch.equal(*masks)
    assert set(masks[0].unique().tolist()) == {0, 1}
