"""What would make a model fit that does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from qinfer.cache.paged import CacheLayout
from qinfer.config import ModelConfig
from qinfer.models.architectures import linear_shapes
from qinfer.quant.kv import KVFormat

_SCHEME_BITS = {"int8": 8.1, "int4": 4.5}  # of a weight, scales included
_HEAD_BITS = 8.1
_LEAST_USEFUL_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Change:
    """One thing to do differently, and what the model and the cache then look like."""

    words: str
    weights_bytes: int
    layout: CacheLayout


def remedies(
    config: ModelConfig,
    layout: CacheLayout,
    *,
    weights_bytes: int,
    context_tokens: int,
    fits: Callable[[int, CacheLayout, int], bool],
) -> str:
    """What to change, as options: one thing if that is enough, else several.

    Args:
        config: The model.
        layout: Of its cache.
        weights_bytes: Of the model.
        context_tokens: Of the sequence that does not fit.
        fits: Whether weights of so many bytes, a cache and a sequence of so many tokens do.

    Returns:
        A sentence.
    """
    caches = [_Change("", weights_bytes, layout), *_smaller_caches(layout, weights_bytes)]
    models = [*caches[:1], *_smaller_models(config, layout, weights_bytes)]
    both = [
        _Change(f"{model.words} with {cache.words}", model.weights_bytes, cache.layout)
        for model in models[1:]
        for cache in caches[1:]
    ]
    shorter = _shorter(caches[0], context_tokens, fits)
    for candidates in ([*caches[1:], *models[1:]], both):
        found = [c.words for c in candidates if fits(c.weights_bytes, c.layout, context_tokens)]
        if shorter or found:
            return f"Use {' or '.join([shorter, *found] if shorter else found)}."
    for candidate in (*caches[1:], *models[1:], *both):
        shorter = _shorter(candidate, context_tokens, fits)
        if shorter:
            return f"Use {candidate.words}, and {shorter}."
    return (
        "Raise --memory or use a smaller model: neither --kv-bits nor --ctx-size nor --scheme "
        "makes it fit."
    )


def _smaller_caches(layout: CacheLayout, weights_bytes: int) -> list[_Change]:
    least = min(min(f.k_bits, f.v_bits) for f in layout.formats)
    return [
        _Change(
            f"--kv-bits {bits}",
            weights_bytes,
            replace(layout, formats=(KVFormat(bits, bits),) * len(layout.formats)),
        )
        for bits in (8, 4)
        if bits < least and (bits > 4 or layout.head_dim % 2 == 0)
    ]


def _smaller_models(config: ModelConfig, layout: CacheLayout, weights_bytes: int) -> list[_Change]:
    linear = sum(n * k for n, k, _ in linear_shapes(config).values()) * config.num_hidden_layers
    head = config.vocab_size * config.hidden_size
    sizes = {
        scheme: int((linear * bits + head * _HEAD_BITS) / 8)
        for scheme, bits in _SCHEME_BITS.items()
    }
    return [
        _Change(f"a model converted with --scheme {scheme}", size, layout)
        for scheme, size in sizes.items()
        if size < 0.9 * weights_bytes
    ]


def _shorter(
    change: _Change, context_tokens: int, fits: Callable[[int, CacheLayout, int], bool]
) -> str:
    """The longest context that fits with a change, as an option; empty if none is useful."""
    low, high = 0, context_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if fits(change.weights_bytes, change.layout, middle):
            low = middle
        else:
            high = middle - 1
    return f"--ctx-size {low}" if low >= min(_LEAST_USEFUL_TOKENS, context_tokens) else ""
