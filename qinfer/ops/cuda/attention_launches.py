"""What attention launches: kernels, grids and arguments, from what the host knows.

Nothing here depends on numbers that are on the device: a step of one token per sequence can be
captured in a CUDA graph and replayed with other contents of the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.ops.block import Norm, Rotation
from qinfer.ops.cuda import attention_kernels, cache_kernels
from qinfer.ops.cuda.launches import Launch
from qinfer.ops.paged import Batch, KVLayer
from qinfer.quant.kv import BLOCK_TOKENS, KVSide, value_group

SPLIT_BLOCKS = 8
"""Blocks of 32 tokens that one program of a decode step attends to."""

_MERGED_SPLITS = 32  # at a time
_FEW_ROWS, _MANY_ROWS = 32, 128  # of a tile: what fits the registers without spilling
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Preparation:
    """What happens to the heads of queries and keys before attention.

    Attributes:
        rotation: Of the tokens, or None.
        q_norm: Of each head of queries, without a bias, or None.
        k_norm: Of each head of keys, without a bias, or None.
    """

    rotation: Rotation = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def arguments(self) -> dict[str, Any]:
        """As the kernels take it."""
        cos, sin = self.rotation or (None, None)
        norms = {"q": self.q_norm, "k": self.k_norm}
        return {
            **{f"{side}_norm": None if n is None else n.weight for side, n in norms.items()},
            **{"cos": cos, "sin": sin},
            **{f"{side}_eps": 0.0 if n is None else n.eps for side, n in norms.items()},
        }


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of `qinfer.ops.cuda.attention.attention`, and the launches that do it."""

    q: Tensor
    k: Tensor
    v: Tensor
    layer: KVLayer
    batch: Batch
    scale: float
    softcap: float | None

    def launches(self, out: Tensor, preparation: Preparation | None = None) -> Iterator[Launch]:
        """In order; with a preparation only for a batch with one token per segment."""
        splits = triton.cdiv(self._table.shape[1], SPLIT_BLOCKS)
        segments, heads, head_dim = len(self.batch.starts), *self.q.shape[1:]
        parts = (segments, heads, splits) if splits > 1 else (0, 0, 0)
        partial, sums = (
            torch.empty(*parts, n, dtype=torch.float32, device=out.device) for n in (head_dim, 2)
        )
        yield self._store(preparation)
        if segments > 1 or self.batch.longest == 1:  # there may be segments of one token
            yield self._split(out, partial, sums, splits)
            if splits > 1:
                yield self._merge(out, partial, sums, splits)
        if self.batch.longest > 1:
            yield self._tiles(out)
            if self._opened("k") is not None or self._opened("v") is not None:
                yield self._keep()

    @property
    def _table(self) -> Tensor:
        return self.batch.tables[self.layer.group]

    @property
    def _blocks(self) -> int:
        """The most blocks that new tokens of a segment touch."""
        return (self.batch.longest + 2 * BLOCK_TOKENS - 2) // BLOCK_TOKENS

    @property
    def _tile_stages(self) -> int:
        """As many as fit: five fetch two blocks ahead, as a block's number is fetched before it."""
        if self.q.element_size() > 2:
            return 2  # shared memory does not hold more
        sides = self.layer.keys, self.layer.values
        return 5 if any(side.open is not None for side in sides) else 4  # nor registers

    def _grid(self, programs: int) -> tuple[int, int, int]:
        return len(self.batch.starts), self.k.shape[1], programs

    def _side(self, name: str) -> KVSide:
        return self.layer.keys if name == "k" else self.layer.values

    def _opened(self, name: str) -> Tensor | None:
        return self._side(name).open

    def _cache(self) -> dict[str, Any]:
        sides = {name: self._side(name) for name in ("k", "v")}
        return {
            f"{name}_{part}": tensor
            for name, side in sides.items()
            for part, tensor in (
                ("data", side.data),
                ("scale", side.scale),
                ("minimum", side.minimum),
                ("open", side.open),
            )
        }

    def _segments(self) -> dict[str, Any]:
        batch = self.batch
        return {"starts": batch.starts, "offsets": batch.offsets, "slots": batch.slots}

    def _strides(self, *names: str) -> dict[str, int]:
        tensors = {"q": self.q, "k": self.k, "v": self.v, "table": self._table}
        return {f"{name}_stride": tensors[name].stride(0) for name in names}

    def _formats(self) -> dict[str, Any]:
        return {
            "K_BITS": self.layer.keys.bits,
            "V_BITS": self.layer.values.bits,
            "VALUE_GROUP": value_group(self.q.shape[-1]),
        }

    def _sight(self) -> dict[str, Any]:
        layer = self.layer
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "window": layer.window,
            "sinks": layer.sinks,
            "DOT": _dot_type(self.q),
        }

    def _store(self, preparation: Preparation | None) -> Launch:
        longest, table = self.batch.longest, self._table
        return Launch(
            cache_kernels.store_kernel,
            self._grid(self._blocks),
            _ordered(
                cache_kernels.store_kernel,
                {
                    **{"q": self.q, "k": self.k, "v": self.v, "table": table},
                    **(preparation or Preparation()).arguments(),
                    **self._cache(),
                    **self._segments(),
                    **self._strides("q", "k", "v", "table"),
                    **self._formats(),
                    **_pairs(self.q, self.k),
                    "ROTATES": preparation is not None,
                    "PADDED": _padded(self.q),
                    "TOKENS": 1 if longest == 1 else BLOCK_TOKENS,
                },
            ),
        )

    def _keep(self) -> Launch:
        return Launch(
            cache_kernels.keep_kernel,
            self._grid(1),
            _ordered(
                cache_kernels.keep_kernel,
                {
                    **{"k": self.k, "v": self.v},
                    **{f"{name}_open": self._opened(name) for name in ("k", "v")},
                    **self._segments(),
                    **self._strides("k", "v"),
                    "HEAD_DIM": self.q.shape[-1],
                    "PADDED": _padded(self.q),
                },
            ),
        )

    def _split(self, out: Tensor, partial: Tensor, sums: Tensor, splits: int) -> Launch:
        group = self.q.shape[1] // self.k.shape[1]
        return Launch(
            attention_kernels.split_kernel,
            self._grid(splits),
            _ordered(
                attention_kernels.split_kernel,
                {
                    **{"q": self.q, "out": out, "partial": partial, "sums": sums},
                    **self._cache(),
                    **self._segments(),
                    **self._strides("q", "table"),
                    **self._sight(),
                    **self._formats(),
                    "table": self._table,
                    "HEAD_DIM": self.q.shape[-1],
                    "PADDED": _padded(self.q),
                    "GROUP": group,
                    "ROWS": max(16, triton.next_power_of_2(group)),
                    "SPLIT": SPLIT_BLOCKS,
                },
            ),
            num_warps=2,  # more would wait for one another in each block, and be fewer programs
            num_stages=5,
        )

    def _merge(self, out: Tensor, partial: Tensor, sums: Tensor, splits: int) -> Launch:
        return Launch(
            attention_kernels.merge_kernel,
            (len(self.batch.starts), self.q.shape[1], 1),
            {
                **{"out": out, "partial": partial, "sums": sums},
                **{"starts": self.batch.starts, "offsets": self.batch.offsets, "splits": splits},
                "HEAD_DIM": self.q.shape[-1],
                "PADDED": _padded(self.q),
                "SPLIT": SPLIT_BLOCKS,
                "CHUNK": _MERGED_SPLITS,
            },
        )

    def _tiles(self, out: Tensor) -> Launch:
        group = self.q.shape[1] // self.k.shape[1]
        fits = _padded(self.q) * self.q.element_size() <= 256
        rows = _MANY_ROWS if fits and BLOCK_TOKENS * group > _MANY_ROWS // 2 else _FEW_ROWS
        tiles = triton.cdiv(BLOCK_TOKENS * group, rows)
        return Launch(
            attention_kernels.tile_kernel,
            self._grid(self._blocks * tiles),
            _ordered(
                attention_kernels.tile_kernel,
                {
                    **{"q": self.q, "k": self.k, "v": self.v, "out": out},
                    **self._cache(),
                    **self._segments(),
                    **self._strides("q", "k", "v", "table"),
                    **self._sight(),
                    **self._formats(),
                    "table": self._table,
                    "HEAD_DIM": self.q.shape[-1],
                    "PADDED": _padded(self.q),
                    **{"GROUP": group, "ROWS": rows, "TILES": tiles},
                },
            ),
            num_warps=8 if rows == _MANY_ROWS or _padded(self.q) > 128 else 4,
            num_stages=self._tile_stages,
        )


def rotation_launch(q: Tensor, k: Tensor, preparation: Preparation) -> Launch:
    """See `qinfer.ops.cuda.attention.rotate`."""
    return Launch(
        cache_kernels.rotate_kernel,
        (len(q), k.shape[1], 1),
        _ordered(
            cache_kernels.rotate_kernel,
            {
                **{"q": q, "k": k, "q_stride": q.stride(0), "k_stride": k.stride(0)},
                **preparation.arguments(),
                **_pairs(q, k),
            },
        ),
        num_warps=1,
    )


def _ordered(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in kernel.arg_names}


def _pairs(q: Tensor, k: Tensor) -> dict[str, int]:
    group, head_dim = q.shape[1] // k.shape[1], q.shape[-1]
    return {
        "HEAD_DIM": head_dim,
        "PAIRS": triton.next_power_of_2(head_dim // 2),
        "GROUP": group,
        "ROWS": triton.next_power_of_2(group),
    }


def _padded(q: Tensor) -> int:
    return int(max(16, triton.next_power_of_2(q.shape[-1])))


def _dot_type(q: Tensor) -> Any:
    """What numbers are multiplied as: the type of activations.

    The interpreter cannot multiply bfloat16.
    """
    if q.dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return _TYPES[q.dtype]
