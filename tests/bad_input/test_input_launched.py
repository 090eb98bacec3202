"""The catalogue under real launchers: one message for the whole job, and an exit code that is not 0."""

import re
from dataclasses import replace

import pytest
import refused_arguments
import refused_files
import refused_models
from catalogue_case import Case, command_line, lay_out
from launchers import REPOSITORY, accelerate, deepspeed, hide_gpus, run, torchrun
from run_folders import contents


def case_of(module, name: str, task: str = "classify") -> Case:
    return next(replace(case, task=task) for case in module.CASES if case.name == name)


RAGGED = case_of(refused_files, "too few cells")
LAUNCHES = [
    (RAGGED, lambda: accelerate("cpu_ddp.yaml", 2)),
    (case_of(refused_arguments, "run.yaml key twice"), lambda: deepspeed(2)),
    # Rank 0 alone looks at its folder, before the processes have met; the others hear of it.
    (case_of(refused_models, "output_dir of another run"), lambda: torchrun(2)),
    # Found when the processes have met: by rank 0 alone, and by all at once.
    (case_of(refused_models, "checkpoint missing", "titlegen"), lambda: accelerate("cpu_ddp.yaml", 2)),
    (case_of(refused_models, "model larger_vocabulary"), lambda: torchrun(2)),
]


@pytest.fixture
def place(tmp_path, models):
    """A folder for subprocesses, without GPUs."""
    hide_gpus(tmp_path)
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def test_debug_shows_where_it_was_found(workplace, script):
    lay_out(RAGGED, workplace)
    ended = script("classify", [*command_line(RAGGED), "--log_level", "debug"])
    assert ended.code == 2
    assert ended.err.startswith("Traceback")
    assert "in read_needed" in ended.err
    assert len(re.findall(rf"^error: {RAGGED.said[0]}", ended.err, re.MULTILINE)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("case", "launcher"), LAUNCHES)
def test_a_job_says_it_once_and_fails(case, launcher, place):
    lay_out(case, place)
    before = contents(place)
    script = str(REPOSITORY / "app" / f"{case.task}.py")
    finished = run([*launcher(), script, *command_line(case)], place)
    assert finished.code != 0
    assert len(re.findall(rf"^error: .*{case.said[0]}", finished.err, re.MULTILINE)) == 1, finished.err
    assert not re.search(case.said[0], finished.out)
    assert contents(place) == before
