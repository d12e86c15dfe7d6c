"""A plugin of pytest: what becomes of each test goes to a file at once.

So that a run that is killed, since a kernel hung or the time was up, has told all but the last.
`-p gpu_pytest` with `GPU_CHECK_TESTS` naming the file: a JSON object a line, `{test}` when it
begins and `{test, outcome, seconds, text}` when it has ended, with `passed`, `failed`, `error` or
`skipped`; a module that cannot be imported is an error too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

TARGET = "GPU_CHECK_TESTS"
_WORKER = "PYTEST_XDIST_WORKER"  # set in workers, which tell the process that started them


def _note(what: dict[str, Any]) -> None:
    if TARGET in os.environ and _WORKER not in os.environ:
        with Path(os.environ[TARGET]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")


def _ended(report: pytest.CollectReport | pytest.TestReport, outcome: str) -> None:
    seconds = round(getattr(report, "duration", 0.0), 3)
    text = report.longreprtext
    _note({"test": report.nodeid, "outcome": outcome, "seconds": seconds, "text": text})


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _note({"test": nodeid})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A part of a test has ended: its setup, itself or its teardown."""
    if report.when == "call" or report.skipped:
        _ended(report, report.outcome)
    elif report.failed:
        _ended(report, "error")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module was imported."""
    if report.failed:
        _ended(report, "error")
