"""The kernels over rows against the reference operations: interpreted, or on a GPU if there is one.

Triton's interpreter rounds to bf16 by cutting off, a GPU to the nearest: tolerances cover both.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.config import ACTIVATIONS
from qinfer.ops.block import Norm
from qinfer.ops.reference import ReferenceOps

pytest.importorskip("triton", reason="Triton is not installed")

from qinfer.ops.cuda import rows

# Numbers that overflow are part of the tests; numpy, which computes for the interpreter, warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = st.sampled_from(sorted(TOLERANCE, key=str))
SEEDS = st.integers(0, 2**31)


@pytest.fixture(
    scope="module",
    params=[pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"],
)
def device(request):
    """A GPU if there is one; else a CPU, where kernels are interpreted."""
    return torch.device(request.param)


def randn(*shape, seed, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 3).to(device, dtype)


def a_norm(size, device, *, bias, seed=0, eps=1e-5):
    weight = randn(size, seed=seed + 1, device=device)
    return Norm(weight, randn(size, seed=seed + 2, device=device) if bias else None, eps)


def reference_norm(x, norm):
    """fp32."""
    ops = ReferenceOps(x.device, torch.float32)
    if norm.bias is None:
        return ops.rms_norm(x.float(), norm.weight, norm.eps)
    return ops.layer_norm(x.float(), norm.weight, norm.bias, norm.eps)


def assert_near(found, expected, dtype, atol=2e-6):
    """Equal to an fp32 tensor, as far as fp32 sums and then rounding to `dtype` allow."""
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=atol)


def check_add_norm(device, tokens, hidden, delta_dtype, dtype, *, bias, seed=0):
    x = randn(tokens, hidden, seed=seed, device=device)
    delta = None
    expected_sum = x.clone()
    if delta_dtype is not None:
        delta = randn(tokens, hidden, seed=seed + 3, device=device, dtype=delta_dtype)
        expected_sum += delta.float()
    norm = a_norm(hidden, device, bias=bias, seed=seed)
    found = rows.add_norm(x, delta, norm, dtype=dtype)
    assert torch.equal(x, expected_sum)
    assert_near(found, reference_norm(x, norm), dtype)


@settings(deadline=None, max_examples=21)
@given(
    tokens=st.integers(0, 5),
    hidden=st.integers(1, 1200),
    delta_dtype=st.none() | DTYPES,
    dtype=DTYPES,
    bias=st.booleans(),
    seed=SEEDS,
)
def test_add_norm_adds_in_place_and_equals_the_reference(
    device, tokens, hidden, delta_dtype, dtype, bias, seed
):
    check_add_norm(device, tokens, hidden, delta_dtype, dtype, bias=bias, seed=seed)


@pytest.mark.parametrize("bias", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("hidden", [4096, 5000, rows.LARGEST_ROW])
def test_add_norm_of_large_rows(device, hidden, bias):
    check_add_norm(device, 2, hidden, torch.bfloat16, torch.float16, bias=bias)


@pytest.mark.parametrize("transposed", [False, True])
def test_add_norm_in_rows_that_are_apart(device, transposed):
    wide = randn(4, 100, seed=0, device=device)
    before, x = wide.clone(), wide[:, 10:90]
    delta = randn(4, 120, seed=1, device=device)[:, 3:83]
    if transposed:
        delta = delta.t().contiguous().t()
    norm = a_norm(80, device, bias=False)
    expected = before.clone()
    expected[:, 10:90] += delta
    assert_near(
        rows.add_norm(x, delta, norm, dtype=torch.float32),
        reference_norm(expected[:, 10:90], norm),
        torch.float32,
    )
    assert torch.equal(wide, expected)


def test_what_add_norm_cannot_do_is_an_error(device):
    x = randn(2, rows.LARGEST_ROW + 1, seed=0, device=device)
    norm = a_norm(rows.LARGEST_ROW + 1, device, bias=False)
    with pytest.raises(ValueError, match="a norm takes 16384"):
        rows.add_norm(x, None, norm, dtype=torch.float32)
    with pytest.raises(ValueError, match="x must be fp32"):
        rows.add_norm(x[:, :8].half(), None, norm, dtype=torch.float32)
    with pytest.raises(ValueError, match="in rows"):
        rows.add_norm(x[:, :8].t(), None, norm, dtype=torch.float32)
    with pytest.raises(ValueError, match="delta is"):
        rows.add_norm(x[:, :8], x[:1, :8], norm, dtype=torch.float32)


@settings(deadline=None, max_examples=21)
@given(
    leading=st.lists(st.integers(1, 4), max_size=3),
    size=st.integers(1, 300),
    dtype=DTYPES,
    bias=st.booleans(),
    seed=SEEDS,
)
def test_norm_equals_the_reference(device, leading, size, dtype, bias, seed):
    x = randn(*leading, size, seed=seed, device=device, dtype=dtype)
    norm = a_norm(size, device, bias=bias, seed=seed)
    found = rows.norm(x, norm)
    assert found.shape == x.shape
    assert_near(found, reference_norm(x, norm), dtype)


@settings(deadline=None, max_examples=10)
@given(
    tokens=st.integers(0, 6),
    heads=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    head_dim=st.sampled_from([8, 64, 96, 128]),
    seed=SEEDS,
)
def test_norm_of_heads_that_are_part_of_a_projection(device, tokens, heads, head_dim, seed):
    qkv = randn(tokens, sum(heads) * head_dim, seed=seed, device=device, dtype=torch.float16)
    norm = a_norm(head_dim, device, bias=False)
    parts = qkv.split_with_sizes([n * head_dim for n in heads], dim=-1)
    for part, n in zip(parts, heads, strict=True):
        x = part.view(tokens, n, head_dim)
        assert_near(rows.norm(x, norm), reference_norm(x, norm), torch.float16)


def test_norm_of_every_second_head(device):
    x, norm = randn(3, 6, 64, seed=0, device=device)[:, 1::2], a_norm(64, device, bias=False)
    assert_near(rows.norm(x, norm), reference_norm(x, norm), torch.float32)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (5,)], ids=str)
def test_norm_of_any_layout(device, shape):
    norm = a_norm(5, device, bias=True)
    x = randn(*shape, seed=0, device=device)
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert_near(rows.norm(turned, norm), reference_norm(x, norm), torch.float32)


def test_a_row_does_not_depend_on_its_neighbours(device):
    norm = a_norm(96, device, bias=True)
    x = randn(9, 96, seed=0, device=device, dtype=torch.bfloat16)
    whole = rows.norm(x, norm), rows.activation(x, "gelu")
    for i in range(len(x)):
        assert torch.equal(rows.norm(x[i : i + 1], norm), whole[0][i : i + 1])
        assert torch.equal(rows.activation(x[i : i + 1], "gelu"), whole[1][i : i + 1])


@pytest.mark.parametrize("kind", ACTIVATIONS)
@settings(deadline=None, max_examples=7)
@given(tokens=st.integers(0, 4), size=st.integers(1, 2500), dtype=DTYPES, seed=SEEDS)
def test_activations_equal_the_reference(device, kind, tokens, size, dtype, seed):
    both = randn(tokens, 2 * size, seed=seed, device=device, dtype=dtype)
    gate, up = both.chunk(2, dim=-1)
    before, ops = both.clone(), ReferenceOps(device, torch.float32)
    found = rows.gated_activation(gate, up, kind)
    # 1 + erf(x) of a negative x keeps few digits, here as in the reference
    expected = ops.gated_activation(gate.float(), up.float(), kind)
    assert_near(found, expected, dtype, atol=1e-5)
    assert_near(rows.activation(both, kind), ops.activation(both.float(), kind), dtype, atol=1e-5)
    assert torch.equal(both, before)


def test_gate_and_up_in_rows_that_are_differently_apart(device):
    gate, up = randn(3, 50, seed=0, device=device)[:, :40], randn(40, 3, seed=1, device=device).t()
    ops = ReferenceOps(device, torch.float32)
    for other in (up, randn(3, 90, seed=2, device=device)[:, 30:70]):
        expected = ops.gated_activation(gate, other, "silu")
        assert_near(rows.gated_activation(gate, other, "silu"), expected, torch.float32, atol=1e-5)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_numbers_without_end_are_those_of_the_reference(device, kind):
    special = [float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e4, -1e4, 0.0, 1e-40]
    x = torch.tensor(special, device=device)
    expected = ReferenceOps(device, torch.float32).activation(x, kind)
    torch.testing.assert_close(rows.activation(x, kind), expected, equal_nan=True)
    gated = rows.gated_activation(torch.ones_like(x), x, kind)
    assert gated.isnan().tolist() == x.isnan().tolist()


def test_gate_and_up_of_different_shapes_are_an_error(device):
    x = randn(2, 8, seed=0, device=device)
    with pytest.raises(ValueError, match="up is"):
        rows.gated_activation(x, x[:1], "silu")


@pytest.mark.gpu
def test_all_of_it_can_be_captured_in_a_graph():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    device = torch.device("cuda")
    x, delta = (randn(2, 256, seed=seed, device=device) for seed in (0, 1))
    norm = a_norm(256, device, bias=False)

    def step(x):
        y = rows.norm(rows.add_norm(x, delta, norm, dtype=torch.float32), norm)
        gated = rows.gated_activation(*y.chunk(2, dim=-1), "silu")
        return rows.activation(gated, "gelu")

    expected = step(x.clone())  # compiles, which a capture must not
    inside, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(inside)
    inside.copy_(x)
    graph.replay()
    assert torch.equal(found, expected)
