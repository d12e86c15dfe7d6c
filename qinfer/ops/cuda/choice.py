"""Choosing tokens on NVIDIA GPUs: the likeliest, or drawn ones, without waiting for the host.

A call launches the same programs whenever its arguments have the same shapes, so that all of it can
be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from qinfer.ops.cuda import choice_kernels as kernels
from qinfer.ops.cuda.compilation import Compilation
from qinfer.ops.cuda.launches import Launch
from qinfer.ops.draws import COLUMNS, Draws, columns_that_count

_BLOCK = 1024  # columns of a program
_BLOCK_WARPS = 2
_ROW_WARPS = 4  # of a program that draws for a row


def argmax_or_nan(logits: Tensor, vocab_size: int | None = None) -> tuple[Tensor, Tensor]:
    """The most likely token of each row, the first of equals, and whether there is none.

    Args:
        logits: fp32 [sequences, columns]; rows may be apart.
        vocab_size: Only this many columns count, at least 1; None is all.

    Returns:
        int64 [sequences]: token ids, below `vocab_size` also where there is none; and
        bool [sequences]: whether a logit is NaN or +inf, or all are -inf.

    Raises:
        ValueError: `logits` is not as described, or no column counts.
    """
    return _run(_Choice.of(logits, vocab_size), None)


def draw_or_nan(
    logits: Tensor, draws: Draws, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """`argmax_or_nan`, but with tokens drawn as `qinfer.ops.draws` says, where it says so.

    Args:
        logits: fp32 [sequences, columns]; rows may be apart.
        draws: Of all sequences, on the same device.
        vocab_size: As for `argmax_or_nan`.

    Returns:
        As `argmax_or_nan`.

    Raises:
        ValueError: An argument is not as described.
    """
    draws.check(len(logits))
    return _run(_Choice.of(logits, vocab_size), draws)


def _run(choice: _Choice, draws: Draws | None) -> tuple[Tensor, Tensor]:
    for launch in choice.launches(draws):
        launch.run()
    return choice.ids, choice.flags.view(torch.bool)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A call's logits, and what its kernels leave.

    Attributes:
        logits: fp32 [sequences, columns].
        size: Columns that count.
        peaks: fp32 [sequences, blocks], of blocks of columns.
        ids: int64 [sequences].
        flags: int8 [sequences].
    """

    logits: Tensor
    size: int
    peaks: Tensor
    ids: Tensor
    flags: Tensor

    @staticmethod
    def of(logits: Tensor, vocab_size: int | None) -> _Choice:
        size = columns_that_count(logits, vocab_size)
        sequences = len(logits)
        return _Choice(
            logits=logits,
            size=size,
            peaks=logits.new_empty(sequences, triton.cdiv(size, _BLOCK)),
            ids=logits.new_empty(sequences, dtype=torch.int64),
            flags=logits.new_empty(sequences, dtype=torch.int8),
        )

    def launches(self, draws: Draws | None) -> Iterator[Launch]:
        """Behind one another."""
        sequences, blocks = self.peaks.shape
        by_block, by_row = (sequences, blocks, 1), (sequences, 1, 1)
        padded = triton.next_power_of_2(blocks)
        columns = {"stride": self.logits.stride(0), "size": self.size}
        firsts = self.peaks.new_empty(self.peaks.shape, dtype=torch.int32)
        peaks = {"peaks": self.peaks, "firsts": firsts}
        arguments: dict[str, Any] = {"logits": self.logits, **peaks, **columns, "BLOCK": _BLOCK}
        yield Launch(kernels.find_peaks, by_block, arguments, num_warps=_BLOCK_WARPS)
        arguments = {**peaks, "ids": self.ids, "flags": self.flags, "blocks": blocks}
        arguments["BLOCKS"] = padded
        yield Launch(kernels.take_likeliest, by_row, arguments, num_warps=1)
        if draws is None:
            return
        by_level = sequences, kernels.LEVELS.value, blocks
        sizes = {**columns, "BLOCK": _BLOCK, "BLOCKS": padded}
        tensors = {
            "logits": self.logits,
            "peaks": self.peaks,
            "table": draws.table,
            "masses": self.ids.new_empty(by_level),
            "counts": firsts.new_empty(by_level),
        }
        yield Launch(kernels.weigh_blocks, by_block, tensors | sizes, num_warps=_BLOCK_WARPS)
        tensors["listed"] = firsts.new_empty(sequences, self.size)
        yield Launch(kernels.list_few, by_block, tensors | sizes, num_warps=_BLOCK_WARPS)
        tensors |= {"positions": draws.positions, "ids": self.ids}
        arguments = {**tensors, **columns, "blocks": blocks, "BLOCK": _BLOCK, "BLOCKS": padded}
        yield Launch(kernels.draw_kernel, by_row, arguments, num_warps=_ROW_WARPS)


def compilations() -> list[Compilation]:
    """All kernels for a vocabulary of Llama 3, and of the smallest that has several blocks."""
    found = []
    for size in (128_256, 2_000):
        meta = torch.device("meta")
        choice = _Choice.of(torch.empty(4, size, device=meta), size)
        table = torch.empty(4, COLUMNS, dtype=torch.float64, device=meta)
        draws = Draws(table, torch.empty(4, dtype=torch.int64, device=meta))
        for launch in choice.launches(draws):
            found.append(launch.compilation(f"{launch.kernel.__name__}: {size} tokens"))
    return found
