"""Decoder blocks as a backend may run them as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from qinfer.ops.draws import Draws
from qinfer.ops.paged import Batch, KVLayer
from qinfer.quant.weights import Weight

Rotation = tuple[Tensor, Tensor] | None
"""Cosines and sines of a batch's tokens, fp32 [tokens, head_dim / 2] each."""

WholeBlocks = Callable[[Tensor, Rotation, Sequence[KVLayer], Batch], Tensor | None]
"""[tokens, hidden], perhaps in place, through blocks and the norm behind them; None, with nothing
done, for a cache that it does not read. The layers are those of the blocks, and in the same object
as before if they are the same."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a decoding step of fixed shape reads and writes, time and again.

    Attributes:
        batch: One token of each sequence.
        rotary: Cosines and sines of all positions, fp32 [positions, head_dim / 2] each.
        layers: The cache.
        logits: fp32 [sequences, vocab], written.
        results: int64 [2, sequences], written: what `ReferenceOps.greedy` gives, or `draw`.
        vocab_size: For that.
        draws: For that; None is greedy.
    """

    batch: Batch
    rotary: Rotation
    layers: Sequence[KVLayer]
    logits: Tensor
    results: Tensor
    vocab_size: int
    draws: Draws | None = None


WholeStep = Callable[[StepTensors], Callable[[], None] | None]
"""What runs a step over these tensors, ids to results; None for a cache that it does not read."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, or with a bias LayerNorm.

    Attributes:
        weight: fp32 [size].
        bias: fp32 [size].
        eps: Under the root.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer.

    Attributes:
        weight: (N, K), as the backend prepared it.
        bias: [N], in the dtype of activations.
    """

    weight: Weight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockParameters:
    """What a block consists of: attention and an MLP, each behind a norm and added to the residual.

    Attributes:
        attention_norm: Before attention.
        qkv: Of queries, keys and values; or one for all of them, in this order.
        q_norm: Of each head of queries.
        k_norm: Of each head of keys.
        output: Behind attention.
        mlp_norm: Before the MLP.
        gate_up: First layer of the MLP: its gate and what that is multiplied with behind the
            activation; or one for both, in this order. Without a gate, what is activated.
        is_gated: Whether there is a gate.
        down: Last layer of the MLP.
        activation: One of `qinfer.config.ACTIVATIONS`.
        heads: Of queries.
        kv_heads: Of keys and values.
        head_dim: Size of a head.
        scale: Multiplies the scores.
        softcap: Bounds them, see `ReferenceOps.attention`.
    """

    attention_norm: Norm
    qkv: Sequence[Projection]
    q_norm: Norm | None
    k_norm: Norm | None
    output: Projection
    mlp_norm: Norm
    gate_up: Sequence[Projection]
    is_gated: bool
    down: Projection
    activation: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
