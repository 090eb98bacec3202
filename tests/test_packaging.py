"""What pyproject.toml installs, beside what the repository has."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import samerun
from samerun.__main__ import CONFIGS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = dict(PROJECT["project"]["optional-dependencies"])
EXTRAS[""] = PROJECT["project"]["dependencies"] + EXTRAS.pop("deepspeed")  # requirements.txt has it


def requirements(lines):
    found = [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]
    return {requirement.name: requirement.specifier for requirement in found}


@pytest.mark.parametrize("extra", EXTRAS)
def test_pinned_versions_are_within_the_ranges(extra):
    file = ROOT / f"requirements{extra and '-'}{extra}.txt"
    pins, ranges = requirements(file.read_text(encoding="utf-8").splitlines()), requirements(EXTRAS[extra])
    assert pins.keys() == ranges.keys()
    everywhere = requirements((ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines())
    for name, (pin,) in pins.items():
        assert ranges[name].contains(pin.version), name
        assert everywhere.get(name, pins[name]) == pins[name], f"{name} has one version"


def test_every_requirements_file_is_an_extra():
    assert {
        file.stem.removeprefix("requirements").removeprefix("-") for file in ROOT.glob("requirements*.txt")
    } == set(EXTRAS)


def test_every_script_and_configuration_is_installed():
    scripts = {path.stem for path in (ROOT / "app").glob("*.py")}
    configs = {name: f"samerun/{name}" for name in CONFIGS}
    paths = ["app/recipes", *(f"app/{name}.py" for name in scripts)]
    tasks = {path: f"samerun/tasks/{Path(path).name}" for path in paths}
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == tasks | configs


def test_the_short_names_of_the_package_exist_and_no_others():
    assert all(callable(getattr(samerun, name)) for name in samerun.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = samerun.no_such_name


def test_there_is_one_version_number():
    assert PROJECT["project"]["dynamic"] == ["version"]
    stated = {
        "CITATION.cff": f"version: {samerun.__version__}",
        "CHANGELOG.md": f"## [{samerun.__version__}]",
    }
    for file, line in stated.items():
        assert line in (ROOT / file).read_text(encoding="utf-8")
