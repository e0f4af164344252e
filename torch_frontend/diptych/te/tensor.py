"""Quantizers with TransformerEngine's arguments and methods, which may change, around diptych's, which are values.

    quantizer.value             the diptych.common.Quantizer, from which everything follows
    quantizer.set_usage(...)    exchanges the value for one that makes other copies

A factory of a `CustomRecipe` may return them: the recipe takes their value. A `QuantizedTensor` holds the value, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from diptych.common import Float8BlockQuantizer as _Float8Block
from diptych.common import Float8CurrentScalingQuantizer as _Float8Current
from diptych.common import Float8Quantizer as _Float8
from diptych.common import MXFP8Quantizer as _MXFP8
from diptych.common import NVFP4Quantizer as _NVFP4
from diptych.common import Quantizer as Value
from diptych.common import QuantizerRole, UnsupportedError
from diptych.common.te_arguments import absorb
from diptych.te import absent
from diptych.te.arguments import bound, default_device, signature
from diptych.te.constants import DType
from diptych.torch import QuantizedTensor as QuantizedTensor
from diptych.torch import quantize, rng_state

__getattr__ = absent.attributes_of(__name__)

# Operands that wgrad and dgrad read columnwise: the others are read rowwise.
_COLUMNWISE = {("input", "wgrad"), ("weight", "dgrad"), ("grad_output", "wgrad")}


class Quantizer:
    """The base of quantizers. Attribute `value`: the diptych.common.Quantizer.

    A quantizer of your own derives from `diptych.common.Quantizer` and overrides `quantize_impl(x, quantize)`; this
    class **raises** NotImplementedError if it is made or derived from for that.
    """

    value: Value | None

    def __init__(self, **_: Any) -> None:
        raise UnsupportedError(
            f"{type(self).__name__}: a quantizer of your own derives from diptych.common.Quantizer, and overrides "
            "quantize_impl(x, quantize)"
        )

    def for_role(self, role: QuantizerRole) -> Value | None:
        """Returns the quantizer of a role whose factory returned this object; None: high precision."""
        return self.value

    def _held(self) -> Value:
        if self.value is None:
            raise UnsupportedError(f"{type(self).__name__} is an answer of a factory, and quantizes nothing itself")
        return self.value

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Changes which copies this quantizer makes; None keeps a choice. **Raises** ValueError where none is left."""
        self.value = self._held().with_usage(rowwise=rowwise, columnwise=columnwise)

    def get_usages(self) -> dict[str, bool]:
        """Returns which copies this quantizer makes, by "rowwise" and "columnwise"."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    @property
    def rowwise_usage(self) -> bool:
        """Whether the rowwise copy is made."""
        return self._held().rowwise

    @rowwise_usage.setter
    def rowwise_usage(self, wanted: bool) -> None:
        self.set_usage(rowwise=wanted)

    @property
    def columnwise_usage(self) -> bool:
        """Whether the columnwise copy is made."""
        return self._held().columnwise

    @columnwise_usage.setter
    def columnwise_usage(self, wanted: bool) -> None:
        self.set_usage(columnwise=wanted)

    @property
    def dtype(self) -> DType:
        """The dtype of the elements."""
        return DType(self._held().format.element)

    def copy(self) -> Quantizer:
        """Returns another object with the same value, which may be changed alone."""
        return copy.copy(self)

    def quantize(self, tensor: Tensor, *, out: QuantizedTensor | None = None, dtype: Any = None) -> QuantizedTensor:
        """Quantizes a tensor [..., K], see `diptych.torch.quantize`.

        **Arguments:** `out`: a QuantizedTensor of this quantizer, written in place; it keeps its logical dtype.
        `dtype`: None or the tensor's own.

        **Raises:** what `diptych.torch.quantize` raises; NotImplementedError for another `dtype`.
        """
        if dtype is not None and dtype != tensor.dtype:
            raise UnsupportedError(
                f"{type(self).__name__}.quantize: dtype must be the tensor's, {tensor.dtype}, got {dtype}"
            )
        made = self._quantized(tensor)
        if out is None:
            return made
        with torch.no_grad():
            return out.copy_(made.to(out.dtype))  # type: ignore[return-value]

    def __call__(self, tensor: Tensor) -> QuantizedTensor:
        """Quantizes a tensor; see `quantize`."""
        return self.quantize(tensor)

    def _quantized(self, tensor: Tensor) -> QuantizedTensor:
        value = self._held()
        rng = None
        if value.needs_rng:
            rng = rng_state(int(torch.randint(2**62, (), device="cpu")), device=tensor.device)
        return quantize(tensor, value, rng=rng)

    def update_quantized(
        self, src: Tensor, dst: QuantizedTensor, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensor:
        """Quantizes `src` into `dst`. **Raises** NotImplementedError for a `noop_flag`."""
        if noop_flag is not None:
            raise UnsupportedError(
                f"{type(self).__name__}.update_quantized: noop_flag must be None: copies are kept by a module's "
                "skip_weight_update"
            )
        return self.quantize(src, out=dst)

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """Returns a QuantizedTensor of zeros with this quantizer's copies. **Raises** as `quantize`."""
        if pin_memory:
            raise UnsupportedError(f"{type(self).__name__}.make_empty: pin_memory must be False: copies are not pinned")
        # Every quantizer takes bfloat16, and zeros are the same in each dtype.
        where = default_device() if device is None else device
        zeros = torch.zeros(tuple(shape), dtype=torch.bfloat16, device=where)
        return self._quantized(zeros).to(dtype).requires_grad_(requires_grad)  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        if name == "value" or name.startswith("__"):  # copy and pickle ask before it is set
            raise AttributeError(name)
        return getattr(self.value, name)

    def __repr__(self) -> str:
        return f"diptych.te.{type(self).__name__}({self.value!r})"


def _element(name: str, given: Any) -> str:
    """Returns the name of an FP8 dtype, given as a `DType`, as torch's dtype or by its name."""
    if isinstance(given, DType):
        return given.value
    if isinstance(given, (torch.dtype, str)):
        return str(given).removeprefix("torch.")
    raise TypeError(f"{name}: fp8_dtype must be a diptych.te.DType, got {type(given).__name__}: {given!r}")


def _taken(quantizer: Quantizer, args: tuple[Any, ...], kwargs: dict[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """Returns those arguments of a constructor that diptych's quantizer has; the others must have their defaults."""
    name = type(quantizer).__name__
    given = bound(name, args, kwargs)
    absorb(name, {argument: value for argument, value in given.items() if argument not in own})
    taken = {argument: value for argument, value in given.items() if argument in own}
    if "fp8_dtype" in taken:
        taken["fp8_dtype"] = _element(name, taken["fp8_dtype"])
    return taken


_FP8 = ("fp8_dtype", "rowwise", "columnwise")


class Float8Quantizer(Quantizer):
    """Per-tensor FP8 by a given scale. Delayed scaling in layers is `DelayedScaling`'s, or a `DelayedScalingRequest`'s.

    **Arguments:** `scale`: float32 of one element. `amax`: float32 [1], to which each call writes its tensor's amax.
    `fp8_dtype`: `DType.kFloat8E4M3` or `kFloat8E5M2`. `rowwise`, `columnwise`: the copies to make.
    """

    __signature__ = signature("Float8Quantizer")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _taken(self, args, kwargs, (*_FP8, "scale", "amax"))
        self.scale, self.amax = given.pop("scale"), given.pop("amax")
        self.value = _Float8(**given)

    def _quantized(self, tensor: Tensor) -> QuantizedTensor:
        made = quantize(tensor, self._held(), scale=self.scale.reshape(1))
        assert made.amax is not None
        self.amax.copy_(made.amax.view(self.amax.shape))
        return made


class Float8CurrentScalingQuantizer(Quantizer):
    """Per-tensor FP8 by the tensor's own amax.

    **Arguments:** `fp8_dtype`, `rowwise`, `columnwise`: as `Float8Quantizer`. `device`: accepted; tensors stay where
    they are. `force_pow_2_scales`, `amax_epsilon`: as diptych.common's. Others: TransformerEngine's defaults.
    """

    __signature__ = signature("Float8CurrentScalingQuantizer")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = (*_FP8, "device", "force_pow_2_scales", "amax_epsilon")
        given = _taken(self, args, kwargs, own)
        given.pop("device")
        self.value = _Float8Current(**given)


class MXFP8Quantizer(Quantizer):
    """MXFP8. **Arguments:** as `Float8Quantizer`; `with_2d_quantization`: as diptych.common's."""

    __signature__ = signature("MXFP8Quantizer")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.value = _MXFP8(**_taken(self, args, kwargs, (*_FP8, "with_2d_quantization")))


class Float8BlockQuantizer(Quantizer):
    """FP8 in blocks, 1x128 (`block_scaling_dim=1`) or 128x128 (`2`, the default here).

    **Arguments:** as `Float8Quantizer`; `amax_epsilon`, `force_pow_2_scales`: as diptych.common's.
    """

    __signature__ = signature("Float8BlockQuantizer")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = (*_FP8, "amax_epsilon", "force_pow_2_scales", "block_scaling_dim")
        given = _taken(self, args, kwargs, own)
        given.setdefault("block_scaling_dim", 2)
        self.value = _Float8Block(**given)


class NVFP4Quantizer(Quantizer):
    """NVFP4. **Arguments:** as diptych.common's; `with_post_rht_amax` must be `with_rht`, since the amax is that of the
    transformed tensor. Others: TransformerEngine's defaults."""

    __signature__ = signature("NVFP4Quantizer")
    _OWN = (
        "rowwise", "columnwise", "with_rht", "with_2d_quantization", "stochastic_rounding", "row_scaled_nvfp4",
        "with_random_sign_mask",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _taken(self, args, kwargs, (*self._OWN, "fp4_dtype", "with_post_rht_amax"))
        if given.pop("with_post_rht_amax", False) != given.get("with_rht", False):
            raise UnsupportedError(
                "NVFP4Quantizer: with_post_rht_amax must be equal to with_rht: the amax is that of the tensor that is "
                "quantized"
            )
        if _element("NVFP4Quantizer", given.pop("fp4_dtype", DType.kFloat4E2M1)) != DType.kFloat4E2M1.value:
            raise UnsupportedError("NVFP4Quantizer: fp4_dtype must be DType.kFloat4E2M1")
        self.value = _NVFP4(**given)


class IdentityQuantizer(Quantizer):
    """A factory's answer that a role stays in high precision."""

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        if dtype is not None:
            raise UnsupportedError("IdentityQuantizer: dtype must be None: the tensor keeps its own")
        self.value = None


class HybridQuantizer(Quantizer):
    """A factory's answer that names a quantizer for each copy of a tensor: the product that reads the rowwise copy uses
    one, the product that reads the columnwise copy the other. `diptych.common.QuantizerRole.gemm` names the product."""

    def __init__(
        self, *, rowwise_quantizer: Any, columnwise_quantizer: Any, columnwise_source: str = "original"
    ) -> None:
        if columnwise_source != "original":
            raise UnsupportedError(
                "HybridQuantizer: columnwise_source must be 'original': both copies are made of the tensor itself"
            )
        self.rowwise_quantizer, self.columnwise_quantizer, self.value = rowwise_quantizer, columnwise_quantizer, None

    def for_role(self, role: QuantizerRole) -> Value | None:
        columnwise = (role.tensor, role.gemm) in _COLUMNWISE
        chosen = self.columnwise_quantizer if columnwise else self.rowwise_quantizer
        made = chosen.for_role(role) if hasattr(chosen, "for_role") else chosen
        return None if made is None else made.with_usage(rowwise=True, columnwise=True)
