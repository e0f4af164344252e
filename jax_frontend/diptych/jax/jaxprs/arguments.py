"""A call's arguments as flat arrays, and a function of any arguments as a function of flat arrays.

Objects of nnx are no pytrees, and a function may change them. They are passed as flax's own transformations pass them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np


class Marks(Protocol):
    """The receiver of the nnx objects of a function that is being traced."""

    def mark(self, root: Any, prefix: str) -> None:
        """Receives an argument `root`, whose modules have names that begin with `prefix`."""
        ...

    def unmark(self, *roots: Any) -> None:
        """Receives the arguments and results of the function once it has returned."""
        ...


_TAG = "diptych.capture"  # the tag of flax's contexts


@dataclasses.dataclass
class Results:
    """The structure of a traced function's result. `static`: the leaves that are no arrays, by position."""

    tree: Any
    static: dict[int, Any]

    def full(self, arrays: list[Any]) -> Any:
        left, count = iter(arrays), len(arrays) + len(self.static)
        return self.tree.unflatten([self.static[i] if i in self.static else next(left) for i in range(count)])


class Call:
    """One call of a function. Enter it as a context manager, and leave it after `returned`.

    `arrays`: the arrays among the arguments. `static`: the other leaves, as (position, value).
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.graph = "flax.nnx" in sys.modules and _has_graph((args, kwargs))
        self._stack = contextlib.ExitStack()
        self._given = args, kwargs

    def __enter__(self) -> Call:
        given: Any = self._given
        if self.graph:
            nnx = sys.modules["flax.nnx"]
            self._stack.enter_context(nnx.update_context(_TAG))
            given = nnx.to_tree(given, ctxtag=_TAG)
        leaves, self.tree = jax.tree.flatten(given)
        self.arrays = [x for x in leaves if _is_array(x)]
        self.static = tuple((i, x) for i, x in enumerate(leaves) if not _is_array(x))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def key(self) -> Any:
        """The value that determines a traced function, together with the shapes and dtypes of its arrays."""
        # Floats are compared by repr, since 0.0 == -0.0.
        return self.tree, tuple((i, type(x), repr(x) if isinstance(x, float | complex) else x) for i, x in self.static)

    def flat(self, fn: Callable[..., Any], marks: Marks, traced: Callable[[Results], None]) -> Callable[..., Any]:
        """Returns `fn` as a function of this call's arrays that returns arrays. `traced`: receives the structure of
        fn's result."""
        tree, static, graph = self.tree, dict(self.static), self.graph
        count = len(self.arrays) + len(static)

        def run(*arrays: Any) -> list[Any]:
            left = iter(arrays)
            given = tree.unflatten([static[i] if i in static else next(left) for i in range(count)])
            result = _with_graph(fn, marks, given) if graph else fn(*given[0], **given[1])
            leaves, out_tree = jax.tree.flatten(result)
            traced(Results(out_tree, {i: x for i, x in enumerate(leaves) if not _is_array(x)}))
            return [x for x in leaves if _is_array(x)]

        return run

    def returned(self, result: Any) -> Any:
        """Returns fn's result, and updates the nnx objects among the arguments as the function changed them."""
        if not self.graph:
            return result
        return sys.modules["flax.nnx"].from_tree(result, ctxtag=_TAG, is_inner=False)[2]


def _with_graph(fn: Callable[..., Any], marks: Marks, given: Any) -> Any:
    nnx = sys.modules["flax.nnx"]
    args, kwargs = nnx.from_tree(given, ctxtag=_TAG, is_inner=True)
    roots = [(name, x) for name, x in _named(fn, args, kwargs) if _has_module(x)]
    for name, root in roots:
        marks.mark(root, name if len(roots) > 1 else "")
    out = fn(*args, **kwargs)
    marks.unmark(*(root for root in jax.tree.leaves((args, kwargs, out), is_leaf=is_node) if is_node(root)))
    changed = jax.tree.map(lambda x: x if is_node(x) else None, (args, kwargs), is_leaf=is_node)
    return nnx.to_tree((*changed, out), ctxtag=_TAG)


def _named(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Returns the nnx objects among the arguments, with the names of their parameters."""
    try:
        names = list(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        names = []
    names = names if len(names) == len(args) + len(kwargs) else [str(i) for i in range(len(args))] + list(kwargs)
    found = []
    for name, x in zip(names, (*args, *kwargs.values()), strict=True):
        nodes = [n for n in jax.tree.leaves(x, is_leaf=is_node) if is_node(n)]
        found += [(name if len(nodes) == 1 else f"{name}/{i}", n) for i, n in enumerate(nodes)]
    return found


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _has_graph(tree: Any) -> bool:
    return any(map(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def _has_module(node: Any) -> bool:
    return any(True for _ in sys.modules["flax.nnx"].iter_modules(node))


# --- objects of nnx ---


def is_node(x: Any) -> bool:
    """Returns whether `x` is an object of nnx, such as a module, an optimizer or a variable."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def copied_nodes(nodes: list[Any]) -> list[Any]:
    """Returns copies of nnx objects with arrays of their own. The copies share objects as the originals do."""
    if not nodes:
        return []
    nnx = sys.modules["flax.nnx"]
    graphdef, state = nnx.split(nodes)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state))


def nodes_state(tree: Any) -> list[Any]:
    """Returns the arrays of the nnx objects in a tree."""
    nodes = list(filter(is_node, jax.tree.leaves(tree, is_leaf=is_node)))
    return jax.tree.leaves(sys.modules["flax.nnx"].split(nodes)[1]) if nodes else []
