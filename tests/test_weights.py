"""Weights in memory: any rows of any format, as stored, and what cannot be loaded is named."""

import json

import bitsandbytes.functional as bnb
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from qinfer.checkpoint.safetensors import SINGLE_NAME, Checkpoint
from qinfer.errors import CheckpointError, QInferError, UnsupportedModelError
from qinfer.quant import affine, nf4
from qinfer.quant.weights import AffineWeight, DenseWeight, NF4Weight, load_weight

N, K = 6, 64
STATE = f"layer.weight.{nf4.STATE_SUFFIX}"


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def affine_tensors(bits=4, group=32, n=N, k=K, dtype=torch.bfloat16):
    q, scale = affine.quantize(normal(n, k), bits, group, dtype)
    return {
        "layer.weight_packed": affine.pack(q, bits),
        "layer.weight_scale": scale,
        "layer.weight_shape": torch.tensor([n, k]),
    }


def nf4_tensors(n=N, k=K, *, double=False, block_size=64):
    """As bitsandbytes writes them, with their state to compare with."""
    packed, state = bnb.quantize_4bit(
        normal(n, k), blocksize=block_size, quant_type="nf4", compress_statistics=double
    )
    parts = {f"layer.weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    return {"layer.weight": packed} | parts, state


def checkpoint(directory, tensors):
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / SINGLE_NAME)
    return Checkpoint(directory)


def load(directory, tensors, shape=(N, K), **options):
    return load_weight(checkpoint(directory, tensors), "layer", shape, **options)


def rows_within(data, n):
    start = data.draw(st.integers(0, n - 1))
    return start, data.draw(st.integers(start + 1, n))


def assert_rows_equal_slices(weight, whole, data):
    start, stop = rows_within(data, len(whole))
    rows = weight.rows(start, stop)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, whole[start:stop])
    assert weight.shape == tuple(whole.shape)


@settings(deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans())
def test_rows_of_dense_weights(data, dtype, strided):
    stored = normal(9, 7).to(dtype)
    weight = DenseWeight(stored.t() if strided else stored)
    assert_rows_equal_slices(weight, (stored.t() if strided else stored).float(), data)


@settings(deadline=None)
@given(st.data(), st.sampled_from([4, 8]), st.integers(1, 9), st.sampled_from([32, 96, None]))
def test_rows_of_affine_weights(data, bits, n, group):
    q, scale = affine.quantize(normal(n, 96), bits, group, torch.bfloat16)
    weight = AffineWeight(affine.pack(q, bits), scale, bits, 96)
    whole = q.float() * scale.float().repeat_interleave(group or 96, dim=1)
    assert_rows_equal_slices(weight, whole, data)


@settings(deadline=None, max_examples=300)
@given(
    st.data(),
    st.integers(1, 12),
    st.one_of(st.integers(1, 70), st.sampled_from([64, 96, 128, 192, 300])),
    st.sampled_from([32, 64, 128]),
)
def test_rows_of_nf4_weights(data, n, k, block_size):
    packed, absmax = nf4.quantize(normal(n, k), block_size)
    code = torch.tensor(nf4.CODE)
    weight = NF4Weight(packed, absmax, code, (n, k), block_size)
    whole = nf4.dequantize(packed, absmax, code, (n, k), block_size)
    assert_rows_equal_slices(weight, whole, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_load_dense(dtype, tmp_path):
    stored = normal(N, K).to(dtype)
    weight = load(tmp_path, {"layer.weight": stored})
    assert isinstance(weight, DenseWeight)
    assert torch.equal(weight.rows(0, N), stored.float())


def test_load_transposed_dense(tmp_path):
    stored = normal(K, N)
    weight = load(tmp_path, {"layer.weight": stored}, transposed=True)
    assert torch.equal(weight.rows(2, 4), stored.t()[2:4])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_load_affine(bits, group, dtype, tmp_path):
    tensors = affine_tensors(bits, group, dtype=dtype)
    weight = load(tmp_path, tensors)
    assert isinstance(weight, AffineWeight)
    assert (weight.bits, weight.columns) == (bits, K)
    q = affine.unpack(tensors["layer.weight_packed"], bits, K)
    scale = tensors["layer.weight_scale"].float().repeat_interleave(group or K, dim=1)
    assert torch.equal(weight.rows(0, N), q.float() * scale)


def test_affine_weights_are_never_transposed(tmp_path):
    assert load(tmp_path, affine_tensors(), transposed=True).shape == (N, K)


def test_affine_columns_need_not_fill_a_word(tmp_path):
    weight = load(tmp_path, affine_tensors(4, None, k=37), (N, 37))
    assert weight.rows(1, 3).shape == (2, 37)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("shape", [(N, K), (5, 40), (3, 33), (300, 128)], ids=str)
def test_load_nf4_as_bitsandbytes_wrote_it(double, block_size, shape, tmp_path):
    tensors, state = nf4_tensors(*shape, double=double, block_size=block_size)
    assert ("layer.weight.nested_absmax" in tensors) is double
    weight = load(tmp_path, tensors, shape)
    assert isinstance(weight, NF4Weight)
    expected = bnb.dequantize_4bit(tensors["layer.weight"], state)
    tolerance = 1e-6 if double else 0  # a product of three in another order
    assert torch.allclose(weight.rows(0, shape[0]), expected, rtol=tolerance, atol=0)
    assert torch.allclose(weight.rows(1, 3), expected[1:3], rtol=tolerance, atol=0)


def test_weights_move_with_all_their_tensors(tmp_path):
    dense = DenseWeight(normal(N, K))
    assert dense.to(torch.device("meta")).data.is_meta
    packed = load(tmp_path, affine_tensors()).to(torch.device("meta"))
    assert packed.packed.is_meta
    assert packed.scale.is_meta
    assert packed.shape == (N, K)
    blocks = load(tmp_path, nf4_tensors()[0]).to(torch.device("meta"))
    assert all(t.is_meta for t in (blocks.packed, blocks.absmax, blocks.code))
    assert (blocks.shape, blocks.block_size) == ((N, K), 64)


def refusal(directory, tensors, shape=(N, K)):
    with pytest.raises(QInferError) as caught:
        load(directory, tensors, shape)
    assert "\n" not in str(caught.value)
    assert "layer" in str(caught.value)
    assert caught.value.hint
    return caught.value


def assert_damaged(error, text):
    assert type(error) is CheckpointError
    assert text in str(error)
    assert "again" in error.hint


@pytest.mark.parametrize(
    "tensors",
    [{"layer.weight": normal(N, K)}, affine_tensors(), affine_tensors(8), nf4_tensors()[0]],
    ids=["dense", "int4", "int8", "nf4"],
)
@pytest.mark.parametrize("shape", [(N, K + 1), (N + 1, K), (K, N), (N // 2, K * 2)], ids=str)
def test_a_shape_that_config_does_not_imply_is_named(tensors, shape, tmp_path):
    error = refusal(tmp_path, tensors, shape)
    assert_damaged(error, f"shape {[N, K]}, config.json implies {list(shape)}")


def test_a_missing_weight_is_named(tmp_path):
    assert_damaged(refusal(tmp_path, {"other.weight": normal(N, K)}), "no tensor layer.weight")


@pytest.mark.parametrize("part", ["weight_scale", "weight_shape"])
def test_a_missing_part_of_an_affine_weight_is_named(part, tmp_path):
    tensors = affine_tensors()
    del tensors[f"layer.{part}"]
    assert_damaged(refusal(tmp_path, tensors), f"no tensor layer.{part}")


def test_activation_ordered_groups_are_refused_by_name(tmp_path):
    error = refusal(tmp_path, affine_tensors() | {"layer.weight_g_idx": torch.zeros(2)})
    assert type(error) is UnsupportedModelError
    assert "activation-ordered" in str(error)
    assert "original 16-bit" in error.hint


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [5, 16, 33])
def test_load_asymmetric_as_compressed_tensors_packs_it(bits, rows, tmp_path):
    draw = torch.Generator().manual_seed(rows)
    limit = 2 ** (bits - 1)
    q, zero = (
        torch.randint(-limit, limit, (rows, n), generator=draw, dtype=torch.int8) for n in (64, 2)
    )
    scale = torch.rand(rows, 2, generator=draw).bfloat16()
    tensors = {
        "layer.weight_packed": pack_to_int32(q, bits),
        "layer.weight_scale": scale,
        "layer.weight_zero_point": pack_to_int32(zero, bits, packed_dim=0),
        "layer.weight_shape": torch.tensor([rows, 64]),
    }
    weight = load(tmp_path, tensors, (rows, 64))
    wide_zero, wide_scale = (x.float().repeat_interleave(32, 1) for x in (zero, scale))
    expected = (q.float() - wide_zero) * wide_scale
    assert torch.equal(weight.rows(0, rows), expected)
    assert torch.equal(weight.to(torch.device("cpu")).rows(2, 4), expected[2:4])


@pytest.mark.parametrize(
    "zero",
    [
        torch.zeros(N, 2, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, 2, dtype=torch.int8),
    ],
)
def test_zero_points_that_do_not_fit_are_named(zero, tmp_path):
    error = refusal(tmp_path, affine_tensors() | {"layer.weight_zero_point": zero})
    assert_damaged(error, "weight_zero_point")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("packed", torch.zeros(N, 9, dtype=torch.int32)),
        ("packed", torch.zeros(N - 1, 8, dtype=torch.int32)),
        ("packed", torch.zeros(N * 8, dtype=torch.int32)),
        ("packed", torch.zeros(N, 8, dtype=torch.int64)),
        ("scale", torch.ones(N, 3)),
        ("scale", torch.ones(N, 0)),
        ("scale", torch.ones(N + 1, 2)),
        ("scale", torch.ones(2)),
        ("scale", torch.ones(N, 2, dtype=torch.int32)),
        ("shape", torch.tensor([N])),
        ("shape", torch.tensor(N)),
        ("shape", torch.tensor([N, K, 1])),
        ("shape", torch.tensor([N, -K])),
        ("shape", torch.tensor([N, K + 8])),
        ("shape", torch.tensor([N + 1, K])),
    ],
)
def test_affine_parts_that_do_not_fit_together_are_named(part, value, tmp_path):
    error = refusal(tmp_path, affine_tensors() | {f"layer.weight_{part}": value})
    assert_damaged(error, "do not fit together")


@pytest.mark.parametrize(
    "stored",
    [
        torch.zeros(N, K, dtype=torch.int8),
        torch.zeros(N * K // 2, 1, dtype=torch.uint8),
        torch.zeros(N),
        torch.zeros(N, K, 1),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_dense_weights_that_are_no_float_matrix_are_refused(stored, tmp_path):
    error = refusal(tmp_path, {"layer.weight": stored})
    assert type(error) is UnsupportedModelError
    assert str(stored.dtype) in str(error)
    assert "original 16-bit" in error.hint


def test_fp4_is_refused(tmp_path):
    packed, state = bnb.quantize_4bit(normal(N, K), blocksize=64, quant_type="fp4")
    parts = {f"layer.weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    error = refusal(tmp_path, {"layer.weight": packed} | parts)
    assert type(error) is UnsupportedModelError


def state(**changes):
    fields = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [N, K]} | changes
    text = json.dumps({k: v for k, v in fields.items() if v != "absent"})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def test_fp4_under_the_name_of_nf4_is_refused(tmp_path):
    error = refusal(tmp_path, nf4_tensors()[0] | {STATE: state(quant_type="fp4")})
    assert type(error) is UnsupportedModelError
    assert "fp4" in str(error)


@pytest.mark.parametrize(
    "damaged",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.tensor([255, 254], dtype=torch.uint8),
        torch.tensor(list(b"[1]"), dtype=torch.uint8),
        state(shape="absent"),
        state(shape=None),
        state(shape=[N]),
        state(shape=[N, K, 1]),
        state(shape=["6", "64"]),
        state(shape=[N, -K]),
        state(blocksize="absent"),
        state(blocksize=0),
        state(blocksize=-64),
        state(blocksize="x"),
        state(blocksize=None),
        state(quant_type="absent"),
    ],
    ids=lambda t: bytes(t.tolist())[:90],
)
def test_a_damaged_nf4_state_is_named(damaged, tmp_path):
    error = refusal(tmp_path, nf4_tensors()[0] | {STATE: damaged})
    assert_damaged(error, f"{STATE} is incomplete")


@pytest.mark.parametrize(
    "changes",
    [
        {"weight.absmax": torch.ones(5)},
        {"weight.absmax": torch.ones(7)},
        {"weight.absmax": torch.tensor(1.0)},
        {"weight.absmax": torch.ones(6, 1)},
        {"weight": torch.zeros(N * K // 2 - 1, 1, dtype=torch.uint8)},
        {"weight": torch.zeros(N * K // 2, 1, dtype=torch.bfloat16)},
        {"weight.quant_map": torch.ones(15)},
        {STATE.removeprefix("layer."): state(shape=[N, K + 2])},
        {STATE.removeprefix("layer."): state(blocksize=32)},
    ],
    ids=str,
)
def test_nf4_parts_that_do_not_fit_together_are_named(changes, tmp_path):
    tensors = nf4_tensors()[0] | {f"layer.{name}": t for name, t in changes.items()}
    assert_damaged(refusal(tmp_path, tensors), "do not fit")


@pytest.mark.parametrize("part", ["absmax", "quant_map"])
def test_a_missing_part_of_an_nf4_weight_is_named(part, tmp_path):
    tensors = nf4_tensors()[0]
    del tensors[f"layer.weight.{part}"]
    assert_damaged(refusal(tmp_path, tensors), f"no tensor layer.weight.{part}")


@pytest.mark.parametrize("part", ["nested_absmax", "nested_quant_map"])
def test_a_missing_part_of_a_double_quantized_weight_is_named(part, tmp_path):
    tensors = nf4_tensors(double=True)[0]
    del tensors[f"layer.weight.{part}"]
    assert_damaged(refusal(tmp_path, tensors), f"no tensor layer.weight.{part}")


@pytest.mark.parametrize(
    "changes",
    [
        {"layer.weight.nested_absmax": torch.ones(1)},
        {"layer.weight.nested_absmax": torch.ones(2, 1)},
        {"layer.weight.nested_quant_map": torch.ones(16)},
        {"layer.weight.absmax": torch.zeros(300, 1, dtype=torch.uint8)},
        {STATE: state(shape=[300, K], nested_blocksize=100, nested_offset=0.5)},
    ],
    ids=str,
)
def test_double_quantized_parts_that_do_not_fit_together_are_named(changes, tmp_path):
    tensors = nf4_tensors(300, double=True)[0] | changes
    assert_damaged(refusal(tmp_path, tensors, (300, K)), "do not fit together")


@pytest.mark.parametrize(
    "changes",
    [
        {"nested_offset": 0.5},
        {"nested_blocksize": 256},
        {"nested_blocksize": 0, "nested_offset": 0.5},
        {"nested_blocksize": 256, "nested_offset": None},
        {"nested_blocksize": 256, "nested_offset": "x"},
    ],
    ids=str,
)
def test_a_damaged_double_quantization_state_is_named(changes, tmp_path):
    tensors = nf4_tensors(double=True)[0] | {STATE: state(**changes)}
    assert_damaged(refusal(tmp_path, tensors), f"{STATE} is incomplete")
