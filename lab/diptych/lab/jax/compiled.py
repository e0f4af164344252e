"""The compiled program of a captured function, its observations (extra results), and the entries made of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diptych.jax.jaxprs.arguments import Results
from diptych.jax.jaxprs.bodies import Body
from diptych.jax.jaxprs.flat import unspecified
from diptych.jax.jaxprs.placed import whole
from diptych.lab import capture as common
from diptych.lab.jax.observe import Observer
from diptych.lab.jax.sites import unfolded
from diptych.lab.jax.statistics import decoded, observed
from diptych.lab.jax.taps import is_site
from diptych.lab.traces import SAMPLES, Entry, Options, Site, Writer, places


@dataclasses.dataclass
class _Variant:
    """A compiled program that keeps a fixed choice of each leaf's values. `places`: the positions and shapes of extra
    results that are statistics and hashes. `values`: the positions of those that are values, in the order in which the
    program returns them."""

    keep: tuple[str, ...]
    run: Any = None
    body: Body = dataclasses.field(default_factory=lambda: Body([], [], 0))
    places: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    values: list[int] = dataclasses.field(default_factory=list)

    def kept(self, number: int) -> str:
        return self.keep[number] if number < len(self.keep) else "none"


class _Observed(NamedTuple):
    """The results of a program besides the function's own.

    `packed`: statistics and hashes as one vector on the device. `values`: the arrays whose values are kept.
    """

    variant: _Variant
    packed: jax.Array
    values: list[jax.Array]


class Program:
    """One traced function. It is compiled once, and again if the budget allows fewer whole tensors."""

    def __init__(self, closed: Any, results: Results, products: bool, options: Options, statistics: bool) -> None:
        self._outer = closed  # kept alive, since programs are looked up by its id
        self._closed, self._picked, self._params = unwrapped(closed)
        self._results, self._options, self._statistics, self._products = results, options, statistics, products
        self._structure: Body | None = None
        self._variants: dict[tuple[str, ...], _Variant] = {}

    def __call__(self, arrays: Sequence[Any], writer: Writer) -> tuple[Any, _Observed]:
        """Returns the function's result and the observations, without waiting for either."""
        keep = self._keep(arrays, writer)
        if keep not in self._variants:
            variant = self._variants[keep] = _Variant(keep)
            variant.run = jax.jit(functools.partial(self._instrumented, variant), **self._params)
        variant = self._variants[keep]
        outs, (packed, values) = variant.run(*arrays)
        return self._results.full(outs), _Observed(variant, packed, values)

    def entries(self, step: _Observed, writer: Writer) -> list[Entry]:
        """Returns the entries of a step. The host waits for the device."""
        variant, words, arrays, at = step.variant, np.asarray(step.packed), {}, 0
        for position, shape in variant.places.items():
            size = math.prod(shape)
            arrays[position] = words[at : at + size].reshape(shape)
            at += size
        found = unfolded(variant.body, lambda position: arrays[position])
        plans = writer.plan([f.site for f in found])
        wanted = {f.start + 1 for f, plan in zip(found, plans, strict=True) if plan.values != "none"}
        held = {position: x for position, x in zip(variant.values, step.values, strict=True) if position in wanted}
        values = dict(zip(held, jax.device_get(list(held.values())), strict=True))
        entries = []
        for f in found:
            digits, statistics = decoded(arrays[f.start][f.at], f.site)
            kept = values[f.start + 1][f.at] if f.start + 1 in values else None
            entries.append(Entry(f.site, statistics, digits, kept))
        return entries

    def _keep(self, arrays: Sequence[Any], writer: Writer) -> tuple[str, ...]:
        """Returns which values each leaf keeps: whole tensors where the next step's plan asks for them, else
        samples."""
        if self._options.values == "hash":
            return ()
        if self._structure is None:
            sketch = _Variant(())
            jax.eval_shape(functools.partial(self._instrumented, sketch), *arrays)
            self._structure = sketch.body
        leaves = self._structure.leaves()
        if self._options.values == "sample":
            return ("sample",) * len(leaves)
        if self._structure.conditional:  # only after the step is it known which sites share the budget
            return ("whole",) * len(leaves)
        found: list[tuple[Site, int]] = []
        unfolded(self._structure, None, found)
        plans = writer.plan([site for site, _ in found])
        whole = {number for (_, number), plan in zip(found, plans, strict=True) if plan.values == "whole"}
        return tuple("whole" if leaf.number in whole else "sample" for leaf in leaves)

    def _instrumented(self, variant: _Variant, *arrays: Any) -> Any:
        args = [arrays[i] if i is not None else value for i, value in self._picked]
        is_wanted = functools.partial(is_site, self._options.sites)
        observe, which = functools.partial(self._observed, variant), self._options.ops
        own = common.operation if which != "none" else None
        observer = Observer(is_wanted, observe, self._products and which != "none", own, which == "all")
        outs, extras, variant.body = observer.program(self._closed, args)
        variant.values = [p + 1 for leaf, p in variant.body.positions() if variant.kept(leaf.number) != "none"]
        variant.places = {i: x.shape for i, x in enumerate(extras) if i not in set(variant.values)}
        packed = [whole(extras[i]).reshape(-1).astype(jnp.uint32) for i in variant.places]
        words = jnp.concatenate(packed) if packed else jnp.zeros(0, jnp.uint32)
        return outs, (words, [extras[i] for i in variant.values])

    def _observed(self, variant: _Variant, x: Any, number: int, quantized: Any) -> list[Any]:
        """Returns the words that `statistics.decoded` reads for an array, and the values that are kept."""
        words, keep = observed(x, self._statistics, quantized), variant.kept(number)
        if keep == "none":
            return [words]
        return [words, x if keep == "whole" or x.size <= SAMPLES else x.reshape(-1)[places(x.size, SAMPLES)]]


def unwrapped(closed: Any) -> tuple[Any, list[tuple[int | None, Any]], dict[str, Any]]:
    """Returns the function to compile, its arguments as positions or literal values, and arguments of `jax.jit`.

    A function under `jax.jit` is unwrapped, because donations and options have no effect inside of another `jax.jit`.
    """
    jaxpr = closed.jaxpr
    positions = {v: i for i, v in enumerate(jaxpr.invars)}
    if len(jaxpr.eqns) != 1 or jaxpr.eqns[0].primitive.name not in ("jit", "pjit") or closed.consts:
        return closed, [(i, None) for i in range(len(positions))], {}
    (eqn,) = jaxpr.eqns
    if list(eqn.outvars) != list(jaxpr.outvars):
        return closed, [(i, None) for i in range(len(positions))], {}
    picked: list[tuple[int | None, Any]] = [
        (None, v.val) if hasattr(v, "val") else (positions[v], None) for v in eqn.invars
    ]
    p = eqn.params
    of_arguments = {i: k for k, (i, _) in enumerate(picked) if i is not None}
    open_ = unspecified()["out_shardings"]
    shardings = tuple(p["in_shardings"][of_arguments[i]] if i in of_arguments else open_ for i in range(len(positions)))
    params: dict[str, Any] = {
        "in_shardings": shardings,
        "out_shardings": (list(p["out_shardings"]), open_),
        "donate_argnums": tuple(i for i, k in of_arguments.items() if p["donated_invars"][k]),
    }
    return p["jaxpr"], picked, params
