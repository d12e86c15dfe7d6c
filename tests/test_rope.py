"""Rotary frequencies are those of transformers."""

import copy

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from qinfer.config import ModelConfig
from qinfer.models.rope import frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 64},
    LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 16.0},
    {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    YARN,
    YARN | {"attention_factor": 1.5},
    YARN | {"truncate": False},
    YARN | {"beta_fast": 16, "beta_slow": 2},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    YARN | {"mscale": 0.7},
    YARN | {"mscale_all_dim": 1.3},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "attention_factor": 0.9},
    YARN | {"factor": 1.0},
    YARN | {"factor": 40.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 2.0},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (128, 500000.0), (24, 500.0)])
def test_frequencies_equal_those_of_transformers(scaling, head_dim, theta):
    fields = {
        "vocab_size": 32,
        "hidden_size": head_dim * 2,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_theta": theta, **scaling},
    }
    theirs = transformers.LlamaConfig.from_dict(copy.deepcopy(fields))  # it adds to the fields
    compute = ROPE_INIT_FUNCTIONS.get(
        scaling["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    expected, factor = compute(theirs, device=torch.device("cpu"))
    ours = ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"]} | fields)
    found, attention_factor = frequencies(ours.rope, ours.head_dim, ours.max_position_embeddings)
    assert found.dtype == torch.float32
    assert found.shape == (head_dim // 2,)
    assert ((found - expected) / expected).abs().max() < 1e-6
    assert attention_factor == pytest.approx(factor, rel=1e-6)


def test_every_kind_changes_the_frequencies():
    def of(scaling):
        fields = {"vocab_size": 32, "hidden_size": 128, "intermediate_size": 32}
        fields |= {"num_hidden_layers": 1, "num_attention_heads": 2}
        config = ModelConfig.from_dict(
            fields | {"architectures": ["LlamaForCausalLM"], "rope_parameters": scaling}
        )
        return tuple(frequencies(config.rope, config.head_dim, 16384)[0].tolist())

    assert len({of(scaling) for scaling in SCALINGS[:4]} | {of(YARN)}) == 5


def test_literal_frequencies():
    fields = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 32}
    fields |= {"num_hidden_layers": 1, "num_attention_heads": 1, "rope_theta": 10000.0}
    config = ModelConfig.from_dict(fields | {"architectures": ["LlamaForCausalLM"]})
    found, factor = frequencies(config.rope, 8, 2048)
    assert found.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert factor == 1.0
