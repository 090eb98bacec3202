"""Shells that are not as usual: no home, no console, no folder of the script on Python's path, size
limits."""

import os
import subprocess
import sys

import pytest
from launchers import CLASSIFY, as_words, python, run, training, write_corpus
from run_folders import read_json
from running import ENDLESS


def in_shell(command, *shell):
    return ["bash", "-c", " ".join(shell), "bash", *command]


@pytest.mark.parametrize("name", ["classify.py", "titlegen.py"])
def test_a_script_finds_its_packages_under_a_safe_path(name):
    command = [sys.executable, str(CLASSIFY.parent / name), "--seed", "x"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**environment, "PYTHONSAFEPATH": "1"}
    )
    assert (done.returncode, done.stderr.splitlines()[0][:15]) == (2, "error: --seed: ")


@pytest.mark.slow
def test_without_a_home_or_a_reader_a_run_under_deepspeed_ends_well(home, tmp_path):
    # Accelerate would take the last one as "no DeepSpeed".
    variables = "PYTHONSAFEPATH=1 HOME=/proc/nonexistent ACCELERATE_USE_CPU=true"
    command = [*python(), *training(tmp_path, deepspeed="ds_configs/zero2.json")]
    shell = f'{variables} "$@" 2>&- | head -1; exit ${{PIPESTATUS[0]}}'
    finished = run(in_shell(command, shell), home).check()
    assert len(finished.out.splitlines()) == 1
    assert read_json(tmp_path / "status.json")["state"] == "done"


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_named(tmp_path, script, monkeypatch):
    """The history is the first file of the run to pass the limit; then, without a training, the
    predictions."""
    home = tmp_path  # not the tests' common one, where steps are observed: that writes files, too
    write_corpus(home)
    # The first start fills the cache, whose files are larger.
    monkeypatch.chdir(home)
    fill = training(tmp_path / "fill", **ENDLESS | {"max_steps": 1})
    script("classify", fill[1:]).check()
    command = [*python(), *training(tmp_path / "run", **ENDLESS | {"max_steps": 2000})]
    finished = run(in_shell(command, 'ulimit -f 8; "$@"'), home)
    check_end(finished, tmp_path / "run" / "history.jsonl", "--resume_from_checkpoint auto resumes")
    assert read_json(tmp_path / "run" / "status.json")["state"] == "failed"

    words = as_words(
        do_predict=True, model_name_or_path=tmp_path / "fill" / "best", test_file="test.csv",
        output_dir=tmp_path / "new",
    )  # fmt: skip
    script("classify", words).check()
    (tmp_path / "new" / "predictions.jsonl").unlink()
    finished = run(in_shell([*python(), str(CLASSIFY), *words], 'ulimit -f 1; "$@"'), home)
    check_end(finished, tmp_path / "new" / "predictions.jsonl", "Then run the same command again")
    assert [path.name for path in (tmp_path / "new").iterdir() if "predictions." in path.name] == []


def check_end(finished, path, advice):
    assert finished.code == 3, finished.err
    (line,) = [line for line in finished.err.splitlines() if line.startswith("error")]
    assert f"a file would exceed the size limit ([Errno 27] File too large: '{path}')" in line
    assert advice in line
    assert "Traceback" not in finished.err
