"""The architectures covered, as a table: where each keeps its tensors and how its block differs.

Names are Hugging Face's, so no tensor is ever renamed. A new architecture is an entry here and a
parser of its `config.json` in `qinfer.config`; the decoder itself is written once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Literal

from qinfer.config import ModelConfig

Role = Literal["linear", "head", "embedding", "vector"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Module names, and what the block is made of.

    Attributes:
        prefix: In front of every name but the head's; some checkpoints leave it out.
        layers: Of the list of blocks.
        positions: Of the learned position embedding, if there is one.
        qkv: One module each for q, k and v, or a single fused one.
        gate: None where the MLP has no gate.
        norm: `rms`, or `layer` for LayerNorm with bias.
        transposed: Dense linear weights are stored [in, out] (transformers' Conv1D).
        unused: Endings of names that old checkpoints carry and nothing reads.
    """

    prefix: str = "model."
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None
    final_norm: str = "norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    norm: Literal["rms", "layer"] = "rms"
    transposed: bool = False
    unused: tuple[str, ...] = (".rotary_emb.inv_freq",)


_LLAMA_LIKE = Architecture()
TABLE: dict[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA_LIKE,
    "MistralForCausalLM": _LLAMA_LIKE,
    "Qwen2ForCausalLM": _LLAMA_LIKE,
    "Qwen3ForCausalLM": _LLAMA_LIKE,
    "GPT2LMHeadModel": Architecture(
        prefix="transformer.",
        layers="h",
        embedding="wte",
        positions="wpe",
        final_norm="ln_f",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        gate=None,
        up="mlp.c_fc",
        down="mlp.c_proj",
        norm="layer",
        transposed=True,
        unused=(".attn.bias", ".attn.masked_bias"),
    ),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a model of a given configuration consists of.

    Attributes:
        name: In the checkpoint.
        shape: As a dense checkpoint stores it.
        role: What it is to a quantizer.
        module: Its name without `.weight` or `.bias`.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    module: str


def prefix_in(names: Container[str], architecture: Architecture) -> str:
    """The prefix that a checkpoint's names carry: the architecture's, or none."""
    bare = f"{architecture.embedding}.weight"
    return "" if bare in names and architecture.prefix + bare not in names else architecture.prefix


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """The linear layers of one block: module name → (outputs, inputs, has bias)."""
    arch, hidden = TABLE[config.architecture], config.hidden_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    outputs = (q, kv, kv) if len(arch.qkv) == 3 else (q + 2 * kv,)
    shapes = {name: (n, hidden, config.qkv_bias) for name, n in zip(arch.qkv, outputs, strict=True)}
    shapes[arch.output] = (hidden, q, config.o_bias)
    for name in (arch.gate, arch.up):
        if name is not None:
            shapes[name] = (config.intermediate_size, hidden, config.mlp_bias)
    shapes[arch.down] = (hidden, config.intermediate_size, config.mlp_bias)
    return shapes


def expected_tensors(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    """Every tensor a dense checkpoint of this model must have, in the order of use.

    A tied head is not among them.

    Args:
        config: The model.
        prefix: From `prefix_in`.
    """
    arch, hidden = TABLE[config.architecture], config.hidden_size
    yield _matrix(prefix + arch.embedding, (config.vocab_size, hidden), "embedding")
    if arch.positions is not None:
        shape = (config.max_position_embeddings, hidden)
        yield _matrix(prefix + arch.positions, shape, "embedding")
    for i in range(config.num_hidden_layers):
        yield from _block_tensors(config, arch, f"{prefix}{arch.layers}.{i}.")
    yield from _norm(arch, prefix + arch.final_norm, hidden)
    if not config.tie_word_embeddings:
        yield _matrix(arch.head, (config.vocab_size, hidden), "head")


def _block_tensors(config: ModelConfig, arch: Architecture, block: str) -> Iterator[TensorSpec]:
    yield from _norm(arch, block + arch.attention_norm, config.hidden_size)
    yield from _norm(arch, block + arch.mlp_norm, config.hidden_size)
    if config.qk_norm:
        yield from _norm(arch, block + arch.q_norm, config.head_dim)
        yield from _norm(arch, block + arch.k_norm, config.head_dim)
    for name, (n, k, bias) in linear_shapes(config).items():
        yield _matrix(block + name, (k, n) if arch.transposed else (n, k), "linear")
        if bias:
            yield TensorSpec(f"{block}{name}.bias", (n,), "vector", block + name)


def _norm(arch: Architecture, module: str, size: int) -> Iterator[TensorSpec]:
    for suffix in ("weight", "bias") if arch.norm == "layer" else ("weight",):
        yield TensorSpec(f"{module}.{suffix}", (size,), "vector", module)


def _matrix(module: str, shape: tuple[int, int], role: Role) -> TensorSpec:
    return TensorSpec(f"{module}.weight", shape, role, module)
