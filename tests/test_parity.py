"""The decoder gives transformers' logits and tokens, with and without cache."""

import pytest
import torch
import transformers

from qinfer import ops
from qinfer.cache.contiguous import KVCache
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig, read_json
from qinfer.engine import engine as engine_module
from qinfer.engine.engine import Engine
from qinfer.models.decoder import Decoder
from qinfer.sampling import SamplingParams
from tests.tiny_models import SHAPES

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(params=SHAPES, scope="module")
def pair(request, tiny_model):
    directory = tiny_model(request.param)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config = ModelConfig.from_dict(read_json(directory / "config.json"))
    return Decoder(Checkpoint(directory), config, ops.select("cpu")), reference


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator)


def new_cache(decoder, capacity):
    return KVCache(decoder.config, capacity, decoder.ops.dtype, decoder.ops.device)


@torch.inference_mode()
def all_logits(decoder, ids, cuts):
    """Logits of every position, the prompt fed in pieces that end at `cuts`."""
    cache = new_cache(decoder, len(ids))
    found = []
    for piece in torch.tensor_split(ids, cuts):
        found.append(decoder.logits(decoder.forward(piece, cache)))
        cache.length += len(piece)
    return torch.cat(found)


@pytest.mark.parametrize(
    "cuts", [[], [1], [15], [16], [17], [7, 8, 9, 40], list(range(1, 50))], ids=str
)
def test_logits_at_every_position(pair, cuts):
    decoder, reference = pair
    ids = prompt(50)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0].float()
    found = all_logits(decoder, ids, cuts)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-4
    assert expected.std() > 0.1  # or the bound above would mean nothing


def generate(decoder, ids, count):
    engine = Engine(decoder, vocab_size=decoder.config.vocab_size, stop_ids=(), context_tokens=256)
    sequence = engine.start(ids.tolist(), GREEDY, count)
    while sequence.finish_reason is None:
        engine.step(sequence)
    return sequence.token_ids[len(ids) :]


@torch.inference_mode()
def generate_uncached(decoder, ids, count):
    for _ in range(count):
        hidden = decoder.forward(ids, new_cache(decoder, len(ids)))
        ids = torch.cat((ids, decoder.logits(hidden[-1:]).argmax(-1)))
    return ids[-count:].tolist()


@pytest.mark.parametrize("length", [1, 16, 33])
def test_greedy_ids(pair, length, monkeypatch):
    decoder, reference = pair
    ids = prompt(length, seed=length)
    reference.generation_config.eos_token_id = None
    expected = reference.generate(
        ids[None],
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        attention_mask=torch.ones(1, length, dtype=int),
    )[0, length:].tolist()
    assert len(expected) == 64
    assert generate(decoder, ids, 64) == expected
    assert generate_uncached(decoder, ids, 64) == expected
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK_TOKENS", 5)
    assert generate(decoder, ids, 64) == expected
