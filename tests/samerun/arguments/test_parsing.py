from dataclasses import dataclass

import pytest

from samerun.arguments.groups import RunArguments
from samerun.arguments.parsing import SpaceSeparated, as_dict, option, parse
from samerun.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Small:
    """Small"""

    name: str | None = option(help="a text, 100% optional")
    letter: str = option("alpha", choices=("alpha", "beta"), help="one of two")
    rate: float = option(0.5, above=0, at_most=1, help="a share")
    count: int = option(3, at_least=1, below=10, help="how many")
    limit: int | None = option(7, at_least=1, help="an optional number")
    columns: tuple[str, ...] = option((), help="names")
    spacing: tuple[float, ...] | None = option(above=0, help="numbers")
    strides: tuple[int, ...] = option((2, 2), at_least=1, help="whole numbers")
    trackers: tuple[str, ...] = option(("x",), choices=("x", "y"), help="names out of two")
    shuffle: bool = option(True, help="on by default")
    fast: bool = option(False, help="off by default")
    choose: bool | None = option(help="neither by default")
    inner: int | None = option(hidden=True, help="for launchers")


def small(*argv, yaml=None, tmp_path=None):
    if yaml is not None:
        path = tmp_path / "run.yaml"
        path.write_bytes(yaml if isinstance(yaml, bytes) else yaml.encode())
        argv = ("--config", str(path), *argv)
    return parse(Small, list(argv))


def problems(*argv, yaml=None, tmp_path=None):
    with pytest.raises(InputError) as caught:
        small(*argv, yaml=yaml, tmp_path=tmp_path)
    return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_defaults():
    assert small() == Small()


def test_values_get_the_types_of_their_fields():
    found = small(
        "--name",
        "a b",
        "--letter=beta",
        "--rate",
        "1",
        "--count",
        "9",
        "--columns",
        "a, b,,c",
        "--inner",
        "0",
    )
    assert found == Small(name="a b", letter="beta", rate=1.0, count=9, columns=("a", "b", "c"), inner=0)
    assert type(found.rate) is float
    assert as_dict(found)["columns"] == ("a", "b", "c")


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--shuffle"], True), (["--shuffle", "False"], False), (["--shuffle=0"], False),
        (["--no_shuffle"], False),
        (["--shuffle", "off"], False), (["--no_shuffle", "--shuffle", "YES"], True),
    ],
)  # fmt: skip
def test_booleans(argv, value):
    assert small(*argv).shuffle is value


def test_optional_values_can_be_taken_back(tmp_path):
    assert small("--limit", "none").limit is None
    assert small(yaml="limit: null", tmp_path=tmp_path).limit is None
    assert small(yaml="choose: off", tmp_path=tmp_path).choose is False


def test_file_sets_what_the_command_line_does_not(tmp_path):
    text = (
        "count: 4\nrate: 5e-2  # YAML 1.1 reads this as a text\ncolumns: [a, b]\nstrides: [2, "
        "1]\nshuffle: no\nname: 7\n"
    )
    found = small("--count", "5", "--shuffle", "--spacing", "1,0.5", yaml=text, tmp_path=tmp_path)
    columns = {"columns": ("a", "b"), "strides": (2, 1), "spacing": (1.0, 0.5)}
    assert found == Small(count=5, rate=0.05, shuffle=True, name="7", **columns)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--spacing", "1,x"], "--spacing: '1,x' is not numbers separated by commas above 0"),
        (
            ["--spacing", "1,0"],
            "--spacing: 1,0 is out of range, expected numbers separated by commas above 0",
        ),
        (["--strides", "2,1.5"], "--strides: '2,1.5' is not whole numbers separated by commas at least 1"),
        (["--no-shuffle=1"], "unknown argument --no-shuffle; did you mean --shuffle?"),
        (["--zzz"], "unknown argument --zzz (--help all lists the arguments)"),
        (["--inned", "4"], "unknown argument --inned (--help all lists the arguments)"),
        (["--coun", "4"], "unknown argument --coun; did you mean --count?"),
    ],
)
def test_bad_arguments(argv, message):
    assert problems(*argv) == [message]


def test_all_problems_come_together(tmp_path):
    found = problems(
        "--rate", "2", "--nmae", "a", "--letter", "c", yaml="count: 0\nfats: on\n", tmp_path=tmp_path
    )
    places = [
        "unknown argument --nmae",
        "run.yaml: unknown key fats",
        "run.yaml: count",
        "--letter",
        "--rate",
    ]
    assert len(found) == 5
    assert all(problem.startswith(place) for problem, place in zip(found, places, strict=True))


def test_a_bad_value_in_the_file_does_not_matter_where_the_command_line_wins(tmp_path):
    assert small("--count", "5", yaml="count: 99", tmp_path=tmp_path).count == 5


def test_help_names_every_argument_but_the_hidden(capsys):
    with pytest.raises(SystemExit) as caught:
        small("--help")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"--{name}" in text for name in as_dict(Small()) if name != "inner")
    assert "--inner" not in text
    assert "a text, 100% optional" in text


@dataclass(frozen=True, kw_only=True)
class OfATask(RunArguments):
    """Its own"""

    colour: str = option("red", help="of all")


def test_help_shows_a_tasks_own_and_the_most_used_arguments_and_help_all_the_rest(capsys):
    for more in ([], ["all"]):
        with pytest.raises(SystemExit):
            parse(OfATask, ["--help", *more])
        text = capsys.readouterr().out
        assert "--output_dir" in text
        assert "--colour" in text
        assert ("--early_stopping_patience" in text) == bool(more)
        assert ("--help all" in text) != bool(more)


@dataclass(frozen=True, kw_only=True)
class Many:
    """Many"""

    files: SpaceSeparated[str] | None = option(path=True, help="names of files")
    weights: SpaceSeparated[float] | None = option(above=0, help="numbers")


def test_values_that_are_arguments_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "run.yaml").write_text("files: [~/a.csv, 'b,c.csv']\nweights: [1, 2.5]\n")
    expected = Many(files=("/home/me/a.csv", "b,c.csv"), weights=(1.0, 2.5))
    assert parse(Many, ["--files", "~/a.csv", "b,c.csv", "--weights", "1", "2.5"]) == expected
    assert parse(Many, ["--config", str(tmp_path / "run.yaml")]) == expected
    assert parse(Many, ["--files=-", "--weights", "none"]) == Many(files=("-",))
    with pytest.raises(InputError) as caught:
        parse(Many, ["--files", "a", "", "--weights", "1", "x"])
    wrong = "--weights: '1 x' is not numbers separated by spaces above 0"
    assert caught.value.problems == ["--files: is empty", wrong]
