"""The program that measures what the processor multiplies at most."""

import subprocess
from pathlib import Path

import pytest

from qinfer.ops.cpu import kernels
from tests.kernel_builds import COMPILER

SOURCE = Path(__file__).parents[1] / "scripts" / "peaks.c"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    library = kernels.library()
    if COMPILER is None or library is None or "avx" not in str(kernels.variant(library)):
        pytest.skip("there is no compiler, or no AVX2")
    path = tmp_path_factory.mktemp("peaks") / "peaks"
    flags = ["-O3", "-std=c11", "-Wall", "-Wextra", "-Werror", "-mavx2", "-mfma", "-pthread"]
    flags += ["-DREPETITIONS=100000"]
    subprocess.run([COMPILER, *flags, SOURCE, "-o", path], check=True)
    return path


def test_prints_a_rate_for_each_kind(program):
    done = subprocess.run([program, "2"], capture_output=True, text=True, check=True)
    head, *rows = (line.split() for line in done.stdout.splitlines())
    assert head == ["GOP/s", "1", "thread", "2"]
    assert [row[0] for row in rows] == ["fp32", "int16", "int8"]
    assert all(float(value) > 0 for row in rows for value in row[1:])


def test_so_many_threads_are_an_error(program):
    done = subprocess.run([program, "1000"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: threads")
