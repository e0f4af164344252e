"""Ctrl-C in a command: a run ends after its current step, or at once before the first one, but always within
seconds."""

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
"""Seconds after which the process ends even if the interrupt was lost."""


class Interrupt:
    """A context of a command's main thread in which SIGINT ends the command in a defined way.

    Frameworks lose a KeyboardInterrupt that is raised inside their callbacks, and crash if one is raised while they
    compile. So before the first step KeyboardInterrupt is raised, and if it is lost the process ends `GRACE` seconds
    later. After the first step the interrupt waits for the end of the current step, or for a second Ctrl-C.

    `left`: returns a sentence on the files that the run has written, for the message.
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
        """Marks the end of a step: from now on an interrupt only sets `requested`."""
        self._stepping = True

    def requested(self) -> bool:
        """Returns whether the run should end now, between two steps."""
        return self._requested

    def message(self) -> str:
        left = " ".join(self.left().split())
        return f"diptych {self._command}: error: interrupted{'; ' * bool(left)}{left}"

    def end(self) -> None:
        """Prints the message and ends the process without cleanup, since frameworks' exit handlers could crash now."""
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
