"""The operations in plain torch: on any device, in any float dtype, and obviously right.

This is the definition that every kernel is tested against. Tokens are a flat list: there is no
batch axis and no padding. Norms, rotary tables, softmax and logits are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from qinfer.ops.attention import paged_attention
from qinfer.ops.block import BlockParameters, Norm, Projection, WholeBlocks, WholeStep
from qinfer.ops.draws import Draws, draw_tokens
from qinfer.ops.paged import Batch, KVLayer
from qinfer.quant.weights import Weight

_BLOCK_WEIGHTS = 2**20  # dequantized at a time: 4 MB of fp32, whatever the layer's size


class ReferenceOps:
    """Every operation of the decoder. Backends subclass it and replace what they do better.

    Attributes:
        device: Where activations live.
        dtype: Of activations.
        half: The 16-bit type of the key-value cache.
        maps_tables: Whether `table` leaves embeddings where they are mapped.
        fixed_steps: Whether decoding steps pay off that are of fixed shape; see `engine.decoding`.
        deterministic: Compute each token by itself, so that its result does not depend on those
            beside it: libraries choose other orders of addition for other numbers of rows.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        half: torch.dtype = torch.float16,
        deterministic: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.half = half
        self.deterministic = deterministic
        self.maps_tables = True
        self.fixed_steps = False

    def table(self, data: Tensor) -> Tensor:
        """An embedding as this backend wants it in memory; called once per table, at load."""
        return data

    def join(self, projections: Sequence[Projection]) -> Sequence[Projection]:
        """Projections of the same input, or one for all of them if that is worth it."""
        return projections

    def prepare(self, weight: Weight) -> Weight:
        """A weight as this backend wants it in memory; called once per weight, at load."""
        return weight.to(self.device)

    def whole_blocks(self, parameters: Sequence[BlockParameters], norm: Norm) -> WholeBlocks | None:
        """All blocks and the norm behind them in one call; None if there is no such call.

        Args:
            parameters: Per block; its weights are prepared.
            norm: Behind the last block.
        """
        return None

    def whole_step(
        self, blocks: WholeBlocks | None, tables: Sequence[Tensor | None], head: Weight
    ) -> WholeStep | None:
        """Decoding steps in one call; None if there is no such call.

        Args:
            blocks: What `whole_blocks` gave.
            tables: The embeddings of tokens and, where they are learned, of positions.
            head: (vocab, hidden), prepared.
        """
        return None

    def forward_pass(self, tokens: int) -> AbstractContextManager[None]:
        """Surrounds a step of this many tokens, sampling included."""
        return nullcontext()

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """Look up rows.

        Args:
            table: [vocab, hidden], any float dtype, possibly mapped and on the CPU.
            ids: int64 [tokens].

        Returns:
            [tokens, hidden] on the backend's device, in its dtype.
        """
        return table[ids.to(table.device)].to(self.device, self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / rms(x) · weight` over the last axis, in fp32 ("RMSNorm", arXiv 1910.07467).

        Args:
            x: [..., size].
            weight: fp32 [size].
            eps: Added to the mean square.

        Returns:
            Like `x`.
        """
        return self._by_token(x, lambda x: _rms_norm(x, weight, eps))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """LayerNorm over the last axis, in fp32.

        Args:
            x: [..., size].
            weight: fp32 [size].
            bias: fp32 [size].
            eps: Added to the variance.

        Returns:
            Like `x`.
        """
        return self._by_token(
            x, lambda x: F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)
        )

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """`x · Wᵀ + b`, the weight dequantized block by block of output rows.

        Args:
            x: [tokens, K].
            weight: (N, K).
            bias: [N] in the dtype of `x`, or None.

        Returns:
            [tokens, N], like `x`.
        """
        outputs, inputs = weight.shape
        step = max(1, _BLOCK_WEIGHTS // inputs)
        y = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
        for start in range(0, outputs, step):
            stop = min(start + step, outputs)
            block = weight.rows(start, stop).to(x.dtype).t()
            y[:, start:stop] = self._by_token(x, partial(torch.matmul, other=block))
        return y if bias is None else y.add_(bias)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the pairs (i, i + head_dim / 2) of each head ("RoFormer", arXiv 2104.09864).

        Args:
            x: [tokens, heads, head_dim].
            cos: fp32 [tokens, head_dim / 2].
            sin: fp32 [tokens, head_dim / 2].

        Returns:
            Like `x`.
        """
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: KVLayer,
        batch: Batch,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Write new keys and values to the cache, in place, and attend to it causally.

        A token sees its own block of 32 in 16 bits (fp32 if that is the format) and every earlier
        one as it is stored, however the tokens are cut into batches. Query heads that share a
        key-value head are consecutive (4 query heads on 2 key-value heads: 0 and 1 read 0, 2 and 3
        read 1). With a window of 2 and 1 sink, the queries at positions 2 and 3 see of 4 keys:

            1 1 1 0
            1 0 1 1

        Args:
            q: [tokens, heads, head_dim].
            k: [tokens, kv_heads, head_dim].
            v: Like `k`.
            layer: The cache.
            batch: Which token is whose, and where its predecessors are.
            scale: Multiplies the scores.
            softcap: c, if scores become c · tanh(score / c) ("Gemma 2", arXiv 2408.00118).

        Returns:
            [tokens, heads, head_dim].
        """
        one_by_one = self.deterministic
        return paged_attention(
            q, k, v, layer, batch, scale=scale, softcap=softcap, one_by_one=one_by_one
        )

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """The MLP's nonlinearity.

        Args:
            x: Any shape.
            kind: One of `qinfer.config.ACTIVATIONS`.

        Returns:
            Like `x`.
        """
        if kind == "silu":
            return self._by_token(x, F.silu)
        if kind == "relu":
            return F.relu(x)
        approximate = "none" if kind == "gelu" else "tanh"
        return self._by_token(x, lambda x: F.gelu(x, approximate=approximate))

    def gated_activation(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        """`activation(gate) · up` ("GLU variants", arXiv 2002.05202).

        Args:
            gate: [tokens, intermediate].
            up: Like `gate`.
            kind: One of `qinfer.config.ACTIVATIONS`.

        Returns:
            Like `gate`.
        """
        return self.activation(gate, kind).mul_(up)

    def logits(self, x: Tensor, head: Weight) -> Tensor:
        """Scores of the whole vocabulary, upcast to fp32.

        Args:
            x: [tokens, hidden]: only the tokens whose logits are needed.
            head: (vocab, hidden).

        Returns:
            fp32 [tokens, vocab].
        """
        return self.linear(x, head, None).float()

    def greedy(self, logits: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens, and whether they mean anything.

        Args:
            logits: fp32 [sequences, vocab].
            vocab_size: Ids from here on are padding and never chosen.

        Returns:
            int64 [sequences], the lowest of equals; bool [sequences], whether a logit was NaN or
            infinity, or none was finite.
        """
        peak, token = logits[:, :vocab_size].max(-1)
        return token, ~peak.isfinite()

    def draw(self, logits: Tensor, vocab_size: int, draws: Draws) -> tuple[Tensor, Tensor]:
        """`greedy`, but with tokens drawn where a temperature is above 0."""
        token, broken = self.greedy(logits, vocab_size)
        drawn = draw_tokens(logits[:, :vocab_size], draws)
        return token.where((draws.table[:, 0] == 0) | broken, drawn), broken

    def _by_token(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function that treats tokens alike, each by itself if that is asked for."""
        if not self.deterministic or len(x) == 1:
            return function(x)
        return torch.cat([function(x[i : i + 1]) for i in range(len(x))])


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * (y * y).mean(-1, keepdim=True).add_(eps).rsqrt_()).mul_(weight).to(x.dtype)
