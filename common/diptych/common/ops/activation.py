"""Activations by their public names, and the checks of their operands."""

from __future__ import annotations

from typing import NamedTuple

from diptych.common.ops import shapes
from diptych.common.ops.operand import Operand, require_high_precision
from diptych.common.ops.shapes import Constraint, Shape


class ActivationOptions(NamedTuple):
    """An activation. `which`: its name in the core. `gated`: x is (a | b), and the result is act(a) * b."""

    which: str
    gated: bool


_PLAIN = ("gelu", "relu", "silu", "srelu", "qgelu")


_GATED = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu", "sreglu": "srelu", "qgeglu": "qgelu"}


ACTIVATIONS = {name: ActivationOptions(name, False) for name in _PLAIN} | {
    name: ActivationOptions(which, True) for name, which in _GATED.items()
}


def activation_options(op: str, name: str) -> ActivationOptions:
    """Returns the options of an activation by its name. **Raises** ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


def activation(op: str, x: Operand, gated: bool) -> tuple[Shape, tuple[Constraint, ...]]:
    """Returns the shape of an activation of x, and constraints on its size."""
    require_high_precision(op, x)
    return shapes.activation_shape(op, x.shape, gated)
