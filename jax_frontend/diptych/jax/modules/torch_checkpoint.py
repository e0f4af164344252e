"""Parameters and states from checkpoints of diptych.torch, and back.

    tensors = dj.read_safetensors("model.safetensors")
    params = dj.load_torch(params, tensors)                       # a tree of any framework's parameters and states
    safetensors.numpy.save_file(dj.to_torch(params), "model.safetensors")

The place of a leaf in the tree is the torch module's name, and the last part of it names the parameter there:

    kernel, bias                                  weight, bias
    scale, ln_bias beside a kernel                layer_norm_weight, layer_norm_bias
    scale, bias without a kernel (a norm)         weight, bias
    embedding                                     weight
    wi_kernel, wi_bias, wo_kernel, wo_bias        fc1_weight, fc1_bias, fc2_weight, fc2_bias
    states, random                                scale_states, rng_state

Others have the same name, so that trees with torch's names and layout, as equinox's, are taken too.

A kernel in high precision is [*in, *out], and the weight [out, in]; a stack of them is [*groups, *in, *out], and the
weight [groups, out, in]. Any of these may be several axes in the kernel, and the weight's shape tells which. One that
is held quantized has the weight's layout, and its arrays are those that `plain_state_dict` of diptych.torch writes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from diptych.common.errors import CheckpointError, UnsupportedError
from diptych.common.quantizers import Quantizer
from diptych.common.safetensors import DTYPES, file_entries
from diptych.jax.state.scales import ScaleState, is_state, load_state_dict, state_dict
from diptych.jax.tensors.quantized import BUFFERS, QuantizedArray, QuantizedCopies, QuantizedStack

Tree = TypeVar("Tree")
Shape = tuple[int, ...]

_KERNELS = {"kernel": "weight", "wi_kernel": "fc1_weight", "wo_kernel": "fc2_weight"}
_LINEAR = {"scale": "layer_norm_weight", "ln_bias": "layer_norm_bias", "wi_bias": "fc1_bias", "wo_bias": "fc2_bias"}
_OTHER = {"scale": "weight", "embedding": "weight"}
_STATES, _RANDOM = "states", "random"
_COLLECTIONS = ("params", "_overwrite_with_gradient", "held_kernels")  # of linen's variables
_SUFFIXES: dict[str, str] = {
    "rowwise_data": "", "rowwise_scale_inv": "_scale_inv", "amax": "_amax", "columnwise_data": "_columnwise_data",
    "columnwise_scale_inv": "_columnwise_scale_inv", "columnwise_amax": "_columnwise_amax",
}  # fmt: skip


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file, in FP8 too, which `safetensors.numpy` does not read. They are views of
    the file, read when they are used. **Raises** CheckpointError for a file that is damaged; OSError."""
    entries = file_entries(path)
    data = np.memmap(path, np.uint8, "r")
    return {name: data[e.begin : e.end].view(_DTYPES[e.dtype]).reshape(e.shape) for name, e in entries.items()}


def load_torch(
    tree: Tree, tensors: Mapping[str, Any], prefix: str = "", rename: Callable[[str], str] | None = None
) -> Tree:
    """Returns a tree with the values that a checkpoint of diptych.torch has for it, bit for bit.

    **Arguments:** `tree`: parameters, and states as the modules keep them: an `nnx.State` (`nnx.state(model)`), linen's
    variables, an equinox model, dictionaries. Leaves without a shape stay. Arrays may be `jax.ShapeDtypeStruct`s; where
    a leaf has a sharding, the new one gets it. `tensors`: NumPy or JAX arrays by torch's names, as `read_safetensors`
    returns them; those that the tree has no place for are ignored. `prefix`: of these names. `rename`: from the place
    of a module in the tree, joined by dots, to its name in torch.

    **Raises:** CheckpointError for an array that is missing or has another shape or dtype, with its name, or a kernel
    that is quantized on one side alone or by another quantizer.
    """
    found = _Names(tree, prefix, rename)
    given = {name: np.asarray(t) for name, t in tensors.items()}
    states = {name: _states(like, given, name) for name, like in found.states.items()}

    def read(path: Any, leaf: Any) -> Any:
        if not _is_leaf(leaf) and not hasattr(leaf, "shape"):  # such as the activation function of an equinox model
            return leaf
        place = found.of(path)
        if is_state(leaf):
            below, *rest = place.state
            return _like(leaf, _at(states[below], rest))
        if isinstance(leaf, QuantizedCopies):
            return _quantized(place.name, leaf, given)
        value = _from_torch(place, _taken(place.name, given), leaf.shape)
        if value.dtype != leaf.dtype:
            raise CheckpointError(f"{place.name} is {value.dtype} in the checkpoint and {leaf.dtype} here")
        return _like(leaf, value)

    return jax.tree_util.tree_map_with_path(read, tree, is_leaf=_is_leaf)


def to_torch(
    tree: Any,
    prefix: str = "",
    rename: Callable[[str], str] | None = None,
    like: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Returns the state dict of diptych.torch for a tree of parameters and states, which `load_torch` describes: its
    modules load it, with the same bits, as they load `plain_state_dict`'s.

    **Arguments:** `tree`, `prefix`, `rename`: as in `load_torch`. `like`: shapes, or arrays that have them, by torch's
    names, such as the tensors that were loaded. Kernels of three axes and more need them, as a kernel alone does not
    tell inputs from outputs, unless it stands behind a norm or in front of a gate.

    **Raises:** UnsupportedError for a kernel that needs `like`, or two leaves that would have one name; CheckpointError
    for a leaf that does not fit the shape in `like`.
    """
    found, out = _Names(tree, prefix, rename), {}
    for name, states in found.states.items():
        out |= {k: np.asarray(v) for k, v in state_dict(states, name).items()}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)[0]:
        if is_state(leaf) or (not _is_leaf(leaf) and not hasattr(leaf, "shape")):
            continue
        place = found.of(path)
        if isinstance(leaf, QuantizedCopies):
            made = {place.name + _SUFFIXES[part]: x for part, x in _parts(place.name, leaf).items()}
        else:
            made = {place.name: _to_torch(place, np.asarray(leaf), (like or {}).get(place.name))}
        if twice := made.keys() & out.keys():
            raise UnsupportedError(f"to_torch: two leaves would be {sorted(twice)[0]}")
        out |= made
    return out


# --- names ---


def _is_leaf(x: Any) -> bool:
    return is_state(x) or isinstance(x, QuantizedCopies)


class _Place(NamedTuple):
    """Where a leaf of a tree is in a state dict of torch.

    `name`: of the tensor. `kernel`: whether the leaf is a kernel [*in, *out]. `fused`: whether its module is a linear
    layer of one input axis whose outputs may be several. `state`: for a `ScaleState`, the prefix of its module's names,
    and its keys below the module.
    """

    name: str = ""
    kernel: bool = False
    fused: bool = False
    state: tuple[str, ...] = ()


class _Names:
    """Torch's names of the leaves of a tree, and its states by the prefixes of their modules."""

    def __init__(self, tree: Any, prefix: str, rename: Callable[[str], str] | None) -> None:
        self.prefix, self.rename = prefix, rename
        leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)[0]
        places = {parts: leaf for path, leaf in leaves if (parts := _parts_of(path))}
        self.linear = {parts[:-1] for parts in places if parts[-1] in _KERNELS}
        self.fused = self.linear & {parts[:-1] for parts, leaf in places.items() if _tells_inputs(parts[-1], leaf)}
        self.states: dict[str, Any] = {}
        for path, leaf in leaves:
            if is_state(leaf):
                module, *inner = self.of(path).state
                held = self.states.setdefault(module, {})
                for key in inner[:-1]:
                    held = held.setdefault(key, {})
                held[inner[-1]] = leaf

    def _module(self, parts: tuple[str, ...]) -> str:
        place = ".".join(parts)
        name = place if self.rename is None else self.rename(place)
        return self.prefix + (f"{name}." if name else "")

    def of(self, path: Any) -> _Place:
        parts = _parts_of(path)
        if _STATES in parts:
            at = len(parts) - 1 - parts[::-1].index(_STATES)
            return _Place(state=(self._module(parts[:at]), *parts[at + 1 :]))
        *_, last = parts or ("",)
        module = self._module(parts[:-1])
        if last == _RANDOM:
            return _Place(f"{module}rng_state")
        table = _KERNELS | (_LINEAR if parts[:-1] in self.linear else _OTHER)
        return _Place(module + table.get(last, last), last in _KERNELS, parts[:-1] in self.fused)


def _tells_inputs(name: str, leaf: Any) -> bool:
    """Whether a leaf beside a kernel, or the kernel, tells that the layer is a linear one with one axis of inputs: a
    norm's scale, a kernel in front of an activation, or one that is held quantized, as [*out, in]."""
    return name in ("scale", "wi_kernel") or (name in _KERNELS and isinstance(leaf, QuantizedArray))


def _parts_of(path: Any) -> tuple[str, ...]:
    """A leaf's place, without what flax's variables, boxes and collections add."""
    keys = [k for k in path if k != jax.tree_util.GetAttrKey("value")]
    parts = [str(next(v for v in (getattr(k, a, None) for a in ("key", "name", "idx")) if v is not None)) for k in keys]
    return tuple(parts[1:] if parts and parts[0] in _COLLECTIONS else parts)


# --- values ---


def _taken(name: str, given: Mapping[str, np.ndarray]) -> np.ndarray:
    if name not in given:
        raise CheckpointError(f"the checkpoint lacks {name}")
    if f"{name}_scale_inv" in given:
        raise CheckpointError(
            f"{name} is quantized in the checkpoint and in high precision here; hold_kernels of diptych.jax.nnx or "
            "linen, or quantize_params, makes a tree that holds it quantized, and dequantize then gives its values"
        )
    return given[name]


def _from_torch(place: _Place, value: np.ndarray, shape: Shape) -> np.ndarray:
    _require_merged(place, shape, value.shape)
    return np.ascontiguousarray(value.swapaxes(-2, -1) if place.kernel else value).reshape(shape)


def _to_torch(place: _Place, value: np.ndarray, like: Any) -> np.ndarray:
    shape = value.shape
    if like is not None:
        want = tuple(getattr(like, "shape", like))
        _require_merged(place, shape, want)
    elif place.fused:  # one axis of inputs, and all others of outputs
        want = (math.prod(shape[1:]), shape[0]) if place.kernel else (math.prod(shape),)
    elif place.kernel and len(shape) != 2:
        raise UnsupportedError(
            f"{place.name}: a kernel {list(shape)} does not tell which of its axes are groups, inputs and outputs; "
            f"pass the shape of torch's weight, like={{{place.name!r}: ([groups,] out, in)}}, or the tensors loaded"
        )
    else:
        want = shape[::-1] if place.kernel else shape
    return np.ascontiguousarray(value.reshape(_swapped(want)).swapaxes(-2, -1)) if place.kernel else value.reshape(want)


def _swapped(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _require_merged(place: _Place, here: Shape, there: Shape) -> None:
    """**Raises** CheckpointError unless torch's shape is that of a leaf with neighbouring axes merged, such as heads
    and their width, and a kernel's inputs behind its outputs."""
    fits = not place.kernel or len(there) in (2, 3)
    if not fits or not _merges(here, _swapped(there) if place.kernel else there):
        what = f"and the kernel here {list(here)}, inputs before outputs" if place.kernel else f"and {list(here)} here"
        raise CheckpointError(f"{place.name} is {list(there)} in the checkpoint, {what}")


def _merges(fine: Shape, coarse: Shape) -> bool:
    """Whether merging neighbouring axes of `fine` gives `coarse`."""
    bounds = {1, *itertools.accumulate(fine, operator.mul)}
    return math.prod(fine) == math.prod(coarse) and bounds.issuperset(itertools.accumulate(coarse, operator.mul))


def _like(leaf: Any, value: Any) -> Any:
    """The value as JAX arrays, placed as the leaf is."""

    def place(old: Any, new: Any) -> Any:
        held, own = getattr(old, "sharding", None), np.array(new)  # JAX may keep host memory, here the file's, as it is
        return jnp.asarray(own) if held is None else jax.device_put(own, held)

    return jax.tree.map(place, leaf, value)


def _states(like: Any, given: Mapping[str, np.ndarray], prefix: str) -> Any:
    return load_state_dict(given, like, prefix)[0]


def _at(states: Any, keys: list[str]) -> ScaleState:
    for key in keys:
        states = states[key]
    return states


# --- kernels that are held quantized ---


def _parts(name: str, q: QuantizedCopies) -> dict[str, np.ndarray]:
    """The arrays that a file holds: payloads and scales in their own dtypes, of one copy if it tells the other."""
    held = {part: np.asarray(x) for part in BUFFERS if (x := getattr(q, part)) is not None}
    if q.rowwise_data is not None and q.quantizer.copies_agree():
        held = {part: x for part, x in held.items() if not part.startswith("columnwise")}
    front = int(isinstance(q, QuantizedStack))
    for part in held.keys() & {"rowwise_data", "columnwise_data"}:  # a kernel's outputs are one axis in torch
        x = held[part]
        held[part] = x.reshape(*x.shape[:front], -1, x.shape[-1])
    return {part: x.view(d) if (d := _dtype(part, q.quantizer)).itemsize == 1 else x for part, x in held.items()}


def _quantized(name: str, leaf: Any, given: Mapping[str, np.ndarray]) -> Any:
    """Returns a kernel with a checkpoint's arrays, in the dtypes of `leaf`'s, which may be bytes."""
    fmt, parts = leaf.quantizer.format, {p: given[name + s] for p, s in _SUFFIXES.items() if name + s in given}
    if "rowwise_scale_inv" not in parts and "columnwise_scale_inv" not in parts:
        raise CheckpointError(
            f"{name} is held quantized here, and the checkpoint has no scales of it; load it into a tree in high "
            "precision, and quantize that"
        )
    if fmt.one_scale and "amax" not in parts and "rowwise_scale_inv" in parts:
        largest = np.float32(ml_dtypes.finfo(_DTYPES[fmt.element]).max)
        parts["amax"] = parts["rowwise_scale_inv"] * largest
    if leaf.columnwise_data is not None and "columnwise_data" not in parts and leaf.quantizer.copies_agree():
        parts |= _columnwise(parts, leaf)
    wanted = {part: x for part in BUFFERS if (x := getattr(leaf, part)) is not None}
    if missing := [name + _SUFFIXES[part] for part in wanted if part not in parts]:
        raise CheckpointError(f"the checkpoint lacks {', '.join(missing)}")
    made = {}
    for part, like in wanted.items():
        value, dtype = np.ascontiguousarray(parts[part]), _dtype(part, leaf.quantizer)
        if value.dtype not in (dtype, np.dtype(np.uint8)) or not _merges(like.shape, value.shape):
            raise CheckpointError(
                f"{name}{_SUFFIXES[part]} is {value.dtype}{list(value.shape)} in the checkpoint and "
                f"{dtype}{list(like.shape)} here: another quantizer's"
            )
        made[part] = _like(like, value.view(like.dtype).reshape(like.shape))
    return dataclasses.replace(leaf, **made)


_DTYPES = {name: jnp.dtype(name) for name in DTYPES.values()}


def _dtype(part: str, quantizer: Quantizer) -> np.dtype:
    """The dtype of an array in files of torch."""
    fmt = quantizer.format
    name = fmt.data if part.endswith("data") else fmt.scale if part.endswith("scale_inv") else "float32"
    return _DTYPES[name]


def _columnwise(row: Mapping[str, np.ndarray], leaf: QuantizedCopies) -> dict[str, np.ndarray]:
    """Returns the columnwise arrays that the rowwise ones determine. A stack's have an axis in front."""
    fmt, data, scale = leaf.quantizer.format, row["rowwise_data"], row["rowwise_scale_inv"]
    if fmt.one_scale:
        return {"columnwise_data": data.swapaxes(-2, -1), "columnwise_scale_inv": scale}
    if fmt.block_rows == fmt.block_cols:
        return {"columnwise_data": data.swapaxes(-2, -1), "columnwise_scale_inv": scale.swapaxes(-2, -1)}
    block, k = fmt.block_cols, leaf.shape[-1]
    scale = np.repeat(scale[..., ::block, :], block, -1)[..., :k]  # one row of each block, then each block's columns
    if fmt.columnwise == "transposed":
        scale = scale.swapaxes(-2, -1)
        whole = np.stack((data & 15, data >> 4), -1).reshape(*data.shape[:-1], -1).swapaxes(-2, -1)
        data = whole[..., ::2] | (whole[..., 1::2] << 4)
    made = {"columnwise_data": data, "columnwise_scale_inv": scale}
    return made | ({"columnwise_amax": row["amax"]} if fmt.two_level else {})
