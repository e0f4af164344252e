"""Norms and activations by the names that users know, checked once for both panels. The core's names are `which`."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from diptych.common.errors import ArgumentError

NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


class NormOptions(NamedTuple):
    """How a norm computes."""

    which: str
    eps: float
    zero_centered_gamma: bool


def norm_options(op: str, normalization: str, eps: float, zero_centered_gamma: bool) -> NormOptions:
    """A norm's options, eps as float32 holds it.

    **Raises** ValueError for an unknown norm or an eps that is not finite and >= 0; TypeError for no number or no bool.
    """
    if normalization not in NORMS:
        raise ValueError(f"{op}: normalization must be one of {', '.join(NORMS)}, got {normalization!r}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise ArgumentError(f"{op}: eps must be a number, got {type(eps).__name__}")
    if not isinstance(zero_centered_gamma, bool):
        raise ArgumentError(f"{op}: zero_centered_gamma must be a bool, got {type(zero_centered_gamma).__name__}")
    if not (math.isfinite(eps) and 0 <= eps < 2.0**128):
        raise ValueError(f"{op}: eps must be finite and >= 0, got {eps}")
    return NormOptions(NORMS[normalization], struct.unpack("f", struct.pack("f", eps))[0], zero_centered_gamma)
