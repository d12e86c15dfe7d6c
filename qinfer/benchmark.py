"""How fast a model prefills and decodes, and how close that comes to what the machine can do.

Cases are run on the engine with random token ids: prompts behind tokens that are in the cache
already, or new tokens behind them, of one or many sequences at once. Nothing here prints.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from qinfer import ops
from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.cache.tables import blocks_for
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig
from qinfer.engine.assembly import weights_bytes
from qinfer.engine.decoding import Decoding
from qinfer.engine.engine import Engine, step_tokens_on
from qinfer.engine.memory import default_budget, forget_peak, peak_bytes, workspace_bytes
from qinfer.engine.sequence import Sequence
from qinfer.errors import QInferError
from qinfer.generation import LanguageModel
from qinfer.models.architectures import linear_shapes
from qinfer.ops.bandwidth import read_bandwidth
from qinfer.ops.cpu.threads import processor_name
from qinfer.quant.kv import BLOCK_TOKENS, KVFormat
from qinfer.sampling import SamplingParams

PROMPT_TOKENS = 512
"""Of a prompt if nothing else is asked for, or as many as the model allows."""

Phase = Literal["prefill", "decode"]

_LESS = "Lower --batch or --depth, or use --kv-bits 8 or 4."
_GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure.

    Attributes:
        phase: `prefill` of prompts, or `decode` of new tokens.
        tokens: Of each sequence's prompt, or new ones of each sequence.
        depth: Tokens of each sequence that are in the cache before: whole blocks, since those are
            what one run finds again of another.
        batch: Sequences at once.
        kv_format: Of the cache.
    """

    phase: Phase
    tokens: int
    depth: int
    batch: int
    kv_format: KVFormat

    def __str__(self) -> str:
        return f"{self.phase} {self.tokens:,}, depth {self.depth:,}, batch {self.batch:,}"

    @property
    def context_tokens(self) -> int:
        """What it takes: decoding has a token to continue, and either ends with one sampled."""
        return self.depth + self.tokens + (2 if self.phase == "decode" else 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the repetitions: its median, and the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: SequenceOf[float]) -> Spread:
        """Of one value per repetition."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition of a case.

    Attributes:
        tokens: That were computed, of all sequences together.
        seconds: That they took.
        latency_s: Of prefill the time from a prompt's arrival to its first token, the median of
            the sequences; of decode that from token to token, the median of the steps.
        operations: Of prefill, floating-point operations.
    """

    tokens: int
    seconds: float
    latency_s: float
    operations: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case.

    Attributes:
        case: What was measured.
        tokens_per_s: Of all sequences together.
        latency_s: TTFT of prefill, TPOT of decode.
        flops_per_s: Of prefill: `operations` of each run by its time, their median.
        bytes_per_token: Of decode: what a step reads, by its tokens.
        peak_memory_bytes: Of the process meanwhile, weights included; on a GPU, of its memory.
    """

    case: Case
    tokens_per_s: Spread
    latency_s: Spread
    flops_per_s: float | None
    bytes_per_token: float | None
    peak_memory_bytes: int

    @property
    def read_bytes_per_s(self) -> float | None:
        """Bytes that decoding reads per second."""
        per_token = self.bytes_per_token
        return None if per_token is None else per_token * self.tokens_per_s.median


def cases_of(
    config: ModelConfig,
    kv_formats: SequenceOf[KVFormat],
    *,
    prompts: SequenceOf[int] | None,
    new_tokens: SequenceOf[int],
    depths: SequenceOf[int],
    batches: SequenceOf[int],
) -> list[Case]:
    """All combinations, of which there has to be one; those of one KV format together.

    Args:
        config: Of the model.
        kv_formats: Of the cache.
        prompts: Tokens of prompts to prefill, 0 for none; None is 512, or what the model allows.
        new_tokens: Tokens to decode, 0 for none.
        depths: Tokens in the cache before; rounded up to whole blocks.
        batches: Sequences at once.

    Raises:
        QInferError: The model's context, or its heads, are too small for one.
    """
    depths = list(dict.fromkeys(BLOCK_TOKENS * blocks_for(depth) for depth in depths))
    if prompts is None:
        prompts = [min(PROMPT_TOKENS, max(config.max_position_embeddings - max(depths) - 1, 1))]
    kinds: list[tuple[Phase, int]] = [("prefill", n) for n in prompts if n]
    kinds += [("decode", n) for n in new_tokens if n]
    cases = [
        Case(phase, tokens, depth, batch, kv_format)
        for kv_format, depth, batch in itertools.product(kv_formats, depths, batches)
        for phase, tokens in kinds
    ]
    for kv_format in kv_formats:
        kv_format.check(config.head_dim)
    longest = max(cases, key=lambda case: case.context_tokens)
    over = longest.context_tokens - config.max_position_embeddings
    if over > 0:
        raise QInferError(
            f"{longest} takes a context of {longest.context_tokens:,} tokens, and the model's has "
            f"{config.max_position_embeddings:,}",
            hint=f"Lower --depth, --prompt or --new-tokens by {over:,}.",
        )
    return cases


def require_memory(
    directory: Path, config: ModelConfig, cases: Iterable[Case], *, device: str
) -> None:
    """Refuse cases whose sequences would not all fit into memory at once.

    Args:
        directory: The model, which is not loaded yet.
        config: Its configuration.
        cases: To run.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        QInferError: One does not fit, or there is no such device.
    """
    its = ops.select(device)
    budget = default_budget(its.device)
    weights = weights_bytes(Checkpoint(directory), config, maps_tables=its.maps_tables)
    for plan in map(partial(_Plan.of, config), _by_format(cases)):
        work = workspace_bytes(
            config, tokens=plan.step_tokens(its.device), sequences=plan.sequences
        )
        if weights + work + plan.kv_bytes > budget:
            raise QInferError(
                f"{plan.sequences:,} sequences of {plan.context_tokens:,} tokens take "
                f"{plan.kv_bytes / 1e9:,.2f} GB of KV cache and the model "
                f"{(weights + work) / 1e9:,.2f} GB, and {budget / 1e9:,.2f} GB are free",
                hint=_LESS,
            )


def _by_format(cases: Iterable[Case]) -> Iterator[list[Case]]:
    for _, same in itertools.groupby(cases, key=lambda case: case.kv_format):
        yield list(same)


@dataclass(frozen=True, slots=True)
class _Plan:
    """An engine for some cases, each with all of its sequences at once.

    Its cache holds whole sequences also where layers have windows, so that what stands at the depth
    is always found again.
    """

    layout: CacheLayout
    blocks: int
    sequences: int
    context_tokens: int

    @classmethod
    def of(cls, config: ModelConfig, cases: SequenceOf[Case]) -> _Plan:
        """Of cases with one KV format."""
        return cls(
            layout=CacheLayout.of(config, (cases[0].kv_format,) * config.num_hidden_layers),
            # one more for each, which the scheduler keeps free before it admits a sequence
            blocks=max(case.batch * (blocks_for(case.context_tokens) + 1) for case in cases),
            sequences=max(case.batch for case in cases),
            context_tokens=max(case.context_tokens for case in cases),
        )

    def step_tokens(self, device: torch.device) -> int:
        """Most tokens of a step."""
        return max(step_tokens_on(device), self.sequences)

    @property
    def kv_bytes(self) -> int:
        """Of the cache."""
        layout, groups = self.layout, range(len(self.layout.reaches))
        blocks = self.blocks * sum(map(layout.block_bytes, groups))
        return blocks + self.sequences * layout.slot_bytes()

    def engine(self, model: LanguageModel) -> Engine:
        """Set it up over a model's decoder; nothing that fits is forgotten between runs."""
        decoder = model.engine.decoder
        try:
            cache = PagedCache(
                self.layout,
                [self.blocks] * len(self.layout.reaches),
                self.sequences,
                half=decoder.ops.half,
                device=decoder.ops.device,
                retained_tokens=self.blocks * BLOCK_TOKENS,
                padding=decoder.ops.fixed_steps,
            )
        except RuntimeError:  # the allocators of torch raise nothing narrower on all devices
            raise QInferError(
                f"the KV cache of {self.kv_bytes / 1e9:,.2f} GB cannot be reserved", hint=_LESS
            ) from None
        engine = Engine(
            decoder,
            cache,
            vocab_size=model.tokenizer.vocab_size,
            stop_ids=(),
            context_tokens=self.context_tokens,
            max_sequences=self.sequences,
            step_tokens=self.step_tokens(decoder.ops.device),
        )
        engine.decode_with(
            Decoding.of(
                decoder,
                cache,
                vocab_size=model.tokenizer.vocab_size,
                positions=self.context_tokens,
                graphs=model.device_options.graphs,
            )
        )
        engine.warn = _refuse
        return engine


def _refuse(message: str) -> None:
    """What had to give way would change what is measured."""
    raise QInferError(message, hint=_LESS)


class Benchmark:
    """Runs cases on a model.

    Attributes:
        model: Opened; of its engine only the decoder is used.
        params: How tokens are chosen; greedily unless it is set.
        weights_bytes: Of the weights that a step reads, in their form on disk.
    """

    def __init__(self, model: LanguageModel, *, seed: int = 0) -> None:
        self.model = model
        self.params = _GREEDY
        self.weights_bytes = weights_bytes(Checkpoint(model.directory), model.config)
        self._draw = random.Random(seed)

    def run(
        self,
        cases: Iterable[Case],
        *,
        repetitions: int,
        on_case: Callable[[Case], object] = lambda case: None,
        on_run: Callable[[], object] = lambda: None,
    ) -> Iterator[Result]:
        """Measure cases one after another, each after a run to warm up that does not count.

        Args:
            cases: From `cases_of`: neighbours of one KV format share what they find in the cache.
            repetitions: Of each that count.
            on_case: Called before each case.
            on_run: Called after each run, the first one too.

        Raises:
            QInferError: The model yields NaN or infinite values, or memory ran out.
        """
        for group in _by_format(cases):
            engine = _Plan.of(self.model.config, group).engine(self.model)
            for case in group:
                on_case(case)
                yield self._result(engine, case, repetitions, on_run)
            del engine  # its cache makes room for the next one

    def _result(
        self, engine: Engine, case: Case, repetitions: int, on_run: Callable[[], object]
    ) -> Result:
        measure = self._prefill if case.phase == "prefill" else self._decode
        self._forget_peak()
        self._fill(engine, case)
        runs = []
        for _ in range(1 + repetitions):
            runs.append(measure(engine, case))
            on_run()
        del runs[0]  # it warmed up
        is_prefill = case.phase == "prefill"
        return Result(
            case=case,
            tokens_per_s=Spread.of([run.tokens / run.seconds for run in runs]),
            latency_s=Spread.of([run.latency_s for run in runs]),
            flops_per_s=statistics.median(run.operations / run.seconds for run in runs)
            if is_prefill
            else None,
            bytes_per_token=None
            if is_prefill
            else bytes_per_token(self.model.config, case, self.weights_bytes),
            peak_memory_bytes=self._peak_bytes(),
        )

    def _prefix(self, case: Case, sequence: int) -> list[int]:
        """The tokens at the depth of a sequence: the same ones each time."""
        return self._ids(random.Random(sequence), case.depth)

    def _ids(self, draw: random.Random, count: int) -> list[int]:
        return draw.choices(range(self.model.tokenizer.vocab_size), k=count)

    def _fill(self, engine: Engine, case: Case) -> None:
        """Bring the tokens at the depth into the cache."""
        if case.depth:
            for i in range(case.batch):
                engine.add(self._prefix(case, i), _GREEDY, 1)
            while engine.stats.running or engine.stats.waiting:
                _step(engine)

    def _prefill(self, engine: Engine, case: Case) -> Run:
        prompts = [
            self._prefix(case, i) + self._ids(self._draw, case.tokens) for i in range(case.batch)
        ]
        start = time.perf_counter()
        sequences = [engine.add(prompt, _GREEDY, 1) for prompt in prompts]
        while engine.stats.running or engine.stats.waiting:
            _step(engine)
        seconds = time.perf_counter() - start
        computed = [len(prompts[0]) - sequence.reused_tokens for sequence in sequences]
        return Run(
            tokens=sum(computed),
            seconds=seconds,
            latency_s=statistics.median((s.first_token_s or start) - start for s in sequences),
            operations=sum(
                prefill_operations(self.model.config, s.reused_tokens, count)
                for s, count in zip(sequences, computed, strict=True)
            ),
        )

    def _decode(self, engine: Engine, case: Case) -> Run:
        vocab_size = self.model.tokenizer.vocab_size
        first = self._draw.randrange(vocab_size)
        sequences = [  # neighbours differ, since of equal prompts one waits for the other
            engine.add([*self._prefix(case, i), (first + i) % vocab_size], self.params, None)
            for i in range(case.batch)
        ]
        while any(sequence.is_unanswered for sequence in sequences):
            _step(engine)
        times = [time.perf_counter()]
        for _ in range(case.tokens):
            if len(_step(engine)) != case.batch:
                raise RuntimeError("a sequence did not decode with the others")
            times.append(time.perf_counter())
        for sequence in sequences:
            engine.cancel(sequence)
        return Run(
            tokens=case.batch * case.tokens,
            seconds=times[-1] - times[0],
            latency_s=statistics.median(b - a for a, b in itertools.pairwise(times)),
        )

    @property
    def _device(self) -> torch.device:
        return self.model.engine.decoder.ops.device

    def _forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            forget_peak()

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_bytes()


def _step(engine: Engine) -> list[Sequence]:
    advanced = engine.step()
    for sequence in advanced:
        if sequence.error is not None:
            raise sequence.error
    return advanced


def limit_bytes_per_s(device: str) -> float:
    """The bandwidth of a device's memory, measured: `auto`, `cpu` or `cuda`.

    Raises:
        QInferError: There is no such device.
    """
    its = ops.select(device).device
    return read_bandwidth(its, free_bytes=default_budget(its))


def device_name(device: torch.device) -> str:
    """What the processor is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def seen_tokens(first: int, count: int, window: int | None) -> int:
    """The sum, over `count` tokens behind `first` others, of the tokens that each sees.

    A token sees itself.
    """
    last = first + count
    return sum(min(seen, window or last) for seen in range(first + 1, last + 1))


def prefill_operations(config: ModelConfig, first: int, count: int) -> int:
    """Floating-point operations of `count` prompt tokens behind `first` others.

    Per token two for each weight of the linear layers; two for each weight of the head, once, since
    only the last token needs logits; and per layer, query head and channel four for each token
    seen: one multiplication and one addition, with keys and with values. Nothing else is counted.
    """
    weights = sum(n * k for n, k, _ in linear_shapes(config).values())
    head = config.vocab_size * config.hidden_size
    channels = config.num_attention_heads * config.head_dim
    seen = sum(
        layers * seen_tokens(first, count, window)
        for window, layers in Counter(config.layer_windows).items()
    )
    return 2 * (count * config.num_hidden_layers * weights + head) + 4 * channels * seen


def bytes_per_token(config: ModelConfig, case: Case, weights: int) -> float:
    """Bytes that decoding reads for a token, as a mean over the steps of a case.

    A step reads the weights once, and for each sequence keys and values of the tokens that its new
    one sees, at their share of a block of 32, scales included.

    Args:
        config: The model.
        case: Of decoding.
        weights: Bytes of them.
    """
    block = case.kv_format.block_bytes(config.num_key_value_heads, config.head_dim)
    first = case.depth + 1  # the token that decoding begins with
    seen = sum(
        layers * seen_tokens(first, case.tokens, window)
        for window, layers in Counter(config.layer_windows).items()
    )
    return weights / case.batch + block / BLOCK_TOKENS * seen / case.tokens
