import datasets
import numpy as np
import pytest
from image_classify import Arguments
from images_job import CLASSES, idx, pixels, write_folder, write_idx
from PIL import Image
from refusals import problems_of

from samerun.data import cache
from samerun.errors import InputError
from samerun.images import data
from samerun.images.data import read_examples
from samerun.images.transforms import read_header
from samerun.parsing import SpaceSeparated
from samerun.task import Mixture


def read(source, split="train", notes=None, **given):
    """`source`: a path or a list of paths."""
    files = SpaceSeparated(source if isinstance(source, list) else [str(source)])
    arguments = Arguments(output_dir="runs/a", **{f"{split}_file": files}, **given)
    return read_examples(arguments, split, [] if notes is None else notes)


def refused(said, source):
    with pytest.raises(InputError, match=said):
        read(source)


def arrays(examples):
    return np.stack([np.asarray(examples.images.load(row, "L")) for row in range(len(examples))])


@pytest.mark.parametrize("as_folder", [True, False])
def test_mnist_files(tmp_path, as_folder):
    write_idx(tmp_path, "train")
    write_idx(tmp_path, "t10k", packed=False, rows=6)
    for split, name, rows in (
        ("train", "train-images-idx3-ubyte.gz", 24),
        ("test", "t10k-images-idx3-ubyte", 6),
    ):
        found = read(tmp_path if as_folder else tmp_path / name, split)
        expected, classes = pixels(rows)
        np.testing.assert_array_equal(arrays(found), expected)
        assert found.labels == classes.tolist()
        assert found.images.where(3) == f"{tmp_path / name} image 3"


IDX = idx(pixels(rows=4)[0])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (IDX[:-1], r"has \d+ bytes, but 4 x 16 x 16 values take \d+; copy it again"),
        (b"PK" + IDX[2:], r"is no idx file of bytes in 3 dimension\(s\): it begins with b'PK"),
        (IDX[:2] + b"\x0d" + IDX[3:], "is no idx file of bytes"),
        (idx(np.zeros((0, 16, 16))), "no rows"),
        (IDX[:6], "is no idx file of bytes"),
    ],
)
def test_damaged_mnist_files(tmp_path, content, said):
    write_idx(tmp_path, packed=False, rows=4)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    refused(f".*ubyte: {said}", tmp_path)


def test_labels_that_belong_to_other_images(tmp_path):
    write_idx(tmp_path, packed=False, rows=4)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(3)))
    refused("labels-idx1-ubyte: has 3 labels for the 4 images of .*train-images", tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b broken")
    (tmp_path / "train-images-idx3-ubyte").unlink()
    refused(r"ubyte\.gz: cannot be read .*copy it again", tmp_path)


def test_a_folder_a_class(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "dark" / "readme.txt").write_text("no image")
    (tmp_path / "dark" / ".hidden.png").write_text("no image either")
    (tmp_path / "dark" / ".ipynb_checkpoints").mkdir()
    for name in ("._beside.png", "dark/.ipynb_checkpoints/copy.png"):
        (tmp_path / name).write_text("nor this")
    notes = []
    found = read(tmp_path, notes=notes)
    assert found.labels == ["dark"] * 12 + ["light"] * 12
    assert found.ids[0] == "dark/000.png"
    assert notes == [f"{tmp_path / 'dark'}: 1 file(s) that Pillow does not read left out: readme.txt"]
    assert read(tmp_path, max_train_samples=4).labels == ["dark", "dark", "light", "light"]


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    folder, other = write_folder(tmp_path / "data", rows=4), write_folder(tmp_path / "other", rows=2)
    (folder / "dark" / "site").symlink_to(other / "dark")
    (other / "dark" / "circle").symlink_to(folder / "dark")
    expected = ["dark/000.png", "dark/002.png", "dark/site/000.png", "light/001.png", "light/003.png"]
    assert read(folder).ids == expected


def test_folders_that_are_wrong(tmp_path):
    (tmp_path / "a").mkdir()
    refused(rf"^{tmp_path}/a: holds no images; expected a folder for each class", tmp_path / "a")
    refused(rf"^{tmp_path}/a: holds no images; remove the folder", tmp_path)
    (tmp_path / "a").rename(tmp_path / "Train")
    refused(r"holds splits \(Train\), not classes; give each by itself, .* --train_file .*/Train", tmp_path)
    (tmp_path / "b").mkdir()
    Image.new("L", (2, 2)).save(tmp_path / "beside.png")
    refused(r"holds images beside the folders of classes \(beside\.png\)", tmp_path)


def write_table(folder, kind):
    """A table in `folder` of the images below it."""
    files = sorted(path for path in folder.rglob("*.png"))
    rows = [{"image": str(path.relative_to(folder)), "label": path.parent.name} for path in files]
    if kind == "csv":
        path = folder / "rows.csv"
        path.write_text("image,label\n" + "".join(f"{row['image']},{row['label']}\n" for row in rows))
        return path
    features = None
    if kind == "parquet":
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list(CLASSES)))
        rows = [row | {"image": {"bytes": file.read_bytes()}} for row, file in zip(rows, files, strict=True)]
    datasets.Dataset.from_list(rows, features).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize("kind", ["csv", "parquet", "parquet of paths"])
def test_tables(tmp_path, kind, token_cache):
    write_folder(tmp_path)
    found = read(write_table(tmp_path, kind))
    order = np.concatenate([np.arange(0, 24, 2), np.arange(1, 24, 2)])
    np.testing.assert_array_equal(arrays(found), pixels()[0][order])
    assert list(found.labels) == ["dark"] * 12 + ["light"] * 12
    assert found.declared == (tuple(CLASSES) if kind == "parquet" else ())
    some = found.take(np.array([20, 3]))
    np.testing.assert_array_equal(arrays(some), pixels()[0][order][[20, 3]])
    assert some.images.where(0) == found.images.where(20)


def test_several_folders_and_files_are_read_one_after_the_other(tmp_path, token_cache):
    a, b = (write_folder(tmp_path / "sites" / name, rows=4, seed=seed) for seed, name in enumerate("ab"))
    for part in (1, 2):
        write_table(write_folder(tmp_path / "tables" / f"part-{part}", rows=2, seed=part), "csv")
    idx_folder, pattern = write_idx(tmp_path / "idx", rows=2), str(tmp_path / "tables" / "*" / "rows.csv")
    given = [str(a), str(b), pattern, str(idx_folder)]
    found = read(given)
    singles = [read(path) for path in (a, b, *sorted(tmp_path.glob("tables/*/rows.csv")), idx_folder)]
    np.testing.assert_array_equal(arrays(found), np.concatenate([arrays(single) for single in singles]))
    assert found.labels == ["dark", "dark", "light", "light"] * 2 + ["dark", "light"] * 2 + [0, 1]
    assert found.ids == [f"sites/{site}/{path}" for site in "ab" for path in singles[0].ids] + [*range(8, 14)]
    assert found.images.where(6) == str(tmp_path / found.ids[6])
    assert found.images.where(10).startswith(f"{tmp_path}/tables/part-2/rows.csv:2")
    digests = [digest for single in singles for digest in single.images.inspect().digests]
    assert found.images.inspect().digests == digests
    mixture = Mixture.of(found.source, (1, 1, 1, 4), found.sources, notes := [])
    assert mixture.counts.tolist() == [2, 2, 2, 8]
    shares = f"2 from the 4 of {a}, 2 from the 4 of {b}, 2 from the 4 of {tmp_path}/tables/part-1"
    assert notes[0].startswith(f"rows of an epoch: {shares}")
    some = found.take(np.array([11, 0, 13, 7]))
    np.testing.assert_array_equal(arrays(some), arrays(found)[[11, 0, 13, 7]])
    assert some.images.inspect().digests == [digests[row] for row in (11, 0, 13, 7)]
    assert (some.source.tolist(), some.images.where(0)) == ([2, 0, 3, 1], found.images.where(11))
    assert read(given[:2], max_train_samples=4).labels == ["dark", "light", "dark", "light"]


def test_several_sources_that_are_wrong(tmp_path):
    a = str(write_folder(tmp_path / "a"))
    refused(
        rf"aa: no such file; did you mean '{a}'\?\n.*/b\.csv: no such file", [a, f"{a}a", f"{tmp_path}/b.csv"]
    )
    refused(f"{a} has labels, but {a}/dark has none; give all of them labels, or none", [f"{a}/dark", a])


def test_inspecting_names_everything_that_is_wrong(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "rows.csv").write_text("image,label\ndark/000.png,a\nnowhere.png,b\nrows.csv,a\n")
    assert problems_of(read(tmp_path / "rows.csv").images.inspect) == [
        f"{tmp_path}/nowhere.png: this file does not exist",
        f"{tmp_path}/rows.csv: is no image that Pillow can read (it begins with b'image,label\\ndark'); "
        "copy it again or leave it out",
    ]


def test_unchanged_files_are_not_read_again(tmp_path, monkeypatch, token_cache):
    found = read(write_folder(tmp_path)).images
    files, opened = [tmp_path / cell for cell in found.sources[0].cells], []
    monkeypatch.setattr(data, "read_header", lambda *given: (opened.append(1), read_header(*given))[1])
    first = found.inspect()  # files of this moment may change again within the resolution of the clock
    assert found.inspect() == first
    assert len(opened) == 2 * len(files)
    monkeypatch.setattr(cache, "SETTLED", -1.0)
    opened.clear()
    assert found.inspect() == first
    assert len(opened) == len(files)
    opened.clear()
    assert found.inspect() == first
    assert opened == []
    files[0].write_bytes(files[2].read_bytes())
    changed = found.inspect()
    assert (changed.digests[0], changed.digests[1:]) == (first.digests[2], first.digests[1:])
    files[1].unlink()
    with pytest.raises(InputError, match="does not exist"):
        found.inspect()


@pytest.mark.parametrize("place", ["run", "dark/run", "dark/../light/run"])
def test_a_run_among_its_images_is_refused(tmp_path, place):
    write_folder(tmp_path / "train")
    arguments = Arguments(output_dir=f"{tmp_path}/train/{place}", train_file=str(tmp_path / "train"))
    with pytest.raises(InputError, match=r"--output_dir .*: lies in .*/train, whose images are read"):
        read_examples(arguments, "train", [])
