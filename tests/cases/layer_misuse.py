"""Bad calls of layers that both panels have; `misuse.py` has those of verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases.misuse import Library, Misuse
from diptych.common.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from diptych.common.quantizers import MXFP8Quantizer, NVFP4Quantizer
from diptych.common.recipes import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling

MX, NV = MXFP8BlockScaling(), NVFP4BlockScaling()
FP4 = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
NOISY = CustomRecipe(lambda role: NVFP4Quantizer(stochastic_rounding=True))
F32 = "float32"


class _Own(NVFP4Quantizer):
    """A custom quantizer, with its own `quantize_impl`."""

    def quantize_impl(self, x: Any, **given: Any) -> Any:
        raise NotImplementedError


OWN = CustomRecipe(lambda role: _Own())


def _linear(
    x: tuple[int, ...] = (32, 64), weight: tuple[int, ...] = (48, 64), bias: Any = None, recipe: Any = MX,
    dtypes: tuple[str, str, str] = (F32, F32, F32),
) -> Callable[[Library], Any]:  # fmt: skip
    def call(lib: Library) -> Any:
        given = None if bias is None else lib.ones(*bias, dtype=dtypes[2])
        return lib.linear(lib.ones(*x, dtype=dtypes[0]), lib.ones(*weight, dtype=dtypes[1]), given, recipe)

    return call


def _grouped(
    x: tuple[int, ...] = (32, 64), weight: tuple[int, ...] = (2, 48, 64), bias: Any = None,
    offsets: tuple[int, ...] | None = (0, 16, 32), recipe: Any = MX, long: bool = False, **options: Any,
) -> Callable[[Library], Any]:  # fmt: skip
    def call(lib: Library) -> Any:
        given = None if bias is None else lib.ones(*bias)
        ends = None if offsets is None else lib.ones(3) if long else lib.offsets(*offsets)
        return lib.grouped(lib.ones(*x), lib.ones(*weight), given, ends, recipe, **options)

    return call


def _held(lib: Library) -> Any:
    """A grouped layer with a weight that is held as one tensor."""
    weight = lib.verbs.quantize(lib.ones(96, 64), MXFP8Quantizer())
    return lib.grouped(lib.ones(32, 64), weight, None, lib.offsets(0, 16, 32), MX)


def _held_stack(lib: Library) -> Any:
    """A layer with a weight that is held as a stack."""
    weight = lib.verbs.quantize_stack(lib.ones(2, 48, 64), MXFP8Quantizer())
    return lib.linear(lib.ones(32, 64), weight, None, MX)


LAYERS = [case._replace(panels=True) for case in (
    Misuse("a layer's recipe", _linear(recipe="mxfp8"), ArgumentError,
           "{linear}: recipe must be a diptych Recipe( or None)?, got str"),
    Misuse("a layer's input of integers", _linear(dtypes=("int32", F32, F32)), DTypeError,
           "{linear}: {input} must be float32, bfloat16 or float16, got int32"),
    Misuse("a layer's weight of integers", _linear(dtypes=(F32, "int32", F32)), DTypeError,
           "{linear}: {weight} must be float32, bfloat16 or float16, got int32"),
    Misuse("a layer's bias of integers", _linear(bias=(48,), dtypes=(F32, F32, "int32")), DTypeError,
           "{linear}: bias must be float32, bfloat16 or float16, got int32"),
    Misuse("a layer's K", _linear((32, 60)), ShapeError,
           r"{linear}: {input} \[..., K\] and {weight} \[N, K\] do not fit: \[32, 60\] and \[48, 64\]$"),
    Misuse("a layer's scalar", _linear(()), ShapeError,
           r"{linear}: {input} \[..., K\] and {weight} \[N, K\] do not fit: \[\] and \[48, 64\]$"),
    Misuse("a layer's stack", _linear(weight=(2, 48, 64)), ShapeError,
           r"{linear}: {input} \[..., K\] and {weight} \[N, K\] do not fit: \[32, 64\] and \[2, 48, 64\]$"),
    Misuse("a layer's blocks", _linear((32, 72), (48, 72), recipe=FP4), ShapeError,
           r"{linear}: quantize \(nvfp4\): the last extent of a \[32, 72\] tensor must be a multiple of 16: pad .*"),
    Misuse("a layer's bias", _linear(bias=(47,)), ShapeError,
           r"{linear}: bias must be \[48\] for {weight} \[48, 64\], got \[47\]$"),
    Misuse("a layer's bias in two dimensions", _linear(bias=(1, 48)), ShapeError,
           r"{linear}: bias must be \[48\] for {weight} \[48, 64\], got \[1, 48\]$"),
    Misuse("a layer's rng", _linear(recipe=NOISY), ArgumentError,
           r"{linear}: NVFP4Quantizer\(.*\) rounds stochastically and needs rng=, int32 \[4\]; rng_state\(seed\) "),
    Misuse("a layer's held stack", _held_stack, ArgumentError,
           r"{linear}: a {weight} that is held quantized must be a Quantized(Tensor|Array), got a QuantizedStack$"),
    Misuse("groups' recipe", _grouped(recipe="mxfp8"), ArgumentError,
           "{grouped}: recipe must be a diptych Recipe( or None)?, got str"),
    Misuse("groups' K", _grouped((32, 60)), ShapeError,
           r"{grouped}: {input} \[..., K\] and {weight} \[G, N, K\] do not fit: \[32, 60\] and \[2, 48, 64\]$"),
    Misuse("groups' matrix", _grouped(weight=(48, 64)), ShapeError,
           r"{grouped}: {input} \[..., K\] and {weight} \[G, N, K\] do not fit: \[32, 64\] and \[48, 64\]$"),
    Misuse("groups' bias", _grouped(bias=(48,)), ShapeError,
           r"{grouped}: bias must be \[2, 48\] for {weight} \[2, 48, 64\], got \[48\]$"),
    Misuse("groups given by nothing", _grouped(offsets=None), ValueError,
           "{grouped}: give the groups once, as offsets or by a row_map"),
    Misuse("groups' offsets of numbers", _grouped(long=True), DTypeError,
           r"{grouped}: offsets must be int32, got float32\[3\]"),
    Misuse("groups of other weights", _grouped(offsets=(0, 32)), ShapeError,
           r"{grouped}: offsets must be \[3\], one more than {weight}s, got \[2\]$"),
    Misuse("a promise of no int", _grouped(align=16.0), ArgumentError, "{grouped}: align must be an int, got float"),
    Misuse("a promise below 1", _grouped(align=0), ValueError, "align must be at least 1, got 0"),
    Misuse("groups' own quantizer", _grouped(recipe=OWN), UnsupportedError,
           "{grouped}: a quantizer of the user's own for the {weight}, "),
    Misuse("groups' stochastic weights", _grouped(recipe=NOISY), UnsupportedError,
           "{grouped}: {weight}s rounded stochastically, by NVFP4Quantizer"),
    Misuse("groups' held matrix", _held, ArgumentError,
           r"{grouped}: a {weight} that is held quantized must be a QuantizedStack, got a Quantized(Tensor|Array)$"),
)]  # fmt: skip
