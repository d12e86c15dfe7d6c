"""Hugging Face's `config.json` and `generation_config.json` from the keys of a GGUF file.

Names and shapes of tensors are in `layout`, rotary scaling in `rope`, special tokens in
`vocabulary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer_converters.gguf.data import read_rows
from qinfer_converters.gguf.layout import LAYOUTS, ROPE_FACTORS
from qinfer_converters.gguf.metadata import Metadata
from qinfer_converters.gguf.reader import TensorInfo
from qinfer_converters.gguf.rope import rope_scaling
from qinfer_converters.gguf.vocabulary import SpecialIds

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
# Keys that change what the model computes, and the values with which they do not.
_NEUTRAL = {
    "expert_count": 0.0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
}


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes that shapes follow from."""

    arch: str
    blocks: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    vocab: int

    def letters(self) -> dict[str, int]:
        """Axis sizes by the letters that `layout.Rule.shape` uses."""
        return {
            "h": self.hidden,
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "a": (self.heads + 2 * self.kv_heads) * self.head_dim,
            "d": self.head_dim,
            "i": self.intermediate,
            "v": self.vocab,
            "p": self.context,
        }


def read_dimensions(metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> Dimensions:
    """Read and check the architecture's name and sizes.

    Raises:
        UnsupportedModelError: The architecture, or a variant of it, is not supported.
        CheckpointError: A key is missing or has an impossible value.
    """
    arch = metadata.require_string("general.architecture")
    if arch not in LAYOUTS:
        raise UnsupportedModelError(
            f"{metadata.path}: architecture {arch} is not supported",
            hint=f"Supported are {', '.join(LAYOUTS)}.",
        )
    for key, neutral in _NEUTRAL.items():
        if (metadata.number(f"{arch}.{key}") or neutral) != neutral:
            value = metadata[f"{arch}.{key}"]
            raise UnsupportedModelError(f"{metadata.path}: {arch}.{key} = {value} is not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{metadata.path}: missing tensor token_embd.weight")
    heads = _count(metadata, f"{arch}.attention.head_count")
    hidden = metadata.require_integer(f"{arch}.embedding_length")
    sizes = Dimensions(
        arch=arch,
        blocks=metadata.require_integer(f"{arch}.block_count"),
        hidden=hidden,
        intermediate=_count(metadata, f"{arch}.feed_forward_length"),
        heads=heads,
        kv_heads=_count(metadata, f"{arch}.attention.head_count_kv", heads),
        head_dim=metadata.integer(f"{arch}.attention.key_length") or hidden // heads,
        context=metadata.require_integer(f"{arch}.context_length"),
        vocab=embedding.shape[0],
    )
    _check(metadata, sizes, len(tensors))
    return sizes


def model_config(
    metadata: Metadata,
    sizes: Dimensions,
    tensors: Mapping[str, TensorInfo],
    special: SpecialIds,
) -> dict[str, Any]:
    """Build `config.json`.

    Args:
        metadata: The file's key-value pairs.
        sizes: Of the model.
        tensors: The file's tensors by GGUF name; `rope_freqs.weight` is read.
        special: Ids of the tokenizer's special tokens.
    """
    common = {
        "vocab_size": sizes.vocab,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": special.bos,
        "eos_token_id": special.eos,
        "pad_token_id": special.pad,
        "torch_dtype": "bfloat16",
    }
    build = _gpt2_config if sizes.arch == "gpt2" else _llama_config
    return build(metadata, sizes, tensors) | common


def generation_config(special: SpecialIds) -> dict[str, Any]:
    """Build `generation_config.json`, with every id that ends a text under `eos_token_id`."""
    entries = {
        "bos_token_id": special.bos,
        "eos_token_id": list(special.stops) or None,
        "pad_token_id": special.pad,
    }
    return {key: value for key, value in entries.items() if value is not None}


def _count(metadata: Metadata, key: str, default: int | None = None) -> int:
    """A positive integer; newer files may hold one per block, which must all be equal."""
    value = metadata.get(key)
    if isinstance(value, np.ndarray) and value.size and np.all(value == value[0]):
        value = int(value[0])
    if isinstance(value, np.ndarray):
        raise UnsupportedModelError(f"{metadata.path}: key {key} differs between blocks")
    if value is None and default is not None:
        return default
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return metadata.require_integer(key)


def _check(metadata: Metadata, sizes: Dimensions, tensor_count: int) -> None:
    arch, path = sizes.arch, metadata.path
    if sizes.blocks > tensor_count:
        raise CheckpointError(
            f"{path}: key {arch}.block_count is {sizes.blocks}, more than there are tensors"
        )
    if sizes.heads % sizes.kv_heads or sizes.head_dim <= 0 or sizes.head_dim % 2:
        raise CheckpointError(
            f"{path}: {sizes.heads} heads, {sizes.kv_heads} key-value heads and a head size of "
            f"{sizes.head_dim} do not fit together"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        value = metadata.integer(f"{arch}.{key}")
        if value not in (None, 0, sizes.head_dim):
            raise UnsupportedModelError(
                f"{path}: {arch}.{key} is {value}, but heads have the size {sizes.head_dim}"
            )


def _llama_config(
    metadata: Metadata, sizes: Dimensions, tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """The part of `config.json` that Llama, Mistral and Qwen share."""
    arch = sizes.arch
    window = metadata.integer(f"{arch}.attention.sliding_window") or None
    model_type = "mistral" if arch == "llama" and window else arch
    base = metadata.number(f"{arch}.rope.freq_base")
    theta = 10000.0 if base is None else _shortest(base)
    if not 1.0 < theta < float("inf"):
        raise CheckpointError(f"{metadata.path}: key {arch}.rope.freq_base is {base}")
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.blocks,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.context,
        "rms_norm_eps": _epsilon(metadata, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, sizes, theta, tensors.get(ROPE_FACTORS)),
    }
    return config | _variant(metadata, model_type, window, sizes, tensors)


def _variant(
    metadata: Metadata,
    model_type: str,
    window: int | None,
    sizes: Dimensions,
    tensors: Mapping[str, TensorInfo],
) -> dict[str, Any]:
    """The part of `config.json` in which Llama, Mistral and Qwen differ."""
    if model_type in ("qwen2", "qwen3"):
        if window and window < sizes.context:
            raise UnsupportedModelError(f"{metadata.path}: {model_type} with a sliding window")
        bias = {"attention_bias": False} if model_type == "qwen3" else {}  # qwen2 always has one
        return {"use_sliding_window": False, **bias}
    attention = _has_biases(metadata, tensors, "attn_q", "attn_k", "attn_v", "attn_output")
    mlp = _has_biases(metadata, tensors, "ffn_gate", "ffn_up", "ffn_down")
    if model_type == "llama":
        return {"attention_bias": attention, "mlp_bias": mlp}
    if attention or mlp:
        raise UnsupportedModelError(f"{metadata.path}: biases together with a sliding window")
    return {"sliding_window": window}


def _has_biases(metadata: Metadata, tensors: Mapping[str, TensorInfo], *parts: str) -> bool:
    """Whether these parts of all blocks have biases; some with and some without is an error."""
    found = sum(name.endswith(tuple(f".{part}.bias" for part in parts)) for name in tensors)
    blocks = sum(name.endswith(".attn_norm.weight") for name in tensors)
    if found not in (0, blocks * len(parts)):
        raise UnsupportedModelError(
            f"{metadata.path}: only some of {', '.join(parts)} have biases",
            hint="Hugging Face's Llama has biases on all of them or on none.",
        )
    return found > 0


def _rope_scaling(
    metadata: Metadata, sizes: Dimensions, theta: float, info: TensorInfo | None
) -> dict[str, Any] | None:
    factors = None
    if info is not None:
        if info.shape != (sizes.head_dim // 2,):
            raise CheckpointError(
                f"{metadata.path}: tensor {info.name} has the shape {list(info.shape)}, "
                f"expected {[sizes.head_dim // 2]}"
            )
        factors = read_rows(info, 0, info.shape[0]).double().numpy()
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise CheckpointError(f"{metadata.path}: tensor {info.name} has impossible values")
    return rope_scaling(metadata, sizes.arch, sizes.head_dim, theta, factors)


def _gpt2_config(
    metadata: Metadata, sizes: Dimensions, tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    del tensors  # GPT-2 has one form only
    if sizes.heads * sizes.head_dim != sizes.hidden or sizes.kv_heads != sizes.heads:
        raise CheckpointError(
            f"{metadata.path}: {sizes.heads} heads of {sizes.head_dim} do not make {sizes.hidden}"
        )
    return {
        "architectures": [_CLASSES["gpt2"]],
        "model_type": "gpt2",
        "n_embd": sizes.hidden,
        "n_inner": sizes.intermediate,
        "n_layer": sizes.blocks,
        "n_head": sizes.heads,
        "n_positions": sizes.context,
        "n_ctx": sizes.context,
        "layer_norm_epsilon": _epsilon(metadata, "gpt2.attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _epsilon(metadata: Metadata, key: str) -> float:
    value = metadata.require_number(key)
    if not 0.0 <= value < 1.0:
        raise CheckpointError(f"{metadata.path}: key {key} is {value}, expected a small number")
    return _shortest(value)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same number in fp32: 1e-05, not 9.9999997e-06."""
    return float(str(np.float32(value)))
