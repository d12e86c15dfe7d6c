"""The decoder, written once over the operations and driven by configuration.

Read it from the bottom up: `Decoder` embeds, runs the blocks, normalizes; a `Block` is attention
and an MLP, each behind a norm and added to the residual. Tokens are a flat list, those of several
sequences side by side; the cache holds what came before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig
from qinfer.errors import CheckpointError
from qinfer.models.architectures import TABLE, Architecture, linear_shapes, prefix_in
from qinfer.models.rope import RotaryTable, frequencies
from qinfer.ops.paged import Batch, KVLayer
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.weights import Weight, load_weight

Rotation = tuple[Tensor, Tensor] | None
Watch = Callable[[str, Tensor], None]


class _Loader:
    """Takes named tensors out of a checkpoint, checks shapes, and prepares them for a backend."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, ops: ReferenceOps) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.arch: Architecture = TABLE[config.architecture]
        self.prefix = prefix_in(checkpoint.tensors, self.arch)
        self.ops = ops

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        data = self.checkpoint.tensor(name)
        if tuple(data.shape) != shape or not data.is_floating_point():
            raise CheckpointError(
                f"{name} is {data.dtype} {list(data.shape)}, config.json implies {list(shape)}",
                hint="Weights and config.json do not belong together; download the model again.",
            )
        return data

    def vector(self, name: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.tensor(name, (size,)).to(self.ops.device, dtype)

    def weight(self, name: str, shape: tuple[int, int], *, transposed: bool = False) -> Weight:
        stored = load_weight(self.checkpoint, name, shape, transposed=transposed)
        prepared = self.ops.prepare(stored)
        self.checkpoint.drop_pages()  # the backend may have made a copy
        return prepared

    def norm(self, name: str, size: int) -> Callable[[Tensor], Tensor]:
        weight, eps, ops = self.vector(f"{name}.weight", size), self.config.norm_eps, self.ops
        if self.arch.norm == "rms":
            return lambda x: ops.rms_norm(x, weight, eps)
        bias = self.vector(f"{name}.bias", size)
        return lambda x: ops.layer_norm(x, weight, bias, eps)

    def linear(self, block: str, name: str) -> Linear:
        n, k, has_bias = linear_shapes(self.config)[name]
        weight = self.weight(block + name, (n, k), transposed=self.arch.transposed)
        bias = self.vector(f"{block}{name}.bias", n, self.ops.dtype) if has_bias else None
        return Linear(self.ops, weight, bias)


class Linear:
    """A projection, quantized or not."""

    def __init__(self, ops: ReferenceOps, weight: Weight, bias: Tensor | None) -> None:
        self.ops = ops
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs]."""
        return self.ops.linear(x, self.weight, self.bias)


class Attention:
    """Grouped-query attention with rotary or learned positions."""

    def __init__(self, load: _Loader, block: str) -> None:
        config, arch = load.config, load.arch
        self.ops = load.ops
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.heads = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.num_key_value_heads,
        )
        self.qkv = [load.linear(block, name) for name in arch.qkv]
        self.o_proj = load.linear(block, arch.output)
        self.q_norm = load.norm(block + arch.q_norm, self.head_dim) if config.qk_norm else None
        self.k_norm = load.norm(block + arch.k_norm, self.head_dim) if config.qk_norm else None

    def __call__(self, x: Tensor, rotation: Rotation, cache: KVLayer, batch: Batch) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]; stores the tokens' keys and values in `cache`."""
        q, k, v = self._project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = self.ops.rotary(q, *rotation), self.ops.rotary(k, *rotation)
        mixed = self.ops.attention(q, k, v, cache, batch, scale=self.scale)
        return self.o_proj(mixed.flatten(1))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, hidden] → q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]."""
        if len(self.qkv) == 1:
            sizes = [n * self.head_dim for n in self.heads]
            parts = torch.split_with_sizes(self.qkv[0](x), sizes, dim=-1)
        else:
            parts = tuple(projection(x) for projection in self.qkv)
        q, k, v = (
            part.view(-1, n, self.head_dim) for part, n in zip(parts, self.heads, strict=True)
        )
        return q, k, v


class MLP:
    """Two or, with a gate, three projections around a nonlinearity."""

    def __init__(self, load: _Loader, block: str) -> None:
        arch = load.arch
        self.ops = load.ops
        self.kind = load.config.hidden_act
        self.gate_proj = load.linear(block, arch.gate) if arch.gate is not None else None
        self.up_proj = load.linear(block, arch.up)
        self.down_proj = load.linear(block, arch.down)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        up = self.up_proj(x)
        if self.gate_proj is None:
            return self.down_proj(self.ops.activation(up, self.kind))
        return self.down_proj(self.ops.gated_activation(self.gate_proj(x), up, self.kind))


class Block:
    """Attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, load: _Loader, layer: int) -> None:
        block, hidden = f"{load.prefix}{load.arch.layers}.{layer}.", load.config.hidden_size
        self.attention_norm = load.norm(block + load.arch.attention_norm, hidden)
        self.attention = Attention(load, block)
        self.mlp_norm = load.norm(block + load.arch.mlp_norm, hidden)
        self.mlp = MLP(load, block)

    def __call__(self, x: Tensor, rotation: Rotation, cache: KVLayer, batch: Batch) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        x = x + self.attention(self.attention_norm(x), rotation, cache, batch)
        return x + self.mlp(self.mlp_norm(x))


class Decoder:
    """A causal language model without its tokenizer.

    Attributes:
        config: What it was built from.
        ops: The backend.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, ops: ReferenceOps) -> None:
        """Map the weights; pages are read when first used.

        Raises:
            CheckpointError: A tensor is missing or has another shape than the config implies.
            UnsupportedModelError: A weight is quantized in a way that is not covered.
        """
        load = _Loader(checkpoint, config, ops)
        arch, vocab = load.arch, (config.vocab_size, config.hidden_size)
        self.config = config
        self.ops = ops
        self.embed_tokens = load.tensor(f"{load.prefix}{arch.embedding}.weight", vocab)
        self.embed_positions = None
        if arch.positions is not None:
            table = (config.max_position_embeddings, config.hidden_size)
            self.embed_positions = load.tensor(f"{load.prefix}{arch.positions}.weight", table)
        self.blocks = [Block(load, i) for i in range(config.num_hidden_layers)]
        self.norm = load.norm(load.prefix + arch.final_norm, config.hidden_size)
        head = load.prefix + arch.embedding if config.tie_word_embeddings else arch.head
        self.lm_head = load.weight(head, vocab)
        self.rotary = None
        if config.rope is not None:
            inv_freq, factor = frequencies(
                config.rope, config.head_dim, config.max_position_embeddings
            )
            self.rotary = RotaryTable(inv_freq.to(ops.device), factor)

    def forward(
        self, batch: Batch, cache: Sequence[KVLayer], *, watch: Watch | None = None
    ) -> Tensor:
        """Run tokens that follow those in the cache, and store their keys and values there.

        Args:
            batch: The tokens; ids in `[0, vocab_size)`.
            cache: Per layer; in place.
            watch: Called with the name and output [tokens, hidden] of the embedding, of each
                block and of the final norm.

        Returns:
            [tokens, hidden], normalized, in the backend's dtype.
        """
        watch = watch or (lambda name, x: None)
        x = self.ops.embedding(self.embed_tokens, batch.ids)
        if self.embed_positions is not None:
            x = x + self.ops.embedding(self.embed_positions, batch.positions)
        rotation = None
        if self.rotary is not None:
            rotation = self.rotary.rows(batch.positions, batch.last_position)
        watch("the embedding", x)
        for i, (block, layer) in enumerate(zip(self.blocks, cache, strict=True)):
            x = block(x, rotation, layer, batch)
            watch(f"layer {i}", x)
        x = self.norm(x)
        watch("the final norm", x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the vocabulary for the tokens given.

        Args:
            hidden: [tokens, hidden] from `forward`; pass only the tokens that need logits.

        Returns:
            fp32 [tokens, vocab_size].
        """
        return self.ops.logits(hidden, self.lm_head)
