"""The compiled kernels against the reference operations, in every build the source allows."""

import dataclasses
import math
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from qinfer.config import ACTIVATIONS
from qinfer.ops.cpu import kernels
from qinfer.ops.cpu.ops import CPUOps
from qinfer.ops.cpu.weights import Arena, NativeWeight
from qinfer.ops.reference import ReferenceOps
from qinfer.quant import affine, nf4
from qinfer.quant.weights import AffineWeight, DenseWeight, NF4Weight
from tests.kernel_builds import COMPILER, DIRECTORY, SOURCES, compile_c

PARTS = [
    DIRECTORY / name for name in ("block.c", "dense.c", "packed.c", "pool.c")
]  # others are included
DRIVER = Path(__file__).with_name("kernel_driver")
find_library = kernels.library  # as it is before the fixture `build` replaces it
REFERENCE = ReferenceOps(torch.device("cpu"), torch.float32)
ONE_BY_ONE = ReferenceOps(torch.device("cpu"), torch.float32, deterministic=True)
THREADS = (1, 2, 3, 7)

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def affine_weight(n, k, bits, group, dtype, seed=0):
    q, scale = affine.quantize(randn(n, k, seed=seed), bits, group, dtype)
    return AffineWeight(affine.pack(q, bits), scale, bits, k)


def asymmetric_weight(n, k, bits, group, dtype, seed=0):
    weight = affine_weight(n, k, bits, group, dtype, seed)
    draw = torch.Generator().manual_seed(seed)
    limit = 2 ** (bits - 1)
    zero = torch.randint(-limit, limit, weight.scale.shape, generator=draw, dtype=torch.int8)
    return dataclasses.replace(weight, zero=zero)


def nf4_weight(n, k, seed=0, block_size=64):
    packed, absmax = nf4.quantize(randn(n, k, seed=seed), block_size)
    return NF4Weight(packed, absmax, torch.tensor(nf4.CODE), (n, k), block_size)


def dense_weight(n, k, dtype, seed=0):
    return DenseWeight(randn(n, k, seed=seed, dtype=dtype))


def bf16_weight(n, k, seed=0):
    return dense_weight(n, k, torch.bfloat16, seed)


SCALES = st.sampled_from([torch.bfloat16, torch.float16])
ROWS = st.integers(1, 70)
SEEDS = st.integers(0, 2**16)


@st.composite
def int4(draw):
    group = draw(st.sampled_from([32, 64, 128]))
    columns = group * draw(st.integers(1, 5))
    return affine_weight(draw(ROWS), columns, 4, group, draw(SCALES), draw(SEEDS))


@st.composite
def asymmetric(draw):
    group = draw(st.sampled_from([32, 64, 128, None]))
    columns = (group or 41) * draw(st.integers(1, 5))
    bits = draw(st.sampled_from([4, 8]))
    return asymmetric_weight(draw(ROWS), columns, bits, group, draw(SCALES), draw(SEEDS))


@st.composite
def int8_per_channel(draw):
    columns = draw(st.integers(5, 200))
    return affine_weight(draw(ROWS), columns, 8, None, draw(SCALES), draw(SEEDS))


@st.composite
def int8_groups(draw):
    group = draw(st.sampled_from([32, 64, 128]))
    columns = group * draw(st.integers(2, 5))
    return affine_weight(draw(ROWS), columns, 8, group, draw(SCALES), draw(SEEDS))


@st.composite
def nf4_blocks(draw):
    block = draw(st.sampled_from([32, 64, 128]))
    return nf4_weight(draw(ROWS), block * draw(st.integers(1, 5)), draw(SEEDS), block)


@st.composite
def dense(draw):
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    return dense_weight(draw(ROWS), draw(st.integers(1, 200)), dtype, draw(SEEDS))


ANY_WEIGHT = int4() | asymmetric() | int8_per_channel() | int8_groups() | nf4_blocks() | dense()

KINDS = {
    "int4 groups of 32 bf16": affine_weight(37, 96, 4, 32, torch.bfloat16),
    "int4 groups of 64 fp16": affine_weight(64, 192, 4, 64, torch.float16),
    "int4 groups of 128 bf16": affine_weight(37, 256, 4, 128, torch.bfloat16),
    "int4 a scale a row, K = 40": affine_weight(37, 40, 4, None, torch.float16),
    "int4 a scale a row": affine_weight(37, 96, 4, None, torch.bfloat16),
    "int4 asymmetric, groups of 32": asymmetric_weight(37, 96, 4, 32, torch.bfloat16),
    "int4 asymmetric, groups of 128": asymmetric_weight(20, 256, 4, 128, torch.float16),
    "int4 asymmetric, a scale a row, K = 41": asymmetric_weight(9, 41, 4, None, torch.float16),
    "int8 asymmetric, groups of 32": asymmetric_weight(37, 96, 8, 32, torch.float16),
    "int8 asymmetric, groups of 128": asymmetric_weight(20, 256, 8, 128, torch.bfloat16),
    "int8 asymmetric, a scale a row, K = 41": asymmetric_weight(9, 41, 8, None, torch.bfloat16),
    "int8 a scale a row": affine_weight(100, 96, 8, None, torch.bfloat16),
    "int8 a scale a row, K = 33": affine_weight(37, 33, 8, None, torch.float16),
    "int8 groups of 32": affine_weight(37, 96, 8, 32, torch.bfloat16),
    "nf4": nf4_weight(37, 192),
    "bf16": bf16_weight(100, 96),
    "bf16, K = 33": bf16_weight(37, 33),
    "bf16, one row": bf16_weight(1, 7),
    "fp16, K = 45": dense_weight(37, 45, torch.float16),
    "fp32": dense_weight(37, 96, torch.float32),
}


@pytest.fixture(params=KINDS)
def weight(request):
    return KINDS[request.param]


def as_native(weight):
    found = CPUOps().prepare(weight)
    assert isinstance(found, NativeWeight)
    assert found.shape == weight.shape
    return found


def linear(weight, x, threads=2):
    return CPUOps(threads=threads).linear(x, weight, None)


def rounded(x, span):
    """Activations as they meet 4- and 8-bit weights: spans in units of 1/32767 of the largest."""
    columns = x.shape[1]
    runs = F.pad(x, (0, -columns % span)).unflatten(1, (-1, span))
    largest = runs.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    # In fp32, as the kernels compute it. `32767 / largest` would be 32767 times a reciprocal.
    codes = (runs * largest.new_full((), 32767).div(largest)).round()
    return (codes.double() * (largest / 32767)).flatten(1)[:, :columns]


def span_of(weight):
    """Columns that share a unit: those that share a scale, if they are not more than 128."""
    groups = weight.scale.shape[1]
    return 128 if groups == 1 else math.gcd(weight.columns // groups, 128)


def assert_same_but_for_the_order_of_addition(found, x, dense):
    """Any order of fp32 additions is this near the exact sum (and so is the reference's)."""
    exact = x.double() @ dense.double().t()
    bound = x.double().abs() @ dense.double().abs().t() * (x.shape[1] + 4) * 2.0**-24
    assert found.dtype == torch.float32
    assert ((found.double() - exact).abs() <= bound + 1e-30).all()


@given(ANY_WEIGHT, st.integers(1, 12), SEEDS)
@settings(deadline=None, max_examples=60)
@example(affine_weight(17, 32, 4, 32, torch.float16), 4, 0)
def test_products_equal_the_reference(build, weight, tokens, seed):
    n, k = weight.shape
    x = randn(tokens, k, seed=seed)
    dense = weight.rows(0, n)
    native = as_native(weight)
    found = linear(native, x)
    read = rounded(x, span_of(weight)) if isinstance(weight, AffineWeight) else x
    assert_same_but_for_the_order_of_addition(found, read, dense)
    torch.testing.assert_close(
        found, REFERENCE.linear(x, weight, None), rtol=1e-3, atol=1e-3 * k**0.5
    )


@given(ANY_WEIGHT, st.data())
@settings(deadline=None, max_examples=60)
def test_a_token_among_many_equals_the_token_alone(build, weight, data):
    """To the bit: in a batch, in a chunk of a prompt, on any number of threads."""
    native, tokens = as_native(weight), data.draw(st.integers(1, 40))
    x = randn(tokens, weight.shape[1], seed=data.draw(SEEDS))
    whole = linear(native, x, data.draw(st.sampled_from(THREADS)))
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    part = linear(native, x[start:stop], data.draw(st.sampled_from(THREADS)))
    assert torch.equal(part, whole[start:stop])


def test_a_bias_is_added_once_and_stays_as_it_is(build, weight):
    n, k = weight.shape
    x, bias = randn(2, k), randn(n, seed=1)
    before = bias.clone()
    cpu = CPUOps()
    expected = cpu.linear(x, as_native(weight), None) + before
    assert torch.equal(cpu.linear(x, as_native(weight), bias), expected)
    assert torch.equal(bias, before)


def test_the_result_does_not_depend_on_the_number_of_threads(build, weight):
    native = as_native(weight)
    x = randn(3, weight.shape[1], seed=7)
    first = linear(native, x, 1)
    for threads in THREADS * 5:
        assert torch.equal(linear(native, x, threads), first)


def test_a_row_of_a_batch_equals_the_row_alone(build, weight):
    native = as_native(weight)
    x = randn(11, weight.shape[1], seed=8)
    whole = linear(native, x, 2)
    for i in range(11):
        assert torch.equal(linear(native, x[i : i + 1], 2)[0], whole[i])


def test_activations_may_be_strided(build, weight):
    x = randn(3, 2 * weight.shape[1], seed=9)[:, ::2]
    native = as_native(weight)
    assert torch.equal(linear(native, x, 2), linear(native, x.contiguous(), 2))


def test_nan_and_infinity_come_through(build, weight):
    x = torch.ones(3, weight.shape[1])
    x[0, 0], x[1, 0] = float("nan"), float("inf")
    found = linear(as_native(weight), x, 2)
    assert found[0].isnan().all()
    assert not found[1].isfinite().any()
    assert found[2].isfinite().all()


@pytest.mark.parametrize("scale", [2.0**-24, 6e-8, 1e-5, -0.5, 65504.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_extreme_scales_are_read_exactly(build, scale, dtype):
    q = torch.arange(-8, 8, dtype=torch.int8).repeat(2)[None]
    weight = AffineWeight(affine.pack(q, 4), torch.tensor([[scale]], dtype=dtype), 4, 32)
    assert torch.equal(linear(as_native(weight), torch.eye(32), 1).t(), weight.rows(0, 1))


def test_weights_may_be_a_slice_of_a_larger_tensor(build):
    whole = bf16_weight(20, 40)
    part = DenseWeight(whole.data[3:11, 5:38])
    native = as_native(part)
    x = randn(1, 33)
    assert_same_but_for_the_order_of_addition(linear(native, x, 2), x, part.rows(0, 8))


def test_many_python_threads_call_at_once(build):
    """Each has its own weight and activations, and every result is right every time."""
    jobs = []
    for seed, weight in enumerate(KINDS.values()):
        native, x = as_native(weight), randn(2, weight.shape[1], seed=seed)
        jobs.append((native, x, linear(native, x, 1)))
    wrong = []

    def call(offset):
        for i in range(200):
            native, x, product = jobs[(i + offset) % len(jobs)]
            if not torch.equal(linear(native, x, 1 + (i + offset) % 4), product):
                wrong.append((i, offset))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@st.composite
def rows(draw):
    """Rows that one pass of the kernels takes, and rows that take several."""
    count, size = draw(st.integers(1, 60)), draw(st.integers(1, 40) | st.integers(1, 900))
    return randn(count, size, seed=draw(SEEDS)) * draw(st.sampled_from([1e-3, 1.0, 10.0]))


ROW_KERNELS = {
    "rms_norm": lambda o, x: o.rms_norm(x, randn(x.shape[-1], seed=1), 1e-5),
    "layer_norm": lambda o, x: o.layer_norm(
        x, randn(x.shape[-1], seed=1), randn(x.shape[-1], seed=2), 1e-5
    ),
    **{kind: lambda o, x, kind=kind: o.activation(x, kind) for kind in ACTIVATIONS},
    **{
        f"gated {kind}": lambda o, x, kind=kind: o.gated_activation(x, 3 * x + 1, kind)
        for kind in ACTIVATIONS
    },
}


ANY_ROW_KERNEL = st.sampled_from(list(ROW_KERNELS)).map(ROW_KERNELS.get)


@pytest.fixture(params=ROW_KERNELS)
def row_kernel(request):
    return ROW_KERNELS[request.param]


def cpu_ops(threads=1):
    return CPUOps(threads=threads)


@given(rows(), ANY_ROW_KERNEL)
@settings(deadline=None, max_examples=100)
def test_rows_equal_the_reference_but_for_rounding(build, x, row_kernel):
    before = x.clone()
    found = row_kernel(CPUOps(), x)
    torch.testing.assert_close(found, row_kernel(REFERENCE, x), rtol=2e-5, atol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 3), torch.full((2, 9), 1e4), torch.linspace(-100, 100, 401)[None]],
    ids=["zeros", "equal", "wide"],
)
def test_rows_equal_the_reference_at_the_edges(build, row_kernel, x):
    expected = row_kernel(REFERENCE, x)
    torch.testing.assert_close(row_kernel(CPUOps(), x), expected, rtol=2e-5, atol=1e-5)


@given(rows(), ANY_ROW_KERNEL, st.data())
@settings(deadline=None, max_examples=150)
def test_a_row_is_the_same_to_the_bit_beside_any_others(build, x, row_kernel, data):
    whole = row_kernel(cpu_ops(data.draw(st.sampled_from(THREADS))), x)
    start = data.draw(st.integers(0, len(x) - 1))
    stop = data.draw(st.integers(start + 1, len(x)))
    part = row_kernel(cpu_ops(data.draw(st.sampled_from(THREADS))), x[start:stop])
    assert torch.equal(part, whole[start:stop])


def test_rows_may_have_more_axes_and_be_strided(build, row_kernel):
    x = randn(4, 3, 2 * 33)
    flat = row_kernel(CPUOps(), x[..., ::2].reshape(12, 33))
    assert torch.equal(row_kernel(CPUOps(), x[..., ::2]), flat.view(4, 3, 33))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_keep_what_is_not_finite_and_keep_it_to_themselves(build, row_kernel, value):
    x = randn(3, 21)
    clean = row_kernel(CPUOps(), x)
    x[1, 13] = value
    found, expected = row_kernel(CPUOps(), x), row_kernel(REFERENCE, x)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert found[1].isfinite().all() == expected[1].isfinite().all()


@given(
    st.integers(1, 70), st.integers(1, 5), st.sampled_from([1, 3, 8, 12, 33, 64]), SEEDS, st.data()
)
@settings(deadline=None, max_examples=50)
def test_rotary_equals_the_reference_and_does_not_depend_on_other_tokens(
    build, tokens, heads, half, seed, data
):
    x = randn(tokens, heads, 2 * half, seed=seed)
    angles = randn(tokens, half, seed=seed + 1) * 10
    cos, sin = angles.cos(), angles.sin()
    whole = CPUOps().rotary(x.clone(), cos, sin)
    torch.testing.assert_close(whole, REFERENCE.rotary(x, cos, sin), rtol=1e-6, atol=1e-6)
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    part = CPUOps().rotary(x[start:stop].clone(), cos[start:stop], sin[start:stop])
    assert torch.equal(part, whole[start:stop])


def forked(call, seconds=30):
    """Run `call` in a forked child; whether it returned true before the time was over."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if call() else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
# From Python 3.12 on, forking beside other threads warns; here it is what is tested.
forks = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@needs_fork
@forks
def test_kernels_work_in_a_forked_child_and_in_the_parent_after_it(build, weight):
    native, x = as_native(weight), randn(2, weight.shape[1])
    expected = linear(native, x, 3)

    def works():
        return all(torch.equal(linear(native, x, 3), expected) for _ in range(20))

    assert forked(works)
    assert forked(lambda: works() and forked(works))
    assert works()


@needs_fork
@forks
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_forked_child_has_threads_of_its_own(build):
    native, x = as_native(bf16_weight(200, 50)), randn(1, 50)
    linear(native, x, 3)

    def count():
        return len(list(Path("/proc/self/task").iterdir()))

    def counts():
        before = count()
        linear(native, x, 3)
        return (before, count()) == (1, 3)

    assert forked(counts)


@needs_fork
@forks
def test_forks_while_other_threads_compute_disturb_neither_child_nor_parent(build):
    native, x = as_native(bf16_weight(2000, 500)), [randn(1, 500, seed=i) for i in range(5)]
    expected = [linear(native, row, 2) for row in x]
    stop, wrong = threading.Event(), []

    def compute(*turns):  # in turns, or memory used again could hold a right result by chance
        while not stop.is_set():
            wrong.extend(i for i in turns if not torch.equal(linear(native, x[i], 2), expected[i]))

    threads = [threading.Thread(target=compute, args=t, daemon=True) for t in ((0, 1), (2, 3))]
    for thread in threads:
        thread.start()
    results = [forked(lambda: torch.equal(linear(native, x[4], 2), expected[4])) for _ in range(20)]
    stop.set()
    for thread in threads:
        thread.join(30)
    assert all(results)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(affine_weight(8, 64, 4, 32, torch.float32), id="fp32 scales"),
        pytest.param(affine_weight(8, 60, 8, 20, torch.bfloat16), id="int8 groups of 20"),
        pytest.param(affine_weight(8, 48, 4, 16, torch.bfloat16), id="int4 groups of 16"),
        pytest.param(nf4_weight(8, 32), id="nf4 blocks span rows"),
        pytest.param(nf4_weight(8, 96, block_size=16), id="nf4 blocks of 16"),
        pytest.param(DenseWeight(randn(8, 64).double()), id="fp64"),
    ],
)
def test_layouts_that_the_kernels_do_not_take_go_to_the_reference(build, weight):
    cpu = CPUOps()
    assert cpu.prepare(weight) is weight
    x = randn(2, weight.shape[1])
    assert torch.equal(cpu.linear(x, weight, None), ONE_BY_ONE.linear(x, weight, None))


@pytest.mark.parametrize("what", ["packed", "scale"])
def test_affine_tensors_that_are_not_contiguous_go_to_the_reference(build, what):
    whole = affine_weight(8, 64, 4, 32, torch.bfloat16)
    tensors = {"packed": whole.packed, "scale": whole.scale}
    tensors[what] = torch.cat([tensors[what]] * 2, 1)[:, : tensors[what].shape[1]]
    weight = AffineWeight(**tensors, bits=4, columns=64)
    assert CPUOps().prepare(weight) is weight
    x = randn(1, 64)
    assert torch.equal(REFERENCE.linear(x, weight, None), REFERENCE.linear(x, whole, None))


def test_a_dense_weight_may_be_stored_transposed(build):
    weight = DenseWeight(randn(33, 20, dtype=torch.bfloat16).t())
    x = randn(2, 33)
    found = linear(as_native(weight), x)
    assert_same_but_for_the_order_of_addition(found, x, weight.rows(0, 20))


@pytest.mark.parametrize(
    "change",
    [
        {"code": torch.tensor(nf4.CODE, dtype=torch.float16)},
        {"code": torch.tensor(nf4.CODE).repeat_interleave(2)[::2]},
        {"absmax": torch.ones(24).repeat_interleave(2)[::2]},
        {"packed": torch.zeros(768, 2, dtype=torch.uint8)[:, :1]},
    ],
    ids=["fp16 code", "strided code", "strided absmax", "strided packed"],
)
def test_nf4_tensors_that_a_kernel_would_misread_go_to_the_reference(build, change):
    whole = nf4_weight(8, 192)
    parts = {"packed": whole.packed, "absmax": whole.absmax, "code": whole.code} | change
    weight = NF4Weight(**parts, shape=(8, 192), block_size=64)
    assert CPUOps().prepare(weight) is weight


def test_without_the_library_everything_goes_to_the_reference(weight, monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: None)
    cpu = CPUOps()
    prepared = cpu.prepare(weight)
    assert prepared is weight
    x = randn(2, weight.shape[1])
    assert torch.equal(cpu.linear(x, prepared, None), REFERENCE.linear(x, weight, None))


def test_the_library_says_which_variant_runs(plain_build):
    assert kernels.variant(plain_build) == "plain"
    installed, cpuinfo = find_library(), Path("/proc/cpuinfo")
    if installed is not None and cpuinfo.exists():
        flags = set(cpuinfo.read_text().split())
        assert (kernels.variant(installed) == "plain") == (not flags >= {"avx2", "fma", "f16c"})


def test_a_library_without_that_question_has_no_variant():
    assert kernels.variant(SimpleNamespace()) is None


def test_a_library_that_was_not_built_is_none(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_library.__wrapped__() is None


def test_another_device_gets_the_weight_without_kernels(build, weight):
    moved = as_native(weight).to(torch.device("cpu"))
    assert type(moved) is type(weight)
    assert torch.equal(moved.rows(0, 1), weight.rows(0, 1))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="areas are listed in /proc")
def test_repacked_weights_may_be_in_huge_pages():
    """Their area is marked so, and is not shared, which the system would not give huge pages."""
    taken = Arena().take(64)
    at, found = taken.data_ptr(), {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        area = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ", line)
        if area:
            start, stop = (int(n, 16) for n in area.groups()[:2])
            inside, permissions = start <= at < stop, area[3]
        elif inside and line.startswith("VmFlags"):
            found = {"permissions": permissions, "flags": line.split()}
    assert found["permissions"] == "rw-p"
    assert "hg" in found["flags"]


@needs_compiler
def test_the_source_compiles_without_a_warning(tmp_path):
    done = compile_c("-O1", "-shared", "-fPIC", *SOURCES, "-o", tmp_path / "kernels.so")
    assert (done.returncode, done.stderr) == (0, "")


@needs_compiler
@pytest.mark.parametrize(
    ("sanitizer", "flag"),
    [
        ("thread", "-DQINFER_PLAIN"),
        ("address,undefined", "-DQINFER_AVX2"),
        ("address,undefined", "-DQINFER_PLAIN"),
    ],
)
def test_a_sanitizer_finds_no_race_and_no_stray_access(sanitizer, flag, tmp_path):
    """Parts of the driver include the kernels. Threads do not depend on the variant, and the
    newer variants are AVX2's code but for an instruction.
    """
    program = tmp_path / "driver"
    level = "-O1" if sanitizer == "thread" else "-O0"  # compiling is what takes the time
    flags = [level, "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", flag]
    done = compile_c(*flags, *DRIVER.glob("*.c"), *PARTS, "-o", program)
    if "fsanitize" in done.stderr or "cannot find" in done.stderr:
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    assert done.returncode == 0, done.stderr
    options = "halt_on_error=1:detect_leaks=0"  # the workers never end
    environment = os.environ | {"ASAN_OPTIONS": options, "TSAN_OPTIONS": "halt_on_error=1"}
    run = subprocess.run([program], capture_output=True, text=True, env=environment, timeout=120)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("the sanitizer does not run with this kernel's address randomization")
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
