"""The mesh axes over which an array varies or is sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


def varying(x: Any) -> Any:
    """Returns the manual axes over which an array varies."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return getattr(kind, "varying", None) or getattr(jax.typeof(x), "vma", ())


def meets_over(eqn: Any) -> frozenset[str]:
    """Returns the manual mesh axes along which an equation combines values of several shards; none unless it is a
    collective."""
    if eqn.primitive.name in ("pvary", "pcast", "axis_index"):
        return frozenset()
    given = (eqn.params.get(name, ()) for name in ("axes", "axis_name"))
    axes = (a for some in given for a in (some if isinstance(some, tuple | list) else (some,)))
    return frozenset(a for a in axes if isinstance(a, str))


def blank(aval: Any) -> Array:
    """Returns zeros with the shape, the dtype and the manual axes of the array type `aval`."""
    zeros, axes = jnp.zeros(aval.shape, aval.dtype), getattr(getattr(aval, "manual_axis_type", None), "varying", ())
    return jax.lax.pcast(zeros, tuple(axes), to="varying") if axes else zeros


def whole(x: Array) -> Array:
    """Returns an array without sharded axes on Explicit mesh axes, since observing it merges axes."""
    now = jax.typeof(x).sharding
    if all(axes is None for axes in now.spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(now.mesh, PartitionSpec(*[None] * x.ndim)))
