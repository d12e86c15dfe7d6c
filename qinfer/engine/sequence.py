"""One prompt on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Literal

from qinfer.cache.contiguous import KVCache
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
        cache: Keys and values of the tokens that have been through the model.
        finish_reason: Why it ended; None while it runs.
        error: What went wrong where the reason is `error`.
    """

    def __init__(
        self, prompt_ids: SequenceOf[int], max_tokens: int, sampler: Sampler, cache: KVCache
    ) -> None:
        self.token_ids = list(prompt_ids)
        self.prompt_tokens = len(prompt_ids)
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.cache = cache
        self.finish_reason: FinishReason | None = None
        self.error: QInferError | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens sampled so far, an end-of-sequence token included."""
        return len(self.token_ids) - self.prompt_tokens
