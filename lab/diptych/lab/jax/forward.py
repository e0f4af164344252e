"""Finds the equations of a traced function that compute its forward pass.

Differentiated code also has equations of the backward pass, equations that follow it, such as an optimizer's, and
equations that prepare it: factors of derivatives, which only the backward pass uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diptych.jax.jaxprs.flat import INLINE, jaxprs, literal, scanned
from diptych.lab.jax.tap_primitives import called_p, tap_p

_OPEN = (*INLINE, "jit", "pjit", "scan", "cond", "while", "remat2", "checkpoint", "shard_map")
"""Primitives with jaxprs. A jaxpr's last arguments are the equation's last operands, its results the equation's."""


class Forward(NamedTuple):
    """The part of a jaxpr that is the forward pass.

    `equations`: the positions of its equations. `after`: the variables that depend on a gradient. `needed`: the
    variables that the forward pass needs.
    """

    equations: frozenset[int]
    after: frozenset[Any]
    needed: frozenset[Any]

    def inside(self, eqn: Any) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Returns, for an equation with jaxprs, which operands are in `after` and which results are in `needed`."""
        needed = [v in self.needed for v in eqn.outvars]
        if eqn.primitive.name in ("scan", "while"):
            carry = scanned(eqn.params)[1] if eqn.primitive.name == "scan" else len(needed)
            needed[:carry] = [True] * carry
        return tuple(_operands_after(eqn, self.after)), tuple(needed)


def forward_code(jaxpr: Any, after: Sequence[bool], needed: Sequence[bool]) -> Forward:
    """Returns the forward pass of a jaxpr. `after`: whether each of the last arguments depends on a gradient, by
    default none. `needed`: whether each result is needed, by default all."""
    of_arguments = list(after)[-len(jaxpr.invars) :] if after and jaxpr.invars else [False] * len(jaxpr.invars)
    of_results = list(needed) or [True] * len(jaxpr.outvars)
    late = _after(jaxpr, of_arguments)
    wanted = {v for v, n in zip(jaxpr.outvars, of_results, strict=True) if n and not literal(v)} - late
    found = set()
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        outs = set(eqn.outvars)
        if "transpose" in transforms(eqn) or outs <= late or not (outs & wanted or _has_tap(eqn)):
            continue
        found.add(i)
        wanted |= set(itertools.filterfalse(literal, eqn.invars)) - late
    return Forward(frozenset(found), frozenset(late), frozenset(wanted))


def transforms(eqn: Any) -> list[str]:
    """Returns the names of the JAX transformations that made an equation."""
    return [s.name for s in eqn.source_info.name_stack.stack if type(s).__name__ == "Transform"]


def around(eqn: Any, jaxpr: Any, outer: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Returns the equations around the body of a scan by the variables that they compute, including the body's
    arguments for constants, since JAX moves constants out of a differentiated body; nothing for other equations.
    `outer`: the equations around `jaxpr`."""
    if eqn.primitive.name != "scan":
        return {}
    makers = {**outer, **{v: e for e in jaxpr.eqns for v in e.outvars}}
    consts = zip(eqn.invars[: scanned(eqn.params)[0]], eqn.params["jaxpr"].jaxpr.invars, strict=False)
    return makers | {inner: makers[v] for v, inner in consts if not literal(v) and v in makers}


def _operands_after(eqn: Any, late: Any) -> list[bool]:
    """Returns, for each operand of an equation, whether it makes the results depend on a gradient.

    An equation under `jax.jvp` is forward code even if its operands depend on a gradient, since a function may make
    several training steps.
    """
    anew = "jvp" in transforms(eqn)
    return [not literal(v) and v in late and not anew for v in eqn.invars]


def _after(jaxpr: Any, after: Sequence[bool]) -> set[Any]:
    """Returns the variables that depend on a gradient."""
    found = {v for v, late in zip(jaxpr.invars, after, strict=True) if late}
    for eqn in jaxpr.eqns:
        operands = _operands_after(eqn, found)
        bodies = [b for b in jaxprs(eqn.params.values()) if len(b.outvars) == len(eqn.outvars)]
        if "transpose" in transforms(eqn):
            found.update(eqn.outvars)
        elif bodies and eqn.primitive.name in _OPEN:
            for body in bodies:
                inside = _after(body, operands[len(operands) - len(body.invars) :])
                pairs = zip(eqn.outvars, body.outvars, strict=True)
                found.update(out for out, v in pairs if not literal(v) and v in inside)
        elif any(operands):
            found.update(eqn.outvars)
    return found


def _has_tap(eqn: Any) -> bool:
    if eqn.primitive is tap_p:
        return not eqn.params["kind"].endswith("_grad")
    return eqn.primitive is called_p or any(_has_tap(e) for body in jaxprs(eqn.params.values()) for e in body.eqns)
