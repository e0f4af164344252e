"""Signals that come while a test runs an op."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handler(action: Callable[[], None], after: float) -> Iterator[None]:
    """Has `action` called by a signal's handler, on the main thread, `after` seconds from now."""
    before = signal.signal(signal.SIGALRM, lambda *_: action())
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
