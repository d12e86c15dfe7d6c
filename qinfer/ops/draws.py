"""Drawing tokens where their logits are, without the host: what is to be drawn, and the reference.

The definition of the filters is `qinfer.sampling`, which draws on the host; that also keeps the
random generators. Here come their numbers, several steps of them ahead, so that a step can begin
before the host has seen the token of the one before.

Probabilities are summed as integers, exp(logit) relative to the likeliest in units of 2^-40: so
sums do not depend on the order of addition, and a token is the same however a kernel shares them
out. What is less likely by more than that is never drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qinfer.quant.kv import BLOCK_TOKENS

UNIT_BITS = 40
"""Sums of 2^22 tokens and their products with fp64 stay within int64."""

LEAST_TEMPERATURE = 1e-30
"""Of those above 0; far below any difference between two logits."""

UNIFORMS = BLOCK_TOKENS
"""Numbers ahead of each sequence: steps run ahead within a block of the cache."""

COLUMNS = 4 + UNIFORMS
"""Of the table: temperature, top_k, top_p, log(min_p), and the numbers."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How the next token of each sequence is drawn.

    Attributes:
        table: fp64 [sequences, COLUMNS]: a temperature, at least LEAST_TEMPERATURE, or 0 to take
            the likeliest token; of how many tokens `top_k` keeps (0: all); of how much probability
            `top_p` keeps (1: all); of which logarithm, relative to the likeliest, `min_p` keeps
            (-inf: all); and numbers in [0, 1), the one for the token behind position p in column
            4 + p % UNIFORMS.
        positions: int64 [sequences], of the tokens whose logits these are.
    """

    table: Tensor
    positions: Tensor

    def check(self, sequences: int) -> None:
        """Before a kernel reads it.

        Raises:
            ValueError: It is not as described, or of another number of sequences.
        """
        shapes = list(self.table.shape), list(self.positions.shape)
        dtypes = self.table.dtype, self.positions.dtype
        is_whole = self.table.is_contiguous() and self.positions.is_contiguous()
        if not is_whole or (shapes, dtypes) != (
            ([sequences, COLUMNS], [sequences]),
            (torch.float64, torch.int64),
        ):
            raise ValueError(
                f"draws must be fp64 [{sequences}, {COLUMNS}] and int64 [{sequences}], got "
                f"{dtypes[0]} {shapes[0]} and {dtypes[1]} {shapes[1]}"
            )

    @staticmethod
    def row(
        temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
    ) -> tuple[float, float, float, float]:
        """The first columns for parameters of which None is off, as in `SamplingParams`.

        They fit the types that kernels read them in.
        """
        return (
            max(temperature, LEAST_TEMPERATURE) if temperature else 0.0,
            min(top_k or 0, 2**31 - 1),
            1.0 if top_p is None else top_p,
            -math.inf if min_p is None else math.log(min_p),
        )


def columns_that_count(logits: Tensor, vocab_size: int | None) -> int:
    """How many columns a kernel looks at: `vocab_size`, or all if that is None or more.

    Raises:
        ValueError: `logits` is not fp32 [sequences, columns], the columns side by side, or none
            counts.
    """
    lies_in_rows = logits.dim() == 2 and (logits.stride(1) == 1 or logits.shape[1] == 1)
    if logits.dtype != torch.float32 or not lies_in_rows:
        raise ValueError(
            f"logits must be fp32 [sequences, columns] in rows, got {logits.dtype} "
            f"{list(logits.shape)}"
        )
    columns = logits.shape[1]
    size = columns if vocab_size is None else min(vocab_size, columns)
    if size < 1:
        raise ValueError(f"no column counts: {columns} columns, vocab_size {vocab_size}")
    return size


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """Temperature, top-k, top-p, min-p, and a draw by the cumulative distribution over the ids.

    Args:
        logits: fp32 [sequences, vocab], of which those that are drawn are finite or -inf.
        draws: Of all sequences.

    Returns:
        int64 [sequences]; 0 where the temperature is 0.
    """
    uniforms = draws.table.gather(1, 4 + draws.positions[:, None] % UNIFORMS)
    tokens = torch.zeros_like(draws.positions)
    for row, settings, (uniform,), token in zip(
        logits, draws.table[:, :4].tolist(), uniforms.tolist(), tokens, strict=True
    ):
        if settings[0] > 0:
            token.copy_(_draw(row, settings, uniform))
    return tokens


def _draw(logits: Tensor, settings: Sequence[float], uniform: float) -> Tensor:
    """[vocab] to the id that is drawn."""
    temperature, top_k, top_p, floor = settings
    scaled = (logits - logits.max()) / temperature
    mass = (scaled.exp() * 2.0**UNIT_BITS).long()
    keep = torch.ones_like(logits, dtype=torch.bool)
    if top_k:
        keep = logits >= logits.topk(min(int(top_k), len(logits))).values[-1]
    if top_p < 1:
        order = scaled.masked_fill(~keep, -math.inf).argsort(descending=True, stable=True)
        ranked = mass.where(keep, 0)[order]
        reached = ranked.cumsum(0)
        needed = (top_p * reached[-1].double()).ceil().clamp(min=1)
        inside = reached - ranked < needed
        keep = keep & torch.zeros_like(keep).scatter(0, order, inside)
    keep = keep & (scaled >= torch.tensor(floor, dtype=torch.float32))
    reached = mass.where(keep, 0).cumsum(0)
    target = torch.minimum((uniform * reached[-1].double()).long(), reached[-1] - 1)
    return (reached <= target).sum()
