"""Engines as they are put together, over a decoder that counts: do sequences come to their end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qinfer.engine import assembly
from qinfer.engine.assembly import EngineOptions, build_engine
from qinfer.engine.memory import workspace_bytes
from qinfer.errors import QInferError
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.kv import KVFormat
from qinfer.sampling import SamplingParams
from tests.test_memory import make_config

GREEDY = SamplingParams(temperature=0)
VOCAB = 16


class CountingDecoder:
    """Says that each token's successor follows it, and looks at no cache."""

    whole_step = None

    def __init__(self, checkpoint, config, ops) -> None:
        self.ops = ops

    def forward(self, batch, cache):
        for layer in cache:
            assert int(batch.tables[layer.group].max()) < len(layer.keys.data)
            assert layer.window is None or layer.window > 0
        return batch.ids[:, None]

    def logits(self, hidden):
        return torch.nn.functional.one_hot((hidden[:, 0] + 1) % VOCAB, VOCAB).float()


@pytest.fixture(autouse=True)
def _without_weights(monkeypatch):
    monkeypatch.setattr(assembly, "Decoder", CountingDecoder)
    monkeypatch.setattr(assembly, "weights_bytes", lambda checkpoint, config, maps_tables: 0)


def build(config, **options):
    defaults = {
        "vocab_size": VOCAB,
        "stop_ids": frozenset(),
        "formats": (KVFormat(),) * config.num_hidden_layers,
        "memory_bytes": 1 << 30,
    }
    ops = ReferenceOps(torch.device("cpu"), torch.float32)
    checkpoint = SimpleNamespace(tensors={})
    return build_engine(checkpoint, config, ops, EngineOptions(**(defaults | options)))


def run(engine, prompt_tokens, new_tokens, *, count=1):
    """Run sequences to their end, which must come within steps enough for one after another."""
    sequences = [engine.add([1] * prompt_tokens, GREEDY, new_tokens) for _ in range(count)]
    for _ in range(count * (new_tokens + prompt_tokens)):
        engine.step()
    assert [s.finish_reason for s in sequences] == ["length"] * count
    assert [s.new_tokens for s in sequences] == [new_tokens] * count


@pytest.mark.parametrize("policy", ["slide", "sinks"])
@pytest.mark.parametrize("context", [40, 64, 65])
@pytest.mark.parametrize("step_tokens", [1, 32, 256])
def test_one_sequence_alone_goes_on_beyond_a_context_that_slides(policy, context, step_tokens):
    engine = build(
        make_config(),
        context_tokens=context,
        context_policy=policy,
        max_sequences=1,
        step_tokens=step_tokens,
    )
    run(engine, 20, 200, count=2)


@pytest.mark.parametrize("policy", ["slide", "sinks"])
@pytest.mark.parametrize("tokens", [150, 300, 511, 512, 513, 700])
def test_a_context_that_has_to_shrink_below_the_window_of_some_layers_slides(policy, tokens):
    """All layers then see equally far: there is one group of them instead of two."""
    config = make_config(windows=(None, 512))
    step_tokens = 32
    fixed = workspace_bytes(config, tokens=step_tokens, sequences=2)
    block = KVFormat().block_bytes(config.num_key_value_heads, config.head_dim)
    engine = build(
        config,
        context_policy=policy,
        memory_bytes=fixed + 2 * block * (tokens // 32 + 4),
        max_sequences=2,
        step_tokens=step_tokens,
    )
    assert tokens - 64 <= engine.context_tokens < 4096
    layout = engine.cache.layout
    assert len(engine.cache.blocks) == len(layout.reaches) == len(set(layout.groups))
    assert all(r.window + r.sinks <= engine.context_tokens for r in layout.reaches)
    assert engine.cache.nbytes <= 2 * block * (tokens // 32 + 4)
    run(engine, engine.context_tokens - 1, 100, count=2)


@pytest.mark.parametrize("max_sequences", [None, 1, 3])
def test_a_context_that_stops_ends_sequences_there(max_sequences):
    engine = build(make_config(), context_tokens=70, max_sequences=max_sequences)
    sequences = [engine.add([1] * 20, GREEDY, 1000) for _ in range(4)]
    for _ in range(4 * 70):
        engine.step()
    assert [len(s.token_ids) for s in sequences] == [70] * 4


def test_a_cache_that_cannot_be_reserved_is_an_error_with_its_size(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(assembly, "PagedCache", full)
    with pytest.raises(QInferError, match=r"KV cache of \d+\.\d\d GB cannot be reserved"):
        build(make_config())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_tokens": 4097}, "4,097 is more than the model's 4,096"),
        ({"context_tokens": 4, "context_policy": "sinks"}, "leaves no window"),
    ],
)
def test_contexts_that_do_not_fit_the_model_are_refused(options, message):
    with pytest.raises(QInferError, match=message):
        build(make_config(), **options)


@pytest.mark.parametrize("policy", ["slide", "sinks"])
def test_learned_positions_do_not_slide(policy):
    raw = {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 320,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
    }
    config = assembly.ModelConfig.from_dict(raw)
    with pytest.raises(QInferError, match="needs rotary positions"):
        build(config, context_policy=policy)
    run(build(config, context_tokens=64), 20, 44)
