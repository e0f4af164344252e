"""Evaluates a traced function, and observes or replaces the arrays of its taps.

Sites without taps are the calls of diptych's ops, names of `checkpoint_name`, products in functions without modules,
and JAX's own operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.errors import UnsupportedError
from diptych.jax.jaxprs.bodies import Body, Refs
from diptych.jax.jaxprs.flat import INLINE, JIT, jaxprs, unplaced
from diptych.jax.jaxprs.interpret import Interpreter, Known, Made, bound
from diptych.jax.jaxprs.placed import varying, whole
from diptych.jax.primitives.ffi import target
from diptych.lab.jax import functions, own_ops
from diptych.lab.jax.forward import around, forward_code, transforms
from diptych.lab.jax.functions import Function
from diptych.lab.jax.sites import Observed
from diptych.lab.jax.tap_primitives import ROW, SCOPE, called_p, tangent_p, tap_p

Array = jax.Array

_RECOMPUTED = "rematted_computation"  # the scope that jax.checkpoint gives to recomputed equations
_OP = target("")
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


class Where(NamedTuple):
    """The place of an equation in a traced function.

    `module`: the name of the innermost module around it, None outside of modules. `scopes`: the user's named scopes
    around it. `recomputed`: whether backward code computes it again. `closed`: whether it is backward code, or inside
    of an operation that is a site. `after`, `needed`: see `forward_code`, for the jaxpr that is evaluated. `outer`: see
    `functions.recognized`. `function`: the operation of JAX's own that ends in the equation.
    """

    module: str | None = None
    scopes: tuple[str, ...] = ()
    recomputed: bool = False
    closed: bool = False
    after: tuple[bool, ...] = ()
    needed: tuple[bool, ...] = ()
    outer: Mapping[Any, Any] = {}
    function: Function | None = None

    def at(self, eqn: Any) -> Where:
        stack = eqn.source_info.name_stack.stack
        if unknown := {type(s).__name__ for s in stack} - {"Scope", "Transform"}:
            raise UnsupportedError(
                f"capture: JAX {jax.__version__} has scopes of a kind that this diptych does not know, {min(unknown)}; "
                "use a version of JAX that diptych supports"
            )
        names = [s.name for s in stack if type(s).__name__ == "Scope"]
        module = next((n[len(SCOPE) :] for n in reversed(names) if n.startswith(SCOPE)), self.module)
        own = tuple(n for n in names if not n.startswith(SCOPE) and n not in (_RECOMPUTED, "checkpoint", ROW))
        closed = self.closed or ROW in names or "transpose" in transforms(eqn)
        return Where(module, self.scopes + own, self.recomputed or _RECOMPUTED in names, closed)

    @property
    def open(self) -> bool:
        """Whether JAX's own operations are sites here."""
        return not self.recomputed and not self.closed

    def name(self, what: str) -> str:
        path = self.module or "/".join(self.scopes)
        return f"{path}/{what}" if path else what


class Observer(Interpreter):
    """Evaluates one program and observes its sites.

    **Arguments:** `is_site(name, dtype)`: returns whether an array is observed. `observe(x, number, quantized)`:
    returns the arrays to record for the leaf with this number; see `_leaf`. `products`: whether products are sites, as
    in a function without modules. `operation(op, options)`: returns the operation of a diptych op whose operands are
    all observed, as leaves hold it; None in its place means that ops are no sites. `of_jax`: whether JAX's own
    operations are sites too. `replace(x, number, at)`: returns the array with which the program continues in place of a
    tap's array; `at`: the iteration numbers of the scans around it. If it is given, functions under `jax.jit` become
    parts of the program.
    """

    def __init__(
        self,
        is_site: Callable[[str, str], bool],
        observe: Callable[[Array, int, Any], list[Array]],
        products: bool,
        operation: Callable[[str, dict[str, Any]], Any] | None,
        of_jax: bool = False,
        replace: Callable[[Array, int, tuple[Array, ...]], Array] | None = None,
    ) -> None:
        super().__init__(counted=replace is not None)
        self._is_site, self._observe, self._products = is_site, observe, products
        self._operation, self._of_jax, self._replace = operation, of_jax, replace

    def program(self, closed: Any, args: Sequence[Any]) -> tuple[list[Any], list[Array], Body]:
        """Returns the function's results, the observed arrays, and the body that describes them."""
        return super().program(closed, args, Where())

    # --- the choice of sites ---

    def places(self, jaxpr: Any, where: Where) -> Iterator[Where]:
        forward, found = None, {}
        if self._of_jax and where.open:
            forward = forward_code(jaxpr, where.after, where.needed)
            found = functions.recognized(jaxpr, forward.equations, where.outer)
        for i, eqn in enumerate(jaxpr.eqns):
            here = where.at(eqn)
            if forward is not None:
                after, needed = forward.inside(eqn)
                here = here._replace(after=after, needed=needed, outer=around(eqn, jaxpr, where.outer))
            yield here._replace(function=found[i]) if i in found and here.open else here

    def is_part(self, eqn: Any, where: Where) -> bool:
        """Returns whether a called function becomes part of its caller, since JAX's own operations may extend across
        calls. A call under `jax.jit` that fixes the placement of its results remains a call."""
        if eqn.primitive.name not in (*JIT, *INLINE):
            return False
        here = where.at(eqn)
        open = self._of_jax and here.open
        if eqn.primitive.name in JIT and not (self._replace or (open and unplaced(eqn.params))):
            return False
        return open or self.contains(eqn, here)

    def is_own(self, eqn: Any, where: Where) -> bool:
        name = eqn.primitive.name
        return (
            eqn.primitive in (tap_p, called_p)
            or name == "name"
            or self._is_op(eqn)
            or (self._products and name in _PRODUCTS)
            or (self._of_jax and where.open and functions.possible(eqn))
        )

    def refuse(self, bodies: Sequence[Any], where: str) -> None:
        """**Raises** NotImplementedError if bodies contain sites. Products and names are allowed, and then not
        observed."""
        if any(map(_marked, bodies)):
            raise UnsupportedError(
                f"capture: sites inside of {where} are not supported; call the modules outside of it"
            )

    def _named(self, eqn: Any, where: Where) -> bool:
        """Returns whether an equation is a site without a tap: a `checkpoint_name`, or a product outside of modules."""
        if eqn.primitive.name == "name":
            return not eqn.params["name"].startswith("diptych")
        return self._products and where.module is None and eqn.primitive.name in _PRODUCTS

    def _is_op(self, eqn: Any) -> bool:
        return self._operation is not None and eqn.primitive.name.startswith(_OP)

    # --- equations ---

    def equation(self, eqn: Any, known: Known, where: Where, made: Made) -> tuple[list[Any], list[Refs]]:
        if where.function is not None:
            return self._function(eqn, known, where.function, where, made)
        ins, refs = [known.value(v) for v in eqn.invars], [known.refs(v) for v in eqn.invars]
        if eqn.primitive is tangent_p:
            return ins, refs
        if eqn.primitive is tap_p:
            return self._tapped(eqn, ins[0], refs[0], known, where, made)
        if eqn.primitive is called_p:
            return ins[:1], [refs[0] if where.recomputed else self._called(eqn.params, ins, refs, where, made)]
        if self._is_op(eqn) and not where.recomputed:
            return self._op(eqn, ins, refs, where, made)
        outs, of_outs = super().equation(eqn, known, where, made)
        if where.recomputed or not self._named(eqn, where):
            return outs, of_outs
        if eqn.primitive.name == "name":
            return outs, [self._leaf(outs[0], where.name(eqn.params["name"]), "activation", of_outs[0], made)]
        return outs, [self._leaf(outs[0], where.name(f"{eqn.primitive.name}.out"), "result", of_outs[0], made)]

    def _tapped(self, eqn: Any, x: Any, refs: Refs, known: Known, where: Where, made: Made) -> Any:
        kind, number = eqn.params["kind"], self.leaves
        if where.recomputed and not kind.endswith("_grad"):
            found = refs
        else:
            found = self._leaf(x, eqn.params["name"], kind, refs, made, eqn.params)
            x = self._replaced(x, eqn.params["order"], number)
        if kind == "parameter":  # the model may use the parameter itself, the tap's operand
            known.come_from(eqn.invars, [found])
        return [x], [found]

    def _op(self, eqn: Any, ins: list[Any], refs: list[Refs], where: Where, made: Made) -> Any:
        op, params = eqn.primitive.name.removeprefix(_OP), eqn.params
        operands, results = own_ops.names(op, params, len(ins), len(eqn.outvars))

        def observed(x: Any, name: str, kind: str, refs: Refs, operation: Any = None, copy: Any = None) -> Refs:
            x, of = _stored(x, own_ops.stored_dtype(params, name)), None if copy is None else (ins[0], copy)
            return self._leaf(x, where.name(f"{op}.{name}"), kind, refs, made, operation=operation, quantized=of)

        of_operands = [observed(x, n, "operand", r) for x, n, r in zip(ins, operands, refs, strict=True)]
        outs, every = bound(eqn.primitive, ins, params), frozenset().union(*of_operands)
        options = own_ops.options(op, params, outs)
        whole = all(leaf is not r for leaf, r in zip(of_operands, refs, strict=True))
        operation = self._operation(op, options) if self._operation and whole and options is not None else None
        named = dict(zip(results, outs, strict=True))
        given = dict(zip(operands, ins, strict=True))  # the amaxes of copies may be operands
        copies = own_ops.copies(op, params, given | named)
        return outs, [observed(x, n, "result", every, operation, copies.get(n)) for n, x in named.items()]

    def _function(self, eqn: Any, known: Known, function: Function, where: Where, made: Made) -> Any:
        first = len(made.nodes)
        refs = [
            self._leaf(known.value(v), where.name(f"{function.name}.{n}"), "operand", known.refs(v), made)
            for n, v in function.operands.items()
        ]
        operation = function.operation if len(made.nodes) - first == len(refs) else None
        ins = [known.value(v) for v in eqn.invars]
        outs, every = bound(eqn.primitive, ins, eqn.params), frozenset().union(*refs)
        name = where.name(f"{function.name}.out")
        return outs, [self._leaf(outs[0], name, "result", every, made, operation=operation)]

    def _called(self, p: dict[str, Any], ins: list[Any], refs: list[Refs], where: Where, made: Made) -> Refs:
        """Observes a module's operation. If the module's parameters differ between the examples of a `vmap`, the
        operation cannot be computed again, and its result has none."""
        taps, first = [{"order": order, "tap": None} for order in p["orders"]], len(made.nodes)
        names = [where.name(f"{p['name']}.{n}") for n in ("out", *p["operands"])]
        of_operands = [
            self._leaf(x, n, "operand", r, made, tap)
            for x, n, r, tap in list(zip(ins, names, refs, taps, strict=True))[1:]
        ]
        plain = [np.ndim(x) for x in ins[2:]] == list(p["ranks"][2:])
        operation = p["operation"] if plain and len(made.nodes) - first == len(of_operands) else None
        every = frozenset().union(*of_operands)
        return self._leaf(ins[0], names[0], "result", every, made, taps[0], operation)

    def _leaf(
        self,
        x: Any,
        name: str,
        kind: str,
        refs: Refs,
        made: Made,
        tap: Any = None,
        operation: Any = None,
        quantized: Any = None,
    ) -> Refs:
        """Observes an array. Returns its origin: the new leaf, or `refs` if the array is no site.

        `quantized`: for a payload, its original and the copy that it belongs to.
        """
        dtype = str(jnp.result_type(x)) if hasattr(x, "dtype") else ""
        if not dtype or not self._is_site(name, dtype):
            return refs
        x = jnp.asarray(x)
        axes = frozenset(varying(x))
        if tap is not None and tap["order"] != tuple(range(x.ndim)):
            x = x.transpose(tap["order"])
        leaf = Observed(
            refs,
            self.leaves,
            axes=axes,
            name=name,
            kind=kind,
            shape=x.shape,
            dtype=dtype,
            tap=tap and tap["tap"],
            operation=operation,
        )
        self.leaves += 1
        made.add(leaf, self._observe(whole(x), leaf.number, quantized))
        return frozenset([leaf])

    def _replaced(self, x: Any, order: tuple[int, ...], number: int) -> Any:
        """Returns the replacement of a tap's array, or the array itself. `number`: the number of its leaf, if it has
        any."""
        if self._replace is None or self.leaves == number:
            return x
        return self._replace(jnp.asarray(x).transpose(order), number, self.at).transpose(np.argsort(order))


def _marked(jaxpr: Any) -> bool:
    """Returns whether a jaxpr has sites that must be observed: all but products and names."""
    return any(
        e.primitive in (tap_p, called_p)
        or e.primitive.name.startswith(_OP)
        or any(map(_marked, jaxprs(e.params.values())))
        for e in jaxpr.eqns
    )


def _stored(x: Any, dtype: str | None) -> Any:
    """Returns bytes as the dtype that they store, and any other array itself."""
    return x if dtype is None or x.dtype == dtype else jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))
