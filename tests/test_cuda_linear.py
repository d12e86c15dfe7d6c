"""Linear layers of the CUDA backend against the reference, interpreted where there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.ops.cuda import bnb, linear
from qinfer.ops.reference import ReferenceOps
from qinfer.quant import affine, nf4
from qinfer.quant.weights import AffineWeight, DenseWeight, NF4Weight
from tests import triton_interpreter

HAS_GPU = torch.cuda.is_available()
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module", params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if (request.param == "cuda") != HAS_GPU:
        pytest.skip("kernels are compiled" if HAS_GPU else "there is no GPU")
    if HAS_GPU:
        yield torch.device("cuda", 0)
    else:
        with triton_interpreter.correct_bfloat16():
            yield torch.device("cpu")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def affine_weight(n, k, bits, group, *, scales=torch.bfloat16, with_zero=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    limit = 2 ** (bits - 1)
    groups = k // (group or k)
    q = torch.randint(-limit, limit, (n, k), generator=generator).to(torch.int8)
    scale = (torch.rand(n, groups, generator=generator) + 0.1).to(scales)
    zero = torch.randint(-limit, limit, (n, groups), generator=generator).to(torch.int8)
    return AffineWeight(affine.pack(q, bits), scale, bits, k, zero if with_zero else None)


@st.composite
def affine_weights(draw, outputs):
    bits, group = draw(st.sampled_from([4, 8])), draw(st.sampled_from([32, 64, 96, 128, None]))
    columns = group * draw(st.integers(1, 640 // group)) if group else draw(st.integers(1, 640))
    return affine_weight(
        draw(st.integers(1, outputs)),
        columns,
        bits,
        group,
        scales=draw(st.sampled_from(FLOATS)),
        with_zero=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def check(y, x, weight, bias, *, rounds_weight):
    """What rounding the result, the weight where that is done, and fp32 sums account for."""
    reference = ReferenceOps(x.device, torch.float32)
    dense = weight.rows(0, weight.shape[0])
    expected = reference.linear(x.float(), weight, None if bias is None else bias.float())
    size = x.float().abs() @ dense.abs().t() + (0 if bias is None else bias.float().abs())
    unit = torch.finfo(x.dtype).eps / 2
    unit_out = torch.finfo(y.dtype).eps / 2
    bound = unit_out * expected.abs() + ((unit if rounds_weight else 0) * 1.01 + 2e-6) * size
    assert y.shape == expected.shape
    assert bool(((y.float() - expected).abs() <= bound * 1.01 + 1e-6).all())


def run(weight, x, bias, processors, out_dtype=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_processors", lambda device: processors)
        return linear.linear(x, weight, bias, out_dtype=out_dtype)


def equals_the_reference(device, weight, rows, data):
    dtype = data.draw(st.sampled_from(FLOATS))
    out_dtype = data.draw(st.sampled_from([None, torch.float32]))
    weight = weight.to(device)
    x = randn(rows, weight.columns, seed=1, dtype=dtype).to(device)
    bias = randn(weight.shape[0], seed=2, dtype=dtype).to(device)
    bias = data.draw(st.sampled_from([None, bias]))
    assert linear.supports(weight)
    y = run(weight, x, bias, data.draw(st.sampled_from([1, 132])), out_dtype)
    assert y.dtype == (out_dtype or dtype)
    rounds = rows > linear.GEMV_ROWS  # `gemm` where there are groups, and the library's product
    check(y, x, weight, bias, rounds_weight=rounds)


@given(affine_weights(30), st.integers(1, linear.GEMV_ROWS), st.data())
@settings(deadline=None, max_examples=10)
def test_few_rows_equal_the_reference(device, weight, rows, data):
    equals_the_reference(device, weight, rows, data)


@given(affine_weights(70), st.integers(linear.GEMV_ROWS + 1, 70), st.data())
@settings(deadline=None, max_examples=15)
def test_more_rows_equal_the_reference(device, weight, rows, data):
    equals_the_reference(device, weight, rows, data)


@pytest.mark.parametrize("rows", [*(tile.rows for tile in linear.TILES), 150])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_tile_equals_the_reference(device, rows, bits, group):
    """K is a multiple of each, as it is in models."""
    weight = affine_weight(150, 768, bits, group, with_zero=True).to(device)
    x = randn(rows, 768, dtype=torch.float16).to(device)
    check(run(weight, x, None, 1), x, weight, None, rounds_weight=True)


@pytest.mark.parametrize("rows", [3, 40])
def test_cards_before_8_0_take_values_one_by_one(device, monkeypatch, rows):
    monkeypatch.setattr(linear, "_has_tensor_cores_of_8", lambda device: False)
    weight = affine_weight(70, 320, 4, 64, with_zero=True).to(device)
    x = randn(rows, 320, dtype=torch.float16).to(device)
    check(run(weight, x, None, 1), x, weight, None, rounds_weight=True)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 7])
def test_few_outputs_of_many_inputs_are_cut_along_the_inputs(device, rows, bits):
    """All parts of K count, and each once, also when the last is shorter than the others."""
    weight = affine_weight(3, 32 * 141, bits, 32).to(device)
    x = randn(rows, 32 * 141, dtype=torch.bfloat16).to(device)
    bias = randn(3, seed=1, dtype=torch.bfloat16).to(device)
    for processors in (1, 2, 132):
        y = run(weight, x, bias, processors)
        check(y, x, weight, bias, rounds_weight=rows > linear.GEMV_ROWS)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [40, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_equal_the_reference(device, dtype, k, bits, monkeypatch):
    monkeypatch.setattr(linear, "FUSED_ROWS", 8)
    monkeypatch.setattr(linear, "SLAB_BYTES", 1)
    monkeypatch.setattr(linear, "_SLAB_ROWS", 16)
    group = 32 if k % 32 == 0 else None
    weight = affine_weight(20, k, bits, group, with_zero=True).to(device)
    x, bias = randn(9, k, dtype=dtype).to(device), randn(20, seed=1, dtype=dtype).to(device)
    y = linear.linear(x, weight, None)
    check(y, x, weight, None, rounds_weight=True)
    assert torch.equal(linear.linear(x, weight, bias), y + bias)
    assert torch.equal(linear.linear(x, weight, None, out_dtype=torch.float32), y.float())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [40, 1600])
def test_a_row_does_not_depend_on_the_rows_beside_it(device, bits, k):
    weight = affine_weight(8, k, bits, None, with_zero=True).to(device)
    x = randn(16, k, dtype=torch.bfloat16).to(device)
    for most in (linear.GEMV_ROWS, 16):
        whole = run(weight, x[:most], None, 132)
        for first, last in ((1, 2), (0, 1)) if most < 16 else ((3, 6), (1, 9), (1, 16)):
            assert torch.equal(run(weight, x[first:last], None, 132), whole[first:last])


def test_inputs_that_are_not_finite_stay_in_their_row(device):
    weight = affine_weight(10, 96, 4, 32).to(device)
    for rows in (2, 7):
        x = randn(rows, 96, dtype=torch.bfloat16).to(device)
        clean = run(weight, x, None, 1)
        x[1, 5] = float("nan")
        y = run(weight, x, None, 1)
        assert y[1].isnan().all()
        assert torch.equal(y[0], clean[0])
        assert torch.equal(y[2:], clean[2:])


def test_no_rows_and_strided_rows(device):
    weight = affine_weight(10, 96, 4, 32).to(device)
    x = randn(3, 192, dtype=torch.float16).to(device)
    assert linear.linear(x[:0, :96], weight, None).shape == (0, 10)
    strided = linear.linear(x[:, ::2], weight, None)
    assert torch.equal(strided, linear.linear(x[:, ::2].contiguous(), weight, None))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_zero", [False, True])
def test_joined_weights_are_one_after_the_other(bits, with_zero):
    weights = [affine_weight(n, 96, bits, 32, with_zero=with_zero, seed=n) for n in (8, 3, 5)]
    joined = linear.join(weights)
    assert joined.shape == (16, 96)
    expected = torch.cat([w.rows(0, w.shape[0]) for w in weights])
    assert torch.equal(joined.rows(0, 16), expected)


@pytest.mark.parametrize(
    "other",
    [
        affine_weight(4, 96, 8, 32),
        affine_weight(4, 96, 4, None),
        affine_weight(4, 64, 4, 32),
        affine_weight(4, 96, 4, 32, scales=torch.float16),
        affine_weight(4, 96, 4, 32, with_zero=True),
    ],
    ids=["bits", "groups", "inputs", "scales", "zero points"],
)
def test_weights_that_differ_are_not_joined(other):
    assert linear.join([affine_weight(4, 96, 4, 32), other]) is None


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(affine_weight(8, 60, 8, 20), id="groups of 20"),
        pytest.param(affine_weight(8, 48, 4, 16), id="groups of 16"),
        pytest.param(affine_weight(8, 64, 4, 32, scales=torch.float64), id="fp64 scales"),
        pytest.param(
            AffineWeight(torch.zeros(8, 16, dtype=torch.int32)[:, ::2], randn(8, 1), 4, 64),
            id="strided",
        ),
        pytest.param(DenseWeight(randn(8, 64)), id="dense"),
    ],
)
def test_layouts_that_the_kernels_would_misread_are_refused(weight):
    assert not linear.supports(weight)


def test_every_compilation_gives_all_arguments():
    listed = linear.compilations()
    assert len({compilation.name for compilation in listed}) == len(listed)
    for compilation in listed:
        constants = {k for k, v in compilation.signature.items() if v == "constexpr"}
        assert list(compilation.signature) == list(compilation.kernel.arg_names)
        assert constants == set(compilation.constants)
        assert set(compilation.aligned) <= set(compilation.signature) - constants


def nf4_weight(n, k, block_size=64):
    packed, absmax = nf4.quantize(randn(n, k), block_size)
    return NF4Weight(packed, absmax, torch.tensor(nf4.CODE), (n, k), block_size)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def any_device(request):
    if request.param == "cuda" and not HAS_GPU:
        pytest.skip("there is no GPU")
    return torch.device(request.param)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (6, 96)])
def test_nf4_equals_the_reference(any_device, n, k, rows, dtype):
    weight = nf4_weight(n, k).to(any_device)
    x = randn(rows, k, seed=1, dtype=dtype).to(any_device)
    bias = randn(n, seed=2, dtype=dtype).to(any_device)
    prepared = bnb.prepare_nf4(weight)
    assert prepared.shape == (n, k)
    assert torch.equal(prepared.rows(1, 4), weight.rows(1, 4))
    expected = ReferenceOps(any_device, dtype).linear(x, weight, bias)
    unit = torch.finfo(dtype).eps
    found = bnb.linear_nf4(x, prepared, bias)
    # A device adds in another order, which in fp32 is more than the rounding of the result.
    rtol, atol = max(4 * unit, 1e-5), max(16 * unit, 1e-5)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


class OldOperations:
    """Those of a bitsandbytes without `gemm_4bit`."""

    gemv_4bit = staticmethod(lambda *arguments: torch.ops.bitsandbytes.gemv_4bit(*arguments))
    dequantize_4bit = staticmethod(
        lambda *arguments: torch.ops.bitsandbytes.dequantize_4bit(*arguments)
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_nf4_equals_the_reference_on_an_older_bitsandbytes(any_device, rows, monkeypatch):
    prepared = bnb.prepare_nf4(nf4_weight(48, 128).to(any_device))
    x, bias = randn(rows, 128).to(any_device), randn(48, seed=1).to(any_device)
    expected = bnb.linear_nf4(x, prepared, bias)
    monkeypatch.setattr(bnb, "_operations", OldOperations)
    torch.testing.assert_close(bnb.linear_nf4(x, prepared, bias), expected, rtol=1e-5, atol=1e-5)


def test_nf4_weights_that_bitsandbytes_would_misread_are_refused():
    assert bnb.prepare_nf4(nf4_weight(8, 64, block_size=16)) is None
    assert bnb.prepare_nf4(affine_weight(8, 64, 4, 32)) is None
    whole = nf4_weight(8, 64)
    other = NF4Weight(whole.packed, whole.absmax, whole.code * 2, whole.shape, 64)
    assert bnb.prepare_nf4(other) is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_int8_equals_the_reference_but_for_rounded_activations(any_device, rows, dtype):
    weight = affine_weight(24, 96, 8, None).to(any_device)
    x = randn(rows, 96, seed=1, dtype=dtype).to(any_device)
    bias = randn(24, seed=2, dtype=dtype).to(any_device)
    prepared = bnb.prepare_int8(weight)
    assert prepared.shape == (24, 96)
    assert torch.equal(prepared.rows(2, 9), weight.rows(2, 9))
    step = x.float().abs().amax(-1, keepdim=True) / 127
    rounded = (x.float() / step).round() * step
    expected = ReferenceOps(any_device, torch.float32).linear(rounded, weight, bias.float())
    size = rounded.abs() @ weight.rows(0, 24).abs().t()
    found = bnb.linear_int8(x, prepared, bias)
    assert found.dtype == dtype
    # fp16 on the way may round an activation at the middle of two integers to the other one.
    slack = step * weight.rows(0, 24).abs().amax() * 2
    bound = torch.finfo(dtype).eps * 4 + size / 256 + slack
    assert ((found.float() - expected).abs() <= bound).all()


def test_int8_cuts_what_fp16_cannot_hold(any_device):
    prepared = bnb.prepare_int8(affine_weight(4, 32, 8, None).to(any_device))
    x = torch.full((2, 32), 1e30, dtype=torch.bfloat16, device=any_device)
    assert bnb.linear_int8(x * 0 + 1, prepared, None).isfinite().all()
    assert not bnb.linear_int8(x, prepared, None).isnan().any()


@pytest.mark.parametrize(
    "weight",
    [
        affine_weight(4, 32, 4, None),
        affine_weight(4, 64, 8, 32),
        affine_weight(4, 32, 8, None, with_zero=True),
        affine_weight(5, 32, 8, None),
        affine_weight(4, 33, 8, None),
    ],
    ids=["int4", "groups", "zero points", "odd outputs", "odd inputs"],
)
def test_int8_weights_of_other_kinds_are_refused(weight):
    assert bnb.prepare_int8(weight) is None


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 300])
@pytest.mark.parametrize("kind", ["int4", "nf4", "int8"])
def test_a_captured_call_computes_with_what_its_input_holds_at_replay(kind, rows):
    device = torch.device("cuda", 0)
    weight = affine_weight(64, 512, 8 if kind == "int8" else 4, None).to(device)
    call, prepared = {
        "int4": (linear.linear, weight),
        "nf4": (bnb.linear_nf4, bnb.prepare_nf4(nf4_weight(64, 512).to(device))),
        "int8": (bnb.linear_int8, bnb.prepare_int8(weight)),
    }[kind]
    x = torch.zeros(rows, 512, dtype=torch.bfloat16, device=device)
    call(x, prepared, None)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(x, prepared, None)
    x.copy_(randn(rows, 512))
    graph.replay()
    assert torch.equal(y, call(x, prepared, None))
