"""What attention reads: a step's tokens, and where the cache keeps those before them.

A batch is a flat list of tokens of several sequences. Each sequence has a segment of it, tokens
that follow one another, and a table of the blocks that hold its keys and values. There is no
padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qinfer.quant.kv import KVSide


@dataclass(slots=True)
class KVLayer:
    """The cache of one layer.

    Attributes:
        keys: Of all blocks.
        values: Of all blocks.
        group: Which of a batch's block tables is this layer's.
        window: Tokens a query sees, its own included; None is all.
        sinks: First tokens of the sequence that it sees beside the window.
    """

    keys: KVSide
    values: KVSide
    group: int = 0
    window: int | None = None
    sinks: int = 0


@dataclass(slots=True)
class Batch:
    """The tokens of one forward pass, segment after segment.

    Attributes:
        ids: int64 [tokens], as all of these on the device of the model.
        positions: int64 [tokens].
        starts: int64 [segments]: position of each segment's first token.
        offsets: int64 [segments + 1]: where each begins in the tokens.
        tables: Per group of layers int32 [segments, width]: the number of the block that holds
            positions `32 · i` and up; what no query sees any more is anything.
        slots: int32 [segments]: each sequence's open block.
        last_position: The largest position.
        longest: The most tokens of a segment.
    """

    ids: Tensor
    positions: Tensor
    starts: Tensor
    offsets: Tensor
    tables: tuple[Tensor, ...]
    slots: Tensor
    last_position: int
    longest: int

    @classmethod
    def of(
        cls,
        segments: Sequence[tuple[Sequence[int], int]],
        tables: Sequence[Sequence[Sequence[int]]],
        slots: Sequence[int],
        device: torch.device,
    ) -> Batch:
        """Lay segments side by side.

        Args:
            segments: Token ids and the position of the first, one pair per sequence.
            tables: Per group of layers, each segment's blocks.
            slots: Per segment.
            device: Where the model is.
        """
        ids = [token for tokens, _ in segments for token in tokens]
        positions = [start + i for tokens, start in segments for i in range(len(tokens))]
        offsets = [0]
        for tokens, _ in segments:
            offsets.append(offsets[-1] + len(tokens))
        starts = [start for _, start in segments]
        # At once: single tensors would cost a part of a small model's step.
        longs = torch.from_numpy(np.array([*ids, *positions, *starts, *offsets], dtype=np.int64))
        sizes = [len(ids), len(ids), len(starts), len(offsets)]
        ids_there, positions_there, starts_there, offsets_there = torch.split_with_sizes(
            longs.to(device), sizes
        )
        return cls(
            ids=ids_there,
            positions=positions_there,
            starts=starts_there,
            offsets=offsets_there,
            tables=tuple(_rectangle(rows).to(device) for rows in tables),
            slots=_integers(slots).to(device),
            last_position=max(positions),
            longest=max(len(tokens) for tokens, _ in segments),
        )


def _integers(values: Sequence[Any]) -> Tensor:
    """int32, like `torch.tensor` but in a third of its time: it is called several times a step."""
    return torch.from_numpy(np.array(values, dtype=np.int32))


def _rectangle(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(len(row) for row in rows)
    return _integers([[*row, *[0] * (width - len(row))] for row in rows])
