"""Prints the stub of the built module `diptych.core._core`; `make stub` writes it to `_core.pyi`.

Signatures are pybind11's own, which stand in docstrings; types that pybind11 cannot know are named in `types.h`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any, is_typeddict

from diptych.core import _core

# pybind11 names every type that converts; callers should pass these.
NUMBERS = {"typing.SupportsInt | typing.SupportsIndex": "int", "typing.SupportsFloat | typing.SupportsIndex": "float"}


def docstring(text: str) -> str:
    return f'"""{text.strip()}"""'


def function(f: Any) -> str:
    signature, _, rest = f.__doc__.partition("\n")
    for theirs, ours in NUMBERS.items():
        signature = signature.replace(theirs, ours)
    signature = re.sub(r"\(self: [\w.]+", "(self", signature)
    return f"def {signature}:" + (textwrap.indent("\n" + docstring(rest), "    ") if rest.strip() else " ...")


def typed_dict(t: type) -> str:
    kinds = {key: kind.__name__ if isinstance(kind, type) else kind for key, kind in t.__annotations__.items()}
    return "\n".join([f"class {t.__name__}(typing.TypedDict):", *(f"    {key}: {kind}" for key, kind in kinds.items())])


def class_(t: type) -> str:
    methods = (function(m) for name, m in vars(t).items() if not name.startswith("_"))
    return f"class {t.__name__}:\n" + textwrap.indent("\n\n".join([docstring(t.__doc__ or ""), *methods]), "    ")


def parts() -> Iterator[str]:
    yield "# Written by `make stub`."
    yield docstring(_core.__doc__ or "")
    yield "import collections.abc\nimport typing"
    for name, held in vars(_core).items():
        if name.startswith("_"):
            continue
        if is_typeddict(held):
            yield typed_dict(held)
        elif held is Any:
            yield f"{name} = typing.Any"
        elif isinstance(held, type):
            yield class_(held)
        else:
            yield function(held)


if __name__ == "__main__":
    print("\n\n".join(parts()))
