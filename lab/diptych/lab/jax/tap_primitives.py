"""The primitives of taps. A tap returns its operand. It marks an array of a traced function for a capture, and in the
backward pass the array's gradient.

A tap compiles to nothing. `diptych.lab.jax.observe` replaces taps by observations, after JAX has differentiated and
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
"""The prefix of the name of a `jax.named_scope` around a module; the module's path follows."""

tap_p = Primitive("lab_tap")
"""Marks its operand. Parameters: `tap`, the tap's number; `name` and `kind` of the site; `grad`, the kind of the
gradient's site, or "" if the gradient is not observed; `order`, the operand's axes in the order in which they are
recorded, beginning with those of a `vmap`."""
tangent_p = Primitive("lab_tangent")
"""The tap of a tangent. It is linear, and its transposition taps the gradient. It has the parameters of `tap_p`."""

called_p = Primitive("lab_called")
"""Marks its first operand as the result of a module that computes an operation, and the others as the operation's
operands. Parameters: `name` and `operation` of the sites' leaves; `operands`, the operands' names; `orders`, `order` of
the result and of each operand; `ranks`, their numbers of axes without those of a `vmap`."""
ROW = "diptych_row"
"""The name of the `jax.named_scope` around the equations of a module that computes such an operation."""


NUMBERS = itertools.count()
"""Yields numbers of new taps, which are unique in the process."""


def tap(x: Any, name: str, kind: str, grad: str = "", number: int | None = None) -> Any:
    """Returns the array `x` with a tap. `number`: the tap's number from `NUMBERS`, by default a new one."""
    number = next(NUMBERS) if number is None else number
    return tap_p.bind(x, name=name, kind=kind, grad=grad, tap=number, order=tuple(range(x.ndim)))


def called(out: Any, name: str, operation: Any, operands: dict[str, Any]) -> Any:
    """Returns the array `out`, marked as the result of an operation on arrays."""
    arrays = out, *operands.values()
    ranks = tuple(x.ndim for x in arrays)
    orders = tuple(tuple(range(n)) for n in ranks)
    return called_p.bind(*arrays, name=name, operation=operation, operands=tuple(operands), orders=orders, ranks=ranks)


def _batched(prim: Primitive) -> Any:
    def batcher(args: Any, dims: Any, *, order: tuple[int, ...], **params: Any) -> Any:
        (x,), (d,) = args, dims
        return prim.bind(x, order=_behind(order, d), **params), d

    return batcher


def _behind(order: tuple[int, ...], d: int | None) -> tuple[int, ...]:
    """Returns the order with the new axis `d` in front."""
    return order if d is None else (d, *(axis + (axis >= d) for axis in order))


def _called_batched(args: Any, dims: Any, *, orders: Any, **params: Any) -> Any:
    orders = tuple(_behind(order, d) for order, d in zip(orders, dims, strict=True))
    return called_p.bind(*args, orders=orders, **params), dims[0]


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
called_p.def_impl(lambda out, *_, **__: out)
called_p.def_abstract_eval(lambda out, *_, **__: out)
mlir.register_lowering(called_p, lambda ctx, out, *_, **__: [out])
batching.primitive_batchers[called_p] = _called_batched
ad.primitive_jvps[called_p] = lambda primals, tangents, **params: (called_p.bind(*primals, **params), tangents[0])
