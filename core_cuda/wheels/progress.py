"""Runs a command that compiles, and prints how far it is every ten seconds: `progress.py WHAT COMMAND...`.

Of the command's own output only the end is printed, and only if it fails.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS, KEPT = 10.0, 80  # between two lines; lines of output that a failure shows
STEP = re.compile(r"\[(\d+)/(\d+)\] ")  # as ninja counts


class CommandError(RuntimeError):
    """A command failed. The message has the end of its output."""


def run(what: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> float:
    """Runs a command, and prints `what` with the steps that are done. **Returns** its seconds.

    **Raises** CommandError if it fails or cannot be started.
    """
    began, state = time.monotonic(), {"step": ""}
    last: collections.deque[str] = collections.deque(maxlen=KEPT)
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(SECONDS):
            print(f"   {what}: {state['step'] or 'started'}, {time.monotonic() - began:.0f} s", flush=True)

    print(f"== {what}", flush=True)
    try:
        process = subprocess.Popen(list(map(str, command)), env={**os.environ, **(env or {})}, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    except OSError as e:
        raise CommandError(f"{what} failed: {command[0]} cannot be started ({e.strerror})") from e
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    assert process.stdout is not None
    for line in process.stdout:
        last.append(line)
        if found := STEP.search(line):
            state["step"] = f"{found[1]} of {found[2]} steps"
    status = process.wait()
    ended.set()
    teller.join()
    if status:
        raise CommandError(f"{what} failed with status {status}:\n{''.join(last)}")
    return time.monotonic() - began


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(f"   {sys.argv[1]}: done in {run(sys.argv[1], sys.argv[2:]):.0f} s")
    except CommandError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
