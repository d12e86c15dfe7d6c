"""Fixtures that several test modules share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from qinfer.ops.cpu import kernels
from qinfer_converters.convert import convert
from qinfer_converters.huggingface import HuggingFaceSource
from qinfer_converters.plan import make_plan
from tests import kernel_builds, tiny_models

# Triton reads this when it is imported: without a CUDA device kernels run interpreted, on the CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

find_library = kernels.library  # as it is before the fixture below replaces it


@pytest.fixture(scope="session")
def models_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_model(models_directory: Path) -> Callable[..., Path]:
    """`tiny_model(name, dtype=...)`: a directory that tests share and must not change."""

    def get(name: str, dtype: str = "float32") -> Path:
        directory = models_directory / f"{name}-{dtype}"
        return directory if directory.exists() else tiny_models.build(directory, name, dtype=dtype)

    return get


@pytest.fixture(scope="session")
def converted(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """`converted(name, scheme)`: a tiny model, converted once; tests must not change it."""
    done: dict[tuple[str, str], Path] = {}

    def get(name: str, scheme: str) -> Path:
        if (name, scheme) not in done:
            out = tmp_path_factory.mktemp("converted") / "model"
            source = HuggingFaceSource(tiny_model(name))
            convert(source, make_plan(source, scheme, 32 if scheme == "int4" else None), out)
            done[name, scheme] = out
        return done[name, scheme]

    return get


@pytest.fixture(scope="session")
def plain_build(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as a machine without AVX2 runs them."""
    if kernel_builds.COMPILER is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("plain") / "kernels.so"
    kernel_builds.compile_plain(path)
    return kernels.load(str(path))


@pytest.fixture(scope="module", params=["installed", "plain"])
def build(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """Builds of the kernels, each of them what the operations of a module's tests use."""
    library = find_library()
    if request.param == "plain":
        library = request.getfixturevalue("plain_build")
    if library is None:
        pytest.skip("the extension was not built: no C compiler at install time")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "library", lambda: library)
        yield library
