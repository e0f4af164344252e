"""nnx modules of several ops: a norm before a linear layer or a perceptron, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diptych.common.ops.activation import activation_options
from diptych.common.ops.norm import norm_options
from diptych.common.recipes import Recipe
from diptych.jax.functional.permute import RowMap
from diptych.jax.layers.grouped_linear import grouped_dense
from diptych.jax.layers.layernorm_linear import layernorm_dense
from diptych.jax.layers.layernorm_mlp import MLP_OFFSETS, PARTS, layernorm_mlp, part_name
from diptych.jax.modules.mixture_of_experts import alignment, mixture
from diptych.jax.modules.nnx_base import BIAS_INIT, KERNEL_INIT, Layer, optional, param, scoped, value
from diptych.jax.modules.shared import fc1_parts

Array = jax.Array
_STACK_INIT = nnx.initializers.lecun_normal(batch_axis=0)


class _Normed(Layer):
    """Base of the modules that begin with a norm."""

    def _norm(
        self, width: int, normalization: str, eps: float, zero_centered: bool, dtype: Any, metadata: Any, rngs: nnx.Rngs
    ) -> None:
        norm_options(type(self).__name__, normalization, eps, zero_centered)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered
        ones = nnx.initializers.zeros_init() if zero_centered else nnx.initializers.ones_init()
        self.scale = param(ones, rngs, (width,), dtype, metadata)
        self.ln_bias = optional(normalization == "LayerNorm", BIAS_INIT, rngs, (width,), dtype, metadata)

    def _norm_roles(self) -> dict[str, Any]:
        options = {"eps": self.eps, "normalization": self.normalization}
        return {**options, "zero_centered_gamma": self.zero_centered_gamma}


class LayerNormLinear(_Normed):
    """A norm and a linear layer in the low precision of `recipe`; see `diptych.jax.layernorm_dense`.

    The name is that of `diptych.torch`; TransformerEngine's JAX module is `LayerNormDenseGeneral`.

    **Arguments:** `eps`, `normalization`, `zero_centered_gamma`, `return_layernorm_output`: as in `layernorm_dense`.
    `norm_metadata`: of the norm's parameters. Others: as in `Linear`.

    Parameters: `scale` [in]; `ln_bias` [in], None for RMSNorm; `kernel` [in, out]; `bias` [out] or None.

    **Raises:** as `Linear`, and ValueError for an unknown norm.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe | None,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = KERNEL_INIT,
        bias_init: Any = BIAS_INIT,
        kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
        norm_metadata: Mapping[str, Any] | None = None,
        module: str = "layernorm_linear",
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.return_layernorm_output = return_layernorm_output
        self._norm(in_features, normalization, eps, zero_centered_gamma, param_dtype, norm_metadata, rngs)
        self.kernel = param(kernel_init, rngs, (in_features, out_features), param_dtype, kernel_metadata)
        self.bias = optional(use_bias, bias_init, rngs, (out_features,), param_dtype, bias_metadata)
        self._keep(recipe, module, name, dtype, rngs)

    @scoped
    def __call__(self, x: Any) -> Any:
        """[..., in] to [..., out]; with `return_layernorm_output` (result, norm's output [..., in])."""
        return layernorm_dense(
            self._input(x), value(self.scale), value(self.ln_bias), self._kernel(), value(self.bias),
            return_layernorm_output=self.return_layernorm_output, **self._norm_roles(), **self._roles(),
        )  # fmt: skip


class LayerNormMLP(_Normed):
    """A norm and a two-layer perceptron in the low precision of `recipe`; see `diptych.jax.layernorm_mlp`.

    **Arguments:** `in_features`: of input and output. `hidden_features`: of the activation's output. `activation`,
    `eps`, `normalization`, `zero_centered_gamma`: as in `layernorm_mlp`. `wi_metadata`, `wo_metadata`: of both kernels.
    `norm_metadata`: of the norm's parameters. Others: as in `Linear`; `use_bias`: of both linear layers.

    Parameters, with TransformerEngine's names: `scale` [in]; `ln_bias` [in], None for RMSNorm; `wi_kernel`
    [in, hidden], or [in, 2 hidden] for a gated activation, whose first half is activated; `wi_bias`; `wo_kernel`
    [hidden, in]; `wo_bias`.

    **Raises:** as `Linear`, and ValueError for an unknown norm or activation.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        recipe: Recipe | None,
        activation: str = "gelu",
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = KERNEL_INIT,
        bias_init: Any = BIAS_INIT,
        wi_metadata: Mapping[str, Any] | None = None,
        wo_metadata: Mapping[str, Any] | None = None,
        norm_metadata: Mapping[str, Any] | None = None,
        module: str = "layernorm_mlp",
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        activation_options("LayerNormMLP", activation)
        width = hidden_features * fc1_parts(activation)
        self.in_features, self.hidden_features, self.activation = in_features, hidden_features, activation
        self._norm(in_features, normalization, eps, zero_centered_gamma, param_dtype, norm_metadata, rngs)
        self.wi_kernel = param(kernel_init, rngs, (in_features, width), param_dtype, wi_metadata)
        self.wi_bias = optional(use_bias, bias_init, rngs, (width,), param_dtype)
        self.wo_kernel = param(kernel_init, rngs, (hidden_features, in_features), param_dtype, wo_metadata)
        self.wo_bias = optional(use_bias, bias_init, rngs, (in_features,), param_dtype)
        self._keep(recipe, module, name, dtype, rngs)

    def _kernels(self) -> tuple[tuple[str, str], ...]:
        wi, wo = (part_name(self.name, part) for part in PARTS)
        return (("wi_kernel", wi), ("wo_kernel", wo))

    @scoped
    def __call__(self, x: Any) -> Array:
        """[..., in] to [..., in]."""
        return layernorm_mlp(
            self._input(x), value(self.scale), value(self.ln_bias), self._kernel("wi_kernel"), value(self.wi_bias),
            self._kernel("wo_kernel"), value(self.wo_bias), activation=self.activation, **self._norm_roles(),
            **self._roles(MLP_OFFSETS),
        )  # fmt: skip


class GroupedLinear(Layer):
    """A linear layer for each group of rows, such as the experts of a layer; see `diptych.jax.grouped_dense`.

    **Arguments:** `num_groups`: the number of layers. Others: as in `Linear`; kernels are initialized each by itself.

    Parameters: `kernel` [num_groups, in, out], `bias` [num_groups, out] or None.

    **Raises:** as `Linear`; a call raises as `grouped_dense`.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe | None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = _STACK_INIT,
        bias_init: Any = BIAS_INIT,
        kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
        module: str = "grouped_linear",
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.kernel = param(kernel_init, rngs, (num_groups, in_features, out_features), param_dtype, kernel_metadata)
        self.bias = optional(use_bias, bias_init, rngs, (num_groups, out_features), param_dtype, bias_metadata)
        self._keep(recipe, module, name, dtype, rngs)

    @scoped
    def __call__(self, x: Any, offsets: Array | None = None, *, row_map: RowMap | None = None, align: int = 1) -> Array:
        """[..., in] to [..., out]: rows by groups, whose bounds are `offsets` [num_groups + 1]; or tokens that a
        `row_map` brings into the order of their groups, to [rows, out]. `align`: as in `grouped_dense`."""
        return grouped_dense(
            self._input(x), self._kernel(), value(self.bias), offsets, row_map=row_map, align=align, **self._roles()
        )


class MoE(nnx.Module):
    """A mixture of experts: each token's result is the sum of its `top_k` experts' results, weighted by the router.

    An expert is a perceptron with one hidden layer. Rows are quantized as they move to their experts. The router runs
    in float32.

    **Arguments:** `in_features`: of input and output. `hidden_features`: of the activation's output in each expert.
    `num_experts`: their number. `top_k`: experts of a token, whose probabilities are divided by their sum.
    `activation`: as in `LayerNormMLP`. `align`: each expert's rows begin at a multiple of it; None chooses that of the
    recipe. `router_metadata`, `wi_metadata`, `wo_metadata`: of the kernels. Others: as in `Linear`.

    Submodules: `router`, an `nnx.Linear`; `wi` and `wo`, `GroupedLinear`s. A gated activation has twice the width in
    `wi`, and its first half is activated.

    **Raises:** as `GroupedLinear`, and ValueError for an unknown activation.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        *,
        recipe: Recipe | None,
        top_k: int = 2,
        activation: str = "swiglu",
        align: int | None = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = _STACK_INIT,
        router_init: Any = KERNEL_INIT,
        router_metadata: Mapping[str, Any] | None = None,
        wi_metadata: Mapping[str, Any] | None = None,
        wo_metadata: Mapping[str, Any] | None = None,
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        activation_options("MoE", activation)
        self.num_experts, self.top_k, self.activation, self.name = num_experts, top_k, activation, name
        self.align = alignment(recipe, align)
        self.router = nnx.Linear(
            in_features, num_experts, use_bias=False, dtype=jnp.float32, param_dtype=param_dtype,
            kernel_init=router_init, kernel_metadata=router_metadata or {}, rngs=rngs,
        )  # fmt: skip
        shared: dict[str, Any] = {"recipe": recipe, "use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype}
        shared |= {"kernel_init": kernel_init, "rngs": rngs}
        wide, wi, wo = fc1_parts(activation) * hidden_features, part_name(name, "wi"), part_name(name, "wo")
        self.wi = GroupedLinear(num_experts, in_features, wide, kernel_metadata=wi_metadata, name=wi, **shared)
        self.wo = GroupedLinear(
            num_experts, hidden_features, in_features, kernel_metadata=wo_metadata, name=wo, **shared
        )

    @scoped
    def __call__(self, inputs: Any) -> tuple[Array, Array]:
        """[..., in] to ([..., in], the load-balancing loss, which is 1 where all experts are used alike)."""
        return mixture(
            inputs, self.router, self.wi, self.wo, num_experts=self.num_experts, top_k=self.top_k,
            activation=self.activation, align=self.align,
        )  # fmt: skip
