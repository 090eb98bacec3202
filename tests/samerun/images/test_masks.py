import re
import shutil
from pathlib import Path

import masks_job
import numpy as np
import pytest
from PIL import Image

from samerun.errors import InputError
from samerun.images.arguments import MaskArguments
from samerun.images.image_task import inspect_all
from samerun.images.masks import (
    IGNORED,
    check_values,
    choose_classes,
    find_classes_file,
    inspect_masks,
    read_classes,
    read_pairs,
)
from samerun.images.semantic_segmentation import mask_names
from samerun.parsing import SpaceSeparated

EMPTY = np.zeros((4, 6), dtype=np.uint8)


def save(path, array=EMPTY):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


CITY = "gtFine/val/ulm/{}_gtFine"
LAYOUTS = {  # image, masks
    "plain": ("images/{}.jpg", "masks/{}.png"),
    "plain splits": ("val/images/{}.jpg", "val/masks/{}.png"),
    "by kind": ("images/validation/{}.png", "masks/validation/{}.png"),
    "CamVid": ("val/{}.png", "valannot/{}.png"),
    "Cityscapes": ("leftImg8bit/val/ulm/{}_leftImg8bit.png",
                   *(f"{CITY}_{kind}.png" for kind in ("labelTrainIds", "labelIds", "color"))),
}  # fmt: skip


def write(root, name, layout="plain"):
    image, *masks = (root / path.format(name) for path in LAYOUTS[layout])
    save(image, np.stack([EMPTY] * 3, axis=2))
    for mask in masks:
        save(mask)


def read(root, split="validation", **given):
    named = given or {f"{split}_file": str(root)}
    return read_pairs(MaskArguments(output_dir="runs/a", **named), split, notes := []), notes


def inspected(train):
    return inspect_masks({"train": train}, inspect_all({"train": train}, []))["train"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_are_paired_with_masks_by_name(layout, tmp_path, monkeypatch):
    for name in ("b_1", "a_1"):
        write(tmp_path, name, layout)
    found, notes = read(tmp_path)
    names = ("a_1", "b_1")
    for part, path in zip((found.images, found.labels), LAYOUTS[layout], strict=False):
        assert list(part.sources[0].cells) == [str(tmp_path / path.format(name)) for name in names]
    assert [re.search(r"[ab]_1", Path(path).name)[0] for path in found.ids] == [*names]
    assert notes == []
    if layout != "plain":  # a folder of several splits is named once
        assert len(read(tmp_path, train_file=str(tmp_path))[0]) == 2
        monkeypatch.chdir(tmp_path)
        assert len(read(".")[0]) == 2
        assert read(tmp_path, "test", train_file=str(tmp_path))[0] is None


def test_test_images_need_no_masks(tmp_path):
    write(tmp_path, "a")
    shutil.rmtree(tmp_path / "masks")
    assert read(tmp_path, "test")[0].labels is None
    assert read(tmp_path / "images", "test")[0].ids == ["a.jpg"]


def test_several_folders_and_a_table_make_a_split(tmp_path, token_cache):
    for site in "ab":
        write(tmp_path / site / "train", "0")
        write(tmp_path / site / "test", "0")
    write(tmp_path, "1")
    save(tmp_path / "masks" / "1.png", EMPTY + 1)
    (tmp_path / "rows.csv").write_text("image,label\nimages/1.jpg,masks/1.png\n")
    named = SpaceSeparated(str(tmp_path / name) for name in ("a", "b", "rows.csv"))
    found, _ = read(None, "train", train_file=named)
    assert found.ids == ["a/train/images/0.jpg", "b/train/images/0.jpg", 2]
    masks = inspected(found)
    assert masks.counts == [{0: 24}, {0: 24}, {1: 24}]
    assert masks.values.name(1) == f"{tmp_path}/b/train/masks/0.png"
    other = read(None, "test", train_file=named)[0]  # a table is of one split
    assert mask_names(other.ids) == ["a_test_images_0.png", "b_test_images_0.png"]
    (tmp_path / "b" / "classes.txt").write_text("x\ny\n")
    arguments = MaskArguments(output_dir="runs/a", train_file=named)
    assert find_classes_file(arguments) == tmp_path / "b" / "classes.txt"
    (tmp_path / "a" / "classes.txt").write_text("y\nx\n")
    message = r"a/classes\.txt and .*b/classes\.txt are not equal; name the right"
    with pytest.raises(InputError, match=message):
        find_classes_file(arguments)


def test_masks_of_16_bits_and_palettes_hold_class_numbers(tmp_path, token_cache):
    for name in ("a", "b"):
        write(tmp_path, name)
    numbers = np.arange(24).reshape(4, 6) % 3
    save(tmp_path / "masks" / "a.png", numbers.astype(np.uint16) + np.uint16(65533) * (numbers == 2))  # 65535
    palette = Image.fromarray(numbers.astype(np.uint8))
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    palette.save(tmp_path / "masks" / "b.png")
    masks = inspected(read(tmp_path, "train")[0])
    assert masks.counts == [{0: 8, 1: 8, 65535: 8}, {0: 8, 1: 8, 2: 8}]
    (tmp_path / "classes.txt").write_text("0 a\n1 b\n2 c\n65535 nothing (ignore)\n")
    classes = read_classes(tmp_path / "classes.txt")
    check_values(masks, classes)
    targets = classes.lookup_table()[np.asarray(masks.values.load_mask(0))]
    assert targets.tolist() == np.where(numbers == 2, IGNORED, numbers).tolist()
    assert masks.totals == {0: 16, 1: 16, 2: 8, 65535: 8}


@pytest.mark.parametrize(
    ("text", "names", "ignored"),
    [
        ("sky\nroad\n", ["sky", "road"], set()),
        ("0\tsky\n1\tsign symbol\n11\tunlabelled (ignore)\n", ["sky", "sign symbol"], {11}),
        ("1,road\n\n0,sky\n", ["sky", "road"], set()),
        ("sky\nroad\nvoid (ignored)\n", ["sky", "road"], {2}),
    ],
)
def test_classes_files(text, names, ignored, tmp_path):
    (tmp_path / "classes.txt").write_text(text)
    found = read_classes(tmp_path / "classes.txt")
    assert (found.names, found.ignored) == (names, ignored)


def test_a_value_that_stands_twice(tmp_path):
    (tmp_path / "classes.txt").write_text("0 sky\n0 road\n")
    with pytest.raises(InputError, match=r":2: the value 0 is there twice"):
        read_classes(tmp_path / "classes.txt")


def test_without_a_file_classes_are_the_values_of_the_masks(tmp_path, token_cache):
    masks_job.write(tmp_path / "train", rows=2)
    arguments = MaskArguments(output_dir="runs/a", train_file=str(tmp_path / "train"))
    assert find_classes_file(arguments) == tmp_path / "train" / "classes.txt"
    (tmp_path / "train" / "classes.txt").unlink()
    masks = inspected(read(tmp_path / "train", "train")[0])
    assert choose_classes(arguments, masks, None, []).names == ["0", "1", "2"]
    assert choose_classes(arguments, masks, ["a", "b", "c"], []).names == ["a", "b", "c"]  # a trained model's
