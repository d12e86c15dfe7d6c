"""The decoder gives transformers' logits and tokens, in any pieces, batched, and with a window."""

import json
import shutil

import pytest
import torch
import transformers

from qinfer import ops
from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.cache.tables import blocks_for
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig, read_json
from qinfer.engine.assembly import EngineOptions, build_engine
from qinfer.models.decoder import Decoder
from qinfer.ops.paged import Batch
from qinfer.quant.kv import KVFormat
from qinfer.sampling import SamplingParams
from tests.tiny_models import SHAPES

GREEDY = SamplingParams(temperature=0)
EXACT = KVFormat(32, 32)
CPU = torch.device("cpu")
LOSS = {KVFormat(16, 16): 0.05, KVFormat(8, 8): 0.7}
"""Largest error of a logit that a cache of fewer bits may cause in these models, whose logits have
a standard deviation of 1.6 (measured over all of them: 0.005 to 0.024, and 0.07 to 0.33)."""


def load(directory):
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    reference.generation_config.eos_token_id = None
    config = ModelConfig.from_dict(read_json(directory / "config.json"))
    return Decoder(Checkpoint(directory), config, ops.select("cpu")), reference


@pytest.fixture(params=SHAPES, scope="module")
def directory(request, tiny_model):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def pair(directory):
    return load(directory)


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator)


class Cache:
    """A cache for a few sequences, each of which has blocks enough for `length` tokens."""

    def __init__(self, decoder, sequences, length, kv_format=EXACT):
        layout = CacheLayout.of(decoder.config, (kv_format,) * decoder.config.num_hidden_layers)
        width = blocks_for(length)
        self.cache = PagedCache(
            layout,
            (sequences * width,) * len(layout.reaches),
            sequences,
            half=torch.float16,
            device=CPU,
        )
        self.tables = [list(range(s * width, (s + 1) * width)) for s in range(sequences)]
        self.lengths = [0] * sequences
        self.decoder = decoder

    def feed(self, parts):
        """Logits of all of these tokens: a list of (sequence, ids), run side by side."""
        tables = [self.tables[s] for s, _ in parts]
        batch = Batch.of(
            [(ids.tolist(), self.lengths[s]) for s, ids in parts],
            [tables] * len(self.cache.layout.reaches),
            [s for s, _ in parts],
            CPU,
        )
        hidden = self.decoder.forward(batch, self.cache.layers)
        for s, ids in parts:
            self.lengths[s] += len(ids)
        return self.decoder.logits(hidden).split([len(ids) for _, ids in parts])


@torch.inference_mode()
def all_logits(decoder, ids, cuts, kv_format=EXACT):
    """Logits of every position, the prompt fed in pieces that end at `cuts`."""
    cache = Cache(decoder, 1, len(ids), kv_format)
    return torch.cat([cache.feed([(0, piece)])[0] for piece in torch.tensor_split(ids, cuts)])


@torch.inference_mode()
def expected_logits(reference, ids):
    return reference(ids[None]).logits[0].float()


@pytest.mark.parametrize(
    "cuts", [[], [1], [15], [16], [17], [7, 8, 9, 40], list(range(1, 50))], ids=str
)
def test_logits_at_every_position(pair, cuts):
    decoder, reference = pair
    ids = prompt(50)
    expected = expected_logits(reference, ids)
    found = all_logits(decoder, ids, cuts)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-4
    assert expected.std() > 0.1  # or the bound above would mean nothing


@torch.inference_mode()
def test_logits_of_sequences_side_by_side(pair):
    """Some begin later or are done earlier; each piece has another length."""
    decoder, reference = pair
    prompts = [prompt(n, seed=n) for n in (50, 33, 70, 1)]
    cache = Cache(decoder, 4, 70)
    found = [[] for _ in prompts]
    for step in range(100):
        parts = []
        for s, ids in enumerate(prompts):
            piece = ids[cache.lengths[s] :][: 1 + (step * (s + 3)) % 40]
            if len(piece) and (step + s) % 3:
                parts.append((s, piece))
        if parts:
            for (s, _), logits in zip(parts, cache.feed(parts), strict=True):
                found[s].append(logits)
    for logits, ids in zip(found, prompts, strict=True):
        assert (torch.cat(logits) - expected_logits(reference, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize("kv_format", LOSS, ids=str)
def test_a_cache_of_fewer_bits_changes_logits_by_little(pair, kv_format):
    decoder, reference = pair
    ids = prompt(100)
    expected = expected_logits(reference, ids)
    found = all_logits(decoder, ids, [33, 40, 41, 64, 90], kv_format)
    error = (found - expected).abs().max()
    assert 0 < error <= LOSS[kv_format]


def engine_of(directory, **options):
    config = ModelConfig.from_dict(read_json(directory / "config.json"))
    options = {
        "vocab_size": config.vocab_size,
        "stop_ids": frozenset(),
        "formats": (EXACT,) * config.num_hidden_layers,
    } | options
    return build_engine(Checkpoint(directory), config, ops.select("cpu"), EngineOptions(**options))


def generate(directory, prompts, count, **options):
    engine = engine_of(directory, **options)
    sequences = [engine.add(ids.tolist(), GREEDY, count) for ids in prompts]
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    return [sequence.token_ids[sequence.prompt_tokens :] for sequence in sequences]


@torch.inference_mode()
def generate_uncached(decoder, ids, count):
    for _ in range(count):
        (logits,) = Cache(decoder, 1, len(ids)).feed([(0, ids)])
        ids = torch.cat((ids, logits[-1:].argmax(-1)))
    return ids[-count:].tolist()


def test_greedy_ids(directory, pair):
    decoder, reference = pair
    prompts = [prompt(length, seed=length) for length in (1, 16, 33)]
    expected = [
        reference.generate(
            ids[None],
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            attention_mask=torch.ones(1, len(ids), dtype=int),
        )[0, len(ids) :].tolist()
        for ids in prompts
    ]
    assert {*map(len, expected)} == {64}
    assert [generate(directory, [ids], 64)[0] for ids in prompts] == expected
    assert [generate_uncached(decoder, ids, 64) for ids in prompts] == expected
    assert generate(directory, prompts, 64) == expected
    assert generate(directory, prompts, 64, step_tokens=5, max_sequences=2) == expected


def edited(directory, out, **fields):
    """A copy with another `config.json`, the same weights."""
    shutil.copytree(directory, out)
    config = read_json(directory / "config.json")
    (out / "config.json").write_text(json.dumps(config | fields))
    return out


@torch.inference_mode()
@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 40])
@pytest.mark.parametrize("name", ["mistral", "qwen2-window"])
def test_logits_around_the_window_and_the_blocks(name, window, tiny_model, tmp_path):
    """Alone and side by side, token by token and in pieces; and nearly so from 8 bits."""
    directory = edited(tiny_model(name), tmp_path / "model", sliding_window=window)
    decoder, reference = load(directory)
    ids, others = prompt(2 * window + 40), prompt(window + 1, seed=1)
    expected, expected_others = (expected_logits(reference, x) for x in (ids, others))
    edges = sorted({max(window - 1, 1), window, window + 1, 2 * window + 1})
    for kv_format, bound in ((EXACT, 1e-4), (KVFormat(8, 8), LOSS[KVFormat(8, 8)])):
        for cuts in (edges, list(range(1, len(ids)))):
            found = all_logits(decoder, ids, cuts, kv_format)
            assert (found - expected).abs().max() <= bound
        cache = Cache(decoder, 2, len(ids), kv_format)
        first = cache.feed([(0, ids[: window + 1]), (1, others[:window])])
        second = cache.feed([(1, others[window:]), (0, ids[window + 1 :])])
        assert (torch.cat((first[0], second[1])) - expected).abs().max() <= bound
        assert (torch.cat((first[1], second[0])) - expected_others).abs().max() <= bound


@torch.inference_mode()
@pytest.mark.parametrize(("policy", "sinks"), [("slide", 0), ("sinks", 4)])
@pytest.mark.parametrize("context_tokens", [20, 32, 45])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_context_that_slides_is_attention_over_its_last_tokens_at_their_positions(
    name, context_tokens, policy, sinks, tiny_model, monkeypatch
):
    _, reference = load(tiny_model(name))
    engine = engine_of(
        tiny_model(name),
        context_tokens=context_tokens,
        context_policy=policy,
        step_tokens=7,
        max_sequences=1,  # so the cache is as small as can be
    )
    engine.decode_with(None)  # so that all logits go through `decoder.logits`
    logits, compute = [], engine.decoder.logits
    monkeypatch.setattr(
        engine.decoder, "logits", lambda hidden: logits.append(compute(hidden)) or logits[-1]
    )
    sequence = engine.add(prompt(19).tolist(), GREEDY, 110)
    for _ in range(200):
        engine.step()
    assert sequence.finish_reason == "length"
    ids = torch.tensor(sequence.token_ids)
    at = torch.arange(len(ids))
    query = at.unsqueeze(1)
    seen = (at <= query) & ((at > query - (context_tokens - sinks)) | (at < sinks))
    assert int(seen.sum(1).max()) == context_tokens
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = reference(ids[None], attention_mask=mask[None, None]).logits[0].float()
    assert len(ids) == 19 + 110
    assert (torch.cat(logits) - expected[18:-1]).abs().max() <= 1e-4
    assert ids[19:].tolist() == expected[18:-1].argmax(-1).tolist()
