import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_classify import Arguments, ImageClassification
from images_job import write_folder, write_idx
from in_process import check_evaluated_alike
from PIL import Image
from safetensors.torch import load_file
from transformers import ConvNextConfig, ViTConfig, ViTForImageClassification, ViTImageProcessorPil, pipeline

from samerun.files import read_lines
from samerun.images.single_label import SMALL_CNN_USAGE, small_cnn_processing
from samerun.models.small_cnn import SmallCNNConfig
from samerun.task import Batch


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_is_cross_entropy_without_the_placeholder(smoothing):
    logits = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    batch = Batch(torch.tensor([4, 9, -1]), {"pixel_values": logits}, torch.tensor([0, 2, 1]))
    log_p = logits.log_softmax(1)
    expected = float(-(1 - smoothing) * (log_p[0, 0] + log_p[1, 2]) - smoothing * log_p[:2].sum() / 3)
    made = ImageClassification(Arguments(output_dir="runs/a", label_smoothing_factor=smoothing))
    made.smoothing = smoothing  # as `choose_model` decides

    def model(pixel_values):
        return SimpleNamespace(logits=pixel_values)

    assert float(made.loss_sum(model, batch)) == pytest.approx(expected, rel=1e-6)
    assert int(made.num_targets(batch)) == 2
    parts = [float(made.loss_sum(model, batch[row : row + 1])) for row in range(3)]  # any micro-batches
    assert sum(parts) == pytest.approx(expected, rel=1e-6)
    whole = {name: tensor.numpy() for name, tensor in made.predict(model, batch).items()}
    split = SimpleNamespace(path="val", images=SimpleNamespace(name=str))
    loss = made.score({name: values[:2] for name, values in whole.items()}, split)["loss"]
    assert loss == pytest.approx(expected / 2, rel=1e-6)


def arguments(folder, **given):
    named = {"num_train_epochs": 6, "global_batch_size": 8, "report_to": "tensorboard"}
    named |= {"output_dir": folder / "run", **given}
    return [f"--{name}={value}" for name, value in named.items() if value is not None]


@pytest.mark.slow
def test_the_small_cnn_from_mnist_files_to_predictions_and_a_card_that_runs(tmp_path, script):
    mnist = write_idx(tmp_path / "mnist", rows=64)
    write_idx(mnist, "t10k", rows=10, seed=1)
    data = {f"{split}_file": mnist for split in ("train", "validation", "test")}
    trained = {"label_smoothing_factor": 0.1, "report_to": "tensorboard,html", **data}
    ended = script(
        "image_classify", arguments(tmp_path, do_train="true", do_predict="true", **trained)
    ).silent()
    assert "64 training images, read as 16x16 grey levels" in ended.out
    run = tmp_path / "run"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["test_accuracy"] == metrics["eval_accuracy"] == 1.0  # the same file
    assert metrics["eval_confusion_matrix"] == [[5, 0], [0, 5]]
    assert metrics["eval_baseline_accuracy"] == 0.5
    assert [row["label"] for row in metrics["eval_per_class"]] == ["0", "1"]
    assert (run / "plots" / "confusion_matrix.png").exists()
    assert "data:image/png" in (run / "report.html").read_text()
    lines = list(read_lines(run / "predictions.jsonl"))
    assert [line["label"] for line in lines] == [line["reference"] for line in lines] == ["0", "1"] * 5
    assert all(sum(line["probabilities"].values()) == pytest.approx(1, abs=1e-5) for line in lines)
    card = (run / "README.md").read_text()
    assert SMALL_CNN_USAGE in card
    assert "| **1** | 0 | 5 |" in card

    # The code of the card, with nothing of ours to import.
    noise = np.random.default_rng(0).integers(150, 250, (30, 40), np.uint8)
    Image.fromarray(noise).save(run / "image.png")
    printed = []
    code = SMALL_CNN_USAGE.replace('"best/', f'"{run}/best/').replace('"image.png"', f'"{run}/image.png"')
    found = {"print": printed.append}
    exec(code, found)
    assert printed == ["1"]
    processing = small_cnn_processing(SmallCNNConfig.from_pretrained(run / "best"))
    expected = processing.normalize(np.stack([processing.fit(Image.fromarray(noise))]))
    torch.testing.assert_close(found["pixels"], expected)

    # The exported model goes on, predicts a folder without classes, and is judged by itself.
    write_folder(tmp_path / "files", rows=4)
    given = {"model_name_or_path": run / "best", "output_dir": tmp_path / "again"}
    given["test_file"] = tmp_path / "files" / "light"
    script("image_classify", arguments(tmp_path, do_predict="true", **given)).silent()
    lines = list(read_lines(tmp_path / "again" / "predictions.jsonl"))
    assert [(line["id"], line["label"]) for line in lines] == [("001.png", "1"), ("003.png", "1")]
    given = {"model_name_or_path": run / "best", "output_dir": tmp_path / "judged"}
    script("image_classify", arguments(tmp_path, do_eval="true", validation_file=mnist, **given)).silent()
    check_evaluated_alike(run, tmp_path / "judged")  # label smoothing goes with the model
    # Other classes get a last layer of their own.
    given = {"model_name_or_path": run / "best", "output_dir": tmp_path / "other"}
    script("image_classify", arguments(tmp_path, train_file=tmp_path / "files", **given)).silent()
    config = SmallCNNConfig.from_pretrained(tmp_path / "other" / "best")
    assert config.id2label == {0: "dark", 1: "light"}


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, "4"])
def test_adapters_are_merged_into_a_pretrained_model(bits, tmp_path, script):
    base = tmp_path / "base"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(base)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(base)
    data = write_folder(tmp_path / "data", rows=32, size=24, channels=3)
    given = {"train_file": data, "validation_file": data, "model_name_or_path": base}
    given |= {"lora_r": 2, "learning_rate": 1e-2, "quantize": bits, "layerwise_lr_decay": 0.9}
    ended = script("image_classify", arguments(tmp_path, **given)).silent()
    assert "dry run of the model fails" not in ended.out
    saved = load_file(max((tmp_path / "run" / "checkpoints").iterdir()) / "model.safetensors")
    assert all("lora" in name or name.startswith("classifier.") for name in saved)
    pipeline("image-classification", model=str(tmp_path / "run" / "best"), device="cpu")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "run" / "best"))
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert {name.split(".")[0] for name in moved} == {"vit", "classifier"}
    assert all(name.endswith("weight") for name in moved - {"classifier.bias"})  # biases have no adapters
    name = next(name for name in sorted(moved) if "attention" in name)
    rank = torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3)
    assert rank <= 2 if bits is None else rank > 2  # the merged weights are those that were rounded


def truncate(folder):
    file = folder / "train" / "dark" / "000.png"
    file.write_bytes(file.read_bytes()[:-40])


VIT, CONVNEXT = ({"config_name": name, "from_scratch": "true"} for name in ("vit", "convnext"))
REFUSED = {
    "unknown class": (lambda folder: (folder / "valid" / "dark").rename(folder / "valid" / "drak"), {},
                      r"valid/drak/000\.png: unknown class 'drak'; did you mean 'dark'\?"),
    "mixed sizes": (lambda folder: Image.new("L", (20, 30)).save(folder / "train" / "light" / "x.png"), {},
                    r"images of 2 sizes: .*000\.png has 16x16 pixels, .*x\.png 20x30; give --image_size N"),
    "too small": (lambda folder: write_folder(folder / "tiny", size=8), {"train_file": "tiny"},
                  "images of 8x8 pixels"),
    "one class": (lambda folder: shutil.rmtree(folder / "train" / "light"), {}, r"one class only \('dark'\)"),
    "no batch norm to synchronise": (lambda folder: None, {"sync_batch_norm": "true", **VIT},
                                     "--sync_batch_norm: this model has no batch norm"),
    "layers that each stage numbers": (lambda folder: None, {**CONVNEXT, "layerwise_lr_decay": 0.5},
                                       "the layers of a convnext model are not numbered throughout"),
    "truncated, in the training process": (truncate, {"num_train_epochs": 1},
                                           r"000\.png: broken or truncated image"),
    "truncated, in a worker": (truncate, {"num_train_epochs": 1, "dataloader_num_workers": 1},
                               r"000\.png: broken or"),
    "image_mode of another model": (lambda folder: None, {**VIT, "image_mode": "L"},
                                    "--image_mode L: the model sees 32x32 RGB"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_images_are_explained_in_one_message(name, tmp_path, script, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "valid", rows=4)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    ViTConfig(**sizes, image_size=32).save_pretrained("vit")
    ConvNextConfig(hidden_sizes=[8] * 4, depths=[1, 1, 2, 1]).save_pretrained("convnext")
    spoil, given, said = REFUSED[name]
    spoil(tmp_path)
    files = {"train_file": "train", "validation_file": "valid"}
    ended = script("image_classify", arguments(tmp_path, **files | given))
    assert ended.code == 2
    lines = ended.err.splitlines()
    assert len(lines) == 1 or lines[0].startswith(f"{len(lines) - 1} errors:")
    assert re.search(said, ended.err), ended.err
