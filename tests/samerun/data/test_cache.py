import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samerun.data import cache
from samerun.data.cache import cache_folder, get_or_create
from samerun.errors import InputError


def fill(folder):
    (folder / "some").write_text("made")


def test_what_was_made_is_found(token_cache):
    calls = []

    def make(folder):
        calls.append(folder)
        fill(folder)

    for _ in range(2):
        assert (get_or_create("rows", "a", make) / "some").read_text() == "made"
    assert (len(calls), get_or_create("rows", "b", make) == token_cache / "rows" / "b") == (1, True)
    assert {path.name for path in (token_cache / "rows").iterdir()} == {"a", "a.lock", "b", "b.lock"}


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda file: file.write_text("ma"), lambda file: file.write_text("mode")]
)
@pytest.mark.parametrize("name", ["some", "checksums.json"])
def test_what_is_damaged_or_missing_is_made_anew(token_cache, capsys, damage, name):
    damage(get_or_create("rows", "a", fill) / name)
    assert capsys.readouterr().err == ""
    assert (get_or_create("rows", "a", fill) / "some").read_text() == "made"
    assert (
        capsys.readouterr().err
        == f"note           {token_cache}/rows/a: this cache is damaged; it is created again\n"
    )
    assert {path.name for path in (token_cache / "rows").iterdir()} == {"a", "a.lock"}


def test_what_is_not_finished_is_not_there(token_cache):
    def fail(folder):
        (folder / "some").write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        get_or_create("rows", "a", fail)
    assert [path.name for path in (token_cache / "rows").iterdir()] == ["a.lock"]


def test_leftovers_are_removed_by_the_process_that_has_the_lock(token_cache, monkeypatch):
    """In containers pids are the same again and again; machines that share a cache may have the same ones."""
    leftovers = [token_cache / "rows" / f"a.{pid}" for pid in (os.getpid(), 1)]
    for folder in leftovers:
        folder.mkdir(parents=True)
        fill(folder)

    def fail(path):
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(cache, "FileLock", fail)
        with pytest.raises(InputError, match="permission denied"):
            get_or_create("rows", "a", fill)
    assert all((folder / "some").exists() for folder in leftovers)
    get_or_create("rows", "a", fill)
    assert {path.name for path in (token_cache / "rows").iterdir()} == {"a", "a.lock"}


def test_a_complete_folder_is_found_in_a_read_only_cache(token_cache, monkeypatch):
    folder = get_or_create("rows", "a", fill)
    monkeypatch.setattr(cache, "FileLock", None)  # writing
    assert get_or_create("rows", "a", None) == folder


def test_a_cache_that_cannot_be_written(token_cache):
    token_cache.write_text("a file where the folder should be")
    with pytest.raises(
        InputError, match=r"cache/rows: the cache cannot be written \(.+\); set HF_DATASETS_CACHE to another"
    ):
        get_or_create("rows", "a", fill)

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    token_cache.unlink()
    with pytest.raises(OSError, match=r"No space left on device: .*cache/rows"):
        get_or_create("rows", "a", full)


def test_processes_that_start_together_make_it_once(token_cache, tmp_path):
    code = (
        "import time\nfrom samerun.data.cache import get_or_create\ndef make(folder):\n    "
        "time.sleep(0.3)\n    (folder / 'some').write_text('made')\n    "
        "print('made')\nget_or_create('rows', 'a', make)"
    )
    app = Path(sys.modules["samerun"].__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(app)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert sorted(process.communicate()[0] for process in both) == ["", "", "made\n"]


def test_the_folder_is_that_of_datasets(monkeypatch):
    import datasets

    monkeypatch.delenv("HF_DATASETS_CACHE")
    assert cache_folder("rows") == Path(datasets.config.DEFAULT_HF_DATASETS_CACHE).expanduser() / "rows"
    monkeypatch.setenv("HF_DATASETS_CACHE", "~/elsewhere")
    assert cache_folder("rows") == Path.home() / "elsewhere" / "rows"
