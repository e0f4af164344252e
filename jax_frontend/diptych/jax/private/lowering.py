"""How JAX lowers and differentiates a program, as far as its public API does not say. Seen in JAX 0.10.2 to 0.12."""

from __future__ import annotations

from typing import Any

from jax._src import dispatch

# JAX (0.10.2) differentiates these constructs, once traced, by rules that do not support references, and fails with
# unclear errors. Each entry: the module of the rule, its function, and the construct's public name. Where a rule has
# moved, JAX's own error is what users see.
REFERENCELESS = (
    ("jax._src.lax.control_flow.conditionals", "_cond_", "a branch of jax.lax.cond or switch"),
    ("jax._src.lax.control_flow.loops", "_while_", "jax.lax.while_loop, which has no reverse mode"),
    ("jax._src.shard_map", "_shard_map_", "shard_map"),
)


def require_devices(primitive: Any) -> None:
    """Tells JAX to lower programs with this primitive for known devices, as `custom_partitioning` demands. Where a JAX
    lacks the name, the lowering of a partitioned call raises (`sharding/partition.py`)."""
    getattr(dispatch, "prim_requires_devices_during_lowering", set()).add(primitive)
