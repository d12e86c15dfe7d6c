"""Who uses which block of the key-value cache. No tensors: block numbers only.

A block that nobody uses any more keeps its content, and can be found again by the digest of its
tokens and of all before them, until its place is needed: the least recently used one goes first
("Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv
2309.06180).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Digest = bytes


def digest(parent: Digest, tokens: Sequence[int]) -> Digest:
    """Name a full block by its tokens and by the digest of the block before it.

    Args:
        parent: Of the preceding block; empty for a sequence's first.
        tokens: The block's token ids.
    """
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Hands out blocks, counts their users, and remembers what full blocks contain.

    A block is in use (it has users), cached (it has none, and is found by its digest) or free.

    Attributes:
        capacity: Number of blocks, numbered from 0.
        retained: Most blocks that stay cached. Blocks that were never used cost no memory yet, so
            a bound keeps a long run from touching them all.
    """

    def __init__(self, capacity: int, *, retained: int | None = None) -> None:
        self.capacity = capacity
        self.retained = capacity if retained is None else retained
        self._free = list(range(capacity - 1, -1, -1))
        self._users = [0] * capacity
        self._digests: list[Digest | None] = [None] * capacity
        self._by_digest: dict[Digest, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def in_use(self) -> int:
        """Blocks that have a user."""
        return self.capacity - self.available

    def allocate(self) -> int | None:
        """Take a block for writing, with one user; None if all are in use."""
        if not self._free:
            self._drop_oldest()
        if not self._free:
            return None
        block = self._free.pop()
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a user to a block that is in use."""
        self._check_used(block)
        self._users[block] += 1

    def release(self, block: int) -> None:
        """Remove a user; the last one makes the block cached, or free if it has no digest."""
        self._check_used(block)
        self._users[block] -= 1
        if self._users[block]:
            return
        if self._digests[block] is None:
            self._free.append(block)
            return
        self._cached[block] = None
        if len(self._cached) > self.retained:
            self._drop_oldest()

    def publish(self, block: int, name: Digest) -> None:
        """Let a full block be found by its digest. It must not be written any more.

        Where another block of the same content is known already, that one stays the one found.
        """
        self._check_used(block)
        if self._digests[block] is None and name not in self._by_digest:
            self._digests[block] = name
            self._by_digest[name] = block

    def knows(self, name: Digest) -> bool:
        """Whether `find` would find it."""
        return name in self._by_digest

    def find(self, name: Digest) -> int | None:
        """Take a block of known content, adding a user; None if there is none."""
        block = self._by_digest.get(name)
        if block is None:
            return None
        self._cached.pop(block, None)
        self._users[block] += 1
        return block

    def is_writable(self, block: int) -> bool:
        """Whether a block has one user and no published content, so that writing harms nobody."""
        return self._users[block] == 1 and self._digests[block] is None

    def _check_used(self, block: int) -> None:
        if not self._users[block]:
            raise ValueError(f"block {block} is not in use")

    def _drop_oldest(self) -> None:
        if not self._cached:
            return
        block, _ = self._cached.popitem(last=False)
        name = self._digests[block]
        if name is not None:
            del self._by_digest[name]
            self._digests[block] = None
        self._free.append(block)
