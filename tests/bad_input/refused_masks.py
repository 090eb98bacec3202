"""Images with masks and volumes with labels that must be rejected, and unusual ones that must work.

Every case damages valid data: data/ with four images and masks, or three volumes and labels, of two classes
and a background.
"""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import masks_job
import nibabel
import numpy as np
from catalogue_case import Case
from PIL import Image

Spoil = Callable[[Path], object]
SHAPE = (8, 9, 10)


def masks(name: str, said: str, *spoils: Spoil, **arguments: object) -> Case:
    return Case(name, [said], "segment", arguments, make=both(lay_out_masks, *spoils))


def volumes(name: str, said: str, *spoils: Spoil, **arguments: object) -> Case:
    return Case(name, [said], "segment3d", arguments, make=both(lay_out_volumes, *spoils))


def lay_out_masks(folder: Path) -> None:
    masks_job.write(folder / "data", rows=4)
    masks_job.segformer(folder / "model")


def lay_out_volumes(folder: Path) -> None:
    generator = np.random.default_rng(0)
    for name in "abc":
        label = np.zeros(SHAPE, dtype=np.uint8)
        label[1:4, 2:5, 3:6], label[4:6, 2:5, 3:6] = 1, 2
        voxels(f"images/{name}", generator.normal(100, 10, SHAPE) + 50 * label)(folder)
        voxels(f"labels/{name}", label)(folder)


# What spoils a file


def write(name: str, content: bytes | str) -> Spoil:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def remove(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return spoil


def cut(name: str) -> Spoil:
    """Leaves the first half of a file."""

    def spoil(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return spoil


def image(name: str, mode: str = "L", size: tuple[int, int] = (48, 32), value: object = 1) -> Spoil:
    """Writes an image of one colour or a mask of one class as PNG."""
    if mode == "I;16":
        found = Image.fromarray(np.full(size[::-1], value, np.uint16))
    else:
        found = Image.new(mode, size, value)
    return lambda folder: found.save(folder / "data" / name, format="PNG")


def both(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]


def voxels(name: str, values: np.ndarray, spacing: float = 1.0) -> Spoil:
    """Writes a volume as data/NAME.nii.gz."""

    def spoil(folder: Path) -> None:
        path = folder / "data" / f"{name}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(values, np.diag([spacing] * 3 + [1.0])), path)

    return spoil


def zeros(dtype: object = np.float32, shape: tuple[int, ...] = SHAPE, at_first: object = 0) -> np.ndarray:
    found = np.zeros(shape, dtype=dtype)
    found[(0,) * len(shape)] = at_first
    return found


def header_alone(folder: Path) -> None:
    """Writes a valid gzip file with a truncated volume."""
    path = folder / "data" / "images" / "b.nii.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:1000]))


IMAGES = [
    masks("missing mask", r"data/images/001\.png: no mask in data/masks; expected 001\.png",
           remove("data/masks/001.png")),
    masks("no folder of masks", r"data: holds no images with masks; expected images/ and masks/",
           remove("data/masks")),
    masks("one name twice", r"001\.png: 001\.bmp has the same name", image("images/001.bmp", "RGB")),
    masks("validation without masks", r"rows\.csv:1: column 'label' not found; found: image",
           write("rows.csv", "image\ndata/images/001.png\n"), validation_file="rows.csv"),
    masks("mask of a table that is missing", r"data/masks/009\.png: this file does not exist",
           write("rows.csv", "image,label\ndata/images/001.png,data/masks/009.png\n"),
           validation_file="rows.csv"),
    masks("empty cell in the column of masks", r"rows\.csv:2: the image is",
           write("rows.csv", "image,label\ndata/images/001.png,\n"), validation_file="rows.csv"),
    masks("mask of another size",
           r"data/masks/001\.png: 6x4 pixels, but its image data/images/001\.png has 48x32",
           image("masks/001.png", size=(6, 4))),
    masks("unknown class", r"data/masks/001\.png: 1536 pixels of unknown class 9",
           image("masks/001.png", value=9)),
    masks("unknown classes without a file of classes", r"the training masks have the value\(s\) 0, 1, 2, 9",
           image("masks/001.png", value=9), remove("data/classes.txt")),
    masks("mask of colours",
           r"data/masks/001\.png: a mask of mode RGB; expected one channel of class numbers",
           image("masks/001.png", "RGB", value=(1, 1, 1))),
    masks("no image", r"data/images/001\.png: is no image that Pillow can read",
           write("data/images/001.png", "a note")),
    masks("empty image", r"data/images/001\.png: is empty; copy it again",
           write("data/images/001.png", b"")),
    masks("image of 16 bits", r"data/images/001\.png: has more than 8 bits a pixel .*Save it with 8 bits",
           image("images/001.png", "I;16")),
    masks("model of one channel",
           r"model: the model sees 1 channel\(s\), but its SegformerImageProcessorPil gives 3",
           write("model/config.json", '{"model_type": "segformer", "num_channels": 1}')),
    masks("another kind of model", r"the model \(bert\) cannot segment images; name another",
           write("model/config.json", '{"model_type": "bert"}')),
    masks("no such file of classes", r"names\.txt: cannot be read \(No such file",
           classes_file="names.txt"),
    masks("a class twice", r"data/classes\.txt:2: the class 'a' is there twice",
           write("data/classes.txt", "a\na\nb\n")),
    masks("one class", r"data/classes\.txt: has 1 class\(es\), expected 2 to 255",
           write("data/classes.txt", "a\n")),
    masks("numbers with a gap", r"data/classes\.txt: the classes have the values 0, 2; expected 0, 1, 2",
           write("data/classes.txt", "0 a\n2 b\n")),
    masks("a class that does not count", r"--ignore_index 1 is the class 'red'",
           ignore_index=1),
]  # fmt: skip

VOLUMES = [
    volumes("missing label",
           r"data/labels/b\.nii\.gz: no such file; the label of data/images/b\.nii\.gz is missing",
           remove("data/labels/b.nii.gz")),
    volumes("no labels", r"data/images/a\.nii\.gz: has no label, which a train volume needs",
           remove("data/labels")),
    volumes("empty folder", r"data/images: has no NIfTI files",
           lambda f: [path.unlink() for path in (f / "data/images").iterdir()]),
    volumes("validation folder of another layout",
           r"model: has no folder images or imagesTr; images/ and labels/ are expected",
           lambda f: (f / "model").mkdir(), validation_file="model"),
    volumes("image of a table that is missing", r"data/images/d\.nii\.gz: no such image",
           write("rows.csv", "image,label\ndata/images/d.nii.gz,data/labels/a.nii.gz\n"),
           validation_file="rows.csv"),
    volumes("unknown split", r"data/split\.csv:2: split 'trian', expected train, validation, test",
           write("data/split.csv", "file,split\na.nii.gz,trian\n")),
    volumes("label of another size",
           r"data/labels/b\.nii\.gz: size 8x9x11, but 8x9x10 in its image data/images/b\.nii\.gz",
           voxels("labels/b", zeros(np.uint8, (8, 9, 11)))),
    volumes("label of another voxel size", r"data/labels/b\.nii\.gz: voxel size 2x2x2, but 1x1x1 in its",
           voxels("labels/b", zeros(np.uint8), spacing=2.0)),
    volumes("unknown class",
           r"data/labels/b\.nii\.gz: 1 voxels of unknown class 9; the classes are 0 background, 1 red",
           voxels("labels/b", zeros(np.uint8, at_first=9))),
    volumes("fractions for classes", r"data/labels/b\.nii\.gz: 1 voxels have no class number, the first 1\.5",
           voxels("labels/b", zeros(at_first=1.5))),
    volumes("NaN in a label", r"data/labels/b\.nii\.gz: 1 voxels have no class number, the first nan",
           voxels("labels/b", zeros(at_first=np.nan))),
    volumes("no voxel of a class", "no training label has a voxel of a class: all are background",
           *(voxels(f"labels/{name}", zeros(np.uint8)) for name in "abc")),
    volumes("classes with a gap",
           r"the training labels have classes 1, 3; classes must be numbered from 1 without a gap",
           *(voxels(f"labels/{name}", np.arange(720, dtype=np.uint8).reshape(SHAPE) % 2 * 2 + 1)
             for name in "abc"),
           class_names=None),
    volumes("voxels that are NaN",
           r"data/images/b\.nii\.gz: 1 of 720 voxels are NaN or infinite; replace them",
           voxels("images/b", zeros(at_first=np.nan))),
    volumes("slice of a volume",
           r"data/images/b\.nii\.gz: has 2 dimensions \(8x9\); expected one volume of 3 dimensions",
           voxels("images/b", zeros(shape=(8, 9)))),
    volumes("channels in files of their own", r"data/images/a_0001\.nii\.gz: is a second channel",
           voxels("images/a_0001", zeros())),
    volumes("colours", r"data/images/b\.nii\.gz: voxels are of type .*, expected one number each",
           voxels("images/b", np.zeros(SHAPE, dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")]))),
    volumes("image cut short", r"data/images/b\.nii\.gz: is damaged or cut short .*; copy it again",
           cut("data/images/b.nii.gz")),
    volumes("voxels missing behind the header", r"data/images/b\.nii\.gz: is damaged or cut short",
           header_alone),
    volumes("no volume", r"data/images/b\.nii\.gz: no readable NIfTI file",
           write("data/images/b.nii.gz", "a note")),
    volumes("weights for other classes", r"--class_weights has 2 numbers, expected 3: background, red, blue",
           class_weights="1,2"),
    volumes("patch of one voxel at the lowest level", r"one voxel at the network's lowest level",
           patch_size="2,2,2"),
    volumes("folder that is no model", r"model: is no exported model of segment3d\.py",
           lambda f: (f / "model").mkdir(), model_name_or_path="model"),
]  # fmt: skip

CASES = [*IMAGES, *VOLUMES]

PREDICTS = {"do_train": "true", "do_predict": "true", "test_file": "data"}


def palette(folder: Path) -> None:
    found = Image.fromarray(np.arange(48 * 32, dtype=np.uint8).reshape(32, 48) % 3)
    found.putpalette([9, 9, 9, 200, 0, 0, 0, 0, 200])
    for name in ("images", "masks"):
        found.save(folder / "data" / name / "001.png")


# What must work, and the number of predictions.
UNUSUAL = [
    # A palette (an image's colours, a mask's indices), 16 bits, grey, transparency, another size.
    (masks("images and masks of several kinds", "1 of 4 images have an alpha channel, which is dropped",
           palette, image("masks/002.png", "I;16", value=1), image("images/002.png", "LA", value=(9, 9)),
           image("images/003.png", size=(40, 60)), image("masks/003.png", size=(40, 60), value=255),
           **PREDICTS), 4),
    # Smaller than a patch, without a voxel of a class, of one value alone.
    (volumes("a small volume of background",
             r"b\.nii\.gz: no voxel of any class; Dice and distance are undefined if none is predicted",
             voxels("images/b", np.ones((4, 20, 5), np.int16)),
             voxels("labels/b", np.zeros((4, 20, 5), np.uint8)), **PREDICTS), 3),
]  # fmt: skip
