"""Which sequences run in a step, and which of their tokens. No tensors: it needs no model.

Sequences that decode get a token each; what the step's token budget leaves goes to prompts, in the
order of arrival, a chunk at a time ("Sarathi-Serve", arXiv 2403.02310). When blocks run out, the
sequence that came last gives its own back and computes its tokens anew later: the first one always
goes on, so all come to their end.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from qinfer.cache.blocks import Digest
from qinfer.cache.tables import BlockTables, Copy, SequenceBlocks
from qinfer.engine.sequence import Sequence
from qinfer.quant.kv import BLOCK_TOKENS


class Chunk(NamedTuple):
    """Tokens of one sequence to run in a step: the first `tokens` that are pending."""

    sequence: Sequence
    tokens: int
    copies: list[Copy]


class Scheduler:
    """The waiting and the running sequences, both in the order of their arrival.

    Attributes:
        tables: The cache's blocks.
        max_sequences: Most sequences that run at once; may be lowered.
        step_tokens: Most tokens in a step; may be lowered, not below `max_sequences`.
        waiting: Not admitted yet, or preempted.
        running: Have blocks and a slot.
        preemptions: How often a sequence had to give its blocks back.
    """

    def __init__(self, tables: BlockTables, *, max_sequences: int, step_tokens: int) -> None:
        self.tables = tables
        self.max_sequences = max_sequences
        self.step_tokens = max(step_tokens, max_sequences)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._slots = list(range(max_sequences - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, or is not wanted any more."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Chunk]:
        """Choose the chunks of the next step and make room for them in the cache.

        Empty only if nothing waits or runs.
        """
        while len(self.running) > self.max_sequences:
            self.preempt(self.running[-1])
        decoding = sum(sequence.pending_tokens == 1 for sequence in self.running)
        budget, chunks = self.step_tokens - decoding, []
        for sequence in list(self.running):
            decodes = sequence.pending_tokens == 1
            count = 1 if decodes else min(sequence.pending_tokens, budget)
            copies = self._make_room(sequence, count) if count else None
            if copies is not None:
                chunks.append(Chunk(sequence, count, copies))
                budget -= 0 if decodes else count
        return chunks + self._admit(budget)

    def _make_room(self, sequence: Sequence, count: int) -> list[Copy] | None:
        """Get blocks for a running sequence's next tokens, from those behind it if need be.

        Returns:
            What has to be copied first; None if the sequence does not run any more.
        """
        while sequence.blocks is not None:
            start = sequence.computed_tokens
            copies = self.tables.grow(sequence.blocks, start, start + count)
            if copies is not None:
                return copies
            self.preempt(self.running[-1])
        return None

    def _admit(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            blocks = self._find_room(sequence)
            if blocks is None:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.blocks, sequence.slot = blocks, self._slots.pop()
            count = min(sequence.pending_tokens, budget)
            start = sequence.computed_tokens
            copies = self.tables.grow(blocks, start, start + count)
            if copies is None:
                raise RuntimeError("the pool has fewer blocks than it said")
            chunks.append(Chunk(sequence, count, copies))
            budget -= count
        return chunks

    def _find_room(self, sequence: Sequence) -> SequenceBlocks | None:
        """Blocks to begin a waiting sequence with, or None if it has to wait on.

        Each running sequence is left a block to grow by, so that none is preempted at once. A block
        that another prompt is about to compute is waited for.
        """
        if sequence.leader is not None and sequence.leader.computes_same_prompt:
            return None
        blocks = self.tables.new(sequence.digests)
        tokens = sequence.token_ids
        covered = self.tables.reuse(blocks, tokens, len(tokens) - 1)
        names = blocks.name(tokens, (len(tokens) - 1) // BLOCK_TOKENS)
        following = names[covered // BLOCK_TOKENS :][:1]
        spare = len(self.running)
        if self._promised().intersection(following) or not self.tables.fits(
            blocks, len(tokens), spare=spare
        ):
            self.tables.release(blocks)
            return None
        sequence.computed_tokens = covered
        if sequence.started_s is None:
            sequence.reused_tokens = covered
        return blocks

    def fork(self, leader: Sequence, follower: Sequence) -> bool:
        """Let a waiting sequence go on from where one of the same prompt has arrived.

        They share all blocks. False if there is no room now; then it is admitted as any other.
        """
        if leader.blocks is None or len(self.running) >= self.max_sequences:
            return False
        blocks = self.tables.fork(leader.blocks)
        if not self.tables.fits(blocks, leader.computed_tokens + 1, spare=len(self.running)):
            self.tables.release(blocks)
            return False
        self.waiting.remove(follower)
        self.running.append(follower)
        follower.blocks, follower.slot = blocks, self._slots.pop()
        follower.computed_tokens = follower.reused_tokens = leader.computed_tokens
        return True

    def _promised(self) -> set[Digest]:
        """Blocks of prompts that are being computed and not stored yet."""
        promised: set[Digest] = set()
        for sequence in self.running:
            if sequence.blocks is not None and sequence.pending_tokens > 1:
                count = len(sequence.token_ids) // BLOCK_TOKENS
                names = sequence.blocks.name(sequence.token_ids, count)
                promised.update(names[sequence.computed_tokens // BLOCK_TOKENS :])
        return promised

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it computes its tokens anew when its turn comes."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self._release(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        if sequence.blocks is not None and sequence.slot is not None:
            self.tables.release(sequence.blocks)
            self._slots.append(sequence.slot)
        sequence.blocks = sequence.slot = None
        sequence.computed_tokens = 0
