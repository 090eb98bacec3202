import dataclasses
import re

import classify
import image_classify
import pytest
import segment
import segment3d
import titlegen
from refusals import problems_of

from samerun.parsing import SpaceSeparated, parse, validate
from samerun.text.arguments import TextArguments

TASKS = [module.Arguments for module in (classify, titlegen, image_classify, segment, segment3d)]


@pytest.mark.parametrize("cls", TASKS)
def test_declarations_are_sound(cls):
    """A default passes the checks of user values. What an argument needs or excludes exists, can be given."""
    arguments, known = cls(), set().union(*(task.__dataclass_fields__ for task in TASKS))
    argv = []
    for field in dataclasses.fields(cls):
        value = getattr(arguments, field.name)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            argv.append(f"--{field.name}={text}")
        others = [*field.metadata["excludes"], *filter(None, [field.metadata["needs"]])]
        for name, _, needed in (other.partition("=") for other in others):
            assert name in known
            if needed and name in cls.__dataclass_fields__:
                assert needed in cls.__dataclass_fields__[name].metadata["choices"]
        assert field.metadata["help"].strip(), field.name
        assert field.default is None or "default" not in field.metadata["help"], field.name
    assert parse(cls, argv) == arguments


def test_all_contradictions_come_together(arguments):
    asked = arguments(output_dir=None, eval_steps=5, train_file="a.csv", dataset_name="b")
    assert len(problems_of(validate, asked)) == 3


@pytest.mark.parametrize(
    ("given", "todo"),
    [
        ({}, (True, True, False)),
        ({"do_predict": True}, (False, False, True)),
        ({"do_eval": True}, (False, True, False)),
        ({"do_eval": True, "do_predict": True}, (False, True, True)),
        ({"do_train": True}, (True, True, False)),
        ({"do_train": True, "do_eval": False}, (True, False, False)),
        ({"do_train": True, "do_predict": True}, (True, True, True)),
        ({"do_train": False}, (False, False, False)),
        ({"do_eval": False}, (True, False, False)),
    ],
)
def test_what_a_command_asks_for(arguments, given, todo):
    assert arguments(**given).modes == todo


@pytest.mark.parametrize("cls", TASKS)
def test_the_help_begins_with_some_twenty_arguments_data_and_model_first(cls, capsys):
    with pytest.raises(SystemExit):
        parse(cls, ["--help"])
    most_used = capsys.readouterr().out.split("\nMost used:\n")[1].split("\n\n")[0]
    names = re.findall("^  --([a-z_]+) ", most_used, re.MULTILINE)
    assert 17 <= len(names) <= 20
    first = [names.index(name) for name in ("train_file", "label_column", "model_name_or_path", "output_dir")
             if name in names]  # fmt: skip
    assert first == sorted(first)
    assert first[0] == 0
    assert "'" not in re.findall(r"--report_to .*\n.*\n.*default: (.*)", most_used)[0]


@pytest.mark.parametrize("cls", TASKS[2:])
def test_the_help_of_tasks_on_images_has_no_arguments_of_tokens(cls, capsys):
    with pytest.raises(SystemExit):
        parse(cls, ["--help", "all"])
    text = capsys.readouterr().out
    assert text.count("--learning_rate X") == 1  # stands in its group, with the task's default
    assert [word for word in text.split() if "token" in word or "length" in word or "padding" in word] == []


def test_a_home_is_expanded_on_the_command_line_and_in_yaml(monkeypatch, tmp_path):
    paths = ["model_name_or_path", "train_file", "output_dir", "predictions_file", "deepspeed"]
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("".join(f"{name}: ~/{name}\n" for name in paths) + "run_name: ~/x\n")
    for argv in ([f"--{name}=~/{name}" for name in paths] + ["--run_name=~/x"], ["--config=~/run.yaml"]):
        found = parse(TextArguments, argv)
        expected = {name: f"{tmp_path}/{name}" for name in paths}
        expected["train_file"] = SpaceSeparated([expected["train_file"]])
        assert {name: getattr(found, name) for name in paths} == expected
        assert found.run_name == "~/x"
    assert parse(TextArguments, ["--model_name_or_path", "a/b~c"]).model_name_or_path == "a/b~c"


def test_a_revision_is_the_models_alone(arguments):
    asked = arguments(model_name_or_path="a", model_revision="v1", cache_dir="c", trust_remote_code=True)
    assert asked.hub_options("a") == {"revision": "v1", "cache_dir": "c", "trust_remote_code": True}
    assert asked.hub_options("a/tokenizer")["revision"] == "main"
