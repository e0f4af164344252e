"""Where a command's text and data go: `--json FILE` writes the data, and `--json -` prints it in place of the text."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from diptych.lab import files

STANDARD_OUTPUT = "-"


class Output:
    """The text and the data of one command.

    **Arguments:** `path`: of `--json`, None if it was not given. `traces`: folders in which no file may be written.

    **Raises** FileError at once if the file could not be written later.
    """

    def __init__(self, path: pathlib.Path | None, traces: Sequence[pathlib.Path] = ()) -> None:
        self._printed = path is not None and os.fspath(path) == STANDARD_OUTPUT
        self.path = None if self._printed else path
        if self.path is not None:
            files.require_writable("--json", self.path, list(traces))

    def say(self, text: str) -> None:
        """Prints text for people: on standard error if standard output has the data. A process without either, or
        whose reader has closed the pipe, is no error."""
        stream = sys.stderr if self._printed else sys.stdout
        if stream is None:
            return
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:  # a reader such as `head` may stop early
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    def give(self, data: Any) -> None:
        """Writes or prints the data if `--json` asks for it. `data`: plain values, or JSON as text."""
        text = data if isinstance(data, str) else json.dumps(data, indent=1) + "\n"
        if self.path is not None:
            files.write_text(self.path, text)
        elif self._printed:
            sys.stdout.write(text)
            sys.stdout.flush()
