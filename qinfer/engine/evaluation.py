"""How well a model predicts given tokens, and how far two ways to run a model lie apart.

Teacher-forced: every token is predicted from those before it in its window, whatever the model
would have said. Token ids only, and nothing is sampled. Logits exist for a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.cache.tables import blocks_for
from qinfer.engine.engine import STEP_TOKENS
from qinfer.errors import NumericsError
from qinfer.models.decoder import Decoder, Watch
from qinfer.ops.paged import Batch
from qinfer.quant.kv import KVFormat

LOGIT_ROWS = 32
"""Tokens whose logits are held at once."""

Window = SequenceOf[int]
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and how it keeps keys and values.

    Attributes:
        decoder: The model.
        formats: Of the key-value cache, per layer.
        vocab_size: Ids from here on are padding of the model's vocabulary and get no probability.
    """

    decoder: Decoder
    formats: tuple[KVFormat, ...]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What becomes of a reference's predictions.

    The divergences are KL(reference ‖ subject) of the distributions of the next token, in nats.

    Attributes:
        tokens: Tokens that were predicted.
        perplexity: Of the subject.
        reference_perplexity: Of the reference.
        kl_mean: Over the tokens.
        kl_p99: The 99th percentile.
        kl_max: The largest.
        top1_agreement: Share of tokens for which both hold the same one most likely, 0 to 1.
    """

    tokens: int
    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float


def passes(windows: SequenceOf[Window], subjects: int) -> int:
    """Tokens that go through models until so many are done, to give a progress bar its length."""
    return subjects * sum(map(len, windows))


@torch.inference_mode()
def perplexity(
    subject: Subject, windows: SequenceOf[Window], *, progress: Progress = lambda _: None
) -> float:
    """Perplexity over windows, each a sequence of its own.

    Args:
        subject: The model.
        windows: Of two tokens or more; all but the first of each are predicted.
        progress: Called with the numbers of tokens that went through the model.

    Raises:
        NumericsError: The model yields NaN or infinite values.
    """
    losses = []
    for window in windows:
        hidden = _hidden(subject, window, progress)
        for rows, targets in _runs(window):
            losses.append(_loss(_log_probabilities(subject, hidden[rows]), targets))
    return math.exp(float(torch.cat(losses).mean()))


@torch.inference_mode()
def compare(
    subjects: SequenceOf[Subject],
    reference: Subject,
    windows: SequenceOf[Window],
    *,
    progress: Progress = lambda _: None,
) -> list[Comparison]:
    """Compare the predictions of models with those of a reference.

    Args:
        subjects: To be compared; one cache is held at a time.
        reference: With the same vocabulary.
        windows: Of two tokens or more, each a sequence of its own.
        progress: Called with the numbers of tokens that went through a model.

    Raises:
        NumericsError: A model yields NaN or infinite values.
    """
    tallies = [_Tally() for _ in subjects]
    for window in windows:
        expected = _hidden(reference, window, progress)
        for subject, tally in zip(subjects, tallies, strict=True):
            found = _hidden(subject, window, progress)
            for rows, targets in _runs(window):
                tally.add(
                    _log_probabilities(reference, expected[rows]),
                    _log_probabilities(subject, found[rows]),
                    targets,
                )
    return [tally.result() for tally in tallies]


@dataclass(slots=True)
class _Tally:
    """Per token, what a comparison is made of: fp64 [tokens] in pieces."""

    losses: list[Tensor] = field(default_factory=list)
    reference_losses: list[Tensor] = field(default_factory=list)
    divergences: list[Tensor] = field(default_factory=list)
    agreements: list[Tensor] = field(default_factory=list)

    def add(self, expected: Tensor, found: Tensor, targets: Tensor) -> None:
        """Take in log probabilities, fp64 [tokens, vocab], and the true tokens [tokens]."""
        found = found.to(expected.device)
        self.losses.append(_loss(found, targets))
        self.reference_losses.append(_loss(expected, targets))
        self.divergences.append((expected.exp() * (expected - found)).sum(-1).cpu())
        self.agreements.append((expected.argmax(-1) == found.argmax(-1)).double().cpu())

    def result(self) -> Comparison:
        divergences = torch.cat(self.divergences)
        return Comparison(
            tokens=len(divergences),
            perplexity=math.exp(float(torch.cat(self.losses).mean())),
            reference_perplexity=math.exp(float(torch.cat(self.reference_losses).mean())),
            kl_mean=float(divergences.mean()),
            kl_p99=_percentile(divergences, 0.99),
            kl_max=float(divergences.max()),
            top1_agreement=float(torch.cat(self.agreements).mean()),
        )


def _percentile(values: Tensor, share: float) -> float:
    """The smallest value that is not below this share of all."""
    rank = math.ceil(share * len(values))
    return float(values.kthvalue(max(rank, 1)).values)


def _hidden(subject: Subject, window: Window, progress: Progress) -> Tensor:
    """Run a window through a model with a cache of its own; [tokens, hidden], normalized."""
    decoder = subject.decoder
    layout = CacheLayout.of(decoder.config, subject.formats)
    blocks, groups = blocks_for(len(window)), len(layout.reaches)
    half, device = decoder.ops.half, decoder.ops.device
    cache = PagedCache(layout, [blocks] * groups, 1, half=half, device=device)
    found = []
    for start in range(0, len(window), STEP_TOKENS):
        piece = window[start : start + STEP_TOKENS]
        batch = Batch.of([(piece, start)], [[range(blocks)]] * groups, [0], device)
        with decoder.ops.forward_pass(len(piece)):
            found.append(decoder.forward(batch, cache.layers, watch=_watch(subject)))
        progress(len(piece))
    return torch.cat(found)


def _runs(window: Window) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a window to predict from, a few at a time, and the tokens that follow them."""
    last = len(window) - 1
    for start in range(0, last, LOGIT_ROWS):
        end = min(start + LOGIT_ROWS, last)
        yield slice(start, end), torch.tensor(window[start + 1 : end + 1])


def _log_probabilities(subject: Subject, hidden: Tensor) -> Tensor:
    """Of the next token: fp64 [tokens, vocab_size]."""
    logits = subject.decoder.logits(hidden)[:, : subject.vocab_size]
    _watch(subject)("the output head", logits)
    return logits.double().log_softmax(-1)


def _loss(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Of the true tokens, in nats: fp64 [tokens], on the CPU."""
    at = targets.to(log_probabilities.device).unsqueeze(-1)
    return -log_probabilities.gather(-1, at).squeeze(-1).cpu()


def _watch(subject: Subject) -> Watch:
    """Refuse the first values that are not finite, and say where they are."""

    def check(place: str, x: Tensor) -> None:
        if not bool(x.isfinite().all()):
            kinds = "/".join(dict.fromkeys(map(str, subject.formats)))
            raise NumericsError(
                f"the model produced NaN or infinite values, first in {place} (KV cache {kinds})",
                hint="The weights are damaged or overflow the 16-bit range; convert the model "
                "again, from bf16 weights if there are any.",
            )

    return check
