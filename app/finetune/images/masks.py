"""Masks beside pictures: folders of both, the names of the classes, and which values the masks have."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import InputError
from finetune.images.examples import LIMITS, Examples, above_folders, from_table, named_from, read_each, read_examples
from finetune.images.folders import pictures_below
from finetune.images.sources import THREADS, EncodedImages, Images, Inspected
from finetune.output.progress import Phase
from finetune.reading.cache import get_or_create
from finetune.reading.columns import SHOWN, more
from finetune.reading.fingerprint import fingerprint
from finetune.reading.problems import listed
from finetune.reading.splits import expand_patterns

# What a split's folder may be called.
SPLIT_FOLDERS = {"train": ("train", "training"), "validation": ("validation", "val", "valid"), "test": ("test", "testing")}
ENDS = ("_leftImg8bit", "_gtFine_labelTrainIds")  # of Cityscapes' names of a picture and its mask
CLASSES_FILE = "classes.txt"
NUMBERED = re.compile(r"(\d+)[\s,;:]+(\S.*)")
NOT_COUNTED = re.compile(r"\s*\(ignored?\)$", re.IGNORECASE)
IGNORED = 255  # what becomes of the values that do not count
MOST_CLASSES = 255


@dataclass(frozen=True)
class Classes:
    """`names` of the values 0, 1, ...; `ignored`: values that do not count."""

    names: list[str]
    ignored: frozenset[int]

    def numbers(self) -> np.ndarray:
        """(values,) uint8: the class of each value of a mask, or IGNORED."""
        found = np.full(max(IGNORED, *self.ignored, 0) + 1, IGNORED, dtype=np.uint8)
        found[: len(self.names)] = np.arange(len(self.names))
        return found


@dataclass(frozen=True)
class InspectedMasks:
    """The masks of a split. `counts`: how many pixels of each value every mask has."""

    masks: Images
    content: str
    counts: list[dict[int, int]]

    @property
    def totals(self) -> dict[int, int]:
        """Pixels of each value in all masks."""
        values = sorted({value for counts in self.counts for value in counts})
        return {value: sum(counts.get(value, 0) for counts in self.counts) for value in values}

    def describe(self, classes: Classes) -> dict[str, Any]:
        """Fields of `Described`: masks of equal pictures should have equal pixels of each class."""
        areas = np.array([[counts.get(value, 0) for value in range(len(classes.names))] for counts in self.counts])
        return {"answers": [tuple(sorted(counts.items())) for counts in self.counts], "areas": (classes.names, areas)}

    def class_totals(self, num_classes: int) -> np.ndarray:
        """(classes,) int64: pixels of each class in all masks."""
        return np.array([self.totals.get(value, 0) for value in range(num_classes)])


# Files


def read_pairs(arguments: Any, split: str, notes: list[str]) -> Examples | None:
    """The pictures of a split with the paths of their masks as `classes`, None for a test split without. From folders, or from
    a table or dataset with a column of masks. A folder of several splits may be named once, as --train_file."""
    own = getattr(arguments, f"{split}_file")
    named = own or arguments.train_file
    argument = f"--{split if own else 'train'}_file"
    paths = [] if named is None else expand_patterns(argument, named)
    if not any(Path(path).is_dir() for path, _ in paths):
        return read_examples(arguments, split, notes)
    if own is None:  # a table is of one split
        paths = [(path, number) for path, number in paths if Path(path).is_dir()]
    found = read_each(argument, paths, partial(_from_path, arguments, split, above_folders(paths), notes))
    most = getattr(arguments, LIMITS[split])
    return found if found is None or most is None or most >= len(found) else found.take(np.arange(most))


def _from_path(arguments: Any, split: str, base: str | None, notes: list[str], path: str) -> Examples | None:
    """`base`: the folder from which pictures are named, None for the folder that they are in."""
    if not Path(path).is_dir():
        return from_table(arguments, split, Path(path))
    places = _places(Path(path), split, is_own=getattr(arguments, f"{split}_file") is not None)
    return None if places is None else _pairs(*places, base, notes)


def _places(root: Path, split: str, is_own: bool) -> tuple[Path, Path | None] | None:
    """(folder of pictures, folder of masks) of a split below `root`. `is_own`: whether that may be the split's own folder, and
    not one of several splits. None for the masks of a test split without."""
    pairs = []
    for name in SPLIT_FOLDERS[split]:
        pairs += [
            (root / name / "images", root / name / "masks"),
            (root / "images" / name, root / "masks" / name),
            (root / "leftImg8bit" / name, root / "gtFine" / name),
            (root / name, root / f"{name}annot"),
        ]
    if is_own:
        pairs += [(root / "images", root / "masks"), (root, root.with_name(f"{root.name}annot"))]
    there = next((pair for pair in pairs if all(place.is_dir() for place in pair)), None)
    if there is not None:
        return there
    if split == "test":
        alone = [images for images, _ in pairs if images.is_dir()]
        return (alone[0], None) if alone else None
    if not is_own:
        return None
    raise InputError(
        f"{root}: holds no pictures with masks; expected images/ and masks/ with files of equal names, in it or in "
        f"{'/ or '.join(SPLIT_FOLDERS[split])}/, or the folders of CamVid (train/ and trainannot/) or Cityscapes (leftImg8bit/ "
        "and gtFine/)"
    )


def _pairs(images: Path, masks: Path | None, base: str | None, notes: list[str]) -> Examples:
    pictures = _by_name(images, ENDS[0], notes)
    if not pictures:
        raise InputError(f"{images}: holds no pictures")
    ids = named_from(base, images, [str(path.relative_to(images)) for path in pictures.values()])
    shown = EncodedImages([str(path) for path in pictures.values()], Path())
    if masks is None:
        return Examples(str(images), shown, None, shown.name, ids)
    city = any(path.stem.endswith(ENDS[0]) for path in pictures.values())
    drawn = _by_name(masks, ENDS[1] if city else "", [], only=city)
    missing = [f"{path}: no mask in {masks}; expected {name}.png" for name, path in pictures.items() if name not in drawn]
    if missing:
        raise InputError(*missing[:SHOWN], *more(len(missing)))
    if others := [str(path.relative_to(masks)) for name, path in drawn.items() if name not in pictures]:
        notes.append(f"{masks}: {len(others)} mask(s) without a picture are left out: {listed(others)}")
    return Examples(str(images), shown, [str(drawn[name]) for name in pictures], shown.name, ids)


def _by_name(folder: Path, end: str, notes: list[str], only: bool = False) -> dict[str, Path]:
    """The pictures below a folder by relative path without extension and without `end`; `only` those with it. Raises
    `InputError` for two of one name."""
    found: dict[str, Path] = {}
    for path in pictures_below(folder, notes):
        name = str(path.relative_to(folder).with_suffix(""))
        if only and not name.endswith(end):
            continue
        name = name.removesuffix(end)
        if name in found:
            raise InputError(f"{path}: {found[name].name} has the same name; a picture and its mask are paired by name")
        found[name] = path
    return found


# Classes


def find_classes_file(arguments: Any) -> Path | None:
    """--classes_file, or classes.txt beside the training data or one folder above. Raises `InputError` for one that is named
    and is not there, and where several sources have different ones."""
    if arguments.classes_file is not None:
        if not Path(arguments.classes_file).is_file():
            raise InputError(f"--classes_file {arguments.classes_file}: no such file")
        return Path(arguments.classes_file)
    if arguments.train_file is None:
        return None
    found = []
    for path in (Path(path).absolute() for path, _ in expand_patterns("--train_file", arguments.train_file)):
        found += [place / CLASSES_FILE for place in (path, path.parent) if (place / CLASSES_FILE).is_file()][:1]
    found = list({path.read_bytes(): path for path in reversed(found)}.values())[::-1]  # those that differ
    if len(found) > 1:
        raise InputError(f"{found[0]} and {found[1]} are not equal; name the file that counts by --classes_file")
    return found[0] if found else None


def read_classes(path: Path) -> Classes:
    """The classes of a file with a name a line, numbered from 0, or a number and a name; "(ignore)" behind a name says that its
    pixels do not count. Raises `InputError` with the file and the line."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; expected a class a line") from None
    parts = [NUMBERED.fullmatch(line) for line in lines]
    numbered = all(part for part, line in zip(parts, lines, strict=True) if line)
    names: dict[int, str] = {}
    ignored, problems = set(), []
    for number, line in enumerate(lines):
        if not line:
            continue
        value, name = (int(parts[number][1]), parts[number][2]) if numbered else (len(names) + len(ignored), line)
        if value in names or value in ignored:
            problems.append(f"{path}:{number + 1}: the value {value} is there twice")
        elif NOT_COUNTED.search(name):
            ignored.add(value)
        elif name in names.values():
            problems.append(f"{path}:{number + 1}: the class {name!r} is there twice")
        else:
            names[value] = name
    if not problems and sorted(names) != list(range(len(names))):
        values = ", ".join(map(str, sorted(names)[:SHOWN]))
        problems.append(f"{path}: the classes have the values {values}; expected 0, 1, 2 and so on, without a gap")
    if not problems and not 2 <= len(names) <= MOST_CLASSES:
        problems.append(f"{path}: has {len(names)} class(es), expected 2 to {MOST_CLASSES}")
    if problems:
        raise InputError(*problems[:SHOWN], *more(len(problems)))
    return Classes([names[value] for value in range(len(names))], frozenset(ignored))


def choose_classes(arguments: Any, train: InspectedMasks | None, own: list[str] | None, of_config: list[str]) -> Classes:
    """The classes: of the classes file, else `own`, what a trained model has, else numbers, as many as the training masks have.
    `of_config`: what a model that is not trained is made for. Raises `InputError`."""
    file, ignored = find_classes_file(arguments), frozenset([arguments.ignore_index])
    if file is None and own is None and train is not None:
        return numbered_classes(train, ignored)
    classes = Classes(own or of_config, frozenset()) if file is None else read_classes(file)
    if train is None and len(classes.names) != len(of_config):
        raise InputError(f"{file}: names {len(classes.names)} classes, but the model has {len(of_config)}")
    if not ignored.isdisjoint(range(len(classes.names))):
        name = classes.names[arguments.ignore_index]
        raise InputError(f"--ignore_index {arguments.ignore_index} is the class {name!r}; give a value that no class has")
    return Classes(classes.names, classes.ignored | ignored)


def numbered_classes(train: InspectedMasks, ignored: frozenset[int]) -> Classes:
    """The values of the training masks as classes without names. Raises `InputError` unless they are 0, 1, 2 and so on."""
    values = sorted(set(train.totals) - ignored)
    if len(values) < 2 or values != list(range(len(values))) or len(values) > MOST_CLASSES:
        besides = f" besides {', '.join(map(str, sorted(ignored)))}, which does not count" if ignored else ""
        raise InputError(
            f"the training masks have the value(s) {', '.join(map(str, values[:SHOWN]))}{' ...' * (len(values) > SHOWN)}"
            f"{besides}; expected 0, 1, 2 and so on, the number of each pixel's class. Name the classes in --classes_file if "
            "some are in no mask, or save the masks anew (of a mask of 0 and 255: with 1 in place of 255)"
        )
    return Classes([str(value) for value in values], ignored)


# Masks


def inspect_masks(examples: dict[str, Examples], inspected: dict[str, Inspected]) -> dict[str, InspectedMasks]:
    """Decodes every mask once, and keeps what was found under a hash of the files. Raises `InputError` with all masks that are
    missing or broken, have colours, or another size than their picture."""
    found, problems = {}, []
    for split, these in examples.items():
        try:
            if these.classes is not None:
                found[split] = _inspect(these, inspected[split])
            elif split != "test":
                problems.append(f"{these.path}: has no masks; expected a folder of them, or a column (--label_column)")
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return found


def _inspect(examples: Examples, pictures: Inspected) -> InspectedMasks:
    masks = examples.images.beside(examples.classes, examples.where)
    seen = masks.inspect()
    wrong = [
        f"{masks.name(row)}: {mask.width}x{mask.height} pixels, but its picture {examples.images.name(row)} has "
        f"{picture.width}x{picture.height}; they must be equal"
        for row, (mask, picture) in enumerate(zip(seen.headers, pictures.headers, strict=True))
        if mask[:2] != picture[:2]
    ]
    if wrong:
        raise InputError(*wrong[:SHOWN], *more(len(wrong)))
    path = get_or_create("masks", fingerprint([*seen.digests])[:40], partial(_store_counts, masks))
    counts = json.loads((path / "counts.json").read_text(encoding="utf-8"))
    return InspectedMasks(masks, seen.content, [{int(value): count for value, count in each.items()} for each in counts])


def _store_counts(masks: Images, folder: Path) -> None:
    found, problems = [], []
    with ThreadPoolExecutor(THREADS) as pool, Phase("reading masks", "masks", len(masks)) as bar:
        for counts in pool.map(partial(_counts, masks), range(len(masks))):
            (problems if isinstance(counts, str) else found).append(counts)
            bar.update()
    if problems:
        raise InputError(*problems[:SHOWN], *more(len(problems)))
    (folder / "counts.json").write_text(json.dumps(found), encoding="utf-8")


def _counts(masks: Images, row: int) -> dict[int, int] | str:
    """Pixels of each value, or what is wrong with the mask."""
    try:
        values, counts = np.unique(np.asarray(masks.load_mask(row)), return_counts=True)
    except InputError as error:
        return "; ".join(error.problems)
    return {int(value): int(count) for value, count in zip(values, counts, strict=True)}


def check_values(found: InspectedMasks, classes: Classes) -> None:
    """Raises `InputError` for masks with values that are no class, each with its file."""
    known = {*range(len(classes.names)), *classes.ignored}
    problems = [
        f"{found.masks.name(row)}: {count} pixels of unknown class {value}"
        for row, counts in enumerate(found.counts)
        for value, count in counts.items()
        if value not in known
    ]
    if problems:
        named = ", ".join(f"{number} {name}" for number, name in enumerate(classes.names[:SHOWN]))
        raise InputError(
            *problems[:SHOWN],
            *more(len(problems)),
            f"the classes are {named}{' ...' * (len(classes.names) > SHOWN)}, and {sorted(classes.ignored)} does not count; "
            "give the file that names all by --classes_file, or a value that does not count by --ignore_index",
        )


def note_classes(train: InspectedMasks, classes: Classes, notes: list[str]) -> None:
    """Notes how many classes there are, what does not count, and classes without a pixel."""
    totals = train.totals
    pixels, uncounted = sum(totals.values()), sum(totals.get(value, 0) for value in classes.ignored)
    notes.append(f"{len(classes.names)} classes; {uncounted / pixels:.1%} of the training pixels do not count")
    if missing := [name for number, name in enumerate(classes.names) if not totals.get(number)]:
        notes.append(f"no training mask has the class {listed(missing)}")
