"""Functions of a `QuantizerRole` that return the quantizer which the recipe of the same name has for it."""

from __future__ import annotations

from diptych.common import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Quantizer,
    QuantizerRole,
)


def high_precision_factory(role: QuantizerRole) -> Quantizer | None:
    """Returns None: the role stays in high precision."""
    return None


def delayed_scaling_factory(role: QuantizerRole) -> Quantizer | None:
    """Returns the role's quantizer in `DelayedScaling`."""
    return DelayedScaling().quantizer(role)


def current_scaling_factory(role: QuantizerRole) -> Quantizer | None:
    """Returns the role's quantizer in `Float8CurrentScaling`."""
    return Float8CurrentScaling().quantizer(role)


def float8_block_scaling_factory(role: QuantizerRole) -> Quantizer | None:
    """Returns the role's quantizer in `Float8BlockScaling`."""
    return Float8BlockScaling().quantizer(role)


def mxfp8_factory(role: QuantizerRole) -> Quantizer | None:
    """Returns the role's quantizer in `MXFP8BlockScaling`."""
    return MXFP8BlockScaling().quantizer(role)


def nvfp4_factory(role: QuantizerRole) -> Quantizer | None:
    """Returns the role's quantizer in `NVFP4BlockScaling`."""
    return NVFP4BlockScaling().quantizer(role)
