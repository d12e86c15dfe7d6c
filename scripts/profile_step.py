"""Where the time of a decoding step goes: in which kernels, and outside of them.

    python scripts/profile_step.py MODEL

Medians over the steps. What is outside of the kernels is Python, torch and the calls' own cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qinfer.generation import LanguageModel
from qinfer.ops.cpu import kernels
from qinfer.sampling import SamplingParams

PROMPT_TOKENS = 16


class TimedLibrary:
    """The kernels; the seconds in each function are noted."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            self.seconds[name] += time.perf_counter() - start
            self.calls[name] += 1
            return result

        setattr(self, name, timed)
        return timed


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model directory")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()

    library = kernels.library()
    if library is None:
        raise SystemExit("Error: the kernels are not compiled here; qinfer doctor says why.")
    timed = TimedLibrary(library)
    kernels.library = lambda: timed
    model = LanguageModel(given.model, device="cpu", max_sequences=1)
    engine = model.engine
    engine.stop_ids = frozenset()
    engine.add([1] * PROMPT_TOKENS, SamplingParams(temperature=0), given.steps + 1)
    engine.step()

    steps, parts = [], defaultdict(list)
    for _ in range(given.steps):
        timed.seconds.clear()
        timed.calls.clear()
        start = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - start)
        for name, seconds in timed.seconds.items():
            parts[name].append(seconds)
        parts["outside"].append(steps[-1] - sum(timed.seconds.values()))

    whole = statistics.median(steps)
    print(f"{'step':20} {1e3 * whole:7.3f} ms")
    for name, seconds in sorted(parts.items(), key=lambda item: -sum(item[1])):
        median, calls = statistics.median(seconds), timed.calls.get(name)
        count = f"  {calls} calls" if calls else ""
        print(f"{name:20} {1e3 * median:7.3f} ms  {median / whole:5.1%}{count}")


if __name__ == "__main__":
    main()
