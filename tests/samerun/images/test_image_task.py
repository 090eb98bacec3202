import numpy as np
import pytest
import torch
import transformers
from image_classify import Arguments, ImageClassification
from images_job import write_folder, write_idx
from PIL import Image

from samerun.errors import InputError
from samerun.launch import Launch
from samerun.plan import Modes


def load(source, **given):
    task = ImageClassification(Arguments(output_dir="runs/a", train_file=str(source), **given))
    return task, task.load(Launch(), Modes(train=True, evaluate=True, predict=False))


def test_defaults_suit_what_is_trained():
    small, pretrained = Arguments(output_dir="a"), Arguments(output_dir="a", model_name_or_path="x")
    assert (small.learning_rate, small.global_batch_size) == (1e-3, 128)
    assert (pretrained.learning_rate, pretrained.global_batch_size) == (5e-5, 32)
    assert Arguments(output_dir="a", learning_rate=0.5, global_batch_size=7).learning_rate == 0.5


def test_an_array_is_collated_at_once_to_what_each_image_is_by_itself(tmp_path):
    task, data = load(write_idx(tmp_path / "mnist"))
    images, rows = data.splits["train"].images, np.array([4, 0, 7])
    assert images.are_arrays
    batch = data.splits["train"].collate(rows)
    single = np.stack([task.processing.fit(images.load(row, "L")) for row in rows])
    assert torch.equal(batch.inputs["pixel_values"], task.processing.normalize(single))
    assert batch.inputs["pixel_values"].shape == (3, 1, 16, 16)
    assert batch.labels.tolist() == data.splits["train"].targets.values[rows].tolist()


def test_training_rows_are_varied_by_epoch_and_others_never(tmp_path):
    varied = {"random_crop": 0.3, "random_flip": True, "random_rotation": 20.0, "color_jitter": 0.3}
    _, data = load(write_folder(tmp_path, channels=3), **varied)
    train, validation = data.splits["train"], data.splits["validation"]
    rows = np.array([3, 1])
    first, again, later = (train.augment(rows, epoch).inputs["pixel_values"] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    # Whatever else is in the batch.
    assert torch.equal(first[1:], train.augment(rows[1:], 0).inputs["pixel_values"])
    assert first.shape == train.collate(rows).inputs["pixel_values"].shape
    assert validation.augment is None
    assert load(tmp_path)[1].splits["train"].augment is None


def test_the_run_fingerprint_follows_contents_and_augmentation(tmp_path):
    first = load(write_folder(tmp_path / "a"))[1].fingerprint
    assert first == load(write_folder(tmp_path / "b"))[1].fingerprint
    assert first != load(write_folder(tmp_path / "c", seed=1))[1].fingerprint
    assert first != load(tmp_path / "a", random_flip=True)[1].fingerprint
    (tmp_path / "b" / "dark" / "000.png").rename(tmp_path / "b" / "light" / "000.png")
    assert first != load(tmp_path / "b")[1].fingerprint


def test_notes_say_what_is_read(tmp_path):
    write_folder(tmp_path / "train")
    Image.new("LA", (16, 16)).save(tmp_path / "train" / "dark" / "clear.png")
    _, data = load(tmp_path / "train", validation_file=str(tmp_path / "train"))
    assert data.notes == [
        "25 training images, read as 16x16 grey levels",
        *[f"{tmp_path}/train: 1 of 25 images have an alpha channel, which is dropped"] * 2,
        "25 of 25 validation images are in the training data too",
        "2 classes, of 12 to 13 training images each",
    ]


def test_colours_for_a_grey_model_are_refused(tmp_path):
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "valid")
    Image.new("RGB", (16, 16)).save(tmp_path / "valid" / "dark" / "colour.png")
    given = {"validation_file": str(tmp_path / "valid")}
    with pytest.raises(InputError, match=r"dark/colour\.png: a colour image \(RGB\), but .*--image_mode L"):
        load(tmp_path / "train", **given)
    assert load(tmp_path / "train", image_mode="L", **given)[0].processing.mode == "L"
    assert load(tmp_path / "train", image_mode="RGB", **given)[0].processing.mode == "RGB"


def test_a_trained_clip_gets_a_head(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision, square = {**sizes, "image_size": 32, "patch_size": 16}, {"height": 32, "width": 32}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 9}, vision_config=vision, projection_dim=8
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path / "clip")
    transformers.ViTImageProcessorPil(size=square).save_pretrained(tmp_path / "clip")
    given = {"model_name_or_path": str(tmp_path / "clip")}
    images = write_folder(tmp_path / "data", channels=3)
    model = load(images, **given)[0].build()
    frozen = load(images, freeze=("*",), **given)[0].build()
    trained = {name for name, parameter in frozen.named_parameters() if parameter.requires_grad}
    assert trained == {"classifier.weight", "classifier.bias"}
    decayed, _ = load(images, layerwise_lr_decay=0.5, **given)
    scales = {decayed.learning_rate_scale(model, name) for name, _ in decayed.build().named_parameters()}
    assert scales == {1.0, 0.5, 0.25}  # head, layer, embeddings
    with pytest.raises(InputError, match="--image_size 64: this clip model cannot work on such images"):
        load(images, image_size=64, **given)
