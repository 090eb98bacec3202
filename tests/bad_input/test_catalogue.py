"""Bad input ends in a message that says what is wrong, where, and what to do; the disk is not harmed."""

import dataclasses
import re

import classify
import image_classify
import pytest
import refused_arguments
import refused_files
import refused_masks
import refused_models
import refused_problems
import refused_tags
import refused_targets
import segment
import segment3d
import tag
import titlegen
from catalogue_case import COLUMNS, Case, by_turns, command_line, lay_out
from run_folders import contents

from samerun.parsing import kind_of

SCRIPTS = {"classify": classify, "titlegen": titlegen, "image_classify": image_classify}
SCRIPTS |= {"segment": segment, "segment3d": segment3d, "tag": tag}

REFUSED = [
    *by_turns(refused_files.CASES),
    *by_turns(refused_targets.CASES),
    *refused_problems.CASES,
    *by_turns(refused_arguments.CASES),
    *by_turns(refused_models.CASES),
    *refused_tags.CASES,
    *refused_masks.CASES,
]


def check_one_message(ended) -> None:
    """Checks that the message is one line, or a count and a line for each problem."""
    first, *others = ended.err.splitlines()
    if others:
        assert first == f"{len(others)} errors:", ended.err
        assert all(line.startswith("  - ") for line in others), ended.err
    else:
        assert first.startswith("error: "), ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_bad_input_is_explained_and_harms_nothing(case: Case, workplace, script):
    """Beside an earlier run, which stays as it is."""
    lay_out(case, workplace)
    before = contents(workplace)
    ended = script(case.task, command_line(case))
    for pattern in case.said:
        said = pattern.replace("TARGET", COLUMNS.get(case.task, ""))
        assert re.search(said, ended.err, re.MULTILINE), ended.err
    assert ended.code == 2
    assert ended.out == "" or case.late
    check_one_message(ended)
    assert contents(workplace) == before


def test_every_case_has_a_name_of_its_own_and_every_task_is_tried():
    assert len({(case.name, case.task) for case in REFUSED}) == len(REFUSED)
    assert {case.task for case in REFUSED} == SCRIPTS.keys() - {"image_classify"}


# Every argument, by its dataclass: what it may not be


def wrong_values(field: dataclasses.Field) -> list[str]:
    """Values that an argument with this type and these limits must reject."""
    if field.metadata["choices"]:
        return ["no-such-choice"]
    found = {
        "N": ["", "x", "1.5", "1e2", "nan", "inf"],
        "X": ["", "x", "nan", "inf", "-inf", "1,5"],
        "true|false": ["", "2", "maybe"],
    }
    kind, limits = kind_of(field).metavar, field.metadata
    values = list(found.get(kind, [""]))
    if kind in ("N", "X"):
        tiny = 1 if kind == "N" else 0.5
        values += [str(limits[key]) for key in ("above", "below") if limits[key] is not None]
        values += [str(limits["at_least"] - tiny)] if limits["at_least"] is not None else []
        values += [str(limits["at_most"] + tiny)] if limits["at_most"] is not None else []
    return values


FIELDS = {task: dataclasses.fields(module.Arguments) for task, module in SCRIPTS.items()}
WRONG = {task: {field.name: wrong_values(field) for field in fields} for task, fields in FIELDS.items()}
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
        assert re.search(r"has no value|is not", line)


@pytest.mark.parametrize("task", SCRIPTS)
def test_every_argument_misspelt(task, workplace, script):
    visible = [field.name for field in FIELDS[task] if not field.metadata["hidden"]]
    ended = script(task, [f"--{name[0]}{name}=1" for name in visible])
    assert (ended.code, ended.out) == (2, "")
    check_one_message(ended)
    told = [f"unknown argument --{name[0]}{name}; did you mean --{name}?" for name in visible]
    assert [line.removeprefix("  - ") for line in ended.err.splitlines()[1:]] == told
    assert len(told) > 70
