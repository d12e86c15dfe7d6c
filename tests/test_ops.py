"""The reference operations against their definitions, written out, and against torch's own."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from qinfer import ops
from qinfer.config import ACTIVATIONS
from qinfer.errors import QInferError
from qinfer.ops import reference
from qinfer.ops.cpu import kernels
from qinfer.ops.cpu.ops import CPUOps
from qinfer.ops.paged import Batch, KVLayer
from qinfer.ops.reference import ReferenceOps
from qinfer.quant import affine, nf4
from qinfer.quant.kv import BLOCK_TOKENS, KVSide
from qinfer.quant.weights import AffineWeight, DenseWeight, NF4Weight

CPU = torch.device("cpu")
OPS = ReferenceOps(CPU, torch.float32)


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def attend(ops, q, k, v, *, scale=0.25, window=None):
    """Attention of all tokens of one sequence at once, its cache in fp32."""
    tokens, kv_heads, head_dim = k.shape
    count = -(-tokens // BLOCK_TOKENS)
    keys, values = (
        KVSide.allocate(
            32,
            is_keys=is_keys,
            heads=(kv_heads, head_dim),
            blocks=count,
            slots=1,
            half=torch.float16,
            device=CPU,
        )
        for is_keys in (True, False)
    )
    batch = Batch.of([([0] * tokens, 0)], [[list(range(count))]], [0], CPU)
    return ops.attention(q, k, v, KVLayer(keys, values, window=window), batch, scale=scale)


def attention_inputs(heads, kv_heads, tokens, head_dim=8):
    return (
        randn(tokens, heads, head_dim, seed=1),
        randn(tokens, kv_heads, head_dim, seed=2),
        randn(tokens, kv_heads, head_dim, seed=3),
    )


@pytest.mark.parametrize("window", [7, 8, 9, 33])
def test_a_windowed_token_stops_seeing_a_key_exactly_window_tokens_later(window):
    length, lost = 70, 3
    q, k, v = attention_inputs(6, 2, length)
    changed = v.clone()
    changed[lost] += 100
    before, after = (attend(OPS, q, k, x, window=window) for x in (v, changed))
    differs = (before != after).flatten(1).any(1).tolist()
    assert differs == [lost <= t < lost + window for t in range(length)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("tokens", [1, 17, 40, 64])
def test_attention_equals_torch_scaled_dot_product_attention(heads, kv_heads, tokens):
    q, k, v = attention_inputs(heads, kv_heads, tokens, head_dim=16)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=0.25, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(attend(OPS, q, k, v), expected)


@pytest.mark.parametrize("ops", [OPS, CPUOps()], ids=["reference", "cpu"])
def test_attention_of_large_scores_does_not_overflow(ops):
    q, k, v = attention_inputs(6, 2, 40)
    assert attend(ops, q * 1e4, k * 1e4, v, scale=1.0).isfinite().all()


def test_rotary_multiplies_pairs_as_complex_numbers_by_their_angle():
    tokens, heads, head_dim = 5, 3, 16
    x = randn(tokens, heads, head_dim)
    angles = randn(tokens, head_dim // 2, seed=1) * 10
    pairs = torch.complex(x[..., : head_dim // 2], x[..., head_dim // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(OPS.rotary(x, angles.cos(), angles.sin()), expected)


def test_rotary_makes_scores_depend_on_distance_only():
    q, k = randn(1, 1, 8, seed=1), randn(1, 1, 8, seed=2)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03])

    def at(x, position):
        angles = position * frequencies[None]
        return OPS.rotary(x, angles.cos(), angles.sin())

    scores = [(at(q, p + 5) * at(k, p)).sum() for p in (0, 1, 40)]
    torch.testing.assert_close(scores[1:], [scores[0]] * 2, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(scores[0], (at(q, 6) * at(k, 0)).sum(), atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 32), (5, 32), (4, 3, 32)], ids=str)
def test_rms_norm_equals_torch(shape):
    x, weight = randn(*shape) * 3, randn(32, seed=1)
    expected = nn.functional.rms_norm(x, (32,), weight, 1e-5)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_adds_eps_to_the_mean_square():
    x = torch.full((1, 4), 1e-3)
    found = OPS.rms_norm(x, torch.ones(4), 1e-6)
    torch.testing.assert_close(found, x / math.sqrt(1e-6 + 1e-6))


def test_layer_norm_subtracts_the_mean_and_divides_by_the_deviation():
    x, weight, bias = randn(5, 32) * 3 + 1, randn(32, seed=1), randn(32, seed=2)
    deviation = (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = (x - x.mean(-1, keepdim=True)) / deviation * weight + bias
    torch.testing.assert_close(OPS.layer_norm(x, weight, bias, 1e-5), expected)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_equals_transformers(kind):
    x = torch.linspace(-8, 8, 333)
    expected = ACT2FN[kind](x)
    torch.testing.assert_close(OPS.activation(x, kind), expected, rtol=1e-6, atol=1e-6)


def test_the_two_gelus_differ_by_more_than_the_tolerance_of_their_test():
    x = torch.linspace(-8, 8, 333)
    assert (OPS.activation(x, "gelu") - OPS.activation(x, "gelu_new")).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_activation_multiplies_and_leaves_its_arguments_alone(kind):
    gate, up = randn(3, 10, seed=1), randn(3, 10, seed=2)
    before = gate.clone(), up.clone()
    torch.testing.assert_close(OPS.gated_activation(gate, up, kind), ACT2FN[kind](gate) * up)
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


def affine_weight(n, k, bits, group, dtype):
    q, scale = affine.quantize(randn(n, k, seed=4), bits, group, dtype)
    return AffineWeight(affine.pack(q, bits), scale, bits, k)


def nf4_weight(n, k):
    packed, absmax = nf4.quantize(randn(n, k, seed=4))
    return NF4Weight(packed, absmax, torch.tensor(nf4.CODE), (n, k), 64)


WEIGHTS = {
    "int4 groups of 32 bf16": lambda: affine_weight(37, 96, 4, 32, torch.bfloat16),
    "int4 groups of 128 fp16": lambda: affine_weight(37, 256, 4, 128, torch.float16),
    "int4 a scale a row fp32": lambda: affine_weight(37, 40, 4, None, torch.float32),
    "int8 a scale a row, odd K": lambda: affine_weight(37, 33, 8, None, torch.bfloat16),
    "int8 groups of 32": lambda: affine_weight(37, 96, 8, 32, torch.float16),
    "nf4": lambda: nf4_weight(37, 128),
    "nf4 blocks across rows": lambda: nf4_weight(37, 33),
    "bf16": lambda: DenseWeight(randn(37, 33, dtype=torch.bfloat16)),
    "fp16 transposed": lambda: DenseWeight(randn(33, 37, dtype=torch.float16).t()),
    "fp32": lambda: DenseWeight(randn(37, 33)),
}


@pytest.fixture(params=WEIGHTS)
def weight(request):
    return WEIGHTS[request.param]()


@pytest.mark.parametrize("block", [1, 200, 2**20])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_equals_a_dense_layer_on_the_dequantized_weight(weight, biased, block, monkeypatch):
    monkeypatch.setattr(reference, "_BLOCK_WEIGHTS", block)
    n, k = weight.shape
    x, bias = randn(5, k, seed=5), randn(n, seed=6) if biased else None
    expected = F.linear(x, weight.rows(0, n), bias)
    found = OPS.linear(x, weight, bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 1


def test_a_weight_gives_the_same_rows_one_at_a_time(weight):
    n = weight.shape[0]
    whole = weight.rows(0, n)
    assert whole.dtype == torch.float32
    assert whole.shape == weight.shape
    assert torch.equal(torch.cat([weight.rows(i, i + 1) for i in range(n)]), whole)
    assert torch.equal(weight.rows(3, 20), whole[3:20])


def test_linear_leaves_its_arguments_alone(weight):
    n, k = weight.shape
    x, bias = randn(2, k), randn(n)
    before = x.clone(), bias.clone(), weight.rows(0, n).clone()
    OPS.linear(x, weight, bias)
    assert torch.equal(x, before[0])
    assert torch.equal(bias, before[1])
    assert torch.equal(weight.rows(0, n), before[2])


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embedding_looks_up_rows_in_the_dtype_of_the_activations(table_dtype, dtype):
    table = randn(11, 6, dtype=table_dtype)
    ids = torch.tensor([3, 3, 0, 10])
    found = ReferenceOps(CPU, dtype).embedding(table, ids)
    assert found.dtype == dtype
    assert torch.equal(found, torch.stack([table[i].to(dtype) for i in ids.tolist()]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
class TestSixteenBitActivations:
    def test_stay_in_their_dtype_and_near_the_fp32_result(self, dtype):
        half = ReferenceOps(CPU, dtype)
        x = randn(4, 96, dtype=dtype)
        weight = affine_weight(37, 96, 4, 32, torch.bfloat16)
        vectors = randn(96, seed=1), randn(96, seed=2)
        bias = randn(37, seed=3, dtype=dtype)
        heads, cos, sin = x.view(4, 6, 16), randn(4, 8, seed=1).cos(), randn(4, 8, seed=1).sin()
        k, v = randn(4, 2, 16, seed=5, dtype=dtype), randn(4, 2, 16, seed=6, dtype=dtype)
        calls = {
            "rms_norm": lambda o, c: o.rms_norm(c(x), vectors[0], 1e-5),
            "layer_norm": lambda o, c: o.layer_norm(c(x), *vectors, 1e-5),
            "linear": lambda o, c: o.linear(c(x), weight, c(bias)),
            "rotary": lambda o, c: o.rotary(c(heads), cos, sin),
            "attention": lambda o, c: attend(o, c(heads), c(k), c(v), window=3),
            "activation": lambda o, c: o.activation(c(x), "gelu_new"),
            "gated_activation": lambda o, c: o.gated_activation(c(x), c(x), "silu"),
        }
        for name, call in calls.items():
            found = call(half, lambda t: t)
            expected = call(OPS, torch.Tensor.float)
            assert found.dtype == dtype, name
            torch.testing.assert_close(
                found.float(), expected, rtol=0.03, atol=0.1, msg=lambda m, n=name: f"{n}: {m}"
            )

    def test_logits_are_fp32(self, dtype):
        head = affine_weight(37, 96, 8, None, torch.bfloat16)
        logits = ReferenceOps(CPU, dtype).logits(randn(2, 96, dtype=dtype), head)
        assert logits.dtype == torch.float32
        assert logits.shape == (2, 37)

    def test_norms_compute_in_fp32(self, dtype):
        """The square of 1000 is beyond fp16, and 96 of them sum to less than bf16 resolves."""
        x = torch.full((1, 96), 1000.0, dtype=dtype)
        found = ReferenceOps(CPU, dtype).rms_norm(x, torch.ones(96), 1e-6)
        assert found.tolist() == [[1.0] * 96]


def test_the_cpu_computes_in_fp32():
    assert isinstance(ops.select("cpu"), CPUOps)
    assert ops.select("cpu").dtype == torch.float32
    assert ops.select("cpu").device == CPU


def test_cuda_without_a_device_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(ops.select("auto"), CPUOps)
    with pytest.raises(QInferError, match="no CUDA device") as caught:
        ops.select("cuda")
    assert "--device" in caught.value.hint


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_step_keeps_torch_to_one_thread_and_gives_them_back(
    two_threads, has_kernels, monkeypatch
):
    """Unless it is torch that computes, and there is something to compute."""
    monkeypatch.setattr(kernels, "library", lambda: object() if has_kernels else None)
    cpu = CPUOps()
    with cpu.forward_pass(1):
        assert torch.get_num_threads() == 1
        with cpu.forward_pass(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with cpu.forward_pass(100):
        assert torch.get_num_threads() == (1 if has_kernels else 2)
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), cpu.forward_pass(1):
        _ = 1 / 0
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["linear", "rms_norm", "layer_norm", "silu", "gelu", "attention"])
def test_a_token_alone_is_the_same_to_the_bit_where_that_is_asked_for(name):
    one_by_one = ReferenceOps(CPU, torch.float32, deterministic=True)
    x, weight, vectors = randn(40, 96), affine_weight(37, 96, 4, 32, torch.bfloat16), randn(2, 96)
    q, k, v = attention_inputs(6, 2, 40)
    call = {
        "linear": lambda o, n: o.linear(x[:n], weight, None),
        "rms_norm": lambda o, n: o.rms_norm(x[:n], vectors[0], 1e-5),
        "layer_norm": lambda o, n: o.layer_norm(x[:n], *vectors, 1e-5),
        "silu": lambda o, n: o.activation(x[:n], "silu"),
        "gelu": lambda o, n: o.activation(x[:n], "gelu"),
        "attention": lambda o, n: attend(o, q[:n], k[:n], v[:n]),
    }[name]
    whole = call(one_by_one, 40)
    for n in (1, 2, 3, 17, 33):
        assert torch.equal(call(one_by_one, n), whole[:n])
    torch.testing.assert_close(whole, call(OPS, 40), rtol=1e-5, atol=1e-5)


def test_triton_is_not_imported_where_it_is_not_used():
    code = "import qinfer_cli.main, qinfer.ops, sys; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
