import platform
import sys

import torch

from samerun.output import versions

APP = versions.PACKAGE.parent


def test_library_versions():
    found = versions.library_versions()
    assert (found["python"], found["torch"].split("+")[0]) == (
        platform.python_version(),
        torch.__version__.split("+")[0],
    )
    assert set(found) == {"python", *versions.LIBRARIES}


def test_a_library_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(versions, "LIBRARIES", ("torch", "no-such-library"))
    assert versions.library_versions()["no-such-library"] is None


def test_code_version_is_of_the_package_and_the_script(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(APP / "classify.py")])
    found = versions.code_version()
    assert {"app/classify.py", "app/samerun/errors.py", "app/samerun/text/multilabel.py"} <= set(found)
    assert "app/titlegen.py" not in found

    copy, script = tmp_path / "samerun", tmp_path / "tasks" / "my_task.py"
    for file in (copy / "errors.py", script):
        file.parent.mkdir()
        file.write_text("1")
    monkeypatch.setattr(versions, "PACKAGE", copy)
    monkeypatch.setattr(sys, "argv", [str(script)])  # a task of the user's own, outside of the application
    before = versions.code_version()
    assert list(before) == ["app/samerun/errors.py", "my_task.py"]
    script.write_text("2")
    assert versions.code_version() != before
