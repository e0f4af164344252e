"""How an op of the core becomes a JAX primitive: its results, its batching and its lowering to the FFI handler."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType, PartitionSpec

from diptych.common.errors import UnsupportedError
from diptych.common.ops import shapes
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import Aval, dtype_of
from diptych.jax.primitives.ffi import Batch

Array = jax.Array


def batch_shape(avals: tuple[Aval, ...], batch: Batch) -> shapes.Shape:
    """Lengths of the batch axes, outermost first, each from the first operand that carries it."""
    out = []
    for bit in reversed(range(batch.rank)):
        for aval, mask in zip(avals, batch.axes, strict=True):
            if mask >> bit & 1:
                out.append(aval.shape[(mask >> (bit + 1)).bit_count()])
                break
    return tuple(out)


def result(operands: tuple[Aval, ...], shape: shapes.Shape, dtype: str) -> Aval:
    """Returns a result's type, which varies over every manual mesh axis of `operands` and is sharded over none."""
    like = next((o for o in operands if not o.sharding.mesh.empty), operands[0])
    varying = frozenset().union(*(o.manual_axis_type.varying for o in operands))
    return like.update(
        shape=tuple(shape),
        dtype=dtype_of(dtype),
        weak_type=False,
        sharding=like.sharding.update(spec=PartitionSpec(*[None] * len(shape))),
        manual_axis_type=ManualAxisType(varying=varying),
    )


def in_place(batch: Batch, pairs: dict[int, int]) -> dict[int, int]:
    """Selects the pairs {operand: result} that can share memory: the operand has every batch axis, as results do."""
    return {operand: result for operand, result in pairs.items() if batch.axes[operand] == (1 << batch.rank) - 1}


_NO_DERIVATIVE = (
    "rounding to a few bits has none. diptych.jax.dense and other layers define first derivatives in reverse mode "
    "(jax.grad, jax.vjp), and neither second derivatives nor forward mode; elsewhere wrap the inputs in "
    "jax.lax.stop_gradient, and to differentiate twice pass recipe=None"
)


class Partitioner(Protocol):
    """How the calls of one primitive are partitioned over a mesh."""

    def types(self, avals: Sequence[Aval], outs: list[Aval], batch: Batch, params: dict[str, Any]) -> list[Aval]:
        """Returns the results' types with the shardings that follow from the operands'."""
        ...

    def lowering(self, ctx: Any, prim: Primitive, batch: Batch, params: dict[str, Any]) -> Any:
        """Returns the lowering of a partitioned call, or None if this call is lowered as it is."""
        ...


PRIMITIVES: dict[str, Primitive] = {}
"""All primitives, by op."""
PARTITIONERS: dict[str, Partitioner] = {}
"""Filled by the room `sharding`."""


def primitive(
    op: str,
    abstract_eval: Any,
    attributes: Any,
    finish: Any = None,
    updated: Any = None,
    no_derivative: str = _NO_DERIVATIVE,
) -> Primitive:
    """Returns a primitive with all rules that JAX requires.

    **Arguments:** `abstract_eval(*avals, batch, **params)` returns the results' types; `attributes(avals, batch,
    **params)` the handler's attributes; `finish(ctx, platform, batch, **params)` (aliases {operand: result}, bytes of a
    workspace or None) for the lowering; `updated(**params)` the operands that the handler updates in place, which
    therefore get every batch axis. `no_derivative`: why there is no derivative, and what to do.
    """
    name = ffi.target(op)
    prim = Primitive(name)
    prim.multiple_results = True
    PRIMITIVES[op] = prim

    def typed(*avals: Aval, batch: Batch, **params: Any) -> list[Aval]:
        outs = abstract_eval(*avals, batch=batch, **params)
        return PARTITIONERS[op].types(avals, outs, batch, params) if op in PARTITIONERS else outs

    prim.def_abstract_eval(typed)

    @functools.partial(jax.jit, static_argnames=("params",))
    def run(*args: Array, params: tuple[tuple[str, Any], ...]) -> Any:
        return prim.bind(*args, **dict(params))

    def impl(*args: Array, **params: Any) -> Any:
        frozen = tuple(sorted(params.items()))
        if not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return run(*args, params=frozen)
        # As JAX's own primitives do, compile the kernel even then: without jit, `run` would call this function again.
        with jax.disable_jit(False):
            return run(*args, params=frozen)

    prim.def_impl(impl)

    def batcher(args: Any, dims: Any, *, batch: Batch, **params: Any) -> Any:
        args = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        mapped = [d is not None for d in dims]
        size = next(x.shape[0] for x, m in zip(args, mapped, strict=True) if m)
        for i in updated(**params) if updated else ():
            if not mapped[i]:
                args[i], mapped[i] = jax.numpy.broadcast_to(args[i], (size, *args[i].shape)), True
        outs = prim.bind(*args, batch=batch.outer(mapped), **params)
        return outs, [0] * len(outs)

    batching.primitive_batchers[prim] = batcher

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(f"{name} has no derivative: {no_derivative}")

    ad.primitive_jvps[prim] = refuse
    ad.primitive_transposes[prim] = refuse

    def lower(platform: str, ctx: Any, *operands: Any, batch: Batch, **params: Any) -> Any:
        if op in PARTITIONERS and (partitioned := PARTITIONERS[op].lowering(ctx, prim, batch, params)):
            return partitioned(ctx, *operands)
        aliases, workspace = finish(ctx, platform, batch, **params) if finish else ({}, None)
        results = len(ctx.avals_out)
        if workspace is not None:
            scratch = result(tuple(ctx.avals_out), (workspace,), "uint8")
            ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
        rule = jax.ffi.ffi_lowering(name, operand_output_aliases=aliases)
        return rule(ctx, *operands, attributes=attributes(ctx.avals_in, batch, **params))[:results]

    for platform in ffi.PLATFORMS:
        mlir.register_lowering(prim, functools.partial(lower, platform), platform=platform)
    return prim


def workspace_bytes(op: str, platform: str, sizes: tuple[Any, ...], rule: Any) -> int | None:
    """Returns the bytes of the workspace that CUDA's lowering requests as an extra result; None on the CPU."""
    if platform != "cuda":
        return None
    if not all(isinstance(s, int) for s in sizes):
        raise UnsupportedError(
            f"{op}: symbolic sizes {sizes} cannot be lowered for CUDA, whose workspace follows from the concrete sizes"
        )
    return rule(*sizes)


# A custom_vjp with symbolic zeros may save fewer residuals if fewer gradients are needed. JAX (0.10.2), however, keeps
# one description of the residuals for each *traced* call. A compiled function that is called twice (a layer under
# `jax.jit` or flax's `nn.jit`, first on data and then on activations) is traced once and differentiated twice, so
# backward of the first call would unpack its residuals with the second call's structure. So every call saves the same
# number of arrays, some of them empty, and the shape of the last one, (0, number), names their structure.
_EMPTY = np.zeros(0, np.uint8)


_NUMBERS: dict[Any, int] = {}  # of structures, in the order of _STRUCTURES


_STRUCTURES: list[Any] = []


def defvjp(f: Any, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """`f.defvjp(forward, backward, symbolic_zeros=True)` for rules whose residuals may be any pytree.

    Gradients get the shardings of their arguments' types, as JAX demands on Explicit mesh axes.
    """

    @functools.wraps(forward)
    def forward_rule(*args: Any) -> Any:
        out, saved = forward(*args)
        static = len(getattr(f, "nondiff_argnums", ()))
        return out, _packed((saved, _Shardings.of(args[static:])), 12 + 3 * len(jax.tree.leaves(args)))

    @functools.wraps(backward)
    def backward_rule(*args: Any) -> Any:
        *static, packed, grads = args
        saved, shardings = _unpacked(packed)
        return shardings.given_to(backward(*static, saved, grads))

    f.defvjp(forward_rule, backward_rule, symbolic_zeros=True)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Shardings:
    """The shardings of arguments over Explicit mesh axes, None for arguments that have none."""

    leaves: tuple[Any, ...]
    tree: Any

    @staticmethod
    def of(args: Any) -> _Shardings:
        leaves, tree = jax.tree.flatten(jax.tree.map(lambda p: p.value, args))
        shardings = (getattr(jax.typeof(x), "sharding", None) for x in leaves)
        return _Shardings(tuple(s if s is not None and any(s.spec) else None for s in shardings), tree)

    def given_to(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns gradients, of which each may be None, with these shardings."""
        if not any(self.leaves):
            return grads
        present, tree = jax.tree.flatten(tuple(grads), is_leaf=lambda g: g is None)
        wanted = tree.flatten_up_to(self.tree.unflatten(self.leaves))
        return tree.unflatten([_resharded(g, s) for g, s in zip(present, wanted, strict=True)])


def _resharded(grad: Any, sharding: Any) -> Any:
    if not isinstance(grad, jax.Array) or sharding is None or jax.typeof(grad).sharding == sharding:
        return grad
    return jax.sharding.reshard(grad, sharding)


def _packed(saved: Any, room: int) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(saved)
    assert len(leaves) <= room, f"{len(leaves)} arrays are saved, and there is room for {room}"
    number = _NUMBERS.setdefault(structure, len(_STRUCTURES))
    if number == len(_STRUCTURES):
        _STRUCTURES.append(structure)
    return (*leaves, *[_EMPTY] * (room - len(leaves)), np.zeros((0, number), np.uint8))


def _unpacked(packed: tuple[Any, ...]) -> Any:
    structure = _STRUCTURES[packed[-1].shape[1]]
    return structure.unflatten(packed[: structure.num_leaves])
