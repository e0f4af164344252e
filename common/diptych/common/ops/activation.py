"""Activations by the names that users know, checked once for both panels."""

from __future__ import annotations

from typing import NamedTuple


class ActivationOptions(NamedTuple):
    """Which activation; `gated`: of (a | b), act(a) * b."""

    which: str
    gated: bool


_PLAIN = ("gelu", "relu", "silu", "srelu", "qgelu")


_GATED = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu", "sreglu": "srelu", "qgeglu": "qgelu"}


ACTIVATIONS = {name: ActivationOptions(name, False) for name in _PLAIN} | {
    name: ActivationOptions(which, True) for name, which in _GATED.items()
}


def activation_options(op: str, name: str) -> ActivationOptions:
    """**Raises** ValueError for an unknown activation."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
