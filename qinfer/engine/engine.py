"""Prefill a prompt in chunks, then decode it token by token. Token ids only, never text."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

import torch

from qinfer.cache.contiguous import KVCache
from qinfer.engine.sequence import Sequence
from qinfer.errors import NumericsError, PromptError
from qinfer.models.decoder import Decoder
from qinfer.sampling import Sampler, SamplingParams

PREFILL_CHUNK_TOKENS = 256
"""Prompt tokens that go through the model at once; bounds the memory that activations take."""


class Engine:
    """Runs sequences through a decoder.

    Attributes:
        decoder: The model.
        vocab_size: Ids from here on are padding of the model's vocabulary and are never sampled.
        stop_ids: Tokens that end a sequence.
        context_tokens: Most tokens a sequence may have, prompt and output together.
    """

    def __init__(
        self, decoder: Decoder, *, vocab_size: int, stop_ids: Collection[int], context_tokens: int
    ) -> None:
        self.decoder = decoder
        self.vocab_size = vocab_size
        self.stop_ids = frozenset(stop_ids)
        self.context_tokens = context_tokens

    def start(
        self, prompt_ids: SequenceOf[int], params: SamplingParams, max_tokens: int | None
    ) -> Sequence:
        """Admit a prompt and allocate its cache for all that the request can come to.

        Args:
            prompt_ids: At least one token.
            params: How to sample.
            max_tokens: Bound on new tokens; None is up to the end of the context.

        Raises:
            PromptError: The prompt is empty, leaves no room in the context, or asks for a cache
                that there is no memory for.
        """
        room = self.context_tokens - len(prompt_ids)
        if not prompt_ids:
            raise PromptError("the prompt is empty", hint="Give at least one token.")
        if room < 1:
            raise PromptError(
                f"the prompt has {len(prompt_ids):,} tokens, {1 - room:,} more than the context "
                f"of {self.context_tokens:,} allows with one token of output",
                hint="Shorten it, or pass --truncate-prompt left to keep only its end.",
            )
        limit = room if max_tokens is None else min(max_tokens, room)
        cache = self._new_cache(len(prompt_ids) + limit)
        return Sequence(prompt_ids, limit, Sampler(params, vocab_size=self.vocab_size), cache)

    def _new_cache(self, capacity: int) -> KVCache:
        config, ops = self.decoder.config, self.decoder.ops
        try:
            return KVCache(config, capacity, ops.dtype, ops.device)
        except RuntimeError:  # the allocators of torch raise nothing narrower on all devices
            needed = KVCache.nbytes_for(config, capacity, ops.dtype)
            raise PromptError(
                f"the KV cache of {capacity:,} tokens needs {needed / 1e9:,.1f} GB, "
                "more than there is memory for",
                hint="Lower --max-tokens or --ctx-size.",
            ) from None

    @torch.inference_mode()
    def step(self, sequence: Sequence) -> int | None:
        """Sample the next token; the first call prefills the prompt.

        Args:
            sequence: From `start`; in place, grows by the token, and gets its `finish_reason`
                with the last one.

        Returns:
            The token, or None where there was none to choose: see the sequence's `error`.
        """
        before = sequence.cache.length
        pending = sequence.token_ids[before:]
        device = self.decoder.ops.device
        chunks = [torch.tensor(ids, device=device) for ids in _chunks(pending)]
        for chunk in chunks:
            hidden = self.decoder.forward(chunk, sequence.cache)
            sequence.cache.length += len(chunk)
        logits = self.decoder.logits(hidden[-1:])[0]
        try:
            token = sequence.sampler.sample(logits, sequence.token_ids)
        except NumericsError as error:
            sequence.error = error  # of the penalties, if the model's part of it is sound
            if not bool(logits[: self.vocab_size].isfinite().all()):
                sequence.cache.length = before
                sequence.error = self._blame(chunks, sequence.cache)
            sequence.finish_reason = "error"
            return None
        sequence.token_ids.append(token)
        if token in self.stop_ids:
            sequence.finish_reason = "stop"
        elif sequence.new_tokens >= sequence.max_tokens:
            sequence.finish_reason = "length"
        return token

    def _blame(self, chunks: SequenceOf[torch.Tensor], cache: KVCache) -> NumericsError:
        """Repeat a step whose logits were not finite and name where that began."""
        place = None
        for chunk in chunks:
            place = place or self.decoder.locate_nonfinite(chunk, cache)
            cache.length += len(chunk)
        return NumericsError(
            f"the model produced NaN or infinite values, first in {place or 'the output head'}",
            hint="The weights are damaged or overflow the 16-bit range; convert the model again, "
            "from bf16 weights if there are any.",
        )


def _chunks(ids: list[int]) -> list[list[int]]:
    size = PREFILL_CHUNK_TOKENS
    return [ids[i : i + size] for i in range(0, len(ids), size)]
