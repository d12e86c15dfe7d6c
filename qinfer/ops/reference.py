"""The operations in plain torch: on any device, in any float dtype, and obviously right.

This is the definition that every kernel is tested against. Tokens are a flat list: there is no
batch axis and no padding. Norms, rotary tables, softmax and logits are computed in fp32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from qinfer.quant.weights import Weight

_BLOCK_WEIGHTS = 2**20  # dequantized at a time: 4 MB of fp32, whatever the layer's size


class ReferenceOps:
    """Every operation of the decoder. Backends subclass it and replace what they do better.

    Attributes:
        device: Where activations live.
        dtype: Of activations.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def prepare(self, weight: Weight) -> Weight:
        """A weight as this backend wants it in memory; called once per weight, at load."""
        return weight.to(self.device)

    def forward_pass(self, tokens: int) -> AbstractContextManager[None]:
        """Surrounds a run of this many tokens through the decoder."""
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
        y = x.float()
        return (y * (y * y).mean(-1, keepdim=True).add_(eps).rsqrt_()).mul_(weight).to(x.dtype)

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
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)

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
            y[:, start:stop] = x @ weight.rows(start, stop).to(x.dtype).t()
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
        self, q: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Causal attention of the last tokens of a sequence over all of it.

        Query heads that share a key-value head are consecutive (4 query heads on 2 key-value
        heads: 0 and 1 read 0, 2 and 3 read 1). The mask is aligned to the end; for 2 queries
        over 4 keys, and with a window of 2:

            1 1 1 0        0 1 1 0
            1 1 1 1        0 0 1 1

        Args:
            q: [tokens, heads, head_dim].
            keys: [kv_heads, length, head_dim], the queries' own tokens included.
            values: Like `keys`.
            scale: Multiplies the scores.
            window: Keys each query sees at most, its own included; None is all.

        Returns:
            [tokens, heads, head_dim].
        """
        tokens, heads, head_dim = q.shape
        kv_heads, length, _ = keys.shape
        if window is not None and length > window + tokens - 1:
            length = window + tokens - 1
            keys, values = keys[:, -length:], values[:, -length:]
        grouped = q.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = grouped.reshape(kv_heads, -1, head_dim) @ keys.transpose(1, 2)
        scores = scores.float().mul_(scale).view(kv_heads, -1, tokens, length)
        if tokens > 1:
            visible = torch.ones(tokens, length, dtype=torch.bool, device=q.device)
            visible = visible.tril_(length - tokens)
            if window is not None:
                visible.triu_(length - tokens - window + 1)
            scores.masked_fill_(~visible, float("-inf"))
        weights = scores.softmax(-1).to(values.dtype).view(kv_heads, -1, length)
        mixed = (weights @ values).view(kv_heads, -1, tokens, head_dim)
        return mixed.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """The MLP's nonlinearity.

        Args:
            x: Any shape.
            kind: One of `qinfer.config.ACTIVATIONS`.

        Returns:
            Like `x`.
        """
        if kind == "silu":
            return F.silu(x)
        if kind == "relu":
            return F.relu(x)
        return F.gelu(x, approximate="none" if kind == "gelu" else "tanh")

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
