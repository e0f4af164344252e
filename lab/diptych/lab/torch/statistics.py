"""Statistics, hashes and samples of recorded tensors, computed on their device. The host waits only where stated."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diptych.common.formats import FORMATS
from diptych.lab import capture as rules
from diptych.lab.traces import Site, Statistics, is_recorded, places
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives import statistics as statistics_ops
from diptych.torch.primitives.checks import Copy


def dtype_name(dtype: torch.dtype) -> str | None:
    """Returns a dtype's name in traces, None if traces do not have it."""
    name = str(dtype).removeprefix("torch.")
    return name if is_recorded(name) else None


def statistics(row: list[float], site: Site, errors: list[float] | None) -> Statistics:
    """Returns the statistics of a site. `row`: the result of the core's op. `errors`: those of a payload, see
    `errors`."""
    found = None if errors is None else rules.quantization(errors, rules.elements(site))
    return rules.statistics(row, site.size, found)


def errors(x: Tensor, copies: Iterable[tuple[str, Copy]]) -> dict[str, Tensor]:
    """Returns the errors of each named copy of x as `rules.quantization` takes them, float64 [16] on x's device."""
    before, found = statistics_ops.statistics(x), {}
    for name, (data, scale_inv, amax, form, columnwise) in copies:
        element, top = FORMATS[form].element, rules.largest_byte(FORMATS[form].element)
        full = torch.full(data.shape, top, dtype=torch.uint8, device=data.device).view(data.dtype)
        both: list[Copy] = [(d, scale_inv, amax, form, columnwise) for d in (data, full)]
        result, largest = (quantize_ops.dequantize(c, torch.float32) for c in both)
        found[name] = torch.cat([before, statistics_ops.errors(x, result, largest, rules.beyond(element))])
    return found


@functools.lru_cache(maxsize=256)
def _positions(size: int, count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(places(size, count).copy()).to(device)


def sample(x: Tensor, count: int) -> Tensor:
    """Returns the elements of the flattened x at `places(x.numel(), count)`, [count]."""
    return _bytewise(x).reshape(-1)[_positions(x.numel(), count, x.device)].view(x.dtype)


def copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bytewise(x: Tensor) -> Tensor:
    """Returns the bits as integers, which every device can index."""
    return x.contiguous().view(_UNSIGNED[x.element_size()])


def to_numpy(x: Tensor):  # type: ignore[no-untyped-def]
    """Returns the bits of a tensor as unsigned integers in its shape. The host waits for them."""
    bits = _bytewise(x).cpu().numpy()
    return bits.view(f"u{x.element_size()}")


def bits(x: Tensor) -> bytes:
    """Returns the bits of a tensor of any dtype and layout. The host waits for them."""
    if x.layout is not torch.strided:
        x = x.to_dense()
    return to_numpy(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).tobytes()


def synchronize(tensors: list[Tensor]) -> None:
    """Waits for all work on the tensors' devices, since hooks of a backward pass may run on other streams."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.synchronize(device)


def moved(tensors: list[Any]) -> list[np.ndarray]:
    """Returns equally shaped tensors as arrays of the host, with one transfer from each device."""
    found: list[Any] = [None] * len(tensors)
    for device in {t.device for t in tensors}:
        places = [i for i, t in enumerate(tensors) if t.device == device]
        moved = torch.stack([tensors[i] for i in places]).cpu().numpy()
        for i, row in zip(places, moved, strict=True):
            found[i] = row
    return found


def moved_field(records: Iterable[Any], field: str) -> dict[int, np.ndarray]:
    """Returns a field of records as arrays of the host, by the records' ids, without records whose field is None."""
    have = [r for r in records if getattr(r, field) is not None]
    return dict(zip(map(id, have), moved([getattr(r, field) for r in have]), strict=True))
