"""A set of keys that takes little memory: 24 to 48 bytes for each, however long the keys are."""

from __future__ import annotations

import hashlib
import json

_WIDTH = 16
_EMPTY = bytes(_WIDTH)


def digest(*key: str | int) -> bytes:
    """The 16 bytes that stand for a key; text and numbers are never the same."""
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=_WIDTH).digest()


class DigestSet:
    """Digests in an open-addressing table: no Python object for each of ten million."""

    def __init__(self) -> None:
        self._slots = 1024
        self._table = bytearray(self._slots * _WIDTH)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: bytes) -> bool:
        return self._at(self._find(key)) == key

    def add(self, key: bytes) -> bool:
        """Add a digest; return whether it is new."""
        offset = self._find(key)
        if self._at(offset) == key:
            return False
        self._table[offset : offset + _WIDTH] = key
        self._count += 1
        if self._count * 3 > self._slots * 2:
            self._grow()
        return True

    def _at(self, offset: int) -> bytes:
        return bytes(self._table[offset : offset + _WIDTH])

    def _find(self, key: bytes) -> int:
        """The offset of the key, or of the empty slot where it belongs."""
        slot = int.from_bytes(key[:8]) % self._slots
        while self._at(slot * _WIDTH) not in (_EMPTY, key):
            slot = (slot + 1) % self._slots
        return slot * _WIDTH

    def _grow(self) -> None:
        old = self._table
        self._slots *= 2
        self._table = bytearray(self._slots * _WIDTH)
        for offset in range(0, len(old), _WIDTH):
            key = bytes(old[offset : offset + _WIDTH])
            if key != _EMPTY:
                place = self._find(key)
                self._table[place : place + _WIDTH] = key
