"""How much memory a model takes, and how many sequences and cached tokens fit beside it.

Everything is worked out from the configuration before anything is loaded.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from qinfer.cache.paged import RETAINED_TOKENS, CacheLayout
from qinfer.cache.tables import blocks_for
from qinfer.config import ModelConfig
from qinfer.engine.remedies import remedies
from qinfer.errors import QInferError

_MOST_SEQUENCES = {"cpu": 32, "cuda": 256}
"""By default. A CPU's arithmetic is used up before that."""

_USUAL_TOKENS = 1024  # of a sequence, to judge how many run at once
_LEAST_CONTEXT_TOKENS = 64
_MARGIN = 0.1  # of what is free, left to others
_LIBRARY_BYTES = {"cpu": 0, "cuda": 320 << 20}  # of cuBLAS, graphs, and parts of attention
_FIXED_BYTES = 64 << 20  # tokenizer, tables, the allocator's slack
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What fits.

    Attributes:
        weights_bytes: Of the model.
        workspace_bytes: Of activations and logits of a step.
        kv_bytes: Of the cache that is reserved.
        blocks: Per group of layers, blocks of the cache.
        max_sequences: Most sequences that run at once.
        context_tokens: Most tokens of a sequence: what was asked for, or what fits.
    """

    weights_bytes: int
    workspace_bytes: int
    kv_bytes: int
    blocks: tuple[int, ...]
    max_sequences: int
    context_tokens: int


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device; on a CPU what the system and the cgroup let us have."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_system_free_bytes(), _cgroup_free_bytes())


def forget_peak() -> None:
    """Let `peak_bytes` begin anew with what the process holds now; Linux alone can do that."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text(_FORGET_PEAK)


def peak_bytes() -> int:
    """The most memory that this process has held so far, pages of mapped files included."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _system_free_bytes() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
        fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_free_bytes() -> int:
    """What is left of a container's limit; file pages can be dropped, so they count as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return 1 << 62
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(s.split() for s in (_CGROUP / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):  # none, or of version 1
        return 1 << 62


def workspace_bytes(config: ModelConfig, *, tokens: int, sequences: int) -> int:
    """Activations of a step and the logits of its sequences, in fp32.

    Args:
        config: The model.
        tokens: Of a step.
        sequences: That need logits in it.
    """
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    per_token = 5 * config.hidden_size + 3 * config.intermediate_size + 2 * heads * config.head_dim
    return 4 * (tokens * per_token + 4 * sequences * config.vocab_size) + _FIXED_BYTES


def plan_memory(
    config: ModelConfig,
    layout: CacheLayout,
    *,
    weights_bytes: int,
    budget_bytes: int,
    device: torch.device,
    step_tokens: int,
    max_sequences: int | None = None,
    context_tokens: int | None = None,
) -> MemoryPlan:
    """Share out a budget.

    Args:
        config: The model.
        layout: Of its cache.
        weights_bytes: Of the model.
        budget_bytes: For everything.
        device: Where it runs.
        step_tokens: Most tokens in a step.
        max_sequences: Asked for; None is what fits, within reason.
        context_tokens: Asked for; None is what the model allows, or less if that does not fit.

    Raises:
        QInferError: It does not fit; by how much, and what would help.
    """
    most = max_sequences or _MOST_SEQUENCES[device.type]
    step = max(step_tokens, most)
    limit = context_tokens or config.max_position_embeddings
    workspace = workspace_bytes(config, tokens=step, sequences=most) + _LIBRARY_BYTES[device.type]
    left = budget_bytes - weights_bytes - workspace
    if max_sequences is None:
        most = min(most, _sequences_that_fit(layout, left, limit, step))
    other_slots = (most - 1) * layout.slot_bytes()
    context = _context_that_fits(layout, left - other_slots, limit, step)
    least = context_tokens or min(limit, _LEAST_CONTEXT_TOKENS)
    if context < least:
        need = layout.sequence_bytes(least, step) + ((max_sequences or 1) - 1) * layout.slot_bytes()
        slots, beside = (max_sequences or 1) - 1, budget_bytes - workspace

        def fits(weights: int, its: CacheLayout, tokens: int) -> bool:
            return weights + its.sequence_bytes(tokens, step) + slots * its.slot_bytes() <= beside

        raise QInferError(
            f"the model needs {_size(weights_bytes)} for weights, {_size(workspace)} for "
            f"activations and {_size(need)} of KV cache for one sequence of "
            f"{least:,} tokens: {_size(need - left)} more than "
            f"the {_size(budget_bytes)} it may use",
            hint=remedies(
                config, layout, weights_bytes=weights_bytes, context_tokens=least, fits=fits
            ),
        )
    blocks = _blocks_that_fit(layout, left - most * layout.slot_bytes(), context, most, step)
    kv_bytes = sum(n * layout.block_bytes(group) for group, n in enumerate(blocks))
    return MemoryPlan(
        weights_bytes=weights_bytes,
        workspace_bytes=workspace,
        kv_bytes=kv_bytes + most * layout.slot_bytes(),
        blocks=tuple(blocks),
        max_sequences=most,
        context_tokens=context,
    )


def default_budget(device: torch.device) -> int:
    """What is free, less a margin for others."""
    return int(free_bytes(device) * (1 - _MARGIN))


def _sequences_that_fit(layout: CacheLayout, left_bytes: int, limit: int, step: int) -> int:
    """How many of usual length; but no more than leave room for one of full length, if that fits.

    Each has an open block, however few tokens it has.
    """
    usual = layout.sequence_bytes(min(limit, _USUAL_TOKENS), step)
    count = left_bytes // max(usual, 1)
    beside_a_full_one = left_bytes - layout.sequence_bytes(limit, step)
    if beside_a_full_one >= 0:
        count = min(count, 1 + beside_a_full_one // max(layout.slot_bytes(), 1))
    return max(1, count)


def _context_that_fits(layout: CacheLayout, left_bytes: int, limit: int, step: int) -> int:
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        fits = layout.sequence_bytes(middle, step) <= left_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _blocks_that_fit(
    layout: CacheLayout, left_bytes: int, context: int, sequences: int, step: int
) -> list[int]:
    """Blocks per group: one sequence of full length at least, at most what all could use."""
    one = layout.sequence_blocks(context, step)
    retained = blocks_for(RETAINED_TOKENS) if sequences > 1 else 0
    all_of_them = [n * sequences + retained for n in one]

    def sizes(share: int) -> list[int]:
        return [
            least + (most - least) * share // 1000
            for least, most in zip(one, all_of_them, strict=True)
        ]

    def fits(share: int) -> bool:
        counts = enumerate(sizes(share))
        return sum(n * layout.block_bytes(group) for group, n in counts) <= left_bytes

    share = next((s for s in range(1000, 0, -1) if fits(s)), 0)
    return sizes(share)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"
