"""`expert_parallel`: the experts of a layer spread over a mesh axis.

On each device, inside of one `jax.shard_map`:

    sent = permute(x)                  [D * C, K]  rows of its tokens, C for each device, by their experts
    received = all_to_all(sent)        [D * C, K]  rows for its experts, C from each device
    y = layer(params, received, map)   [R, N]      rows of its experts, in the order that one device gives them
    y = all_to_all(in_place(y))        [D * C, N]
    y = unpermute(y, probs)            [T, N]

Invariants: devices have consecutive experts and consecutive tokens, and both permutations are stable. So each expert
sees its rows in the order of one device, and results and gradients have one device's bits wherever a row's, or an
expert's, are their own. Rows travel in high precision, and are quantized where they are multiplied. Shapes are static
and nothing waits for the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from diptych.common.errors import ArgumentError, ShapeError
from diptych.common.ops import permute as rules
from diptych.common.ops import shapes
from diptych.jax.functional.permute import RowMap, moe_map, moe_unpermute
from diptych.jax.functional.permute_op import as_int32, permute
from diptych.jax.primitives import permute as permute_ops
from diptych.jax.primitives.checks import operand, to_array
from diptych.jax.state.carry import lend_states

Array = jax.Array
Layer = Callable[..., Array]

_OP = "expert_parallel"


class _Plan(NamedTuple):
    """`per_device`: experts of one device. `capacity`: rows that a device can send to each device. `tokens`: mesh axes
    that cut the tokens."""

    layer: Layer
    axis: str
    tokens: tuple[str, ...]
    devices: int
    per_device: int
    capacity: int
    align: int
    drop: bool


def expert_parallel(
    layer: Layer,
    params: Any,
    x: Array,
    experts: Array,
    probs: Array,
    *,
    num_experts: int,
    axis: str,
    token_axes: str | tuple[str, ...] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    capacity: int | None = None,
    align: int = 1,
    drop: bool = False,
    shared: Any = None,
) -> tuple[Array, Array]:
    """Runs a mixture of experts whose experts are spread over a mesh axis.

    Without `drop`, it is one device's `moe_unpermute(layer(params, x, rows), rows, probs)`, `rows` being the map
    `moe_map(experts, num_experts, map_type="index", align_size=align)` of x [T, K], and so are its gradients.

    **Arguments:**
    - `layer`: called once, inside of `jax.shard_map`, as `layer(params, x, rows)` with a device's experts, the rows
      that the device received, as tokens, and their map. It returns each expert's results in the map's order, [R, N]:
      `grouped_dense(x, kernel, row_map=rows)` first, then `grouped_dense(hidden, kernel,
      offsets=rows.expert_offsets)`. Pass `row_axes=token_axes` to both, so that scales of a whole tensor are those of
      all devices' rows.
    - `params`: a pytree of arrays and `QuantizedStack`s with a leading E, which the axis cuts.
    - `shared`: a pytree of what all experts share, such as states of delayed scaling; if it is given, `layer` has it as
      a fourth argument, on every device. States of references are lent (`lend_states`), and record the amaxes of all
      devices.
    - `x`: tokens [..., K] float32, bfloat16 or float16. `experts`: their experts, int32 or int64 [..., k]; ids outside
      of 0..E-1 name none. `probs`: [..., k]. The mesh cuts the first dimension of all three.
    - `num_experts`: E. `axis`: the mesh axis of the experts. `token_axes`: the axes that cut the tokens, by default
      `axis`, which must be one of them; along the others experts are replicated. `mesh`: by default that of the context
      (`jax.set_mesh`).
    - `capacity`: the number of rows that a device can send to each device of the axis. None suffices for any routing:
      all of a device's rows, T * k / D for D devices; even routing needs T * k / D^2. Buffers have D * capacity rows,
      and only rows of experts are multiplied.
    - `align`: as `align_size` of `moe_map`; see `diptych.common.row_align`.
    - `drop`: what happens to rows beyond the capacity. True leaves them out, in the order of experts and tokens, as if
      their expert's result were 0. False makes the program fail with a `jax.errors.JaxRuntimeError` when its results
      are read; the host is called in that case alone.

    **Returns:** (y, overflow): y [..., N], cut as x is, and the number of rows beyond the capacity on all devices,
    int32.

    **Raises:** ShapeError for a leading dimension that is not E, and for experts or tokens that do not divide evenly;
    TypeError for a missing mesh or dtypes; ValueError for axes that the mesh does not have; all while tracing.
    """
    x = to_array(_OP, "x", x)
    for arg, value in (("experts", experts), ("probs", probs)):
        if not isinstance(value, (jax.Array, np.ndarray)):
            raise ArgumentError(f"{_OP}: {arg} must be a JAX or NumPy array, got {type(value).__name__}")
    mesh_of_axes: Any = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh_of_axes.empty:
        raise ArgumentError(f"{_OP}: there is no mesh; pass mesh=, or set one by jax.set_mesh")
    tokens = (axis,) if token_axes is None else (token_axes,) if isinstance(token_axes, str) else tuple(token_axes)
    sizes = mesh_of_axes.shape
    if axis not in tokens or not set(tokens) <= set(sizes):
        raise ValueError(
            f"{_OP}: token_axes {tokens} must be axes of the mesh {dict(sizes)}, and axis {axis!r} of them"
        )
    parts = math.prod(sizes[name] for name in tokens)
    _check(params, x, experts, probs, num_experts, sizes[axis], parts)
    most = max(math.prod(experts.shape) // parts, 1)  # rows of one device
    rules.require_int(_OP, "capacity", most if capacity is None else capacity, 1, (int,))
    devices, capacity = sizes[axis], most if capacity is None else min(capacity, most)
    plan = _Plan(layer, axis, tokens, devices, num_experts // devices, capacity, align, drop)
    cut = PartitionSpec(tokens)
    local = jax.shard_map(
        functools.partial(_local, plan), mesh=mesh, in_specs=(PartitionSpec(axis), PartitionSpec(), cut, cut, cut),
        out_specs=(cut, PartitionSpec()),
    )  # fmt: skip
    given = () if shared is None else (lend_states(shared, (params, x)),)
    # Compiled, because JAX runs no custom_vjp with symbolic zeros in an eager shard_map.
    return jax.jit(local)(params, given, x, as_int32(experts), jnp.asarray(probs))


def _check(params: Any, x: Array, experts: Array, probs: Array, count: Any, devices: int, parts: int) -> None:
    """**Raises** what `expert_parallel` raises for shapes and dtypes."""
    rules.require_int(_OP, "num_experts", count, 1, (int,))
    rules.require_integers(_OP, operand("experts", experts.reshape(-1)), "[T * k]")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.ndim == 0 or leaf.shape[0] != count:
            place = jax.tree_util.keystr(path)
            raise ShapeError(f"{_OP}: params{place} must have a leading {count}, one for each expert, got {leaf.shape}")
    if experts.ndim != x.ndim or experts.shape != probs.shape or experts.shape[:-1] != x.shape[:-1]:
        raise ShapeError(
            f"{_OP}: x [..., K], experts [..., k] and probs [..., k] must agree, got {list(x.shape)}, "
            f"{list(experts.shape)} and {list(probs.shape)}"
        )
    for what, length, unit in (("experts", count, devices), ("tokens", x.shape[0], parts)):
        if x.ndim < 2 or length % unit:
            raise ShapeError(f"{_OP}: {length} {what} over {unit} devices, which must divide them evenly")


# --- on one device ---


def _local(
    plan: _Plan, params: Any, shared: tuple[Any, ...], x: Array, experts: Array, probs: Array
) -> tuple[Array, Array]:
    """Returns this device's results, and the rows beyond the capacity on all devices."""
    ids, probs = (v.reshape(shapes.rows_cols(v.shape)) for v in (experts, probs))
    sent, counts, beyond = _capacity_map(plan, ids)
    overflow = jax.lax.psum(beyond, plan.tokens)
    if not plan.drop and plan.capacity < math.prod(ids.shape):
        jax.lax.cond(overflow > 0, functools.partial(_call_host, plan), lambda _: None, overflow)
    rows, _ = permute(x.reshape(shapes.rows_cols(x.shape)), sent.row_id_map, sent.row_source)
    of_rows = _experts_of_rows(plan, _exchanged(plan, counts))
    received = moe_map(of_rows, plan.per_device, map_type="index", align_size=plan.align)
    made = plan.layer(params, _exchanged(plan, rows), received, *shared)
    if made.ndim != 2 or made.shape[0] != received.row_source.shape[0]:
        want = f"[{received.row_source.shape[0]}, N]"
        raise ShapeError(f"{_OP}: layer must return a row for each row of the map, {want}, got {list(made.shape)}")
    back = _exchanged(plan, _in_place_of_received(made, received.row_id_map, received.row_source))
    y = moe_unpermute(back, sent, probs)
    return y.reshape(*x.shape[:-1], y.shape[-1]), overflow


def _exchanged(plan: _Plan, x: Array) -> Array:
    """Sends block d of x [D * n, ...] to device d; block s of the result came from device s."""
    return jax.lax.all_to_all(x, plan.axis, 0, 0, tiled=True)


def _capacity_map(plan: _Plan, ids: Array) -> tuple[RowMap, Array, Array]:
    """Returns the map from tokens to the rows that are sent, `capacity` for each device; the number of rows of each
    expert among them, int32 [E]; and how many rows found no place."""
    every = moe_map(ids, plan.devices * plan.per_device, map_type="index")
    starts, ends = (v.reshape(plan.devices, -1) for v in (every.expert_offsets[:-1], every.expert_offsets[1:]))
    first = starts[:, :1]  # the first row for each device
    counts = jnp.minimum(ends - first, plan.capacity) - jnp.minimum(starts - first, plan.capacity)
    device = jnp.clip(ids, 0, plan.devices * plan.per_device - 1) // plan.per_device
    place = every.row_id_map - first[:, 0][device]
    there = (every.row_id_map >= 0) & (place < plan.capacity)
    row_id_map = jnp.where(there, device * plan.capacity + place, -1)
    row_id_map, row_source = permute_ops.invert_map(row_id_map, plan.devices * plan.capacity)
    sent = RowMap(row_id_map, counts.reshape(-1), every.expert_offsets, row_source)
    return sent, counts.reshape(-1), every.tokens_per_expert.sum() - counts.sum()


def _experts_of_rows(plan: _Plan, counts: Array) -> Array:
    """Returns the expert of each received row among this device's, [D * C, 1]; absent rows have a number past the last.

    `counts`: the rows of each sender for each of this device's experts.
    """
    ends = jnp.cumsum(counts.reshape(plan.devices, plan.per_device), axis=1)
    row = jnp.arange(plan.capacity, dtype=jnp.int32)
    return (ends[..., None] <= row).sum(1, dtype=jnp.int32).reshape(-1, 1)


def _call_host(plan: _Plan, overflow: Array) -> None:
    def fail(count: Any) -> None:
        raise RuntimeError(
            f"{_OP}: {int(count)} rows found no place: each device sends at most {plan.capacity} rows to another one. "
            "Raise the capacity, leave it out, or pass drop=True"
        )

    jax.debug.callback(fail, overflow)


@jax.custom_vjp
def _in_place_of_received(rows: Array, row_id_map: Array, row_source: Array) -> Array:
    """Moves each row of experts [R, N] to where its token was received, [D * C, N]. The map is one to one."""
    return permute_ops.permute((rows,), row_source[:, None], row_id_map[:, 0])[0][0]


def _moved_back(rows: Array, row_id_map: Array, row_source: Array) -> tuple[Array, tuple[Array, Array]]:
    return _in_place_of_received(rows, row_id_map, row_source), (row_id_map, row_source)


def _moved(saved: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    return permute_ops.permute((dy,), *saved)[0][0], None, None


_in_place_of_received.defvjp(_moved_back, _moved)
