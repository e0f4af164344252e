"""quantize into existing outputs, beside a copy. An input counts once for each pass that the scale rule needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import diptych.torch as dt
from benchmarks import room
from benchmarks.cases import Case
from benchmarks.quantizers import Named, quantizers
from benchmarks.results import Row
from benchmarks.room import Run, copy_run, difference, measured, normal, poison
from diptych.core import _core
from diptych.torch.primitives import quantize as quantize_ops

COPY = 2 << 30  # bytes that the copy moves
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # of the random Hadamard transform, NUMERICS 5


def state() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a given scale, which keeps products of normal numbers in range, and a random state."""
    return torch.full((1,), 16.0, device=room.DEVICE), dt.rng_state(0, device=room.DEVICE)


def quantized(x: torch.Tensor, quantizer: Any) -> dt.QuantizedTensor:
    """Quantizes with the scale or random state that the quantizer needs."""
    return dt.quantize(x, quantizer, **Named("", quantizer).state(*state()))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Returns each 16 rows after the random Hadamard transform, in float32."""
    z = x.float().unflatten(0, (-1, 16)) * torch.tensor(SIGNS, device=x.device)[:, None] / 4
    for half in (1, 2, 4, 8):
        low, high = z.unflatten(1, (-1, 2, half)).unbind(2)
        z = torch.stack((low + high, low - high), 2).flatten(1, 3)
    return z.flatten(0, 1)


def prepared(x: torch.Tensor, named: Named) -> tuple[Any, list[Any], list[torch.Tensor]]:
    """Returns a quantized tensor, the core's arguments that overwrite it, and the tensors that a call writes."""
    scale, rng = state()
    made = dt.quantize(x, named.quantizer, **named.state(scale, rng))
    arguments = named.arguments(made, lambda t, _: t, scale, rng)
    outputs = [t for t in arguments if isinstance(t, torch.Tensor) and t is not scale and t is not rng]
    return made, arguments, outputs


def rows(case: Case, _: Any) -> Iterator[Row]:
    x = normal(*case.shape)
    runs = {"copy": copy_run(COPY)}
    for name in case.names:
        named = quantizers()[name].with_copies(case.what.split()[0])
        made, arguments, outputs = prepared(x, named)

        def call(arguments: list[Any] = arguments) -> None:
            _core.quantize(x, *arguments)

        written = sum(t.numel() * t.element_size() for t in outputs)
        moved = x.numel() * x.element_size() * named.reads + written
        runs[name] = Run(call, bytes=moved, check=checker(x, named, call, made, outputs), bound=named.bound)
    yield from measured(case, runs)


def checker(
    x: torch.Tensor, named: Named, call: Callable[[], Any], made: Any, outputs: list[torch.Tensor]
) -> Callable[[Any], float]:
    """Returns a function that gives the larger relative difference of both copies from x, with the outputs poisoned
    first."""

    def check(_: Any) -> float:
        poison(*outputs)
        call()
        worst = 0.0
        for side in (False, True):
            if getattr(made, ("rowwise", "columnwise")[side] + "_data") is None:
                continue
            got = quantize_ops.dequantize(made.copy_of(side), torch.float32)
            want = rotated(x) if side and named.rotates else x
            found = difference(got.reshape(want.shape), want)
            worst = found if not found <= worst else worst
        return worst

    return check
