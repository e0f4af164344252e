"""Evaluates a traced function equation by equation, with an observation in the place of each tap, and a replacement.

Observations become extra results: of the program, and of the equations with jaxprs of their own that contain them. All
other equations are bound as they are. The jaxpr has been differentiated and batched already, so that derivative rules
in it are not needed any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.sharding import PartitionSpec

from diptych.common.errors import UnsupportedError
from diptych.jax.graph import ops
from diptych.jax.graph.flat import flat, unplaced, unspecified
from diptych.jax.graph.forward import INLINE, around, forward_code, jaxprs, scanned, transforms
from diptych.jax.graph.placed import blank, meets_over, varying, whole
from diptych.jax.graph.sites import Across, Body, Compound, Leaf, Refs
from diptych.jax.graph.taps import ROW, SCOPE, called_p, tangent_p, tap_p
from diptych.jax.primitives.ffi import target

Array = jax.Array

_RECOMPUTED = "rematted_computation"  # the scope that jax.checkpoint gives to what backward computes again
_JIT = ("jit", "pjit")
_OP = target("")


class Where(NamedTuple):
    """Where an equation of a jaxpr stands. `module`: the name of the innermost module around it, None outside of all
    modules. `scopes`: the named scopes of the user around it. `recomputed`: whether forward has observed it already.
    `closed`: whether it is backward code, or inside of an operation that is a site itself. `after`, `needed`: as
    `forward_code` has them, of the jaxpr that is evaluated. `outer`: as `Functions` have it."""

    module: str | None = None
    scopes: tuple[str, ...] = ()
    recomputed: bool = False
    closed: bool = False
    after: tuple[bool, ...] = ()
    needed: tuple[bool, ...] = ()
    outer: Mapping[Any, Any] = {}

    def at(self, eqn: Any) -> Where:
        stack = eqn.source_info.name_stack.stack
        if unknown := {type(s).__name__ for s in stack} - {"Scope", "Transform"}:
            raise UnsupportedError(f"capture: JAX {jax.__version__} names scopes by {min(unknown)}, which is not known")
        names = [s.name for s in stack if type(s).__name__ == "Scope"]
        module = next((n[len(SCOPE) :] for n in reversed(names) if n.startswith(SCOPE)), self.module)
        own = tuple(n for n in names if not n.startswith(SCOPE) and n not in (_RECOMPUTED, "checkpoint", ROW))
        closed = self.closed or ROW in names or "transpose" in transforms(eqn)
        return Where(module, self.scopes + own, self.recomputed or _RECOMPUTED in names, closed)

    @property
    def open(self) -> bool:
        """Whether functions of JAX are sites here."""
        return not self.recomputed and not self.closed

    def name(self, what: str) -> str:
        path = self.module or "/".join(self.scopes)
        return f"{path}/{what}" if path else what


class Function(NamedTuple):
    """An operation of JAX's own that ends in one equation of a jaxpr, and may begin in earlier ones.

    `name`: of its row in the lab's table. `operation`: what `Leaf.operation` holds. `operands`: the jaxpr's variables,
    by the row's names of operands.
    """

    name: str
    operation: Any
    operands: dict[str, Any]


class Functions(Protocol):
    """Recognizes operations of JAX's own."""

    def possible(self, eqn: Any) -> bool:
        """Whether an equation may be the last one of an operation."""
        ...

    def recognized(self, jaxpr: Any, equations: frozenset[int], outer: Mapping[Any, Any]) -> dict[int, Function]:
        """Returns the operations that equations at these positions compute, by the position of their last one.

        `outer`: the equations around this jaxpr, by the variables that they compute; also of its arguments.
        """
        ...


class Evaluation(NamedTuple):
    outs: list[Any]
    refs: list[Refs]
    nodes: list[Leaf | Compound]
    extras: list[Array]


class Interpreter:
    """Evaluates one program.

    **Arguments:** `is_site(name, dtype)`: whether an array is observed. `observe(x, number, quantized)`: the arrays
    that are recorded of the leaf with this number; see `_leaf`. `products`: whether products are sites, as in a
    function without modules.
    `operation(op, options)`: what leaves have of an op of diptych whose operands are all observed; None if no operand
    or result of one is a site.
    `functions`: recognizes JAX's own operations, if these are sites too.
    `replace(x, number, at)`: what the program goes on with in the place of a tap's array, as it is recorded; `at`: the
    numbers of the iterations of the scans around it. With it, functions under `jax.jit` are parts of the program.
    """

    def __init__(
        self,
        is_site: Callable[[str, str], bool],
        observe: Callable[[Array, int, Any], list[Array]],
        products: bool,
        operation: Callable[[str, dict[str, Any]], Any] | None,
        functions: Functions | None = None,
        replace: Callable[[Array, int, tuple[Array, ...]], Array] | None = None,
    ) -> None:
        self._is_site, self._observe, self._products = is_site, observe, products
        self._operation, self._functions = operation, functions
        self._replace = replace
        self._leaves = 0
        self._at: tuple[Array, ...] = ()

    def program(self, closed: Any, args: Sequence[Any]) -> tuple[list[Any], list[Array], Body]:
        """Returns the function's results, the observed arrays, and what they are."""
        self._leaves = 0
        refs = [frozenset([i]) for i in range(len(args))]
        found = self._evaluate(closed.jaxpr, closed.consts, args, refs, Where())
        return found.outs, found.extras, Body(found.nodes, found.refs, len(found.extras))

    def _evaluate(self, jaxpr: Any, consts: Any, args: Any, arg_refs: Sequence[Refs], where: Where) -> Evaluation:
        jaxpr, consts = flat(jaxpr, consts, lambda eqn: self._is_part(eqn, where))
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        refs: dict[Any, Refs] = dict(zip(jaxpr.invars, arg_refs, strict=True))
        made = _Made([], [])
        literal = lambda v: hasattr(v, "val")  # noqa: E731
        of = lambda v: frozenset() if literal(v) else refs.get(v, frozenset())  # noqa: E731
        value = lambda v: v.val if literal(v) else values[v]  # noqa: E731
        forward, functions = None, {}
        if self._functions is not None and where.open:
            forward = forward_code(jaxpr, where.after, where.needed)
            functions = self._functions.recognized(jaxpr, forward.equations, where.outer)
        for i, eqn in enumerate(jaxpr.eqns):
            ins, here = [value(v) for v in eqn.invars], where.at(eqn)
            if forward is not None:
                after, needed = forward.inside(eqn)
                here = here._replace(after=after, needed=needed, outer=around(eqn, jaxpr, where.outer))
            with getattr(eqn.ctx, "manager", contextlib.nullcontext()):
                if (function := functions.get(i)) is not None and here.open:
                    given = [(name, value(v), of(v)) for name, v in function.operands.items()]
                    outs, out_refs = self._function(eqn, ins, function, given, here, made)
                else:
                    outs, out_refs = self._equation(eqn, ins, [of(v) for v in eqn.invars], here, made)
            values.update(zip(eqn.outvars, outs, strict=True))
            if eqn.primitive is tap_p and eqn.params["kind"] == "parameter":  # the model may use its operand
                refs.update((v, r) for v, r in zip(eqn.invars, out_refs, strict=True) if not literal(v))
            refs.update(zip(eqn.outvars, out_refs, strict=True))
        outs = [v.val if literal(v) else values[v] for v in jaxpr.outvars]
        return Evaluation(outs, [of(v) for v in jaxpr.outvars], made.nodes, made.extras)

    def _equation(self, eqn: Any, ins: list[Any], refs: list[Refs], where: Where, made: _Made) -> Any:
        prim, params = eqn.primitive, eqn.params
        if prim is tangent_p:
            return ins, refs
        if prim is tap_p:
            forward = not params["kind"].endswith("_grad")
            if forward and where.recomputed:
                return ins, refs
            number = self._leaves
            found = self._leaf(ins[0], params["name"], params["kind"], refs[0], made, params)
            return [self._replaced(ins[0], params["order"], number)], [found]
        if prim is called_p:
            return ins[:1], [refs[0] if where.recomputed else self._called(params, ins, refs, where, made)]
        if self._has_sites(eqn, where.open):
            return self._compound(eqn, ins, refs, where, made)
        if self._is_op(eqn) and not where.recomputed:
            return self._op(eqn, ins, refs, where, made)
        outs = _bound(prim, ins, params)
        every: Refs = frozenset().union(*refs)
        if met := meets_over(eqn):
            every = frozenset(Across(r, met) for r in every)
        if where.recomputed or not self._named(eqn, where):
            return outs, [every] * len(outs)
        if prim.name == "name":
            return outs, [self._leaf(outs[0], where.name(params["name"]), "activation", every, made)]
        return outs, [self._leaf(outs[0], where.name(f"{prim.name}.out"), "result", every, made)]

    def _named(self, eqn: Any, where: Where) -> bool:
        """Whether an equation is a site without a tap: `checkpoint_name`, and products of functions without modules."""
        if eqn.primitive.name == "name":
            return not eqn.params["name"].startswith("diptych")
        return self._products and where.module is None and eqn.primitive.name in _PRODUCTS

    def _is_op(self, eqn: Any) -> bool:
        return self._operation is not None and eqn.primitive.name.startswith(_OP)

    def _op(self, eqn: Any, ins: list[Any], refs: list[Refs], where: Where, made: _Made) -> Any:
        op, params = eqn.primitive.name.removeprefix(_OP), eqn.params
        operands, results = ops.names(op, params, len(ins), len(eqn.outvars))

        def observed(x: Any, name: str, kind: str, refs: Refs, operation: Any = None, copy: Any = None) -> Refs:
            x, of = _stored(x, ops.stored_dtype(params, name)), None if copy is None else (ins[0], copy)
            return self._leaf(x, where.name(f"{op}.{name}"), kind, refs, made, operation=operation, quantized=of)

        of_operands = [observed(x, n, "operand", r) for x, n, r in zip(ins, operands, refs, strict=True)]
        outs, every = _bound(eqn.primitive, ins, params), frozenset().union(*of_operands)
        options = ops.options(op, params, outs)
        whole = all(leaf is not r for leaf, r in zip(of_operands, refs, strict=True))
        operation = self._operation(op, options) if self._operation and whole and options is not None else None
        named = dict(zip(results, outs, strict=True))
        given = dict(zip(operands, ins, strict=True))  # amaxes may be operands
        copies = ops.copies(op, params, given | named)
        return outs, [observed(x, n, "result", every, operation, copies.get(n)) for n, x in named.items()]

    def _function(self, eqn: Any, ins: list[Any], function: Function, given: Any, where: Where, made: _Made) -> Any:
        first = len(made.nodes)
        refs = [self._leaf(x, where.name(f"{function.name}.{n}"), "operand", r, made) for n, x, r in given]
        operation = function.operation if len(made.nodes) - first == len(given) else None
        outs, every = _bound(eqn.primitive, ins, eqn.params), frozenset().union(*refs)
        name = where.name(f"{function.name}.out")
        return outs, [self._leaf(outs[0], name, "result", every, made, operation=operation)]

    def _called(self, p: dict[str, Any], ins: list[Any], refs: list[Refs], where: Where, made: _Made) -> Refs:
        """Observes a module's operation. Parameters of a module that differ between the examples of a `vmap` are no
        operands that can be given to it."""
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
        made: _Made,
        tap: Any = None,
        operation: Any = None,
        quantized: Any = None,
    ) -> Refs:
        """Observes an array. Returns where it comes from: here, or from `refs` if it is no site.

        `quantized`: of a payload, the array that was quantized and the copy that the payload belongs to.
        """
        dtype = str(jnp.result_type(x)) if hasattr(x, "dtype") else ""
        if not dtype or not self._is_site(name, dtype):
            return refs
        x = jnp.asarray(x)
        axes = frozenset(varying(x))
        if tap is not None and tap["order"] != tuple(range(x.ndim)):
            x = x.transpose(tap["order"])
        place = self._leaves, len(made.extras)
        leaf = Leaf(name, kind, x.shape, dtype, refs, *place, axes, tap and tap["tap"], operation)
        self._leaves += 1
        made.extras.extend(self._observe(whole(x), leaf.number, quantized))
        made.nodes.append(leaf)
        return frozenset([leaf])

    def _replaced(self, x: Any, order: tuple[int, ...], number: int) -> Any:
        """Returns what stands in the place of a tap's array. `number`: of its leaf, if it has one."""
        if self._replace is None or self._leaves == number:
            return x
        return self._replace(jnp.asarray(x).transpose(order), number, self._at).transpose(np.argsort(order))

    # --- equations with jaxprs ---

    def _is_part(self, eqn: Any, where: Where) -> bool:
        """Whether the equations of the function that an equation calls are looked at as those around it. Operations of
        JAX's own cross such functions. A call under `jax.jit` that says where its results are stays one."""
        if eqn.primitive.name not in (*_JIT, *INLINE):
            return False
        open = self._functions is not None and where.at(eqn).open
        if eqn.primitive.name in _JIT and not (self._replace or (open and unplaced(eqn.params))):
            return False
        return open or self._has_sites(eqn, open)

    def _has_sites(self, eqn: Any, open: bool) -> bool:
        """Whether one of the jaxprs of an equation contains a site. `open`: whether functions of JAX are sites."""
        return any(self._body_has_sites(jaxpr, open) for jaxpr in jaxprs(eqn.params.values()))

    def _body_has_sites(self, jaxpr: Any, open: bool = False) -> bool:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if eqn.primitive in (tap_p, called_p) or name == "name" or self._is_op(eqn):
                return True
            if self._products and name in _PRODUCTS:
                return True
            if open and self._functions is not None and self._functions.possible(eqn):
                return True
            if self._has_sites(eqn, open):
                return True
        return False

    def _compound(self, eqn: Any, ins: list[Any], refs: list[Refs], where: Where, made: _Made) -> Any:
        name, params = eqn.primitive.name, eqn.params
        handler = {"jit": self._jit, "pjit": self._jit, "scan": self._scan, "cond": self._cond, "while": self._while}
        handler |= {"remat2": self._remat, "checkpoint": self._remat, "shard_map": self._shard_map}
        if name not in handler:
            if any(_marked(jaxpr) for jaxpr in jaxprs(params.values())):
                raise UnsupportedError(f"capture: sites inside of JAX's primitive {name} are not supported")
            outs = _bound(eqn.primitive, ins, params)
            return outs, [frozenset().union(*refs)] * len(outs)
        return handler[name](eqn, ins, refs, where, made)

    def _body(self, jaxpr: Any, consts: Any, where: Where) -> tuple[Callable[..., Any], list[Body]]:
        """Returns a jaxpr as a function with the results (its own, observed arrays), and a list that gets its body."""
        bodies, first = [], self._leaves

        def run(*args: Any) -> Any:
            self._leaves = first  # JAX may trace a function again
            found = self._evaluate(jaxpr, consts, args, [frozenset([i]) for i in range(len(args))], where)
            bodies.append(Body(found.nodes, found.refs, len(found.extras)))
            return found.outs, found.extras

        return run, bodies

    def _inner(self, jaxpr: Any, consts: Any, where: Where) -> tuple[Any, Body]:
        """Returns a jaxpr with observed arrays as extra results."""
        run, bodies = self._body(jaxpr, consts, where)
        closed = jax.make_jaxpr(lambda *args: [x for some in run(*args) for x in some])(*(v.aval for v in jaxpr.invars))
        return closed, bodies[-1]

    def _call(self, body: Body, outs: list[Any], extras: list[Any], refs: list[Refs], made: _Made) -> Any:
        return made.add(Compound("call", [body], refs), outs, extras)

    def _jit(self, eqn: Any, ins: list[Any], refs: list[Refs], where: Where, made: _Made) -> Any:
        closed, body = self._inner(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, where)
        more = {k: (*eqn.params[k], *[v] * body.extras) for k, v in unspecified().items()}
        outs = _bound(eqn.primitive, ins, eqn.params | more | {"jaxpr": closed})
        return self._call(body, *_split(outs, body.extras), refs, made)

    def _remat(self, eqn: Any, ins: list[Any], refs: list[Refs], where: Where, made: _Made) -> Any:
        closed, body = self._inner(eqn.params["jaxpr"], (), where)
        inner = closed.jaxpr
        opened = inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars])
        outs = _bound(eqn.primitive, [*closed.consts, *ins], eqn.params | {"jaxpr": opened})
        return self._call(body, *_split(outs, body.extras), refs, made)

    def _scan(self, eqn: Any, ins: list[Any], refs: list[Refs], where: Where, made: _Made) -> Any:
        p = eqn.params
        consts, carry = scanned(p)
        run, bodies = self._body(p["jaxpr"].jaxpr, p["jaxpr"].consts, where)

        def step(state: list[Any], given: Any) -> Any:
            xs, number = given
            outer, self._at = self._at, self._at if number is None else (*self._at, number)
            outs, extras = run(*ins[:consts], *state, *xs)
            self._at = outer
            return outs[:carry], (outs[carry:], extras)

        start, xs = ins[consts : consts + carry], ins[consts + carry :]
        options = {"length": p["length"], "reverse": p["reverse"], "unroll": p["unroll"]}
        numbers = None if self._replace is None else jnp.arange(p["length"])
        state, (ys, extras) = jax.lax.scan(step, list(start), (list(xs), numbers), **options)
        numbers = {"consts": consts, "carry": carry, "length": p["length"], "reverse": p["reverse"]}
        return made.add(Compound("scan", [bodies[-1]], refs, **numbers), [*state, *ys], extras)

    def _cond(self, eqn: Any, ins: list[Any], refs: list[Refs], where: Where, made: _Made) -> Any:
        branches = [self._inner(b.jaxpr, b.consts, where) for b in eqn.params["branches"]]
        count = len(eqn.outvars)
        types = [closed.out_avals[count:] for closed, _ in branches]

        def branch(number: int) -> Any:
            closed = branches[number][0]

            def run(*args: Any) -> Any:
                results = eval_jaxpr(closed.jaxpr, closed.consts, *args)
                more = [results[count:] if i == number else map(blank, t) for i, t in enumerate(types)]
                return [*results[:count], *(x for some in more for x in some)]

            return run

        index, *operands = ins
        outs = jax.lax.switch(index, [branch(b) for b in range(len(branches))], *operands)
        first = np.cumsum([1, *map(len, types)])[:-1].tolist()
        found, extras = outs[:count], outs[count:]
        return made.add(Compound("cond", [b for _, b in branches], refs[1:], first=first), found, [index, *extras])

    def _while(self, eqn: Any, ins: list[Any], refs: list[Refs], where: Where, made: _Made) -> Any:
        p = eqn.params
        if self._body_has_sites(p["cond_jaxpr"].jaxpr) and _marked(p["cond_jaxpr"].jaxpr):
            raise UnsupportedError("capture: sites inside of the condition of a while loop are not supported")
        closed, body = self._inner(p["body_jaxpr"].jaxpr, p["body_jaxpr"].consts, where)
        a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        types, batch_axes = closed.out_avals[len(eqn.outvars) :], p["cond_jaxpr"].out_avals[0].ndim

        def going(state: Any) -> Any:
            return eval_jaxpr(p["cond_jaxpr"].jaxpr, p["cond_jaxpr"].consts, *ins[:a], *state[0])[0]

        def step(state: Any) -> Any:
            outs, extras = _split(eval_jaxpr(closed.jaxpr, closed.consts, *ins[a:b], *state[0]), body.extras)
            if batch_axes:  # of vmap: an example whose condition is false stays as it is
                go = going(state)
                expanded = [jnp.expand_dims(go, range(batch_axes, x.ndim)) for x in outs]
                outs = list(map(jnp.where, expanded, outs, state[0]))
            return outs, extras, state[2] + 1

        start = (list(ins[b:]), [blank(t) for t in types], jnp.zeros((), jnp.int32))
        outs, extras, count = jax.lax.while_loop(lambda state: going(state).any(), step, start)
        return made.add(Compound("while", [body], refs[a:], first=[1], consts=b - a), outs, [count, *extras])

    def _shard_map(self, eqn: Any, ins: list[Any], refs: list[Refs], where: Where, made: _Made) -> Any:
        """Each shard's arrays get an axis in front, over all manual axes of the mesh."""
        p = eqn.params
        mesh = p["mesh"]
        manual = p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]  # differs between versions
        axes = tuple(a for a in mesh.axis_names if a in manual)
        observing, bodies = self._body(p["jaxpr"], (), where)

        def run(*args: Any) -> Any:
            outs, extras = observing(*args)
            return outs, [x[None] for x in extras]

        specs = list(p["out_specs"]), PartitionSpec(axes)
        outs, extras = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=tuple(p["in_specs"]),
            out_specs=specs,
            axis_names=set(axes),
            check_vma=p["check_vma"],
        )(*ins)
        if not p["check_vma"]:  # JAX does not know what varies
            for leaf in bodies[-1].leaves():
                leaf.axes |= set(axes)
        sizes = tuple((a, mesh.shape[a]) for a in axes)
        return made.add(Compound("shard", [bodies[-1]], refs, mesh=sizes), outs, extras)


class _Made(NamedTuple):
    """What the equations of a jaxpr have observed so far."""

    nodes: list[Any]
    extras: list[Any]

    def add(self, node: Compound, outs: Sequence[Any], extras: Sequence[Any]) -> tuple[list[Any], list[Refs]]:
        node.start = len(self.extras)
        self.nodes.append(node)
        self.extras.extend(extras)
        return list(outs), [frozenset([(node, i)]) for i in range(len(outs))]


_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


def _marked(jaxpr: Any) -> bool:
    """Whether a jaxpr has sites that must be observed: all but products and names."""
    return any(
        e.primitive in (tap_p, called_p)
        or e.primitive.name.startswith(_OP)
        or any(map(_marked, jaxprs(e.params.values())))
        for e in jaxpr.eqns
    )


def _bound(prim: Any, ins: list[Any], params: dict[str, Any]) -> list[Any]:
    bound = prim.get_bind_params(params)
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)  # the form differs between versions
    outs = prim.bind(*subfuns, *ins, **params)
    return list(outs) if prim.multiple_results else [outs]


def _split(outs: Sequence[Any], extras: int) -> tuple[list[Any], list[Any]]:
    at = len(outs) - extras
    return list(outs[:at]), list(outs[at:])


def _stored(x: Any, dtype: str | None) -> Any:
    """Returns bytes as the dtype that they are stored in, other arrays as they are."""
    return x if dtype is None or x.dtype == dtype else jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))
