"""Modules with TransformerEngine's order of arguments, device and initial values; diptych.torch's otherwise.

Arguments may come by position, in TransformerEngine's order. Parameters are made on the current GPU, if there is one,
unless `device` says otherwise. Weights start from a normal distribution of deviation 0.023 and biases at zero, unless
an `init_method` says otherwise. diptych.torch's own arguments, such as `recipe`, come by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

import diptych.torch as dt
from diptych.te import absent
from diptych.te.arguments import bound, default_device, signature

__getattr__ = absent.attributes_of(__name__)


def _normal(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, 0.0, 0.023)


def _arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a layer, with TransformerEngine's defaults where diptych.torch has others."""
    given = bound(name, args, kwargs)
    given.setdefault("device", default_device())
    methods = ("init_method", "output_layer_init_method") if name == "LayerNormMLP" else ("init_method",)
    for method in methods:
        if given.get(method) is None:
            given[method] = _normal
    return given


class _Delayed(dt.QuantizedModule):
    """A layer whose `backward_dw` does nothing where backward has computed the weight gradients, as there."""

    def backward_dw(self) -> None:
        """Computes the weight gradients that backward left; see diptych.torch's."""
        if self._weight_gradients is not None and self._weight_gradients.options.delay:
            super().backward_dw()


class Linear(_Delayed, dt.Linear):
    """diptych.torch's `Linear`, with TransformerEngine's order of arguments, device and initial values."""

    __signature__ = signature("Linear")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**_arguments("Linear", args, kwargs))


class LayerNormLinear(_Delayed, dt.LayerNormLinear):
    """diptych.torch's `LayerNormLinear`, with TransformerEngine's order of arguments, device and initial values."""

    __signature__ = signature("LayerNormLinear")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**_arguments("LayerNormLinear", args, kwargs))


class LayerNormMLP(_Delayed, dt.LayerNormMLP):
    """diptych.torch's `LayerNormMLP`, with TransformerEngine's order of arguments, device and initial values."""

    __signature__ = signature("LayerNormMLP")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**_arguments("LayerNormMLP", args, kwargs))


class GroupedLinear(_Delayed, dt.GroupedLinear):
    """diptych.torch's `GroupedLinear`, with TransformerEngine's order of arguments, default device and initial values.
    Its weights are one parameter [G, N, K]; `weight0`, `weight1`, ... show its parts."""

    __signature__ = signature("GroupedLinear")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**_arguments("GroupedLinear", args, kwargs))


def _norm_arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """Returns the arguments of a norm, and `sequence_parallel`."""
    given = bound(name, args, kwargs)
    if given.get("device") is None:
        given["device"] = default_device()
    return given, given.pop("sequence_parallel", None)


def _mark(module: nn.Module, sequence_parallel: bool | None) -> None:
    """Sets the attribute of parameters by which a trainer sums their gradients over tensor-parallel ranks."""
    if sequence_parallel is not None:
        for p in module.parameters():
            p.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class LayerNorm(dt.LayerNorm):
    """diptych.torch's `LayerNorm`, on TransformerEngine's default device. `sequence_parallel`: a bool becomes an
    attribute of the parameters, which the norm itself does not read."""

    __signature__ = signature("LayerNorm")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given, marked = _norm_arguments("LayerNorm", args, kwargs)
        super().__init__(**given)
        _mark(self, marked)


class RMSNorm(dt.RMSNorm):
    """diptych.torch's `RMSNorm`, on TransformerEngine's default device. `sequence_parallel`: as `LayerNorm`."""

    __signature__ = signature("RMSNorm")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given, marked = _norm_arguments("RMSNorm", args, kwargs)
        super().__init__(**given)
        _mark(self, marked)
