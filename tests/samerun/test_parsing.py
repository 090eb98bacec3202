from dataclasses import dataclass, fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from refusals import problems_of

from samerun.arguments import OptimizationArguments, RunArguments
from samerun.parsing import SpaceSeparated, as_dict, option, parse, validate
from samerun.task_scripts import with_changes, write_settings


@dataclass(frozen=True, kw_only=True)
class Small:
    """Small"""

    name: str | None = option(help="a text, 100% optional")
    letter: str = option("alpha", choices=("alpha", "beta"), excludes=("limit",), help="one of two")
    rate: float = option(0.5, above=0, at_most=1, help="a share")
    count: int = option(3, at_least=1, below=10, help="how many")
    limit: int | None = option(7, at_least=1, help="an optional number")
    columns: tuple[str, ...] = option((), needs="name", help="names")
    spacing: tuple[float, ...] | None = option(above=0, help="numbers")
    strides: tuple[int, ...] = option((2, 2), at_least=1, help="whole numbers")
    trackers: tuple[str, ...] = option(("x",), choices=("x", "y"), help="names out of two")
    shuffle: bool = option(True, help="on by default")
    choose: bool | None = option(needs="letter=beta", help="neither by default")
    inner: int | None = option(hidden=True, help="for launchers")
    steps: int | float | None = option(at_least=0, help="a number or a share")
    files: SpaceSeparated[str] | None = option(path=True, help="names of files")
    weights: SpaceSeparated[float] | None = option(above=0, help="numbers")


def small(*argv, yaml=None, tmp_path=None):
    if yaml is not None:
        path = tmp_path / "run.yaml"
        path.write_text(yaml)
        argv = ("--config", str(path), *argv)
    return parse(Small, list(argv))


def problems(*argv, yaml=None, tmp_path=None):
    found = problems_of(lambda: validate(small(*argv, yaml=yaml, tmp_path=tmp_path)))
    return [problem.replace(f"{tmp_path}/", "") for problem in found]


NAMES = st.text("abc.~-/", min_size=1).filter(lambda text: text[0] not in "-~" and text.strip())
NUMBERS = st.floats(1e-9, 1e9)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "name": NAMES, "letter": st.sampled_from(["alpha", "beta"]), "rate": st.floats(1e-9, 1),
        "count": st.integers(1, 9), "limit": st.none() | st.integers(1), "shuffle": st.booleans(),
        "spacing": st.lists(NUMBERS, min_size=1).map(tuple), "steps": st.integers(0) | st.floats(1e-9, 0.999),
        "strides": st.lists(st.integers(1), min_size=1).map(tuple),
        "files": st.lists(NAMES, min_size=1).map(SpaceSeparated),
        "weights": st.lists(NUMBERS, min_size=1).map(SpaceSeparated),
    },
)  # fmt: skip


@given(VALUES)
@example({"steps": 2**53 + 1})
def test_what_is_written_down_is_read_again(values):
    argv = []
    for name, value in values.items():
        separator = " " if isinstance(value, SpaceSeparated) else ","
        text = separator.join(map(str, value)) if isinstance(value, tuple) else str(value)
        argv += [f"--{name}", *(map(str, value) if separator == " " else [text])]
    found = parse(Small, argv)
    assert found == Small(**values)
    assert [type(getattr(found, name)) for name in values] == [type(value) for value in values.values()]


def test_what_run_json_has_is_read_again(tmp_path):
    found = parse(OptimizationArguments, ['--lr_scheduler_kwargs={"power": 2.0}', "--warmup_steps=0.1"])
    write_settings(tmp_path / "a.json", as_dict(found))
    assert parse(OptimizationArguments, ["--config", str(tmp_path / "a.json")]) == found


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--shuffle"], True), (["--shuffle", "False"], False), (["--shuffle=0"], False),
        (["--no_shuffle"], False), (["--no-shuffle"], False), (["--shuffle", "off"], False),
        (["--no_shuffle", "--shuffle", "YES"], True),
    ],
)  # fmt: skip
def test_booleans(argv, value):
    assert small(*argv).shuffle is value


def test_the_last_of_several_lists_counts_and_a_note_says_so():
    notes = []
    assert parse(Small, ["--files", "a", "--count", "1", "--files", "b", "--count", "2"], notes=notes) == (
        Small(files=SpaceSeparated(["b"]), count=2)
    )
    assert notes == ["--files is given twice, the last one counts (several values: --files A B)"]


def test_a_file_sets_what_the_command_line_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    text = (
        "count: 99\nrate: 5e-2  # YAML 1.1 reads this as a text\ncolumns: [a, b]\nstrides: [2, 1]\nname: 7\n"
        "shuffle: no\nlimit: null\nchoose: off\nfiles: [~/a.csv, 'b,c.csv']\nweights: [1, 2.5]\n"
    )
    found = small("--count", "5", "--shuffle", "--spacing", "1,0.5", yaml=text, tmp_path=tmp_path)
    several = {"files": ("/home/me/a.csv", "b,c.csv"), "weights": (1.0, 2.5), "columns": ("a", "b")}
    several |= {"strides": (2, 1), "spacing": (1.0, 0.5)}
    assert found == Small(count=5, rate=0.05, name="7", limit=None, choose=False, **several)
    assert small("--limit", "none", "--weights", "none").limit is None
    assert as_dict(found)["name"] == "7"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--spacing", "1,x"],
         "--spacing: 'x' is not a number above 0; expected numbers separated by commas"),
        (["--spacing", "1,0"],
         "--spacing: '0' is not a number above 0; expected numbers separated by commas"),
        (["--strides", "2,1.5"],
         "--strides: '1.5' is not a whole number at least 1; expected whole numbers separated by commas"),
        (["--no-shuffle=1"], "unknown argument --no-shuffle; did you mean --shuffle?"),
        (["--zzz"], "unknown argument --zzz (--help all lists the arguments)"),
        (["--inned", "4"], "unknown argument --inned (--help all lists the arguments)"),
        (["--count"], "--count: has no value, expected a whole number at least 1 and below 10"),
        (["a", "--count", "1"], "unexpected value 'a': arguments are written --name value"),
        (["--config"], "--config: has no value, expected a YAML file"),
        (["--files", "a", ""], "--files: has no value, expected texts separated by spaces"),
        (["--weights", "1", "x"],
         "--weights: 'x' is not a number above 0; expected numbers separated by spaces"),
        (["--columns", "a"], "--columns is given but --name is not"),
        (["--choose"], "--choose needs --letter beta, but --letter is alpha"),
        (["--letter", "beta", "--limit", "3"], "--letter beta and --limit are both given; keep one"),
        *[(["--steps", value], f"--steps: {said}, or a share of all steps below 1, at least 0")
          for value, said in [("2.5", "'2.5' is not a whole number"), ("nan", "'nan' is not a whole number"),
                              ("-1", "'-1' is not a whole number")]],
    ],
)  # fmt: skip
def test_bad_arguments(argv, message):
    assert problems(*argv) == [message]


def test_all_problems_come_together(tmp_path):
    given = ("--rate", "2", "--nmae", "a", "--letter", "c")
    found = problems(*given, yaml="count: 0\nfats: on\n", tmp_path=tmp_path)
    assert sorted(problem.split("; ")[0].split(": ")[0] for problem in found) == [
        "--letter", "--rate", "run.yaml", "run.yaml", "unknown argument --nmae"
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OfATask(Small, RunArguments):
    """Its own"""

    colour: str = option("red", help="of all")


def test_help_shows_a_tasks_own_and_the_most_used_arguments_and_help_all_the_rest(capsys):
    for argv in (["--help"], ["-h"], ["--help", "all"]):
        with pytest.raises(SystemExit) as caught:
            parse(OfATask, argv)
        text = capsys.readouterr().out
        assert caught.value.code == 0
        assert all(f"--{name} " in text for name in ("output_dir", "colour", "config"))
        everything = argv[-1] == "all"
        assert ("--save_total_limit " in text) == everything == ("100% optional" in text)
        assert text.index("--resume_from_checkpoint ") < text.index("--colour ")
        assert ("--help all" in text) != everything
        assert "--inner" not in text
    assert all(f"--{field.name} " in text for field in fields(OfATask) if field.name != "inner")


def test_a_changed_argument_replaces_what_other_names_of_it_say():
    words = "--bf16 --evaluation-strategy=steps --adam_beta1 0.8 --seed 3 --train_file a b"
    changes = {"mixed_precision": "no", "optim_args": None, "train_file": "c"}
    expected = "--evaluation-strategy=steps --seed 3 --mixed_precision no --train_file c"
    assert with_changes(words.split(), changes) == expected.split()
