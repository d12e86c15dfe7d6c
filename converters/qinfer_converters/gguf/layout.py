"""Which GGUF tensor is which Hugging Face tensor, for every architecture that can be read.

One table per architecture: names, expected shapes, and how the stored layout differs. Numbers
and configuration keys are read elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from qinfer.errors import CheckpointError
from qinfer_converters.gguf.reader import TensorInfo


class Storage(Enum):
    """How the stored rows relate to Hugging Face's.

    `ROTARY_Q` and `ROTARY_K`: within each head, rows 2i and 2i + 1 are Hugging Face's rows i and
    i + d/2, since llama.cpp rotates neighbouring pairs. `TRANSPOSED`: `[out, in]`, where Hugging
    Face's `Conv1D` has `[in, out]`.
    """

    PLAIN = 0
    ROTARY_Q = 1
    ROTARY_K = 2
    TRANSPOSED = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """Where one GGUF tensor goes.

    Attributes:
        name: Hugging Face name; within a block, after the block's prefix.
        shape: One letter per axis of the stored tensor: h hidden, q query heads times head size,
            k the same for key-value heads, a query, key and value together, d head size,
            i intermediate, v vocabulary, p positions.
        storage: How the rows are stored.
        required: Whether a model without it is incomplete.
    """

    name: str
    shape: str
    storage: Storage = Storage.PLAIN
    required: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of an architecture.

    Attributes:
        prefix: Hugging Face prefix of a block; the block's number and a dot follow.
        top: Rules by GGUF name.
        block: Rules by GGUF name after `blk.N.`.
    """

    prefix: str
    top: Mapping[str, Rule]
    block: Mapping[str, Rule]


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A GGUF tensor together with the rule that it matched and its full Hugging Face name."""

    name: str
    info: TensorInfo
    storage: Storage

    @property
    def shape(self) -> tuple[int, ...]:
        """In Hugging Face order."""
        shape = self.info.shape
        return shape[::-1] if self.storage is Storage.TRANSPOSED else shape


_TOP = {
    "token_embd.weight": Rule("model.embed_tokens.weight", "vh"),
    "output_norm.weight": Rule("model.norm.weight", "h"),
    "output.weight": Rule("lm_head.weight", "vh", required=False),
}
_BLOCK = {
    "attn_norm.weight": Rule("input_layernorm.weight", "h"),
    "attn_q.weight": Rule("self_attn.q_proj.weight", "qh"),
    "attn_k.weight": Rule("self_attn.k_proj.weight", "kh"),
    "attn_v.weight": Rule("self_attn.v_proj.weight", "kh"),
    "attn_output.weight": Rule("self_attn.o_proj.weight", "hq"),
    "ffn_norm.weight": Rule("post_attention_layernorm.weight", "h"),
    "ffn_gate.weight": Rule("mlp.gate_proj.weight", "ih"),
    "ffn_up.weight": Rule("mlp.up_proj.weight", "ih"),
    "ffn_down.weight": Rule("mlp.down_proj.weight", "hi"),
}
_LLAMA_BLOCK = _BLOCK | {
    "attn_q.weight": Rule("self_attn.q_proj.weight", "qh", Storage.ROTARY_Q),
    "attn_k.weight": Rule("self_attn.k_proj.weight", "kh", Storage.ROTARY_K),
    "attn_q.bias": Rule("self_attn.q_proj.bias", "q", Storage.ROTARY_Q, required=False),
    "attn_k.bias": Rule("self_attn.k_proj.bias", "k", Storage.ROTARY_K, required=False),
    "attn_v.bias": Rule("self_attn.v_proj.bias", "k", required=False),
    "attn_output.bias": Rule("self_attn.o_proj.bias", "h", required=False),
    "ffn_gate.bias": Rule("mlp.gate_proj.bias", "i", required=False),
    "ffn_up.bias": Rule("mlp.up_proj.bias", "i", required=False),
    "ffn_down.bias": Rule("mlp.down_proj.bias", "h", required=False),
}
_QWEN2_BLOCK = _BLOCK | {
    "attn_q.bias": Rule("self_attn.q_proj.bias", "q"),
    "attn_k.bias": Rule("self_attn.k_proj.bias", "k"),
    "attn_v.bias": Rule("self_attn.v_proj.bias", "k"),
}
_QWEN3_BLOCK = _BLOCK | {
    "attn_q_norm.weight": Rule("self_attn.q_norm.weight", "d"),
    "attn_k_norm.weight": Rule("self_attn.k_norm.weight", "d"),
}
_GPT2_TOP = {
    "token_embd.weight": Rule("transformer.wte.weight", "vh"),
    "position_embd.weight": Rule("transformer.wpe.weight", "ph"),
    "output_norm.weight": Rule("transformer.ln_f.weight", "h"),
    "output_norm.bias": Rule("transformer.ln_f.bias", "h"),
    "output.weight": Rule("lm_head.weight", "vh", required=False),
}
_GPT2_BLOCK = {
    "attn_norm.weight": Rule("ln_1.weight", "h"),
    "attn_norm.bias": Rule("ln_1.bias", "h"),
    "attn_qkv.weight": Rule("attn.c_attn.weight", "ah", Storage.TRANSPOSED),
    "attn_qkv.bias": Rule("attn.c_attn.bias", "a"),
    "attn_output.weight": Rule("attn.c_proj.weight", "hh", Storage.TRANSPOSED),
    "attn_output.bias": Rule("attn.c_proj.bias", "h"),
    "ffn_norm.weight": Rule("ln_2.weight", "h"),
    "ffn_norm.bias": Rule("ln_2.bias", "h"),
    "ffn_up.weight": Rule("mlp.c_fc.weight", "ih", Storage.TRANSPOSED),
    "ffn_up.bias": Rule("mlp.c_fc.bias", "i"),
    "ffn_down.weight": Rule("mlp.c_proj.weight", "hi", Storage.TRANSPOSED),
    "ffn_down.bias": Rule("mlp.c_proj.bias", "h"),
}
LAYOUTS = {
    "llama": Layout("model.layers.", _TOP, _LLAMA_BLOCK),
    "qwen2": Layout("model.layers.", _TOP, _QWEN2_BLOCK),
    "qwen3": Layout("model.layers.", _TOP, _QWEN3_BLOCK),
    "gpt2": Layout("transformer.h.", _GPT2_TOP, _GPT2_BLOCK),
}
ROPE_FACTORS = "rope_freqs.weight"  # no weight, but a part of the configuration
_BLOCK_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)")


def map_tensors(
    layout: Layout,
    tensors: Mapping[str, TensorInfo],
    blocks: int,
    sizes: Mapping[str, int],
    label: str,
) -> dict[str, MappedTensor]:
    """Match every tensor of a file with its rule.

    Args:
        layout: The table of the file's architecture.
        tensors: The file's tensors by GGUF name.
        blocks: Number of blocks that the model has.
        sizes: Axis sizes by the letters of `Rule.shape`.
        label: The file, for messages.

    Returns:
        By Hugging Face name, in file order.

    Raises:
        CheckpointError: A tensor is unknown, missing, or of another shape than expected.
    """
    mapped: dict[str, MappedTensor] = {}
    unknown = []
    for info in tensors.values():
        if info.name == ROPE_FACTORS:
            continue
        found = _rule(layout, info.name, blocks)
        if found is None:
            unknown.append(info.name)
            continue
        name, rule = found
        expected = tuple(sizes[letter] for letter in rule.shape)
        if info.shape != expected:
            raise CheckpointError(
                f"{label}: tensor {info.name} has the shape {list(info.shape)}, "
                f"expected {list(expected)}"
            )
        mapped[name] = MappedTensor(name, info, rule.storage)
    if unknown:
        raise CheckpointError(
            f"{label}: cannot place {_listed(unknown)}",
            hint="The model has parts that its architecture does not have here.",
        )
    missing = [name for name in _required(layout, blocks) if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{label}: missing {_listed(missing)}",
            hint="The file is incomplete; download or convert it again.",
        )
    return mapped


def _rule(layout: Layout, name: str, blocks: int) -> tuple[str, Rule] | None:
    """The full Hugging Face name and the rule of a GGUF tensor."""
    if rule := layout.top.get(name):
        return rule.name, rule
    match = _BLOCK_NAME.fullmatch(name)
    if match and int(match[1]) < blocks and (rule := layout.block.get(match[2])):
        return f"{layout.prefix}{match[1]}.{rule.name}", rule
    return None


def _required(layout: Layout, blocks: int) -> list[str]:
    names = [name for name, rule in layout.top.items() if rule.required]
    part = [name for name, rule in layout.block.items() if rule.required]
    return names + [f"blk.{index}.{name}" for index in range(blocks) for name in part]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    noun = "tensor" if len(names) == 1 else f"{len(names)} tensors:"
    return f"{noun} {shown}{', …' if len(names) > 5 else ''}"
