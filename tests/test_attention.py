"""Attention over the paged cache: the reference against a dense computation, kernels against it."""

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qinfer.ops.cpu.ops import CPUOps
from qinfer.ops.paged import Batch, KVLayer
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.kv import BLOCK_TOKENS, KV_BITS, KVSide

REFERENCE = ReferenceOps(torch.device("cpu"), torch.float32)
FORMATS = [(32, 32), (16, 16), (8, 8), (4, 4), (8, 4), (16, 8), (4, 16)]
REACHES = [(None, 0), (1, 0), (31, 0), (32, 0), (33, 0), (40, 4), (7, 40)]


@dataclasses.dataclass
class Case:
    """Some sequences with their tokens' queries, keys and values, and blocks given out shuffled."""

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    bits: tuple[int, int] = (16, 16)
    window: int | None = None
    sinks: int = 0
    seed: int = 0
    softcap: float | None = None

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        self.q, self.k, self.v = (
            [torch.randn(n, h, self.head_dim, generator=generator) * 2 for n in self.lengths]
            for h in (self.heads, self.kv_heads, self.kv_heads)
        )
        counts = [-(-n // BLOCK_TOKENS) for n in self.lengths]
        self.blocks = sum(counts)
        free = torch.randperm(self.blocks, generator=generator).tolist()
        self.tables = [[free.pop() for _ in range(n)] for n in counts]
        self.slots = torch.randperm(len(self.lengths), generator=generator).tolist()

    def cache(self):
        keys, values = (
            KVSide.allocate(
                bits,
                is_keys=is_keys,
                heads=(self.kv_heads, self.head_dim),
                blocks=self.blocks,
                slots=len(self.lengths),
                half=torch.float16,
                device=torch.device("cpu"),
            )
            for bits, is_keys in zip(self.bits, (True, False), strict=True)
        )
        for side in (keys, values):  # what nobody has written must not matter
            for tensor in (side.data, side.scale, side.minimum, side.open):
                if tensor is not None:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 127)
        return KVLayer(keys, values, window=self.window, sinks=self.sinks)

    def run(self, ops, steps):
        """Run steps, each a list of (sequence, tokens); returns the outputs and the cache."""
        layer, done = self.cache(), [0] * len(self.lengths)
        out = [torch.full_like(q, float("nan")) for q in self.q]
        for step in steps:
            batch = Batch.of(
                [([0] * n, done[s]) for s, n in step],
                [[self.tables[s] for s, _ in step]],
                [self.slots[s] for s, _ in step],
                torch.device("cpu"),
            )
            parts = [slice(done[s], done[s] + n) for s, n in step]
            q, k, v = (
                torch.cat([x[s][part] for (s, _), part in zip(step, parts, strict=True)])
                for x in (self.q, self.k, self.v)
            )
            mixed = ops.attention(
                q, k, v, layer, batch, scale=self.head_dim**-0.5, softcap=self.softcap
            )
            for (s, n), part, piece in zip(
                step, parts, mixed.split([n for _, n in step]), strict=True
            ):
                out[s][part] = piece
                done[s] += n
        assert done == self.lengths
        return out, layer

    def at_once(self):
        return [list(enumerate(self.lengths))]

    def random_steps(self, seed):
        generator = torch.Generator().manual_seed(seed)

        def below(n):
            return int(torch.randint(n, (1,), generator=generator))

        left, steps = list(self.lengths), []
        while any(left):
            waiting = [s for s, n in enumerate(left) if n]
            chosen = [s for s in waiting if below(3)] or waiting[:1]
            step = [(s, 1 if below(2) else 1 + below(min(left[s], 70))) for s in chosen]
            for s, n in step:
                left[s] -= n
            steps.append(step)
        return steps


def dense(case, s):
    """Token by token: own block as it is in 16 bits, earlier ones through their format."""
    k, v = (x[s].half().float() if min(case.bits) < 32 else x[s] for x in (case.k, case.v))
    stored_k, stored_v = k.clone(), v.clone()
    for first in range(0, case.lengths[s] - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = slice(first, first + BLOCK_TOKENS)
        stored_k[block] = lossy(k[block].permute(1, 2, 0), case.bits[0], is_keys=True).permute(
            2, 0, 1
        )
        stored_v[block] = lossy(v[block].permute(1, 0, 2), case.bits[1], is_keys=False).permute(
            1, 0, 2
        )
    out = []
    for p in range(case.lengths[s]):
        own = p // BLOCK_TOKENS * BLOCK_TOKENS
        oldest = 0 if case.window is None else p - case.window + 1
        seen = [i for i in range(p + 1) if i >= oldest or i < case.sinks]
        keys, values = (
            torch.stack([(x if i >= own else stored)[i] for i in seen])
            for x, stored in ((k, stored_k), (v, stored_v))
        )
        group = case.heads // case.kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("hd,khd->hk", case.q[s][p], keys) * case.head_dim**-0.5
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(out)


def lossy(x, bits, *, is_keys):
    """What a format makes of a block, said once more and plainly."""
    if bits >= 16:
        return x
    if bits == 8:
        scale = (x.abs().amax(1 if is_keys else 2, keepdim=True) / 127).half().float()
        return (x / scale).round().clamp(-127, 127) * scale
    size = BLOCK_TOKENS if is_keys else max(n for n in range(2, 41, 2) if x.shape[-1] % n == 0)
    groups = x.reshape(*x.shape[:-1], -1, size)
    low = groups.amin(-1, keepdim=True).half().float()
    scale = ((groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15).half().float()
    codes = ((groups - low) / scale).round().clamp(0, 15)
    return (codes * scale + low).reshape(x.shape)


@pytest.mark.parametrize(("window", "sinks"), REACHES)
@pytest.mark.parametrize("bits", FORMATS)
def test_the_reference_is_softmax_attention_over_what_is_stored(bits, window, sinks):
    case = Case([1, 31, 32, 33, 100], bits=bits, window=window, sinks=sinks)
    for steps in (case.at_once(), case.random_steps(1)):
        out, _ = case.run(REFERENCE, steps)
        for s in range(len(case.lengths)):
            torch.testing.assert_close(out[s], dense(case, s), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "sinks"), REACHES)
@pytest.mark.parametrize("bits", FORMATS)
def test_the_kernel_computes_and_stores_what_the_reference_does(build, bits, window, sinks):
    case = Case([1, 31, 32, 33, 150], bits=bits, window=window, sinks=sinks)
    expected, cache = case.run(REFERENCE, case.random_steps(2))
    out, native = case.run(CPUOps(), case.random_steps(2))
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    for side in ("keys", "values"):
        a, b = getattr(native, side), getattr(cache, side)
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            assert torch.equal(x.nan_to_num(77), y.nan_to_num(77))


@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (4, 4)])
def test_scores_are_bounded_smoothly(build, bits, softcap):
    case = Case([1, 33, 90], bits=bits, window=40, softcap=softcap)
    expected, _ = case.run(REFERENCE, case.random_steps(5))
    out, _ = case.run(CPUOps(), case.random_steps(5))
    for s, length in enumerate(case.lengths):
        torch.testing.assert_close(expected[s], dense(case, s), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out[s], expected[s], atol=2e-5, rtol=1e-5)
        assert out[s].shape[0] == length


def test_scores_far_beyond_the_bound_do_not_overflow(build):
    case = Case([40], softcap=1.0)
    case.q[0].mul_(1e4)
    out, _ = case.run(CPUOps(), case.at_once())
    torch.testing.assert_close(out[0], dense(case, 0), atol=1e-3, rtol=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 130), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5]),
    head_dim=st.sampled_from([2, 6, 8, 20, 32, 40, 64, 80, 96]),
    bits=st.tuples(*[st.sampled_from(KV_BITS)] * 2),
    reach=st.sampled_from(REACHES),
    seed=st.integers(0, 1000),
)
@example([40, 70], 1, 48, 8, (8, 8), (None, 0), 0)
@example([40], 1, 1, 256, (4, 4), (33, 0), 0)
def test_a_token_is_the_same_to_the_bit_in_any_company(
    build, lengths, kv_heads, group, head_dim, bits, reach, seed
):
    case = Case(lengths, kv_heads * group, kv_heads, head_dim, bits, *reach, seed)
    one_by_one = [[(s, 1)] for s, n in enumerate(lengths) for _ in range(n)]
    alone, cache = case.run(CPUOps(), one_by_one)
    expected, _ = case.run(REFERENCE, case.at_once())
    for steps in (case.at_once(), case.random_steps(seed)):
        out, other = case.run(CPUOps(), steps)
        for a, b, reference in zip(out, alone, expected, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, reference, atol=1e-4, rtol=1e-4)
        assert torch.equal(other.keys.data.nan_to_num(77), cache.keys.data.nan_to_num(77))
        assert torch.equal(other.values.data.nan_to_num(77), cache.values.data.nan_to_num(77))


def test_one_by_one_the_reference_does_not_depend_on_chunks_either():
    ops = ReferenceOps(torch.device("cpu"), torch.float32, deterministic=True)
    case = Case([70, 45], bits=(8, 4))
    alone, _ = case.run(ops, [[(s, 1)] for s, n in enumerate(case.lengths) for _ in range(n)])
    for steps in (case.at_once(), case.random_steps(3)):
        out, _ = case.run(ops, steps)
        for a, b in zip(out, alone, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_number_of_threads_does_not_change_a_bit(build, threads):
    case = Case([90, 200], bits=(8, 4))
    ops = CPUOps()
    expected, _ = case.run(ops, case.at_once())
    ops._threads = threads
    out, _ = case.run(ops, case.at_once())
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (33, 0), (300, 4), (20, 270)])
@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_that_share_a_sequence_compute_what_one_does(build, threads, bits, window, sinks):
    """The last tokens come one by one, so that a sequence's 256 tokens at a time can be shared."""
    case = Case([700, 300, 20], bits=bits, window=window, sinks=sinks)
    steps = [[(s, n - 2) for s, n in enumerate(case.lengths)], *[[(0, 1), (1, 1), (2, 1)]] * 2]
    ops = CPUOps()
    ops._threads = 1
    alone, _ = case.run(ops, steps)
    expected, _ = case.run(REFERENCE, steps)
    ops._threads = threads
    for taken in (steps, case.at_once()):
        out, _ = case.run(ops, taken)
        for a, b, reference in zip(out, alone, expected, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, reference, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("at", [5, 300, 690])
def test_nan_is_not_hidden_by_tokens_far_behind_it(build, at):
    case = Case([700])
    case.k[0][at] = float("nan")
    ops = CPUOps()
    for ops._threads in (1, 4):
        out, _ = case.run(ops, [[(0, 699)], [(0, 1)]])
        assert out[0][:at].isfinite().all()
        assert out[0][at:].isnan().all()


@pytest.mark.parametrize("ops", [REFERENCE, CPUOps], ids=["reference", "kernel"])
@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("what", ["k", "v"])
def test_nan_is_not_hidden_and_stays_with_its_sequence(build, ops, bits, window, what):
    """Who sees the token that has it gets NaN, also when its block is stored in a few bits."""
    case = Case([100, 40], bits=bits, window=window)
    getattr(case, what)[0][31] = float("nan")
    ops = ops() if ops is CPUOps else ops
    for steps in (case.at_once(), case.random_steps(4)):
        out, _ = case.run(ops, steps)
        assert out[0][31 : 31 + (window or 100)].isnan().all()
        assert out[1].isfinite().all()


@pytest.mark.parametrize("value", [0.0, 1e-7, 3.0])
def test_constant_keys_and_values_are_stored_as_well_as_they_can_be(build, value):
    case = Case([40], bits=(4, 4))
    case.k[0].fill_(value)
    case.v[0].fill_(value)
    out, _ = case.run(CPUOps(), case.at_once())
    torch.testing.assert_close(out[0], torch.full_like(out[0], value), atol=1e-7, rtol=1e-3)
