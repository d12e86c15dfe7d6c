"""The report that `gpu_bench.py` writes: what it holds, and that it is written whatever happens."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_table import goals

import qinfer
from qinfer.benchmark import device_name

AGAIN = 75  # exit code: the same call goes on
COMMIT = Path(".gpu-check/base/COMMIT")  # what `gpu_pack.py` leaves of the sources' history


class Report:
    """Results as they come, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = time.perf_counter()
        self.data: dict[str, Any] = {"format": 1, "results": [], "running": None}
        if path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))
            if self.data["running"] is not None:
                self.fail("the process ended in it")

    def has(self, key: str) -> bool:
        """Whether it was measured, or failed."""
        return any(result["key"] == key for result in self.data["results"])

    def begin(self, key: str) -> None:
        """Note what is being measured, and since when."""
        self._start = time.perf_counter()
        self.data["running"] = key
        self.save()

    def add(self, figures: dict[str, Any]) -> None:
        """Note what came of it."""
        key, self.data["running"] = self.data["running"], None
        seconds = round(time.perf_counter() - self._start, 2)
        self.data["results"].append({"key": key, "seconds": seconds} | figures)
        self.data["not_run"] = [its for its in self.data.get("not_run", ()) if its != key]
        self.data["goals"] = goals(self.data)
        self.save()
        print(f"{key}: {figures.get('error') or 'done'}, {seconds} s", flush=True)

    def fail(self, error: str) -> None:
        """Note that nothing came of it."""
        self.add({"error": error})

    def save(self) -> None:
        """Write the file anew."""
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


@contextlib.contextmanager
def watched(report: Report, limit_s: float) -> Iterator[None]:
    """End the process if what is done takes too long: a kernel may hang, and waiting for it too."""

    def give_up() -> None:
        faulthandler.dump_traceback()
        report.fail(f"no end after {limit_s:.0f} s")
        os._exit(AGAIN)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def circumstances(device: torch.device) -> dict[str, Any]:
    """What the results depend on."""
    its: dict[str, Any] = {"type": device.type, "name": device_name(device)}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        its |= {
            "capability": f"{found.major}.{found.minor}",
            "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
        }
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": COMMIT.read_text().strip() if COMMIT.is_file() else None,
        "device": its,
        "versions": {
            "qinfer": qinfer.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "triton": _triton_version(),
            "cuda": torch.version.cuda,
        },
    }


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def read_tests(path: Path) -> dict[str, Any] | None:
    """Counts, and names of tests that failed or did not end; None if there is no such file.

    Args:
        path: As `gpu_pytest.py` writes it.
    """
    if not path.is_file():
        return None
    outcomes: dict[str, str] = {}
    seconds = 0.0
    for line in path.read_text(encoding="utf-8").splitlines():
        its = json.loads(line)
        test, outcome = its["test"], its.get("outcome", "unfinished")
        if outcomes.get(test) not in ("failed", "error"):  # a teardown may fail as well
            outcomes[test] = outcome
        seconds += its.get("seconds", 0.0)
    counts = Counter(outcomes.values())
    return {
        "passed": counts["passed"],
        "failed": counts["failed"],
        "errors": counts["error"] + counts["unfinished"],
        "skipped": counts["skipped"],
        "seconds": round(seconds, 1),
        "failures": [
            f"{test} ({outcome})"
            for test, outcome in outcomes.items()
            if outcome not in ("passed", "skipped")
        ],
    }
