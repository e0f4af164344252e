"""The options of products. Layers, ops and traces pass them as one value, so a new option changes only this file, the
core's `gemm.h` and the verbs that take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from diptych.common.formats import FormatRow


class GemmOptions(NamedTuple):
    """Options of a product that change its result; each is a bool.

    `fast_accum`: Hopper's reduced-precision accumulation; per-tensor formats only.
    """

    fast_accum: bool = False

    @classmethod
    def named(cls, values: Mapping[str, Any]) -> GemmOptions:
        """Returns the options that `values` names; an option that it does not name has its default."""
        return cls(**{name: values[name] for name in cls._fields if name in values})


DEFAULTS = GemmOptions()


def check_gemm_options(op: str, options: GemmOptions, a: FormatRow, b: FormatRow) -> None:
    """**Raises** ValueError for options that a product of these formats does not have."""
    if options.fast_accum and not (a.one_scale and b.one_scale):
        raise ValueError(f"{op}: fast_accum exists for per-tensor FP8 only, got {a.name} x {b.name}")
