"""Runs many sequences through a decoder, a step at a time. Token ids only, never text."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from qinfer.cache.paged import PagedCache
from qinfer.engine.decoding import Decoding, Flight
from qinfer.engine.scheduler import Chunk, Scheduler
from qinfer.engine.sequence import Sequence
from qinfer.errors import NumericsError, PromptError, QInferError
from qinfer.models.decoder import Decoder, Watch
from qinfer.ops.paged import Batch
from qinfer.sampling import Sampler, SamplingParams

STEP_TOKENS = 256
"""Tokens that go through the model at once; bounds the memory that activations take."""

GPU_STEP_TOKENS = 1024
"""The same on a GPU, which takes more at once to be busy."""

_LEAST_STEP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands.

    Attributes:
        running: Sequences that have blocks.
        waiting: Sequences that have none yet.
        kv_used: Share of the cache's blocks in use, 0 to 1.
        reused_tokens: Prompt tokens found in the cache instead of computed, so far.
        preemptions: How often a sequence gave its blocks back to others, so far.
    """

    running: int
    waiting: int
    kv_used: float
    reused_tokens: int
    preemptions: int


def step_tokens_on(device: torch.device) -> int:
    """Most tokens in a step, where nothing else is asked for."""
    return GPU_STEP_TOKENS if device.type == "cuda" else STEP_TOKENS


class Engine:
    """Prefills prompts in chunks and decodes many sequences at once.

    Attributes:
        decoder: The model.
        cache: Keys and values.
        scheduler: Who runs.
        vocab_size: Ids from here on are padding of the model's vocabulary and are never sampled.
        stop_ids: Tokens that end a sequence.
        context_tokens: Most tokens that a sequence attends to, prompt and output together.
        ends_at_context: Whether a sequence ends there; else its oldest tokens are dropped.
        decoding: Runs steps in which every sequence has one token, see `decode_with`.
        warn: Called with a sentence when something had to give way.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        *,
        vocab_size: int,
        stop_ids: Collection[int],
        context_tokens: int,
        max_sequences: int,
        step_tokens: int = STEP_TOKENS,
        ends_at_context: bool = True,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        step_tokens = max(step_tokens, max_sequences)
        self.scheduler = Scheduler(
            cache.tables(step_tokens=step_tokens),
            max_sequences=max_sequences,
            step_tokens=step_tokens,
        )
        if not self.scheduler.tables.fits_alone(context_tokens):
            raise ValueError(f"the cache has no room for a sequence of {context_tokens:,} tokens")
        self.vocab_size = vocab_size
        self.stop_ids = frozenset(stop_ids)
        self.context_tokens = context_tokens
        self.ends_at_context = ends_at_context
        self.decoding: Decoding | None = None
        self.warn: Callable[[str], None] = lambda message: None
        self._ahead: Flight | None = None
        self._advanced: list[Sequence] = []  # in this step
        self._reused_tokens = 0
        self._last_added: Sequence | None = None

    def decode_with(self, decoding: Decoding | None) -> None:
        """Run steps in which every sequence has one token by this, if it is something."""
        self.decoding = decoding

    def add(
        self, prompt_ids: SequenceOf[int], params: SamplingParams, max_tokens: int | None
    ) -> Sequence:
        """Queue a prompt.

        Args:
            prompt_ids: At least one token.
            params: How to sample.
            max_tokens: Bound on new tokens; None is up to the end of the context.

        Raises:
            PromptError: The prompt is empty or leaves no room in the context.
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
        limit = room if max_tokens is None else max_tokens
        if self.ends_at_context:
            limit = min(limit, room)
        sequence = Sequence(prompt_ids, limit, Sampler(params, vocab_size=self.vocab_size))
        self._find_leader(sequence)
        self.scheduler.add(sequence)
        return sequence

    def _find_leader(self, sequence: Sequence) -> None:
        """Several choices of a prompt come one after another: they share its prefill."""
        last, self._last_added = self._last_added, sequence
        if last is None or not last.is_unanswered or last.token_ids != sequence.token_ids:
            return
        leader = last.leader
        if leader is None or not leader.is_unanswered:
            leader = last  # that one has gone on alone, where this one cannot join it
        sequence.leader = leader
        leader.followers.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self.scheduler.remove(sequence)

    @property
    def stats(self) -> EngineStats:
        """Where it stands."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_used=self.scheduler.tables.used,
            reused_tokens=self._reused_tokens,
            preemptions=self.scheduler.preemptions,
        )

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Run one batch.

        Returns:
            The sequences that got a token, or ended with an error; those with a `finish_reason`
            have left. Empty where only parts of prompts were run, or nothing is to be done.
        """
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        self._note_start(chunks)
        self._advanced = []
        try:
            if self.decoding is not None and self._is_decoding(chunks):
                self._decode(self.decoding, chunks)
            else:
                with self.decoder.ops.forward_pass(sum(chunk.tokens for chunk in chunks)):
                    self._advance(chunks)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            self._give_way(chunks)
        return self._advanced

    def _advance(self, chunks: SequenceOf[Chunk]) -> None:
        """Run any chunks."""
        self._ahead = None
        ready = [i for i, c in enumerate(chunks) if c.tokens == c.sequence.pending_tokens]
        logits = self._run(chunks, ready)
        for sequence, count, _ in chunks:
            self._store(sequence, sequence.computed_tokens + count)
        sequences, rows = [], []
        for row, i in enumerate(ready):
            forked = [*self._fork(chunks[i].sequence), chunks[i].sequence]
            sequences += forked
            rows += [row] * len(forked)
        self._choose(sequences, logits, rows)

    def _choose(
        self, sequences: SequenceOf[Sequence], logits: Tensor, rows: SequenceOf[int]
    ) -> None:
        """Add a token to sequences, each by its row of logits; in one call if there is one.

        Args:
            sequences: Each of them once.
            logits: fp32 [rows, vocab].
            rows: Of each sequence; some may share one.
        """
        decoding, its_row = self.decoding, dict(zip(sequences, rows, strict=True))
        if decoding is not None:
            chosen = [s for s in sequences if s.sampler.is_memoryless]
            if chosen:
                some = logits[[its_row.pop(s) for s in chosen]]
                for sequence, token in zip(chosen, decoding.choose(some, chosen), strict=True):
                    self._accept(sequence, token)
        for sequence, row in its_row.items():
            self._sample(sequence, logits[row])

    def _is_decoding(self, chunks: SequenceOf[Chunk]) -> bool:
        return all(c.sequence.pending_tokens == 1 and not c.sequence.followers for c in chunks)

    def _decode(self, decoding: Decoding, chunks: SequenceOf[Chunk]) -> None:
        """Run one token of each sequence, launched in the step before if that could foresee it."""
        sequences = [chunk.sequence for chunk in chunks]
        on_host = [i for i, s in enumerate(sequences) if not s.sampler.is_memoryless]
        flight, self._ahead = self._ahead, None
        if flight is None or not flight.is_of(sequences) or any(c.copies for c in chunks):
            for chunk in chunks:
                self.cache.copy(chunk.copies)
            flight = decoding.launch(sequences)
            if decoding.warning is not None:
                self.warn(decoding.warning)
                decoding.warning = None
        for sequence in sequences:
            self._store(sequence, sequence.computed_tokens + 1)
        if not on_host and self._foresees(sequences):
            self._ahead = decoding.launch_ahead(flight)
        if on_host:
            with self.decoder.ops.forward_pass(len(on_host)):
                for i, logits in zip(on_host, flight.logits(on_host), strict=True):
                    self._sample(sequences[i], logits)
        for i, token in enumerate(flight.tokens()):
            if i not in on_host:
                self._accept(sequences[i], token)

    def _accept(self, sequence: Sequence, token: int | None) -> None:
        """Take what a step chose; None if there was nothing to choose from."""
        if token is None:
            self._fail(sequence, self._blame(sequence))
            return
        if not sequence.sampler.is_greedy:
            sequence.sampler.take()
        self._append(sequence, token)

    def _foresees(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether the same sequences will probably run in the next step."""
        scheduler = self.scheduler
        admits = scheduler.waiting and len(scheduler.running) < scheduler.max_sequences
        ends = any(sequence.new_tokens + 1 >= sequence.max_tokens for sequence in sequences)
        return not (admits or ends)

    def _note_start(self, chunks: SequenceOf[Chunk]) -> None:
        now = time.perf_counter()
        for sequence, _, _ in chunks:
            if sequence.started_s is None:
                sequence.started_s = now
                self._reused_tokens += sequence.reused_tokens

    def _run(self, chunks: SequenceOf[Chunk], ready: SequenceOf[int]) -> Tensor:
        """Run chunks; logits fp32 [ready, vocab] behind the last token of those that are ready."""
        for chunk in chunks:
            self.cache.copy(chunk.copies)
        batch = self._batch([(s, s.computed_tokens, count) for s, count, _ in chunks])
        hidden = self.decoder.forward(batch, self.cache.layers)
        if not ready:
            return hidden[:0]
        if len(ready) == len(hidden):
            return self.decoder.logits(hidden)
        ends = list(itertools.accumulate(chunk.tokens for chunk in chunks))
        last = torch.tensor([ends[i] - 1 for i in ready], device=hidden.device)
        return self.decoder.logits(hidden[last])

    def _batch(self, parts: SequenceOf[tuple[Sequence, int, int]]) -> Batch:
        """Lay parts of sequences side by side: (sequence, first token, tokens)."""
        blocks = [sequence.held_blocks for sequence, _, _ in parts]
        groups = range(len(self.cache.layout.reaches))
        return Batch.of(
            [(s.token_ids[first : first + count], first) for s, first, count in parts],
            [[[max(b, 0) for b in its.tables[group]] for its in blocks] for group in groups],
            [sequence.slot or 0 for sequence, _, _ in parts],
            self.decoder.ops.device,
        )

    def _store(self, sequence: Sequence, computed_tokens: int) -> None:
        """Note that tokens are in the cache; share what is full, release what is out of sight."""
        blocks = sequence.held_blocks
        sequence.computed_tokens = computed_tokens
        self.scheduler.tables.publish(blocks, sequence.token_ids, computed_tokens)
        self.scheduler.tables.trim(blocks, computed_tokens)

    def _fork(self, leader: Sequence) -> list[Sequence]:
        """Start the sequences of the same prompt for which there is room."""
        followers, leader.followers = leader.followers, []
        forked = []
        for follower in followers:
            if follower in self.scheduler.waiting and self.scheduler.fork(leader, follower):
                self.cache.copy_open(leader.slot or 0, follower.slot or 0)
                follower.started_s = leader.started_s
                self._reused_tokens += follower.reused_tokens
                forked.append(follower)
        return forked

    def _sample(self, sequence: Sequence, logits: Tensor) -> None:
        try:
            token = sequence.sampler.sample(logits, sequence.token_ids)
        except NumericsError as error:
            sound = bool(logits[: self.vocab_size].isfinite().all())  # then it is the penalties
            self._fail(sequence, error if sound else self._blame(sequence))
        else:
            self._append(sequence, token)

    def _append(self, sequence: Sequence, token: int) -> None:
        sequence.token_ids.append(token)
        if token in self.stop_ids:
            sequence.finish_reason = "stop"
        elif sequence.new_tokens >= sequence.max_tokens:
            sequence.finish_reason = "length"
        self._note_progress(sequence)

    def _fail(self, sequence: Sequence, error: QInferError) -> None:
        sequence.error = error
        sequence.finish_reason = "error"
        self._note_progress(sequence)

    def _note_progress(self, sequence: Sequence) -> None:
        self._advanced.append(sequence)
        sequence.last_token_s = time.perf_counter()
        if sequence.first_token_s is None:
            sequence.first_token_s = sequence.last_token_s
        if sequence.finish_reason is not None:
            self.scheduler.remove(sequence)

    def _give_way(self, chunks: SequenceOf[Chunk]) -> None:
        """The device is out of memory: run less at once, or give a sequence up.

        Some may have advanced or ended before that, and others have been forked.
        """
        scheduler = self.scheduler
        self._ahead = None
        for sequence in reversed(list(scheduler.running)):
            scheduler.preempt(sequence)
        if scheduler.max_sequences > 1 or scheduler.step_tokens > _LEAST_STEP_TOKENS:
            scheduler.max_sequences = max(scheduler.max_sequences // 2, 1)
            least = max(_LEAST_STEP_TOKENS, scheduler.max_sequences)
            lowered = max(scheduler.step_tokens // 2, least)
            scheduler.step_tokens = min(scheduler.step_tokens, lowered)
            self.warn(
                f"out of memory; going on with {scheduler.max_sequences} sequences and "
                f"{scheduler.step_tokens} tokens at once"
            )
            return
        unfinished = [c.sequence for c in chunks if c.sequence.finish_reason is None]
        for sequence in unfinished[:1]:
            self._fail(
                sequence,
                QInferError(
                    "out of memory with one sequence running",
                    hint="Lower --ctx-size or --kv-bits, or use a smaller model.",
                ),
            )

    def _blame(self, sequence: Sequence) -> NumericsError:
        """Run a sequence again whose logits were not finite, and name where that began."""
        places: list[str] = []

        def watch(name: str, x: Tensor) -> None:
            if not places and not bool(x.isfinite().all()):
                places.append(name)

        if self._replay(sequence, watch) and not places:
            places.append("the output head")
        return NumericsError(
            "the model produced NaN or infinite values"
            + "".join(f", first in {p}" for p in places),
            hint="The weights are damaged or overflow the 16-bit range; convert the model again, "
            "from bf16 weights if there are any.",
        )

    def _replay(self, sequence: Sequence, watch: Watch) -> bool:
        """Compute all of a running sequence anew; False if there are too few blocks for that."""
        tables, length = self.scheduler.tables, sequence.computed_tokens
        tables.release(sequence.held_blocks)
        sequence.blocks = tables.new([])
        for start in range(0, length, self.scheduler.step_tokens):
            count = min(self.scheduler.step_tokens, length - start)
            if tables.grow(sequence.blocks, start, start + count) is None:
                return False
            batch = self._batch([(sequence, start, count)])
            self.decoder.forward(batch, self.cache.layers, watch=watch)
            tables.trim(sequence.blocks, start + count)
        return True


def _is_out_of_memory(error: Exception) -> bool:
    """Torch's CPU allocator raises a plain RuntimeError."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)
