"""Turns the command line and a YAML file into a dataclass.

An argument is a field of a frozen dataclass, declared with `option(...)`: name, type, default, help and
limits. A YAML file (`--config`) may set the same fields; the command line wins. Unknown names, wrong types
and values out of range are reported together, with the most similar name. `trainer_names.py` has other names
that are accepted. `--learning-rate` means `--learning_rate`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import math
import operator
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import yaml

from samerun.errors import InputError, nearest
from samerun.files import read_text
from samerun.trainer_names import BOOLEANS, TRAINER_NAMES, Found, Values, join_parts, translated

T = TypeVar("T")
# --help begins with these, some twenty for each task, and adds the task's own; `--help all` shows all.
MOST_USED = (
    *("train_file", "validation_file", "test_file", "dataset_name", "text_column", "title_column"),
    *("image_column", "label_column", "problem_type", "model_name_or_path", "max_length"),
    *("global_batch_size", "learning_rate", "num_train_epochs", "mixed_precision", "output_dir"),
    *("metric_for_best_model", "early_stopping_patience", "do_predict", "resume_from_checkpoint"),
    *("report_to", "seed"),
)
LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def option(
    default: Any = None,
    *,
    help: str,
    choices: tuple[str, ...] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    settings: Mapping[str, Mapping[str, Setting]] | None = None,
    needs: str | None = None,
    excludes: tuple[str, ...] = (),
    hidden: bool = False,
    reads: bool = False,
    path: bool = False,
    per_machine: bool = False,
) -> Any:
    """Declares a dataclass field as an argument.

    `settings`: those that may follow a value of `choices`, as in windows:stride=64,max=8, for
    `with_settings`. `needs`: another argument, or "name=value", without which this one has no effect.
    `excludes`: arguments that may not be given beside this one. `validate` checks both. `reads`: the value is
    an input file or folder. `path`: it is another path. `~` is expanded in both. `per_machine`: the machines
    of a job may have different values; for input files, their contents must be equal instead.
    """
    metadata = locals() | {"path": path or reads}
    return dataclasses.field(default=metadata.pop("default"), metadata=metadata)


def changed_option(group: type, name: str, help: str, default: Any = None) -> Any:
    """Redeclares the argument `name` of a group in a task's own dataclass, with another help text, type or
    default."""
    metadata = {**group.__dataclass_fields__[name].metadata, "help": help}
    return dataclasses.field(default=default, metadata=metadata)


def parse(
    cls: type[T], argv: list[str] | None = None, description: str = "", notes: list[str] | None = None
) -> T:
    """Builds `cls` from the command line and from the YAML file named by `--config`. --help prints the help
    and exits. `notes` gets a line for each argument that is given twice.

    Raises `InputError` with every problem found: unknown names, missing or malformed values, values out of
    range.
    """
    problems: list[str] = []
    fields = cls.__dataclass_fields__
    if plain := [name for name, field in fields.items() if not field.metadata]:
        raise TypeError(f"{cls.__name__}: declare {', '.join(plain)} by samerun.option")
    found: Found = {}
    notes = [] if notes is None else notes
    given = _read_command_line(sys.argv[1:] if argv is None else argv, cls, problems, notes)
    if "help" in given:
        print(_help(cls, description, everything=given["help"] == ["all"]))
        sys.exit(0)
    if "config" in given:
        file = os.path.expanduser(" ".join(given.pop("config")))
        if not file:
            raise InputError(*problems, "--config: has no value, expected a YAML file")
        found = translated(_read_config(file, cls, problems), fields, f"{file}: ", problems)
    found |= translated(given, fields, "--", problems)
    join_parts(found, problems)
    arguments = {}
    for name, (values, source) in found.items():
        try:
            arguments[name] = convert(values, fields[name])
        except ValueError as error:
            problems.append(f"{source}: {error}")
    if problems:
        raise InputError(*problems)
    return cls(**arguments)


def validate(arguments: Any) -> None:
    """Raises `InputError` with all arguments that contradict each other, by `needs` and `excludes` and by the
    groups' methods `problems`."""
    problems = []
    for field in dataclasses.fields(arguments):
        if is_given(arguments, field.name):
            problems += _unmet_conditions(arguments, field)
    for group in type(arguments).__mro__:
        if "problems" in vars(group):
            problems += group.problems(arguments)
    if problems:
        raise InputError(*problems)


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of its name without a module, as wandb leaves, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def is_given(arguments: Any, name: str) -> bool:
    """Whether an argument has another value than its default, None and false. False if the task has no such
    argument."""
    field = arguments.__dataclass_fields__.get(name)
    return field is not None and getattr(arguments, name) not in (None, False, field.default)


def _unmet_conditions(arguments: Any, field: dataclasses.Field) -> list[str]:
    """The messages of `needs` and `excludes`. Arguments that the task does not have count as met."""
    problems, values, fields = [], as_dict(arguments), arguments.__dataclass_fields__
    needed, _, value = (field.metadata["needs"] or "").partition("=")
    if value and (values.get(needed) or value) != value:  # None: a default that depends on others
        problems.append(f"--{field.name} needs --{needed} {value}, but --{needed} is {values[needed]}")
    if not value and needed in values and not is_given(arguments, needed):
        problems.append(f"--{field.name} is given but --{needed} is not")
    for other in field.metadata["excludes"]:
        if is_given(arguments, other):
            words = [
                f"--{name} {values[name]}" if fields[name].metadata["choices"] else f"--{name}"
                for name in (field.name, other)
            ]
            problems.append(f"{' and '.join(words)} are both given; keep one")
    return problems


def as_dict(arguments: Any) -> dict[str, Any]:
    return {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}


def names_of(arguments: Any, **settings: bool) -> list[str]:
    """The names of the arguments with these settings of `option`, such as `reads=True`."""
    fields = dataclasses.fields(arguments)
    return [f.name for f in fields if all(f.metadata[key] == value for key, value in settings.items())]


def values_of(arguments: Any, names: list[str]) -> list[tuple[str, Any]]:
    """(name, value) of each value of the arguments with these names; several of one of `SpaceSeparated`."""
    given = [(name, getattr(arguments, name)) for name in names]
    several = [(name, value if isinstance(value, SpaceSeparated) else (value,)) for name, value in given]
    return [(name, value) for name, values in several for value in values if value is not None]


# The types of arguments


class SpaceSeparated(tuple):
    """Values separated by spaces, such as `--train_file a.csv b.csv`. Those of a plain `tuple` are separated
    by commas."""


class Kind(NamedTuple):
    """How values of a type are described and read."""

    noun: str
    metavar: str  # in --help
    read: Callable[[str], Any]  # one value; raises ValueError or KeyError
    each: str = ""  # the noun for one value of several
    several: type[tuple] | None = None


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _steps(text: str) -> int | float:
    value = _number(text)
    if not value.is_integer() and not 0 < value < 1:
        raise ValueError
    return int(text if text.isdigit() else value) if value.is_integer() else value


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


KINDS = {
    "str": Kind("a text", "TEXT", str),
    "int": Kind("a whole number", "N", int),
    "float": Kind("a number", "X", _number),
    "bool": Kind("true or false", "true|false", lambda text: BOOLEANS[text.lower()]),
    "int | float": Kind("a whole number, or a share of all steps below 1,", "N|SHARE", _steps),
    "dict[str, Any]": Kind('a JSON object, such as {"power": 2}', "JSON", _json_object),
    "tuple[str, ...]": Kind("names separated by commas", "A,B", str, "a name", tuple),
    "tuple[int, ...]": Kind("whole numbers separated by commas", "N,N", int, "a whole number", tuple),
    "tuple[float, ...]": Kind("numbers separated by commas", "X,X", _number, "a number", tuple),
    "SpaceSeparated[str]": Kind("texts separated by spaces", "TEXT ...", str, "a text", SpaceSeparated),
    "SpaceSeparated[float]": Kind(
        "numbers separated by spaces", "X ...", _number, "a number", SpaceSeparated
    ),
}


def kind_of(field: dataclasses.Field) -> Kind:
    """The type of an argument, by its annotation without None."""
    written = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    return KINDS[re.sub(r"\b\w+\.| \| None", "", written)]


def describe(noun: str, limits: Mapping[str, Any]) -> str:
    """Describes valid values for users: "a whole number at least 1"."""
    if limits["choices"]:
        return "one of " + ", ".join(limits["choices"])
    ranges = [f"{key.replace('_', ' ')} {limits[key]}" for key in LIMITS if limits[key] is not None]
    return f"{noun} {' and '.join(ranges)}".strip()


def read_value(text: str, kind: Kind, limits: Mapping[str, Any]) -> Any:
    """Reads one value. Raises `ValueError` with the end of a message: "'x' is not a number"."""
    choices = limits["choices"]
    name = text.partition(":")[0] if limits.get("settings") else text
    try:
        value = kind.read(text)
        if isinstance(value, str):
            is_valid = not choices or name in choices
        else:
            is_valid = all(limits[key] is None or holds(value, limits[key]) for key, holds in LIMITS.items())
    except (ValueError, KeyError):
        is_valid = False
    if not is_valid:
        near = nearest(name, choices or ())
        hint = f"; did you mean {near}?" if near else ""
        if kind.each and not choices:
            hint = f"; expected {kind.noun}"
        raise ValueError(f"{name!r} is not {describe(kind.each or kind.noun, limits)}{hint}")
    return value


def convert(words: Values, field: dataclasses.Field) -> Any:
    """Converts words to the type of their field. Raises `ValueError` with the end of a message: "'x' is not a
    number"."""
    kind, shown = kind_of(field), " ".join(words or [])
    unset = ("none", "null") if kind == KINDS["str"] else ("none", "null", "auto")
    if "None" in str(field.type) and (words is None or shown.lower() in unset):
        return None
    if words == [] and kind == KINDS["bool"]:
        return True
    if kind.several is tuple:
        words = [part.strip() for part in ",".join(words or []).split(",") if part.strip()]
    if not words or "" in words:
        raise ValueError(f"has no value, expected {describe(kind.noun, field.metadata)}")
    if len(words) > 1 and not kind.several:
        raise ValueError(f"expected one value, found {len(words)}: {shown}")
    items = [read_value(word, kind, field.metadata) for word in words]
    if field.metadata["settings"]:
        problems: list[str] = []
        owner, _, text = shown.partition(":")
        read_settings(field.name, owner, field.metadata["settings"].get(owner, {}), text, problems)
        if problems:
            raise ValueError("; ".join(problem.removeprefix(f"--{field.name}: ") for problem in problems))
    if field.metadata["path"]:  # not Path.expanduser, which would normalize hub names
        items = [os.path.expanduser(item) for item in items]
    return kind.several(items) if kind.several else items[0]


# Settings of a value, as in --optim sgd --optim_args momentum=0.9 or --long_documents windows:stride=64


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting. Its type is that of `default`; `optional`: it may be none."""

    default: Any
    at_least: float | None = 0
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None
    optional: bool = False

    def read(self, text: str) -> Any:
        """Raises `ValueError` with the end of a message."""
        if self.optional and text.lower() == "none":
            return None
        return read_value(text, KINDS[type(self.default).__name__], vars(self))


def read_settings(
    argument: str,
    owner: str,
    known: Mapping[str, Setting],
    text: str | None,
    problems: list[str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Reads "name=value,name=value", the settings of `owner` in an argument. Without a name, a value is that
    of the setting "". `elsewhere`: what to give instead of other names. Appends to `problems`."""
    values: dict[str, Any] = {}
    for part in [part.strip() for part in (text or "").split(",") if part.strip()]:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and "" in known:
            name, value = "", name
        said = f"--{argument}: {name}".removesuffix(": ")
        if name not in known:
            names = ", ".join(filter(None, known)) or "none"
            hint = f"give {elsewhere[name]}" if name in elsewhere else f"it has {names}"
            problems.append(f"--{argument}: {owner} has no {name}; {hint}")
        elif name in values:
            problems.append(f"{said} is given twice; keep one")
        else:
            try:
                values[name] = known[name].read(value)
            except ValueError as error:
                problems.append(f"{said}: {error}")
    return values


def with_settings(arguments: Any, name: str) -> tuple[str | None, dict[str, Any]]:
    """Splits the value of an argument with `settings`: windows:stride=64 is ("windows", {"stride": 64})."""
    value, _, text = (getattr(arguments, name) or "").partition(":")
    known = arguments.__dataclass_fields__[name].metadata["settings"].get(value, {})
    return value or None, read_settings(name, value, known, text, [])


# The command line and the file


def _read_command_line(
    argv: list[str], cls: type, problems: list[str], notes: list[str]
) -> dict[str, Values]:  # fmt: skip
    """The values of each argument, which are all words until the next --name. Appends to `problems` and
    `notes`."""
    given, fields = {}, cls.__dataclass_fields__
    values: list[str] | None = None
    for word in argv:
        if not word.startswith("--") and word != "-h":
            if values is not None:
                values.append(word)
            elif not problems:
                hint = "; --config names a file of them" if word.endswith((".json", ".yaml", ".yml")) else ""
                problems.append(f"unexpected value {word!r}: arguments are written --name value{hint}")
            continue
        written, equals, value = ("help" if word == "-h" else word[2:]).partition("=")
        values = [value] if equals else []
        name = written.replace("-", "_")
        positive = name.removeprefix("no_")
        if name in given and name in fields and kind_of(fields[name]).several is SpaceSeparated:
            notes.append(f"--{name} is given twice, the last one counts (several values: --{name} A B)")
        if name in {*fields, *TRAINER_NAMES, "help", "config"}:
            given[name] = values
        elif positive in fields and kind_of(fields[positive]) == KINDS["bool"] and not equals:
            given[positive] = values = ["false"]
        else:
            problems.append(f"unknown argument --{written}{_nearest(written, cls, '--')}")
    return given


def _nearest(name: str, cls: type, prefix: str = "") -> str:
    near = nearest(name.replace("-", "_"), names_of(cls, hidden=False))
    return f"; did you mean {prefix}{near}?" if near else " (--help all lists the arguments)"


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


def _read_config(path: str, cls: type, problems: list[str]) -> dict[str, Values]:
    """The values in a YAML file. Appends to `problems`; raises `InputError` with the line if it has no
    arguments."""
    try:
        content = yaml.load(read_text(path), Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        reason = "nested too deeply" if isinstance(error, RecursionError) else reason
        raise InputError(f"{path}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {reason}") from None
    if not isinstance(content, dict):
        what = "nothing" if not content else "a list" if isinstance(content, list) else "a text"
        raise InputError(f"{path}: expected `name: value` lines, found {what}")
    given: dict[str, Values] = {}
    for name, value in content.items():
        is_ours = name in cls.__dataclass_fields__
        if isinstance(value, dict) and is_ours:
            metavar = kind_of(cls.__dataclass_fields__[name]).metavar
            hint = "; put quotes around a JSON object" if metavar == "JSON" else ""
            problems.append(f"{path}: {name}: expected one value, found a mapping{hint}")
        elif isinstance(value, dict) and name not in TRAINER_NAMES:
            problems.append(
                f"{path}: {name} is a section; write arguments without sections, each as `name: value`"
            )
        elif not is_ours and name not in TRAINER_NAMES:
            problems.append(f"{path}: unknown key {name}{_nearest(name, cls)}")
        elif value == []:
            problems.append(f"{path}: {name}: an empty list; write none, or leave it out")
        else:
            words = value if isinstance(value, list) else [value]
            given[name] = [w if isinstance(w, str) else json.dumps(w) for w in words] if value else None
    return given


# --help


def groups_of(cls: type) -> dict[type, list[dataclasses.Field]]:
    """The visible arguments by the class that declares them first, in the order of --help. Groups with
    `listed_last` come last."""
    groups: dict[type, list[dataclasses.Field]] = {}
    seen: set[str] = set()
    owners = list(reversed(cls.__mro__))
    for owner in sorted(owners, key=lambda owner: vars(owner).get("listed_last", False)):
        inherited = {name for base in owner.__mro__[1:] for name in getattr(base, "__dataclass_fields__", ())}
        names = [name for name in getattr(owner, "__dataclass_fields__", ()) if name not in inherited | seen]
        seen.update(names)
        fields = [cls.__dataclass_fields__[name] for name in names]
        if fields := [field for field in fields if not field.metadata["hidden"]]:
            groups[owner] = fields
    return groups


def written(value: Any) -> str:
    """A default as on the command line; "" for None."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _help(cls: type, description: str, everything: bool) -> str:
    """The text of --help: the most used arguments and the task's own, or all."""
    width = max(shutil.get_terminal_size().columns - 2, 50)
    name = os.path.basename(sys.argv[0])
    usage = f"usage: {name} [--config FILE.yaml] [--name value ...]"
    lines = [usage, "", description.strip(), "", "FILE.yaml may set any of these; the command line wins.", ""]
    groups = {"Most used": [cls.__dataclass_fields__[n] for n in MOST_USED if n in cls.__dataclass_fields__]}
    for owner, fields in groups_of(cls).items():
        title = (owner.__doc__ or owner.__name__).strip().splitlines()[0]
        groups[title] = [f for f in fields if f.name not in MOST_USED and (everything or owner is cls)]
    for title, fields in groups.items():
        lines += [f"{title}:"] if fields else []
        for field in fields:
            choices, metavar = field.metadata["choices"] or (), kind_of(field).metavar
            value = "|".join(choices) or ("PATH" if field.metadata["path"] else metavar)
            default = written(field.default)
            text = field.metadata["help"] + (f" (default: {default})" if default else "")
            margin = " " * 8
            lines.append(f"  --{field.name} {value}")
            lines.append(textwrap.fill(text, width, initial_indent=margin, subsequent_indent=margin))
        lines += [""] if fields else []
    if not everything:
        lines.append("These are the most used arguments and the task's own; --help all lists all by group.")
    lines.append(
        "Other names of transformers' TrainingArguments are translated, or refused with the name to use."
    )
    return "\n".join(lines)
