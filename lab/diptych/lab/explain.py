"""`diptych explain NAME`: what causes an error or a warning of diptych's, and what to do. Docstrings hold the text."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import textwrap

from diptych.common.errors import ArgumentError, ExplainedError, ExplainedWarning

# Modules that define classes of errors and warnings. None of them needs a framework.
MODULES = (
    "diptych.common.errors", "diptych.common.conversion", "diptych.common.files", "diptych.lab.capture",
    "diptych.lab.cli", "diptych.lab.data", "diptych.lab.files", "diptych.lab.frontend", "diptych.lab.bisect.forward",
    "diptych.lab.diff.result", "diptych.lab.replay.op", "diptych.lab.traces.schema",
)  # fmt: skip


def classes() -> dict[str, type[Exception]]:
    """Returns the classes of errors and warnings by name: those of the packages for programs first, then the lab's, in
    the order of their files."""
    found = {}
    for name in MODULES:
        for held in vars(importlib.import_module(name)).values():
            own = inspect.isclass(held) and held.__module__ == name
            if own and issubclass(held, ExplainedError | ExplainedWarning):
                found[held.__name__] = held
    return {n: c for n, c in found.items() if c not in (ExplainedError, ExplainedWarning)}


def parts(held: type[Exception]) -> tuple[str, str, str]:
    """Returns what a class stands for, the cause and the remedy, each as one line."""
    text = " ".join(inspect.cleandoc(held.__doc__ or "").split())
    what, cause, remedy = re.split(r" \*\*(?:Cause|Remedy):\*\* ", text)
    return what, cause, remedy


def explained(name: str) -> dict[str, str]:
    """Returns the explanation of a class as plain values. **Raises** ArgumentError with the nearest names for a name
    that is none of `classes`."""
    found = classes()
    if name not in found:
        folded = {n.lower(): n for n in found}
        near = [folded[n] for n in difflib.get_close_matches(name.lower(), folded, 3, 0.5)] or [*found]
        raise ArgumentError(f"no error or warning of diptych has the name {name!r}; there are {', '.join(near)}")
    what, cause, remedy = parts(found[name])
    built_in = next(c.__name__ for c in found[name].__mro__ if c.__module__ == "builtins" and c is not Exception)
    return {"name": name, "is": what, "cause": cause, "remedy": remedy, "catch": built_in}


def as_text(found: list[dict[str, str]]) -> str:
    """Returns explanations as lines: one of them whole, of several what each stands for."""
    if len(found) > 1:
        return "\n".join(textwrap.fill(f"{e['name']}: {e['is']}", 100, subsequent_indent="    ") for e in found)
    (e,) = found
    lines = (f"{e['name']} (a {e['catch']}): {e['is']}", f"Cause: {e['cause']}", f"Remedy: {e['remedy']}")
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in lines)
