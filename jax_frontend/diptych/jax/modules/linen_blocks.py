"""Modules for flax's linen of several ops: a norm before a linear layer or a perceptron, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from diptych.jax.functional.permute import RowMap
from diptych.jax.layers.grouped_linear import grouped_dense
from diptych.jax.layers.layernorm_linear import layernorm_dense
from diptych.jax.layers.layernorm_mlp import layernorm_mlp
from diptych.jax.modules.linen import BIAS_INIT, KERNEL_INIT, Axes, Weighted, as_tuple, named
from diptych.jax.modules.mixture_of_experts import alignment, mixture
from diptych.jax.modules.shared import activation_name, fc1_parts, norm_name

Array = jax.Array

_STACK_INIT = nn.initializers.lecun_normal(batch_axis=0)


class Normed(Weighted, kw_only=True):
    """Base of the modules that begin with a norm."""

    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ()
    ln_bias_init: Any = BIAS_INIT
    ln_bias_axes: Axes = ()
    use_bias: bool = False

    @nn.nowrap
    def _norm(self, width: int) -> tuple[Any, Any, dict[str, Any]]:
        """Returns the norm's parameters and options."""
        normalization = norm_name(type(self).__name__, self.layernorm_type)
        ones = nn.initializers.zeros_init() if self.zero_centered_gamma else nn.initializers.ones_init()
        scale = self._param("scale", ones if self.scale_init is None else self.scale_init, (width,), self.scale_axes)
        has_bias = normalization == "LayerNorm"
        bias = self._param("ln_bias", self.ln_bias_init, (width,), self.ln_bias_axes) if has_bias else None
        options = {"normalization": normalization, "eps": self.epsilon, "zero_centered_gamma": self.zero_centered_gamma}
        return scale, bias, options


class LayerNormDenseGeneral(Normed):
    """A norm and a linear layer in the low precision of `recipe`; see `diptych.jax.layernorm_dense`.

    Arguments have the names and defaults of TransformerEngine's `LayerNormDenseGeneral`, except that `dtype` and
    `param_dtype` are linen's and no dimension has a logical name by default. The result is not a pair unless the norm's
    output is asked for. An axis of several features does not change the initial values' scale.

    **Arguments:** `features`: an int, or several whose product is the kernel's width. `layernorm_type`: "layernorm" or
    "rmsnorm". `epsilon`: added to the variance or mean square. `zero_centered_gamma`: multiply by 1 + scale.
    `scale_init`: by default ones, or zeros with `zero_centered_gamma`. `return_layernorm_output`: return the norm's
    output too. Others: as in `Dense`.

    Parameters: `scale` [in]; `ln_bias` [in] unless the norm is "rmsnorm"; `kernel` [in, *features]; `bias` [*features].

    **Raises:** as `Dense`; ValueError for an unknown norm.
    """

    kind = "layernorm_linear"
    features: int | Sequence[int]
    kernel_axes: Axes = ()
    bias_axes: Axes = ()
    return_layernorm_output: bool = False

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        """[..., in] to [..., *features]; with `return_layernorm_output` (result, norm's output [..., in])."""
        x = self._input(inputs)
        features = as_tuple(self.features)
        scale, ln_bias, options = self._norm(x.shape[-1])
        kernel = self._kernel((x.shape[-1], *features), self.kernel_axes)
        bias = self._bias(features, self.bias_axes)
        y = self._run(
            layernorm_dense, x, scale, ln_bias, kernel, None if bias is None else bias.reshape(-1),
            return_layernorm_output=self.return_layernorm_output, **options,
        )  # fmt: skip
        shape = (*x.shape[:-1], *features)
        return (y[0].reshape(shape), y[1]) if self.return_layernorm_output else y.reshape(shape)


class LayerNormMLP(Normed):
    """A norm and a two-layer perceptron in the low precision of `recipe`; see `diptych.jax.layernorm_mlp`.

    Arguments have the names and defaults of TransformerEngine's `LayerNormMLP`, except as in `LayerNormDenseGeneral`.
    The result is y alone, without the norm's output.

    **Arguments:** `intermediate_dim`: of the activation's output. `activations`: TransformerEngine's names, such as
    ("gelu",) or ("silu", "linear"), or a name of `layernorm_mlp`, such as "swiglu". `kernel_axes_1`, `bias_axes_1`,
    `kernel_axes_2`, `bias_axes_2`: logical names of both linear layers' dimensions. Others: as in
    `LayerNormDenseGeneral`.

    Parameters, with n = 2 for a gated activation, whose first half is activated, and else 1: `scale` and `ln_bias` as
    in `LayerNormDenseGeneral`; `wi_kernel` [in, n, intermediate_dim]; `wi_bias` [n, intermediate_dim]; `wo_kernel`
    [intermediate_dim, in]; `wo_bias` [in].

    **Raises:** as `LayerNormDenseGeneral`, and ValueError for an unknown activation.
    """

    kind = "layernorm_mlp"
    intermediate_dim: int = 2048
    kernel_axes_1: Axes = ()
    kernel_axes_2: Axes = ()
    bias_axes_1: Axes = ()
    bias_axes_2: Axes = ()
    activations: str | Sequence[str] = ("gelu",)

    @nn.compact
    def __call__(self, inputs: Any) -> Array:
        """[..., in] to [..., in]."""
        x, activation = self._input(inputs), activation_name("LayerNormMLP", self.activations)
        width, hidden = x.shape[-1], (fc1_parts(activation), self.intermediate_dim)
        scale, ln_bias, options = self._norm(width)
        wi = self._kernel((width, *hidden), self.kernel_axes_1, "wi_kernel")
        wi_bias = self._bias(hidden, self.bias_axes_1, "wi_bias")
        wo = self._kernel((self.intermediate_dim, width), self.kernel_axes_2, "wo_kernel")
        wo_bias = self._bias((width,), self.bias_axes_2, "wo_bias")
        return self._run(
            layernorm_mlp, x, scale, ln_bias, wi, None if wi_bias is None else wi_bias.reshape(-1), wo,
            wo_bias, activation=activation, **options,
        )  # fmt: skip


class Stacked(Weighted, kw_only=True):
    """Base of the modules whose kernels are stacks, each of which is initialized by itself."""

    kernel_init: Any = _STACK_INIT


class GroupedLinear(Stacked):
    """A linear layer for each group of rows, such as the experts of a layer; see `diptych.jax.grouped_dense`.

    **Arguments:** `num_groups`: the number of layers. Others: as in `Dense`; kernels are initialized each by itself.

    Parameters: `kernel` [num_groups, in, features], `bias` [num_groups, features].

    **Raises:** as `Dense`; a call raises as `grouped_dense`.
    """

    kind = "grouped_linear"
    num_groups: int
    features: int
    kernel_axes: Axes = ()
    bias_axes: Axes = ()

    @nn.compact
    def __call__(
        self, inputs: Any, offsets: Array | None = None, *, row_map: RowMap | None = None, align: int = 1
    ) -> Array:
        """[..., in] to [..., features]: rows by groups, whose bounds are `offsets` [num_groups + 1]; or tokens that a
        `row_map` brings into the order of their groups, to [rows, features]. `align`: as in `grouped_dense`."""
        x = self._input(inputs)
        shape = self.num_groups, x.shape[-1], self.features
        kernel = self._weight("kernel", self.kernel_init, shape, self.kernel_axes, lambda kernel: kernel.swapaxes(1, 2))
        bias = self._bias((self.num_groups, self.features), self.bias_axes)
        return self._run(grouped_dense, x, kernel, bias, offsets, row_map=row_map, align=align)


class Experts(Stacked, kw_only=True):
    """Base of `MoE`: its experts have no biases by default."""

    use_bias: bool = False


class MoE(Experts):
    """A mixture of experts: each token's result is the sum of its `top_k` experts' results, weighted by the router.

    An expert is a perceptron with one hidden layer. Rows are quantized as they move to their experts. The router runs
    in float32.

    **Arguments:** `num_experts`, `intermediate_dim`: the number of experts, and of each the width of the activation's
    output. `top_k`: experts of a token, whose probabilities are divided by their sum. `activations`: as in
    `LayerNormMLP`. `align`: each expert's rows begin at a multiple of it; None chooses that of the recipe.
    `router_axes`, `kernel_axes_1`, `kernel_axes_2`: logical names of the dimensions of the router's kernel
    [in, experts] and of the experts' kernels [experts, in, out]. Others: as in `Dense`.

    Submodules: `router`, an `nn.Dense`; `wi` and `wo`, `GroupedLinear`s. A gated activation has twice the width in
    `wi`, and its first half is activated.

    **Raises:** as `GroupedLinear`, and ValueError for an unknown activation.
    """

    num_experts: int
    intermediate_dim: int
    top_k: int = 2
    activations: str | Sequence[str] = ("silu", "linear")
    align: int | None = None
    router_init: Any = KERNEL_INIT
    router_axes: Axes = ()
    kernel_axes_1: Axes = ()
    kernel_axes_2: Axes = ()

    @nn.compact
    def __call__(self, inputs: Any) -> tuple[Array, Array]:
        """[..., in] to ([..., in], the load-balancing loss, which is 1 where all experts are used alike)."""
        activation, width = activation_name("MoE", self.activations), inputs.shape[-1]
        router = nn.Dense(
            self.num_experts, use_bias=False, dtype=jnp.float32, param_dtype=self.param_dtype, name="router",
            kernel_init=named(self.router_init, self.router_axes),
        )  # fmt: skip
        wi = self._experts("wi", fc1_parts(activation) * self.intermediate_dim, self.kernel_axes_1)
        wo = self._experts("wo", width, self.kernel_axes_2)
        return mixture(
            inputs, router, wi, wo, num_experts=self.num_experts, top_k=self.top_k, activation=activation,
            align=alignment(self.recipe, self.align),
        )  # fmt: skip

    @nn.nowrap
    def _experts(self, name: str, features: int, axes: Axes) -> GroupedLinear:
        return GroupedLinear(
            self.num_experts, features, recipe=self.recipe, use_bias=self.use_bias, dtype=self.dtype,
            param_dtype=self.param_dtype, kernel_init=self.kernel_init, bias_init=self.bias_init, kernel_axes=axes,
            bias_axes=(axes[0], axes[2]) if axes else (), name=name,
        )  # fmt: skip
