"""The quantizers that quantize sections measure, by name: a format's name, and the options that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from diptych.common import (
    FORMATS,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from diptych.common.quantizers import FP8_DTYPES, RHT, STOCHASTIC

COPIES = {"rowwise": ("rowwise",), "columnwise": ("columnwise",), "both": ("rowwise", "columnwise")}


class Named(NamedTuple):
    """A quantizer and its name."""

    name: str
    quantizer: Quantizer

    @property
    def plain(self) -> bool:
        return self.name == self.quantizer.format.name

    @property
    def rotates(self) -> bool:
        """Whether columnwise copies are rotated, which takes bfloat16 input."""
        return bool(self.quantizer.spec.flags & RHT)

    @property
    def reads(self) -> int:
        """Number of passes over the input: two if the scale rule needs the amax of the whole tensor first."""
        fmt = self.quantizer.format
        return 2 if fmt.two_level or (fmt.one_scale and not self.quantizer.needs_scale) else 1

    @property
    def bound(self) -> float:
        """Relative difference of random data from their quantized values: the elements' rounding, and some more."""
        if self.quantizer.format.pack > 1:
            return 0.2 if self.quantizer.spec.flags & STOCHASTIC else 0.14
        return 0.08 if "e5m2" in self.quantizer.format.name else 0.04

    def with_copies(self, copies: str) -> Named:
        usage = {c: c in COPIES[copies] for c in COPIES["both"]}
        return Named(self.name, self.quantizer.with_usage(**usage))

    def state(self, scale: Any, rng: Any) -> dict[str, Any]:
        """Returns the scale or random state that the quantizer needs."""
        q = self.quantizer
        return {"scale": scale} if q.needs_scale else {"rng": rng} if q.needs_rng else {}

    def arguments(self, made: Any, operand: Callable[[Any, str], Any], scale: Any, rng: Any) -> list[Any]:
        """Returns the arguments after the input of a `_core.quantize` that overwrites the buffers of `made`.

        **Arguments:** `operand`: maps (tensor, dtype name) to the core's operand. `scale`, `rng`: tensors, if needed.
        """
        q = self.quantizer
        parts = [
            (f"{side}_{part}", dtype)
            for side in COPIES["both"]
            for part, dtype in (("data", q.format.data), ("scale_inv", q.format.scale))
        ]
        amaxes = [("amax", "float32"), ("columnwise_amax", "float32")]

        def buffers(names: list[tuple[str, str]]) -> list[Any]:
            held = [(getattr(made, name), dtype) for name, dtype in names]
            return [None if t is None else operand(t, dtype) for t, dtype in held]

        state = [operand(scale, "float32") if q.needs_scale else None, operand(rng, "int32") if q.needs_rng else None]
        return [*q.spec, 0, *buffers(amaxes), *state, *buffers(parts)]


def quantizers() -> dict[str, Named]:
    """Returns the default quantizer of each row of the format table, and some with options that change the cost."""
    rows: list[Quantizer] = []
    for fp8 in FP8_DTYPES:
        rows += [
            Float8CurrentScalingQuantizer(fp8_dtype=fp8),
            Float8BlockQuantizer(fp8_dtype=fp8, block_scaling_dim=1),
            Float8BlockQuantizer(fp8_dtype=fp8, block_scaling_dim=2),
            MXFP8Quantizer(fp8_dtype=fp8),
        ]
    rows.append(NVFP4Quantizer())
    assert {q.format for q in rows} == set(FORMATS)
    more = (
        ("delayed", Float8Quantizer()),
        ("2d", MXFP8Quantizer(with_2d_quantization=True)),
        ("2d", NVFP4Quantizer(with_2d_quantization=True)),
        ("rht", NVFP4Quantizer(with_rht=True)),
        ("rht stochastic", NVFP4Quantizer(with_rht=True, stochastic_rounding=True)),
    )
    named = [Named(q.format.name, q) for q in rows] + [Named(f"{q.format.name} {said}", q) for said, q in more]
    return {n.name: n for n in named}
