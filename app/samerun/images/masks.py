"""Reads and checks masks for segmentation: pairs of images and masks, class names, pixel counts."""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from samerun.data.cache import content_key, get_or_create
from samerun.data.splits import expand_patterns
from samerun.errors import SHOWN, InputError, collecting, listed, raise_problems
from samerun.files import read_text
from samerun.images import data
from samerun.images.segmentation import IGNORED

# Folder names of each split.
SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid"),
    "test": ("test", "testing"),
}
CITYSCAPES_SUFFIXES = ("_leftImg8bit", "_gtFine_labelTrainIds")  # of the names of an image and its mask
CLASSES_FILE = "classes.txt"
NUMBERED_LINE = re.compile(r"(\d+)[\s,;:]+(\S.*)")
IGNORE_MARK = re.compile(r"\s*\(ignored?\)$", re.IGNORECASE)
MOST_CLASSES = 255


@dataclass(frozen=True)
class Classes:
    """`names`: classes of the mask values 0, 1, ...; `ignored`: mask values left out of loss and metrics."""

    names: list[str]
    ignored: frozenset[int]

    def lookup_table(self) -> np.ndarray:
        """(values,) uint8: mask value -> class number or IGNORED."""
        table = np.full(max(IGNORED, *self.ignored, 0) + 1, IGNORED, dtype=np.uint8)
        table[: len(self.names)] = np.arange(len(self.names))
        return table


# Files


def read_pairs(arguments: Any, split: str, notes: list[str]) -> data.Examples | None:
    """The images of a split, with its masks as `labels`: from folders, or from a table or data set with a
    column of masks. Looks for the split in the folders of --train_file if its own argument is missing. None
    if there is no such split."""
    return data.read_paths(arguments, split, partial(_from_folder, arguments, split, notes), masks=True)


def _from_folder(
    arguments: Any, split: str, notes: list[str], path: str, is_own: bool, base: str | None
) -> data.Examples | None:
    """`path`, `is_own`, `base`: of `splits.read_sources`."""
    folders = _split_folders(Path(path), split, is_own)
    if folders is None:
        return None
    for folder in filter(None, folders):
        data.check_output_outside(folder, arguments.output_dir)
    return _pairs(*folders, base, notes)


def _split_folders(root: Path, split: str, is_own: bool) -> tuple[Path, Path | None] | None:
    """(folder of images, folder of masks) of a split below `root`; None without the split. A test split may
    have no masks. `is_own`: `root` is the value of the split's own argument, so it may hold this split
    alone."""
    pairs = []
    for name in SPLIT_FOLDERS[split]:
        pairs += [
            (root / name / "images", root / name / "masks"),
            (root / "images" / name, root / "masks" / name),
            (root / "leftImg8bit" / name, root / "gtFine" / name),
            (root / name, root / f"{name}annot"),
        ]
    if is_own:
        pairs += [(root / "images", root / "masks"), (root, Path(f"{root}annot"))]
    complete = next((pair for pair in pairs if all(folder.is_dir() for folder in pair)), None)
    if complete is not None:
        return complete
    if split == "test":
        without_masks = [images for images, _ in pairs if images.is_dir()]
        return (without_masks[0], None) if without_masks else None
    if not is_own:
        return None
    raise InputError(
        f"{root}: holds no images with masks; expected images/ and masks/ with files of equal "
        f"names, in it or in {'/ or '.join(SPLIT_FOLDERS[split])}/, or the folders of CamVid "
        "(train/ and trainannot/) or Cityscapes (leftImg8bit/ and gtFine/)"
    )


def _pairs(folder: Path, masks: Path | None, base: str | None, notes: list[str]) -> data.Examples:
    if masks is None:
        image_paths = {str(path): path for path in data.images_below(folder, notes)}
    else:
        image_paths = _by_name(folder, CITYSCAPES_SUFFIXES[0], notes)
    if not image_paths:
        raise InputError(f"{folder}: holds no images")
    ids = data.named_from(base, folder, [str(path.relative_to(folder)) for path in image_paths.values()])
    images = data.Images.of([str(path) for path in image_paths.values()], Path())
    if masks is None:
        return data.Examples(str(folder), images, None, ids)
    is_cityscapes = any(path.stem.endswith(CITYSCAPES_SUFFIXES[0]) for path in image_paths.values())
    mask_paths = _by_name(masks, CITYSCAPES_SUFFIXES[1] if is_cityscapes else "", [], only=is_cityscapes)
    missing = [name for name in image_paths if name not in mask_paths]
    raise_problems([f"{image_paths[name]}: no mask in {masks}; expected {name}.png" for name in missing])
    if others := [str(mask_paths[name].relative_to(masks)) for name in mask_paths if name not in image_paths]:
        notes.append(f"{masks}: {len(others)} mask(s) without an image are left out: {listed(others)}")
    found = data.Images.of([str(mask_paths[name]) for name in image_paths], Path())
    return data.Examples(str(folder), images, found, ids)


def _by_name(folder: Path, suffix: str, notes: list[str], only: bool = False) -> dict[str, Path]:
    """The images below a folder, by relative path without extension and without `suffix`. `only`: leaves out
    names without the suffix. Raises `InputError` for two images of one name."""
    paths: dict[str, Path] = {}
    for path in data.images_below(folder, notes):
        name = str(path.relative_to(folder).with_suffix(""))
        if only and not name.endswith(suffix):
            continue
        name = name.removesuffix(suffix)
        if name in paths:
            raise InputError(
                f"{path}: {paths[name].name} has the same name; an image and its mask are paired by name"
            )
        paths[name] = path
    return paths


# Classes


def find_classes_file(arguments: Any) -> Path | None:
    """--classes_file, or classes.txt in or beside the training data; None if there is none. Raises
    `InputError` if several sources have different classes.txt."""
    if arguments.classes_file is not None:
        return Path(arguments.classes_file)
    if arguments.train_file is None:
        return None
    files = []
    for path in (Path(path).absolute() for path, _ in expand_patterns("--train_file", arguments.train_file)):
        places = (path / CLASSES_FILE, path.parent / CLASSES_FILE)
        files += [place for place in places if place.is_file()][:1]
    for file in files:
        if file.read_bytes() != files[0].read_bytes():
            raise InputError(f"{files[0]} and {file} are not equal; name the right one by --classes_file")
    return files[0] if files else None


def read_classes(path: Path) -> Classes:
    """Reads a classes file: one name per line, numbered from 0, or lines of a number and a name. "(ignore)"
    behind a name marks a value to be ignored. Raises `InputError` with file and line."""
    lines = enumerate(read_text(path).split("\n"), 1)
    given = [(number, line.strip()) for number, line in lines if line.strip()]
    numbered = all(NUMBERED_LINE.fullmatch(line) for _, line in given)
    names: dict[int, str] = {}
    ignored, problems = set(), []
    for number, line in given:
        value, name = len(names) + len(ignored), line
        if numbered:
            value, name = int(NUMBERED_LINE.fullmatch(line)[1]), NUMBERED_LINE.fullmatch(line)[2]
        if value in names or value in ignored:
            problems.append(f"{path}:{number}: the value {value} is there twice")
        elif IGNORE_MARK.search(name):
            ignored.add(value)
        elif name in names.values():
            problems.append(f"{path}:{number}: the class {name!r} is there twice")
        else:
            names[value] = name
    if not problems and sorted(names) != list(range(len(names))):
        values = ", ".join(map(str, sorted(names)[:SHOWN]))
        problems.append(
            f"{path}: the classes have the values {values}; expected 0, 1, 2 and so on, without a gap"
        )
    if not problems and not 2 <= len(names) <= MOST_CLASSES:
        problems.append(f"{path}: has {len(names)} class(es), expected 2 to {MOST_CLASSES}")
    raise_problems(problems)
    return Classes([names[value] for value in range(len(names))], frozenset(ignored))


def choose_classes(
    arguments: Any, train: data.Targets | None, own: list[str] | None, of_config: list[str]
) -> Classes:
    """Chooses the classes: those of the classes file, else `own`, the class names of the model, else the
    values of the training masks. `of_config`: all class labels of the model, used without training. Raises
    `InputError`."""
    file, ignored = find_classes_file(arguments), arguments.ignore_index
    if file is None and own is None and train is not None:
        return numbered_classes(train, ignored)
    classes = Classes(own or of_config, frozenset()) if file is None else read_classes(file)
    if train is None and len(classes.names) != len(of_config):
        raise InputError(f"{file}: names {len(classes.names)} classes, but the model has {len(of_config)}")
    if ignored < len(classes.names):
        name = classes.names[ignored]
        raise InputError(f"--ignore_index {ignored} is the class {name!r}; give a value that is no class")
    return Classes(classes.names, classes.ignored | {ignored})


def numbered_classes(train: data.Targets, ignored: int) -> Classes:
    """The values of the training masks as classes. Raises `InputError` unless they are 0, 1, 2 and so on."""
    values = sorted(set(train.totals) - {ignored})
    names = [str(value) for value in values]
    if not 2 <= len(values) <= MOST_CLASSES or values != list(range(len(values))):
        raise InputError(
            f"the training masks have the value(s) {listed(names)} besides the ignored {ignored}; expected "
            "class numbers 0, 1, 2 and so on. Name the classes in --classes_file if no mask has some of "
            "them, or save the masks again (with 1 in place of 255, if they have 0 and 255)"
        )
    return Classes(names, frozenset([ignored]))


# Masks


def inspect_masks(
    examples: dict[str, data.Examples], inspected: dict[str, data.Inspection]
) -> dict[str, data.Targets]:
    """Decodes the masks of all splits and counts their values; caches the counts. Raises `InputError` listing
    masks that are missing, broken or coloured, or differ in size from their image."""
    masks, problems = {}, []
    for split, rows in examples.items():
        with collecting(problems):
            if rows.labels is not None:
                masks[split] = _inspect(rows, inspected[split])
            elif split != "test":
                problems.append(
                    f"{rows.path}: has no masks; expected a folder of them, or a column (--label_column)"
                )
    raise_problems(problems)
    return masks


def _inspect(examples: data.Examples, images: data.Inspection) -> data.Targets:
    masks = examples.labels
    if not isinstance(masks, data.Images):
        raise InputError(
            f"{examples.path}: has class numbers in place of masks; give a folder or a table of images and "
            "masks"
        )
    inspection = masks.inspect()
    wrong = [
        f"{masks.name(row)}: {mask.width}x{mask.height} pixels, but its image "
        f"{examples.images.name(row)} has {image.width}x{image.height}; they must be equal"
        for row, (mask, image) in enumerate(zip(inspection.headers, images.headers, strict=True))
        if mask[:2] != image[:2]
    ]
    raise_problems(wrong)

    def write_counts(folder: Path) -> None:
        counts = data.map_rows(partial(_count_values, masks), len(masks), "reading masks", "masks")
        (folder / "counts.json").write_text(json.dumps(counts), encoding="utf-8")

    folder = get_or_create("masks", content_key(inspection.digests)[:40], write_counts)
    by_mask = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
    counts = [{int(value): count for value, count in counts.items()} for counts in by_mask]
    return data.Targets(masks, inspection.content, counts)


def _count_values(masks: data.Images, row: int) -> dict[int, int]:
    """Value -> number of pixels of a mask."""
    values, counts = np.unique(np.asarray(masks.load_mask(row)), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def check_values(inspected: data.Targets, classes: Classes) -> None:
    """Raises `InputError` naming masks with values that are no class."""
    known = {*range(len(classes.names)), *classes.ignored}
    problems = [
        f"{inspected.values.name(row)}: {count} pixels of unknown class {value}"
        for row, counts in enumerate(inspected.counts)
        for value, count in counts.items()
        if value not in known
    ]
    numbered = listed([f"{number} {name}" for number, name in enumerate(classes.names)])
    raise_problems(
        problems,
        f"the classes are {numbered}, and {sorted(classes.ignored)} is ignored; name all classes in "
        "--classes_file, or the value to be ignored by --ignore_index",
    )


def note_classes(train: data.Targets, classes: Classes, notes: list[str]) -> None:
    """Notes the number of classes, the share of ignored pixels, and classes without a pixel."""
    totals = train.totals
    pixels, ignored = sum(totals.values()), sum(totals.get(value, 0) for value in classes.ignored)
    notes.append(f"{len(classes.names)} classes; {ignored / pixels:.1%} of the training pixels are ignored")
    if missing := [name for number, name in enumerate(classes.names) if not totals.get(number)]:
        notes.append(f"no training mask has the class {listed(missing)}")
