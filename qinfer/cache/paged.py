"""The memory behind the block tables: keys and values of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qinfer.cache.blocks import BlockPool
from qinfer.cache.tables import BlockTables, Copy, Reach, blocks_for
from qinfer.config import ModelConfig
from qinfer.ops.paged import KVLayer
from qinfer.quant.kv import BLOCK_TOKENS, KVFormat, KVSide

_SLACK_BYTES = 16 << 20  # for padding, and for what the allocator rounds up
RETAINED_TOKENS = 8192
"""So much of finished sequences is usually kept to be found again, if nobody needs the place."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a cache consists of, before any memory is reserved.

    Attributes:
        kv_heads: Of every layer.
        head_dim: Of every layer.
        formats: Per layer.
        groups: Per layer, the index of its reach.
        reaches: How far the layers of each group see.
        slides: Whether sequences go on beyond the context, without their oldest tokens.
    """

    kv_heads: int
    head_dim: int
    formats: tuple[KVFormat, ...]
    groups: tuple[int, ...]
    reaches: tuple[Reach, ...]
    slides: bool = False

    @classmethod
    def of(
        cls, config: ModelConfig, formats: Sequence[KVFormat], *, context: Reach | None = None
    ) -> CacheLayout:
        """Group a model's layers.

        Args:
            config: The model.
            formats: Per layer.
            context: What layers without a window, or with a wider one, see at most of sequences
                that may be longer; None if there are none.

        Raises:
            QInferError: A format does not fit the model.
        """
        for kv_format in formats:
            kv_format.check(config.head_dim)
        by_layer = [_narrower(Reach(window), context) for window in config.layer_windows]
        reaches = tuple(dict.fromkeys(by_layer))
        return cls(
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            formats=tuple(formats),
            groups=tuple(reaches.index(reach) for reach in by_layer),
            reaches=reaches,
            slides=context is not None,
        )

    def block_bytes(self, group: int) -> int:
        """Bytes of 32 tokens in a group's layers."""
        return sum(
            kv_format.block_bytes(self.kv_heads, self.head_dim)
            for kv_format, its in zip(self.formats, self.groups, strict=True)
            if its == group
        )

    def slot_bytes(self) -> int:
        """Bytes of a sequence's open block, in all layers."""
        return sum(f.open_bytes(self.kv_heads, self.head_dim) for f in self.formats)

    def sequence_blocks(self, context_tokens: int, step_tokens: int) -> list[int]:
        """Per group, the blocks that a sequence holds at most.

        One that slides takes a step more, and begins and ends within blocks.
        """
        slack = step_tokens + 2 * BLOCK_TOKENS if self.slides else 0
        return [reach.most_blocks(context_tokens + slack, step_tokens) for reach in self.reaches]

    def sequence_bytes(self, context_tokens: int, step_tokens: int) -> int:
        """Bytes that a sequence needs at most, its open block included."""
        counts = self.sequence_blocks(context_tokens, step_tokens)
        blocks = sum(n * self.block_bytes(group) for group, n in enumerate(counts))
        return blocks + self.slot_bytes()


def _narrower(reach: Reach, context: Reach | None) -> Reach:
    if context is None or context.window is None:
        return reach
    if reach.window is not None and reach.window <= context.window + context.sinks:
        return reach
    return context


class PagedCache:
    """Keys and values of all layers in blocks of 32 tokens.

    Attributes:
        layers: Per layer, what attention reads and writes.
        layout: What it consists of.
        blocks: Per group, how many blocks there are to be given out. With padding there is one more
            behind them, for tokens that fill a step up and belong to nobody.
        padding_slot: The open block of such tokens, if there is padding.
    """

    def __init__(
        self,
        layout: CacheLayout,
        blocks: Sequence[int],
        slots: int,
        *,
        half: torch.dtype,
        device: torch.device,
        retained_tokens: int = RETAINED_TOKENS,
        padding: bool = False,
    ) -> None:
        """Reserve memory; pages that no token has reached are not touched on a CPU.

        Args:
            layout: What to reserve.
            blocks: Per group.
            slots: Most sequences that run at once.
            half: The 16-bit float type.
            device: Where.
            retained_tokens: So much of finished sequences is kept to be found again.
            padding: Reserve a block and a slot more.
        """
        self.layout = layout
        self.blocks = tuple(blocks)
        self.padding_slot = slots
        self._retained_tokens = retained_tokens

        if device.type == "cuda":
            # What is free in one piece the allocator cuts up; else it takes 20 MB for every two
            # tensors of 8 MB, say.
            blocks_bytes = (n * layout.block_bytes(group) for group, n in enumerate(blocks))
            size = sum(blocks_bytes) + (slots + padding) * layout.slot_bytes() + _SLACK_BYTES
            torch.empty(size, dtype=torch.uint8, device=device)

        def side(layer: int, *, is_keys: bool) -> KVSide:
            kv_format = layout.formats[layer]
            return KVSide.allocate(
                kv_format.k_bits if is_keys else kv_format.v_bits,
                is_keys=is_keys,
                heads=(layout.kv_heads, layout.head_dim),
                blocks=blocks[layout.groups[layer]] + padding,
                slots=slots + padding,
                half=half,
                device=device,
            )

        self.layers = [
            KVLayer(
                keys=side(layer, is_keys=True),
                values=side(layer, is_keys=False),
                group=group,
                window=layout.reaches[group].window,
                sinks=layout.reaches[group].sinks,
            )
            for layer, group in enumerate(layout.groups)
        ]

    def tables(self, *, step_tokens: int) -> BlockTables:
        """Block tables over pools of these blocks.

        Args:
            step_tokens: Most tokens that a sequence grows by in a step.
        """
        retained = blocks_for(self._retained_tokens)
        pools = [BlockPool(count, retained=retained) for count in self.blocks]
        return BlockTables(self.layout.reaches, pools, step_tokens=step_tokens)

    def copy(self, copies: Sequence[Copy]) -> None:
        """In place: copy blocks that were shared and are about to be written."""
        for group, source, target in copies:
            for layer in self.layers:
                if layer.group == group:
                    for side in (layer.keys, layer.values):
                        for tensor in side.tensors():
                            tensor[target] = tensor[source]

    def copy_open(self, source: int, target: int) -> None:
        """In place: copy an open block from slot to slot."""
        for layer in self.layers:
            for side in (layer.keys, layer.values):
                if side.open is not None:
                    side.open[target] = side.open[source]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
