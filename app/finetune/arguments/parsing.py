"""Dataclasses <-> command line and YAML.

An argument is a field of a frozen dataclass, declared once with `option(...)`: name, type, default, help and limits. The same
field may be set in a YAML file given with `--config`; the command line wins. Unknown names, wrong types and values out of
range are collected and reported together, each with the nearest name that exists.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import os
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from finetune.errors import InputError

T = TypeVar("T")
TRUE, FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


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
    """A dataclass field that is an argument: default, help text and the limits its value is checked against.

    `reads`: names a file or folder that the run reads. `path`: names one for something else. `~` is expanded in both.
    `per_machine`: machines of one job may give different values; of a file that is read the contents are compared instead.
    """
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {"help": help, "choices": choices, "hidden": hidden, "reads": reads, "path": path or reads}
    metadata |= {"per_machine": per_machine, **limits}
    return dataclasses.field(default=default, metadata=metadata)


def parse(cls: type[T], argv: list[str] | None = None, description: str = "") -> T:
    """Builds `cls` from the command line and from the YAML file named by `--config`.

    Raises `InputError` with every problem found: unknown names, missing or malformed values, values out of range.
    """
    argv = _with_negative_numbers(sys.argv[1:] if argv is None else argv)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    parsed, unknown = _parser(cls, fields, description).parse_known_args(argv)
    given = {name: text for name, text in vars(parsed).items() if text is not None}

    problems = _unknown_arguments(unknown, fields)
    texts: dict[str, tuple[str | None, str]] = {}
    config_file = given.pop("config", None)
    if config_file is not None:
        config_file = os.path.expanduser(config_file)
        from_file, file_problems = _read_yaml(config_file, fields, cls)
        texts.update({name: (text, f"{config_file}: {name}") for name, text in from_file.items()})
        problems += file_problems
    texts.update({name: (text, f"--{name}") for name, text in given.items()})

    values = {}
    for name, (text, source) in texts.items():
        try:
            values[name] = convert(text, fields[name], cls)
        except ValueError as error:
            problems.append(f"{source}: {error}")
    if problems:
        raise InputError(*problems)
    return cls(**values)


def validate(arguments: Any) -> None:
    """Raises `InputError` with everything that the arguments' groups (their `problems` methods) find contradictory."""
    problems = []
    for group in type(arguments).__mro__:
        if "problems" in vars(group):
            problems += group.problems(arguments)
    if problems:
        raise InputError(*problems)


def names_of(arguments: Any, *, reads: bool | None = None, per_machine: bool | None = None) -> list[str]:
    """The arguments' names whose `option` says so (None: either way)."""
    wanted = {"reads": reads, "per_machine": per_machine}
    wanted = {key: value for key, value in wanted.items() if value is not None}
    return [f.name for f in dataclasses.fields(arguments) if all(f.metadata[key] == value for key, value in wanted.items())]


def convert(text: str | None, field: dataclasses.Field, cls: type) -> Any:
    """Turns the text of an argument into its field's type. Raises `ValueError` (found, expected) for a value it refuses."""
    kind, optional = _kind(cls, field.name)
    if text is None or (optional and text.lower() in ("none", "null")):
        if optional:
            return None
        raise ValueError(f"has no value, expected {_describe(kind, field.metadata)}")
    value = _typed(text, kind, field.metadata)
    if field.metadata["path"]:
        value = os.path.expanduser(value)  # not Path.expanduser: hub names and spellings stay as they are
    choices = field.metadata["choices"]
    for item in value if isinstance(value, tuple) else (value,):
        if choices is not None and item not in choices:
            near = difflib.get_close_matches(str(item), choices, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{item!r} is not one of {', '.join(choices)}{hint}")
    if isinstance(value, int | float) and not isinstance(value, bool) and not _within(value, field.metadata):
        raise ValueError(f"{text} is out of range, expected {_describe(kind, field.metadata)}")
    return value


def as_dict(arguments: Any) -> dict[str, Any]:
    """The arguments as plain values, for run.json and for comparing two runs."""
    return {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}


def describe_value(arguments: type, field: dataclasses.Field) -> str:
    """What may be given for a field of a class of arguments, in words: "a whole number at least 1"."""
    return _describe(_kind(arguments, field.name)[0], field.metadata)


def _typed(text: str, kind: type, limits: typing.Mapping) -> Any:
    refused = ValueError(f"{text!r} is not {_describe(kind, limits)}")
    if kind is bool:
        if text.lower() in TRUE | FALSE:
            return text.lower() in TRUE
        raise refused
    if kind is tuple:
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if not parts:
            raise refused
        return parts
    if kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            raise refused from None
        if kind is float and not math.isfinite(value):
            raise refused
        return value
    if text == "":
        raise ValueError("is empty")
    return text


def _within(value: float, limits: typing.Mapping) -> bool:
    return (
        (limits["at_least"] is None or value >= limits["at_least"])
        and (limits["above"] is None or value > limits["above"])
        and (limits["at_most"] is None or value <= limits["at_most"])
        and (limits["below"] is None or value < limits["below"])
    )


def _describe(kind: type, limits: typing.Mapping) -> str:
    if limits["choices"]:
        return "one of " + ", ".join(limits["choices"])
    noun = {int: "a whole number", float: "a number", bool: "true or false", tuple: "names separated by commas"}
    words = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
    # :g would round a large whole number
    ranges = [
        f"{word} {limits[key]:{'d' if isinstance(limits[key], int) else 'g'}}"
        for key, word in words.items()
        if limits[key] is not None
    ]
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
        optional, hint = True, members[0]
    return (tuple if typing.get_origin(hint) is tuple else hint), optional


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise InputError(f"{message} (--help lists the arguments)")


def _parser(cls: type, fields: dict[str, dataclasses.Field], description: str) -> argparse.ArgumentParser:
    parser = _Parser(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE.yaml", help="any of these arguments from a file; the command line wins")
    for owner in reversed(cls.__mro__):
        names = [name for name in vars(owner).get("__annotations__", {}) if name in fields]
        if not names:
            continue
        group = parser.add_argument_group((owner.__doc__ or owner.__name__).strip().splitlines()[0])
        for name in names:
            _add_argument(group, cls, fields[name])
    return parser


def _add_argument(group: Any, cls: type, field: dataclasses.Field) -> None:
    kind, _ = _kind(cls, field.name)
    choices = field.metadata["choices"]
    metavar = "|".join(choices) if choices else {int: "N", float: "X", bool: "true|false", tuple: "A,B"}.get(kind, "TEXT")
    default = "" if field.default is None else f" (default: {field.default})"
    help_text = argparse.SUPPRESS if field.metadata["hidden"] else (field.metadata["help"] + default).replace("%", "%%")
    flag: dict[str, Any] = {"nargs": "?", "const": "true"} if kind is bool else {}
    group.add_argument(f"--{field.name}", metavar=metavar, help=help_text, **flag)
    if kind is bool and field.default is True:
        group.add_argument(f"--no_{field.name}", dest=field.name, action="store_const", const="false", help=argparse.SUPPRESS)


def _with_negative_numbers(argv: list[str]) -> list[str]:
    """`--name -1e-3` as `--name=-1e-3`: argparse takes a negative number with an exponent, and -inf, for the name of an
    argument."""
    joined: list[str] = []
    for text in argv:
        if (
            joined
            and joined[-1].startswith("--")
            and "=" not in joined[-1]
            and re.match(r"-(\.?\d|inf|nan)", text, re.IGNORECASE)
        ):
            joined[-1] += f"={text}"
        else:
            joined.append(text)
    return joined


def _unknown_arguments(unknown: list[str], fields: dict[str, dataclasses.Field]) -> list[str]:
    problems = []
    for text in unknown:
        if text.startswith("--"):
            problems.append(f"unknown argument {text.split('=')[0]}{_nearest(text[2:].split('=')[0], fields, '--')}")
    if unknown and not problems:
        problems.append(f"unexpected value {unknown[0]!r}: arguments are written --name value")
    return problems


def _nearest(name: str, fields: dict[str, dataclasses.Field], prefix: str = "") -> str:
    visible = [field.name for field in fields.values() if not field.metadata["hidden"]]
    spelled = name.replace("-", "_")
    near = [spelled] if spelled in visible else difflib.get_close_matches(spelled, visible, 1, 0.6)
    return f"; did you mean {prefix}{near[0]}?" if near else " (--help lists the arguments)"


class _Loader(yaml.SafeLoader):
    """Values are the texts that stand in the file, as on a command line, but for null: YAML 1.1 reads `no` as false, 1:30 as
    90 and 010 as 8. PyYAML keeps the last of two equal keys without a word; here the second is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own
        first: [(tag, pattern) for tag, pattern in pairs if tag.endswith(":null")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, typing.Hashable) or key in seen:
                problem = f"key {key!r} stands twice or is no name"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml_mapping(path: str) -> dict[str, Any]:
    """Reads a YAML file that must hold one mapping. Raises `InputError` naming file and line."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise InputError(f"--config {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise InputError(f"{path}{line}: not valid YAML: {reason}") from None
    except (LookupError, AttributeError, RecursionError) as error:  # PyYAML on a value unlike its !!tag, or on deep nesting
        raise InputError(f"{path}: not valid YAML ({type(error).__name__}); expected `name: value` lines") from None
    if not isinstance(content, dict):
        found = {type(None): "nothing", list: "a list", str: "a text"}.get(type(content), type(content).__name__)
        raise InputError(f"{path}: expected `name: value` lines, found {found}")
    return content


def _read_yaml(path: str, fields: dict[str, dataclasses.Field], cls: type) -> tuple[dict[str, str | None], list[str]]:
    texts, problems = {}, []
    for key, value in read_yaml_mapping(path).items():
        name = str(key)
        if name not in fields and isinstance(value, dict):
            problems.append(f"{path}: {name} is a section; arguments stand without sections, each as `name: value`")
        elif name not in fields:
            problems.append(f"{path}: unknown key {name}{_nearest(name, fields)}")
        elif isinstance(value, dict):
            problems.append(f"{path}: {name}: expected one value, found a mapping")
        elif isinstance(value, list) and _kind(cls, name)[0] is not tuple:
            problems.append(f"{path}: {name}: expected one value, found a list")
        elif isinstance(value, list):
            texts[name] = ",".join(str(item) for item in value)
        else:
            texts[name] = None if value is None else str(value)
    return texts, problems
