"""The CUDA kernels for attention equal the reference: in Triton's interpreter, or on a device."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qinfer.ops.attention import paged_attention
from qinfer.ops.block import Norm
from qinfer.ops.paged import Batch
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.kv import KV_BITS
from tests.test_attention import FORMATS, REACHES, Case

pytest.importorskip("triton")

from qinfer.ops.cuda import attention as cuda
from qinfer.ops.cuda.attention_launches import Preparation

ON_DEVICE = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu", id="interpreted", marks=pytest.mark.skipif(ON_DEVICE, reason="there is a device")
    ),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not ON_DEVICE, reason="there is no device")],
    ),
]
CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return torch.device(request.param)


class Operations:
    """`attention` by the kernels or the reference, taking and returning tensors on the CPU."""

    def __init__(self, device=None, dtype=torch.float32):
        self.device, self.dtype = device, dtype

    def attention(self, q, k, v, layer, batch, **options):
        if self.device is None:
            return paged_attention(q, k, v, layer, batch, **options)
        joint = torch.cat([x.flatten(1) for x in (q, k, v)], 1).to(self.device, self.dtype)
        views = joint.split([x[0].numel() for x in (q, k, v)], 1)
        q, k, v = (y.view(x.shape) for x, y in zip((q, k, v), views, strict=True))
        there = moved(layer, self.device)
        batch = moved(batch, self.device)
        out = cuda.attention(q, k, v, there, batch, **options)
        for side in ("keys", "values"):
            put_back(getattr(layer, side), getattr(there, side))
        return out.to(CPU, torch.float32)


def moved(thing, device):
    """A dataclass of tensors, of such and of tuples of them on a device."""
    if isinstance(thing, torch.Tensor):
        return thing.to(device)
    if isinstance(thing, tuple):
        return tuple(moved(x, device) for x in thing)
    if not dataclasses.is_dataclass(thing):
        return thing
    fields = (field.name for field in dataclasses.fields(thing))
    return type(thing)(**{name: moved(getattr(thing, name), device) for name in fields})


def put_back(side, there):
    for tensor, changed in zip(
        (*side.tensors(), side.open), (*there.tensors(), there.open), strict=True
    ):
        if tensor is not None:
            tensor.copy_(changed)


def assert_same_cache(a, b):
    for side in ("keys", "values"):
        for x, y in zip(getattr(a, side).tensors(), getattr(b, side).tensors(), strict=True):
            assert torch.equal(x.nan_to_num(77), y.nan_to_num(77))


def assert_like_the_reference(case, steps, device, dtype=torch.float32, softcap=None):
    for name in ("q", "k", "v"):
        setattr(case, name, [x.to(dtype).float() for x in getattr(case, name)])
    case.softcap = softcap
    expected, cache = case.run(Operations(), steps)
    out, other = case.run(Operations(device, dtype), steps)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert_same_cache(other, cache)


@pytest.mark.parametrize(("bits", "reach"), list(zip(FORMATS, REACHES, strict=True)))
def test_prompts_decoding_and_mixed_steps_equal_the_reference(device, bits, reach):
    case = Case([65, 36, 1], 2, 1, 16, bits, *reach)
    steps = [[(0, 62), (1, 31)], [(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 4)], [(0, 1)]]
    assert_like_the_reference(case, steps, device)


def test_bfloat16_activations_over_a_cache_in_float16(device):
    case = Case([34], 2, 1, 16, (8, 16))
    assert_like_the_reference(case, [[(0, 31)], [(0, 1)], [(0, 2)]], device, torch.bfloat16)


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=2),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 8)),
    head_dim=st.sampled_from([2, 6, 20, 32, 64, 74, 80, 96]),
    bits=st.tuples(*[st.sampled_from(KV_BITS)] * 2),
    reach=st.sampled_from(REACHES),
    numbers=st.tuples(
        st.sampled_from([torch.float32, torch.float16]), st.sampled_from([None, 1.0, 30.0])
    ),
    seed=st.integers(0, 1000),
)
@example([40], (1, 1), 256, (4, 4), (33, 0), (torch.float16, None), 0)
@example([40, 70], (1, 17), 8, (8, 8), (None, 0), (torch.float32, None), 0)
def test_any_shape_equals_the_reference(
    device, lengths, heads, head_dim, bits, reach, numbers, seed
):
    """`heads` are those of keys, and of queries to each of them."""
    case = Case(lengths, heads[0] * heads[1], heads[0], head_dim, bits, *reach, seed)
    assert_like_the_reference(case, random_steps(lengths, seed), device, *numbers)


def random_steps(lengths, seed):
    """A few: prompts in up to two pieces, some tokens one by one, some in company of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    cuts = [int(torch.randint(n, (1,), generator=generator)) for n in lengths]
    pieces = [
        [cut, min(n - cut, 1), max(n - cut - 2, 0)] for n, cut in zip(lengths, cuts, strict=True)
    ]
    pieces = [[*p, n - sum(p)] for n, p in zip(lengths, pieces, strict=True)]
    steps = [[(s, p[i]) for s, p in enumerate(pieces) if p[i]] for i in range(4)]
    return [step for step in steps if step]


class AfterPrompts(Operations):
    """Leaves prompts, which take the interpreter long, to the reference."""

    def attention(self, q, k, v, layer, batch, **options):
        if batch.longest > 40:
            return Operations().attention(q, k, v, layer, batch, **options)
        return super().attention(q, k, v, layer, batch, **options)


@pytest.mark.parametrize(
    ("bits", "window", "sinks"),
    [((16, 16), None, 0), ((8, 8), 300, 0), ((4, 4), None, 0), ((8, 4), 33, 40)],
)
def test_decoding_over_several_splits_equals_the_reference(device, bits, window, sinks):
    case = Case([600, 290, 3], 2, 1, 8, bits, window, sinks)
    steps = [[(0, 598), (1, 287)], [(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 2), (2, 2)]]
    expected, cache = case.run(Operations(), steps)
    out, other = case.run(AfterPrompts(device), steps)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert_same_cache(other, cache)


@pytest.mark.parametrize(("sinks", "hidden"), [(0, slice(0, 4)), (5, slice(1, 4))])
def test_blocks_that_no_query_sees_are_not_read(device, sinks, hidden):
    class Poisoned(AfterPrompts):
        def attention(self, q, k, v, layer, batch, **options):
            if batch.longest < 40:
                for side in (layer.keys, layer.values):
                    side.data[batch.tables[0][0, hidden]] = float("nan")
            return super().attention(q, k, v, layer, batch, **options)

    case = Case([195], 2, 1, 16, window=33, sinks=sinks)
    steps = [[(0, 190)], [(0, 1)], [(0, 4)]]
    expected, _ = case.run(Operations(), steps)
    out, _ = case.run(Poisoned(device), steps)
    torch.testing.assert_close(out[0], expected[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
def test_a_decoded_token_is_the_same_to_the_bit_in_any_company(device, bits):
    """Alone, beside one with a longer table, and beside a prompt."""
    case = Case([40, 300, 70], 2, 1, 16, bits)
    kernels = AfterPrompts(device)
    before = [(0, 38), (1, 298), (2, 60)]
    together, _ = case.run(kernels, [before, [(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 1), (2, 9)]])
    alone, _ = case.run(kernels, [before, [(0, 1)], [(0, 1)], [(1, 1)], [(1, 1)], [(2, 10)]])
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])


@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
def test_segments_that_pad_a_batch_harm_nobody(device, bits):
    """Twice the same dummy, with a block and a slot of its own that hold NaN."""
    case = Case([33, 34, 1], 2, 1, 16, bits)
    steps = [[(0, 31), (1, 32)], [(0, 1), (1, 1)], [(0, 1), (1, 1)]]
    expected, cache = case.run(Operations(), [*steps, [(2, 1)]])

    class Padded(Operations):
        def attention(self, q, k, v, layer, batch, **options):
            if batch.longest > 1:
                return super().attention(q, k, v, layer, batch, **options)
            starts, table = batch.starts.tolist(), batch.tables[0].tolist()
            q, k, v = (torch.cat((x, x.new_zeros(2, *x.shape[1:]))) for x in (q, k, v))
            padded = Batch.of(
                [*(([0], start) for start in starts), ([0], 0), ([0], 0)],
                [[*table, case.tables[2], case.tables[2]]],
                [*batch.slots.tolist(), case.slots[2], case.slots[2]],
                CPU,
            )
            return super().attention(q, k, v, layer, padded, **options)[:-2]

    out, other = case.run(Padded(device), [*steps, [(2, 1)]])
    for a, b in zip(out[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    dummy = case.tables[2]
    for side in ("keys", "values"):
        for tensor in (*getattr(other, side).tensors(), *getattr(cache, side).tensors()):
            tensor[dummy] = 0
    assert_same_cache(other, cache)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, of Triton's interpreter
@pytest.mark.parametrize(("bits", "window"), [((16, 16), None), ((8, 8), 3), ((4, 4), None)])
@pytest.mark.parametrize("what", ["k", "v"])
def test_nan_is_not_hidden_and_stays_with_its_sequence(device, bits, window, what):
    case = Case([67, 20], 1, 1, 16, bits, window)
    getattr(case, what)[0][31] = float("nan")
    mixed = [[(0, 31), (1, 18)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 34)]]
    for steps in (case.at_once(), mixed):
        out, cache = case.run(Operations(device), steps)
        assert out[0][31 : 31 + (window or 100)].isnan().all()
        assert out[1].isfinite().all()
        assert_same_cache(cache, case.run(Operations(), steps)[1])


@pytest.mark.parametrize("value", [0.0, 1e-7, 3.0])
@pytest.mark.parametrize("bits", [8, 4])
def test_constant_keys_and_values_are_stored_as_the_reference_does(device, bits, value):
    case = Case([33], 1, 1, 16, (bits, bits))
    case.k[0].fill_(value)
    case.v[0].fill_(value)
    assert_like_the_reference(case, case.at_once(), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [6, 64, 80])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("normalizes", [True, False])
def test_heads_are_prepared_as_the_reference_does(device, dtype, head_dim, rotates, normalizes):
    q, k, _, preparation = prepared(2, (3, 1, head_dim), dtype, rotates, normalizes)
    expected = reference_preparation(q, k, preparation)
    q, k = q.to(device), k.to(device)
    cuda.rotate(q, k, moved(preparation, device))
    for a, b in zip((q, k), expected, strict=True):
        torch.testing.assert_close(a.to(CPU), b, **close(dtype))


@pytest.mark.parametrize(
    ("bits", "dtype"), [*((bits, torch.float16) for bits in FORMATS), ((32, 32), torch.float32)]
)
def test_a_decode_step_in_one_equals_its_parts(device, bits, dtype):
    case = Case([64, 34], 6, 2, 80, bits)
    _, layer = case.run(Operations(), [[(0, 63), (1, 33)], [(0, 1), (1, 1)]])
    q, k, v, preparation = prepared(2, (6, 2, 80), dtype, True, True)
    batch = Batch.of([([0], 63), ([0], 33)], [case.tables], case.slots, CPU)
    expected_cache = copy.deepcopy(layer)
    turned = reference_preparation(q, k, preparation)
    expected = paged_attention(*turned, v, expected_cache, batch, scale=0.1, softcap=20.0)
    there = moved(layer, device)
    q, k, v = (x.to(device) for x in (q, k, v))
    out = cuda.decode_attention(
        *(q, k, v, there, moved(batch, device)),
        preparation=moved(preparation, device),
        scale=0.1,
        softcap=20.0,
    )
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.to(CPU), expected, atol=tolerance, rtol=tolerance)
    if bits[0] >= 16:
        block = case.tables[1][1]
        written = there.keys.data[block, ..., 1].to(CPU, dtype)
        torch.testing.assert_close(written, turned[1][1].to(written.dtype), **close(torch.float16))


def prepared(tokens, shape, dtype, rotates, normalizes):
    """Heads as views of one tensor, and what to do with them."""
    heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    parts = joint.split([n * head_dim for n in (heads, kv_heads, kv_heads)], 1)
    q, k, v = (part.view(tokens, -1, head_dim) for part in parts)
    angles = torch.rand(tokens, head_dim // 2, generator=generator) * 6
    norms = [Norm(torch.rand(head_dim, generator=generator) + 0.5, None, 1e-5) for _ in range(2)]
    rotation = (angles.cos(), angles.sin()) if rotates else None
    return q, k, v, Preparation(rotation, *(norms if normalizes else ()))


def reference_preparation(q, k, preparation):
    ops = ReferenceOps(CPU, q.dtype)
    if preparation.q_norm is not None:
        q = ops.rms_norm(q, preparation.q_norm.weight, preparation.q_norm.eps)
        k = ops.rms_norm(k, preparation.k_norm.weight, preparation.k_norm.eps)
    if preparation.rotation is not None:
        q, k = ops.rotary(q, *preparation.rotation), ops.rotary(k, *preparation.rotation)
    return q.clone(), k.clone()


def close(dtype):
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    return {"atol": tolerance, "rtol": tolerance}


def test_what_is_compiled_has_all_arguments_in_order():
    names = set()
    for one in cuda.compilations():
        assert list(one.signature) == list(one.kernel.arg_names)
        assert {k for k, kind in one.signature.items() if kind == "constexpr"} == set(one.constants)
        assert {k for k, kind in one.signature.items() if kind[0] == "*"} <= set(one.aligned)
        names.add(one.name)
    assert len(names) == len(cuda.compilations())
