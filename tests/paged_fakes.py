"""A cache that holds names of tokens in place of keys and values, and a decoder that reads it.

A key at some position depends on that token and on all before it; so the cache of tests holds, for
each position, the number of the prefix that ends there. What a query finds where it looks is right
if and only if these are the prefixes of its own sequence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from qinfer.cache.blocks import BlockPool
from qinfer.cache.tables import BlockTables, Copy, Reach
from qinfer.ops.paged import Batch
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.kv import BLOCK_TOKENS

VOCAB = 16


class Prefixes:
    """Numbers every prefix of token ids that occurs; 0 is the empty one."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._keys = [(0, 0)]
        self._hashes = [1]

    def extend(self, prefix: int, token: int) -> int:
        key = (prefix, token)
        if key not in self._numbers:
            self._numbers[key] = len(self._keys)
            self._keys.append(key)
            self._hashes.append(hash((self._hashes[prefix], token)))
        return self._numbers[key]

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The prefix behind each token."""
        path, last = [], 0
        for token in tokens:
            last = self.extend(last, token)
            path.append(last)
        return path

    def path(self, prefix: int) -> list[int]:
        """All prefixes that end on the way to this one, itself included."""
        path = []
        while prefix:
            path.append(prefix)
            prefix = self._keys[prefix][0]
        return path[::-1]

    def next(self, prefix: int) -> int:
        """The token that is most likely behind a prefix: a function of all of it; rarely 0."""
        chance = self._hashes[prefix]
        return 1 + chance % (VOCAB - 1) if chance % 97 else 0


def visible(reach: Reach, query: int) -> list[int]:
    """Positions that the query at a position sees, by the definition."""
    return [
        key
        for key in range(query + 1)
        if reach.window is None or query - key < reach.window or key < reach.sinks
    ]


class FakeCache:
    """Blocks of prefixes, in place of `PagedCache`.

    Attributes:
        reaches: Of each group.
        opens: Whether a sequence's last block is kept by slot until it is full, as below 16 bits.
        pools: Of each group.
        copied: Blocks copied so far.
    """

    def __init__(
        self,
        reaches: Sequence[Reach],
        capacities: Sequence[int],
        *,
        slots: int,
        opens: bool,
        retained: int | None = None,
    ) -> None:
        self.reaches = tuple(reaches)
        self.opens = opens
        self.pools = [BlockPool(capacity, retained=retained) for capacity in capacities]
        self.layout = SimpleNamespace(reaches=self.reaches)
        self.layers = self
        self.prefixes = Prefixes()
        self.copied = 0
        self._blocks = [[[-1] * BLOCK_TOKENS for _ in range(count)] for count in capacities]
        self._open = [[-1] * BLOCK_TOKENS for _ in range(slots)]

    def tables(self, *, step_tokens: int) -> BlockTables:
        return BlockTables(self.reaches, self.pools, step_tokens=step_tokens)

    def copy(self, copies: Sequence[Copy]) -> None:
        for group, source, target in copies:
            self._blocks[group][target] = list(self._blocks[group][source])
            self.copied += 1

    def copy_open(self, source: int, target: int) -> None:
        self._open[target] = list(self._open[source])

    def write(self, tables: Sequence[Sequence[int]], slot: int, position: int, prefix: int) -> None:
        number, at = divmod(position, BLOCK_TOKENS)
        places = [blocks[table[number]] for blocks, table in zip(self._blocks, tables, strict=True)]
        if not self.opens:
            for place in places:
                place[at] = prefix
            return
        self._open[slot][at] = prefix
        if at == BLOCK_TOKENS - 1:
            for place in places:
                place[:] = self._open[slot]

    def read(
        self, group: int, table: Sequence[int], slot: int, keys: range, *, query: int
    ) -> list[int]:
        """What the query at a position finds at others."""
        found = []
        for number in range(keys.start // BLOCK_TOKENS, -(-keys.stop // BLOCK_TOKENS)):
            first = number * BLOCK_TOKENS
            opened = self.opens and number == query // BLOCK_TOKENS
            block = self._open[slot] if opened else self._blocks[group][table[number]]
            found += block[max(keys.start - first, 0) : max(keys.stop - first, 0)]
        return found

    def check(
        self, tables: Sequence[Sequence[int]], slot: int, path: Sequence[int], query: int
    ) -> None:
        """Whatever the query at a position sees is there and is its own sequence's."""
        for group, (reach, table) in enumerate(zip(self.reaches, tables, strict=True)):
            oldest = 0 if reach.window is None else max(0, query - reach.window + 1)
            for keys in (range(min(reach.sinks, oldest)), range(oldest, query + 1)):
                found = self.read(group, table, slot, keys, query=query)
                assert found == list(path[keys.start : keys.stop]), f"{query} misses some of {keys}"


class FakeDecoder:
    """Reads what precedes each token out of the cache, and predicts by all of it.

    Attributes:
        steps: Forward passes begun.
        fails: What to raise in which of them.
        tokens: Tokens that went through.
    """

    def __init__(self, prefixes: Prefixes, fails: dict[int, Exception] | None = None) -> None:
        self.ops = ReferenceOps(torch.device("cpu"), torch.float32)
        self.prefixes = prefixes
        self.fails = fails or {}
        self.steps = 0
        self.tokens = 0

    def forward(self, batch: Batch, cache: FakeCache) -> torch.Tensor:
        """[tokens, 1]: the number of the prefix that ends with each token."""
        self.steps += 1
        hidden = []
        offsets, ids, slots = batch.offsets.tolist(), batch.ids.tolist(), batch.slots.tolist()
        for s, start in enumerate(batch.starts.tolist()):
            tables = [table[s].tolist() for table in batch.tables]
            path = self._past(cache, tables, slots[s], start)
            for token in ids[offsets[s] : offsets[s + 1]]:
                position = len(path)
                path.append(self.prefixes.extend(path[-1] if path else 0, token))
                cache.write(tables, slots[s], position, path[-1])
                cache.check(tables, slots[s], path, position)
            hidden += path[start:]
        assert batch.positions.tolist() == [
            start + i
            for s, start in enumerate(batch.starts.tolist())
            for i in range(offsets[s + 1] - offsets[s])
        ]
        self.tokens += len(hidden)
        if self.steps in self.fails:
            raise self.fails[self.steps]
        return torch.tensor(hidden)[:, None]

    def _past(
        self, cache: FakeCache, tables: Sequence[Sequence[int]], slot: int, start: int
    ) -> list[int]:
        if not start:
            return []
        seen_by = [g for g, r in enumerate(cache.reaches) if r.window is None or r.window > 1]
        group = seen_by[0]
        keys = range(start - 1, start)
        (last,) = cache.read(group, tables[group], slot, keys, query=start)
        path = self.prefixes.path(last)
        assert len(path) == start, "the token before is not that of its place"
        return path

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, vocab]."""
        likely = torch.tensor([self.prefixes.next(prefix) for prefix in hidden[:, 0].tolist()])
        return torch.nn.functional.one_hot(likely, VOCAB).float()


class FakeSampler:
    """Takes the most likely token or, by a generator of its own, the one after it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, likely: int) -> int:
        return likely if self._random.random() < 0.8 else 1 + likely % (VOCAB - 1)

    def sample(self, logits: torch.Tensor, token_ids: Sequence[int]) -> int:
        return self.choose(int(logits.argmax()))
