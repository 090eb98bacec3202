"""Titles are extracted from a small package, drawn data are the same, a second run changes nothing."""

import subprocess
import sys
from types import SimpleNamespace

import make_sample_data as sample_data
import numpy as np
import pytest
from launchers import SCRIPTS
from PIL import Image
from sampling import digits, names, shapes, titles

SCRIPT = SCRIPTS / "make_sample_data.py"
# Parameters in the styles of NumPy, Google and Sphinx. Left out: what is short, and the others' code.
LIBRARY = '''
def solve(matrix, tol):
    """Solve a system of linear equations.

    Parameters
    ----------
    matrix : ndarray of shape (n, n)
        Coefficients of the equations, see `scipy.linalg.lu`, one row for each of them [1]_, in any type.

        >>> np.secret_call([[1, 2], [3, 4]])
    tol : float
        Short.

    Returns
    -------
    out : ndarray
        The solution that leaves the smallest residual of all that were tried, for each of the columns.
    """

def train(maxIter):
    """Train.

    Args:
        maxIter (int): Number of passes over all rows of the training data, after which the work
            ends without a warning.
    """

def fit(num_workers):
    """Fit.

    :param num_workers: How many processes read the rows while another one computes the steps.
    """

def resolve(matrix):
    """Solve it again.

    Parameters
    ----------
    matrix : ndarray of shape (n, n)
        Coefficients of the equations, see `scipy.linalg.lu`, one row for each of them [1]_, in every type.
    """
'''


@pytest.fixture
def library(tmp_path):
    """The folder of a package, which must never be imported."""
    root = tmp_path / "tinylib"
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text("raise SystemExit('imported')\n")
    (root / "linalg.py").write_text(LIBRARY)
    (root / "broken.py").write_text('"""' + "text " * 100 + '"""\nprint "of another Python"\n')
    (root / "tests" / "helpers.py").write_text(LIBRARY.replace("equations", "tests"))
    return root


def test_titles_are_names_of_described_parameters(library):
    rows = list(titles.title_rows(library))
    assert [(row["id"].removeprefix("tinylib.linalg."), row["title"]) for row in rows] == [
        ("solve.matrix", "matrix"),
        ("train.maxIter", "max iter"),
        ("fit.num_workers", "num workers"),
        ("resolve.matrix", "matrix"),
    ]
    assert [row["text"] for row in rows[:2]] == [
        "Coefficients of the equations, see lu, one row for each of them , in any type.",
        "Number of passes over all rows of the training data, after which the work ends without a warning.",
    ]
    assert {row["module"] for row in rows} == {"tinylib.linalg"}
    # Texts that share most of their phrases are one.
    assert titles.without_duplicates(rows) == rows[:3]


def test_a_second_run_reuses_the_files_and_those_from_elsewhere_stay(tmp_path):
    command = [sys.executable, str(SCRIPT), "names", "--output_dir", str(tmp_path / "names")]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert outputs == [f"{tmp_path / 'names'}: train 1200 rows, validation 150 rows, test 150 rows\n"] * 2
    written = []
    module = SimpleNamespace(ORIGIN={"version": 1}, write=lambda folder: written.append(1) or {"train": 2})
    for version in (1, 1, 2):
        module.ORIGIN = {"version": version}
        assert sample_data.write_once(tmp_path / "a", module) == {"train": 2}
    assert len(written) == 2
    (tmp_path / "a" / sample_data.MANIFEST).unlink()
    (tmp_path / "a" / "train.jsonl").write_text("mine\n")
    done = subprocess.run([*command[:-1], tmp_path / "a"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "train.jsonl from elsewhere" in done.stderr
    assert "choose another folder" in done.stderr
    assert (tmp_path / "a" / "train.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize("module", [digits, shapes])
def test_images_are_the_same_each_time(module, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS", {"train": 12, "test": 3})
    drawn = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        module.write(folder)
        drawn.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.png")})
    assert drawn[0] == drawn[1]
    if module is digits:
        assert {path.parts[:2] for path in drawn[0]} >= {("train", str(digit)) for digit in range(10)}
        assert len(set(drawn[0].values())) == 15
    else:
        masks = [np.unique(Image.open(tmp_path / "a" / path)) for path in drawn[0] if "masks" in path.parts]
        assert set(np.concatenate(masks).tolist()) == {0, 1, 2, 3, 255}


def test_no_sentence_is_drawn_twice():
    texts = [" ".join(row["tokens"]) for row in names.draw_rows(0, 1500)]
    assert len(set(texts)) == len(texts) == 1500
