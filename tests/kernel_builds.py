"""Compiling the kernels' source for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from qinfer.ops.cpu import kernels

DIRECTORY = Path(kernels.__file__).parent
SOURCES = sorted(DIRECTORY.glob("*.c"))
COMPILER = shutil.which(os.environ.get("CC", "cc"))
_STRICT = ("-std=c11", "-Wall", "-Wextra", "-Werror")
_AS_INSTALLED = ("-ffp-contract=off", "-Wno-psabi", "-pthread")


def compile_c(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the compiler as the build does, with every warning an error."""
    if COMPILER is None:
        raise RuntimeError("there is no C compiler")
    command = [COMPILER, *_STRICT, *_AS_INSTALLED, f"-I{DIRECTORY}", *map(str, arguments), "-lm"]
    return subprocess.run(command, capture_output=True, text=True)


def compile_plain(path: Path, *names: str) -> None:
    """Write a library of the C code that a machine without AVX2 runs; all of it, or some files."""
    sources = [DIRECTORY / name for name in names] or SOURCES
    done = compile_c("-O2", "-DQINFER_PLAIN", "-shared", "-fPIC", *sources, "-o", path)
    assert done.returncode == 0, done.stderr
