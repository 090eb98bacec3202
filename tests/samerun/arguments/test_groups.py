import dataclasses

import pytest

from samerun.arguments.parsing import parse, validate
from samerun.errors import InputError
from samerun.text.arguments import TextArguments


def contradictions(arguments):
    try:
        validate(arguments)
    except InputError as error:
        return error.problems
    return []


def test_a_plain_command_has_no_contradictions(arguments):
    assert contradictions(arguments()) == []


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lr_scheduler_kwargs": {"gamma": 0.5}}, ["--lr_scheduler_kwargs: linear has no gamma"]),
        (
            {"optim": "sgd", "optim_args": "momentum=1.5"},
            ["momentum is '1.5', expected a number at least 0 and below 1"],
        ),
        ({"optim": "sgd", "optim_args": "nesterov=true"}, ["nesterov=true needs a momentum above 0"]),
        ({"optim": "sgd", "optim_args": "momentum=0.9,momentum=0.8"}, ["momentum is given twice"]),
        (
            {"optim": "rmsprop", "optim_args": "beta=1"},
            ["rmsprop has no beta; it has alpha, eps, momentum, centered"],
        ),
        (
            {"optim": "sgd", "optim_args": "weight_decay=0.1"},
            ["sgd has no weight_decay; give --weight_decay"],
        ),
        ({"optim": "muon", "optim_args": "adjust_lr_fn=own"}, ["expected match_rms_adamw or original"]),
        ({"optim_args": "momentum=0.9"}, ["adamw_torch_fused has no momentum; it has none"]),
        (
            {"optim": "sgd", "adam_beta1": 0.8},
            ["--adam_beta1 is given but --optim sgd has no such setting", "momentum"],
        ),
        (
            {"optim": "lion_32bit", "adam_epsilon": 1e-6},
            ["--adam_epsilon is given but --optim lion_32bit has no such setting"],
        ),
    ],
)
def test_each_contradiction_is_named(arguments, given, named):
    (message,) = contradictions(arguments(**given))
    assert all(word in message for word in named)


def test_all_contradictions_come_together(arguments):
    assert (
        len(contradictions(arguments(output_dir=None, eval_steps=5, train_file="a.csv", dataset_name="b")))
        == 3
    )


def test_what_only_looks_like_a_contradiction(arguments):
    assert contradictions(arguments(deepspeed="a.json", deepspeed_config="a.json")) == []
    assert contradictions(arguments(lr_scheduler_type="constant", warmup_steps=0)) == []
    assert contradictions(arguments(eval_strategy="steps", eval_steps=5)) == []


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


def test_every_default_passes_the_checks_that_user_values_pass(arguments):
    """A default that `convert` would refuse could not be written down again from run.json."""
    defaults = dataclasses.asdict(arguments())
    argv = [
        f"--{name}={','.join(value) if isinstance(value, tuple) else value}"
        for name, value in defaults.items()
        if value is not None
    ]
    assert parse(type(arguments()), argv) == arguments()
    assert len(argv) > 30


def test_help_texts_are_there_and_say_no_default_twice(arguments):
    for field in dataclasses.fields(arguments()):
        assert field.metadata["help"].strip(), field.name
        assert field.default is None or "default" not in field.metadata["help"], field.name


FOLDERS = (
    "model_name_or_path",
    "train_file",
    "output_dir",
    "predictions_file",
    "resume_from_checkpoint",
    "deepspeed",
)


def test_a_home_is_expanded_on_the_command_line_and_in_yaml(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("".join(f"{name}: ~/{name}\n" for name in FOLDERS) + "run_name: ~/x\n")
    for argv in ([f"--{name}=~/{name}" for name in FOLDERS] + ["--run_name=~/x"], ["--config=~/run.yaml"]):
        found = parse(TextArguments, argv)
        expected = {name: f"{tmp_path}/{name}" for name in FOLDERS}
        expected |= {
            name: (path,)
            for name, path in expected.items()
            if name in ("train_file", "validation_file", "test_file")
        }
        assert {name: getattr(found, name) for name in FOLDERS} == expected
        assert found.run_name == "~/x"
    assert parse(TextArguments, ["--model_name_or_path", "a/b~c"]).model_name_or_path == "a/b~c"


def test_a_revision_is_the_models_alone(arguments):
    asked = arguments(
        model_name_or_path="a/model", model_revision="v1", cache_dir="c", trust_remote_code=True
    )
    assert asked.hub_options("a/model") == {"revision": "v1", "cache_dir": "c", "trust_remote_code": True}
    assert asked.hub_options("a/tokenizer")["revision"] == "main"
    assert contradictions(arguments(model_revision="v1")) == [
        "--model_revision is given but --model_name_or_path is not"
    ]
    (message,) = contradictions(arguments(padding_free=True, attn_implementation="eager"))
    assert "--attn_implementation" in message
