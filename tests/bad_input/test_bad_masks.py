"""Bad images, masks, volumes and labels end in one message with the file; unusual ones that are right
train."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import refused_masks
from catalogue_case import Case, check_refused, command_of_masks
from PIL import Image
from refused_masks import both, image, voxels

LAY_OUT = {"segment": refused_masks.lay_out_masks, "segment3d": refused_masks.lay_out_volumes}
TRIED = [
    pytest.param(case, task, id=f"{case.name}-{task}") for case in refused_masks.CASES for task in case.tasks
]


@pytest.mark.parametrize(("case", "task"), TRIED)
def test_bad_masks_are_explained_and_nothing_is_harmed(case: Case, task: str, workplace, script):
    LAY_OUT[task](workplace)
    check_refused(case, task, workplace, script, command_of_masks(case, task))


def palette(folder: Path) -> None:
    found = Image.fromarray(np.arange(48 * 32, dtype=np.uint8).reshape(32, 48) % 3)
    found.putpalette([9, 9, 9, 200, 0, 0, 0, 0, 200])
    for name in ("images", "masks"):
        found.save(folder / "data" / name / "001.png")


UNUSUAL = {
    # A palette (an image's colours, a mask's indices), 16 bits, grey, transparency, another size.
    "segment": (
        both(palette, image("masks/002.png", "I;16", value=1), image("images/002.png", "LA", value=(9, 9)),
             image("images/003.png", size=(40, 60)), image("masks/003.png", size=(40, 60), value=255)),
        "1 of 4 images have an alpha channel, which is dropped",
        {"do_train": "true", "do_predict": "true", "test_file": "data"},
    ),
    # Smaller than a patch, without a voxel of a class, of one value alone.
    "segment3d": (
        both(voxels("images/b", np.ones((4, 20, 5), np.int16)),
             voxels("labels/b", np.zeros((4, 20, 5), np.uint8))),
        r"b\.nii\.gz: no voxel of any class; Dice and distance are undefined if none is predicted",
        {"do_train": "true", "do_predict": "true", "test_file": "data"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("task", UNUSUAL)
def test_unusual_masks_are_trained_on_and_predicted(task, workplace, script):
    LAY_OUT[task](workplace)
    spoil, said, arguments = UNUSUAL[task]
    spoil(workplace)
    ended = script(task, command_of_masks(Case("", [], arguments=arguments), task))
    assert (ended.code, ended.err) == (0, "")
    assert re.search(said, ended.out), ended.out
    assert len(list(Path("run/predictions").glob("[!.]*"))) == (4 if task == "segment" else 3)
