"""Whole runs on one GPU: against the CPU, under every launcher, and fp16 runs that go on with their loss
scale."""

import json
import shutil

import launchers
import pytest
import torch
from gpu_job import LAUNCHERS, TOLERANCE, WITHOUT_GPU, losses, start
from launchers import LABELS, training, write_bert_config, write_corpus
from safetensors.torch import load_file

from samerun.reports.tracker import read_history

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("gpu")
    write_corpus(home)
    write_bert_config(home / "without_dropout", 0.0)
    return home


def run(home, name, environment=None, launcher=launchers.python, **changed):
    """Trains the common job and gives its folder. `launcher`: -> the launcher's command."""
    place = home / name
    job = training(place, **{"global_batch_size": 15, "test_file": "test.csv", **changed})
    start(home, [*launcher(), *job], environment)
    return place


def test_fp32_on_a_gpu_and_on_a_cpu_agree(folder):
    cpu = run(folder, "cpu", WITHOUT_GPU)
    gpu = run(folder, "gpu", dropout_by="row")
    assert json.loads((gpu / "run.json").read_text(encoding="utf-8"))["device"] == "cuda"
    for ours, theirs in zip(read_history(gpu), read_history(cpu), strict=True):
        assert ours.keys() == theirs.keys()
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    found, expected = (load_file(place / "best" / "model.safetensors") for place in (gpu, cpu))
    for name, weight in expected.items():
        if not name.endswith("key.bias"):
            assert (found[name] - weight).norm() <= 1e-2 * weight.norm().clamp(min=1), name


@pytest.fixture(scope="module")
def exact(folder):
    """The losses of the job in fp32."""
    return losses(run(folder, "exact", dropout_by="row"))


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_job_is_the_same_under_every_launcher(folder, exact, launcher, precision):
    if launcher.startswith("fsdp") and precision == "fp16":
        pytest.skip("refused")
    file = launchers.DS_CONFIGS / "zero2.json" if launcher == "deepspeed" else None
    name = f"{launcher}_{precision}"
    settings = {"mixed_precision": precision, "deepspeed": file, "dropout_by": "row"}
    assert losses(run(folder, name, None, LAUNCHERS[launcher], **settings)) == pytest.approx(
        exact, rel=TOLERANCE[precision]
    )


def test_tensorfloat_passes_the_check_of_the_export(folder, exact):
    assert losses(run(folder, "tf32", tf32=True, dropout_by="row")) == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize(("first", "then"), [("zero2", "python"), ("python", "zero2"), ("zero2", "zero3")])
def test_an_fp16_run_moves_with_its_loss_scale(folder, first, then):
    settings = {"mixed_precision": "fp16", "dropout_by": "row", "max_steps": 6, "save_steps": 3}
    place = run(folder, f"{first}_to_{then}", None, LAUNCHERS[first], save_total_limit=5, **settings)
    start = folder / f"from_{first}_for_{then}" / "step_3"
    shutil.copytree(place / "checkpoints" / "step_3", start)
    run(folder, f"{then}_of_{first}", None, LAUNCHERS[then], resume_from_checkpoint=start, **settings)
    states = [
        json.loads((folder / name / "checkpoints" / "step_6" / "state.json").read_text(encoding="utf-8"))
        for name in (place.name, f"{then}_of_{first}")
    ]
    scales = [state["loss_scale"].get("scale", state["loss_scale"].get("cur_scale")) for state in states]
    assert scales[0] == scales[1]
    assert losses(folder / f"{then}_of_{first}")[-3:] == pytest.approx(losses(place)[-3:], rel=1e-2)


def test_an_fp16_run_goes_on_with_its_loss_scale(folder):
    settings = {"mixed_precision": "fp16", "max_steps": 6, "save_steps": 3, "save_total_limit": 5}
    whole = run(folder, "fp16", **settings)
    begun = folder / "fp16_resumed"
    shutil.copytree(whole / "checkpoints" / "step_3", begun / "start" / "step_3")
    resumed = run(folder, "fp16_again", **settings, resume_from_checkpoint=begun / "start" / "step_3")
    states = [
        json.loads((p / "checkpoints" / "step_6" / "state.json").read_text(encoding="utf-8"))
        for p in (whole, resumed)
    ]
    assert states[0]["loss_scale"] is not None
    for key in ("loss_scale", "updates", "step", "skipped_in_a_row"):
        assert states[0][key] == states[1][key], key
    after = [[e["loss"] for e in read_history(p) if "loss" in e and e["step"] > 3] for p in (whole, resumed)]
    assert after[0] == pytest.approx(after[1], rel=1e-2)  # kernels that add in any order
    metrics = [json.loads((p / "metrics.json").read_text(encoding="utf-8")) for p in (whole, resumed)]
    assert metrics[0]["train_skipped_steps"] == metrics[1]["train_skipped_steps"]


def test_the_usual_command_exports_a_plain_model(folder):
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    place = run(folder, "auto", mixed_precision="bf16" if has_bf16 else "no")
    config = json.loads((place / "best" / "config.json").read_text(encoding="utf-8"))
    assert len(config["id2label"]) == len(LABELS)


def test_compiled_layers_train_as_they_are(folder):
    plain, compiled = (
        run(folder, f"compiled_{compiles}", config_name="without_dropout/config.json", torch_compile=compiles)
        for compiles in (False, True)
    )
    assert losses(plain)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-3)
