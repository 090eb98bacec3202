"""Bad input ends in one message that says what is wrong, where, and what to do; and nothing on disk is
harmed."""

from __future__ import annotations

import dataclasses
import re

import classify
import image_classify
import pytest
import refused_arguments
import refused_files
import refused_models
import refused_problems
import refused_tags
import refused_targets
import segment
import segment3d
import tag
import titlegen
from catalogue_case import (
    TARGETS,
    Case,
    by_turns,
    check_one_message,
    check_refused,
    command_line,
)

from samerun.parsing import type_of

SCRIPTS = {"classify": classify, "titlegen": titlegen, "image_classify": image_classify}
SCRIPTS |= {"segment": segment, "segment3d": segment3d, "tag": tag}

REFUSED = [
    *by_turns(refused_files.CASES),
    *refused_targets.CASES,
    *refused_problems.CASES,
    *by_turns(refused_arguments.CASES),
    *by_turns(refused_models.CASES),
    *refused_tags.CASES,
]
TRIED = [pytest.param(case, task, id=f"{case.name}-{task}") for case in REFUSED for task in case.tasks]


@pytest.mark.parametrize(("case", "task"), TRIED)
def test_bad_input_is_explained_and_harms_nothing(case: Case, task: str, workplace, script):
    check_refused(case, task, workplace, script, command_line(case, task))


def test_the_catalogue_is_large_and_tries_both_tasks():
    names = [case.name for case in REFUSED]
    assert len({(case.name, case.tasks) for case in REFUSED}) == len(names) >= 250
    assert all(sum(task in case.tasks for case in REFUSED) >= 80 for task in TARGETS)


# Every argument, by its dataclass: what it may not be


def wrong_values(module) -> dict[str, list[str]]:
    cls = module.Arguments
    found = {
        field.name: refused_arguments.wrong_values(field, type_of(cls, field.name))
        for field in dataclasses.fields(cls)
    }
    assert all(found.values())
    return found


WRONG = {task: wrong_values(module) for task, module in SCRIPTS.items()}
ROUNDS = [
    (task, number) for task, values in WRONG.items() for number in range(max(map(len, values.values())))
]


@pytest.mark.parametrize(("task", "number"), ROUNDS)
def test_every_argument_out_of_range(task, number, workplace, script):
    given = {name: values[number] for name, values in WRONG[task].items() if number < len(values)}
    ended = script(task, [f"--{name}={text}" for name, text in given.items()])
    assert (ended.code, ended.out) == (2, "")
    check_one_message(ended)
    for name, text in given.items():
        (line,) = re.findall(rf"--{name}: .*", ended.err)
        assert text in line
        assert re.search(r"is empty|is not|out of range", line)


@pytest.mark.parametrize("task", SCRIPTS)
def test_every_argument_misspelt(task, workplace, script):
    visible = [
        field.name for field in dataclasses.fields(SCRIPTS[task].Arguments) if not field.metadata["hidden"]
    ]
    ended = script(task, [f"--{name[0]}{name}=1" for name in visible])
    assert (ended.code, ended.out) == (2, "")
    check_one_message(ended)
    told = [f"unknown argument --{name[0]}{name}; did you mean --{name}?" for name in visible]
    assert [line.removeprefix("  - ") for line in ended.err.splitlines()[1:]] == told
    assert len(told) > 70
