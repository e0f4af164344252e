"""Evaluates a traced function equation by equation. A subclass evaluates some equations itself, with extra results.

Extra results become results of the program, and of the enclosing equations with jaxprs. All other equations are bound
unchanged. The jaxpr has been differentiated and batched already, so that its derivative rules are no longer needed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.sharding import PartitionSpec

from diptych.common.errors import UnsupportedError
from diptych.jax.jaxprs.bodies import Across, Body, Compound, Leaf, Refs
from diptych.jax.jaxprs.flat import INLINE, flat, jaxprs, literal, scanned, unspecified
from diptych.jax.jaxprs.placed import blank, meets_over

Array = jax.Array


class Known:
    """The values of a jaxpr's variables, and their origins."""

    def __init__(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        self._values = dict(zip(variables, values, strict=True))
        self._refs: dict[Any, Refs] = {}

    def value(self, v: Any) -> Any:
        return v.val if literal(v) else self._values[v]

    def refs(self, v: Any) -> Refs:
        return frozenset() if literal(v) else self._refs.get(v, frozenset())

    def add(self, variables: Iterable[Any], values: Iterable[Any]) -> None:
        self._values.update(zip(variables, values, strict=True))

    def come_from(self, variables: Iterable[Any], refs: Iterable[Refs]) -> None:
        self._refs.update((v, r) for v, r in zip(variables, refs, strict=True) if not literal(v))


class Made(NamedTuple):
    """The extra results of a jaxpr's equations so far."""

    nodes: list[Leaf | Compound]
    extras: list[Array]

    def add(self, node: Leaf | Compound, extras: Sequence[Any]) -> None:
        node.start = len(self.extras)
        self.nodes.append(node)
        self.extras.extend(extras)

    def compound(self, node: Compound, outs: Sequence[Any], extras: Sequence[Any]) -> tuple[list[Any], list[Refs]]:
        """Adds an equation with jaxprs. Returns its results and their origins."""
        self.add(node, extras)
        return list(outs), [frozenset([(node, i)]) for i in range(len(outs))]


class Evaluation(NamedTuple):
    outs: list[Any]
    refs: list[Refs]
    made: Made

    @property
    def body(self) -> Body:
        return Body(self.made.nodes, self.refs, len(self.made.extras))


class Interpreter:
    """Evaluates one program. A subclass must define `is_own`; it usually extends `equation`. A `place` is the
    subclass's own description of the position of a jaxpr or an equation, as `places` returns it.

    `leaves`: the number of the next leaf. `at`: the iteration numbers of the scans around the equation if `counted`,
    else ().
    """

    def __init__(self, counted: bool = False) -> None:
        self.leaves, self.counted = 0, counted
        self.at: tuple[Array, ...] = ()

    def program(self, closed: Any, args: Sequence[Any], place: Any = None) -> tuple[list[Any], list[Array], Body]:
        """Returns the function's results, the extra results, and the body that describes these."""
        self.leaves = 0
        found = self._evaluate(closed.jaxpr, closed.consts, args, place)
        return found.outs, found.made.extras, found.body

    # --- methods of a subclass ---

    def is_own(self, eqn: Any, place: Any) -> bool:
        """Returns whether the subclass evaluates an equation itself. `place`: that of the equation, or of a jaxpr
        around it."""
        raise NotImplementedError

    def is_part(self, eqn: Any, place: Any) -> bool:
        """Returns whether a call is inlined, so that the called function's equations are evaluated like those around
        the call. `place`: that of the jaxpr that contains the call."""
        return eqn.primitive.name in INLINE and self.contains(eqn, place)

    def places(self, jaxpr: Any, place: Any) -> Iterable[Any]:
        """Returns the places of a jaxpr's equations. `place`: that of the jaxpr."""
        return itertools.repeat(place, len(jaxpr.eqns))

    def refuse(self, bodies: Sequence[Any], where: str) -> None:
        """**Raises** UnsupportedError, since these jaxprs can only be evaluated unchanged and contain the subclass's
        own equations. A subclass may accept some of these. `where`: names the place in the message."""
        raise UnsupportedError(
            f"{type(self).__name__}: its equations inside of {where} are not supported; compute them outside of it"
        )

    def equation(self, eqn: Any, known: Known, place: Any, made: Made) -> tuple[list[Any], list[Refs]]:
        """Evaluates an equation. Returns its results and their origins."""
        ins, refs = [known.value(v) for v in eqn.invars], [known.refs(v) for v in eqn.invars]
        if self.contains(eqn, place):
            return self._compound(eqn, ins, refs, place, made)
        every: Refs = frozenset().union(*refs)
        if met := meets_over(eqn):
            every = frozenset(Across(r, met) for r in every)
        return bound(eqn.primitive, ins, eqn.params), [every] * len(eqn.outvars)

    # --- evaluation ---

    def contains(self, eqn: Any, place: Any) -> bool:
        """Returns whether a jaxpr of an equation contains an equation that the subclass evaluates itself."""
        return any(self._body_contains(jaxpr, place) for jaxpr in jaxprs(eqn.params.values()))

    def _body_contains(self, jaxpr: Any, place: Any) -> bool:
        return any(self.is_own(e, place) or self.contains(e, place) for e in jaxpr.eqns)

    def _evaluate(self, jaxpr: Any, consts: Any, args: Sequence[Any], place: Any) -> Evaluation:
        jaxpr, consts = flat(jaxpr, consts, lambda eqn: self.is_part(eqn, place))
        known, made = Known([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]), Made([], [])
        known.come_from(jaxpr.invars, [frozenset([i]) for i in range(len(args))])
        for eqn, here in zip(jaxpr.eqns, self.places(jaxpr, place), strict=True):
            with getattr(eqn.ctx, "manager", contextlib.nullcontext()):
                outs, refs = self.equation(eqn, known, here, made)
            known.add(eqn.outvars, outs)
            known.come_from(eqn.outvars, refs)
        return Evaluation([known.value(v) for v in jaxpr.outvars], [known.refs(v) for v in jaxpr.outvars], made)

    # --- equations with jaxprs ---

    def _compound(self, eqn: Any, ins: list[Any], refs: list[Refs], place: Any, made: Made) -> Any:
        name, params = eqn.primitive.name, eqn.params
        handler = {"jit": self._jit, "pjit": self._jit, "scan": self._scan, "cond": self._cond, "while": self._while}
        handler |= {"remat2": self._remat, "checkpoint": self._remat, "shard_map": self._shard_map}
        if name not in handler:
            self.refuse(jaxprs(params.values()), f"JAX's primitive {name}")
            outs = bound(eqn.primitive, ins, params)
            return outs, [frozenset().union(*refs)] * len(outs)
        return handler[name](eqn, ins, refs, place, made)

    def _body(self, jaxpr: Any, consts: Any, place: Any) -> tuple[Callable[..., Any], list[Body]]:
        """Returns a jaxpr as a function that returns (results, extra results), and a list that receives its body when
        it runs."""
        bodies, first = [], self.leaves

        def run(*args: Any) -> Any:
            self.leaves = first  # JAX may trace a function several times
            found = self._evaluate(jaxpr, consts, args, place)
            bodies.append(found.body)
            return found.outs, found.made.extras

        return run, bodies

    def _inner(self, jaxpr: Any, consts: Any, place: Any) -> tuple[Any, Body]:
        """Returns a jaxpr with extra results, and its body."""
        run, bodies = self._body(jaxpr, consts, place)
        closed = jax.make_jaxpr(lambda *args: [x for some in run(*args) for x in some])(*(v.aval for v in jaxpr.invars))
        return closed, bodies[-1]

    def _call(self, body: Body, outs: list[Any], extras: list[Any], refs: list[Refs], made: Made) -> Any:
        return made.compound(Compound("call", [body], refs), outs, extras)

    def _jit(self, eqn: Any, ins: list[Any], refs: list[Refs], place: Any, made: Made) -> Any:
        closed, body = self._inner(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, place)
        more = {k: (*eqn.params[k], *[v] * body.extras) for k, v in unspecified().items()}
        outs = bound(eqn.primitive, ins, eqn.params | more | {"jaxpr": closed})
        return self._call(body, *_split(outs, body.extras), refs, made)

    def _remat(self, eqn: Any, ins: list[Any], refs: list[Refs], place: Any, made: Made) -> Any:
        closed, body = self._inner(eqn.params["jaxpr"], (), place)
        inner = closed.jaxpr
        opened = inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars])
        outs = bound(eqn.primitive, [*closed.consts, *ins], eqn.params | {"jaxpr": opened})
        return self._call(body, *_split(outs, body.extras), refs, made)

    def _scan(self, eqn: Any, ins: list[Any], refs: list[Refs], place: Any, made: Made) -> Any:
        p = eqn.params
        consts, carry = scanned(p)
        run, bodies = self._body(p["jaxpr"].jaxpr, p["jaxpr"].consts, place)

        def step(state: list[Any], given: Any) -> Any:
            xs, number = given
            outer, self.at = self.at, self.at if number is None else (*self.at, number)
            outs, extras = run(*ins[:consts], *state, *xs)
            self.at = outer
            return outs[:carry], (outs[carry:], extras)

        start, xs = ins[consts : consts + carry], ins[consts + carry :]
        options = {"length": p["length"], "reverse": p["reverse"], "unroll": p["unroll"]}
        numbers = jnp.arange(p["length"]) if self.counted else None
        state, (ys, extras) = jax.lax.scan(step, list(start), (list(xs), numbers), **options)
        numbers = {"consts": consts, "carry": carry, "length": p["length"], "reverse": p["reverse"]}
        return made.compound(Compound("scan", [bodies[-1]], refs, **numbers), [*state, *ys], extras)

    def _cond(self, eqn: Any, ins: list[Any], refs: list[Refs], place: Any, made: Made) -> Any:
        branches = [self._inner(b.jaxpr, b.consts, place) for b in eqn.params["branches"]]
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
        return made.compound(Compound("cond", [b for _, b in branches], refs[1:], first=first), found, [index, *extras])

    def _while(self, eqn: Any, ins: list[Any], refs: list[Refs], place: Any, made: Made) -> Any:
        p = eqn.params
        if self._body_contains(p["cond_jaxpr"].jaxpr, place):
            self.refuse([p["cond_jaxpr"].jaxpr], "the condition of a while loop")
        closed, body = self._inner(p["body_jaxpr"].jaxpr, p["body_jaxpr"].consts, place)
        a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        types, batch_axes = closed.out_avals[len(eqn.outvars) :], p["cond_jaxpr"].out_avals[0].ndim

        def going(state: Any) -> Any:
            return eval_jaxpr(p["cond_jaxpr"].jaxpr, p["cond_jaxpr"].consts, *ins[:a], *state[0])[0]

        def step(state: Any) -> Any:
            outs, extras = _split(eval_jaxpr(closed.jaxpr, closed.consts, *ins[a:b], *state[0]), body.extras)
            if batch_axes:  # under vmap: an example whose condition is false keeps its state
                go = going(state)
                expanded = [jnp.expand_dims(go, range(batch_axes, x.ndim)) for x in outs]
                outs = list(map(jnp.where, expanded, outs, state[0]))
            return outs, extras, state[2] + 1

        start = (list(ins[b:]), [blank(t) for t in types], jnp.zeros((), jnp.int32))
        outs, extras, count = jax.lax.while_loop(lambda state: going(state).any(), step, start)
        return made.compound(Compound("while", [body], refs[a:], first=[1], consts=b - a), outs, [count, *extras])

    def _shard_map(self, eqn: Any, ins: list[Any], refs: list[Refs], place: Any, made: Made) -> Any:
        """Evaluates a shard_map. Each shard's extra arrays get a first axis over all manual axes of the mesh."""
        p = eqn.params
        mesh = p["mesh"]
        manual = p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]  # JAX's versions differ
        axes = tuple(a for a in mesh.axis_names if a in manual)
        evaluate, bodies = self._body(p["jaxpr"], (), place)

        def run(*args: Any) -> Any:
            outs, extras = evaluate(*args)
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
        if not p["check_vma"]:  # without the check JAX does not know which arrays vary over the mesh
            for leaf in bodies[-1].leaves():
                leaf.axes |= set(axes)
        sizes = tuple((a, mesh.shape[a]) for a in axes)
        return made.compound(Compound("shard", [bodies[-1]], refs, mesh=sizes), outs, extras)


def bound(prim: Any, ins: list[Any], params: dict[str, Any]) -> list[Any]:
    """Binds a primitive. Returns a list of its results, also if it has a single one."""
    found = prim.get_bind_params(params)
    subfuns, params = found if isinstance(found, tuple) else ((), found)  # JAX's versions differ
    outs = prim.bind(*subfuns, *ins, **params)
    return list(outs) if prim.multiple_results else [outs]


def _split(outs: Sequence[Any], extras: int) -> tuple[list[Any], list[Any]]:
    at = len(outs) - extras
    return list(outs[:at]), list(outs[at:])
