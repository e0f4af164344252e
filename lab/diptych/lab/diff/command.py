"""The command `diptych diff`."""

from __future__ import annotations

import argparse
import pathlib

from diptych.lab import files
from diptych.lab.diff import differ, mapping, summary
from diptych.lab.diff.result import DiffError
from diptych.lab.output import Output
from diptych.lab.traces import Trace
from diptych.lab.traces.schema import dump

DIFFERS = 1


def run(args: argparse.Namespace) -> int:
    """Compares two traces and shows the result. Returns 0 if nothing was found, 1 if the traces differ.

    **Raises** DiffError or TraceError if the traces cannot be compared, FileError if a file cannot be written.
    """
    references = args.ref or []
    if len(references) > 2:
        raise DiffError(f"--ref takes one or two folders, got {len(references)}")
    folders = {"A": args.a, "B": args.b, **{f"--ref {r}": r for r in references}}
    _distinct([args.a, args.b, *references])
    output = Output(args.json, list(folders.values()))
    if args.html is not None:
        files.require_writable("--html", args.html, list(folders.values()))
    if output.path and args.html and files.real(output.path) == files.real(args.html):
        raise DiffError(f"--json and --html name the same file: {args.json}; give each its own")
    render = _page() if args.html else None
    rules = mapping.read(args.map) if args.map else None
    with args.progress.stage("reading traces"):
        a, b, *h = (Trace.open(folder) for folder in (args.a, args.b, *references))
    result = differ.diff(a, b, h, rules, args.steps, progress=args.progress)
    output.give(dump(result).decode())
    if args.html and render is not None:
        with args.progress.stage("writing the page"):
            files.write_text(args.html, render(result))
    output.say(summary.text(result))
    if written := [str(path) for path in (output.path, args.html) if path]:
        output.say(f"\nwritten: {', '.join(written)}")
    return 0 if result.status == "green" else DIFFERS


def steps(text: str) -> list[int | range]:
    """Reads numbers and ranges of steps such as "0,5,10-20" from the command line. **Raises** ArgumentTypeError."""
    found: list[int | range] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise argparse.ArgumentTypeError(f"{text!r} are no steps; write them as 0,5,10-20")
        low, high = int(first[:20]), int((last or first)[:20])
        if not low <= high < low + 10**6:
            raise argparse.ArgumentTypeError(f"{part!r} must go from a step to a later one, by at most a million")
        found.append(range(low, high + 1) if dash else low)
    return found


def _distinct(folders: list[pathlib.Path]) -> None:
    seen: set[pathlib.Path] = set()
    for folder in folders:
        if files.real(folder) in seen:
            raise DiffError(f"{folder}: is given twice; A, B and references must be different traces")
        seen.add(files.real(folder))


def _page():
    try:
        from diptych.lab.diff import page
    except ImportError as e:
        raise DiffError(
            f"--html needs {e.name or 'the page'} ({e}); install it with: pip install 'diptych[lab]'"
        ) from e
    return page.render
