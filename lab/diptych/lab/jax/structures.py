"""Structures of arrays that modules take and return: the places of their arrays, and the insertion of taps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from diptych.lab.bisect.forward import Slot


def placed(value: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Returns the leaves of a structure with their places, and the structure's treedef. A place is spelled as in
    torch's captures, such as '["logits"][0]', where a field is written like an entry of a dict."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(value)
    return [("".join(map(_place, keys)), leaf) for keys, leaf in leaves], tree


def _place(key: Any) -> str:
    field = isinstance(key, jax.tree_util.GetAttrKey)
    return f'["{key.name}"]' if field else jax.tree_util.keystr((key,)).replace("'", '"')


def described(value: Any, tap: Callable[[Any, str], tuple[Any, Slot] | None], place: str = "") -> tuple[Any, Any]:
    """Returns an argument with taps on its arrays, and its description with slots in place of the arrays.

    **Arguments:** `tap(array, place)`: returns the tapped array and its slot, None for a value without a tap. A list or
    dict without taps remains the same object, since a module may fill it for its caller.
    """
    keys: Any = None
    if type(value) in (tuple, list):
        keys = range(len(value))
    elif type(value) is dict:
        keys = list(value)
    if keys is None:
        found = tap(value, place)
        return (value, value) if found is None else found
    both = [described(value[k], tap, place + (f"[{k}]" if type(value) is not dict else f'["{k}"]')) for k in keys]
    of = lambda i: [each[i] for each in both]  # noqa: E731
    made = (lambda x: dict(zip(keys, x, strict=True))) if type(value) is dict else type(value)
    same = all(x is value[k] for k, x in zip(keys, of(0), strict=True))
    return value if same else made(of(0)), made(of(1))
