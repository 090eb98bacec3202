"""Parses the command line and YAML into dataclasses.

An argument is a field of a frozen dataclass, declared with `option(...)`: name, type, default, help and
limits. A YAML file (`--config`) may set the same fields; the command line wins. Unknown names, wrong types
and values out of range are reported together, with the most similar name. `trainer_names.py` translates or
refuses other names of transformers' Trainer and example scripts. `--learning-rate` means `--learning_rate`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import math
import operator
import os
import re
import sys
import types
import typing
from typing import Any, TypeVar

import yaml

from samerun.arguments.trainer_names import BOOLEANS, TRAINER_NAMES
from samerun.data.files import read_text
from samerun.errors import InputError

T = TypeVar("T")
Text = str | list[str] | None  # an unparsed value; a list for several values of `SpaceSeparated`


class SpaceSeparated(tuple):
    """Values separated by spaces, such as `--train_file a.csv b.csv`; a plain `tuple` is separated by
    commas."""


STEPS = int | float  # a number of optimizer steps, or a share of all steps
SETTINGS = dict[str, Any]
METAVARS = {
    **{int: "N", float: "X", bool: "true|false", STEPS: "N|SHARE", SETTINGS: "JSON"},
    **{tuple[str, ...]: "A,B", tuple[int, ...]: "N,N", tuple[float, ...]: "X,X", SpaceSeparated[float]: "X"},
}
LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
# --help shows these and the task's own arguments; `--help all` shows all.
MOST_USED = (
    "model_name_or_path",
    "train_file",
    "validation_file",
    "test_file",
    "max_length",
    "global_batch_size",
    "learning_rate",
    "num_train_epochs",
    "output_dir",
    "resume_from_checkpoint",
    "do_predict",
    "mixed_precision",
)
NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)


def option(
    default: Any = None,
    *,
    help: str,
    choices: tuple[str, ...] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    hidden: bool = False,
    reads: bool = False,
    path: bool = False,
    per_machine: bool = False,
) -> Any:
    """Declares a dataclass field as an argument.

    `reads`: the value is an input file or folder. `path`: it is another path. `~` is expanded in both.
    `per_machine`: the machines of a job may have different values; for input files, their contents must be
    equal instead.
    """
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {"help": help, "choices": choices, "hidden": hidden, "reads": reads, "path": path or reads}
    metadata |= {"per_machine": per_machine, **limits}
    return dataclasses.field(default=default, metadata=metadata)


def changed_option(group: type, name: str, help: str) -> Any:
    """Redeclares the argument `name` of a group in a task's own dataclass, with another help text or type and
    no default."""
    (field,) = (field for field in dataclasses.fields(group) if field.name == name)
    metadata = {**field.metadata, "help": help}
    return dataclasses.field(default=None, metadata=metadata)


def parse(cls: type[T], argv: list[str] | None = None, description: str = "") -> T:
    """Builds `cls` from the command line and from the YAML file named by `--config`.

    Raises `InputError` with every problem found: unknown names, missing or malformed values, values out of
    range.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    argv = [_with_underscores(text, fields) for text in (sys.argv[1:] if argv is None else argv)]
    help_all = bool({"--help", "-h"} & set(argv[:-1])) and argv[-1] == "all"
    parsed, unknown = _parser(cls, fields, description, help_all).parse_known_args(argv)
    from_command_line = {name: text for name, text in vars(parsed).items() if text is not None}

    problems = _unknown_arguments(unknown, fields)
    texts: dict[str, tuple[Text, str]] = {}
    config_file = from_command_line.pop("config", None)
    if config_file is not None:
        config_file = os.path.expanduser(config_file)
        from_file, file_problems = _read_config(config_file, fields, cls)
        problems += file_problems
        texts.update(_translated(from_file, fields, f"{config_file}: ", problems))
    texts.update(_translated(from_command_line, fields, "--", problems))

    values = {}
    for name, (text, source) in texts.items():
        try:
            values[name] = convert(text, fields[name], cls)
        except ValueError as error:
            problems.append(f"{source}: {error}")
    if problems:
        raise InputError(*problems)
    return cls(**values)


def _with_underscores(text: str, fields: dict[str, dataclasses.Field]) -> str:
    """`--learning-rate=1` as `--learning_rate=1`, which transformers' parser also accepts."""
    name, equals, value = text.removeprefix("--").partition("=")
    normalized = name.replace("-", "_")
    is_name = text.startswith("--") and (normalized in fields or normalized in TRAINER_NAMES)
    return f"--{normalized}{equals}{value}" if is_name else text


def _translated(
    untranslated: dict[str, Text], fields: dict[str, dataclasses.Field], prefix: str, problems: list[str]
) -> dict[str, tuple[Text, str]]:
    """Translates names of transformers. Returns {field: (text, name in messages)}; appends to `problems`."""
    texts: dict[str, tuple[Text, str]] = {}
    for name, text in untranslated.items():
        field, source = name, f"{prefix}{name}"
        if name in TRAINER_NAMES and (name not in fields or TRAINER_NAMES[name].field == name):
            try:
                field, text = TRAINER_NAMES[name].translate(text)
            except ValueError as error:
                problems.append(f"{source}: {error}")
                continue
        if field is None:
            continue
        if field not in fields:
            problems.append(f"{source} means --{field}, which this command does not have")
        elif field in texts and str(texts[field][0]).lower() != str(text).lower():
            problems.append(f"{texts[field][1]} and {source} both set --{field}; keep one")
        else:
            texts[field] = (text, source)
    return texts


def validate(arguments: Any) -> None:
    """Raises `InputError` with the results of the `problems` methods of all groups."""
    problems = []
    for group in type(arguments).__mro__:
        if "problems" in vars(group):
            problems += group.problems(arguments)
    if problems:
        raise InputError(*problems)


def names_of(arguments: Any, **settings: bool) -> list[str]:
    """The names of the arguments with these settings of `option`, such as `reads=True`."""
    return [
        f.name
        for f in dataclasses.fields(arguments)
        if all(f.metadata[key] == value for key, value in settings.items())
    ]


def convert(text: Text, field: dataclasses.Field, cls: type) -> Any:
    """Converts a text to the type of its field. Raises `ValueError` with the end of a message: "... is not a
    number"."""
    kind, optional = _kind(cls, field.name)
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if text is None or (optional and isinstance(text, str) and text.lower() in ("none", "null")):
        if optional:
            return None
        raise ValueError(f"has no value, expected {_describe(kind, field.metadata)}")
    shown = " ".join(text) if isinstance(text, list) else text
    try:
        value = _typed(text, kind)
    except (ValueError, KeyError):
        raise ValueError(f"{shown!r} is not {_describe(kind, field.metadata)}") from None
    if value in ("", (), {}) or (isinstance(value, SpaceSeparated) and "" in value):
        raise ValueError("is empty")
    if field.metadata["path"]:  # not Path.expanduser, which would normalize hub names
        several = isinstance(value, SpaceSeparated)
        value = SpaceSeparated(map(os.path.expanduser, value)) if several else os.path.expanduser(value)
    choices = field.metadata["choices"]
    for item in value if isinstance(value, tuple) else (value,):
        if choices is not None and item not in choices:
            near = difflib.get_close_matches(str(item), choices, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{item!r} is not one of {', '.join(choices)}{hint}")
        limits = [
            (holds, field.metadata[key]) for key, holds in LIMITS.items() if field.metadata[key] is not None
        ]
        if not all(holds(item, limit) for holds, limit in limits):
            raise ValueError(f"{shown} is out of range, expected {_describe(kind, field.metadata)}")
    return value


def as_dict(arguments: Any) -> dict[str, Any]:
    """The arguments by name."""
    return {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}


def describe_value(arguments: type, field: dataclasses.Field) -> str:
    """Describes the valid values of a field for users: "a whole number at least 1"."""
    return _describe(_kind(arguments, field.name)[0], field.metadata)


def _typed(text: str | list[str], kind: type) -> Any:
    """Raises `ValueError` or `KeyError` for invalid texts."""
    if typing.get_origin(kind) is SpaceSeparated:
        return SpaceSeparated(
            _typed(part, typing.get_args(kind)[0]) for part in ([text] if isinstance(text, str) else text)
        )
    if kind is bool:
        return BOOLEANS[text.lower()]
    if typing.get_origin(kind) is tuple:
        return tuple(
            _typed(part.strip(), typing.get_args(kind)[0]) for part in text.split(",") if part.strip()
        )
    if kind == SETTINGS:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError
        return value
    value = float(text) if kind == STEPS else kind(text)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    if kind == STEPS and not 0 < value < 1:
        if not value.is_integer():
            raise ValueError
        return int(value)
    return value


def _describe(kind: type, limits: typing.Mapping) -> str:
    if limits["choices"]:
        return "one of " + ", ".join(limits["choices"])
    noun = {
        **{int: "a whole number", float: "a number", bool: "true or false"},
        **{
            tuple[str, ...]: "names separated by commas",
            tuple[int, ...]: "whole numbers separated by commas",
        },
        tuple[float, ...]: "numbers separated by commas",
        **{
            SpaceSeparated[str]: "names separated by spaces",
            SpaceSeparated[float]: "numbers separated by spaces",
        },
        STEPS: "a whole number, or a share of all steps below 1,",
        SETTINGS: 'a JSON object, such as {"power": 2}',
    }
    ranges = [f"{key.replace('_', ' ')} {limits[key]}" for key in LIMITS if limits[key] is not None]
    return " ".join([noun.get(kind, "a text"), " and ".join(ranges)]).strip()


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _kind(cls: type, name: str) -> tuple[type, bool]:
    """The field's plain type and whether None is allowed."""
    hint = _hints(cls)[name]
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional, hint = len(members) < len(typing.get_args(hint)), functools.reduce(operator.or_, members)
    return hint, optional


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._negative_number_matcher = (
            NEGATIVE_NUMBER  # argparse's own takes -1e-3 and -inf for argument names
        )

    def error(self, message: str) -> typing.NoReturn:
        raise InputError(f"{message} (--help all lists the arguments)")


def _parser(
    cls: type, fields: dict[str, dataclasses.Field], description: str, help_all: bool = True
) -> argparse.ArgumentParser:
    """`help_all`: whether --help shows all arguments, or the most used ones only."""
    layout = argparse.RawDescriptionHelpFormatter
    usage = "%(prog)s [--config FILE.yaml] [--name value ...]"
    parser = _Parser(usage=usage, description=description, allow_abbrev=False, formatter_class=layout)
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="any of these arguments from a file; the command line wins"
    )
    hint = (
        ""
        if help_all
        else "These are the task's own and the most used arguments; --help all lists all arguments by group. "
    )
    parser.epilog = (
        f"{hint}Other names of transformers' TrainingArguments are translated, or refused with the name "
        "to use."
    )
    added: set[str] = set()
    for owner in reversed(cls.__mro__):
        # An argument that a task redeclares stays in its group.
        names = [
            name for name in vars(owner).get("__annotations__", {}) if name in fields and name not in added
        ]
        added.update(names)
        if not names:
            continue
        group = parser.add_argument_group((owner.__doc__ or owner.__name__).strip().splitlines()[0])
        for name in names:
            _add_argument(group, cls, fields[name], shown=help_all or owner is cls or name in MOST_USED)
    for name in TRAINER_NAMES:
        if name not in fields:
            parser.add_argument(f"--{name}", help=argparse.SUPPRESS, nargs="?", const="true")
    return parser


def _add_argument(group: Any, cls: type, field: dataclasses.Field, shown: bool) -> None:
    kind, _ = _kind(cls, field.name)
    choices = field.metadata["choices"]
    metavar = "|".join(choices) if choices else METAVARS.get(kind, "TEXT")
    default = "" if field.default is None else f" (default: {field.default})"
    is_visible = shown and not field.metadata["hidden"]
    help_text = (field.metadata["help"] + default).replace("%", "%%") if is_visible else argparse.SUPPRESS
    nargs: dict[str, Any] = {}
    if kind is bool:
        nargs = {"nargs": "?", "const": "true"}
    elif typing.get_origin(kind) is SpaceSeparated:
        nargs = {"nargs": "+"}
    group.add_argument(f"--{field.name}", metavar=metavar, help=help_text, **nargs)
    if kind is bool and field.default is True:
        group.add_argument(
            f"--no_{field.name}", dest=field.name, action="store_const", const="false", help=argparse.SUPPRESS
        )


def _unknown_arguments(unknown: list[str], fields: dict[str, dataclasses.Field]) -> list[str]:
    problems = []
    for text in unknown:
        if text.startswith("--"):
            problems.append(
                f"unknown argument {text.split('=')[0]}{_nearest(text[2:].split('=')[0], fields, '--')}"
            )
    if unknown and not problems:
        problems.append(f"unexpected value {unknown[0]!r}: arguments are written --name value")
    return problems


def _nearest(name: str, fields: dict[str, dataclasses.Field], prefix: str = "") -> str:
    visible = [field.name for field in fields.values() if not field.metadata["hidden"]]
    normalized = name.replace("-", "_")
    near = [normalized] if normalized in visible else difflib.get_close_matches(normalized, visible, 1)
    return f"; did you mean {prefix}{near[0]}?" if near else " (--help all lists the arguments)"


class _Loader(yaml.BaseLoader):
    """Keeps values as texts, as on a command line: YAML 1.1 reads `no` as false, 1:30 as 90 and 010 as 8.

    Duplicate keys are errors; PyYAML silently keeps the last one.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if not isinstance(key, yaml.ScalarNode) or key.value in keys[:number]:
                problem = f"key {key.value!r:.80} appears twice or is not a name"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


def _read_mapping(path: str) -> dict[str, Any]:
    """Reads a YAML file with one mapping. Raises `InputError` with file and line."""
    try:
        content = yaml.load(read_text(path), Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise InputError(f"{path}{line}: not valid YAML: {reason}") from None
    except RecursionError:
        raise InputError(f"{path}: not valid YAML: nested too deeply; expected `name: value` lines") from None
    if not isinstance(content, dict):
        type_name = "nothing" if not content else "a list" if isinstance(content, list) else "a text"
        raise InputError(f"{path}: expected `name: value` lines, found {type_name}")
    return content


def _read_config(
    path: str, fields: dict[str, dataclasses.Field], cls: type
) -> tuple[dict[str, Text], list[str]]:
    texts, problems = {}, []
    for name, value in _read_mapping(path).items():
        origin = typing.get_origin(_kind(cls, name)[0]) if name in fields else None
        if name in TRAINER_NAMES and name not in fields:
            texts[name] = json.dumps(value) if isinstance(value, dict | list) else value or None
        elif name not in fields and isinstance(value, dict):
            problems.append(
                f"{path}: {name} is a section; write arguments without sections, each as `name: value`"
            )
        elif name not in fields:
            problems.append(f"{path}: unknown key {name}{_nearest(name, fields)}")
        elif isinstance(value, dict):
            problems.append(f"{path}: {name}: expected one value, found a mapping")
        elif not isinstance(value, list):
            texts[name] = value or None
        elif origin is SpaceSeparated:
            texts[name] = list(map(str, value))
        elif origin is tuple:
            texts[name] = ",".join(map(str, value))
        else:
            problems.append(f"{path}: {name}: expected one value, found a list")
    return texts, problems
