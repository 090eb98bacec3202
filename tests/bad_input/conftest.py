"""Fixtures of the catalogue of bad input."""

from pathlib import Path

import pytest
from catalogue_models import make_models


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def workplace(tmp_path, models, monkeypatch) -> Path:
    """A case's working folder, with the catalogue's models."""
    (tmp_path / "models").symlink_to(models)
    monkeypatch.chdir(tmp_path)
    return tmp_path
