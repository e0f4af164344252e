"""`FusedInput`: what quantize and amax read instead of an array: a norm or an activation of it, or its rows in a map's
order.

    y = ((x - mu) * rsigma) * g + beta      g is gamma, or 1 + gamma; RMSNorm: mu is 0, and there is no beta
    y = act(a)  or  act(a) * b              gated: x = (a | b)

All arithmetic is float32, each operation rounded. The verbs `layernorm` and `activate` round y to x's dtype; a
`FusedInput` is quantized without that rounding and without ever lying in memory. Permuted rows have the bits of
permuting first. Primitives have no derivative; `layernorm` and `activate` have one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from diptych.common.ops.norm import NormOptions
from diptych.common.quantizers import Quantizer
from diptych.jax.functional.amax_group import group_amaxes, max_over
from diptych.jax.primitives import quantize as quantize_ops
from diptych.jax.primitives.ffi import Source
from diptych.jax.tensors.quantized import QuantizedArray, from_buffers

Array = jax.Array


# --- quantizing a source computed from x ---


@functools.partial(jax.tree_util.register_dataclass, data_fields=("x", "operands", "amax"), meta_fields=("source",))
@dataclasses.dataclass(frozen=True, eq=False)
class FusedInput:
    """A source of quantize that is never stored: a norm or activation of x in float32, unrounded, or x's rows permuted.

    `amax`: float32 [1] if it is known; per-tensor formats without a scale then use it instead of computing it.
    """

    x: Array
    operands: tuple[Array, ...]
    source: Source
    amax: Array | None = None

    @property
    def dtype(self) -> Any:
        """The dtype that the result would have if it was stored."""
        return self.x.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        if self.source.kind == "permuted":
            return (*self.operands[1].shape, self.x.shape[-1])
        halved = self.source.kind == "activation" and self.source.option
        return (*self.x.shape[:-1], self.x.shape[-1] // 2) if halved else self.x.shape

    def with_amax(self, group: Any) -> FusedInput:
        """Returns this source with its amax computed, reduced over the mesh axes `group`, if any."""
        amax = quantize_ops.amax(self.x, 0, self.source, self.operands, columnwise=True)[0]
        return dataclasses.replace(self, amax=max_over(amax, group) if group else amax)

    def quantize(
        self,
        quantizer: Quantizer,
        *,
        scale: Array | None = None,
        rng: Array | None = None,
        amax_group: Any = None,
        as_bytes: bool = False,
        column_sum: str = "",
    ) -> tuple[QuantizedArray, Array | None]:
        """Quantizes like the verb `quantize`, and also sums over rows in the dtype `column_sum` if one is given."""
        given: dict[str, Array | None] = {"scale": scale, "rng": rng}
        if self.amax is not None and scale is None and quantizer.format.one_scale:
            given["amax"] = self.amax
        elif amax_group is not None:
            given |= group_amaxes(self.x, quantizer, amax_group, self.source, self.operands)
        buffers = quantize_ops.quantize(
            self.x,
            quantizer,
            **given,
            as_bytes=as_bytes,
            source=self.source,
            operands=self.operands,
            column_sum=column_sum,
        )
        total = buffers.pop("column_sum", None)
        return from_buffers(buffers, quantizer, self.shape, self.x.dtype), total


def normalized(
    x: Array, gamma: Array, beta: Array | None, stats: tuple[Array, ...], options: NormOptions
) -> FusedInput:
    """Returns the output of a norm of x as a source, computed from given statistics."""
    source = Source("norm", options.which, options.zero_centered_gamma, beta is not None)
    return FusedInput(x, (gamma, *([] if beta is None else [beta]), *stats), source)


def activated(x: Array, which: str, gated: bool) -> FusedInput:
    return FusedInput(x, (), Source("activation", which, gated))


def activated_grad(dy: Array, x: Array, which: str, gated: bool) -> FusedInput:
    return FusedInput(x, (dy,), Source("activation_grad", which, gated))


def permuted(x: Array, row_id_map: Array, row_source: Array) -> FusedInput:
    """Returns the rows of x, permuted by a map, as a source."""
    return FusedInput(x, (row_id_map, row_source), Source("permuted"))
