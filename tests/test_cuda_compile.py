"""The GPU kernels, compiled without a GPU: each fits the devices it is meant for."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

SCRIPT = Path(__file__).parents[1] / "scripts/compile_gpu_kernels.py"
SHARED_BYTES = {"8.0": 163 * 1024, "8.6": 99 * 1024, "8.9": 99 * 1024, "9.0": 227 * 1024}
READS_MUCH_MEMORY = (
    "gemv",
    "gemm",
    "split_kernel",
    "add_norm",
    "norm",
    "activation",
    "weigh_blocks",
)
"""Names begin so where anything below 128 bits a thread and load would leave bandwidth unused."""


@pytest.fixture(scope="module")
def usages(tmp_path_factory):
    """What the script says of every kernel, for all capabilities; HOME must stay empty."""
    home, cache = (tmp_path_factory.mktemp(name) for name in ("home", "cache"))
    result = subprocess.run(
        [sys.executable, SCRIPT, "--json", "--one-per-kernel", "--cache-dir", cache],
        env=os.environ | {"HOME": str(home), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert not list(home.iterdir())
    return json.loads(result.stdout)


def names(usages, condition):
    return [f"{u['name']} on {u['capability']}: {u}" for u in usages if condition(u)]


def test_every_module_of_kernels_is_compiled_for_every_capability(usages):
    kernels = {u["name"] for u in usages}
    its = {name.split(",")[0].split(":")[0].split("-")[0] for name in kernels}
    assert its >= {"activation", "add_norm", "combine", "dequantize", "gemm", "gemv"}
    assert its >= {"find_peaks", "take_likeliest", "weigh_blocks", "list_few", "draw_kernel"}
    assert its >= {
        f"{name}_kernel" for name in ("keep", "merge", "rotate", "split", "store", "tile")
    }
    assert len(usages) == len(kernels) * len(SHARED_BYTES)
    assert {u["capability"] for u in usages} == set(SHARED_BYTES)


def test_no_kernel_spills_registers(usages):
    assert not names(usages, lambda u: u["stack_bytes"] or u["local_bytes"])


def test_registers_of_a_program_fit_a_multiprocessor(usages):
    assert not names(usages, lambda u: u["registers"] > 255)
    assert not names(usages, lambda u: u["registers"] * u["threads"] > 65536)


def test_shared_memory_fits(usages):
    assert not names(usages, lambda u: u["shared_bytes"] > SHARED_BYTES[u["capability"]])


def test_weights_of_few_tokens_do_not_go_through_shared_memory(usages):
    chosen = [u for u in usages if u["name"].startswith("gemv")]
    assert chosen
    assert not names(
        chosen, lambda u: u["barriers"] > 8
    )  # of the pipeline, and where sums are combined


def test_kernels_that_read_much_load_128_bits_at_a_time(usages):
    chosen = [u for u in usages if u["name"].startswith(READS_MUCH_MEMORY)]
    assert chosen
    assert not names(chosen, lambda u: u["vector_loads"] == 0)
