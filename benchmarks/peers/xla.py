"""XLA's own FP8 product on a GPU: a dot of two FP8 arrays, and their scales."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.peers import Absent


def load(_: Any) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns a compiled function of a [M, K] and b [N, K] in FP8 and their scales, with a result in bfloat16."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        raise Absent(str(error)) from error
    if jax.default_backend() not in ("gpu", "cuda"):
        raise Absent(f"jax runs on {jax.default_backend()}")

    @jax.jit
    def dot(a: Any, b: Any, a_scale: Any, b_scale: Any) -> Any:
        y = jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
        return (y.astype(jnp.float32) * (a_scale * b_scale)).astype(jnp.bfloat16)

    return dot
