"""Recognizes JAX's own operations, rows of `diptych.lab.replay.table`, by the mathematics of equations, and by modules.

Equations are followed from an operation's last one back to its operands, within one jaxpr. An operation is recognized
only if it equals the row in every respect: reduced axes, broadcast axes, and constants. All other equations are
recognized one by one, as products, sums and elementwise products.
"""

from __future__ import annotations

import itertools
import math
import string
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diptych.jax.jaxprs.flat import literal
from diptych.lab.jax.picks import cross_entropy
from diptych.lab.jax.walk import Reduced, Walk, exact, is_float
from diptych.lab.replay import table
from diptych.lab.traces import is_recorded
from diptych.lab.traces.schema import Operation

Found = tuple[str, dict[str, Any], dict[str, Any]]
"""(row, operands by name, options)."""


class Function(NamedTuple):
    """An operation of JAX's own that ends in one equation of a jaxpr, and may begin in earlier ones.

    `name`: its row in the lab's table. `operation`: the operation as a trace records it. `operands`: the jaxpr's
    variables by the names of the row's operands.
    """

    name: str
    operation: Operation
    operands: dict[str, Any]


def possible(eqn: Any) -> bool:
    """Returns whether an equation may be the last one of an operation, or part of one: its primitive occurs in the
    rows, and its result is a float array (a scalar too for products)."""
    name, out = eqn.primitive.name, eqn.outvars[:1]
    return name in (*_WHOLES, *_SINGLES) and (_array(out[0]) or (name == "dot_general" and is_float(out[0].aval.dtype)))


def recognized(jaxpr: Any, equations: frozenset[int], outer: Mapping[Any, Any]) -> dict[int, Function]:
    """Returns the operations that the equations at these positions compute, by the position of their last equation.

    An equation that is part of an operation is not an operation itself. `outer`: the equations around this jaxpr by the
    variables that they compute, including arguments of this jaxpr.
    """
    makers: dict[Any, tuple[int | None, Any]] = {v: (None, eqn) for v, eqn in outer.items()}
    makers |= {v: (i, eqn) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    own = {*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
    inside: set[int] = set()
    found: dict[int, Function] = {}
    for rows in (_LOSSES, _WHOLES, _SINGLES):
        for i in sorted(equations, reverse=True):
            eqn = jaxpr.eqns[i]
            if i in inside or not (rows is _LOSSES or possible(eqn)):
                continue
            for row in rows.get(eqn.primitive.name, ()):
                read = row(walk := Walk(makers), eqn)
                if read is not None and all(literal(v) or v in own for v in read[1].values()):
                    found[i] = Function(read[0], operation(read[0], read[2]), read[1])
                    inside |= {*walk.seen, i}
                    break
    return found


def operation(row: str, options: Mapping[str, Any]) -> Operation:
    return Operation(row, table.encoded(row, options))


def _array(v: Any) -> bool:
    return len(getattr(v.aval, "shape", ())) > 0 and is_float(v.aval.dtype)


# --- operations of several equations ---


def _cross_entropy(walk: Walk, eqn: Any) -> Found | None:
    if (found := cross_entropy(walk, eqn.outvars[0])) is None:
        return None
    of, reduction = found
    options = {"axis": of.axis - len(of.logits.aval.shape), "reduction": reduction, "ignore_index": None}
    return "cross_entropy", {"logits": of.logits, "targets": of.targets}, options


def _softmax(walk: Walk, eqn: Any) -> Found | None:
    total = walk.reduced(eqn.invars[1], tuple(eqn.outvars[0].aval.shape), "reduce_sum")
    z = walk.summed_exp(total)
    e = None if total is None else walk.made(eqn.invars[0], "exp")
    if total is None or z is None or e is None or walk.uncast(total.x) is not eqn.invars[0]:
        return None
    found = walk.shifted(z)
    return _along("softmax", found) if found is not None and found.axis == total.axis else None


def _log_softmax(walk: Walk, eqn: Any) -> Found | None:
    found = walk.log_softmax(eqn.outvars[0])
    return None if found is None else _along("log_softmax", found)


def _along(row: str, of: Reduced) -> Found:
    return row, {"x": of.x}, {"axis": of.axis - len(of.x.aval.shape)}


def _gelu(walk: Walk, eqn: Any) -> Found | None:
    tried = Walk(walk.makers)
    tried.product(eqn.outvars[0])
    for x in dict.fromkeys(v for e in tried.seen.values() for v in e.invars if not literal(v)):
        part = Walk(walk.makers)
        if (approximate := _gelu_of(part, eqn.outvars[0], x)) is not None:
            walk.seen |= part.seen
            return "gelu", {"x": x}, {"approximate": approximate}
    return None


def _gelu_of(walk: Walk, v: Any, x: Any) -> bool | None:
    """Returns whether `v` is gelu(x) in its approximate form with tanh; None if it is not gelu(x)."""
    constant, parts = walk.product(v, x)
    if len(parts) != 2 or x not in parts or not _near(constant, 0.5, x):
        return None
    (other,) = [p for p in parts if p is not x] or [None]
    if (e := walk.made(other, "erfc")) is not None:
        return False if _times(walk, e.invars[0], -math.sqrt(0.5), x) else None
    inner = [u for u in walk.sum(other) if walk.constant(u) != 1]
    if len(inner) != 1:
        return None
    if (e := walk.made(inner[0], "erf")) is not None:
        return False if _times(walk, e.invars[0], math.sqrt(0.5), x) else None
    if (e := walk.made(inner[0], "tanh")) is None:
        return None
    constant, parts = walk.product(e.invars[0], x)
    terms = walk.sum(parts[0]) if len(parts) == 1 and _near(constant, math.sqrt(2 / math.pi), x) else []
    rest = [t for t in terms if t is not x]
    return True if len(terms) == 2 and len(rest) == 1 and _times(walk, rest[0], 0.044715, x, 3) else None


def _times(walk: Walk, v: Any, constant: float, x: Any, power: int = 1) -> bool:
    found, parts = walk.product(v, x)
    return _near(found, constant, x) and len(parts) == power and all(p is x for p in parts)


def _near(found: float, constant: float, x: Any) -> bool:
    """Returns whether `found` equals `constant` within the precision of x's dtype."""
    return abs(found - constant) <= float(jnp.finfo(x.aval.dtype).eps) * abs(constant)


def _silu(walk: Walk, eqn: Any) -> Found | None:
    for x, other in itertools.permutations(eqn.invars):
        if (e := walk.made(other, "logistic")) is not None and e.invars[0] is x:
            return "silu", {"x": x}, {}
    return None


def _rotary(walk: Walk, eqn: Any) -> Found | None:
    """Recognizes x * cos + rotated(x) * sin; rotated(x) is (-x2, x1) of the last axis's halves, or of its pairs."""
    products = [walk.made(v, "mul") for v in eqn.invars]
    if None in products:
        return None
    pairs = [list(itertools.permutations(e.invars)) for e in products]
    for left, right in itertools.permutations(pairs):
        for (x, cos), (turned, sin) in itertools.product(left, right):
            if literal(cos) or literal(sin) or (interleaved := _turned(walk, turned, x)) is None:
                continue
            return "rotary", {"x": x, "cos": cos, "sin": sin}, {"interleaved": interleaved}
    return None


def _turned(walk: Walk, v: Any, x: Any) -> bool | None:
    """Returns whether `v` is x rotated by pairs of the last axis; False if it is rotated by halves, None otherwise."""
    if literal(v) or not _array(x) or tuple(v.aval.shape) != tuple(x.aval.shape):
        return None
    *rest, count = x.aval.shape
    if interleaved := (whole := walk.made(v, "reshape")) is not None:
        v = whole.invars[0]
    if interleaved and tuple(v.aval.shape) != (*rest, count // 2, 2):
        return None
    e = walk.made(v, "concatenate", "stack")
    if e is None or len(e.invars) != 2 or e.params.get("dimension", e.params.get("axis")) != len(v.aval.shape) - 1:
        return None
    first, second = e.invars
    if (back := walk.made(first, "neg")) is None and (wide := walk.made(first, "broadcast_in_dim", "reshape")):
        back = walk.made(wide.invars[0], "neg")
    if back is None or count % 2:
        return None
    half = count // 2
    want = (range(1, count, 2), range(0, count, 2)) if interleaved else (range(half, count), range(half))
    return interleaved if (walk.columns(back.invars[0], x), walk.columns(second, x)) == want else None


def _embedding(walk: Walk, eqn: Any) -> Found | None:
    rows, where, d = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
    of_rows = (d.collapsed_slice_dims, d.start_index_map, d.operand_batching_dims) == ((0,), (0,), ())
    whole = tuple(eqn.params["slice_sizes"]) == (1, *rows[1:])
    behind = tuple(d.offset_dims) == tuple(range(len(where) - 1, len(where) + len(rows) - 2))
    e = walk.made(eqn.invars[1], "broadcast_in_dim", "reshape")
    if len(rows) != 2 or not (of_rows and whole and behind) or where[-1] != 1 or e is None or literal(e.invars[0]):
        return None
    (ids,) = e.invars[:1]
    if ids.aval.shape != where[:-1]:
        return None
    same = e.primitive.name == "reshape" or tuple(e.params["broadcast_dimensions"]) == tuple(range(len(where) - 1))
    return ("embedding", {"ids": ids, "table": eqn.invars[0]}, {}) if same else None


# --- operations of one equation ---


def _matmul(_: Walk, eqn: Any) -> Found | None:
    a, b, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    held = all(is_float(x.dtype) and exact(x.dtype, out.dtype) for x in (a, b))
    if not held or not is_recorded(out.dtype.name):
        return None
    (of_a, of_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    letters = iter(string.ascii_letters)
    axes_a = [next(letters) for _ in a.shape]
    axes_b = ["" for _ in b.shape]
    for i, j in zip((*of_a, *batch_a), (*of_b, *batch_b), strict=True):
        axes_b[j] = axes_a[i]
    axes_b = [letter or next(letters) for letter in axes_b]
    free_a = [letter for i, letter in enumerate(axes_a) if i not in (*of_a, *batch_a)]
    free_b = [letter for j, letter in enumerate(axes_b) if j not in (*of_b, *batch_b)]
    of_out = [axes_a[i] for i in batch_a] + free_a + free_b
    equation = f"{''.join(axes_a)},{''.join(axes_b)}->{''.join(of_out)}"
    return "matmul", dict(zip("ab", eqn.invars, strict=True)), {"equation": equation, "dtype": out.dtype.name}


def _conv(_: Walk, eqn: Any) -> Found | None:
    p, (x, weight), out = eqn.params, eqn.invars, eqn.outvars[0].aval.dtype
    known = p["batch_group_count"] == 1 and 3 <= x.aval.ndim <= 5
    if not known or not x.aval.dtype == weight.aval.dtype == out:
        return None
    specs = zip(p["dimension_numbers"], ("NC", "OI", "NC"), strict=True)
    names = [(spec, first + string.digits) for spec, first in specs]
    layout = ",".join("".join(letters[spec.index(i)] for i in range(len(spec))) for spec, letters in names)
    numbers = {"strides": "window_strides", "dilation": "rhs_dilation", "input_dilation": "lhs_dilation"}
    options: dict[str, Any] = {k: tuple(map(int, p[name])) for k, name in numbers.items()}
    options |= {"padding": tuple((int(a), int(b)) for a, b in p["padding"]), "groups": int(p["feature_group_count"])}
    return "conv", {"x": x, "weight": weight}, options | {"layout": layout}


def _elementwise(_: Walk, eqn: Any) -> Found | None:
    if not all(map(_array, eqn.invars)):
        return None
    return eqn.primitive.name, dict(zip("ab", eqn.invars, strict=True)), {}


_Row = Callable[[Walk, Any], Found | None]
_LOSSES: dict[str, tuple[_Row, ...]] = dict.fromkeys(
    ("sub", "neg", "div", "mul", "reduce_sum", "gather", "squeeze", "reshape", "convert_element_type"),
    (_cross_entropy,),
)
"""Rows that contain a `sub` which may be a log_softmax, and whose results may be scalars."""
_WHOLES: dict[str, tuple[_Row, ...]] = {
    "div": (_softmax,),
    "sub": (_log_softmax,),
    "mul": (_gelu, _silu),
    "add": (_rotary,),
    "gather": (_embedding,),
}
_SINGLES: dict[str, tuple[_Row, ...]] = {
    "dot_general": (_matmul,),
    "conv_general_dilated": (_conv,),
    "add": (_elementwise,),
    "mul": (_elementwise,),
}


# --- modules ---


class Norm(NamedTuple):
    """A norm that a module computes: `row`, over the last `axes` axes. `parameters`: returns the module's parameters
    once it has run. `rounded`: whether operands are cast to the result's dtype before the computation."""

    row: str
    axes: int
    eps: float
    x: jax.Array
    parameters: Callable[[], dict[str, Any]]
    rounded: bool = False

    def operands(self, out: jax.Array) -> tuple[Operation | None, dict[str, Any]]:
        """Returns the operation, None if the row does not define how its result is rounded, and its operands."""
        found = {"x": self.x} | {k: v for k, v in self.parameters().items() if v is not None}
        same = self.rounded or exact(self.x.dtype, out.dtype) or self.x.dtype == out.dtype
        if same:
            found["x"] = self.x.astype(out.dtype)
        if self.rounded:
            found = {k: v.astype(out.dtype) for k, v in found.items()}
        return operation(self.row, {"axes": self.axes, "eps": self.eps}) if same else None, found


def norm(module: Any, args: Any, kwargs: Any) -> Norm | None:
    """Returns the norm that a call of a module computes; None if the module is not a norm of flax or equinox, or
    differs from the row: a row reduces over the last axes, and its parameters have the same axes."""
    if len(args) != 1 or any(v is not None for v in kwargs.values()) or not isinstance(x := args[0], jax.Array):
        return None
    for library, of in (("flax.linen", _linen), ("flax.nnx", _nnx), ("equinox.nn", _equinox)):
        for name, row in (("LayerNorm", "layer_norm"), ("RMSNorm", "rms_norm")):
            if type(module) is getattr(sys.modules.get(library), name, ()):
                return of(module, row, x) if x.ndim and is_float(x.dtype) else None
    return None


def _flax(module: Any, row: str, x: jax.Array, parameters: Callable[[], dict[str, Any]], rounded: bool) -> Norm | None:
    axes = [_last(of, x.ndim) for of in (module.reduction_axes, module.feature_axes)]
    plain = module.axis_name is None and getattr(module, "force_float32_reductions", True)
    if not axes[0] or axes[0] != axes[1] or not plain or not isinstance(module.epsilon, int | float):
        return None
    return Norm(row, axes[0], float(module.epsilon), x, parameters, rounded)


def _last(axes: Any, count: int) -> int | None:
    """Returns the number of axes if they are the last ones of `count`, in order, else None."""
    found = [a % count for a in (axes if isinstance(axes, tuple | list) else (axes,))]
    return len(found) if found == list(range(count - len(found), count)) else None


def _linen(module: Any, row: str, x: jax.Array) -> Norm | None:
    def parameters() -> dict[str, Any]:
        held = module.variables.get("params", {})
        found = {"weight": held.get("scale"), "bias": held.get("bias")}
        return {k: next(iter(jax.tree.leaves(v)), None) for k, v in found.items()}  # flax may box a parameter

    return _flax(module, row, x, parameters, False)


def _nnx(module: Any, row: str, x: jax.Array) -> Norm | None:
    def parameters() -> dict[str, Any]:
        found = {"weight": module.scale, "bias": getattr(module, "bias", None)}
        return {k: v if v is None else v.get_value() for k, v in found.items()}

    of_flax = getattr(module.promote_dtype, "__module__", "").startswith("flax.")
    return _flax(module, row, x, parameters, True) if of_flax else None


def _equinox(module: Any, row: str, x: jax.Array) -> Norm | None:
    if x.shape != module.shape or (row == "rms_norm" and module.bias is not None):
        return None
    found = {"weight": module.weight, "bias": module.bias}
    return Norm(row, x.ndim, float(module.eps), x, lambda: found)
