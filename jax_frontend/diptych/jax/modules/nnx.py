"""nnx modules of one product: linear layers over any axes, and a product for flax's own layers.

Their parameters are made by flax's layers of the same names, so initial values, layout and metadata are flax's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx

from diptych.common.errors import UnsupportedError
from diptych.common.layers.checks import Names
from diptych.common.recipes import Recipe
from diptych.jax.functional.quantize import quantize
from diptych.jax.layers.general import Contraction, dense_general, kernel_axes, of_equation
from diptych.jax.layers.inject import injected
from diptych.jax.layers.linear import dense
from diptych.jax.modules.nnx_base import BIAS_INIT, KERNEL_INIT, HeldKernel, Layer, scoped, value
from diptych.jax.modules.serialize import register_with_flax

register_with_flax()

Array = jax.Array
_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class Linear(Layer):
    """A linear layer whose three products run in the low precision of `recipe`; otherwise as `nnx.Linear`.

    **Arguments:** `in_features`, `out_features`, `use_bias`, `param_dtype`, `kernel_init`, `bias_init`,
    `kernel_metadata`, `bias_metadata`, `rngs`: as in `nnx.Linear`; shardings are given as there, by
    `nnx.with_partitioning(init, names)` or by the metadata `out_sharding`. `dtype`: the input is cast to it; None keeps
    the input's dtype, which is the result's. The kernel is quantized from its own dtype. `recipe`: None gives the plain
    product. `module`, `name`: of the roles by which the recipe chooses quantizers.

    Parameters: `kernel` [in, out], `bias` [out] or None. Variables: `states` and `random`, None unless needed.

    **Raises:** TypeError if `recipe` is no recipe; a call raises as `diptych.jax.dense`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe | None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Any = KERNEL_INIT,
        bias_init: Any = BIAS_INIT,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        module: str = "linear",
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        made = nnx.Linear(
            in_features, out_features, use_bias=use_bias, param_dtype=param_dtype, kernel_init=kernel_init,
            bias_init=bias_init, kernel_metadata=kernel_metadata, bias_metadata=bias_metadata, rngs=rngs,
        )  # fmt: skip
        self.in_features, self.out_features = in_features, out_features
        self.kernel, self.bias = made.kernel, nnx.data(made.bias)
        self._keep(recipe, module, name, dtype, rngs)

    @scoped
    def __call__(self, x: Any) -> Array:
        """[..., in] to [..., out]."""
        return dense(self._input(x), self._kernel(), value(self.bias), **self._roles())


class _General(Layer):
    """Base of linear layers over any axes: a kernel is moved into the layout of products only where it is held."""

    kernel: nnx.Variable[Any]

    def _held(self) -> bool:
        return isinstance(self.kernel, HeldKernel)

    def _hold(self) -> int:
        if self.batch:
            raise UnsupportedError(f"{type(self).__name__}: a kernel with batch axes cannot be held quantized")
        return super()._hold()

    def _verb(self, kernel: Array) -> Any:
        return quantize

    def _run(self, x: Any, c: Contraction, bias: Any) -> Array:
        kernel = self._kernel() if self._held() else self.kernel.get_value()
        numbers = ((c.left, (-1,) if self._held() else c.right), (c.batch_left, c.batch_right))
        y = dense_general(x, kernel, bias, contraction=numbers, **self._roles())
        return y if c.order is None else y.transpose(c.order)


class LinearGeneral(_General):
    """A linear layer over any axes in the low precision of `recipe`; otherwise as `nnx.LinearGeneral`.

    **Arguments:** `in_features`, `out_features`, `axis`, `batch_axis`: as in `nnx.LinearGeneral`; with `batch_axis`
    each element of the batch has scales and states of its own, see `diptych.jax.dense_general`. Others: as in `Linear`.

    Parameters: `kernel` [*batch, *in, *out], `bias` [*batch, *out] or None.

    **Raises:** as `nnx.LinearGeneral` and `Linear`; a call raises as `dense_general`.
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        recipe: Recipe | None,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = MappingProxyType({}),
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Any = KERNEL_INIT,
        bias_init: Any = BIAS_INIT,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        module: str = "linear",
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        made = nnx.LinearGeneral(
            in_features, out_features, axis=axis, batch_axis=batch_axis, use_bias=use_bias, param_dtype=param_dtype,
            kernel_init=kernel_init, bias_init=bias_init, kernel_metadata=kernel_metadata, bias_metadata=bias_metadata,
            rngs=rngs,
        )  # fmt: skip
        self.in_features, self.out_features = made.in_features, made.out_features
        self.axis, self.batch_axis = made.axis, made.batch_axis
        self.kernel, self.bias = made.kernel, nnx.data(made.bias)
        self._keep(recipe, module, name, dtype, rngs, tuple(batch_axis.values()))

    def _move(self, kernel: Array) -> Array:
        ndim, n = len(self.in_features), kernel.ndim
        return kernel.transpose(*range(ndim, n), *range(ndim)).reshape(*kernel.shape[ndim:], -1)

    @scoped
    def __call__(self, x: Any) -> Array:
        """[*batch, ..., *in] to [*batch, ..., *out]; the axes may lie anywhere, as `axis` and `batch_axis` say."""
        x, batch = self._input(x), tuple(sorted(self.batch_axis))
        axis = tuple(sorted(a % x.ndim for a in self.axis))
        right = tuple(range(len(batch), len(batch) + len(axis)))
        return self._run(x, Contraction(axis, right, batch, batch), value(self.bias))


class Einsum(_General):
    """An einsum of an input and a kernel in the low precision of `recipe`; otherwise as `nnx.Einsum`.

    **Arguments:** `einsum_str`: the equation, with "->", as `diptych.jax.dense_general` takes it. It is given here, not
    in the call, since the recipe's states follow from it. `kernel_shape`, `bias_shape`: as in `nnx.Einsum`. Axes of
    both operands that the result has are batch axes, and each element of the batch has scales and states of its own.
    Others: as in `Linear`.

    Parameters: `kernel`, `bias` or None.

    **Raises:** as `nnx.Einsum` and `Linear`; a call raises as `dense_general`.
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        recipe: Recipe | None,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Any = KERNEL_INIT,
        bias_init: Any = BIAS_INIT,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        module: str = "linear",
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        made = nnx.Einsum(
            einsum_str, tuple(kernel_shape), None if bias_shape is None else tuple(bias_shape), param_dtype=param_dtype,
            kernel_init=kernel_init, bias_init=bias_init, kernel_metadata=kernel_metadata, bias_metadata=bias_metadata,
            rngs=rngs,
        )  # fmt: skip
        self.einsum_str, self.kernel_shape = made.einsum_str, tuple(kernel_shape)
        self.kernel, self.bias = made.kernel, nnx.data(made.bias)
        batch, self.contracted = kernel_axes(Names("Einsum", "input", "kernel"), einsum_str, len(self.kernel_shape))
        self._keep(recipe, module, name, dtype, rngs, tuple(self.kernel_shape[a] for a in batch))

    def _move(self, kernel: Array) -> Array:
        kept = [a for a in range(kernel.ndim) if a not in self.contracted]
        return kernel.transpose(*kept, *self.contracted).reshape(*(kernel.shape[a] for a in kept), -1)

    @scoped
    def __call__(self, x: Any) -> Array:
        """An input of the equation's first operand to its result."""
        x = self._input(x)
        c = of_equation(Names("Einsum", "input", "kernel"), self.einsum_str, x.ndim, len(self.kernel_shape))
        batch, rows, kept = c.shapes(x.shape, self.kernel_shape)
        made, order = (*batch, *rows, *kept), c.order or range(len(batch) + len(rows) + len(kept))
        of_kernel = [a for a in order if not len(batch) <= a < len(batch) + len(rows)]
        bias = value(self.bias)
        if bias is not None:  # flax keeps it in the order of the result
            bias = bias.reshape([made[a] for a in of_kernel]).transpose(np.argsort(of_kernel))
        return self._run(x, c, bias)


class DotGeneral(Layer):
    """A product with state for flax's own layers, to be passed as their `dot_general`.

        nnx.Linear(32, 64, dot_general=dj.nnx.DotGeneral(dj.DelayedScaling(), rngs=rngs), rngs=rngs)

    It is a module, so the layer that holds it keeps its states and random bits as variables. Each layer needs its own:
    states that two layers share are added up, which `update_states` refuses.

    **Arguments:** `batch`: the lengths of the batch dimensions that calls will have. Others: as in `Linear`.

    **Raises:** TypeError if `recipe` is no recipe; a call raises as that of `diptych.jax.dot_general`.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        *,
        batch: Sequence[int] = (),
        module: str = "linear",
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        self._keep(recipe, module, name, None, rngs, tuple(batch))

    def _kernels(self) -> tuple[tuple[str, str], ...]:
        return ()

    @scoped
    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> Array:
        """The arguments and result of `jax.lax.dot_general`, with the input as `lhs` and the kernel as `rhs`."""
        given = {"state": None, **self._roles()}
        return injected("DotGeneral", dimension_numbers, lhs, rhs, out_sharding, precision=precision,
                        preferred_element_type=preferred_element_type, **given)  # fmt: skip
