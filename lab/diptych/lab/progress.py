"""How far a command is, on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

SECONDS = 10.0
"""The time between two lines, and before the first one."""


class Stage:
    """A part of a command's work. `total`: the number of its steps, None if it has none that are counted."""

    def __init__(self, what: str, total: int | None, done: int, unit: str) -> None:
        self.what, self.total, self.done, self.unit, self.note = what, total, done, unit, ""

    def advance(self, note: str = "") -> None:
        """Counts one step. `note`: shown beside the count, such as the loss."""
        self.done += 1
        self.note = note

    def text(self) -> str:
        counted = "" if self.total is None else f"{self.done} of {self.total} {self.unit}"
        return f"{self.what}: {', '.join(part for part in (counted, self.note) if part) or 'at work'}"


class Progress:
    """Shows the stages of one command, one after the other.

    A thread shows them, so that a stage is seen while one call of it takes minutes, such as a compilation.

    **Arguments:** `command`: the name before each line. `quiet`: nothing is shown.
    """

    def __init__(self, command: str, *, quiet: bool = False) -> None:
        self._command, self._quiet = command, quiet
        self.bars = not quiet and sys.stderr is not None and sys.stderr.isatty() and _tqdm() is not None

    @contextlib.contextmanager
    def stage(
        self, what: str, total: int | None = None, *, done: int = 0, unit: str = "steps", stays: bool = False
    ) -> Iterator[Stage]:
        """Shows a stage while the context lasts. `done`: the steps that earlier runs made. `stays`: whether its bar
        stays on the terminal."""
        stage = Stage(what, total, done, unit)
        if self._quiet or sys.stderr is None:
            yield stage
            return
        ended = threading.Event()
        show = self._bar if self.bars else self._lines
        thread = threading.Thread(target=show, args=(stage, ended, stays), daemon=True)
        thread.start()
        try:
            yield stage
        finally:
            ended.set()
            thread.join()

    def _lines(self, stage: Stage, ended: threading.Event, _: bool) -> None:
        began = time.monotonic()
        while not ended.wait(SECONDS):
            print(f"{self._command}: {stage.text()}; {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    @staticmethod
    def _bar(stage: Stage, ended: threading.Event, stays: bool) -> None:
        shape = "{desc}: {elapsed}" if stage.total is None else None
        options = {"initial": stage.done, "desc": stage.what, "unit": stage.unit.removesuffix("s"), "leave": stays}
        with _tqdm()(total=stage.total, bar_format=shape, delay=0 if stays else 1, **options) as bar:
            going = True
            while going:
                going = not ended.wait(0.2)
                bar.set_postfix_str(stage.note, refresh=False)
                bar.update(stage.done - bar.n)
                bar.refresh()


def _tqdm() -> Any:
    """Returns tqdm's class of bars, None if it is not installed: comparing traces does not need it."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm


SILENT = Progress("", quiet=True)
