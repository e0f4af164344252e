"""Reads jaxprs: finds those among an equation's parameters, and inlines called functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

INLINE = ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "closed_call", "core_call")
"""Primitives that call a function and have no options of their own."""
JIT = ("jit", "pjit")
_BODIES = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")


class Flat(NamedTuple):
    """The parts of a jaxpr."""

    constvars: list[Any]
    invars: list[Any]
    outvars: list[Any]
    eqns: list[Any]


class _Variable:
    """A variable of an inlined function. Each call has variables of its own."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


def flat(jaxpr: Any, consts: Sequence[Any], is_call: Callable[[Any], bool]) -> tuple[Flat, list[Any]]:
    """Returns a jaxpr in which the equations of called functions replace the calls, and its constants.

    **Arguments:** `is_call`: returns whether an equation is a call to inline. The scopes around the call precede the
    scopes of the inlined equations.
    """
    constvars, constants, eqns = list(jaxpr.constvars), list(consts), []

    def results(body: Any, names: dict[Any, Any], around: Any) -> list[Any]:
        """Adds the equations of a body. `names`: the whole jaxpr's variable for each of the body's. `around`: the
        scopes."""
        of = lambda v: v if literal(v) else names.get(v, v)  # noqa: E731
        for own in body.eqns:
            info = own.source_info
            eqn = own.replace(
                invars=[of(v) for v in own.invars],
                source_info=info if around is None else info.replace(name_stack=around + info.name_stack),
            )
            if is_call(eqn):
                closed = next(eqn.params[k] for k in _BODIES if k in eqn.params)
                inner = closed.jaxpr
                held = [_Variable(v.aval) for v in inner.constvars]
                constvars.extend(held)
                constants.extend(closed.consts)
                given = dict(zip([*inner.constvars, *inner.invars], [*held, *eqn.invars], strict=True))
                names.update(zip(own.outvars, results(inner, given, eqn.source_info.name_stack), strict=True))
                continue
            if around is not None:
                names.update((v, _Variable(v.aval)) for v in own.outvars)
                eqn = eqn.replace(outvars=[of(v) for v in own.outvars])
            eqns.append(eqn)
        return [of(v) for v in body.outvars]

    outs = results(jaxpr, {}, None)
    return Flat(constvars, list(jaxpr.invars), outs, eqns), constants


def unplaced(params: dict[str, Any]) -> bool:
    """Returns whether a call under `jax.jit` fixes neither shardings, nor layouts, nor compiler options."""
    free = [(f"{side}_{name.removeprefix('out_')}", v) for side in ("in", "out") for name, v in unspecified().items()]
    return not params["compiler_options_kvs"] and all(x == v for name, v in free for x in params[name])


@functools.cache
def unspecified() -> dict[str, Any]:
    """Returns the parameters of a `jax.jit` call for a result whose sharding and layout are not specified."""
    params = jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0).eqns[0].params
    return {name: params[name][0] for name in ("out_shardings", "out_layouts")}


def literal(v: Any) -> bool:
    """Returns whether an operand of an equation is a constant, not a variable."""
    return hasattr(v, "val")


def jaxprs(params: Any) -> list[Any]:
    """Returns the jaxprs among an equation's parameters, including those in tuples."""
    found = []
    for value in params:
        if isinstance(value, tuple | list):
            found += jaxprs(value)
        elif hasattr(value, "eqns"):
            found.append(getattr(value, "jaxpr", value))
    return found


def scanned(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values among the operands of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # versions of JAX after 0.11.1 pack the numbers
    return len(consts), len(carry)
