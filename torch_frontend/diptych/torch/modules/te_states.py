"""State dicts of TransformerEngine's modules: their delayed scales are read from `_extra_state`; te.py writes it.

TransformerEngine (1.x and 2.x) keeps a pickled dict there, as bytes in a uint8 tensor or in a `BytesIO` by torch.save:

    scale_fwd         [3 G]     scales of each of a module's G products: input, weight, output
    amax_history_fwd  [L, 3 G]  row 0 the pending amaxes, the newest in the last row
    scale_bwd, amax_history_bwd [.., 2 G]   output's gradient, input's gradient
    extra_fp8_variables         dict with fp8_max_fwd, fp8_max_bwd
    recipe                      a recipe of TransformerEngine's

A pickle can run code. This one is read by an unpickler that makes tensors and containers alone, and empty stand-ins for
all other names, such as TransformerEngine's recipes and a user's functions in them. The layout follows
TransformerEngine's public source.
"""

from __future__ import annotations

import codecs
import io
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import CheckpointError
from diptych.common.formats import LARGEST
from diptych.torch.private.dispatch import REBUILD, rebuild_tensor

EXTRA = "_extra_state"
SLOTS = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad_output": ("bwd", 0)}
WIDTH = {"fwd": 3, "bwd": 2}
_LARGEST = {"fwd": LARGEST["float8_e4m3fn"], "bwd": LARGEST["float8_e5m2"]}


class _StandIn:
    """Stands for an object of TransformerEngine's or of a user's class, or for a user's function, which are not read.
    Nothing of theirs runs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _StandIn:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


_KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    REBUILD: rebuild_tensor,
    ("_codecs", "encode"): codecs.encode,  # bytes, in protocol 2
    ("torch.storage", "_load_from_bytes"): _storage,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("builtins", "getattr"): lambda owner, name: _StandIn(),  # members of an Enum, from Python 3.12 on
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN.get((module, name), _StandIn)


def read(key: str, held: Any) -> dict[str, Any] | None:
    """Returns the dict in an `_extra_state`; None where it is empty, as without FP8.

    **Raises** CheckpointError, naming the key, for anything that TransformerEngine does not write.
    """
    if held is None or (isinstance(held, Tensor) and held.numel() == 0):
        return None
    try:
        if isinstance(held, io.BytesIO):
            held.seek(0)
            found = torch.load(held, map_location="cpu", weights_only=True)
        elif isinstance(held, Tensor) and held.dtype == torch.uint8:
            found = _Unpickler(io.BytesIO(held.cpu().numpy().tobytes())).load()
        else:
            raise CheckpointError(f"it is {type(held).__name__}, no uint8 tensor")
    except Exception as e:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{key} is not a state of TransformerEngine's that can be read: {e}") from e
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(f"{key} holds {type(found).__name__}, no dict of a module's FP8 state")
    return found


def layers_of(module: Any) -> list[str]:
    """Returns the layers, below the module, whose states TransformerEngine's module keeps; one for all groups."""
    layers = [f"scale_states.{layer}." if layer else "scale_states." for layer in module.layers]
    return layers * getattr(module, "num_gemms", 1)


def take_extra_state(module: Any, state_dict: Any, prefix: str) -> None:
    """Replaces a module's `_extra_state` in a state dict by the delayed scales that it holds, under diptych's names.

    `GroupedLinear` has one state for all of its groups' inputs, one for weights and one for gradients: each gets the
    largest amaxes and the smallest scale of the groups. Diptych's own states in the same dict are left alone.

    **Raises** CheckpointError for an `_extra_state` that cannot be read, or has scales for other products.
    """
    key = prefix + EXTRA
    if key not in state_dict:
        return
    found = read(key, state_dict.pop(key))
    if found is None or "scale_fwd" not in found or any(k.startswith(f"{prefix}scale_states.") for k in state_dict):
        return
    own = layers_of(module)
    for name in [f"{part}_{way}" for way in WIDTH for part in ("scale", "amax_history")]:
        if not isinstance(found.get(name), Tensor):
            raise CheckpointError(f"{key} holds no tensor {name}, but {type(found.get(name)).__name__}")
    for way, width in WIDTH.items():
        scales, history = found[f"scale_{way}"].float(), found[f"amax_history_{way}"].float()
        if scales.numel() != width * len(own) or history.dim() != 2 or history.size(1) != scales.numel():
            raise CheckpointError(
                f"{key} has scales {list(scales.shape)} and amaxes {list(history.shape)} of {way}; "
                f"{type(module).__name__} has {len(own)} products with {width} each"
            )
        largest = found.get("extra_fp8_variables", {}).get(f"fp8_max_{way}", _LARGEST[way])
        for below in dict.fromkeys(own):
            of_layer = [i * width for i, layer in enumerate(own) if layer == below]
            for slot, at in [(slot, at) for slot, (w, at) in SLOTS.items() if w == way]:
                columns = [i + at for i in of_layer]
                state_dict[f"{prefix}{below}{slot}.scale"] = scales[columns].amin().reshape(1)
                state_dict[f"{prefix}{below}{slot}.amax_history"] = history[:, columns].amax(1)
                state_dict[f"{prefix}{below}{slot}.fp8_max"] = torch.tensor([float(largest)])
