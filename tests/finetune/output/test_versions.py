import platform
import sys
from pathlib import Path

import torch

from finetune.output import versions

APP = Path(versions.__file__).parents[2]


def test_library_versions():
    found = versions.library_versions()
    assert (found["python"], found["torch"].split("+")[0]) == (platform.python_version(), torch.__version__.split("+")[0])
    assert set(found) == {"python", *versions.LIBRARIES}


def test_a_library_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(versions, "LIBRARIES", ("torch", "no-such-library"))
    assert versions.library_versions()["no-such-library"] is None


def test_code_version_is_of_the_packages_and_the_script(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(APP / "classify.py")])
    found = versions.code_version()
    assert {"app/classify.py", "app/finetune/errors.py", "app/metrics/multilabel.py"} <= set(found)
    assert "app/titlegen.py" not in found

    copy = tmp_path / "app"
    (copy / "finetune").mkdir(parents=True)
    (copy / "finetune" / "errors.py").write_text("1")
    monkeypatch.setattr(versions, "APP", copy)
    before = versions.code_version()
    (copy / "finetune" / "errors.py").write_text("2")
    assert list(before) == ["app/finetune/errors.py"]
    assert versions.code_version() != before
