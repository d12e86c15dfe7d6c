"""Ctrl-C and SIGTERM in a run that writes results: none is torn, and the second ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_EXIT_CODE_BASE = 128


class Interrupts:
    """While entered, the first signal raises KeyboardInterrupt, outside of `held` only.

    The second is the system's own: it ends the process, whatever it is doing.

    Attributes:
        signal: The one that came; None if none did.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._is_held = False

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that this signal ended."""
        return _EXIT_CODE_BASE + (self.signal or signal.SIGINT)

    def __enter__(self) -> Interrupts:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if not self._is_held:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put a signal off until the end of this block."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self.signal is not None:
            raise KeyboardInterrupt
