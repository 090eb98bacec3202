"""Every task on one GPU: in fp32 as on a CPU, in bf16 the same under every launcher; models and checkpoints
that move between the GPU and a CPU; kills."""

from __future__ import annotations

import json
import shutil

import images_job
import launchers
import masks_job
import pytest
import title_job
import torch
import transformers.exporters
from gpu_job import LAUNCHERS, WITHOUT_GPU, losses, start
from launchers import REPOSITORY, as_words, training, write_bert_config, write_corpus

from samerun.kernels.dropout import DropoutMask, dropout_by_row
from samerun.tools.soak import differences

pytestmark = pytest.mark.slow
BF16 = 5e-2  # of losses, beside fp32
MOVING = ("python", "torchrun", "zero2", "zero3", "fsdp")
COMMON = {"max_steps": 6, "logging_steps": 1, "save_steps": 3, "save_total_limit": 5, "dropout_by": "row"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_corpus(folder)
    write_bert_config(folder / "without_dropout", 0.0)
    title_job.write_corpus(folder / "titles")
    images_job.write_idx(folder / "mnist", rows=64, size=28)
    masks_job.write(folder / "masks")
    masks_job.segformer(folder / "segformer")
    return folder


def titlegen(folder, changed):
    settings = {"dropout_by": "row", "save_steps": 3, "num_beams": 1, "num_return_sequences": 1} | changed
    return ["--from_scratch", *title_job.arguments(output_dir=folder, **settings)]


def image_classify(folder, changed):
    mnist = folder.parent / "mnist"
    settings = COMMON | {"global_batch_size": 8, "train_file": mnist, "report_to": "none"} | changed
    return as_words(output_dir=folder, **settings)


def segment(folder, changed):
    data = {"train_file": folder.parent / "masks", "config_name": folder.parent / "segformer"}
    return masks_job.arguments(output_dir=folder, **COMMON, **data, **changed)


TASKS = {task.__name__: task for task in (titlegen, image_classify, segment)}


def run(home, task, name, environment=None, launcher=LAUNCHERS["python"], **changed):
    """A short training of `task`, from the folder of its data; gives the run's folder."""
    place = home / f"{task}_{name}"
    script = [str(REPOSITORY / "app" / f"{task}.py"), "--do_train=true"]
    start(home / "titles", [*launcher(), *script, *TASKS[task](place, changed)], environment)
    return place


@pytest.mark.parametrize("task", TASKS)
def test_fp32_on_a_gpu_and_on_a_cpu_agree(home, task):
    cpu, gpu = run(home, task, "cpu", WITHOUT_GPU), run(home, task, "gpu")
    assert json.loads((gpu / "run.json").read_text(encoding="utf-8"))["device"] == "cuda"
    assert len(losses(gpu)) == 6
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-3)


@pytest.mark.parametrize("launcher", MOVING)
@pytest.mark.parametrize("task", TASKS)
def test_bf16_is_near_fp32_under_every_launcher(home, task, launcher):
    place = run(home, task, f"{launcher}_bf16", None, LAUNCHERS[launcher], mixed_precision="bf16")
    exact = run(home, task, f"beside_{launcher}")
    assert losses(place) == pytest.approx(losses(exact), rel=BF16, abs=5e-3)


@pytest.mark.parametrize(("first", "then"), [(WITHOUT_GPU, None), (None, WITHOUT_GPU)])
def test_a_checkpoint_moves_between_cpu_and_gpu(home, first, then):
    """Dropout by row: both devices draw the same masks."""
    settings = {"save_steps": 3, "save_total_limit": 5, "dropout_by": "row"}
    name = "from_cpu" if first else "from_gpu"
    begun, moved = home / name, home / f"{name}_moved"
    start(home, [*launchers.python(), *training(begun, **settings)], first)
    resumed = settings | {"resume_from_checkpoint": begun / "checkpoints" / "step_3"}
    start(home, [*launchers.python(), *training(moved, **resumed)], then)
    assert losses(moved)[-3:] == pytest.approx(losses(begun)[-3:], rel=1e-3)


def test_a_run_that_goes_on_has_the_same_bytes(home):
    settings = {"full_determinism": True, "save_steps": 3, "save_total_limit": 5}
    straight, other = home / "straight", home / "other"
    start(home, [*launchers.python(), *training(straight, **settings)])
    shutil.copytree(straight, other)
    shutil.rmtree(other / "checkpoints" / "step_6")
    words = training(other, **settings, resume_from_checkpoint="auto")
    start(home, [*launchers.python(), *words])
    assert differences(straight, other) == []


def test_killed_runs_end_with_the_same_bytes(home):
    _, *words = training(home / "unused", full_determinism=True)
    soak = [*launchers.tool("soak"), "--kills", "5", "--output_dir", str(home / "soak")]
    said = start(home, [*soak, "classify", *words])
    assert "the same" in said


def test_a_model_trained_on_a_gpu_predicts_and_exports(home):
    place = home / "exported"
    start(home, [*launchers.python(), *training(place, mixed_precision="bf16")])
    model = str(place / "best")
    predict = [*launchers.python(), str(REPOSITORY / "app" / "predict.py"), model, "--text", "a1 b2 c3"]
    found = [json.loads(start(home, predict, device)) for device in (None, WITHOUT_GPU)]
    scores = [row["probabilities"] for row in found]
    assert scores[0] == pytest.approx(scores[1], abs=1e-2)
    if hasattr(transformers.exporters, "ExportedModel"):  # transformers 5.23
        start(home, [*launchers.tool("export-onnx"), model])
        assert (place / "best_onnx" / "model.onnx").exists()


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
