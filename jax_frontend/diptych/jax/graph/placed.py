"""Over which axes of a mesh an array varies or is cut."""

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
    """Returns the manual axes over which an equation mixes what shards have: a collective's."""
    if eqn.primitive.name in ("pvary", "pcast", "axis_index"):
        return frozenset()
    given = (eqn.params.get(name, ()) for name in ("axes", "axis_name"))
    axes = (a for some in given for a in (some if isinstance(some, tuple | list) else (some,)))
    return frozenset(a for a in axes if isinstance(a, str))


def blank(aval: Any) -> Array:
    """Returns zeros that vary over the same mesh axes."""
    zeros, axes = jnp.zeros(aval.shape, aval.dtype), getattr(getattr(aval, "manual_axis_type", None), "varying", ())
    return jax.lax.pcast(zeros, tuple(axes), to="varying") if axes else zeros


def whole(x: Array) -> Array:
    """Returns an array of which no axis is cut over Explicit mesh axes: observing folds axes."""
    now = jax.typeof(x).sharding
    no_cut = NamedSharding(now.mesh, PartitionSpec(*[None] * x.ndim))
    return jax.sharding.reshard(x, no_cut) if any(s is not None for s in now.spec) else x
