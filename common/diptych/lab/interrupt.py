"""Ctrl-C in a command: between two steps where there are steps, at once where there are none, soon in any case."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STATUS = 130
GRACE = 5.0
"""Seconds after which the process ends although nobody has seen the interrupt."""


class Interrupt:
    """While it is entered in the main thread of a command, SIGINT ends the command in an orderly way.

    Frameworks lose a KeyboardInterrupt that comes inside of their callbacks, and crash when one comes while they
    compile. So before the first step it is raised, and the process is gone `GRACE` seconds later if nobody saw it; from
    then on it waits for the end of the step, or for a second Ctrl-C.

    `left`: says what the run leaves behind, for the message.
    """

    def __init__(self, command: str) -> None:
        self.left: Callable[[], str] = str
        self._command, self._stepping, self._requested = command, False, False
        self._before: Any = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._timer is not None:
            self._timer.cancel()

    def stepped(self, *_: object) -> None:
        """A step has ended: from now on interrupts wait for `requested`."""
        self._stepping = True

    def requested(self) -> bool:
        """Whether the run should end now, between two steps."""
        return self._requested

    def message(self) -> str:
        left = " ".join(self.left().split())
        return f"diptych {self._command}: error: interrupted{'; ' * bool(left)}{left}"

    def end(self) -> None:
        """Says so and ends the process as it stands: what frameworks do on their way out can crash now."""
        sys.stdout.flush()
        os.write(2, f"{self.message()}\n".encode())
        os._exit(STATUS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self._requested = self._requested, True
        if not again:
            self._timer = threading.Timer(GRACE, self.end)
            self._timer.daemon = True
            self._timer.start()
        if again or not self._stepping:
            raise KeyboardInterrupt
