"""What the device computes of a recorded tensor: statistics, hash and a sample. The host never waits here."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diptych.common.formats import FORMATS
from diptych.lab import capture as rules
from diptych.lab.traces import DTYPES, Quantization, Site, Statistics, is_recorded, places
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.checks import Copy


def dtype_name(dtype: torch.dtype) -> str | None:
    """Returns a dtype's name in traces, None if traces do not have it."""
    name = str(dtype).removeprefix("torch.")
    return name if is_recorded(name) else None


def measured(x: Tensor) -> Tensor:
    """Returns amax, mean and rms of the finite elements, and the numbers of those that are zero, NaN, infinite and
    subnormal, float64 [7] on x's device.

    They are computed in float32 for floats of at most four bytes, else in float64, of values that are divided by amax,
    so that no sum overflows.
    """
    form = DTYPES[str(x.dtype).removeprefix("torch.")]
    narrow = form.kind == "float" and form.nbytes <= 4
    values = x.reshape(-1).to(torch.float32 if narrow else torch.float64)
    if not values.numel():
        return values.new_zeros(7, dtype=torch.float64)
    magnitude = values.abs()
    zero = values.numel() - values.count_nonzero()
    nan = (values != values).count_nonzero()
    infinite = (magnitude == torch.inf).count_nonzero()
    subnormal = ((magnitude > 0) & (magnitude < form.smallest_normal)).count_nonzero()
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    amax = finite.abs().amax()
    scaled = finite / torch.where(amax > 0, amax, 1.0)
    count = (values.numel() - nan - infinite).clamp(min=1)
    mean = scaled.sum() / count * amax
    rms = (scaled.square().sum() / count).sqrt() * amax  # vector_norm adds up large tensors one by one
    rms = torch.minimum(rms, amax)
    return torch.stack([t.to(torch.float64) for t in (amax, mean, rms, zero, nan, infinite, subnormal)])


def statistics(row: list[float], site: Site, errors: list[float] | None) -> Statistics:
    """Returns the statistics of what `measured` and, of a payload, `errors` computed."""
    amax, mean, rms, *counts = row
    found = None if errors is None else quantization(errors, rules.elements(site))
    return rules.statistics(amax, mean, rms, tuple([int(n) for n in counts]), site.size, found)


def quantized(x: Tensor, result: Tensor, largest: Tensor, beyond: float) -> Tensor:
    """Returns what `quantization` takes, float64 [6] on x's device.

    **Arguments:** tensors of one shape. `x`: before it was quantized. `result`: dequantized, float32. `largest`: what
    the format's largest value is in each place, dequantized, float32. `beyond`: see `rules.beyond`.
    """
    old = x.to(torch.float32)
    if not old.numel():
        return old.new_zeros(6, dtype=torch.float64)
    clipped = ((result.abs() == largest) & (old.abs() > largest * beyond)).count_nonzero()
    flushed = ((old != 0) & (result == 0)).count_nonzero()
    finite = old.isfinite()
    count = finite.count_nonzero().clamp(min=1)
    found = [clipped, flushed]
    for values in (torch.where(finite, old, 0.0), torch.where(finite, result - old, 0.0)):
        amax = values.abs().amax()
        found += [amax, ((values / torch.where(amax > 0, amax, 1.0)).square().sum() / count).sqrt()]
    return torch.stack([t.to(torch.float64) for t in found])


def errors(x: Tensor, copy: Copy) -> Tensor:
    """Returns `quantized` of a tensor and one copy of it."""
    data, scale_inv, amax, form, columnwise = copy
    element = FORMATS[form].element
    full = torch.full(data.shape, rules.largest_byte(element), dtype=torch.uint8, device=data.device).view(data.dtype)
    copies: list[Copy] = [(d, scale_inv, amax, form, columnwise) for d in (data, full)]
    result, largest = (quantize_ops.dequantize(c, torch.float32) for c in copies)
    return quantized(x.reshape(result.shape), result, largest, rules.beyond(element))


def quantization(row: list[float], size: int) -> Quantization:
    """Returns how a tensor of `size` elements was quantized, from what `quantized` computed."""
    return rules.quantization(row[:2], row[2:4], row[4:], size)


@functools.lru_cache(maxsize=256)
def _positions(size: int, count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(places(size, count).copy()).to(device)


def sample(x: Tensor, count: int) -> Tensor:
    """Returns the elements of a flat x at `places(x.numel(), count)`, [count]."""
    return _bytewise(x).reshape(-1)[_positions(x.numel(), count, x.device)].view(x.dtype)


def copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bytewise(x: Tensor) -> Tensor:
    """The bits as integers, which every device can index."""
    return x.contiguous().view(_UNSIGNED[x.element_size()])


def to_numpy(x: Tensor):  # type: ignore[no-untyped-def]
    """Returns the bits of a tensor as unsigned integers, in its shape; the host waits for them."""
    bits = _bytewise(x).cpu().numpy()
    return bits.view(f"u{x.element_size()}")


def bits(x: Tensor) -> bytes:
    """The bits of a tensor of any dtype and layout; the host waits for them."""
    if x.layout is not torch.strided:
        x = x.to_dense()
    return to_numpy(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).tobytes()


def synchronize(tensors: list[Tensor]) -> None:
    """Waits for all work on the tensors' devices: hooks of a backward pass may run on other streams."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.synchronize(device)


def moved(tensors: list[Any]) -> list[np.ndarray]:
    """Returns equally shaped tensors in the host's memory, by one transfer from each device."""
    found: list[Any] = [None] * len(tensors)
    for device in {t.device for t in tensors}:
        places = [i for i, t in enumerate(tensors) if t.device == device]
        moved = torch.stack([tensors[i] for i in places]).cpu().numpy()
        for i, row in zip(places, moved, strict=True):
            found[i] = row
    return found


def moved_field(records: Iterable[Any], field: str) -> dict[int, np.ndarray]:
    """Returns by a record's id what `moved` does of a field, for those records that have it: the others have None."""
    have = [r for r in records if getattr(r, field) is not None]
    return dict(zip(map(id, have), moved([getattr(r, field) for r in have]), strict=True))
