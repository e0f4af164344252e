"""Held weights in checkpoints: `plain_state_dict`, and how a module loads the entries of its weights.

A weight `w` that is held quantized is written as plain tensors, in the names of published FP8 checkpoints:

    w                        payload of the rowwise copy [N, K]; E2M1 as bytes [N, K / 2]
    w_scale_inv              its scales, which the payload is multiplied by, in the format's layout
    w_amax                   where the format has one
    w_columnwise_data, w_columnwise_scale_inv, w_columnwise_amax    only if the rowwise copy does not determine them

With 128x128 blocks these are the names, dtypes and shapes of checkpoints such as DeepSeek-V3's. Modules load them, and
those with one scale a tensor or a row, or named `w_scale`, into weights held quantized and in high precision alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diptych.common.errors import ArgumentError, CheckpointError, CheckpointWarning
from diptych.common.ops import shapes
from diptych.torch.modules.quantized_parameter import QuantizedParameter, fits
from diptych.torch.primitives.checks import HIGH_PRECISION, describe
from diptych.torch.tensors.quantized import QuantizedStack, QuantizedTensorBase, parts_of

_NAMES = {
    "rowwise_data": "",
    "rowwise_scale_inv": "_scale_inv",
    "amax": "_amax",
    "columnwise_data": "_columnwise_data",
    "columnwise_scale_inv": "_columnwise_scale_inv",
    "columnwise_amax": "_columnwise_amax",
}
COMPANIONS = tuple([suffix for suffix in (*_NAMES.values(), "_scale") if suffix])
"""The ends of the names of what stands beside a payload."""
_PARTS = ("all", "weights", "states")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def plain_state_dict(
    model: nn.Module | Mapping[str, Any], parts: Literal["all", "weights", "states"] = "all"
) -> dict[str, Any]:
    """A state dict without quantized tensors, such as safetensors and other tools take; this module's docstring has the
    names. Loaded into a model that holds its weights by the same quantizers it gives the same bits; into one in high
    precision, the dequantized values.

    **Arguments:** `model`: a module, or its state dict. `parts`: "weights" leaves out the states of delayed scaling and
    of random generators: a model that holds no weight quantized then has the entries that it had before `convert`.
    "states" returns these states alone, for files beside those of a trainer that saves some of the weights only;
    `model.load_state_dict(states, strict=False)` reads them. Both need the module.

    **Returns:** tensors that share memory with the model's.

    **Raises:** ValueError where two entries would get one name, or for other `parts`; ArgumentError, a TypeError, for
    "weights" or "states" of a state dict.
    """
    if parts not in _PARTS:
        raise ValueError(f"plain_state_dict: parts must be one of {', '.join(map(repr, _PARTS))}, got {parts!r}")
    entries: dict[str, Any] = {}
    state = model.state_dict() if isinstance(model, nn.Module) else model
    if parts != "all":
        of_states = _state_prefixes(model, parts)
        state = {key: t for key, t in state.items() if key.startswith(of_states) == (parts == "states")}
    for key, t in state.items():
        made = {key: t}
        if isinstance(t, QuantizedTensorBase):
            made = {key + _NAMES[name]: part.detach() for name, part in parts_of(t).items()}
            if t.rowwise_data is not None and t.quantizer.copies_agree():
                made = {k: v for k, v in made.items() if not k.startswith(f"{key}_columnwise")}
        twice = made.keys() & (entries.keys() | (state.keys() - {key}))
        if twice:
            raise ValueError(f"plain_state_dict: {sorted(twice)[0]!r} names both a tensor and a part of {key!r}")
        entries.update(made)
    return entries


def _state_prefixes(model: Any, parts: str) -> tuple[str, ...]:
    """Returns the beginnings of the keys under which a model's state dict has its modules' states."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"plain_state_dict: parts={parts!r} needs the module, got {type(model).__name__}, whose keys alone do not "
            "tell which buffers are states; pass the model"
        )
    modules = [(f"{name}." if name else "", m) for name, m in model.named_modules()]
    return tuple([path + state for path, m in modules for state in getattr(m, "state_prefixes", ())])


def read_weights(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any) -> Any:
    """A state dict in which every weight of a module is one tensor, as `load_state_dict` copies or assigns it."""
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    changed = dict(state_dict)
    for name, p in module._parameters.items():
        if p is None:
            continue
        key = prefix + name
        given = state_dict.get(key)
        own = {f"{prefix}{other}" for other in (*module._parameters, *module._buffers)} - {key}
        companions = {key + s for s in COMPANIONS if key + s in state_dict} - own
        if isinstance(given, QuantizedTensorBase):
            changed[key] = _from_quantized(key, p, given, assign)
        elif companions and not (given is not None and given.dtype in HIGH_PRECISION):
            for other in companions:
                del changed[other]
            changed[key] = read_weight(key, p, state_dict)
        elif assign and isinstance(given, Tensor) and isinstance(p, QuantizedParameter):
            changed[key] = _like(key, p, given)
    return changed


def read_weight(key: str, p: Tensor, tensors: Mapping[str, Any]) -> Tensor:
    """Returns the weight `key` for a parameter `p`, held or in high precision, from its payload and what stands beside
    it in `tensors`. **Raises** CheckpointError for parts that cannot be read."""
    parts = {part: t for part, suffix in _NAMES.items() if isinstance(t := tensors.get(key + suffix), Tensor)}
    if "rowwise_scale_inv" not in parts and isinstance(scale := tensors.get(f"{key}_scale"), Tensor):
        parts["rowwise_scale_inv"] = scale
    return _from_parts(key, p, parts)


def held_bytes(module: nn.Module) -> dict[int, tuple[str, int]]:
    """Returns (format, bytes of payload and scales) of each held weight of a module itself, by the weight's id."""
    return {
        id(p): (p.quantizer.format.name, sum([t.numel() * t.element_size() for t in parts_of(p).values()]))
        for p in module._parameters.values()
        if isinstance(p, QuantizedParameter)
    }


def held_words(module: nn.Module) -> str:
    """Returns the formats in which a module itself holds weights, as they follow in a line; "" if it holds none."""
    formats = sorted({name for name, _ in held_bytes(module).values()})
    return f", held as {', '.join(formats)}" if formats else ""


# --- one weight ------------------------------------------------------------------------------------------------------


def _like(key: str, p: QuantizedTensorBase, values: Tensor) -> Any:
    """Returns a tensor that holds `values` quantized as `p` is."""
    _require_shape(key, p, values.shape)
    made: Any = torch.empty_like(p.detach(), device=values.device)
    return made.quantize_(values)


def _from_quantized(key: str, p: Tensor, given: QuantizedTensorBase, assign: bool) -> Any:
    if not isinstance(p, QuantizedTensorBase):
        _warn(f"{key} is quantized in the checkpoint and in high precision here: its values are used")
        return given.detach().dequantize().to(p.dtype)
    if fits(p, given):
        if not (assign and isinstance(p, QuantizedParameter)):
            return given
        made = QuantizedParameter.of(given)
        made.update_usage(rowwise_usage=p.quantizer.rowwise, columnwise_usage=p.quantizer.columnwise)
        return made.to(p.dtype)
    if p.shape != given.shape:
        return given  # load_state_dict refuses its shape
    _warn(f"{key} is not quantized in the checkpoint as by {p.quantizer}: its values are quantized again, by that")
    values = given.detach().dequantize()
    return _like(key, p, values)


def _from_parts(key: str, p: Tensor, parts: dict[str, Tensor]) -> Any:
    if not isinstance(p, QuantizedTensorBase):
        values = _decoded(key, p, parts)
        _warn(f"{key} is quantized in the checkpoint and in high precision here: its values are used")
        return values.to(p.dtype)
    found = _buffers(p, parts)
    if found is None:
        values = _decoded(key, p, parts)
        _warn(f"{key} is not quantized in the checkpoint as by {p.quantizer}: its values are quantized again, by that")
        return _like(key, p, values)
    kind: Any = p.kind
    made = kind(p.quantizer, p.shape, p.dtype, **found)
    return QuantizedParameter.of(made) if isinstance(p, QuantizedParameter) else made


def _buffers(p: QuantizedTensorBase, parts: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Returns the buffers of p that the checkpoint holds or determines; None if one is missing."""
    found: dict[str, Tensor] = {}
    for name, held in parts_of(p).items():
        if name in parts:
            t = _cast(parts[name], held)
            if t is None:
                return None
            found[name] = t
    fmt = p.quantizer.format
    if fmt.one_scale and "amax" not in found and "rowwise_scale_inv" in found:
        found["amax"] = found["rowwise_scale_inv"] * torch.finfo(getattr(torch, fmt.element)).max
    if p.columnwise_data is not None and "columnwise_data" not in found and p.quantizer.copies_agree():
        if not {"rowwise_data", "rowwise_scale_inv"} <= found.keys():
            return None
        found |= _columnwise(found, p)
    return found if found.keys() == parts_of(p).keys() else None


def _cast(t: Tensor, held: Tensor) -> Tensor | None:
    """Returns a part in the dtype and shape of the buffer; None if that would change a value."""
    if t.dtype == torch.uint8 and held.dtype == torch.float8_e8m0fnu:
        t = t.view(torch.float8_e8m0fnu)
    if held.dtype == torch.float32 and t.dtype in (torch.bfloat16, torch.float16, torch.float8_e8m0fnu):
        t = t.to(torch.float32)
    if t.dtype != held.dtype:
        return None
    one_each = t.numel() == held.numel() == held.shape[0]  # the scale of a whole tensor may be [] or [1, 1]
    return t.reshape(held.shape).contiguous() if t.shape == held.shape or one_each else None


def _decoded(key: str, p: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """Returns the values in float32. **Raises** CheckpointError unless the parts are an FP8 payload and its scales."""
    data, scale = parts.get("rowwise_data"), parts.get("rowwise_scale_inv")
    if data is None or scale is None or data.dtype not in _FP8:
        said = ", ".join(f"{key}{_NAMES[name]} {describe(t)}" for name, t in parts.items())
        raise CheckpointError(
            f"{key}: a weight that is quantized in a checkpoint needs a payload in float8_e4m3fn or float8_e5m2 and "
            f"its scales, or else all that the weight here holds, got {said}"
        )
    _require_shape(key, p, data.shape)
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    scale = scale.to(torch.float32)
    if scale.numel() > 1 and scale.dim() < data.dim():  # a scale for each tensor of a stack, or each row
        scale = scale.reshape(*scale.shape, *[1] * (data.dim() - scale.dim()))
    for axis in range(-min(scale.dim(), data.dim()), 0):
        scale = _spread(key, scale, axis, data)
    return data.to(torch.float32) * scale


def _spread(key: str, scale: Tensor, axis: int, data: Tensor) -> Tensor:
    n, count = data.shape[axis], scale.shape[axis]
    if count in (1, n):
        return scale
    for block in _BLOCKS:
        if -(-n // block) == count:
            return scale.repeat_interleave(block, axis).narrow(axis, 0, n)
    raise CheckpointError(f"{key}: scales {list(scale.shape)} do not divide a payload {list(data.shape)} into blocks")


def _require_shape(key: str, p: Tensor, shape: Any) -> None:
    if tuple(shape) != tuple(p.shape):
        raise CheckpointError(f"{key} is {list(p.shape)} here and {list(shape)} in the checkpoint")


_warned: set[str] = set()


def _warn(message: str) -> None:
    kind = message.partition(" ")[2]
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(f"{message}; further weights of this kind are not reported", CheckpointWarning, stacklevel=6)


# --- one copy from the other -----------------------------------------------------------------------------------------


def _columnwise(row: dict[str, Tensor], p: QuantizedTensorBase) -> dict[str, Tensor]:
    """Returns the columnwise buffers that the rowwise ones determine."""
    fmt, data, scale = p.quantizer.format, row["rowwise_data"], row["rowwise_scale_inv"]
    if fmt.one_scale:
        return {"columnwise_data": _transposed(data), "columnwise_scale_inv": scale.clone()}
    if fmt.block_rows == fmt.block_cols:
        return {"columnwise_data": _transposed(data), "columnwise_scale_inv": _transposed(scale)}
    block, (_, k) = fmt.block_cols, shapes.rows_cols(p.shape[1:] if isinstance(p, QuantizedStack) else p.shape)
    bits = scale.view(torch.uint8)[..., ::block, :]  # one row of each block, then each block's columns
    bits = bits.repeat_interleave(block, -1)[..., :k]
    if fmt.columnwise == "transposed":
        bits = bits.transpose(-2, -1)
        low, high = data & 15, data >> 4
        whole = torch.stack((low, high), -1).flatten(-2).transpose(-2, -1)
        data = whole[..., ::2] | (whole[..., 1::2] << 4)
    made = {"columnwise_data": data.clone(), "columnwise_scale_inv": bits.contiguous().view(scale.dtype)}
    return made | ({"columnwise_amax": row["amax"].clone()} if fmt.two_level else {})


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-2, -1).contiguous()
