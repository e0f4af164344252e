"""`layernorm_dense`: a norm and a linear layer, whose input is quantized from the norm's unrounded float32 output.

    z  = norm(x), quantized in one pass and never stored in high precision
    y  = quantize(z) @ quantize(kernel).T + bias        `products.py`
    dz = quantize(dy) @ quantize(kernel);  dx, dgamma, dbeta = norm_grad(dz)

Forward saves x, the statistics of its rows, and the columnwise copies; with `save_original_input` the copy of z is not
saved but made again in backward. If the recipe leaves a use of the input unquantized, or has a custom quantizer for it,
z is computed in x's dtype and passed on as in `dense`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from diptych.common.arguments import require_recipe
from diptych.common.layer_options import Originals
from diptych.common.layers.plan import input_fusable
from diptych.common.ops.norm import NormOptions, norm_options
from diptych.common.recipes import Recipe
from diptych.jax.functional import norm as norm_verbs
from diptych.jax.functional import source as sources
from diptych.jax.functional.source import FusedInput
from diptych.jax.layers import products
from diptych.jax.layers.calibrate import calibrated, plain
from diptych.jax.layers.checks import check_operands, refuse_calibration, refuse_without_recipe
from diptych.jax.layers.linear import prepare
from diptych.jax.layers.options import CallState, Options, States
from diptych.jax.layers.products import DenseGradients, LayerArrays, Needs, cotangents, primals
from diptych.jax.primitives import norm as norm_ops
from diptych.jax.primitives.checks import same_axes
from diptych.jax.primitives.register import defvjp
from diptych.jax.state.carry import returned, viewed
from diptych.jax.state.scales import ScaleState, check_states, group_axes
from diptych.jax.tensors.copies import Copies, folds_cut_rows
from diptych.jax.tensors.quantized import QuantizedArray

Array = jax.Array


@folds_cut_rows
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
    save_original_input: bool = False,
    calibrate: bool = False,
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
    - `module`, `name`, `state`, `return_state`, `record`, `rng`, `copies`, `main_grad`, `calibrate`: as in `dense`;
      states are those of `init_state(recipe, module=module, name=name)`.
    - `save_original_input`: forward saves only x and its statistics; backward computes and quantizes the norm's output
      again, with the same bits.
    - `return_layernorm_output`: return the norm's output too, in x's dtype; it is then stored.

    **Returns:** y, [..., N] of x's dtype; or (y, norm's output), (y, state), (y, norm's output, state). Each gradient
    has the dtype of its argument.

    **Raises:** as `dense`; ValueError for an unknown normalization, a beta with RMSNorm, or parameters
    that do not fit x.
    """
    op = "layernorm_dense"
    require_recipe(op, recipe)
    norm = norm_options(op, normalization, eps, zero_centered_gamma)
    x, kernel, bias, rng = check_operands(x, kernel, bias, rng)
    gamma, beta = norm_verbs.check_parameters(op, x, gamma, beta, norm)
    if recipe is None:
        refuse_without_recipe(op, state=state, copies=copies, main_grad=main_grad, calibrate=calibrate or None)
        z: Any = norm_verbs.layernorm(norm, *same_axes(x, gamma, beta))
        return _results(plain(z, kernel, bias), z if return_layernorm_output else None, {} if return_state else None)
    options = Options(recipe, module, name, Originals(save_original_input), record, return_state, group_axes(recipe))
    states = check_states(op, state, options.plan, recipe)
    if calibrate:
        refuse_calibration(op, record, copies=copies, main_grad=main_grad)
        z = norm_verbs.layernorm(norm, *same_axes(x, gamma, beta))
        views = viewed(states, (x, gamma, beta, None if isinstance(kernel, QuantizedArray) else kernel, bias))
        y, news = calibrated(options, z, kernel, bias, views)
        z = z if return_layernorm_output else None
    else:
        array, copies, main_grad = prepare(kernel, options, copies, main_grad)
        args = same_axes(x, gamma, beta, array, bias, main_grad, copies)
        x, gamma, beta, array, bias, main_grad, copies = args
        layer = LayerArrays(array, bias, CallState(viewed(states, args[:-1]), rng), copies, main_grad)
        normed = NormedOptions(norm, options, return_layernorm_output)
        out: Any = _layernorm_dense(normed, x, gamma, beta, layer)
        (y, news), z = out
    news = returned(states, news)
    return _results(y, z, news if return_state else None)


def _results(y: Any, *more: Any) -> Any:
    """Returns a tuple of `y` and those of `more` that are not None, or `y` alone if all are None."""
    there = tuple(r for r in more if r is not None)
    return (y, *there) if there else y


# --- inputs that are not stored ---


def reads_input(options: Options, needs: Needs) -> bool:
    """Whether wgrad reads the input in high precision."""
    return options.schedule(needs.dx, needs.dw).x_kept == "original"


def with_amax(operand: Array | FusedInput, options: Options) -> Array | FusedInput:
    """Returns an input that backward quantizes again, with its amax if forward and backward can share one."""
    if not isinstance(operand, FusedInput):
        return operand
    uses = (options.plan.input.rowwise, options.plan.input.columnwise)
    shared = any(q is not None and q.format.one_scale and not q.needs_scale for q in uses)
    return operand.with_amax(options.group) if shared else operand


def remade(saved: products.Saved) -> tuple[products.Saved, bool, Array | None]:
    """Returns (a product's residuals without an original input, whether there was one, its amax if known)."""
    x = saved.x
    again = saved.options.originals.input and isinstance(x, (jax.Array, FusedInput))
    return dataclasses.replace(saved, x=None) if again else saved, again, x.amax if isinstance(x, FusedInput) else None


# --- forward and backward ---


class NormedOptions(NamedTuple):
    """How one call runs, hashable. `with_z`: return the norm's output too."""

    norm: NormOptions
    linear: Options
    with_z: bool = False


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("norm", "linear", "amax"),
    meta_fields=("options", "again"),
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """The residuals of the backward pass. `norm`: x, gamma, beta and the statistics, or None. `linear`: the product's.

    `again`: whether backward computes the product's input again from x; `amax`: the input's amax, if known.
    """

    norm: Any
    linear: products.Saved
    amax: Array | None
    options: NormedOptions
    again: bool


def norm_operand(
    options: NormedOptions, x: Array, gamma: Array, beta: Array | None, stored: bool
) -> tuple[Array | FusedInput, tuple[Array, ...], Array | None]:
    """Returns the norm's output as an operand, fused if possible; its statistics; the output itself if `stored`."""
    norm, fuse = options.norm, input_fusable(options.linear.plan)
    stats, z = (norm_ops.statistics(x, norm), None) if fuse and not stored else norm_ops.norm(x, gamma, beta, norm)
    operand = sources.normalized(x, gamma, beta, stats, norm) if fuse or z is None else z
    return operand, stats, z if stored else None


def normed_forward(
    options: NormedOptions, needs: Needs, x: Array, gamma: Array, beta: Array | None, layer: LayerArrays
) -> tuple[tuple[tuple[Array, States], Array | None], Saved]:
    """Returns ((y, new states), z if requested), and the residuals."""
    again = options.linear.originals.input
    kept = reads_input(options.linear, needs) and not again
    operand, stats, z = norm_operand(options, x, gamma, beta, options.with_z or kept)
    if again:
        operand = with_amax(operand, options.linear)
    out, of_linear = products.forward(options.linear, needs, operand, layer)
    if kept:
        of_linear = dataclasses.replace(of_linear, x=z)
    of_linear, again, amax = remade(of_linear)
    of_norm = (x, gamma, beta, stats) if needs.dx or again else None
    return (out, z if options.with_z else None), Saved(of_norm, of_linear, amax, options, again)


def normed_backward(
    saved: Saved, dy: Any, later: States | None = None, dz: Any = None
) -> tuple[tuple[Any, Any, Any], DenseGradients]:
    """Returns (dx, dgamma, dbeta), and the product's gradients. `dz`: the gradient of z if z was returned."""
    norm, of_linear = saved.options.norm, saved.linear
    if saved.again and not isinstance(dy, SymbolicZero):
        x, gamma, beta, stats = saved.norm
        if input_fusable(saved.options.linear.plan) and not reads_input(saved.options.linear, of_linear.needs):
            z: Any = dataclasses.replace(sources.normalized(x, gamma, beta, stats, norm), amax=saved.amax)
        else:
            z = norm_ops.norm(x, gamma, beta, norm)[1]
        of_linear = dataclasses.replace(of_linear, x=z)
    made = products.backward(of_linear, dy, later)
    if isinstance(dz, jax.Array):
        made = made._replace(x=dz if made.x is None else made.x + dz)
    if made.x is None or not of_linear.needs.dx:
        return (None, None, None), made
    x, gamma, beta, stats = saved.norm
    return norm_ops.norm_grad(made.x, x, gamma, stats, norm, beta is not None), made


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layernorm_dense(options: NormedOptions, x: Any, gamma: Any, beta: Any, layer: LayerArrays) -> Any:
    operand, _, z = norm_operand(options, x, gamma, beta, options.with_z)
    y, _, _, amaxes = products.fprop(options.linear, False, False, operand, layer)
    return (y, products.recorded(layer.state.states, amaxes, options.linear)), z


def _forward(options: NormedOptions, *args: Any) -> Any:
    return normed_forward(options, Needs.of(args[:3], args[3]), *primals(args))


def _backward(options: NormedOptions, saved: Saved, grads: Any) -> Any:
    of_norm, made = normed_backward(saved, *grads[0], dz=grads[1])
    return *of_norm, cotangents(saved.linear, made)


defvjp(_layernorm_dense, _forward, _backward)
