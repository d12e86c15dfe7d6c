"""One prompt on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Literal

from qinfer.cache.blocks import Digest
from qinfer.cache.tables import SequenceBlocks
from qinfer.errors import QInferError
from qinfer.sampling import Sampler

FinishReason = Literal["stop", "length", "error"]


class Sequence:
    """The state of one generation, in token ids.

    Attributes:
        token_ids: The prompt, and behind it the tokens sampled so far.
        prompt_tokens: How many of them are the prompt.
        max_tokens: Bound on new tokens.
        sampler: With this sequence's own random generator.
        computed_tokens: How many have their keys and values in the cache.
        reused_tokens: How many of the prompt's were there already when it began.
        leader: One of the same prompt that came before it; it is forked from that one if it can be.
        followers: Those that it leads.
        digests: Of its full blocks, as far as they were needed.
        blocks: Where its keys and values are; None while it waits.
        slot: Its open block; None while it waits.
        finish_reason: Why it ended; None while it runs.
        error: What went wrong where the reason is `error`.
        started_s: When it first ran, by `time.perf_counter`; None before.
        first_token_s: When its first token was there.
        last_token_s: When its last token was there.
    """

    def __init__(self, prompt_ids: SequenceOf[int], max_tokens: int, sampler: Sampler) -> None:
        self.token_ids = list(prompt_ids)
        self.prompt_tokens = len(prompt_ids)
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.computed_tokens = 0
        self.reused_tokens = 0
        self.leader: Sequence | None = None
        self.followers: list[Sequence] = []
        self.digests: list[Digest] = []
        self.blocks: SequenceBlocks | None = None
        self.slot: int | None = None
        self.finish_reason: FinishReason | None = None
        self.error: QInferError | None = None
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens sampled so far, an end-of-sequence token included."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens that have yet to go through the model; 1 in decoding."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def held_blocks(self) -> SequenceBlocks:
        """Its blocks; only while it runs."""
        if self.blocks is None:
            raise RuntimeError("the sequence does not run")
        return self.blocks

    @property
    def is_unanswered(self) -> bool:
        """Whether nothing has come of its prompt yet, neither a token nor an error."""
        return self.new_tokens == 0 and self.finish_reason is None

    @property
    def computes_same_prompt(self) -> bool:
        """Whether its prompt is on its way, so that followers do better to wait for it."""
        return self.blocks is not None and self.is_unanswered
