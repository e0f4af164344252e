"""Taps: an identity that marks an array of a traced function for the capture, and its gradient for the backward pass.

A tap compiles to nothing. `diptych.jax.graph.interpret` replaces taps by observations, after JAX has differentiated and
batched the function that contains them.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Array = jax.Array
SCOPE = "diptych:"
"""Begins the name of a `jax.named_scope` around a module; the rest is the module's path."""

tap_p = Primitive("lab_tap")
"""Marks its operand. Parameters: `tap`, its number; `name` and `kind` of the site; `grad`, the kind of the site of its
gradient, or "" if that is not observed; `order`, the axes of the operand in the order in which they are recorded, those
of a `vmap` first."""
tangent_p = Primitive("lab_tangent")
"""The tap of a tangent. It is linear; its transposition taps the gradient. Parameters as those of `tap_p`."""


NUMBERS = itertools.count()
"""Of taps."""


def tap(x: Any, name: str, kind: str, grad: str = "", number: int | None = None) -> Any:
    """Returns the array `x`, marked. `number`: the tap's, one of `NUMBERS`."""
    number = next(NUMBERS) if number is None else number
    return tap_p.bind(x, name=name, kind=kind, grad=grad, tap=number, order=tuple(range(x.ndim)))


def _batched(prim: Primitive) -> Any:
    def batcher(args: Any, dims: Any, *, order: tuple[int, ...], **params: Any) -> Any:
        (x,), (d,) = args, dims
        order = (d, *(axis + (axis >= d) for axis in order))
        return prim.bind(x, order=order, **params), d

    return batcher


def _jvp(primals: Any, tangents: Any, *, grad: str, **params: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = tap_p.bind(x, grad=grad, **params)
    if not grad or type(t) is ad.Zero:
        return y, t
    return y, tangent_p.bind(t, grad=grad, **params)


def _transpose(ct: Any, _: Any, *, kind: str, grad: str, **params: Any) -> Any:
    return [ct if type(ct) is ad.Zero or not grad else tap_p.bind(ct, kind=grad, grad="", **params)]


for _prim in (tap_p, tangent_p):
    _prim.def_impl(lambda x, **_: x)
    _prim.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(_prim, lambda ctx, x, **_: [x])
    batching.primitive_batchers[_prim] = _batched(_prim)
ad.primitive_jvps[tap_p] = _jvp
ad.primitive_jvps[tangent_p] = lambda primals, tangents, **params: (tangent_p.bind(*primals, **params), *tangents)
ad.primitive_transposes[tangent_p] = ad.primitive_transposes[tap_p] = _transpose
