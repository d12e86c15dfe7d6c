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
from qinfer.ops.block import BlockParameters, Norm, Projection, Rotation
from qinfer.ops.paged import Batch, KVLayer
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.weights import DenseWeight, Weight, load_weight

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

    def table(self, name: str, shape: tuple[int, int], head: Weight | None = None) -> Tensor:
        """An embedding; the head's own tensor where that is the same one."""
        if self.config.tie_word_embeddings and isinstance(head, DenseWeight):
            return head.data
        return self.ops.table(self.tensor(f"{self.prefix}{name}.weight", shape))

    def norm(self, name: str, size: int) -> Norm:
        bias = None if self.arch.norm == "rms" else self.vector(f"{name}.bias", size)
        return Norm(self.vector(f"{name}.weight", size), bias, self.config.norm_eps)

    def linear(self, block: str, name: str) -> Projection:
        n, k, has_bias = linear_shapes(self.config)[name]
        weight = self.weight(block + name, (n, k), transposed=self.arch.transposed)
        bias = self.vector(f"{block}{name}.bias", n, self.ops.dtype) if has_bias else None
        return Projection(weight, bias)

    def block(self, layer: int) -> BlockParameters:
        config, arch = self.config, self.arch
        block, hidden = f"{self.prefix}{arch.layers}.{layer}.", config.hidden_size
        head_dim, qk_norm = config.head_dim, config.qk_norm
        gate_up = [self.linear(block, name) for name in (arch.gate, arch.up) if name is not None]
        return BlockParameters(
            attention_norm=self.norm(block + arch.attention_norm, hidden),
            qkv=self.ops.join([self.linear(block, name) for name in arch.qkv]),
            q_norm=self.norm(block + arch.q_norm, head_dim) if qk_norm else None,
            k_norm=self.norm(block + arch.k_norm, head_dim) if qk_norm else None,
            output=self.linear(block, arch.output),
            mlp_norm=self.norm(block + arch.mlp_norm, hidden),
            gate_up=self.ops.join(gate_up) if len(gate_up) > 1 else gate_up,
            is_gated=arch.gate is not None,
            down=self.linear(block, arch.down),
            activation=config.hidden_act,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
        )


class Block:
    """Attention and MLP, each behind a norm and added to the residual, over single operations."""

    def __init__(self, ops: ReferenceOps, parameters: BlockParameters) -> None:
        self.ops = ops
        self.parameters = parameters

    def __call__(self, x: Tensor, rotation: Rotation, cache: KVLayer, batch: Batch) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]; stores the tokens' keys and values in `cache`."""
        p = self.parameters
        x = x + self._attend(_normalize(self.ops, x, p.attention_norm), rotation, cache, batch)
        return x + self._feed_forward(_normalize(self.ops, x, p.mlp_norm))

    def _attend(self, x: Tensor, rotation: Rotation, cache: KVLayer, batch: Batch) -> Tensor:
        """Grouped-query attention with rotary or learned positions."""
        p = self.parameters
        q, k, v = self._project_heads(x)
        if p.q_norm is not None and p.k_norm is not None:
            q, k = _normalize(self.ops, q, p.q_norm), _normalize(self.ops, k, p.k_norm)
        if rotation is not None:
            q, k = self.ops.rotary(q, *rotation), self.ops.rotary(k, *rotation)
        mixed = self.ops.attention(q, k, v, cache, batch, scale=p.scale, softcap=p.softcap)
        return self._project(mixed.flatten(1), p.output)

    def _project_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, hidden] → q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]."""
        p = self.parameters
        heads = (p.heads, p.kv_heads, p.kv_heads)
        if len(p.qkv) == 1:
            sizes = [n * p.head_dim for n in heads]
            parts = torch.split_with_sizes(self._project(x, p.qkv[0]), sizes, dim=-1)
        else:
            parts = tuple(self._project(x, projection) for projection in p.qkv)
        q, k, v = (part.view(-1, n, p.head_dim) for part, n in zip(parts, heads, strict=True))
        return q, k, v

    def _feed_forward(self, x: Tensor) -> Tensor:
        """Two or, with a gate, three projections around a nonlinearity."""
        p = self.parameters
        parts = [self._project(x, projection) for projection in p.gate_up]
        if not p.is_gated:
            return self._project(self.ops.activation(parts[0], p.activation), p.down)
        gate, up = parts if len(parts) > 1 else parts[0].chunk(2, dim=-1)
        return self._project(self.ops.gated_activation(gate, up, p.activation), p.down)

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        """[tokens, inputs] → [tokens, outputs]."""
        return self.ops.linear(x, projection.weight, projection.bias)


def _normalize(ops: ReferenceOps, x: Tensor, norm: Norm) -> Tensor:
    if norm.bias is None:
        return ops.rms_norm(x, norm.weight, norm.eps)
    return ops.layer_norm(x, norm.weight, norm.bias, norm.eps)


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
        parameters = [load.block(i) for i in range(config.num_hidden_layers)]
        self.blocks = [Block(ops, p) for p in parameters]
        self.norm = load.norm(load.prefix + arch.final_norm, config.hidden_size)
        self.whole_blocks = ops.whole_blocks(parameters, self.norm)
        head = load.prefix + arch.embedding if config.tie_word_embeddings else arch.head
        self.lm_head = load.weight(head, vocab)
        self.embed_tokens = load.table(arch.embedding, vocab, self.lm_head)
        self.embed_positions = None
        if arch.positions is not None:
            positions = (config.max_position_embeddings, config.hidden_size)
            self.embed_positions = load.table(arch.positions, positions)
        tables = self.embed_tokens, self.embed_positions
        self.whole_step = ops.whole_step(self.whole_blocks, tables, self.lm_head)
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
        return self.run(self.embed(batch.ids, batch.positions), batch, cache, watch=watch)

    @property
    def embeds_on_device(self) -> bool:
        """Whether the embeddings are where the model computes."""
        tables = self.embed_tokens, self.embed_positions
        return all(table is None or table.device == self.ops.device for table in tables)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """What the blocks get: [tokens, hidden] of ids and positions, int64 [tokens] each."""
        x = self.ops.embedding(self.embed_tokens, ids)
        if self.embed_positions is not None:
            x = x + self.ops.embedding(self.embed_positions, positions)
        return x

    def run(
        self, x: Tensor, batch: Batch, cache: Sequence[KVLayer], *, watch: Watch | None = None
    ) -> Tensor:
        """The rest of `forward`, from what `embed` gave for the batch; that may be overwritten."""
        rotation = None
        if self.rotary is not None:
            rotation = self.rotary.rows(batch.positions, batch.last_position)
        if watch is None:
            return self._run_at_once(x, rotation, cache, batch)
        watch("the embedding", x)
        for i, (block, layer) in enumerate(zip(self.blocks, cache, strict=True)):
            x = block(x, rotation, layer, batch)
            watch(f"layer {i}", x)
        x = _normalize(self.ops, x, self.norm)
        watch("the final norm", x)
        return x

    def _run_at_once(
        self, x: Tensor, rotation: Rotation, cache: Sequence[KVLayer], batch: Batch
    ) -> Tensor:
        """In one call if the backend has it."""
        whole = self.whole_blocks and self.whole_blocks(x, rotation, cache, batch)
        if whole is not None:
            return whole
        for block, layer in zip(self.blocks, cache, strict=True):
            x = block(x, rotation, layer, batch)
        return _normalize(self.ops, x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the vocabulary for the tokens given.

        Args:
            hidden: [tokens, hidden] from `forward`; pass only the tokens that need logits.

        Returns:
            fp32 [tokens, vocab_size].
        """
        return self.ops.logits(hidden, self.lm_head)
