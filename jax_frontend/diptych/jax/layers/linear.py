"""`dense`: a linear layer whose three products run on quantized operands; `products.py` defines them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from diptych.common.arguments import require_recipe
from diptych.common.layer_options import Originals
from diptych.common.recipes import Recipe
from diptych.jax.layers.calibrate import calibrated, plain
from diptych.jax.layers.checks import check_operands, refuse_calibration, refuse_without_recipe
from diptych.jax.layers.held import held_copies
from diptych.jax.layers.options import CallState, Options, States
from diptych.jax.layers.products import (
    LayerArrays,
    Needs,
    Saved,
    backward,
    cotangents,
    forward,
    fprop,
    primals,
    recorded,
)
from diptych.jax.layers.weight_gradients import receiver
from diptych.jax.primitives.checks import same_axes
from diptych.jax.primitives.register import defvjp
from diptych.jax.state.carry import returned, viewed
from diptych.jax.state.scales import ScaleState, check_states, group_axes
from diptych.jax.tensors.copies import CHECKPOINT_NAME, Copies, folds_cut_rows
from diptych.jax.tensors.quantized import QuantizedArray, QuantizedCopies

Array = jax.Array

__all__ = ["CHECKPOINT_NAME", "dense"]


@folds_cut_rows
def dense(
    x: Array,
    kernel: Array | QuantizedArray,
    bias: Array | None = None,
    *,
    recipe: Recipe | None,
    module: str = "linear",
    name: str = "",
    state: Mapping[str, ScaleState] | None = None,
    return_state: bool = False,
    record: bool = True,
    rng: Array | None = None,
    copies: Copies | None = None,
    main_grad: Any = None,
    save_original_input: bool = False,
    calibrate: bool = False,
) -> Any:
    """x @ kernel.T + bias, forward and backward in the low precision that `recipe` describes.

    Forward and backward compute, bit for bit, what `diptych.torch.Linear` does: y from the rowwise copies of x and
    kernel, dx from dy and the kernel's columnwise copy, dkernel from the columnwise copies of dy and x, dbias from dy
    itself. Products and copies of gradients that are not needed are not made. A product with an operand that the recipe
    leaves unquantized is computed by XLA, in that operand's dtype and at `jax_default_matmul_precision`.

    The recipe is an argument, not a context: `jax.jit` caches by argument, so a function that was traced under one
    global recipe would go on running it, silently, after a switch. Recipes are frozen and hashable; close over one or
    name it in `static_argnames`.

    **Arguments:**
    - `x`: [..., K]. `kernel`: [N, K], as in torch. `bias`: [N]. All float32, bfloat16 or float16; dtypes may differ,
      and the kernel is quantized from its own. A kernel may be a `QuantizedArray` with the copies that the recipe
      needs; its gradient then goes to `main_grad`.
    - `recipe`: None gives the plain product in x's dtype.
    - `module`, `name`: of the roles by which the recipe chooses quantizers.
    - `state`: scales of delayed scaling, from `init_state`; `state/carry.py` explains how their amaxes are returned.
      `return_state`: return the state too, with the forward's amaxes. `record=False`: use the scales and record no
      amax.
    - `rng`: int32 [4] from `rng_state`, read if the recipe rounds stochastically. One call uses `OFFSETS` offsets;
      pass `rng_at(rng, OFFSETS)`, or another `rng`, to the next call.
    - `copies`: of the kernel, from `quantize_kernel`, to be used instead of quantizing it.
    - `main_grad`: float32 [N, K], which receives the kernel's gradient, in float32, instead of the kernel. An array
      receives it as its own gradient. To a reference (`jax.new_ref`) backward adds it.
    - `save_original_input`: save x for backward, which quantizes it again with the same bits, instead of a copy.
    - `calibrate`: run in high precision, and record amaxes for the recipe's delayed scales.

    **Returns:** y, [..., N] of x's dtype, or (y, state) with `return_state`. If the recipe quantizes the output, y
    holds the dequantized values. Each gradient has the dtype of its argument. Inside shard_map gradients are summed
    over the mesh axes that an argument does not vary over, as JAX does for its own operations; scales are those of one
    shard, unless the recipe's `amax_group` names mesh axes.

    **Raises:** TypeError for other dtypes, a `recipe` that is not a recipe, or a missing `state` or `rng`; ValueError
    for shapes that do not fit, a state of another recipe, or amaxes that would be lost; all while tracing.
    """
    require_recipe("dense", recipe)
    x, kernel, bias, rng = check_operands(x, kernel, bias, rng)
    if recipe is None:
        refuse_without_recipe("dense", state=state, copies=copies, main_grad=main_grad, calibrate=calibrate or None)
        y = plain(x, kernel, bias)
        return (y, {}) if return_state else y
    options = Options(recipe, module, name, Originals(save_original_input), record, return_state, group_axes(recipe))
    states = check_states("dense", state, options.plan, recipe)
    if calibrate:
        refuse_calibration("dense", record, copies=copies, main_grad=main_grad)
        views = viewed(states, (x, None if isinstance(kernel, QuantizedArray) else kernel, bias))
        y, news = calibrated(options, x, kernel, bias, views)
    else:
        x, bias, trained, copies, main_grad = same_axes(x, bias, *prepare(kernel, options, copies, main_grad))
        of_call = CallState(viewed(states, (x, trained, bias, main_grad)), rng)
        out: Any = _dense(options, x, LayerArrays(trained, bias, of_call, copies, main_grad))
        y, news = out
    news = returned(states, news)
    return (y, news) if return_state else y


# --- quantized kernels ---


def prepare(kernel: Any, options: Options, copies: Any, main_grad: Any) -> tuple[Array | None, Copies | None, Any]:
    """Returns a kernel (None if it is quantized), its copies, and the array whose gradient is the kernel's."""
    shape = kernel.shape
    if isinstance(kernel, QuantizedCopies):
        copies, kernel = held_copies(kernel, options, copies), None
    return kernel, copies, receiver(options.op, main_grad, kernel, shape)


# --- forward and backward ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(options: Options, x: Array, layer: LayerArrays) -> tuple[Array, States]:
    y, _, _, amaxes = fprop(options, False, False, x, layer)
    return y, recorded(layer.state.states, amaxes, options)


def _forward(options: Options, x: Any, layer: LayerArrays) -> tuple[tuple[Array, States], Saved]:
    return forward(options, Needs.of(x, layer), *primals((x, layer)))


def _backward(options: Options, saved: Saved, grads: tuple[Any, States]) -> tuple[Any, LayerArrays]:
    made = backward(saved, *grads)
    return made.x, cotangents(saved, made)


defvjp(_dense, _forward, _backward)
