"""A prompt gets the same tokens alone and in any company, and the same logits to the bit."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from qinfer import ops
from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.cache.tables import Reach
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig, read_json
from qinfer.engine.assembly import SINK_TOKENS
from qinfer.engine.engine import Engine
from qinfer.models.decoder import Decoder
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.kv import KV_BITS, KVFormat
from qinfer.sampling import SamplingParams

CPU = torch.device("cpu")
LAYERS = 3
PREFIX = [(i * i + 7) % 250 for i in range(70)]
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.3, no_repeat_ngram_size=3),
    SamplingParams(temperature=1.5, top_p=None, seed=1),
    SamplingParams(temperature=1.0, top_k=40, repetition_penalty=1.2, seed=2),
]


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder with the cache's formats per layer and what happens at the end of the context."""

    decoder: Decoder
    formats: tuple[KVFormat, ...]
    policy: str = "stop"
    context_tokens: int = 120

    def engine(self, *, max_sequences=1, step_tokens=256, spare_blocks=100):
        """An engine with room for one sequence, and so many blocks more."""
        step_tokens = max(step_tokens, max_sequences)
        sinks = SINK_TOKENS if self.policy == "sinks" else 0
        reach = None if self.policy == "stop" else Reach(self.context_tokens - sinks, sinks)
        layout = CacheLayout.of(self.decoder.config, self.formats, context=reach)
        longest = self.context_tokens if self.policy == "stop" else 1000
        blocks = layout.sequence_blocks(longest, step_tokens)
        return Engine(
            self.decoder,
            PagedCache(
                layout,
                [n + spare_blocks for n in blocks],
                max_sequences,
                half=torch.float16,
                device=CPU,
            ),
            vocab_size=self.decoder.config.vocab_size,
            stop_ids=[258],
            context_tokens=self.context_tokens,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
            ends_at_context=self.policy == "stop",
        )


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt that shares some of its beginning with others, and when it comes."""

    shared: int
    own: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    arrival: int = 0

    def add(self, engine):
        """Queue it; its sequence also keeps the logits that its tokens were sampled from."""
        prompt = [*PREFIX[: self.shared], *self.own][: engine.context_tokens - 1]
        sequence = engine.add(prompt, self.params, self.max_tokens)
        logits, sample = [], sequence.sampler.sample
        sequence.sampler.sample = lambda row, ids: logits.append(row.clone()) or sample(row, ids)
        return sequence, logits

    def alone(self, model):
        engine = model.engine()
        found = self.add(engine)
        while found[0].finish_reason is None:
            engine.step()
        return found


def run(engine, requests, cancelled=None):
    """Let requests come and run to their end; one of them may be cancelled in step 10."""
    left, found = sorted(enumerate(requests), key=lambda item: item[1].arrival), {}
    for now in range(3000):
        while left and left[0][1].arrival <= now:
            i, request = left.pop(0)
            found[i] = request.add(engine)
        engine.step()
        if now == 10 and cancelled in found:
            engine.cancel(found[cancelled][0])
        if not left and not engine.stats.running and not engine.stats.waiting:
            assert engine.stats.kv_used == 0
            return [found[i] for i in range(len(requests))]
    raise AssertionError("the engine does not come to an end")


def assert_as_alone(model, requests, found):
    for request, (sequence, logits) in zip(requests, found, strict=True):
        alone, expected = request.alone(model)
        tokens = sequence.token_ids
        if sequence.finish_reason is None:  # cancelled
            assert tokens == alone.token_ids[: len(tokens)]
        else:
            assert tokens == alone.token_ids
        assert sequence.finish_reason in (alone.finish_reason, None)
        assert len(logits) == sequence.new_tokens
        assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=False))


@pytest.fixture(scope="module")
def decoder(tiny_model):
    @cache
    def get(name, kind="cpu"):
        directory = tiny_model(name)
        config = ModelConfig.from_dict(read_json(directory / "config.json"))
        one_by_one = (
            ops.select("cpu", ops.DeviceOptions(deterministic=True))
            if kind == "cpu"
            else ReferenceOps(CPU, torch.float32, deterministic=True)
        )
        return Decoder(Checkpoint(directory), config, one_by_one)

    return get


REQUESTS = st.lists(
    st.builds(
        Request,
        shared=st.sampled_from([1, 5, 31, 32, 33, 64, 70]),
        own=st.sampled_from([0, 1, 20, 32]).flatmap(
            lambda n: st.sampled_from([tuple(range(n)), tuple(range(100, 100 + n))])
        ),
        params=st.sampled_from(PARAMS),
        max_tokens=st.sampled_from([1, 2, 15, 40]),
        arrival=st.integers(0, 20),
    ),
    min_size=1,
    max_size=5,
)
FORMATS = st.tuples(
    *[st.builds(KVFormat, st.sampled_from(KV_BITS), st.sampled_from(KV_BITS))] * LAYERS
)
ROOM = {
    "max_sequences": st.integers(1, 5),
    "step_tokens": st.integers(5, 80),
    "spare_blocks": st.integers(0, 8),
}
POLICIES = st.sampled_from([("stop", 120), ("slide", 45), ("sinks", 45)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(["llama", "mistral", "qwen2-window", "qwen3"]),
    formats=FORMATS,
    policy=POLICIES,
    requests=REQUESTS,
    cancelled=st.none() | st.integers(0, 4),
    room=st.fixed_dictionaries(ROOM),
)
def test_a_prompt_gets_the_same_logits_and_tokens_alone_and_in_any_company(
    decoder, name, formats, policy, requests, cancelled, room
):
    model = Model(decoder(name), formats, *policy)
    engine = model.engine(**room)
    found = run(engine, requests, cancelled)
    assert_as_alone(model, requests, found)
    event(f"preempted: {engine.stats.preemptions > 0}")
    event(f"reused: {engine.stats.reused_tokens > 0}")


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(["gpt2", "qwen2-window"]),
    formats=FORMATS,
    requests=REQUESTS,
    room=st.fixed_dictionaries(ROOM),
)
def test_the_reference_operations_do_so_too_where_that_is_asked_for(
    decoder, name, formats, requests, room
):
    model = Model(decoder(name, "reference"), formats)
    assert_as_alone(model, requests, run(model.engine(**room), requests))


MIXED = (KVFormat(8, 4), KVFormat(16, 16), KVFormat(4, 8))


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("llama", ("stop", 120)),
        ("mistral", ("stop", 120)),
        ("qwen2-window", ("stop", 120)),
        ("gpt2", ("stop", 120)),
        ("llama", ("slide", 45)),
        ("qwen2-window", ("sinks", 45)),
    ],
)
def test_a_preempted_prompt_gets_the_same_as_one_that_was_left_alone(decoder, name, policy):
    model = Model(decoder(name), MIXED, *policy)
    requests = [Request(1 + 9 * i, (i,), params, 60) for i, params in enumerate(PARAMS)]
    engine = model.engine(max_sequences=4, step_tokens=30, spare_blocks=0)
    found = run(engine, requests)
    assert engine.stats.preemptions > 0
    assert_as_alone(model, requests, found)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
def test_choices_of_a_prompt_share_its_prefill_and_get_what_they_get_alone(decoder, name, length):
    model = Model(decoder(name), MIXED)
    requests = [Request(length, (), params, 45) for params in PARAMS]
    engine = model.engine(max_sequences=4)
    found = run(engine, requests)
    assert engine.stats.reused_tokens == 3 * length
    assert_as_alone(model, requests, found)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-window"])
@pytest.mark.parametrize("policy", [("stop", 120), ("sinks", 45)])
def test_a_beginning_that_is_in_the_cache_gives_the_same_as_one_that_is_computed(
    decoder, name, policy
):
    model = Model(decoder(name), MIXED, *policy)
    requests = [Request(70, (1, 2), params, 40, 50 * i) for i, params in enumerate(PARAMS)]
    engine = model.engine()
    found = run(engine, requests)
    assert engine.stats.reused_tokens == 3 * (64 if policy[0] == "stop" else 32)
    assert_as_alone(model, requests, found)
