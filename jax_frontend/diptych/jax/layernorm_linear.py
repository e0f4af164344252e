"""`layernorm_dense`: a norm and a linear layer, whose input is quantized out of the norm's own arithmetic.

    z  = norm(x), quantized in one pass and never stored in high precision
    y  = quantize(z) @ quantize(kernel).T + bias        `products.py`
    dz = quantize(dy) @ quantize(kernel);  dx, dgamma, dbeta = norm_grad(dz)

Kept for backward: x, the statistics of its rows, and the columnwise copies. Where the recipe leaves a use of the
input unquantized, or has a quantizer of a user's own, z is made in x's dtype and quantized, or not, as by `dense`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.custom_derivatives import CustomVJPPrimal

from diptych.common.errors import DTypeError
from diptych.common.fused import NormOptions, norm_options
from diptych.common.plan import TensorPlan
from diptych.common.recipes import Recipe
from diptych.jax import fused, linear
from diptych.jax.fused import FusedInput
from diptych.jax.linear import check_operands, held_copies
from diptych.jax.products import Copies, Options
from diptych.jax.quantized import QuantizedArray
from diptych.jax.state import ScaleState, check_states, group_axes
from diptych.jax.transport import returned, viewed

Array = jax.Array


def layernorm_dense(
    x: Array,
    gamma: Array,
    beta: Array | None,
    kernel: Array | QuantizedArray,
    bias: Array | None = None,
    *,
    recipe: Recipe | None,
    eps: float = 1e-5,
    normalization: str = "LayerNorm",
    zero_centered_gamma: bool = False,
    module: str = "layernorm_linear",
    name: str = "",
    state: Mapping[str, ScaleState] | None = None,
    return_state: bool = False,
    record: bool = True,
    rng: Array | None = None,
    copies: Copies | None = None,
    main_grad: Any = None,
    return_layernorm_output: bool = False,
) -> Any:
    """norm(x) @ kernel.T + bias, forward and backward in the low precision that `recipe` describes.

    Forward and backward compute, bit for bit, what `diptych.torch.LayerNormLinear` does. The norm's output is quantized
    without being rounded to x's dtype first; with `recipe=None`, or where the recipe leaves it unquantized, it is.

    **Arguments:**
    - `x`: [..., K]. `gamma`, `beta`: [K], of one dtype; `beta` may be None, and is for RMSNorm. `kernel`: [N, K].
      `bias`: [N]. All float32, bfloat16 or float16.
    - `recipe`: None gives norm and product in x's dtype, with the same norm.
    - `eps`: a Python number, added to the variance, or to the mean square. `normalization`: "LayerNorm" or "RMSNorm".
      `zero_centered_gamma`: multiply by 1 + gamma.
    - `module`, `name`, `state`, `return_state`, `record`, `rng`, `copies`, `main_grad`: as in `dense`; states are those
      of `init_state(recipe, module=module, name=name)`.
    - `return_layernorm_output`: return the norm's output too, in x's dtype; it is then stored.

    **Returns:** y, [..., N] of x's dtype; or (y, norm's output), (y, state), (y, norm's output, state). Gradients have
    the dtypes of what they belong to.

    **Raises:** as `dense`; ValueError for an unknown normalization, a beta with RMSNorm, or parameters
    that do not fit x.
    """
    op = "layernorm_dense"
    if recipe is not None and not isinstance(recipe, Recipe):
        raise DTypeError(f"{op}: recipe must be a diptych Recipe or None, got {type(recipe).__name__}")
    norm = norm_options(op, normalization, eps, zero_centered_gamma)
    x, kernel, bias, rng = check_operands(x, kernel, bias, rng)
    gamma, beta = fused.check_parameters(op, x, gamma, beta, norm)
    if recipe is None:
        refuse_without_recipe(op, state=state, copies=copies, main_grad=main_grad)
        x, gamma, beta = linear._same_axes(x, gamma, beta)  # type: ignore[assignment]
        z: Any = fused.layernorm(norm, x, gamma, beta)
        return _results(plain(z, kernel, bias), z if return_layernorm_output else None, {} if return_state else None)
    options = Options(recipe, module, name, False, record, return_state, group_axes(recipe))
    states = check_states(op, state, options.plan, recipe)
    array, copies, main_grad = prepare(kernel, options, copies, main_grad)
    *args, main_grad = linear._same_axes(x, gamma, beta, array, bias, main_grad)
    views = viewed(states, (*args, main_grad))
    out: Any = _layernorm_dense(norm, options, return_layernorm_output, *args, views, rng, copies, main_grad)
    (y, news), z = out
    news = returned(states, news)
    return _results(y, z, news if return_state else None)


def _results(y: Any, *more: Any) -> Any:
    """Those that were asked for; one alone as itself."""
    there = tuple(r for r in more if r is not None)
    return (y, *there) if there else y


# --- what the fused modules share ---


def refuse_without_recipe(op: str, **given: Any) -> None:
    """**Raises** ValueError for arguments that only a recipe reads."""
    if wrong := [k for k, v in given.items() if v is not None and v != {}]:
        raise ValueError(f"{op}: {', '.join(wrong)} given without a recipe")


def plain(x: Array, kernel: Any, bias: Array | None) -> Array:
    """The product in x's dtype."""
    return linear._plain(x, kernel.dequantize(x.dtype) if isinstance(kernel, QuantizedArray) else kernel, bias)


def prepare(kernel: Any, options: Options, copies: Any, main_grad: Any) -> tuple[Array | None, Copies | None, Any]:
    """A kernel with its copies and the array that its gradient goes to, as `dense` takes them apart."""
    shape = kernel.shape
    if isinstance(kernel, QuantizedArray):
        copies, kernel = held_copies(kernel, options, copies), None
    return kernel, copies, linear._main_grad(main_grad, kernel, shape)


def fusable(tensor: TensorPlan, columnwise: bool = True) -> bool:
    """Whether a tensor may stay unstored: every use of it reads a copy that the core makes. `columnwise`: that use
    counts."""
    uses = (tensor.rowwise, tensor.columnwise) if columnwise else (tensor.rowwise,)
    return all(q is not None and not q.custom for q in uses)


def input_fusable(options: Options) -> bool:
    """Whether the input of a product may."""
    return fusable(options.plan.input, not options.plan.dequantized_backward)


def constant(x: Any) -> Any:
    """Arrays as operands of a custom_vjp's forward that nobody differentiates."""
    return jax.tree.map(lambda v: CustomVJPPrimal(v, False), x)


Saved = tuple[Array, Array, Array | None, tuple[Array, ...]]  # x, gamma, beta, statistics


def norm_forward(
    norm: NormOptions, options: Options, x: Any, gamma: Any, beta: Any, with_z: bool = False
) -> tuple[Any, Saved, Array | None]:
    """The norm's output as an operand with `.perturbed`, fused where it may be; what backward needs; z if stored."""
    values: Any = linear._values((x, gamma, beta))
    operand, stats, z = norm_primal(norm, options, *values, with_z=with_z)
    if isinstance(operand, FusedInput):
        return fused.normalized(x, gamma, beta, constant(stats), norm), (*values, stats), z
    return CustomVJPPrimal(operand, linear._any((x, gamma, beta))), (*values, stats), z


def norm_backward(norm: NormOptions, saved: Saved, dz: Array | None) -> tuple[Any, Any, Any]:
    """dx, dgamma, dbeta."""
    x, gamma, beta, stats = saved
    return (None, None, None) if dz is None else fused.norm_grad(dz, x, gamma, stats, norm, beta is not None)


def norm_primal(
    norm: NormOptions, options: Options, x: Array, gamma: Array, beta: Array | None, with_z: bool = False
) -> tuple[Array | FusedInput, tuple[Array, ...], Array | None]:
    """The norm's output as an operand, fused where it may be; its statistics; z if `with_z`."""
    fuse = input_fusable(options)
    stats, z = (fused.statistics(x, norm), None) if fuse and not with_z else fused.norm(x, gamma, beta, norm)
    operand = fused.normalized(x, gamma, beta, stats, norm) if fuse or z is None else z
    return operand, stats, z if with_z else None


# --- forward and backward ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _layernorm_dense(
    norm: NormOptions, options: Options, with_z: bool, x: Any, gamma: Any, beta: Any, kernel: Any, bias: Any,
    states: Any, rng: Any, copies: Any, main_grad: Any,
) -> Any:  # fmt: skip
    operand, _, z = norm_primal(norm, options, x, gamma, beta, with_z)
    y, _, _, amaxes = linear.fprop(options, False, False, operand, kernel, bias, states, rng, copies)
    return (y, linear.recorded(states, amaxes, options)), z


def _forward(norm: NormOptions, options: Options, with_z: bool, x: Any, gamma: Any, beta: Any, *rest: Any) -> Any:
    # Each leaf comes with `.perturbed`: whether its gradient is wanted.
    operand, saved, z = norm_forward(norm, options, x, gamma, beta, with_z)
    out, of_linear = linear._forward(options, operand, *rest)
    return (out, z), (saved if of_linear.need_dx else None, of_linear)


def _backward(norm: NormOptions, options: Options, with_z: bool, saved: Any, grads: Any) -> Any:
    of_norm, of_linear = saved
    dz, *rest = linear._backward(options, of_linear, grads[0])
    if isinstance(grads[1], jax.Array):
        dz = grads[1] if dz is None else dz + grads[1]
    return *(norm_backward(norm, of_norm, dz) if of_norm is not None else (None, None, None)), *rest


_layernorm_dense.defvjp(_forward, _backward, symbolic_zeros=True)
