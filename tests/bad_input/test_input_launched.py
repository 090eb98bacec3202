"""The catalogue under real launchers: one message for the whole job, and an exit code that is not 0."""

import re

import pytest
import refused_arguments
import refused_files
import refused_models
from catalogue_case import Case, command_line, lay_out
from launchers import REPOSITORY, accelerate, deepspeed, hide_gpus, run, torchrun
from run_folders import contents


def case_of(module, name: str) -> Case:
    """A case of the catalogue."""
    return next(case for case in module.CASES if case.name == name)


RAGGED = case_of(refused_files, "too few cells")
LAUNCHES = [
    (RAGGED, "classify", lambda: accelerate("cpu_ddp.yaml", 2)),
    (case_of(refused_arguments, "run.yaml key twice"), "classify", lambda: deepspeed(2)),
    # Rank 0 alone looks at its folder, before the processes have met; the others hear of it.
    (case_of(refused_models, "output_dir of another run"), "classify", lambda: torchrun(2)),
    # Found when the processes have met: by rank 0 alone, and by all at once.
    (case_of(refused_models, "checkpoint missing"), "titlegen", lambda: accelerate("cpu_ddp.yaml", 2)),
    (case_of(refused_models, "model larger_vocabulary"), "classify", lambda: torchrun(2)),
]


@pytest.fixture
def place(tmp_path, models):
    """A folder for subprocesses, without GPUs."""
    hide_gpus(tmp_path)
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def test_debug_shows_where_it_was_found(workplace, script):
    lay_out(RAGGED, "classify", workplace)

    ended = script("classify", [*command_line(RAGGED, "classify"), "--log_level", "debug"])

    assert ended.code == 2
    assert ended.err.startswith("Traceback")
    assert "in read_needed" in ended.err
    assert len(re.findall(rf"^error: {RAGGED.said[0]}", ended.err, re.MULTILINE)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "task", "launcher"), LAUNCHES, ids=[f"{case.name}-{task}" for case, task, _ in LAUNCHES]
)
def test_a_job_says_it_once_and_fails(case, task, launcher, place):
    lay_out(case, task, place)
    before = contents(place)

    script = str(REPOSITORY / "app" / f"{task}.py")
    finished = run([*launcher(), script, *command_line(case, task)], place)

    assert finished.code != 0
    assert len(re.findall(rf"^error: .*{case.said[0]}", finished.err, re.MULTILINE)) == 1, finished.err
    assert not re.search(case.said[0], finished.out)
    assert contents(place) == before
