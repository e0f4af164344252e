"""`layernorm_mlp`: norm, linear layer, activation and linear layer, storing no tensor between the products twice.

    z  = norm(x)                   quantized in one pass, as by `layernorm_dense`
    h  = quantize(z) @ quantize(kernel1).T + bias1           in x's dtype, kept
    a  = act(h)                    quantized in one pass, rowwise only
    y  = quantize(a) @ quantize(kernel2).T + bias2
    da = dgrad 2;  wgrad 2 on the columnwise copy of a, which is made again from h, to the same bits
    dh = da * act'(h)              quantized in one pass, with its sum over rows: dbias1
    dz = dgrad 1;  wgrad 1;  dx, dgamma, dbeta = norm_grad(dz)

Forward saves x, its statistics, the columnwise copies of z and of the kernels, and h; with `save_original_input` not
the copy of z. Each of z, a and dh is computed in x's dtype instead if one of its uses is unquantized or has a custom
quantizer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from diptych.common.arguments import require_recipe
from diptych.common.errors import ArgumentError, ShapeError
from diptych.common.layer_options import Originals
from diptych.common.layers.checks import Names
from diptych.common.layers.plan import fusable, input_fusable
from diptych.common.ops.activation import ActivationOptions, activation_options
from diptych.common.ops.norm import norm_options
from diptych.common.recipes import Recipe
from diptych.jax.functional import activation as activation_verbs
from diptych.jax.functional import norm as norm_verbs
from diptych.jax.functional import source as sources
from diptych.jax.functional.source import FusedInput
from diptych.jax.layers import products
from diptych.jax.layers.calibrate import calibrated, plain
from diptych.jax.layers.checks import (
    check_operands,
    kernel_operand,
    refuse_calibration,
    refuse_without_recipe,
)
from diptych.jax.layers.layernorm_linear import (
    NormedOptions,
    norm_operand,
    normed_backward,
    normed_forward,
    reads_input,
    remade,
    with_amax,
)
from diptych.jax.layers.layernorm_linear import Saved as NormedSaved
from diptych.jax.layers.linear import prepare
from diptych.jax.layers.options import CallState, Options
from diptych.jax.layers.products import OFFSETS, LayerArrays, Needs, cotangents, fprop, primals, recorded
from diptych.jax.layers.quantize import quantize_operand, rng_at
from diptych.jax.primitives import activation as activation_ops
from diptych.jax.primitives import checks
from diptych.jax.primitives.checks import same_axes
from diptych.jax.primitives.register import defvjp
from diptych.jax.state.carry import returned, viewed
from diptych.jax.state.scales import ScaleState, check_states, group_axes, init_state
from diptych.jax.tensors.copies import Copies, folds_cut_rows
from diptych.jax.tensors.quantized import QuantizedArray

Array = jax.Array

States = dict[str, dict[str, ScaleState]]

PARTS = ("fc1", "fc2")
_NOTHING = SymbolicZero(None)  # type: ignore[arg-type]  # no gradient; that it is one is all that is read
MLP_OFFSETS = 2 * OFFSETS
"""Number of random offsets that one forward and backward of an MLP use; those of fc1 come first."""


class MLPOptions(NamedTuple):
    """Options of one call, hashable. `fc2` keeps its original input, since backward quantizes the activation again."""

    fc1: NormedOptions
    fc2: Options
    activation: ActivationOptions


@folds_cut_rows
def layernorm_mlp(
    x: Array,
    gamma: Array,
    beta: Array | None,
    kernel1: Array | QuantizedArray,
    bias1: Array | None,
    kernel2: Array | QuantizedArray,
    bias2: Array | None,
    *,
    recipe: Recipe | None,
    activation: str = "gelu",
    eps: float = 1e-5,
    normalization: str = "LayerNorm",
    zero_centered_gamma: bool = False,
    module: str = "layernorm_mlp",
    name: str = "",
    state: Mapping[str, Mapping[str, ScaleState]] | None = None,
    return_state: bool = False,
    record: bool = True,
    rng: Array | None = None,
    copies: tuple[Copies | None, Copies | None] = (None, None),
    main_grads: tuple[Any, Any] = (None, None),
    save_original_input: bool = False,
    calibrate: bool = False,
) -> Any:
    """act(norm(x) @ kernel1.T + bias1) @ kernel2.T + bias2, forward and backward in the low precision of `recipe`.

    Forward and backward compute, bit for bit, what `diptych.torch.LayerNormMLP` does. Norm, activation and the
    activation's gradient are quantized without being rounded to x's dtype first.

    **Arguments:**
    - `x`: [..., K]. `gamma`, `beta`: [K], of one dtype; `beta` may be None, and is for RMSNorm. `kernel1`: [F, K], or
      [2F, K] for a gated activation, whose first half is activated. `bias1`: its rows, or None. `kernel2`: [N, F].
      `bias2`: [N] or None. All float32, bfloat16 or float16.
    - `recipe`: None runs everything in x's dtype, with the same norm and activation. Its roles have the names of two
      linear layers, `name` with ".fc1" and ".fc2".
    - `activation`: "gelu" (the tanh form), "relu", "silu", "srelu", "qgelu", or gated "geglu", "reglu", "swiglu",
      "sreglu", "qgeglu".
    - `eps`, `normalization`, `zero_centered_gamma`: as in `layernorm_dense`.
    - `state`: from `init_layernorm_mlp_state`. `return_state`, `record`: as in `dense`.
    - `rng`: as in `dense`; one call uses `MLP_OFFSETS` offsets.
    - `copies`, `main_grads`: of both kernels, each as in `dense`. `calibrate`: as in `dense`.
    - `save_original_input`: as in `layernorm_dense`, for the norm. The activation's output is never saved.

    **Returns:** y, [..., N] of x's dtype, or (y, state) with `return_state`. Each gradient has the dtype of its
    argument.

    **Raises:** as `layernorm_dense`; ValueError for an unknown activation, or if kernel2 does not fit kernel1.
    """
    op = "layernorm_mlp"
    require_recipe(op, recipe)
    norm, act = norm_options(op, normalization, eps, zero_centered_gamma), activation_options(op, activation)
    x, kernel1, bias1, rng = check_operands(x, kernel1, bias1, rng)
    gamma, beta = norm_verbs.check_parameters(op, x, gamma, beta, norm)
    kernel2, bias2 = _check_second(op, x, kernel1, kernel2, bias2, act)
    of_kernels = {"copies": copies, "main_grads": main_grads}
    given = {k: next((v for v in pair if v is not None), None) for k, pair in of_kernels.items()}
    if recipe is None:
        refuse_without_recipe(op, state=state, **given, calibrate=calibrate or None)
        h = plain(norm_verbs.layernorm(norm, *same_axes(x, gamma, beta)), kernel1, bias1)
        y = plain(activation_verbs.activate(*act, h), kernel2, bias2)
        return (y, {}) if return_state else y
    fc1, fc2 = _parts(recipe, module, name, Originals(save_original_input), record, return_state)
    states = _check_states(op, state, recipe, fc1, fc2)
    if calibrate:
        refuse_calibration(op, record, **given)
        kernels = [None if isinstance(k, QuantizedArray) else k for k in (kernel1, kernel2)]
        operands: Any = (x, gamma, beta, *kernels, bias1, bias2)
        views = {part: viewed(own, operands) for part, own in states.items()}
        z: Any = norm_verbs.layernorm(norm, *same_axes(x, gamma, beta))
        h, news1 = calibrated(fc1, z, kernel1, bias1, views["fc1"])
        a: Any = activation_verbs.activate(*act, h)
        y, news2 = calibrated(fc2, a, kernel2, bias2, views["fc2"])
        news = {"fc1": news1, "fc2": news2}
    else:
        array1, copies1, main1 = prepare(kernel1, fc1, copies[0], main_grads[0])
        array2, copies2, main2 = prepare(kernel2, fc2, copies[1], main_grads[1])
        args = same_axes(x, gamma, beta, array1, bias1, main1, array2, bias2, main2, copies1, copies2)
        views = {part: viewed(own, args[:-2]) for part, own in states.items()}
        x, gamma, beta, array1, bias1, main1, array2, bias2, main2, copies1, copies2 = args
        rng2 = rng if rng is None else rng_at(rng, OFFSETS)
        first = LayerArrays(array1, bias1, CallState(views["fc1"], rng), copies1, main1)
        second = LayerArrays(array2, bias2, CallState(views["fc2"], rng2), copies2, main2)
        out: Any = _mlp(MLPOptions(NormedOptions(norm, fc1), fc2, act), x, gamma, beta, first, second)
        y, news = out
    news = {part: returned(own, news[part]) for part, own in states.items()}
    return (y, news) if return_state else y


def _parts(
    recipe: Recipe, module: str, name: str, originals: Originals, record: bool, returns: bool
) -> tuple[Options, Options]:
    """Returns the options of both linear layers."""
    group = group_axes(recipe)
    kept = originals, originals._replace(input=True)
    fc1, fc2 = (
        Options(recipe, module, part_name(name, part), of_part, record, returns, group)
        for part, of_part in zip(PARTS, kept, strict=True)
    )
    return fc1, fc2


def part_name(name: str, part: str) -> str:
    """The roles' name of one linear layer of a module."""
    return f"{name}.{part}" if name else part


def init_layernorm_mlp_state(
    recipe: Recipe, *, module: str = "layernorm_mlp", name: str = ""
) -> dict[str, dict[str, ScaleState]]:
    """Makes the states of one `layernorm_mlp`, {"fc1": {state name: ScaleState}, "fc2": ...}; both are empty if no
    tensor has delayed scales.

    **Arguments:** `module`, `name`: the same as in the call of `layernorm_mlp`.
    """
    return {part: init_state(recipe, module=module, name=part_name(name, part)) for part in PARTS}


# --- checks ---


def _check_second(
    op: str, x: Array, kernel1: Any, kernel2: Any, bias2: Any, act: ActivationOptions
) -> tuple[Any, Array | None]:
    """Returns kernel2 and bias2 as arrays that fit the activation's output. **Raises** TypeError, ValueError."""
    kernel2 = kernel_operand(Names(op, "x", "kernel2"), kernel2, QuantizedArray)
    bias2 = None if bias2 is None else checks.to_array(op, "bias2", bias2)
    rows = kernel1.shape[0]
    if act.gated and rows % 2:
        raise ShapeError(f"{op}: a gated activation halves kernel1's rows, got {list(kernel1.shape)}")
    width = rows // 2 if act.gated else rows
    if kernel2.ndim != 2 or kernel2.shape[1] != width:
        raise ShapeError(
            f"{op}: kernel2 must be [N, {width}] after kernel1 {list(kernel1.shape)} and this activation, got "
            f"{list(kernel2.shape)}"
        )
    if bias2 is not None and bias2.shape != kernel2.shape[:1]:
        raise ShapeError(f"{op}: bias2 must be [{kernel2.shape[0]}], got {list(bias2.shape)}")
    return kernel2, bias2


def _check_states(op: str, states: Any, recipe: Recipe, fc1: Options, fc2: Options) -> States:
    """Returns the states of both layers, checked. **Raises** TypeError, ValueError."""
    if states is None:
        states = {}
    if not isinstance(states, Mapping) or not all(isinstance(of_part, Mapping) for of_part in states.values()):
        raise ArgumentError(
            f"{op}: state must be {{layer: {{state name: ScaleState}}}}, as init_layernorm_mlp_state makes it"
        )
    if not any(states.values()) and (fc1.plan.states or fc2.plan.states):
        raise ArgumentError(
            f"{op}: {type(recipe).__name__} scales by earlier steps' amaxes and needs state=; "
            "init_layernorm_mlp_state(recipe, module=, name=) makes it"
        )
    if wrong := sorted(str(k) for k in states.keys() - set(PARTS)):
        raise ValueError(f"{op}: the layers of the state are {' and '.join(PARTS)}, got {wrong}")
    return {p: check_states(op, states.get(p), o.plan, recipe) for p, o in zip(PARTS, (fc1, fc2), strict=True)}


# --- forward and backward ---


def _activation(options: MLPOptions, h: Array, amax: Array | None = None, stored: bool = False) -> Array | FusedInput:
    """Returns the input of fc2: a source with its amax if known, or an array if it must be, or is to be, `stored`."""
    if stored or not input_fusable(options.fc2.plan):
        return activation_ops.activation(h, *options.activation)
    return dataclasses.replace(sources.activated(h, *options.activation), amax=amax)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(options: MLPOptions, x: Any, gamma: Any, beta: Any, first: LayerArrays, second: LayerArrays) -> Any:
    fc1, fc2 = options.fc1.linear, options.fc2
    z, _, _ = norm_operand(options.fc1, x, gamma, beta, False)
    h, _, _, amaxes1 = fprop(fc1, False, False, z, first)
    y, _, _, amaxes2 = fprop(fc2, False, False, _activation(options, h), second)
    return y, {"fc1": recorded(first.state.states, amaxes1, fc1), "fc2": recorded(second.state.states, amaxes2, fc2)}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("fc1", "h", "fc2", "amax"), meta_fields=("options", "again")
)
@dataclasses.dataclass(frozen=True)
class _Saved:
    """The residuals. `fc1`: of norm and fc1. `h`: the activation's input, None if neither its gradient nor `again`
    needs it.

    `again`: whether backward computes fc2's input again from h; `amax`: the input's amax, if known.
    """

    fc1: NormedSaved
    h: Array | None
    fc2: products.Saved
    amax: Array | None
    options: MLPOptions
    again: bool


def _gradients_of(saved: _Saved, dy: Any, later: Any = None) -> tuple[Any, Any, Any, Array | None]:
    """Returns (dx, dgamma, dbeta), fc1's and fc2's gradients, and dbias1."""
    options, of_fc1, fc2, h = saved.options, saved.fc1, saved.fc2, saved.h
    later1, later2 = (None, None) if later is None else (later["fc1"], later["fc2"])
    if saved.again and not isinstance(dy, SymbolicZero):
        assert h is not None
        fc2 = dataclasses.replace(fc2, x=_activation(options, h, saved.amax, reads_input(options.fc2, fc2.needs)))
    made2 = products.backward(fc2, dy, later2)
    dh: Any = _NOTHING if made2.x is None else _dh(options, made2.x, h)  # type: ignore[arg-type]
    dbias1, fc1 = None, of_fc1.linear
    if isinstance(dh, FusedInput) and not (fc1.needs.dx or fc1.needs.dw):  # bias1 alone: the sum comes with a copy
        s = fc1.options.schedule(True, False)
        dbias1 = quantize_operand(dh, s.dy, fc1.options, fc1.state, fc1.needs.bias_dtype or "")[2]
        dh = _NOTHING
    of_norm, made1 = normed_backward(of_fc1, dh, later1)
    return of_norm, made1, made2, dbias1 if made1.bias is None else made1.bias


def _dh(options: MLPOptions, da: Array, h: Array) -> Array | FusedInput:
    """Returns the gradient of fc1's output: a source if both products read copies of it that the core makes."""
    if fusable(options.fc1.linear.plan.grad_output):
        return sources.activated_grad(da, h, *options.activation)
    return activation_ops.activation_grad(da, h, *options.activation)


def _forward(options: MLPOptions, *args: Any) -> tuple[tuple[Array, States], _Saved]:
    needs1, needs2 = Needs.of(args[:3], args[3]), Needs.of(None, args[4])
    needs2 = needs2._replace(dx=needs1.dx or needs1.dw or needs1.bias_dtype is not None)
    *first, second = primals(args)
    ((h, news1), _), saved1 = normed_forward(options.fc1, needs1, *first)
    a = with_amax(_activation(options, h), options.fc2)
    (y, news2), saved2 = products.forward(options.fc2, needs2, a, second)
    saved2, again, amax = remade(saved2)
    saved = _Saved(saved1, h if needs2.dx or again else None, saved2, amax, options, again)
    return (y, {"fc1": news1, "fc2": news2}), saved


def _backward(options: MLPOptions, saved: _Saved, grads: Any) -> Any:
    of_norm, made1, made2, dbias1 = _gradients_of(saved, *grads)
    first = cotangents(saved.fc1.linear, made1)._replace(bias=dbias1)
    return *of_norm, first, cotangents(saved.fc2, made2)


defvjp(_mlp, _forward, _backward)
