"""Checks whether taps change a function's bits: it runs once more without them, on copies of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diptych.jax.functional.hash import hash
from diptych.jax.jaxprs.arguments import copied_nodes, is_node, nodes_state
from diptych.lab.traces import is_recorded

_DONATED = object()


def of_run(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    """Runs a function on copies of its arguments. Returns the bits of its results and of nnx objects in the
    arguments."""
    args, kwargs = _copied((args, kwargs))
    return bits(fn(*args, **kwargs), args, kwargs)


def bits(results: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the bits of results, and of the state of nnx objects among the arguments."""
    return [_bits(x) for x in jax.tree.leaves((results, nodes_state((args, kwargs))))]


def are_equal(a: list[Any], b: list[Any]) -> bool:
    """Returns whether two runs left equal bits, except for arrays that one of them has donated."""
    return len(a) == len(b) and all(_DONATED in (x, y) or x == y for x, y in zip(a, b, strict=True))


def _copied(tree: Any) -> Any:
    """Returns a copy of arguments, so that a function that donates or changes its arguments leaves the originals as
    is."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_node)
    nodes = iter(copied_nodes([x for x in leaves if is_node(x)]))
    copy = lambda x: next(nodes) if is_node(x) else x.copy() if isinstance(x, jax.Array) else x  # noqa: E731
    return structure.unflatten(map(copy, leaves))


def _bits(x: Any) -> Any:
    if isinstance(x, np.ndarray | np.generic):
        if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
            return x.tobytes()  # a traced function returns another dtype
        x = jnp.asarray(x)
    if not isinstance(x, jax.Array):
        return x
    if x.is_deleted():  # the function has donated a state that it got as a pytree
        return _DONATED
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _bits(jax.random.key_data(x))
    return np.asarray(hash(x) if is_recorded(str(x.dtype)) else x).tobytes()
