import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from damage import cut, flip

from samerun.data import cache
from samerun.data.cache import cache_folder, get_or_create
from samerun.errors import InputError


def fill(folder):
    (folder / "some").write_text("made")


def test_what_was_made_is_found_also_in_a_read_only_cache(token_cache, monkeypatch):
    for key in ("a", "b"):
        folder = get_or_create("rows", key, fill)
        assert (folder, (folder / "some").read_text()) == (token_cache / "rows" / key, "made")
    assert {path.name for path in (token_cache / "rows").iterdir()} == {"a", "a.lock", "b", "b.lock"}
    monkeypatch.setattr(cache, "FileLock", None)  # writing
    assert get_or_create("rows", "b", None) == folder


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip])
@pytest.mark.parametrize("name", ["some", "checksums.json"])
def test_what_is_damaged_or_missing_is_made_anew(token_cache, capsys, damage, name):
    damage(get_or_create("rows", "a", fill) / name)
    assert capsys.readouterr().err == ""
    assert (get_or_create("rows", "a", fill) / "some").read_text() == "made"
    note = f"note           {token_cache}/rows/a: this cache is damaged; it is created again\n"
    assert capsys.readouterr().err == note
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


def test_a_cache_that_cannot_be_written(token_cache):
    token_cache.write_text("a file where the folder should be")
    message = r"cache/rows: the cache cannot be written \(.+\); set HF_DATASETS_CACHE to another"
    with pytest.raises(InputError, match=message):
        get_or_create("rows", "a", fill)

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    token_cache.unlink()
    with pytest.raises(OSError, match=r"No space left on device: .*cache/rows"):
        get_or_create("rows", "a", full)


@pytest.mark.parametrize("settled", [-1.0, 1e9])
def test_a_file_that_cannot_be_read_is_no_fault_of_the_cache(token_cache, tmp_path, monkeypatch, settled):
    monkeypatch.setattr(cache, "SETTLED", settled)
    with pytest.raises(InputError, match=f"^{tmp_path}: cannot be read .is a directory"):
        cache.content_hash(tmp_path)


def test_processes_that_start_together_make_it_once(token_cache, tmp_path):
    def make(folder):
        time.sleep(0.3)
        fill(folder)
        (tmp_path / str(os.getpid())).touch()

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=get_or_create, args=("rows", "a", make)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len([path for path in tmp_path.iterdir() if path != token_cache]) == 1


def test_the_folder_is_that_of_datasets(monkeypatch):
    import datasets

    monkeypatch.delenv("HF_DATASETS_CACHE")
    assert cache_folder("rows") == Path(datasets.config.DEFAULT_HF_DATASETS_CACHE).expanduser() / "rows"
    monkeypatch.setenv("HF_DATASETS_CACHE", "~/elsewhere")
    assert cache_folder("rows") == Path.home() / "elsewhere" / "rows"
