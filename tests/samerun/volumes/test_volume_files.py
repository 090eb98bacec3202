"""What a run's volumes are, and what is refused: each with the file and one clear message."""

import shutil

import nibabel
import numpy as np
import pytest
from refusals import problems_of

from samerun.data import cache
from samerun.errors import InputError
from samerun.plan import Modes
from samerun.task import Mixture
from samerun.volumes.arguments import VolumeArguments
from samerun.volumes.data import check_headers, check_values, choose_classes, find_splits, prepare

SPACING = (1.0, 1.0, 1.0)


def find(folder, modes=(True, True, False), notes=None, **given):
    named = {"train_file": folder if folder is None or isinstance(folder, list) else str(folder), **given}
    arguments = VolumeArguments(output_dir="run", validation_split=0.4, seed=0, **named)
    return find_splits(arguments, Modes(*modes), [] if notes is None else notes)


def load(folder, ignore_index=None, **given):
    """As a task loads its volumes."""
    notes = []
    splits = find(folder, notes=notes, **given)
    check_headers(splits, notes)
    prepared = {name: prepare(volumes, SPACING, ignore_index) for name, volumes in splits.items()}
    for volumes in prepared.values():
        check_values(volumes, ["background", "a", "b"], notes)
    return prepared, notes


def problem(folder, **given):
    return "\n".join(problems_of(load, folder, **given)).replace(f"{folder}/", "")


def ids(splits):
    return {name: [file.id for file in volumes.files] for name, volumes in splits.items()}


# Layouts


def test_a_folder_without_a_split_keeps_volumes_for_validation(folder):
    notes = []
    found = ids(find(folder, notes=notes))
    assert sorted(found["train"] + found["validation"]) == ["v0", "v1", "v2"]
    assert len(found["validation"]) == 1
    assert notes == ["1 training volumes are kept for validation (--validation_split)"]


def test_a_split_file_divides_a_folder(folder):
    (folder / "split.csv").write_text("file,split\nv2.nii.gz,train\nv0.nii.gz,validation\nv1.nii.gz,test\n")
    notes, expected = [], {"train": ["v2"], "validation": ["v0"], "test": ["v1"]}
    assert ids(find(folder, (True, True, True), notes)) == expected
    assert notes == ["--validation_split is not used: no validation rows are taken from training rows"]
    assert ids(find(None, (False, False, True), test_file=str(folder))) == {"test": ["v1"]}


def test_the_layout_of_the_decathlon_and_of_nnunet(folder, write):
    for old, new in (("images", "imagesTr"), ("labels", "labelsTr")):
        (folder / old).rename(folder / new)
    (folder / "imagesTr" / "v0.nii.gz").rename(folder / "imagesTr" / "v_00001_0000.nii.gz")
    (folder / "labelsTr" / "v0.nii.gz").rename(folder / "labelsTr" / "v_00001.nii.gz")
    (folder / "imagesTr" / "._v0.nii.gz").write_text("of a Mac")
    write(folder / "imagesTs" / "t0.nii.gz", np.zeros((4, 4, 4), dtype=np.uint8))
    found = find(folder, (True, False, True))
    assert ids(found) == {"train": ["v1", "v2", "v_00001_0000"], "test": ["t0"]}
    assert found["train"].files[2].label.name == "v_00001.nii.gz"
    assert not found["test"].labelled


def test_volumes_that_are_numbered_are_no_channels(folder, write):
    for kind in ("images", "labels"):
        for number in range(3):
            (folder / kind / f"v{number}.nii.gz").rename(folder / kind / f"v_000{number}.nii.gz")
    found = find(folder, (True, False, True), test_file=str(folder))
    for volumes in found.values():
        assert [file.label.name for file in volumes.files] == [f"v_000{number}.nii.gz" for number in range(3)]
    shutil.rmtree(folder / "labels")
    alone = {"train_file": None, "test_file": str(folder), "modes": (False, False, True)}
    assert problem(folder, **alone).startswith("images/v_0001.nii.gz: is a second channel; images of")
    (folder / "images" / "v_0000.nii.gz").unlink()
    assert ids(find(folder, alone.pop("modes"), **alone)) == {"test": ["v_0001", "v_0002"]}


def test_several_folders_and_tables(folder):
    shutil.copytree(folder, folder.with_name("second"))
    table = folder.with_name("rows.csv")
    table.write_text("image,label,id\ndata/images/v0.nii.gz,data/labels/v0.nii.gz,mine\n")
    named = [str(folder.with_name("*d*")), str(table)]  # data and second
    notes, every = [], (True, False, True)
    found = find(named, every, notes, test_file=named, max_train_samples=5)
    assert ids(found)["train"] == ["data/v0", "data/v1", "data/v2", "second/v0", "second/v1"]
    assert ids(found)["test"][5:] == ["second/v2", "mine"]
    found = find(named, (True, False, False))["train"]
    mixture = Mixture.of(np.repeat(found.source, 2), (1, 3), found.sources, notes)  # of 14 patches
    assert mixture.counts.tolist() == [4, 10]  # exactly 3.5 and 10.5
    shares = f"4 from the 12 of {folder}, 10 from the 2 of {table}"
    assert notes[-1] == f"rows of an epoch: {shares} (--mixing_weights)"
    shutil.rmtree(folder.with_name("second") / "labels")
    with pytest.raises(InputError, match=r"has labels, but .*second has none; give all of them labels, or"):
        find(named, (False, False, True), test_file=named)


# What is refused


def test_a_split_of_unknown_files_and_of_files_that_are_listed_twice(folder):
    rows = [("v9", "train"), ("v0", "train"), ("v1", "train"), ("v0", "validation"), ("v1", "train")]
    text = "".join(f"{name}.nii.gz,{split}\n" for name, split in rows)
    (folder / "split.csv").write_text(f"file,split\n{text}")
    assert problem(folder).splitlines() == [
        f"split.csv:2: v9.nii.gz is not among the images of {folder}",
        "split.csv:5: v0.nii.gz is listed twice; leave one of its lines out",
        "split.csv:6: v1.nii.gz is listed twice; leave one of its lines out",
    ]


def test_a_label_belongs_to_the_grid_of_its_image(folder, write):
    label, ones = folder / "labels" / "v0.nii.gz", np.ones((2, 3, 130), dtype=np.uint8)
    write(folder / "images" / "v0.nii.gz", ones.astype(np.float32))
    write(label, ones, codes="LPS")
    assert problem(folder).startswith("labels/v0.nii.gz: orientation LPS, but RAS in its image")
    write(label, ones, (1.0, 1.0, 1.005), origin=(0, 30, 0))  # rounded, and with another origin
    assert any("another origin or rotation than its image's" in note for note in load(folder)[1])
    turned = nibabel.Nifti1Image(ones, np.array([[0.8, -0.6, 0, 0], [0.6, 0.8, 0, 0], *np.eye(4)[2:]]))
    nibabel.save(turned, label)
    assert any("another origin or rotation than its image's" in note for note in load(folder)[1])


def test_a_number_that_is_no_class_may_be_ignored(folder, write):
    label = np.zeros((7, 8, 9), dtype=np.float32)
    label[0] = 255
    write(folder / "labels" / "v0.nii.gz", label)
    assert problem(folder).endswith("if it marks voxels to be ignored: --ignore_index 255")
    load(folder, ignore_index=255)


def test_classes_are_those_of_the_training_labels(folder, write):
    prepared = prepare(find(folder, (True, False, False))["train"], SPACING, None)
    assert choose_classes(prepared, None) == ["background", "1", "2"]
    assert choose_classes(prepared, ("front", "back")) == ["background", "front", "back"]


def test_two_test_volumes_of_one_name(folder):
    (folder / "t.csv").write_text("image\nimages/v0.nii.gz\nimages/../images/v0.nii.gz\n")
    found = problem(folder, train_file=None, test_file=str(folder / "t.csv"), modes=(False, False, True))
    assert found == "t.csv: two volumes are named v0; give each a name of its own in --id_column"


def test_all_wrong_files_are_named_together(folder, write):
    for number in range(3):
        write(folder / "images" / f"v{number}.nii.gz", np.zeros((2, 3), dtype=np.float32))
    assert len(problem(folder).splitlines()) == 3


# The cache


def test_volumes_are_prepared_once_and_again_when_a_file_changes(folder, write, token_cache, monkeypatch):
    def kept():
        return {path.parent.name for path in token_cache.rglob("facts.json")}

    load(folder)
    first = kept()
    assert len(first) == 3
    load(folder)
    assert kept() == first
    write(folder / "images" / "v0.nii.gz", np.random.default_rng(1).random((7, 8, 9)).astype(np.float32))
    load(folder)
    assert len(kept() - first) == 1
    monkeypatch.setattr(cache, "SETTLED", -1.0)  # files not changed of late are not read again
    load(folder)
    monkeypatch.setattr(cache, "file_record", None)
    load(folder)
    assert len(kept() - first) == 1


def test_volumes_are_resampled_for_the_network_and_not_for_the_scores(tmp_path, write, token_cache):
    label = np.zeros((8, 8, 8), dtype=np.uint8)
    label[:, :4] = 1
    write(tmp_path / "images" / "a.nii.gz", np.random.default_rng(0).random((8, 8, 8)), (1, 2, 1), "LPS")
    write(tmp_path / "labels" / "a.nii.gz", label, (1, 2, 1), "LPS")
    (volume,) = prepare(find(tmp_path, (True, False, False))["train"], SPACING, None)
    assert volume.image.shape == volume.patch_label.shape == (8, 16, 8)
    assert volume.label.shape == tuple(volume.facts["size"]) == (8, 8, 8)
    assert (volume.patch_label[:, 8:] == 1).all()  # the array's second axis went to the back
    assert not volume.patch_label[:, :8].any()
    assert set(volume.positions[:, 0]) == {1}
    assert all(volume.patch_label[tuple(place)] == 1 for place in volume.positions[:, 1:])
