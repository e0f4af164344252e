"""How pytrees of this library are written to files: by `jax.export` and by `flax.serialization`.

    exported.serialize()                     # functions that take or return quantized arrays, stacks or states
    flax.serialization.to_bytes(tree)        # trees that hold them; from_bytes(target, data) reads them
    quantizers_of(tree)                      # JSON beside files of arrays alone, as orbax's; check_quantizers reads it

What is no array, such as the quantizer, is written as JSON beside the arrays. flax needs a target, as for every tree:
its quantizer, shapes and dtypes must be those of the file. `diptych.jax` does not import flax: importing
`diptych.jax.linen` or `diptych.jax.nnx` registers the classes with it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from diptych.common.errors import ArgumentError, CheckpointError, UnsupportedError
from diptych.common.quantizer_json import from_json, to_json
from diptych.jax.state.scales import ScaleState
from diptych.jax.tensors.quantized import ABOUT, BUFFERS, QuantizedArray, QuantizedStack

_KEY = "about"  # key of the JSON in flax's state dict
_REGISTERED: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {}  # each class's fields: arrays, and others


@functools.cache  # JAX refuses a second registration
def register_all() -> None:
    """Registers the classes of this library that users save."""
    register(QuantizedArray, BUFFERS, ABOUT)
    register(QuantizedStack, BUFFERS, ABOUT)
    register(ScaleState, ("scale", "amax_history", "count", "check"), ("quantizer",))


def register(cls: type, arrays: tuple[str, ...], about: tuple[str, ...]) -> None:
    """Registers a dataclass that is a pytree with `jax.export`, and for `register_with_flax`.

    **Arguments:** `arrays`: fields that are leaves. `about`: the other fields, in the order in which they were
    registered as metadata.
    """
    _REGISTERED[cls] = arrays, about

    def serialize(aux: Any) -> bytes:
        return _written(cls, dict(zip(about, aux, strict=True))).encode()

    def deserialize(data: Any) -> tuple[Any, ...]:
        return tuple(_read(cls, bytes(data), about).values())

    jax.export.register_pytree_node_serialization(
        cls, serialized_name=f"diptych.{cls.__name__}", serialize_auxdata=serialize, deserialize_auxdata=deserialize
    )


@functools.cache  # flax refuses a second registration
def register_with_flax() -> None:
    """Registers the classes with `flax.serialization`; `linen` and `nnx` call it when they are imported."""
    from flax import serialization

    for cls, (arrays, about) in _REGISTERED.items():
        to_flax, from_flax = (functools.partial(f, serialization, cls, arrays, about) for f in (_to_flax, _from_flax))
        serialization.register_serialization_state(cls, to_flax, from_flax)


def _to_flax(flax: Any, cls: type, arrays: tuple[str, ...], about: tuple[str, ...], x: Any) -> dict[str, Any]:
    held = {name: getattr(x, name) for name in arrays if getattr(x, name) is not None}
    if any(isinstance(leaf, jax.Ref) for leaf in held.values()):
        raise ArgumentError(f"{x!r} holds references, which cannot be written to a file; call read_states")
    text = _written(cls, {name: getattr(x, name) for name in about})
    return {_KEY: text} | {name: flax.to_state_dict(leaf) for name, leaf in held.items()}


def _from_flax(flax: Any, cls: type, arrays: tuple[str, ...], about: tuple[str, ...], target: Any, state: Any) -> Any:
    where = f"{cls.__name__} at {flax.current_path()}"
    if not isinstance(state, dict) or not isinstance(state.get(_KEY), str):
        raise CheckpointError(f"{where}: the file holds no {cls.__name__} there")
    found, own = _read(cls, state[_KEY].encode(), about), {name: getattr(target, name) for name in about}
    if found != own:
        raise CheckpointError(f"{where}: the file's has {found}, the target's {own}")
    wanted = {name: getattr(target, name) for name in arrays if getattr(target, name) is not None}
    if state.keys() - {_KEY} != wanted.keys():
        keys = sorted(state.keys() - {_KEY})
        raise CheckpointError(f"{where}: the file's arrays are {keys}, the target's {sorted(wanted)}")
    return dataclasses.replace(
        target, **{name: _array(f"{where}: {name}", state[name], like) for name, like in wanted.items()}
    )


def quantizers_of(tree: Any) -> dict[str, dict[str, Any]]:
    """Returns what a tree's quantized arrays, stacks and states hold beside arrays, by their places: an object that
    `json.dumps` takes, to be saved beside a checkpoint that holds arrays alone.

    **Raises:** TypeError or NotImplementedError for a quantizer, or a size, that cannot be written.
    """
    return {
        place: {"kind": type(x).__name__} | json.loads(_written(type(x), {f: getattr(x, f) for f in fields}))
        for place, x, fields in _registered(tree)
    }


def check_quantizers(tree: Any, saved: Any) -> None:
    """Checks that a checkpoint's arrays mean in a tree what they meant where they were saved.

    **Arguments:** `tree`: the target of a restore; its arrays may be `jax.ShapeDtypeStruct`s. `saved`: the object of
    `quantizers_of` for the tree that was saved.

    **Raises:** CheckpointError, which names the place, if a quantizer, a dtype or a shape is another one, or if the
    trees hold quantized arrays and states in other places.
    """
    here = quantizers_of(tree)
    if not isinstance(saved, dict) or here.keys() != saved.keys():
        places = sorted(saved)[:3] if isinstance(saved, dict) else saved
        raise CheckpointError(f"the checkpoint has quantizers of {places}, ..., the target of {sorted(here)[:3]}, ...")
    for place, own in here.items():
        if (found := _completed(saved[place])) != own:
            raise CheckpointError(f"{place}: the checkpoint's is {found}, the target's {own}")


def _completed(saved: Any) -> Any:
    """Returns what `quantizers_of` would write now for a saved place: an earlier version's quantizer may lack fields,
    which have their defaults. What is no quantizer of this process is returned as it is."""
    try:
        return saved | {"quantizer": to_json(from_json(saved["quantizer"]))}
    except (CheckpointError, LookupError, TypeError):
        return saved


def _registered(tree: Any) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    classes = tuple(_REGISTERED)
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, classes))[0]:
        if isinstance(x, classes):
            yield jax.tree_util.keystr(path), x, _REGISTERED[type(x)][1]


def _written(cls: type, about: dict[str, Any]) -> str:
    """Returns metadata as JSON. **Raises** TypeError or NotImplementedError for what cannot be written."""
    if not all(isinstance(size, int) for size in about.get("leading", ())):
        raise UnsupportedError(
            f"a {cls.__name__} with symbolic sizes {about['leading']} cannot be written to a file; quantize and "
            "dequantize inside of the exported function, or export it for known sizes"
        )
    return json.dumps({name: to_json(v) if name == "quantizer" else v for name, v in about.items()})


def _read(cls: type, data: bytes, about: tuple[str, ...]) -> dict[str, Any]:
    """Returns the metadata in `data`, in the order of `about`. **Raises** CheckpointError for anything else."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"the description of a {cls.__name__} is damaged: {error}") from error
    if not isinstance(found, dict) or found.keys() != set(about):
        raise CheckpointError(f"a {cls.__name__} must be described by {list(about)}, the file holds {found!r}")
    out: dict[str, Any] = {}
    for name in about:
        value = found[name]
        if name == "quantizer":
            value = from_json(value)
        elif name == "leading":
            if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
                raise CheckpointError(f"the leading sizes of a {cls.__name__} must be a list of sizes, got {value!r}")
            value = tuple(value)
        elif not isinstance(value, str):
            raise CheckpointError(f"{name} of a {cls.__name__} must be a string, got {value!r}")
        out[name] = value
    return out


def _array(what: str, x: Any, like: Any) -> Any:
    """Returns an array of a file. **Raises** CheckpointError unless it has the shape and dtype of the target's."""
    if not isinstance(x, (np.ndarray, jax.Array)):
        raise CheckpointError(f"{what} must be an array, got {type(x).__name__}")
    if hasattr(like, "shape") and (x.shape, x.dtype) != (tuple(like.shape), like.dtype):
        raise CheckpointError(f"{what} is {x.dtype}{list(x.shape)}, the target's is {like.dtype}{list(like.shape)}")
    return jnp.asarray(x)
