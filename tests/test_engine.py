"""The engine over a decoder that only records what it is asked, and over damaged real ones."""

import contextlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qinfer import ops
from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.cache.tables import Reach
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig, read_json
from qinfer.engine import assembly
from qinfer.engine.assembly import EngineOptions, build_engine
from qinfer.engine.engine import Engine
from qinfer.errors import NumericsError, PromptError, QInferError
from qinfer.quant.kv import BLOCK_TOKENS, KVFormat
from qinfer.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
VOCAB = 10
EOS = 9
ALL = (Reach(),)


class FakeDecoder:
    """Says that each token's successor follows it, modulo the vocabulary.

    It stores token ids where keys and values belong, and reads back what each segment sees.

    Attributes:
        calls: Per forward pass, (ids, position of the first) of each segment.
        logits_of: Number of tokens whose logits were asked for, per call.
        seen: Per segment and layer, the ids by position that its first token sees.
        located: Like `calls`, of passes that were watched.
        broken_after: Calls of `logits` until there is NaN in all of them.
        broken_token: A token behind which there is NaN.
        full: Whether a forward pass of these segments does not fit into memory.
    """

    def __init__(self, *, vocab_size=VOCAB, padded=0, broken_after=None, broken_token=-1):
        self.ops = SimpleNamespace(
            device=torch.device("cpu"), forward_pass=lambda tokens: contextlib.nullcontext()
        )
        self.vocab_size = vocab_size
        self.padded = padded
        self.broken_after = broken_after
        self.broken_token = broken_token
        self.full = lambda segments: False
        self.calls = []
        self.logits_of = []
        self.seen = []
        self.located = []

    def forward(self, batch, cache, *, watch=None):
        assert torch.is_inference_mode_enabled()
        ids, offsets = batch.ids.tolist(), batch.offsets.tolist()
        segments = [
            (ids[offsets[s] : offsets[s + 1]], start)
            for s, start in enumerate(batch.starts.tolist())
        ]
        assert all(tokens for tokens, _ in segments)
        positions = [start + i for tokens, start in segments for i in range(len(tokens))]
        assert batch.positions.tolist() == positions
        assert batch.last_position == max(positions)
        assert len({*batch.slots.tolist()}) == len(segments)
        if self.full(segments):
            raise torch.OutOfMemoryError("CUDA out of memory")
        (self.calls if watch is None else self.located).append(segments)
        for layer in cache:
            self._store(layer, batch.tables[layer.group].tolist(), segments)
        if watch is not None:
            watch("the embedding", batch.ids.float())
            watch("layer 1", batch.ids.float().masked_fill(batch.ids == 7, float("nan")))
        return batch.ids.float()[:, None]

    def _store(self, layer, tables, segments):
        for table, (tokens, start) in zip(tables, segments, strict=True):
            for position, token in enumerate(tokens, start):
                block, at = table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                layer.keys.data[block, :, :, at] = token
                layer.values.data[block, :, at] = token
        for table, (tokens, start) in zip(tables, segments, strict=True):
            oldest = 0 if layer.window is None else start - layer.window + 1
            seen = {}
            for position in range(start + len(tokens)):
                if position >= oldest or position < layer.sinks:
                    block, at = table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                    seen[position] = int(layer.keys.data[block, 0, 0, at])
                    assert seen[position] == int(layer.values.data[block, 0, at, 0])
            self.seen.append(seen)

    def logits(self, hidden):
        self.logits_of.append(len(hidden))
        out = torch.zeros(len(hidden), self.vocab_size + self.padded)
        out[:, self.vocab_size :] = 100
        out[torch.arange(len(hidden)), (hidden[:, 0].long() + 1) % self.vocab_size] = 1
        if self.broken_after is not None and len(self.logits_of) > self.broken_after:
            out[:, 3] = float("nan")
        out[hidden[:, 0] == self.broken_token, 3] = float("nan")
        return out


def make_engine(
    decoder=None,
    *,
    stop_ids=(),
    context_tokens=100,
    max_sequences=4,
    step_tokens=256,
    blocks=100,
    reaches=ALL,
):
    """An engine with a layer per reach, and one more of the first."""
    decoder = decoder or FakeDecoder()
    groups = (*range(len(reaches)), 0)
    layout = CacheLayout(
        kv_heads=1,
        head_dim=2,
        formats=(KVFormat(32, 32),) * len(groups),
        groups=groups,
        reaches=reaches,
    )
    cache = PagedCache(
        layout,
        (blocks,) * len(reaches),
        max_sequences,
        half=torch.float16,
        device=torch.device("cpu"),
    )
    return Engine(
        decoder,
        cache,
        vocab_size=decoder.vocab_size,
        stop_ids=stop_ids,
        context_tokens=context_tokens,
        max_sequences=max_sequences,
        step_tokens=step_tokens,
    )


def run_all(engine, most_steps=2000):
    """Step until nothing is left."""
    for _ in range(most_steps):
        if not engine.stats.running and not engine.stats.waiting:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def run(engine, prompt, max_tokens=None, params=GREEDY):
    sequence = engine.add(prompt, params, max_tokens)
    run_all(engine)
    assert sequence.prompt_tokens == len(prompt)
    return sequence, sequence.token_ids[len(prompt) :]


def assert_each_saw_its_own_tokens(engine, sequences):
    for seen in engine.decoder.seen:
        last = max(seen)
        assert any(
            last < len(s.token_ids) and all(s.token_ids[i] == token for i, token in seen.items())
            for s in sequences
        )


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, [1]), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (11, [4, 4, 3])],
)
def test_a_prompt_is_prefilled_in_chunks_at_its_positions(length, expected):
    engine = make_engine(step_tokens=4)
    prompt = [i % 5 for i in range(length)]
    sequence = engine.add(prompt, GREEDY, 3)
    steps = [engine.step() for _ in expected]
    assert steps == [*[[]] * (len(expected) - 1), [sequence]]
    calls = [segment for call in engine.decoder.calls for segment in call]
    assert [len(ids) for ids, _ in calls] == expected
    assert [position for _, position in calls] == [sum(expected[:i]) for i in range(len(expected))]
    assert [i for ids, _ in calls for i in ids] == prompt
    assert engine.decoder.logits_of == [1]  # of the last position only


def test_a_decode_step_is_one_forward_of_exactly_the_new_token():
    engine = make_engine()
    sequence, tokens = run(engine, [1, 2, 3], 4)
    assert tokens == [4, 5, 6, 7]
    assert engine.decoder.calls == [[([1, 2, 3], 0)], [([4], 3)], [([5], 4)], [([6], 5)]]
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
    engine = make_engine(context_tokens=8)
    sequence, tokens = run(engine, [1, 2, 3], max_tokens)
    assert len(tokens) == 5
    assert sequence.finish_reason == "length"
    assert engine.decoder.calls[-1] == [([7], 6)]  # the last token never went through the model


@pytest.mark.parametrize(("length", "excess"), [(8, 1), (9, 2), (1007, "1,000")])
def test_a_prompt_that_fills_the_context_is_an_error_that_says_by_how_much(length, excess):
    engine = make_engine(context_tokens=8)
    with pytest.raises(PromptError, match=rf"\b{length:,} tokens, {excess} more.* of 8 ") as caught:
        engine.add([1] * length, GREEDY, 5)
    assert "--truncate-prompt" in caught.value.hint
    assert engine.step() == []


def test_a_prompt_with_room_for_one_token_runs():
    sequence, tokens = run(make_engine(context_tokens=8), [1] * 7, 5)
    assert len(tokens) == 1
    assert sequence.finish_reason == "length"


def test_an_empty_prompt_is_an_error():
    with pytest.raises(PromptError, match="empty"):
        make_engine().add([], GREEDY, 5)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=5.0, top_p=None, seed=1)])
def test_padding_of_the_vocabulary_is_never_sampled(params):
    _, tokens = run(make_engine(FakeDecoder(padded=6)), [1], 90, params)
    assert max(tokens) < VOCAB


@pytest.mark.parametrize("broken_after", [0, 1, 3])
def test_logits_that_are_not_finite_end_with_error(broken_after):
    engine = make_engine(FakeDecoder(broken_after=broken_after))
    sequence, tokens = run(engine, [1], 50)
    assert tokens == [*range(2, 2 + broken_after)]
    assert sequence.finish_reason == "error"
    assert isinstance(sequence.error, NumericsError)
    assert sequence.error.hint


def test_the_error_names_the_first_bad_layer_of_the_chunk_that_has_it():
    engine = make_engine(FakeDecoder(broken_after=0), step_tokens=4)
    sequence, _ = run(engine, [1, 1, 1, 1, 1, 7, 1, 1, 1], 50)
    assert "first in layer 1" in str(sequence.error)
    assert engine.decoder.located == [[([1] * 4, 0)], [([1, 7, 1, 1], 4)], [([1], 8)]]


def test_the_error_names_the_output_head_where_the_layers_are_sound():
    sequence, _ = run(make_engine(FakeDecoder(broken_after=0)), [1], 50)
    assert "first in the output head" in str(sequence.error)


def test_the_error_names_no_place_where_there_is_no_room_to_look_for_it():
    """The first of its two blocks is another's as well, which goes on."""
    engine = make_engine(FakeDecoder(broken_token=7), blocks=3, max_sequences=2, context_tokens=96)
    prompt = [1] * 39 + [0]
    sound = engine.add(prompt, GREEDY, 5)
    bad = engine.add(prompt, SamplingParams(temperature=1e-3, seed=0), 5)
    engine.step()
    bad.token_ids[-1] = 7
    engine.step()
    assert bad.finish_reason == "error"
    assert "first in" not in str(bad.error)
    run_all(engine)
    assert sound.token_ids[40:] == [1, 2, 3, 4, 5]


def test_a_cache_without_room_for_one_sequence_is_refused_at_once():
    make_engine(blocks=3, context_tokens=96)
    with pytest.raises(ValueError, match="no room for a sequence of 97 tokens"):
        make_engine(blocks=3, context_tokens=97)


def test_an_error_ends_only_the_sequence_that_has_it():
    engine = make_engine(FakeDecoder(broken_token=4))
    sequences = [engine.add([first], GREEDY, 4) for first in (3, 5, 4, 6)]
    run_all(engine)
    assert [s.finish_reason for s in sequences] == ["error", "length", "error", "length"]
    assert [s.token_ids[1:] for s in sequences] == [[4], [6, 7, 8, 9], [], [7, 8, 9, 0]]
    assert engine.stats.kv_used == 0


def test_penalties_that_leave_no_token_are_not_blamed_on_the_model():
    engine = make_engine(FakeDecoder(vocab_size=3, padded=2))
    once = SamplingParams(temperature=0, no_repeat_ngram_size=1)
    sequence, tokens = run(engine, [0], 50, once)
    assert tokens == [1, 2]
    assert sequence.finish_reason == "error"
    assert "no_repeat_ngram_size" in str(sequence.error)
    assert not engine.decoder.located


def test_sequences_do_not_share_state():
    sampled = SamplingParams(temperature=3.0, top_p=None, seed=5)
    alone = run(make_engine(), [1], 20, sampled)[1]
    engine = make_engine()
    one, two = engine.add([1], sampled, 20), engine.add([4, 4], GREEDY, 20)
    run_all(engine)
    assert one.token_ids[1:] == alone
    assert two.token_ids[2:6] == [5, 6, 7, 8]


def test_several_sequences_go_through_the_model_in_one_step():
    engine = make_engine()
    sequences = [engine.add(prompt, GREEDY, 3) for prompt in ([1, 2], [5], [7, 7, 7])]
    assert engine.step() == sequences
    assert engine.step() == sequences
    assert engine.decoder.calls == [
        [([1, 2], 0), ([5], 0), ([7, 7, 7], 0)],
        [([3], 2), ([6], 1), ([8], 3)],
    ]
    assert engine.decoder.logits_of == [3, 3]


def test_sequences_decode_while_a_long_prompt_is_prefilled_beside_them():
    engine = make_engine(step_tokens=5)
    short, long = engine.add([1], GREEDY, 4), engine.add([7] * 10, GREEDY, 2)
    advanced = [engine.step() for _ in range(4)]
    assert advanced == [[short], [short], [short, long], [short, long]]
    assert engine.decoder.calls == [
        [([1], 0), ([7] * 4, 0)],
        [([2], 1), ([7] * 4, 4)],
        [([3], 2), ([7] * 2, 8)],
        [([4], 3), ([8], 10)],
    ]
    assert_each_saw_its_own_tokens(engine, [short, long])


def test_a_sequence_that_ends_makes_room_for_the_next_one_at_once():
    engine = make_engine(max_sequences=2)
    sequences = [engine.add([i], GREEDY, count) for i, count in ((1, 1), (3, 3), (5, 2))]
    engine.step()
    assert sequences[0].finish_reason == "length"
    assert (engine.stats.running, engine.stats.waiting) == (1, 1)
    engine.step()
    assert engine.decoder.calls[1] == [([4], 1), ([5], 0)]
    run_all(engine)
    assert [s.token_ids for s in sequences] == [[1, 2], [3, 4, 5, 6], [5, 6, 7]]


def test_a_cancelled_sequence_gives_its_place_back_whether_it_runs_or_waits():
    engine = make_engine(max_sequences=2)
    sequences = [engine.add([i], GREEDY, 50) for i in range(4)]
    engine.step()
    engine.cancel(sequences[0])
    engine.cancel(sequences[2])
    engine.step()
    assert engine.decoder.calls[1] == [([2], 1), ([3], 0)]
    engine.cancel(sequences[1])
    engine.cancel(sequences[3])
    engine.cancel(sequences[3])  # twice is fine
    assert engine.step() == []
    assert (engine.stats.running, engine.stats.waiting, engine.stats.kv_used) == (0, 0, 0)


def seeded(seed):
    return SamplingParams(temperature=5.0, top_p=None, seed=seed)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 70])
@pytest.mark.parametrize("step_tokens", [20, 256])
def test_choices_of_a_prompt_share_its_prefill_and_get_what_they_get_alone(length, step_tokens):
    prompt = [i * i % VOCAB for i in range(length)]
    alone = [run(make_engine(context_tokens=200), prompt, 40, seeded(i))[1] for i in range(4)]
    engine = make_engine(context_tokens=200, step_tokens=step_tokens)
    choices = [engine.add(prompt, seeded(i), 40) for i in range(4)]
    run_all(engine)
    assert [choice.token_ids[length:] for choice in choices] == alone
    assert len({*map(tuple, alone)}) == 4
    fed = sum(len(ids) for call in engine.decoder.calls for ids, _ in call)
    assert fed == length + 4 * 39
    assert engine.stats.reused_tokens == 3 * length
    assert_each_saw_its_own_tokens(engine, choices)


def test_choices_that_there_is_no_place_for_come_later_and_get_the_same():
    prompt = [i % 7 for i in range(70)]
    engine = make_engine(context_tokens=200, max_sequences=2)
    choices = [engine.add(prompt, seeded(i), 5 + i) for i in range(5)]
    run_all(engine)
    for i, choice in enumerate(choices):
        expected = run(make_engine(context_tokens=200), prompt, 5 + i, seeded(i))[1]
        assert choice.token_ids[70:] == expected
    assert engine.stats.reused_tokens == 70 + 3 * 64  # one forked, three by blocks
    assert_each_saw_its_own_tokens(engine, choices)


def test_the_first_choice_may_end_with_its_first_token():
    engine = make_engine(stop_ids={EOS})
    choices = [engine.add([8], GREEDY, 5), engine.add([8], seeded(3), 5)]
    run_all(engine)
    assert choices[0].finish_reason == "stop"
    assert choices[1].token_ids[1:] == run(make_engine(stop_ids={EOS}), [8], 5, seeded(3))[1]


def test_a_prompt_that_begins_as_another_did_reuses_its_blocks():
    engine = make_engine()
    prompt = [i % 7 for i in range(70)]
    run(engine, prompt, 3)
    sequence, tokens = run(engine, [*prompt[:65], 1, 1], 3)
    assert engine.decoder.calls[3] == [([prompt[64], 1, 1], 64)]
    assert tokens == [2, 3, 4]
    assert sequence.reused_tokens == engine.stats.reused_tokens == 64
    assert run(engine, [9, *prompt[1:]], 3)[0].reused_tokens == 0
    assert run(engine, prompt[:64], 3)[0].reused_tokens == 32  # the last token has to be computed


def test_sequences_give_way_when_blocks_run_out_and_go_on_later():
    engine = make_engine(context_tokens=96, blocks=4)
    sequences = [engine.add([i] * 20, GREEDY, 70) for i in range(3)]
    run_all(engine)
    assert engine.stats.preemptions > 0
    for i, sequence in enumerate(sequences):
        assert sequence.token_ids[20:] == [(i + 1 + n) % VOCAB for n in range(70)]
        assert sequence.finish_reason == "length"
    assert_each_saw_its_own_tokens(engine, sequences)


def test_a_preempted_sequence_draws_on_where_it_was():
    alone = [run(make_engine(), [i] * 20, 70, seeded(i))[1] for i in range(3)]
    engine = make_engine(context_tokens=96, blocks=4)
    sequences = [engine.add([i] * 20, seeded(i), 70) for i in range(3)]
    run_all(engine)
    assert engine.stats.preemptions > 0
    assert [s.token_ids[20:] for s in sequences] == alone


REACHES = st.sampled_from(
    [
        ALL,
        (Reach(16),),
        (Reach(33, 4),),
        (Reach(), Reach(40)),
        (Reach(7), Reach(64, 40)),
    ]
)


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 3), st.integers(1, 80), st.integers(1, 40)),
        min_size=1,
        max_size=8,
    ),
    reaches=REACHES,
    blocks=st.integers(5, 12),
    max_sequences=st.integers(1, 4),
    step_tokens=st.integers(4, 64),
    cancelled=st.integers(0, 20),
)
def test_every_sequence_sees_its_own_tokens_whatever_runs_beside_it(
    arrivals, reaches, blocks, max_sequences, step_tokens, cancelled
):
    engine = make_engine(
        context_tokens=121,
        blocks=blocks,
        max_sequences=max_sequences,
        step_tokens=step_tokens,
        reaches=reaches,
    )
    sequences, waiting = [], sorted(arrivals)
    for now in range(3000):
        while waiting and waiting[0][0] <= now:
            _, first, length, count = waiting.pop(0)
            prompt = [(first + i * i) % VOCAB for i in range(length)]
            sequences.append(engine.add(prompt, GREEDY, count))
        engine.step()
        if now == cancelled:
            engine.cancel(sequences[0]) if sequences else None
        if not waiting and not engine.stats.running and not engine.stats.waiting:
            break
    else:
        raise AssertionError("the engine does not come to an end")
    for i, sequence in enumerate(sequences):
        new = sequence.token_ids[sequence.prompt_tokens :]
        last = sequence.token_ids[sequence.prompt_tokens - 1]
        assert new == [(last + 1 + n) % VOCAB for n in range(len(new))]
        assert sequence.finish_reason == "length" or i == 0
        assert sequence.finish_reason is None or len(new) == sequence.max_tokens
    assert_each_saw_its_own_tokens(engine, sequences)
    assert engine.stats.kv_used == 0


def test_memory_running_out_in_a_step_runs_fewer_at_once_from_then_on():
    engine = make_engine(context_tokens=200, step_tokens=128)
    engine.decoder.full = lambda segments: sum(len(ids) for ids, _ in segments) > 64
    warnings = []
    engine.warn = warnings.append
    sequences = [engine.add([i] * 50, GREEDY, 5) for i in range(4)]
    run_all(engine)
    assert [s.token_ids[50:] for s in sequences] == [
        [(i + 1 + n) % VOCAB for n in range(5)] for i in range(4)
    ]
    assert warnings == ["out of memory; going on with 2 sequences and 64 tokens at once"]
    assert_each_saw_its_own_tokens(engine, sequences)


def test_memory_running_out_with_one_sequence_ends_it_and_the_others_go_on():
    engine = make_engine(context_tokens=200)
    engine.decoder.full = lambda segments: any(ids[0] == 3 for ids, _ in segments)
    sequences = [engine.add([i] * 5, GREEDY, 1) for i in (1, 3, 5)]
    run_all(engine)
    assert [s.finish_reason for s in sequences] == ["length", "error", "length"]
    assert "out of memory" in str(sequences[1].error)
    assert "--ctx-size" in sequences[1].error.hint


def test_an_error_that_is_not_about_memory_keeps_its_traceback():
    engine = make_engine()

    def broken(segments):
        raise RuntimeError("a bug")

    engine.decoder.full = broken
    engine.add([1], GREEDY, 1)
    with pytest.raises(RuntimeError, match="a bug"):
        engine.step()


def engine_of(directory, **options):
    config = ModelConfig.from_dict(read_json(directory / "config.json"))
    layers = config.num_hidden_layers
    options = {
        "vocab_size": config.vocab_size,
        "stop_ids": frozenset(),
        "formats": (KVFormat(),) * layers,
    } | options
    return build_engine(Checkpoint(directory), config, ops.select("cpu"), EngineOptions(**options))


def test_memory_that_cannot_be_reserved_is_one_error_with_its_size(tiny_model, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(assembly, "PagedCache", full)
    with pytest.raises(QInferError, match=r"KV cache of [\d.]+ GB cannot be reserved") as caught:
        engine_of(tiny_model("llama"))
    assert "--ctx-size" in caught.value.hint


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
    sequence, tokens = run(engine_of(directory), [1, 2, 3], 5)
    assert tokens == []
    assert sequence.finish_reason == "error"
    assert f"first in {place}" in str(sequence.error)


def test_damage_that_shows_late_is_found_in_the_decode_step(tiny_model, tmp_path):
    """The row of one token in the embedding is NaN: fine until that token is sampled."""
    directory = tiny_model("llama-untied-bias")
    expected = run(engine_of(directory), [1, 2, 3], 8)[1]
    copy = tmp_path / "model"
    shutil.copytree(directory, copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.embed_tokens.weight"][expected[4]] = float("nan")
    save_file(weights, copy / "model.safetensors")
    sequence, tokens = run(engine_of(copy), [1, 2, 3], 8)
    first = expected.index(expected[4]) + 1
    assert tokens == expected[:first]
    assert "first in the embedding" in str(sequence.error)


def test_a_context_of_billions_of_tokens_is_cut_to_what_memory_allows(tiny_model, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), directory)
    raw = read_json(directory / "config.json") | {"max_position_embeddings": 2**31 - 1}
    (directory / "config.json").write_text(json.dumps(raw))
    engine = engine_of(directory, memory_bytes=200_000_000)
    assert 64 <= engine.context_tokens < 2**31 - 1
    assert engine.cache.nbytes < 200_000_000
    assert len(run(engine, [1, 2], 3)[1]) == 3
    with pytest.raises(QInferError, match=r"GB of KV cache for one sequence of 2,147,483,647"):
        engine_of(directory, memory_bytes=200_000_000, context_tokens=2**31 - 1)
