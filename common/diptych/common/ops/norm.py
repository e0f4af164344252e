"""Norms by their public names, and the checks of their operands. `which` is a norm's name in the core."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from diptych.common.errors import ArgumentError
from diptych.common.ops import shapes
from diptych.common.ops.operand import Operand, holds, require_high_precision, vector
from diptych.common.ops.shapes import Constraint

_LAYERNORM_ALONE = {"mu": "takes no mean", "beta": "has no beta"}

NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


class NormOptions(NamedTuple):
    """The options of a norm."""

    which: str
    eps: float
    zero_centered_gamma: bool


def norm_options(op: str, normalization: str, eps: float, zero_centered_gamma: bool) -> NormOptions:
    """Returns a norm's options, with eps rounded to float32.

    **Raises** ValueError for an unknown norm or an eps that is not finite and >= 0, ArgumentError if eps is no number
    or zero_centered_gamma no bool.
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


def norm(op: str, which: str, x: Operand, **operands: Operand | None) -> tuple[Constraint, ...]:
    """Demands that gamma and beta [K], mu and rsigma [M] fit x. `operands`: those that the op reads or writes."""
    require_high_precision(op, x)
    m, k = shapes.rows_cols(x.shape)
    constraints: tuple[Constraint, ...] = ()
    for name, t in operands.items():
        if t is None:
            if name in ("gamma", "rsigma") or (name == "mu" and which == "layernorm"):
                raise ArgumentError(f"{op}: {name} is missing")
        elif which == "rmsnorm" and name in _LAYERNORM_ALONE:
            raise ValueError(f"{op}: {name} was given and is not read: rmsnorm {_LAYERNORM_ALONE[name]}")
        elif name in ("mu", "rsigma"):
            constraints += holds(op, t, "float32", m)
        else:
            constraints += vector(op, t, k)
    return constraints


def refuse_dbeta(op: str, wanted: bool) -> None:
    """**Raises** ValueError if the gradient of beta is `wanted` from rmsnorm, which has none."""
    if wanted:
        raise ValueError(f"{op}: dbeta was given and is not read: rmsnorm {_LAYERNORM_ALONE['beta']}")
