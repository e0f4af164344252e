"""Names of sites: one spelling for both separators, and the table of PyTorch's names in flax.

A name has *parts*. If a module returns several tensors, a *place* such as "[0]" follows. Hugging Face's models have the
same parts in both frameworks, except for those in the table: parameter names, numbered layers, and the wrappers around
a model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from diptych.lab.capture import MODEL
from diptych.lab.traces import Site

_PLACE = re.compile(r"""((?:\[(?:\d+|'[^']*'|"[^"]*")\])*)$""")
_NUMBERED = re.compile(r"(.+)_(\d+)")

# Names of parameters and statistics in flax and PyTorch, whose old layer norms have gamma and beta.
_LEAVES = {
    "kernel": "weight", "scale": "weight", "embedding": "weight", "gamma": "weight", "beta": "bias",
    "running_mean": "mean", "running_var": "var",
}  # fmt: skip
_STACKS = {"h": "layers", "layer": "layers", "block": "layers", "blocks": "layers"}
"""The names of a stack of numbered layers, each with the one name that stands for all of them."""
_OTHER = {"drop": "dropout"}
_WRAPPERS = {"_orig_mod", "module", "params", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_flax_wrapped"}
"""Parts that compiled, distributed and checkpointed modules add to a name, and flax's collections."""
_BASES = {"model", "transformer", "base_model", "vit", "bert"}
"""Names under which a model with a head holds the model without it."""


class Name(NamedTuple):
    path: str
    place: str


def split(name: str) -> Name:
    """Returns a name's path, with "/" between its parts, and its place in a structure of outputs."""
    start = _PLACE.search(name)
    place = start[1] if start else ""
    return Name(name[: len(name) - len(place)].replace(".", "/"), place.replace("'", '"'))


def normal(name: str) -> str:
    """Returns a name with "/" between its parts."""
    return "".join(split(name))


def leaf(site: Site) -> str:
    """Returns the last part of a parameter's name, "" for a site that is no parameter."""
    return split(site.name).path.rpartition("/")[2] if is_parameter(site) else ""


def parent(site: Site) -> str:
    """Returns the path of the module that a site belongs to."""
    path = split(site.name).path
    return path.rpartition("/")[0] if site.kind not in ("activation", "activation_grad") else path


def caller(name: str) -> str:
    """Returns the path of the module that calls an operation. `name`: the name of an operand or result of it."""
    return split(name.rpartition("/")[0]).path


def is_parameter(site: Site) -> bool:
    return site.kind in ("parameter", "parameter_grad")


def common(site: Site) -> Name:
    """Returns the name that the table gives a site in both frameworks."""
    path, place = split(site.name)
    parts = _unwrapped(path)
    if is_parameter(site):
        if len(parts) > 1 and parts[-1] == "value":  # an nnx variable's value
            del parts[-1]
        parts[-1] = _LEAVES.get(parts[-1], parts[-1])
    return Name(_by_table(parts), place)


def module(path: str) -> str:
    """Returns the path that the table gives a module in both frameworks."""
    return _by_table(_unwrapped(path))


def _unwrapped(path: str) -> list[str]:
    return [p for p in path.split("/") if p not in _WRAPPERS] or [MODEL]


def _by_table(parts: list[str]) -> str:
    if len(parts) > 1 and parts[0] in _BASES:
        del parts[0]
    found: list[str] = []
    for part in parts:
        numbered = _NUMBERED.fullmatch(part)
        found += numbered.groups() if numbered else [_OTHER.get(part, part)]
    for i, part in enumerate(found[1:]):
        if part.isdecimal():
            found[i] = _STACKS.get(found[i], found[i])
    return "/".join(found)


def few(items: Sequence[str], count: int = 3) -> str:
    """Returns the first `count` items as a list in words, and the number of further ones."""
    more = len(items) - count
    return ", ".join(items[:count]) + (f" and {more} more" if more > 0 else "")
