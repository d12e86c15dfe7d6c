"""Decoding steps of fixed shape over fixed buffers: one launch on a GPU, one call on a CPU.

On a GPU a step takes its tokens from buffers and leaves the next ones there, drawn with the numbers
of the sequences' own generators, so that the next step of the same sequences can be launched before
the host has read what came of this one. The host chooses where it takes more than the logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qinfer.cache.paged import PagedCache
from qinfer.engine.sequence import Sequence
from qinfer.models.decoder import Decoder
from qinfer.ops.block import Rotation, StepTensors
from qinfer.ops.draws import COLUMNS, UNIFORMS, Draws
from qinfer.ops.paged import Batch
from qinfer.quant.kv import BLOCK_TOKENS
from qinfer.sampling import Sampler

_WIDTHS = (8, 64)
"""Least ones of a block table: 256 tokens, which attention takes at once, and 2,048."""


@dataclass(slots=True)
class Flight:
    """A step that was launched; what comes of it may still be on its way.

    Attributes:
        sequences: In the order of the rows.
        positions: Of the token that each of them runs.
    """

    sequences: list[Sequence]
    positions: list[int]
    _step: _FixedStep
    _results: NDArray[np.int64]
    _arrived: torch.cuda.Event | None

    def is_of(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether it runs the next token of just these sequences."""
        return len(sequences) == len(self.sequences) and all(
            a is b and b.computed_tokens == position
            for a, b, position in zip(self.sequences, sequences, self.positions, strict=True)
        )

    def tokens(self) -> list[int | None]:
        """Per sequence what was chosen, None where a logit was not finite; waits for it.

        It means nothing for sequences whose sampler looks back: there the host chooses.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        return _sound(*self._results[:, : len(self.sequences)].tolist())

    def logits(self, rows: list[int]) -> Tensor:
        """fp32 [rows, vocab] on the CPU, if no other step has been launched since."""
        return self._step.logits[rows].cpu()


class Decoding:
    """Launches decoding steps.

    Where steps are captured, shapes are rounded up to powers of two, so that there are few.

    Attributes:
        graphs: Whether steps are captured as CUDA graphs; false after that failed.
        warning: What to tell the user, once.
        vocab_size: Ids from here on are padding of the model's vocabulary and are never chosen.
    """

    def __init__(
        self, decoder: Decoder, cache: PagedCache, *, vocab_size: int, positions: int, graphs: bool
    ) -> None:
        """Prepare for sequences of so many positions; longer ones cost a new capture now and then.

        Args:
            decoder: The model.
            cache: With padding, see `PagedCache`.
            vocab_size: As the attribute.
            positions: Of the longest sequence.
            graphs: Capture CUDA graphs, if the device is one that has them.
        """
        self.graphs = graphs and decoder.ops.device.type == "cuda"
        self._queues = decoder.ops.fixed_steps  # steps are, and the host goes on meanwhile
        self.warning: str | None = None
        self._decoder = decoder
        self._cache = cache
        self.vocab_size = vocab_size
        self._positions = positions
        self._steps: dict[_Shape, _FixedStep] = {}
        self._rotary: Rotation = None  # as the steps know it
        # Graphs share memory, and a stream: libraries have a workspace for each.
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._kept: Tensor | None = None  # logits for the host, of any step

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        cache: PagedCache,
        *,
        vocab_size: int,
        positions: int,
        graphs: bool = True,
    ) -> Decoding | None:
        """What suits the decoder's backend, which may be nothing."""
        if not decoder.ops.fixed_steps and decoder.whole_step is None:
            return None
        return cls(decoder, cache, vocab_size=vocab_size, positions=positions, graphs=graphs)

    def choose(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> list[int | None]:
        """What a step would choose; waits for it.

        Args:
            logits: fp32 [sequences, vocab], where the model computes.
            sequences: Whose samplers are memoryless.

        Returns:
            As `Flight.tokens`.
        """
        ops, samplers = self._decoder.ops, [s.sampler for s in sequences]
        if all(sampler.is_greedy for sampler in samplers):
            tokens, broken = ops.greedy(logits, self.vocab_size)
        else:
            table = np.zeros((len(samplers), COLUMNS))
            _set_draws(table, samplers, [0] * len(samplers))
            positions = torch.zeros(len(samplers), dtype=torch.int64, device=ops.device)
            draws = Draws(torch.from_numpy(table).to(ops.device), positions)
            tokens, broken = ops.draw(logits, self.vocab_size, draws)
        return _sound(tokens.tolist(), broken.tolist())

    def launch(self, sequences: SequenceOf[Sequence]) -> Flight:
        """Run the next token of each of these sequences, whose blocks have room for it."""
        positions = [s.computed_tokens for s in sequences]
        self._reserve(max(positions) + 1)
        rows = [
            (s.token_ids[p], p, s.slot or 0, s.held_blocks.tables)
            for s, p in zip(sequences, positions, strict=True)
        ]
        lengths = [max(map(len, tables)) for tables in zip(*(row[3] for row in rows), strict=True)]
        widths = tuple(map(_width, lengths))
        samplers = [s.sampler if s.sampler.is_memoryless else None for s in sequences]
        drawn = any(sampler is not None and not sampler.is_greedy for sampler in samplers)
        kept = self._queues and None in samplers
        size = _power(len(rows)) if self._queues else len(rows)
        key = _Shape(size, widths, drawn, kept)
        step = self._steps.get(key)
        if step is None:
            if not self._queues:
                self._steps.clear()  # making one takes less than a token
            step = self._steps[key] = self._new_step(key)
        step.load(rows)
        if drawn:
            step.load_draws(samplers)
        return self._fly(step, list(sequences), positions)

    def launch_ahead(self, flight: Flight) -> Flight | None:
        """Launch the step behind one that is being computed, on the tokens that it chooses.

        Only what lies in the same blocks can be, and only with embeddings on the device.
        """
        positions = [p + 1 for p in flight.positions]
        if not self._queues:
            return None
        if not self._decoder.embeds_on_device or any(p % BLOCK_TOKENS == 0 for p in positions):
            return None
        self._reserve(max(positions) + 1)
        if flight._step not in self._steps.values():
            return None
        return self._fly(flight._step, flight.sequences, positions)

    def _fly(self, step: _FixedStep, sequences: list[Sequence], positions: list[int]) -> Flight:
        results, arrived = step.launch()
        return Flight(sequences, positions, step, results, arrived)

    def _reserve(self, positions: int) -> None:
        """Have rotary tables for so many positions; steps read them where they are."""
        rotary = self._decoder.rotary
        if rotary is None:
            return
        while self._positions < positions:
            self._positions *= 2
        tables = rotary.reserve(self._positions if self._queues else positions)
        if self._rotary is None or tables[0] is not self._rotary[0]:
            self._rotary = tables
            self._steps.clear()
            self._pool = None  # it goes with the last graph

    def _step_of(self, key: _Shape) -> _FixedStep:
        kept = None
        if key.kept:
            if self._kept is None:
                most = _power(self._cache.padding_slot), self._decoder.config.vocab_size
                self._kept = torch.empty(most, device=self._decoder.ops.device)
            kept = self._kept[: key.size]
        return _FixedStep(
            self._decoder,
            self._cache,
            key,
            vocab_size=self.vocab_size,
            rotary=self._rotary,
            kept=kept,
        )

    def _new_step(self, key: _Shape) -> _FixedStep:
        step = self._step_of(key)
        if not self.graphs:
            return step
        current = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            self._pool = step.capture(self._stream, self._pool)
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # which a capture that fails does not
            torch.cuda.synchronize()
            self.graphs = False
            self.warning = (
                f"the decoding step could not be captured as a CUDA graph ({_line(error)}); "
                "going on without"
            )
            step = self._step_of(key)
        return step


class _Shape(NamedTuple):
    """What is fixed of a step.

    Attributes:
        size: Sequences.
        widths: Of the block tables, per group of layers.
        drawn: Whether some tokens are drawn; else it takes the likeliest.
        kept: Whether the host wants the logits of some.
    """

    size: int
    widths: tuple[int, ...]
    drawn: bool
    kept: bool


class _FixedStep:
    """A step of some shape.

    Attributes:
        logits: fp32 [size, vocab] of the last launch, if they are kept.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        shape: _Shape,
        *,
        vocab_size: int,
        rotary: Rotation,
        kept: Tensor | None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._vocab_size = vocab_size
        self._size, self._widths, drawn, _ = shape
        device = decoder.ops.device
        self._on_gpu = on_gpu = device.type == "cuda"
        count = self._size * (1 + sum(self._widths))
        self._host_longs = torch.zeros(2, self._size, dtype=torch.int64, pin_memory=on_gpu)
        self._host_ints = torch.zeros(count, dtype=torch.int32, pin_memory=on_gpu)
        self._longs = self._host_longs.to(device)
        self._ints = self._host_ints.to(device)
        # Views of numpy: ones made anew, or torch's own operations, would cost a part of a step.
        self._ids_and_positions = self._host_longs.numpy()
        self._slots, *self._tables = (part.numpy() for part in self._split(self._host_ints))
        slots, *tables = self._split(self._ints)
        self._batch = Batch(
            ids=self._longs[0],
            positions=self._longs[1],
            starts=self._longs[1],
            offsets=torch.arange(self._size + 1, device=device),
            tables=tuple(tables),
            slots=slots.view(-1),
            last_position=0,
            longest=1,
        )
        self._host_draws = torch.zeros(
            self._size if drawn else 0, COLUMNS, dtype=torch.float64, pin_memory=on_gpu
        )
        self._draws: Draws | None = None
        if drawn:
            self._draws = Draws(self._host_draws.to(device), self._batch.positions)
        self._x: Tensor | None = None
        if not decoder.embeds_on_device:
            size = self._size, decoder.config.hidden_size
            self._x = torch.zeros(size, dtype=decoder.ops.dtype, device=device)
        self._results = torch.zeros(2, self._size, dtype=torch.int64, device=device)
        pinned = range(2 if on_gpu else 0)
        self._pinned_results = itertools.cycle(
            [torch.zeros(2, self._size, dtype=torch.int64, pin_memory=True) for _ in pinned]
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0) if kept is None else kept
        self._whole: Callable[[], None] | None = None
        if decoder.whole_step is not None:
            self.logits = torch.empty(self._size, decoder.config.vocab_size)
            self._whole = decoder.whole_step(
                StepTensors(
                    batch=self._batch,
                    rotary=rotary,
                    layers=cache.layers,
                    logits=self.logits,
                    results=self._results,
                    vocab_size=vocab_size,
                    draws=self._draws,
                )
            )

    def _split(self, ints: Tensor) -> list[Tensor]:
        """Slots [size, 1] and tables [size, width] in the buffer that they share."""
        widths = [1, *self._widths]
        parts = torch.split_with_sizes(ints, [self._size * n for n in widths])
        return [part.view(self._size, n) for part, n in zip(parts, widths, strict=True)]

    def load(self, rows: SequenceOf[tuple[int, int, int, SequenceOf[SequenceOf[int]]]]) -> None:
        """Set the inputs: of each sequence token, position, slot and a table per group."""
        (ids, positions), slots, tables = self._ids_and_positions, self._slots, self._tables
        ids[:], positions[:], slots[:] = 0, 0, self._cache.padding_slot
        for table, block in zip(tables, self._cache.blocks, strict=True):
            table[len(rows) :, 0] = block  # the one behind all that are given out
        for i, (token, position, slot, its) in enumerate(rows):
            ids[i], positions[i], slots[i] = token, position, slot
            for table, row in zip(tables, its, strict=True):
                table[i, : len(row)] = row
        for table in tables:
            np.maximum(table, 0, out=table)  # blocks that were given back
        if self._x is not None:
            ids_and_positions = self._host_longs.unbind()
            self._x.copy_(self._decoder.embed(*ids_and_positions))
        if self._on_gpu:
            self._longs.copy_(self._host_longs, non_blocking=True)
            self._ints.copy_(self._host_ints, non_blocking=True)

    def load_draws(self, samplers: SequenceOf[Sampler | None]) -> None:
        """Behind `load`: set how the sequences' next tokens are drawn; None takes the likeliest."""
        if self._draws is None:
            raise RuntimeError("this step draws nothing")
        positions = self._ids_and_positions[1, : len(samplers)].tolist()
        _set_draws(self._host_draws.numpy(), samplers, positions)
        self._draws.table.copy_(self._host_draws, non_blocking=True)

    def launch(self) -> tuple[NDArray[np.int64], torch.cuda.Event | None]:
        """Start it; the results, [2, size], are on the host once the event has happened."""
        if self._whole is not None:
            self._whole()
        elif self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
        if not self._on_gpu:
            return self._results.numpy().copy(), None
        results = next(self._pinned_results)
        results.copy_(self._results, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return results.numpy(), arrived

    def capture(self, stream: torch.cuda.Stream, pool: Any) -> Any:
        """Record the step as a CUDA graph; returns the memory pool that graphs share.

        Args:
            stream: Not the current one.
            pool: Of earlier graphs, if there are any.

        Raises:
            RuntimeError: Something in it cannot be captured.
        """
        self.load([])  # only padding: what runs before the capture changes nothing
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled, and libraries take their workspaces
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._compute()
        self._graph = graph
        return graph.pool()

    def _compute(self) -> None:
        decoder, batch = self._decoder, self._batch
        x = self._x
        # What the blocks get may be overwritten.
        x = decoder.embed(batch.ids, batch.positions) if x is None else x.clone()
        logits = decoder.logits(decoder.run(x, batch, self._cache.layers))
        if len(self.logits):
            self.logits.copy_(logits)
        if self._draws is None:
            tokens, broken = decoder.ops.greedy(logits, self._vocab_size)
        else:
            tokens, broken = decoder.ops.draw(logits, self._vocab_size, self._draws)
        self._results[0].copy_(tokens)
        self._results[1].copy_(broken)
        self._batch.ids.copy_(tokens)
        self._batch.positions.add_(1)


def _set_draws(
    table: NDArray[np.float64], samplers: SequenceOf[Sampler | None], positions: SequenceOf[int]
) -> None:
    """In place: the table of `Draws`, with numbers as far as steps run ahead from positions."""
    table[:, 0] = 0  # of padding, too
    for row, sampler, position in zip(table[: len(samplers)], samplers, positions, strict=True):
        if sampler is None or sampler.is_greedy:
            continue
        p, first = sampler.params, COLUMNS - UNIFORMS + position % UNIFORMS
        row[:4] = Draws.row(p.temperature, p.top_k, p.top_p, p.min_p)
        row[first:] = sampler.upcoming(COLUMNS - first)


def _sound(tokens: SequenceOf[int], broken: SequenceOf[int]) -> list[int | None]:
    return [None if bad else token for token, bad in zip(tokens, broken, strict=True)]


def _width(blocks: int) -> int:
    """Of a table that holds so many."""
    return next((width for width in _WIDTHS if blocks <= width), _power(blocks))


def _power(n: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (n - 1).bit_length()


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
