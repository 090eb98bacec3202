"""The task on volumes: its scores, its arguments, and a small run with its resume, export and masks."""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import launchers
import nibabel
import numpy as np
import pytest
import segment3d
import torch
from launchers import DS_CONFIGS, SCRIPTS, as_words, python, run, tool
from refusals import problems_of
from safetensors.torch import save_file

from samerun.errors import InputError, TrainingError
from samerun.files import read_lines
from samerun.images.segmentation import SegmentationLoss
from samerun.parsing import validate
from samerun.plan import evaluation_batch
from samerun.task import Batch
from samerun.tools import diff
from samerun.volumes.network import Settings, load_weights
from samerun.volumes.output import WholeVolumes

SCRIPT = segment3d.__file__
JOB = {
    "do_train": True, "do_predict": True, "max_train_samples": 3, "max_eval_samples": 3,
    "max_predict_samples": 2, "class_names": "bright,dark", "channels": "4,8", "strides": "2", "dropout": 0.1,
    "patch_size": "16,16,16", "patches_per_volume": 2, "global_batch_size": 4, "learning_rate": "1e-2",
    "lr_scheduler_type": "multistep", "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2,
    "save_steps": 2, "logging_steps": 1, "overlap": 0.1, "report_to": "tensorboard", "random_rotation": 20,
    "random_scale": "0.8,1.2", "random_intensity": 0.1, "random_noise": 0.1,
}  # fmt: skip


def job(data: Path, output_dir: Path, *more: str) -> list[str]:
    return [SCRIPT, *as_words(train_file=data, output_dir=output_dir, **JOB), *more]


def test_missing_libraries_are_named_with_their_file(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert problems_of(validate, segment3d.Arguments(output_dir="run", train_file="data")) == [
        f"{name} is not installed: pip install -r requirements-vision.txt" for name in ("monai", "nibabel")
    ]


def test_patches_are_the_median_volume_if_nobody_says_otherwise():
    shapes = (35, 51, 300), (30, 50, 400), (36, 52, 200)
    volumes = [SimpleNamespace(facts={"shape": shape}) for shape in shapes]
    chosen = Settings.choose(segment3d.Arguments(), ["background", "a"], (1.0, 1.0, 1.0), volumes)
    assert chosen.patch_size == (48, 64, 96)
    assert chosen.unet["out_channels"] == 1
    assert evaluation_batch(segment3d.Arguments()) == (1, None)  # volumes of different sizes are not padded


def test_a_model_keeps_its_network():
    given = {"channels": (4, 8), "strides": (3,), "patch_size": (9, 9, 9), "dropout": 0.1}
    model = Settings.choose(segment3d.Arguments(**given), ["background", "a"], (1.0, 1.0, 1.0), [])
    same = segment3d.Arguments(model_name_or_path="best", output_dir="run", train_file="data", **given)
    validate(same)
    assert model.updated(same) == model
    for name, value in (("channels", (8, 16)), ("strides", (1,)), ("dropout", 0.2), ("spacing", (1, 1, 2))):
        with pytest.raises(InputError, match=f"--{name}: the model of best has .*; leave it out"):
            model.updated(replace(same, **{name: value}))


def test_scores_are_means_over_volumes_and_then_over_classes():
    task = segment3d.VolumeSegmentation(SimpleNamespace(metrics=None))
    task.settings = SimpleNamespace(classes=["background", "a", "b", "c"])
    # Of each volume and class: shared, predicted, true. Class b is in one volume only, c in none.
    counts = [[[9, 9, 9], [2, 4, 4], [0, 0, 0], [0, 0, 0]], [[9, 9, 9], [4, 4, 4], [0, 3, 5], [0, 0, 0]]]
    hd95 = np.array([[np.nan, 3, np.nan, np.nan], [np.nan, 0, np.nan, np.nan]], dtype=np.float32)
    predictions = {"counts": np.array(counts), "hd95": hd95, "loss": np.array([1, 2], dtype=np.float32)}
    predictions["largest_logit"] = np.array([3.0, 4.0])
    assert task.score(predictions, SimpleNamespace(path="val", ids=["v0", "v1"])) == {
        "loss": 1.5, "mean_dice": 0.375, "dice_a": 0.75, "dice_b": 0.0, "dice_c": None,
        "mean_iou": pytest.approx(1 / 3), "iou_a": pytest.approx(2 / 3), "iou_b": 0.0, "iou_c": None,
        "mean_hd95": 1.5, "hd95_a": 1.5, "hd95_b": None, "hd95_c": None,
    }  # fmt: skip


@pytest.mark.parametrize("labelled", [True, False])
def test_nan_logits_end_the_run_before_a_mask_is_written(labelled, tmp_path):
    task = segment3d.VolumeSegmentation(segment3d.Arguments(output_dir=str(tmp_path)))
    task.settings = SimpleNamespace(classes=["background", "a"], patch_size=(4, 4, 4), overlap=0.5)
    task.launch, task.loss = SimpleNamespace(gathers_weights=False), SegmentationLoss()
    task.whole = {"test": WholeVolumes([], False, True, 2)}
    sizes, images = torch.full((2, 3), 4), torch.zeros(2, 1, 4, 4, 4)
    images[1] = torch.nan
    inputs = {"image": images, "shape": sizes, "size": sizes, "spacing": sizes, "keeps_mask": sizes[:, 0]}
    labels = torch.zeros(2, 4, 4, 4, dtype=torch.uint8) if labelled else None
    batch = Batch(torch.arange(2), inputs, labels)
    predictions = {name: values.numpy() for name, values in task.predict(torch.nn.Identity(), batch).items()}
    split = SimpleNamespace(path="test", ids=["v0", "v1"], labelled=labelled)
    for use in (task.score, lambda *given: list(task.lines(*given))):
        with pytest.raises(TrainingError, match="logits are not finite for 1 of 2 volumes, first for v1"):
            use(predictions, split)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    weights = {name: torch.full_like(value, torch.inf) for name, value in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="its weight weight holds NaN or infinity"):
        load_weights(model, tmp_path)


# Launched


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with data/, drawn by scripts/make_sample_data.py."""
    folder = tmp_path_factory.mktemp("volumes")
    launchers.hide_gpus(folder)
    run([*python(), str(SCRIPTS / "make_sample_data.py"), "volumes", "--output_dir", "data"], folder).check()
    return folder


@pytest.fixture(scope="module")
def trained(place) -> Path:
    run([*python(), *job(place / "data", place / "one")], place).check()
    return place / "one"


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bytes(trained, place):
    """Patches, their augmentation and dropout are functions of the step, whoever prepares them."""
    folder = shutil.copytree(trained, place / "resumed")
    shutil.rmtree(folder / "checkpoints" / "step_4")
    more = ["--resume_from_checkpoint", "auto", "--dataloader_num_workers", "1"]
    said = run([*python(), *job(place / "data", folder, *more)], place).check().out
    assert f"resume         {folder / 'checkpoints' / 'step_2'}" in said
    names = ["history.jsonl", "best/model.safetensors", "plots/image_truth_prediction.png"]
    names += [f"checkpoints/step_4/{name}.safetensors" for name in ("model", "optimizer")]
    assert [name for name in names if (folder / name).read_bytes() != (trained / name).read_bytes()] == []


@pytest.mark.slow
def test_processes_that_share_out_the_weights_score_volumes_as_one(trained, place):
    """The first evaluates two volumes in a batch, the second one."""
    config = json.loads((DS_CONFIGS / "zero3.json").read_text(encoding="utf-8"))
    for name in ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance"):
        config["zero_optimization"][f"stage3_{name}"] = 0  # gathers also small weights, in every pass
    (place / "zero3.json").write_text(json.dumps(config), encoding="utf-8")
    more = ["--deepspeed", "zero3.json", "--per_device_eval_batch_size", "2", "--ddp_timeout", "60"]
    run([*launchers.torchrun(2), *job(place / "data", place / "zero3", *more)], place).check()
    for name in ("eval_loss", "eval_mean_dice"):
        histories = (read_lines(folder / "history.jsonl") for folder in (place / "zero3", trained))
        ours, theirs = ([line[name] for line in history if name in line] for history in histories)
        assert len(ours) == 2
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
def test_the_lines_of_the_card_give_the_masks_that_were_written(trained, place, monkeypatch):
    card = (trained / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    monkeypatch.chdir(trained)
    lines = list(read_lines(trained / "predictions.jsonl"))
    assert [line["id"] for line in lines] == ["ball_20", "ball_21"]
    metrics = json.loads((trained / "metrics.json").read_text(encoding="utf-8"))
    for name, values in diff.read_run(trained)["resampled"].items():
        assert values[0] == pytest.approx(metrics[f"test_{name}"])
    for line in lines:
        shutil.copy(line["image"], "image.nii.gz")
        found: dict = {}
        exec(code, found)
        mask, image = nibabel.load(line["mask"]), nibabel.load(line["image"])
        assert np.array_equal(mask.affine, image.affine)
        assert nibabel.aff2axcodes(mask.affine) != ("R", "A", "S") or line["id"] == "ball_20"
        written = np.asarray(nibabel.as_closest_canonical(mask).dataobj)
        assert (written == found["classes"].numpy()).mean() > 0.9999  # rounding may decide a voxel
        volumes = np.bincount(written.ravel(), minlength=3) * np.prod(mask.header.get_zooms()) / 1000
        expected = {"bright": volumes[1], "dark": volumes[2]}
        assert line["millilitres"] == pytest.approx(expected, abs=1e-5)
        assert set(line["dice"]) == {"bright", "dark"}


@pytest.mark.slow
def test_a_model_predicts_unlabelled_volumes_of_another_folder(trained, place):
    new = place / "new"
    (new / "images").mkdir(parents=True)
    shutil.copy(place / "data" / "images" / "ball_20.nii.gz", new / "images" / "ball_20.nii.gz")
    asked = as_words(do_predict=True, model_name_or_path=trained / "best", test_file=new, output_dir=trained)
    run([*python(), SCRIPT, *asked, "--report_to", "none"], place).check()
    (line,) = read_lines(trained / "predictions_new.jsonl")
    assert line["mask"] == "predictions_new/ball_20.nii.gz"
    assert (trained / line["mask"]).read_bytes() == (trained / "predictions" / "ball_20.nii.gz").read_bytes()


@pytest.mark.slow
def test_the_plan_of_volumes(place):
    options = ["--launch", "accelerate_configs/zero2.yaml", "--num_processes", "4", "--gpu_memory", "24"]
    planned = run([*tool("plan"), *options, *job(place / "data", place / "never")], place).check().out
    assert "for micro-batches of 1x1x16x16x16" in planned
    assert "3 training volumes, 2 patches of 16x16x16 voxels" in planned
    assert "zero3_offload.yaml" in planned
