"""Follows the equations of one jaxpr backward, from results to operands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from diptych.jax.jaxprs.flat import literal

_SPREADS = ("pvary", "pcast")
_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "stop_gradient", "copy", "convert_element_type", *_SPREADS)
"""Primitives that keep their operand's values: they change places, the dtype or the devices."""


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def exact(dtype: Any, into: Any) -> bool:
    """Returns whether every value of a float dtype is representable in another one, which is wider than 8 bits."""
    if not is_float(into) or dtype.itemsize == 1:
        return is_float(into) and into.itemsize > 1
    return into.itemsize > 1 and jnp.promote_types(dtype, into) == into


class Reduced(NamedTuple):
    """An array x and the one axis over which it is reduced."""

    x: Any
    axis: int


Makers = Mapping[Any, tuple[int | None, Any]]
"""The equation that computes each variable, with its position, which is None in an enclosing jaxpr."""


class Walk:
    """Follows equations. `seen`: the equations that belong to the operation, by position."""

    def __init__(self, makers: Makers) -> None:
        self.makers = makers
        self.seen: dict[int, Any] = {}

    def made(self, v: Any, *names: str) -> Any:
        """Returns the equation that computes a variable if its primitive has one of these names, else None."""
        if literal(v) or v not in self.makers or self.makers[v][1].primitive.name not in names:
            return None
        position, eqn = self.makers[v]
        if position is not None:
            self.seen[position] = eqn
        return eqn

    def constant(self, v: Any) -> float | None:
        """Returns the value of a real scalar constant, which shard_map may spread over mesh axes, or None."""
        if (e := self.made(v, *_SPREADS)) is not None:
            v = e.invars[0]
        return float(v.val) if literal(v) and np.ndim(v.val) == 0 and not np.iscomplexobj(v.val) else None

    def filled(self, v: Any) -> float | None:
        """Returns the one constant that all elements of an array are equal to, None if there is none."""
        while (found := self.constant(v)) is None and (e := self.made(v, *_MOVES)) is not None:
            v = e.invars[0]
        return found

    def product(self, v: Any, stop: Any = None, depth: int = 6) -> tuple[float, list[Any]]:
        """Returns a variable as (constant, factors). The variable `stop` is not factored further, nor is a variable
        more than `depth` equations away, since powers of powers have many factors."""
        if (value := self.constant(v)) is not None:
            return value, []
        names = ("mul", "div", "neg", "copy", "square", "integer_pow")
        if v is stop or not depth or (e := self.made(v, *names)) is None:
            return 1.0, [v]
        name, (a, *b) = e.primitive.name, e.invars
        power = {"square": 2, "integer_pow": e.params.get("y")}.get(name, 1)
        divisor = self.constant(b[0]) if name == "div" else 1.0
        if not divisor or power not in (1, 2, 3):
            return 1.0, [v]
        constant, parts = self.product(a, stop, depth - 1)
        if name == "mul":
            other, more = self.product(b[0], stop, depth - 1)
            return constant * other, parts + more
        return math.prod([constant] * power) / (-1 if name == "neg" else divisor), parts * power

    def sum(self, v: Any) -> list[Any]:
        """Returns the two terms of an addition, [] for other variables."""
        e = self.made(v, "add")
        return [] if e is None else e.invars

    def uncast(self, v: Any) -> Any:
        e = self.made(v, "convert_element_type")
        return v if e is None else e.invars[0]

    def moved(self, v: Any, places: Sequence[int]) -> tuple[Any, list[int]] | None:
        """Returns the variable that `v` is a copy of, with other places or another dtype, and its places; None if `v`
        is no copy.

        **Arguments:** `places`: for each axis of `v`, an axis of the array in question, or -1. An axis with one element
        may become -1.
        """
        if len(places) != len(v.aval.shape) or (e := self.made(v, *_MOVES)) is None:
            return None
        kind, of = e.primitive.name, e.invars[0]
        if literal(of):
            return None
        if kind == "broadcast_in_dim":
            return of, [places[d] for d in e.params["broadcast_dimensions"]]
        if kind not in ("reshape", "squeeze"):
            return of, list(places)
        wide = [(p, n) for p, n in zip(places, v.aval.shape, strict=True) if n != 1]
        if [n for n in of.aval.shape if n != 1] != [n for _, n in wide]:
            return None
        left = iter(p for p, _ in wide)
        return of, [-1 if n == 1 else next(left) for n in of.aval.shape]

    def reduced(
        self, v: Any, shape: tuple[int, ...], name: str, log: bool = False, places: Sequence[int] | None = None
    ) -> Reduced | None:
        """Returns x [*shape] and the axis if `v` is a reduction of x over one axis, or its logarithm if `log`; else
        None.

        **Arguments:** `places`: the axis of x for each axis of `v`, or -1; by default `v` is broadcast along the
        reduced axis. A sum of exponentials may be followed by an absolute value.
        """
        at, logs, narrowest = list(range(len(shape)) if places is None else places), 0, v.aval.dtype
        while len(at) == len(v.aval.shape) and exact(narrowest, v.aval.dtype):
            if (found := self.moved(v, at)) is not None:
                v, at = found
                continue
            if (e := self.made(v, name, "log", "abs", "max", "select_n")) is None:
                return None
            kind = e.primitive.name
            if kind == name:
                axes, of = e.params["axes"], tuple(e.invars[0].aval.shape)
                rest = [i for i in range(len(of)) if i not in axes]
                same = [p == r or shape[r] == 1 for p, r in zip(at, rest, strict=False)]
                found = len(axes) == 1 and of == shape and all(same) and logs == log
                return Reduced(e.invars[0], int(axes[0])) if found else None
            arrays = list(e.invars)
            if kind == "max":
                arrays = [u for u in arrays if self.constant(u) != -math.inf]
            elif kind == "select_n":  # the maximum may be replaced by 0 where it is not finite
                guard = self.made(arrays[0], "is_finite")
                guards = guard is not None and guard.invars[0] is arrays[2] and self.filled(arrays[1]) == 0
                arrays = arrays[2:] if guards else []
            if len(arrays) != 1 or literal(arrays[0]) or (kind == "abs" and name != "reduce_sum"):
                return None
            v, logs = arrays[0], logs + (kind == "log")
        return None

    def shifted(self, v: Any) -> Reduced | None:
        """Returns x and the axis if `v` is x minus its maximum along an axis, else None."""
        if (e := self.made(v, "sub")) is None:
            return None
        found = self.reduced(e.invars[1], tuple(v.aval.shape), "reduce_max")
        return found if found is not None and found.x is e.invars[0] else None

    def summed_exp(self, total: Reduced | None) -> Any:
        """Returns z if `total` is a sum of exp(z), else None."""
        e = None if total is None else self.made(self.uncast(total.x), "exp")
        return None if e is None else e.invars[0]

    def log_softmax(self, v: Any) -> Reduced | None:
        """Returns x and the axis if `v` is z - log(sum(exp(z))) for z = x - max(x), else None."""
        shape = tuple(v.aval.shape)
        if (e := self.made(v, "sub")) is None:
            return None
        total = self.reduced(e.invars[1], shape, "reduce_sum", log=True)
        if total is None or self.summed_exp(total) is not e.invars[0]:
            return None
        found = self.shifted(e.invars[0])
        return found if found is not None and found.axis == total.axis else None

    def logsumexp(self, v: Any, shape: tuple[int, ...], places: Sequence[int] | None = None) -> Reduced | None:
        """Returns x [*shape] and the axis if `v` is log(sum(exp(x - m))) + m for m = max(x), else None."""
        at = list(range(len(shape)) if places is None else places)
        while (found := self.moved(v, at)) is not None:
            v, at = found
        for log, largest in itertools.permutations(self.sum(v), 2):
            total = self.reduced(log, shape, "reduce_sum", log=True, places=at)
            most = self.reduced(largest, shape, "reduce_max", places=at)
            z = self.summed_exp(total)
            if total is not None and most is not None and z is not None and total.axis == most.axis:
                return most if self.shifted(z) == most else None
        return None

    def columns(self, v: Any, x: Any) -> range | None:
        """Returns the range of positions in x's last axis whose elements `v` holds, else None. `v` may have other axes
        of size 1, and x may be reshaped to pairs of neighbours."""
        (*rest, count), size = x.aval.shape, v.aval.size
        while (e := self.made(v, "slice", "split", "squeeze", "reshape", "broadcast_in_dim")) is not None:
            p, of, first = e.params, e.invars[0], e.primitive.name
            if first == "split":
                if of is not x or p["axis"] != len(rest):
                    return None
                ends, at = [0, *itertools.accumulate(map(int, p["sizes"]))], list(e.outvars).index(v)
                return range(ends[at], ends[at + 1])
            if first == "slice":
                steps = p["strides"] or (1,) * len(of.aval.shape)
                *others, last = itertools.starmap(
                    range, zip(p["start_indices"], p["limit_indices"], steps, strict=True)
                )
                if others != list(map(range, of.aval.shape[:-1])):
                    return None
                if of is x:
                    return last
                paired = self.made(of, "reshape") if of.aval.shape == (*rest, count // 2, 2) else None
                return range(last[0], count, 2) if paired and paired.invars[0] is x and len(last) == 1 else None
            if literal(of) or of.aval.size != size:
                return None
            v = of
        return None
