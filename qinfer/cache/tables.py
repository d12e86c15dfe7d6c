"""The block tables of sequences. No tensors: block numbers only.

Layers that see equally far form a group, which has a pool and a table per sequence of its own:
layers with a window give their blocks back as the window moves on, while others keep all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qinfer.cache.blocks import BlockPool, Digest, digest
from qinfer.quant.kv import BLOCK_TOKENS

RELEASED = -1
"""In a table: a block that no query sees any more."""


def blocks_for(tokens: int) -> int:
    """How many blocks hold this many tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a group's layers see.

    Attributes:
        window: Tokens a query sees, its own included; None is all.
        sinks: First tokens of the sequence that it sees beside the window.
    """

    window: int | None = None
    sinks: int = 0

    def first_block(self, length: int) -> int:
        """The first block behind the sinks that the token behind `length` others sees."""
        if self.window is None:
            return 0
        return max(0, length - self.window + 1) // BLOCK_TOKENS

    def needed(self, length: int) -> Iterator[int]:
        """The blocks of `length` tokens that the token behind them sees."""
        first, sinks = self.first_block(length), blocks_for(self.sinks)
        yield from range(min(first, sinks))
        yield from range(first, blocks_for(length))

    def most_blocks(self, tokens: int, step_tokens: int) -> int:
        """Blocks that a sequence of this length holds at most, prefilled in steps."""
        if self.window is None:
            return blocks_for(tokens)
        kept = blocks_for(self.sinks) + blocks_for(self.window + step_tokens) + 1
        return min(kept, blocks_for(tokens))


class Copy(NamedTuple):
    """A block whose content has to be copied before it is written to."""

    group: int
    source: int
    target: int


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of one sequence.

    Attributes:
        tables: Per group, block numbers; number i holds the tokens from `32 · i` on.
        digests: Of its full blocks, as far as they were needed.
    """

    tables: list[list[int]]
    digests: list[Digest]

    def name(self, tokens: Sequence[int], count: int) -> list[Digest]:
        """Digests of the first `count` blocks of the sequence's tokens."""
        for i in range(len(self.digests), count):
            parent = self.digests[-1] if self.digests else b""
            block = tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
            self.digests.append(digest(parent, block))
        return self.digests[:count]


class BlockTables:
    """Allocates, shares and releases the blocks of sequences, in all groups or in none.

    Args:
        reaches: Of each group of layers.
        pools: Of each group.
        step_tokens: Most tokens that a sequence grows by before it is trimmed.
    """

    def __init__(
        self, reaches: Sequence[Reach], pools: Sequence[BlockPool], *, step_tokens: int
    ) -> None:
        self._groups = list(zip(reaches, pools, strict=True))
        self._step_tokens = step_tokens

    def new(self, digests: list[Digest]) -> SequenceBlocks:
        """The blocks of a sequence that has none yet, and what is known of its digests."""
        return SequenceBlocks([[] for _ in self._groups], digests)

    @property
    def used(self) -> float:
        """The share of blocks in use, of the group that has the fewest left."""
        return max(pool.in_use / max(pool.capacity, 1) for _, pool in self._groups)

    def reuse(self, blocks: SequenceBlocks, tokens: Sequence[int], limit: int) -> int:
        """Begin a sequence with blocks that hold its first tokens already.

        Args:
            blocks: Of a new sequence; in place.
            tokens: Its tokens.
            limit: Cover at most this many; the last token always has to be computed.

        Returns:
            How many tokens are covered, a multiple of 32.
        """
        names = blocks.name(tokens, limit // BLOCK_TOKENS)
        count = self._covered(names)
        for table, (reach, pool) in zip(blocks.tables, self._groups, strict=True):
            needed = set(reach.needed(count * BLOCK_TOKENS))
            for i in range(count):
                block = pool.find(names[i]) if i in needed else None
                table.append(RELEASED if block is None else block)
        return count * BLOCK_TOKENS

    def _covered(self, names: Sequence[Digest]) -> int:
        """The largest number of blocks of which every group knows what it needs."""
        known = [[pool.knows(name) for name in names] for _, pool in self._groups]
        for count in range(len(names), 0, -1):
            if all(
                all(there[i] for i in reach.needed(count * BLOCK_TOKENS))
                for there, (reach, _) in zip(known, self._groups, strict=True)
            ):
                return count
        return 0

    def fits(self, blocks: SequenceBlocks, length: int, *, spare: int = 0) -> bool:
        """Whether there are blocks for a sequence to become this long, and `spare` more."""
        return all(
            reach.most_blocks(length, self._step_tokens)
            - sum(block != RELEASED for block in table)
            + spare
            <= pool.available
            for table, (reach, pool) in zip(blocks.tables, self._groups, strict=True)
        )

    def fits_alone(self, length: int) -> bool:
        """Whether a sequence of this length fits when there is no other."""
        return all(
            reach.most_blocks(length, self._step_tokens) <= pool.capacity
            for reach, pool in self._groups
        )

    def grow(self, blocks: SequenceBlocks, start: int, length: int) -> list[Copy] | None:
        """Make a sequence's tokens from `start` to `length` safe to write: all groups or none.

        Blocks that are missing are allocated, one that is shared is replaced.

        Returns:
            What has to be copied first; None if there are too few blocks, and nothing has changed.
        """
        first, end = start // BLOCK_TOKENS, blocks_for(length)
        shared = [
            [i for i in range(first, len(table)) if not pool.is_writable(table[i])]
            for table, (_, pool) in zip(blocks.tables, self._groups, strict=True)
        ]
        for table, replaced, (_, pool) in zip(blocks.tables, shared, self._groups, strict=True):
            if max(0, end - len(table)) + len(replaced) > pool.available:
                return None
        copies = []
        for group, (table, replaced) in enumerate(zip(blocks.tables, shared, strict=True)):
            pool = self._groups[group][1]
            for i in replaced:
                copies.append(Copy(group, table[i], _take(pool)))
                pool.release(table[i])
                table[i] = copies[-1].target
            table.extend(_take(pool) for _ in range(len(table), end))
        return copies

    def publish(self, blocks: SequenceBlocks, tokens: Sequence[int], length: int) -> None:
        """Let the full blocks of a sequence's first `length` tokens be found by others."""
        names = blocks.name(tokens, length // BLOCK_TOKENS)
        for table, (_, pool) in zip(blocks.tables, self._groups, strict=True):
            for i in range(len(names) - 1, -1, -1):
                if table[i] == RELEASED or not pool.is_writable(table[i]):
                    break  # published, or not worth it: so is everything before
                pool.publish(table[i], names[i])

    def trim(self, blocks: SequenceBlocks, length: int) -> None:
        """Release what the token behind `length` others, and those after it, do not see."""
        for table, (reach, pool) in zip(blocks.tables, self._groups, strict=True):
            for i in range(reach.first_block(length) - 1, blocks_for(reach.sinks) - 1, -1):
                if i >= len(table) or table[i] == RELEASED:
                    break
                pool.release(table[i])
                table[i] = RELEASED

    def fork(self, blocks: SequenceBlocks) -> SequenceBlocks:
        """Another sequence with the same tokens so far: it shares every block."""
        for table, (_, pool) in zip(blocks.tables, self._groups, strict=True):
            for block in table:
                if block != RELEASED:
                    pool.share(block)
        return SequenceBlocks([list(table) for table in blocks.tables], list(blocks.digests))

    def release(self, blocks: SequenceBlocks) -> None:
        """Give all blocks back, the last ones first, so that a shared beginning stays longest."""
        for table, (_, pool) in zip(blocks.tables, self._groups, strict=True):
            for block in reversed(table):
                if block != RELEASED:
                    pool.release(block)
            table.clear()


def _take(pool: BlockPool) -> int:
    block = pool.allocate()
    if block is None:
        raise RuntimeError("the pool has fewer blocks than it said")
    return block
