"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import build


@pytest.fixture(scope="session")
def models_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_model(models_directory: Path) -> Callable[..., Path]:
    """`tiny_model(name, dtype=...)`: a directory that tests share and must not change."""

    def get(name: str, dtype: str = "float32") -> Path:
        directory = models_directory / f"{name}-{dtype}"
        return directory if directory.exists() else build(directory, name, dtype=dtype)

    return get
