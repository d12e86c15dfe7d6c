"""The engine over a decoder that only records what it is asked, and over damaged real ones."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer import ops
from qinfer.cache.contiguous import KVCache
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig, read_json
from qinfer.engine import engine as engine_module
from qinfer.engine.engine import Engine
from qinfer.errors import NumericsError, PromptError, QInferError
from qinfer.models.decoder import Decoder
from qinfer.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
VOCAB = 10
EOS = 9


class FakeDecoder:
    """Says that each token's successor follows it, modulo the vocabulary.

    Attributes:
        calls: (ids, position of the first) of each forward pass.
        logits_of: Number of tokens whose logits were asked for, per call.
    """

    def __init__(self, *, vocab_size=VOCAB, padded=0, broken_after=None):
        self.config = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=1, head_dim=4)
        self.ops = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
        self.vocab_size = vocab_size
        self.padded = padded
        self.broken_after = broken_after
        self.calls = []
        self.logits_of = []
        self.located = []

    def forward(self, ids, cache):
        assert torch.is_inference_mode_enabled()
        assert cache.length + len(ids) <= cache.keys.shape[2]
        self.calls.append((ids.tolist(), cache.length))
        return ids.float()[:, None]

    def logits(self, hidden):
        self.logits_of.append(len(hidden))
        out = torch.zeros(len(hidden), self.vocab_size + self.padded)
        out[:, self.vocab_size :] = 100
        out[torch.arange(len(hidden)), (hidden[:, 0].long() + 1) % self.vocab_size] = 1
        if self.broken_after is not None and len(self.logits_of) > self.broken_after:
            out[:, 3] = float("nan")
        return out

    def locate_nonfinite(self, ids, cache):
        self.located.append((ids.tolist(), cache.length))
        return "layer 1" if 7 in ids else None


def make_engine(decoder=None, *, stop_ids=(), context_tokens=100):
    decoder = decoder or FakeDecoder()
    return Engine(
        decoder,
        vocab_size=decoder.vocab_size,
        stop_ids=stop_ids,
        context_tokens=context_tokens,
    )


def run(engine, prompt, max_tokens=None, params=GREEDY):
    sequence = engine.start(prompt, params, max_tokens)
    tokens = []
    while sequence.finish_reason is None:
        tokens.append(engine.step(sequence))
    assert sequence.prompt_tokens == len(prompt)
    return sequence, tokens


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, [1]), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (11, [4, 4, 3])],
)
def test_a_prompt_is_prefilled_in_chunks_at_its_positions(length, expected, monkeypatch):
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK_TOKENS", 4)
    engine = make_engine()
    prompt = [i % 5 for i in range(length)]
    sequence = engine.start(prompt, GREEDY, 3)
    engine.step(sequence)
    calls = engine.decoder.calls
    assert [len(ids) for ids, _ in calls] == expected
    assert [position for _, position in calls] == [sum(expected[:i]) for i in range(len(expected))]
    assert [i for ids, _ in calls for i in ids] == prompt
    assert engine.decoder.logits_of == [1]  # of the last position only


def test_a_decode_step_is_one_forward_of_exactly_the_new_token():
    engine = make_engine()
    sequence, tokens = run(engine, [1, 2, 3], 4)
    assert tokens == [4, 5, 6, 7]
    assert engine.decoder.calls == [([1, 2, 3], 0), ([4], 3), ([5], 4), ([6], 5)]
    assert engine.decoder.logits_of == [1, 1, 1, 1]
    assert sequence.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert sequence.new_tokens == 4


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_tokens_ends_with_length(count):
    sequence, tokens = run(make_engine(), [1], count)
    assert len(tokens) == count
    assert (sequence.finish_reason, sequence.error) == ("length", None)


@pytest.mark.parametrize("stop_ids", [{EOS}, [EOS, 77], (8, EOS)])
def test_any_stop_id_ends_with_stop_and_is_kept(stop_ids):
    sequence, tokens = run(make_engine(stop_ids=stop_ids), [5], 50)
    assert tokens[-1] == min(i for i in stop_ids if i < VOCAB)
    assert sequence.finish_reason == "stop"


def test_a_stop_id_as_the_last_token_allowed_is_a_stop():
    assert run(make_engine(stop_ids={7}), [5], 2)[0].finish_reason == "stop"


def test_a_stop_id_in_the_prompt_does_not_end_it():
    sequence, tokens = run(make_engine(stop_ids={5}), [5, 5], 2)
    assert (tokens, sequence.finish_reason) == ([6, 7], "length")


@pytest.mark.parametrize("max_tokens", [None, 5, 50])
def test_the_end_of_the_context_ends_with_length(max_tokens):
    sequence, tokens = run(make_engine(context_tokens=8), [1, 2, 3], max_tokens)
    assert len(tokens) == 5
    assert sequence.finish_reason == "length"
    assert sequence.cache.length == 7  # the last token never went through the model


@pytest.mark.parametrize(("length", "excess"), [(8, 1), (9, 2), (1007, "1,000")])
def test_a_prompt_that_fills_the_context_is_an_error_that_says_by_how_much(length, excess):
    with pytest.raises(PromptError, match=rf"\b{length:,} tokens, {excess} more.* of 8 ") as caught:
        make_engine(context_tokens=8).start([1] * length, GREEDY, 5)
    assert "--truncate-prompt" in caught.value.hint


def test_a_prompt_with_room_for_one_token_runs():
    sequence, tokens = run(make_engine(context_tokens=8), [1] * 7, 5)
    assert len(tokens) == 1
    assert sequence.finish_reason == "length"


def test_an_empty_prompt_is_an_error():
    with pytest.raises(PromptError, match="empty"):
        make_engine().start([], GREEDY, 5)


@pytest.mark.parametrize(
    ("length", "max_tokens", "capacity"),
    [(3, 4, 7), (3, None, 100), (3, 10**30, 100), (99, 1, 100)],
)
def test_the_cache_is_allocated_once_with_what_the_request_can_need(
    length, max_tokens, capacity, monkeypatch
):
    allocated = []

    class Counting(KVCache):
        def __init__(self, config, capacity, dtype, device):
            allocated.append((capacity, dtype, device))
            super().__init__(config, capacity, dtype, device)

    monkeypatch.setattr(engine_module, "KVCache", Counting)
    engine = make_engine()
    sequence, _ = run(engine, [1] * length, max_tokens)
    assert allocated == [(capacity, torch.float32, torch.device("cpu"))]
    assert sequence.cache.keys.shape == (2, 1, capacity, 4)
    assert sequence.cache.nbytes == KVCache.nbytes_for(
        engine.decoder.config, capacity, torch.float32
    )


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=5.0, top_p=None, seed=1)])
def test_padding_of_the_vocabulary_is_never_sampled(params):
    _, tokens = run(make_engine(FakeDecoder(padded=6)), [1], 90, params)
    assert max(tokens) < VOCAB


@pytest.mark.parametrize("broken_after", [0, 1, 3])
def test_logits_that_are_not_finite_end_with_error(broken_after):
    engine = make_engine(FakeDecoder(broken_after=broken_after))
    sequence, tokens = run(engine, [1], 50)
    assert tokens == [*range(2, 2 + broken_after), None]
    assert sequence.new_tokens == broken_after
    assert sequence.finish_reason == "error"
    assert isinstance(sequence.error, NumericsError)
    assert sequence.error.hint


def test_the_error_names_the_first_bad_layer_of_the_chunk_that_has_it(monkeypatch):
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK_TOKENS", 3)
    engine = make_engine(FakeDecoder(broken_after=0))
    sequence, _ = run(engine, [1, 1, 1, 1, 7, 1, 1], 50)
    assert "first in layer 1" in str(sequence.error)
    assert engine.decoder.located == [([1, 1, 1], 0), ([1, 7, 1], 3)]


def test_the_error_names_the_output_head_where_the_layers_are_sound():
    sequence, _ = run(make_engine(FakeDecoder(broken_after=0)), [1], 50)
    assert "first in the output head" in str(sequence.error)


def test_penalties_that_leave_no_token_are_not_blamed_on_the_model():
    engine = make_engine(FakeDecoder(vocab_size=3, padded=2))
    once = SamplingParams(temperature=0, no_repeat_ngram_size=1)
    sequence, tokens = run(engine, [0], 50, once)
    assert tokens == [1, 2, None]
    assert sequence.finish_reason == "error"
    assert "no_repeat_ngram_size" in str(sequence.error)
    assert not engine.decoder.located


def test_sequences_do_not_share_state():
    engine = make_engine()
    sampled = SamplingParams(temperature=3.0, top_p=None, seed=5)
    alone = run(engine, [1], 20, sampled)[1]
    one, two = engine.start([1], sampled, 20), engine.start([4, 4], GREEDY, 20)
    mixed = []
    for _ in range(20):
        mixed.append(engine.step(one))
        engine.step(two)
    assert mixed == alone
    assert two.token_ids[2:6] == [5, 6, 7, 8]


@pytest.mark.parametrize("max_tokens", [10**9, 2**31, 10**30, None])
def test_a_cache_that_cannot_be_allocated_is_one_error_with_its_size(max_tokens):
    decoder = FakeDecoder()
    decoder.config = SimpleNamespace(num_hidden_layers=80, num_key_value_heads=64, head_dim=128)
    engine = make_engine(decoder, context_tokens=2**31 - 1)
    capacity = min(3 + (max_tokens or 2**31), 2**31 - 1)
    with pytest.raises(QInferError, match=rf"KV cache of {capacity:,} tokens needs") as caught:
        engine.start([1, 2, 3], GREEDY, max_tokens)
    gigabytes = 2 * 80 * 64 * 128 * 4 * capacity / 1e9
    assert f"{gigabytes:,.1f} GB" in str(caught.value)
    assert "--max-tokens" in caught.value.hint
    assert "--ctx-size" in caught.value.hint


def test_memory_running_out_on_a_gpu_is_the_same_error(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(KVCache, "__init__", full)
    with pytest.raises(QInferError, match="KV cache of 8 tokens"):
        make_engine().start([1, 2, 3], GREEDY, 5)


class TestCache:
    config = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=3, head_dim=4)

    def test_returns_what_was_stored_in_order_and_per_layer(self):
        cache = KVCache(self.config, 6, torch.float32, torch.device("cpu"))
        k, v = torch.randn(2, 6, 3, 4), torch.randn(2, 6, 3, 4)
        for start, stop in ((0, 4), (4, 5), (5, 6)):
            for layer in (0, 1):
                keys, values = cache.update(layer, k[layer, start:stop], v[layer, start:stop])
                assert torch.equal(keys, k[layer, :stop].transpose(0, 1))
                assert torch.equal(values, v[layer, :stop].transpose(0, 1))
            assert cache.length == start  # the caller's to advance
            cache.length = stop

    def test_a_call_may_be_repeated(self):
        cache = KVCache(self.config, 6, torch.float32, torch.device("cpu"))
        cache.update(0, torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
        keys, values = cache.update(0, torch.ones(2, 3, 4), torch.ones(2, 3, 4))
        assert torch.equal(keys, torch.ones(3, 2, 4))
        assert torch.equal(values, torch.ones(3, 2, 4))

    def test_holds_nothing_beside_keys_and_values(self):
        cache = KVCache(self.config, 6, torch.float16, torch.device("cpu"))
        assert cache.nbytes == 2 * 2 * 3 * 6 * 4 * 2
        assert cache.keys.dtype == cache.values.dtype == torch.float16


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("tensor", "place"),
    [
        ("model.embed_tokens.weight", "the embedding"),
        ("model.layers.1.self_attn.v_proj.weight", "layer 1"),
        ("model.layers.1.mlp.down_proj.weight", "layer 1"),
        ("model.layers.2.mlp.down_proj.weight", "layer 2"),
        ("model.norm.weight", "the final norm"),
        ("lm_head.weight", "the output head"),
    ],
)
def test_a_damaged_model_ends_with_error_and_the_first_bad_part(
    tensor, place, value, tiny_model, tmp_path
):
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("llama-untied-bias"), directory)
    weights = load_file(directory / "model.safetensors")
    weights[tensor].view(-1)[0 if weights[tensor].ndim == 1 else slice(None)] = value
    save_file(weights, directory / "model.safetensors")
    config = ModelConfig.from_dict(read_json(directory / "config.json"))
    decoder = Decoder(Checkpoint(directory), config, ops.select("cpu"))
    engine = Engine(decoder, vocab_size=config.vocab_size, stop_ids=(), context_tokens=64)
    sequence, tokens = run(engine, [1, 2, 3], 5)
    assert tokens == [None]
    assert sequence.finish_reason == "error"
    assert f"first in {place}" in str(sequence.error)


def test_damage_that_shows_late_is_found_in_the_decode_step(tiny_model, tmp_path):
    """The row of one token in the embedding is NaN: fine until that token is sampled."""
    directory = tiny_model("llama-untied-bias")
    config = ModelConfig.from_dict(read_json(directory / "config.json"))

    def engine_of(directory):
        decoder = Decoder(Checkpoint(directory), config, ops.select("cpu"))
        return Engine(decoder, vocab_size=config.vocab_size, stop_ids=(), context_tokens=64)

    expected = run(engine_of(directory), [1, 2, 3], 8)[1]
    copy = tmp_path / "model"
    shutil.copytree(directory, copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.embed_tokens.weight"][expected[4]] = float("nan")
    save_file(weights, copy / "model.safetensors")
    sequence, tokens = run(engine_of(copy), [1, 2, 3], 8)
    first = expected.index(expected[4]) + 1
    assert tokens == [*expected[:first], None]
    assert "first in the embedding" in str(sequence.error)


def test_a_context_of_billions_of_tokens_costs_nothing_until_it_is_asked_for(tiny_model):
    raw = json.loads((tiny_model("llama") / "config.json").read_text())
    config = ModelConfig.from_dict(raw | {"max_position_embeddings": 2**31 - 1})
    decoder = Decoder(Checkpoint(tiny_model("llama")), config, ops.select("cpu"))
    engine = Engine(decoder, vocab_size=320, stop_ids=(), context_tokens=2**31 - 1)
    assert len(run(engine, [1, 2], 3)[1]) == 3
    with pytest.raises(QInferError, match="KV cache"):
        engine.start([1, 2], dataclasses.replace(GREEDY), None)
