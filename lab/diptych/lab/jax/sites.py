"""The sites of a step: how calls are numbered, and from which others each of them is computed."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from diptych.jax.graph.sites import Body, Deps, Leaf, ordered, unfold
from diptych.lab import capture as common
from diptych.lab.traces import Site


class Found(NamedTuple):
    """An entry whose arrays begin at position `start`, with indices `at` of scans and shards."""

    site: Site
    start: int
    at: tuple[int, ...]


def unfolded(
    body: Body, flags: Callable[[int], np.ndarray] | None, numbers: list[tuple[Site, int]] | None = None
) -> list[Found]:
    """Returns the entries of a body in order. `numbers` gets each site with the number of its leaf, in that order."""
    emitted, ancestors, calls, open_ = [], [], common.Calls(), collections.defaultdict(list)

    def emit(leaf: Leaf, start: int, at: tuple[int, ...], suffix: str, deps: Deps) -> Deps:
        site = calls.site(leaf.kind, leaf.name + suffix, leaf.shape, leaf.dtype, ())  # type: ignore[arg-type]
        if leaf.kind.endswith("_grad"):  # a gradient has the call of what it is the gradient of
            if not (of := open_[leaf.tap, at, suffix]):
                what = "JAX has moved what it is the gradient of out of the loop around it, or differentiates twice"
                message = f"capture: leaves out a gradient of {leaf.name}: {what}"
                warnings.warn(message, common.CaptureWarning, stacklevel=2)
                return deps
            site = dataclasses.replace(site, call=of.pop())
        else:
            site = dataclasses.replace(site, operation=leaf.operation)
            open_[leaf.tap, at, suffix].append(site.call)
        emitted.append((Found(site, start, at), leaf.number))
        ancestors.append(deps)
        return frozenset([len(emitted) - 1])

    unfold(body, emit, flags)
    found = []
    for i, inputs in ordered(ancestors):
        entry, number = emitted[i]
        site = dataclasses.replace(entry.site, inputs=tuple(emitted[j][0].site.key for j in inputs))
        found.append((entry._replace(site=site), number))
    found = _parameter_gradients_last(found)
    if numbers is not None:
        numbers += [(f.site, number) for f, number in found]
    return [f for f, _ in found]


def _parameter_gradients_last(found: list[tuple[Found, int]]) -> list[tuple[Found, int]]:
    """Moves gradients of parameters to the end, in the parameters' order, unless other sites are computed from them."""
    ours = {f.site.key for f, _ in found if f.site.kind == "parameter_grad"}
    rest = [x for x in found if x[0].site.key not in ours]
    if any(ours & set(f.site.inputs or ()) for f, _ in found):
        return found
    order = {f.site.name: i for i, (f, _) in reversed(list(enumerate(rest))) if f.site.kind == "parameter"}
    grads = [x for x in found if x[0].site.key in ours]
    return rest + sorted(grads, key=lambda x: (x[0].site.call, order.get(x[0].site.name, len(rest))))
