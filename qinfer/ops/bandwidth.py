"""How fast memory can be read here: a short measurement, the limit that decoding runs against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from qinfer.ops.cpu.weights import Arena

_BUFFER_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}  # beyond any cache of the processor
_LEAST_BYTES = 64 << 20
_SHARE = 4  # at most this part of what is free
_PASSES = 15
_COPIES = 8  # in a pass: one takes no longer than a dozen waits for the device


def read_bandwidth(device: torch.device, *, free_bytes: int) -> float:
    """Bytes per second that can be read from a device's memory: the median of several passes.

    On a CPU the passes sum up integers in huge pages, with as many threads as torch has: the
    processor waits for memory, not for the sums. On a GPU they copy, which reads and writes.

    Args:
        device: Whose memory.
        free_bytes: What is free of it; a quarter of that at most is taken.
    """
    most = min(_BUFFER_BYTES[device.type], free_bytes // _SHARE)
    run, moved_bytes = _pass(device, max(most, _LEAST_BYTES))
    run()  # touches what is not touched yet
    return moved_bytes / statistics.median(_seconds(run, device) for _ in range(_PASSES))


def _pass(device: torch.device, size_bytes: int) -> tuple[Callable[[], object], int]:
    """What to time, and the bytes that it moves."""
    if device.type == "cuda":
        source = torch.ones(size_bytes // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)

        def copy() -> None:
            for _ in range(_COPIES):
                target.copy_(source)

        return copy, _COPIES * 2 * source.nbytes
    words = Arena().take(size_bytes // 8 * 8).fill_(1).view(torch.int64)
    return words.sum, words.nbytes


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
