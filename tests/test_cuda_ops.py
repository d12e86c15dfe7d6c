"""Whole models over the kernels for GPUs: interpreted, and on a device if there is one."""

import gc
import itertools

import pytest
import torch

pytest.importorskip("triton")

from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig
from qinfer.models.decoder import Decoder
from qinfer.ops.cuda.blocks import FusedBlocks
from qinfer.ops.cuda.ops import CUDAOps
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.weights import AffineWeight, DenseWeight
from qinfer.sampling import SamplingParams
from tests.engines import engine_of

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
# The interpreter takes seconds for what a device does at once.
PROMPTS = [list(range(3, 40 if HAS_GPU else 8)), [7], list(range(100, 131 if HAS_GPU else 103))]
STEPS = 40 if HAS_GPU else 2

on_any_device = pytest.mark.gpu if HAS_GPU else pytest.mark.filterwarnings("default::Warning")


def fp32_ops(**options):
    return CUDAOps(DEVICE, torch.float32, half=torch.float16, **options)


def reference_ops():
    return ReferenceOps(DEVICE, torch.float32, half=torch.float16)


def generate(engine, prompts, new_tokens):
    """Of every second prompt the tokens are drawn."""
    ways = itertools.cycle([GREEDY, SamplingParams(temperature=1.0, top_p=0.9, seed=1)])
    sequences = [
        engine.add(prompt, way, new_tokens) for prompt, way in zip(prompts, ways, strict=False)
    ]
    while engine.stats.running or engine.stats.waiting:
        engine.step()
    assert all(sequence.error is None for sequence in sequences)
    return [sequence.token_ids[sequence.prompt_tokens :] for sequence in sequences]


def hidden_states(directory, ops, steps, bits=16):
    """Hidden states of the steps of one sequence, whose tokens do not depend on them."""
    engine = engine_of(directory, ops, bits=bits)
    engine.decoding = None
    found = []
    forward = engine.decoder.forward

    def noting(batch, cache, **options):
        hidden = forward(batch, cache, **options)
        found.append(hidden.float())
        return hidden

    engine.decoder.forward = noting
    sequence = engine.add(PROMPTS[0], GREEDY, steps)
    while sequence.finish_reason is None:
        engine.step()
        sequence.token_ids[-1] = 20 + sequence.new_tokens
    return found


def assert_like_the_reference(directory):
    expected = hidden_states(directory, reference_ops(), STEPS)
    found = hidden_states(directory, fp32_ops(), STEPS)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@on_any_device
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama-mqa-llama3", "bf16"),
        ("gpt2", "nf4"),
        ("qwen2", "bf16"),
        ("qwen3", "bf16"),
        ("mistral", "bf16"),
    ],
)
def test_hidden_states_are_the_reference_operations(converted, name, scheme):
    assert_like_the_reference(converted(name, scheme))


@on_any_device
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_several_sequences_write_what_the_reference_writes(converted, bits):
    directory = converted("llama", "bf16")
    expected = generate(engine_of(directory, reference_ops(), bits=bits), PROMPTS, STEPS)
    assert generate(engine_of(directory, fp32_ops(), bits=bits), PROMPTS, STEPS) == expected


def test_what_the_blocks_share_is_one_product(converted):
    directory = converted("llama", "int4")
    config = ModelConfig.read(directory)
    decoder = Decoder(Checkpoint(directory), config, fp32_ops())
    assert isinstance(decoder.whole_blocks, FusedBlocks)
    for block in decoder.blocks:
        (joined,) = block.parameters.qkv
        assert isinstance(joined.weight, AffineWeight)
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        assert joined.weight.shape == (heads * config.head_dim, config.hidden_size)
        (joined,) = block.parameters.gate_up
        assert joined.weight.shape == (2 * config.intermediate_size, config.hidden_size)


def test_biases_of_what_is_joined_are_joined(converted):
    directory = converted("qwen2", "int8")
    config = ModelConfig.read(directory)
    decoder = Decoder(Checkpoint(directory), config, fp32_ops())
    (joined,) = decoder.blocks[0].parameters.qkv
    assert joined.bias.shape == (joined.weight.shape[0],)


def test_a_tied_embedding_is_on_the_device_once(tiny_model):
    directory = tiny_model("llama")
    config = ModelConfig.read(directory)
    decoder = Decoder(Checkpoint(directory), config, fp32_ops())
    assert isinstance(decoder.lm_head, DenseWeight)
    assert decoder.embed_tokens.data_ptr() == decoder.lm_head.data.data_ptr()
    assert decoder.embeds_on_device


def test_embeddings_that_stay_on_the_host_are_not_counted(converted):
    directory = converted("llama-untied-bias", "int8")

    def plan(ops):
        return engine_of(directory, ops, context_tokens=64, max_sequences=1).decoder.ops

    assert plan(fp32_ops(embeddings_on_host=True)).maps_tables
    assert not plan(fp32_ops()).maps_tables


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_integers_of_every_architecture_are_the_reference_operations(converted, name, scheme):
    assert_like_the_reference(converted(name, scheme))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("scheme", ["int4", "int8", "nf4", "bf16"])
def test_16_bit_activations_stay_near_the_reference(converted, scheme, bits):
    directory = converted("llama", scheme)
    native = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    expected = hidden_states(directory, reference_ops(), 4, bits)
    found = hidden_states(directory, CUDAOps(DEVICE, native), 4, bits)
    for a, b in zip(found, expected, strict=True):
        assert ((a - b).norm() / b.norm()) < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")
def test_memory_stays_within_weights_cache_and_600_mb(converted):
    directory = converted("llama", "int8")
    gc.collect()  # engines of other tests
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    native = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    engine = engine_of(directory, CUDAOps(DEVICE, native))
    generate(engine, PROMPTS, 20)
    stored = sum(info.nbytes for info in Checkpoint(directory).tensors.values())
    peak = torch.cuda.max_memory_reserved() - before
    assert peak <= stored + engine.cache.nbytes + 600 * 10**6
