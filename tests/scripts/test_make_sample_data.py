"""The sample corpus: what is extracted from a small package, what is masked, and that a second run changes
nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import make_sample_data as sample_data
import numpy as np
import pytest
from launchers import as_words

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_sample_data.py"
FILES = ["labels.txt", "sample_data.json", "test.jsonl", "train.jsonl", "validation.jsonl"]

NUMPYDOC = '''
def solve(matrix):
    """Solve a system of linear equations.

    The system is factorised once and then solved for every column on the right-hand side. See
    `scipy.linalg.lu`, which NumPy calls for the real work, and the remarks on stability that Golub made long
    ago [1]_.

    Parameters
    ----------
    matrix : ndarray of shape (n, n)
        Coefficients of the equations, one row for each of them, in any floating point type.

    Returns
    -------
    out : ndarray
        The solution that leaves the smallest residual of all that were tried.

    References
    ----------
    .. [1] Golub, G. Secret Book. 1996.

    Examples
    --------
    >>> np.secret_call([[1, 2], [3, 4]])
    """
'''


def document(number: int) -> str:
    """A function whose docstring shares hardly a phrase with that of another number."""
    values = [(number * 7919 + position * position * 31) % 9973 for position in range(90)]
    words = ["".join("abcdefghij"[int(digit)] for digit in str(value)) for value in values]
    body = "\n    ".join(" ".join(words[start : start + 10]) for start in range(0, 90, 10))
    return f'def f{number}():\n    """Compute the value of number {number}.\n\n    {body}\n    """\n'


@pytest.fixture
def site(tmp_path):
    """A folder for sys.path with the package `tinylib` 1.0 in it, which must never be imported."""
    root = tmp_path / "site" / "tinylib"
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text("raise SystemExit('imported')\n")
    (root / "linalg.py").write_text(NUMPYDOC)
    (root / "many.py").write_text("\n\n".join(document(number) for number in range(120)))
    (root / "copied.py").write_text(
        NUMPYDOC.replace("def solve", "def resolve").replace("for every", "for any")
    )
    (root / "broken.py").write_text('"""' + "text " * 100 + '"""\nprint "of another Python"\n')
    (root / "tests" / "helpers.py").write_text(document(999))
    metadata = tmp_path / "site" / "tinylib-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: tinylib\nVersion: 1.0\n")
    return root.parent


def run(site: Path, output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *as_words(output_dir=output, packages="tinylib"), "no_such_lib"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def read_rows(output: Path) -> dict[str, list[dict]]:
    splits = ("train", "validation", "test")
    return {split: [json.loads(line) for line in (output / f"{split}.jsonl").open()] for split in splits}


def test_numpydoc_becomes_prose_and_labels_and_nothing_gives_them_away(site):
    rows = {row["id"]: row for row in sample_data.package_rows(site / "tinylib")}
    row = rows["tinylib.linalg.solve"]
    assert row["title"] == "Solve a system of linear equations."
    assert row["text"].split("\n") == [
        "The system is factorised once and then solved for every column on the right-hand side. See lu, "
        "which [library] calls for the real work, and the remarks on stability that Golub made long ago .",
        "Coefficients of the equations, one row for each of them, in any floating point type.",
        "The solution that leaves the smallest residual of all that were tried.",
    ]
    assert row["labels"] == [
        *(f"has:{section}" for section in ("parameters", "returns", "examples", "references")),
        *("kind:function", "library:tinylib", "topic:linear algebra"),
    ]


def test_run_writes_disjoint_splits_and_says_what(site, tmp_path):
    output = tmp_path / "out"
    result = run(site, output, "--min_label_rows", "1")
    assert result.returncode == 0, result.stderr
    assert "no_such_lib: not installed, left out" in result.stdout
    assert sorted(path.name for path in output.iterdir()) == FILES
    splits = read_rows(output)
    rows = [row for split in splits.values() for row in split]
    assert len(rows) == len({row["id"] for row in rows}) == len({row["text"] for row in rows}) == 121
    # The first row of the copies is alone here.
    assert {row["id"] for row in rows} >= {"tinylib.many.f0", "tinylib.copied.resolve"}
    assert "tinylib.linalg.solve" not in {row["id"] for row in rows}
    assert 80 <= len(splits["train"]) <= 115
    assert min(len(splits["validation"]), len(splits["test"])) >= 3
    made = json.loads((output / "sample_data.json").read_text())
    assert made["rows"] == {split: len(rows) for split, rows in splits.items()}
    assert made["origin"]["versions"] == {"tinylib": "1.0"}
    labels = (output / "labels.txt").read_text().split("\n")[:-1]
    assert (
        labels
        == sorted({label for row in splits["train"] for label in row["labels"]})
        == list(made["labels"])
    )
    assert f"train {len(splits['train'])} rows" in result.stdout


def test_second_run_reuses_and_force_gives_the_same_bytes(site, tmp_path):
    output, again = tmp_path / "out", tmp_path / "again"
    assert run(site, output).returncode == 0
    before = {name: ((output / name).read_bytes(), (output / name).stat().st_mtime_ns) for name in FILES}
    assert "nothing to do" in run(site, output).stdout
    assert {
        name: ((output / name).read_bytes(), (output / name).stat().st_mtime_ns) for name in FILES
    } == before
    assert run(site, again, "--force").returncode == 0
    assert {name: (again / name).read_bytes() for name in FILES} == {
        name: content for name, (content, _) in before.items()
    }


def test_files_from_elsewhere_are_not_overwritten(site, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "train.jsonl").write_text("mine\n")
    result = run(site, output)
    assert result.returncode == 2
    assert "train.jsonl from elsewhere" in result.stderr
    assert "choose another folder" in result.stderr
    assert (output / "train.jsonl").read_text() == "mine\n"


def test_digits_are_drawn_once_and_the_same_each_time(tmp_path, monkeypatch):
    from sampling import digits

    monkeypatch.setattr(digits, "ROWS", {"train": 20, "test": 10})
    drawn = []
    for name in ("a", "b"):
        digits.draw_digits(tmp_path / name)
        drawn.append(
            {
                path.relative_to(tmp_path / name): path.read_bytes()
                for path in sorted((tmp_path / name).rglob("*.png"))
            }
        )
    assert drawn[0] == drawn[1]
    assert sorted({(path.parts[0], path.parts[1]) for path in drawn[0]}) == [
        (s, str(d)) for s in ("test", "train") for d in range(10)
    ]
    assert len(set(drawn[0].values())) == 30
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").touch()
    with pytest.raises(FileExistsError, match="it holds mine from elsewhere"):
        digits.draw_digits(tmp_path / "c")


def test_no_sentence_and_no_name_is_drawn_twice(tmp_path):
    from sampling import names

    assert names.write_names(tmp_path) == names.write_names(tmp_path)  # the same each time
    texts, drawn = [], []
    for split in names.ROWS:
        for row in map(json.loads, (tmp_path / f"{split}.jsonl").open()):
            texts.append(" ".join(row["tokens"]))
            tagged = " ".join(f"{tag[0]}{word}" for word, tag in zip(row["tokens"], row["tags"], strict=True))
            drawn += re.findall(r"B\S+(?: I\S+)*", tagged)
    assert len(set(texts)) == len(texts) == 1500
    assert len(set(drawn)) == len(drawn) > 3000


def test_shapes_have_masks_of_their_classes(tmp_path, monkeypatch):
    from PIL import Image
    from sampling import shapes

    monkeypatch.setattr(shapes, "ROWS", {"train": 8, "validation": 2})
    assert shapes.draw_shapes(tmp_path) == {"train": 8, "validation": 2}
    seen = set()
    for mask in sorted(tmp_path.glob("*/masks/*.png")):
        image = Image.open(mask.parents[1] / "images" / mask.name)
        assert (image.mode, image.size) == ("RGB", Image.open(mask).size)
        seen |= set(np.unique(Image.open(mask)).tolist())
    assert seen == {0, 1, 2, 3, 255}
    assert (tmp_path / "classes.txt").read_text().split() == ["ground", "disc", "square", "triangle"]
