"""The task on masks: its loss and scores, small runs of two kinds of model, resume, bad arguments."""

import json
import shutil

import datasets
import launchers
import masks_job
import numpy as np
import pytest
import segment
import torch
import transformers
from in_process import check_evaluated_alike
from masks_job import CLASSES, SIZE
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation, pipeline

from samerun.errors import TrainingError
from samerun.files import read_lines
from samerun.images.segmentation import unpack
from samerun.launch import Launch
from samerun.models.pretrained import set_labels
from samerun.plan import Modes, evaluation_batch
from samerun.runtime import join_rows


def loaded(tmp_path, modes=(True, True, False), **given):
    """The task with its data, a tiny SegFormer by default."""
    named = {"config_name": str(masks_job.segformer(tmp_path / "model")), "from_scratch": True} | given
    task = segment.Segmentation(segment.Arguments(output_dir=str(tmp_path / "run"), image_size=SIZE, **named))
    return task, task.load(Launch(), Modes(*modes))


def test_the_loss_of_a_batch_does_not_depend_on_micro_batches(tmp_path, token_cache):
    data = str(masks_job.write(tmp_path / "data", rows=5))
    task, found = loaded(tmp_path, train_file=data, validation_file=data, class_weights="balanced")
    torch.manual_seed(0)
    model, train = task.build().eval(), found.splits["train"]
    whole = train.collate(np.arange(5))
    assert int(task.num_targets(whole)) == 5
    with torch.no_grad():
        loss = float(task.loss_sum(model, whole))
        parts = [float(task.loss_sum(model, train.collate(rows))) for rows in (np.arange(3), np.arange(3, 5))]
        assert sum(parts) == pytest.approx(loss, rel=1e-5)
        # Evaluated in the images' own size, which is the model's here: the same loss.
        predicted = task.predict(model, found.splits["validation"].collate(np.arange(5)))
    assert float(predicted["loss"].sum()) == pytest.approx(loss, rel=1e-5)
    predictions = {name: value.numpy() for name, value in predicted.items()}
    scores = task.score(predictions, found.splits["validation"])
    assert scores["loss"] == pytest.approx(loss / 5, rel=1e-5)
    assert set(scores) == {*task.shown_metrics, *(f"{k}_{c}" for k in ("iou", "dice") for c in CLASSES)}


@pytest.mark.parametrize("inference", ["whole", "sliding_window"])
def test_images_of_mixed_sizes_are_predicted_in_their_own(inference, tmp_path, token_cache):
    data = str(masks_job.write(tmp_path / "data", rows=4, sizes=(SIZE, (50, 40), (20, 70))))
    modes = Modes(True, True, True)
    task, found = loaded(tmp_path, modes, train_file=data, test_file=data, inference=inference)
    torch.manual_seed(0)
    model, test = task.build().eval(), found.splits["test"]
    # By windows one image at a time: a batch would be padded to its largest image.
    at_once = evaluation_batch(segment.Arguments(output_dir="run"), False, test.evaluation_rows)
    assert at_once == ((8 if inference == "whole" else 1), None)
    with torch.no_grad():
        together = task.predict(model, test.collate(np.arange(4)))
        alone = [task.predict(model, test.collate(np.array([row]))) for row in range(4)]
    for name, values in together.items():
        torch.testing.assert_close(values, join_rows([each[name] for each in alone]), rtol=1e-4, atol=1e-4)
    totals = together["counts"][..., 2].sum(1).tolist()  # of the truth
    masks = [np.asarray(Image.open(mask)) for mask in test.targets.values.sources[0].cells]
    assert totals == [int((mask != 255).sum()) for mask in masks]
    predicted = unpack(together["mask"][1].numpy(), masks[1].shape, 3)
    count = np.bincount(predicted[masks[1] != 255], minlength=3)
    assert together["counts"][1, :, 1].tolist() == count.tolist()
    train = found.splits["train"]
    batch = (train.augment or train.collate)(np.arange(2), *([3] if train.augment else []))
    assert (batch.inputs["pixel_values"].shape, batch.labels.shape) == ((2, 3, *SIZE), (2, *SIZE))


def test_masks_are_augmented_with_their_images(tmp_path, token_cache):
    data, varied = str(masks_job.write(tmp_path / "data", rows=4)), {"random_flip": True, "random_crop": 0.5}
    task, found = loaded(tmp_path, train_file=data, validation_file=data, random_rotation=20.0, **varied)
    train, rows = found.splits["train"], np.arange(4)
    assert torch.equal(train.augment(rows[2:], 1).labels, train.augment(rows, 1).labels[2:])
    for batch in (train.collate(rows), train.augment(rows, 1)):
        mean, std = (np.array(values) for values in (task.processing.mean, task.processing.std))
        pixels = (batch.inputs["pixel_values"].permute(0, 2, 3, 1).numpy() * std + mean) * 255
        nearest = np.abs(pixels[..., None, :] - masks_job.COLOURS).sum(-1).argmin(-1)
        counted = batch.labels.numpy() != 255
        assert (nearest == batch.labels.numpy())[counted].mean() > 0.9


def trained(tmp_path, kind, **given):
    """The task with a small trained SegFormer of this kind, and its data without classes.txt."""
    data, model = masks_job.write(tmp_path / "data", rows=2), masks_job.segformer(tmp_path / "trained")
    (data / "classes.txt").unlink()
    config = transformers.AutoConfig.from_pretrained(model)
    set_labels(config, ["wall", "building", "sky"])
    getattr(transformers, f"SegformerFor{kind}")(config).save_pretrained(model)
    transformers.SegformerImageProcessorPil(do_reduce_labels=True).save_pretrained(model)
    named = {"config_name": None, "from_scratch": False, "model_name_or_path": str(model), **given}
    return loaded(tmp_path, train_file=str(data), validation_file=str(data), **named)


@pytest.mark.parametrize("kind", ["ImageClassification", "SemanticSegmentation"])
def test_classes_of_a_trained_model_count_if_it_segments(kind, tmp_path, token_cache):
    task, found = trained(tmp_path, kind)
    segments = kind == "SemanticSegmentation"
    assert task.classes.names == (["wall", "building", "sky"] if segments else ["0", "1", "2"])
    assert any("lower the values of such masks by 1" in note for note in found.notes) == segments


def test_an_adapter_has_the_batch_norm_of_a_new_head(tmp_path, token_cache):
    task, found = trained(tmp_path, "ImageClassification", lora_r=2, export="adapter")
    model, images = task.build(), found.splits["train"].collate(np.arange(2)).inputs
    model(**images)  # changes the statistics
    task.save_best(tmp_path / "best", model.eval(), model.state_dict(), id)
    exported = task.load_exported(tmp_path / "best").eval()
    torch.testing.assert_close(exported(**images).logits, model(**images).logits)


def test_nan_logits_end_the_run_before_a_mask_is_written(tmp_path, token_cache):
    data = str(masks_job.write(tmp_path / "data", rows=2))
    task, found = loaded(tmp_path, Modes(True, True, True), train_file=data, test_file=data)
    model, test = task.build().eval(), found.splits["test"]
    with torch.no_grad():
        model.decode_head.classifier.weight.fill_(torch.nan)
        predictions = task.predict(model, test.collate(np.arange(2)))
    predictions = {name: values.numpy() for name, values in predictions.items()}
    for use in (task.score, lambda *given: list(task.lines(*given))):
        with pytest.raises(TrainingError, match="logits are not finite for 2 of 2 images"):
            use(predictions, test)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    shutil.move(masks_job.write(folder / "train", rows=16) / "classes.txt", folder)
    masks_job.write(folder / "val", rows=4, first=100, sizes=(SIZE, (40, 50)))
    return folder


@pytest.mark.slow
def test_segformer_from_masks_to_a_pipeline_predictions_and_a_resume(tmp_path, data, script):
    run, varied = tmp_path / "run", {"random_flip": "true", "color_jitter": 0.2, "random_scale": "0.7,1.5"}
    given = {"config_name": masks_job.segformer(tmp_path / "model"), "train_file": data, **varied}
    given |= {"test_file": data / "val", "class_weights": "balanced"}
    given |= {"num_train_epochs": 8, "save_steps": 16, "save_total_limit": 9}
    job = {**given, "do_train": "true", "do_predict": "true", "output_dir": run, "report_to": "tensorboard"}
    ended = script("segment", masks_job.arguments(**job)).silent()
    assert "16 training images, read as 48x32 RGB" in ended.out
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["test_mean_iou"] == pytest.approx(metrics["eval_mean_iou"], abs=1e-6)  # the same files
    assert metrics["eval_mean_iou"] > 0.5
    assert Image.open(run / "plots" / "image_truth_prediction.png").width > 3 * SIZE[1]

    # Masks as a viewer and as numpy see them, in each image's own size, and what the pipeline makes of the
    # same image.
    lines = list(read_lines(run / "predictions.jsonl"))
    assert [line["mask"] for line in lines] == [f"predictions/{number}.png" for number in range(100, 104)]
    assert sum(lines[0]["shares"].values()) == pytest.approx(1, abs=1e-5)
    assert set(lines[0]["iou"]) == set(CLASSES)
    masks = [Image.open(run / line["mask"]) for line in lines]
    assert [(mask.mode, mask.size) for mask in masks] == [("P", (48, 32)), ("P", (50, 40))] * 2
    segments = pipeline("image-segmentation", model=str(run / "best"), device="cpu")
    for part in segments(str(data / "val" / "images" / "101.png")):
        drawn = np.asarray(masks[1]) == CLASSES.index(part["label"])
        assert (drawn == (np.asarray(part["mask"]) > 0)).mean() > 0.999

    # Exact, with augmentation: what goes on from the middle ends with the same bytes.
    again = tmp_path / "again"
    resumed = {"do_train": "true", "resume_from_checkpoint": run / "checkpoints" / "step_16"}
    script("segment", masks_job.arguments(**given, **resumed, output_dir=again)).silent()
    last = "checkpoints/step_32/model.safetensors"
    assert (run / last).read_bytes() == (again / last).read_bytes()

    command = ["--do_eval=true", f"--model_name_or_path={run / 'best'}", f"--validation_file={data / 'val'}"]
    script("segment", [*command, f"--output_dir={tmp_path / 'one'}"]).check()
    check_evaluated_alike(run, tmp_path / "one")  # the class weights of the training travel with the model


@pytest.mark.slow
def test_deeplab_by_windows_on_rows_of_datasets(tmp_path, data, script):
    files = [str(data / "train" / "images" / f"{row:03}.png") for row in range(8)]
    features = datasets.Features(image=datasets.Image(), label=datasets.Image())
    columns = {"image": files, "label": [file.replace("images", "masks") for file in files]}
    rows = datasets.Dataset.from_dict(columns, features)
    (tmp_path / "rows").mkdir()
    for split in ("train", "validation"):
        rows.to_parquet(tmp_path / "rows" / f"{split}.parquet")
    given = {"config_name": masks_job.deeplab(tmp_path / "model"), "dataset_name": tmp_path / "rows"}
    given |= {"inference": "sliding_window", "image_size": 32, "overlap": 0.5}
    given |= {"classes_file": data / "classes.txt", "label_smoothing_factor": 0.1, "dice_weight": 0.5}
    script("segment", masks_job.arguments(**given, output_dir=tmp_path / "run")).check()
    best = tmp_path / "run" / "best"
    model = AutoModelForSemanticSegmentation.from_pretrained(best)
    processor = AutoImageProcessor.from_pretrained(best, backend="pil")
    image = Image.open(files[0])
    with torch.no_grad():
        outputs = model(**processor(image, return_tensors="pt"))
    (mask,) = processor.post_process_semantic_segmentation(outputs, target_sizes=[image.size[::-1]])
    assert mask.shape == SIZE
    # The exported model goes on by the same windows, and has the same loss, without being told.
    given = {"model_name_or_path": str(best), "validation_file": str(data / "val")}
    exported = segment.Segmentation(segment.Arguments(output_dir="run", do_eval=True, **given))
    exported.load(Launch(), Modes(False, True, False))
    assert (exported.uses_windows, exported.overlap) == (True, 0.5)
    assert (exported.loss.label_smoothing, exported.loss.dice_weight) == (0.1, 0.5)
    files = [f"--test_file={data / 'val' / 'images'}", f"--output_dir={tmp_path / 'predicted'}"]
    script("segment", ["--do_predict", f"--model_name_or_path={best}", *files]).silent()
    assert len(list((tmp_path / "predicted" / "predictions").glob("*.png"))) == 4


@pytest.mark.slow
def test_processes_train_the_same_without_batch_norm(tmp_path, data):
    given = {"config_name": masks_job.sapiens(tmp_path / "model"), "validation_file": data / "val"}
    given |= {"random_scale": "0.7,1.5", "optim_args": "eps=1e-4", "per_device_train_batch_size": 1}
    mixed = ["--train_file", str(data / "train"), str(data / "val"), "--mixing_weights", "1", "2"]
    job = [*masks_job.arguments(**given, output_dir="never"), *mixed]
    launchers.check_parity("ddp", 4, tmp_path, segment.__file__, job)
    assert "rows of an epoch: 7 from the 16 of" in (tmp_path / "table" / "ddp.log").read_text()
