"""Shells that are not as usual: no home, no console, no folder of the script on Python's path, size
limits."""

import json
import os
import subprocess
import sys

import pytest
from launchers import CLASSIFY, python, run, training, write_corpus


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
    finished = run(
        in_shell(command, f'{variables} "$@" 2>&- | head -1; exit ${{PIPESTATUS[0]}}'), home
    ).check()
    assert len(finished.out.splitlines()) == 1
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_named(tmp_path, script, monkeypatch):
    """The history is the first file of the run to pass the limit; then, without a training, the
    predictions."""
    home = tmp_path  # not the tests' common one, where steps are observed: that writes files, too
    write_corpus(home)
    settings = {"eval_strategy": "no", "eval_steps": None, "save_steps": 0, "metric_for_best_model": None}
    command = [*python(), *training(tmp_path / "run", max_steps=2000, warmup_steps=0, **settings)]
    # The first start fills the cache, whose files are larger.
    monkeypatch.chdir(home)
    assert (
        script("classify", training(tmp_path / "fill", max_steps=1, warmup_steps=0, **settings)[1:]).code == 0
    )
    finished = run(in_shell(command, 'ulimit -f 8; "$@"'), home)
    check_end(finished, tmp_path / "run" / "history.jsonl", "--resume_from_checkpoint auto resumes")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"

    predict = {
        "--do_predict": "true",
        "--model_name_or_path": tmp_path / "fill" / "best",
        "--test_file": "test.csv",
    }
    words = [str(word) for pair in {**predict, "--output_dir": tmp_path / "new"}.items() for word in pair]
    assert script("classify", words).code == 0
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
