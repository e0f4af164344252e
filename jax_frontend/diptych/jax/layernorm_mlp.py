"""`layernorm_mlp`: norm, linear, activation and linear, with nothing between the products stored twice.

    z  = norm(x)                   quantized in one pass, as by `layernorm_dense`
    h  = quantize(z) @ quantize(kernel1).T + bias1           in x's dtype, kept
    a  = act(h)                    quantized in one pass, rowwise only
    y  = quantize(a) @ quantize(kernel2).T + bias2
    da = dgrad 2;  wgrad 2 on the columnwise copy of a, which is made again from h, to the same bits
    dh = da * act'(h)              quantized in one pass, with its sum over rows: dbias1
    dz = dgrad 1;  wgrad 1;  dx, dgamma, dbeta = norm_grad(dz)

Kept for backward: x, its statistics, the columnwise copies of z and of the kernels, and h. A tensor of which a use is
unquantized, or has a quantizer of a user's own, is made in x's dtype instead, each of z, a and dh for itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from diptych.common.errors import DTypeError, ShapeError
from diptych.common.fused import ActivationOptions, NormOptions, activation_options, norm_options
from diptych.common.recipes import Recipe
from diptych.jax import functional, fused, linear
from diptych.jax.fused import FusedInput
from diptych.jax.layernorm_linear import (
    constant,
    fusable,
    input_fusable,
    norm_backward,
    norm_forward,
    norm_primal,
    plain,
    prepare,
    refuse_without_recipe,
)
from diptych.jax.linear import check_operands
from diptych.jax.products import OFFSETS, Copies, Options, quantize_summed, rng_at
from diptych.jax.quantized import QuantizedArray
from diptych.jax.state import ScaleState, check_states, group_axes, init_state
from diptych.jax.transport import returned, viewed

Array = jax.Array

States = dict[str, dict[str, ScaleState]]

PARTS = ("fc1", "fc2")
_NOTHING = SymbolicZero(None)  # type: ignore[arg-type]  # no gradient; that it is one is all that is read
MLP_OFFSETS = 2 * OFFSETS
"""Offsets of the random generator that one forward and backward of an MLP use: first those of fc1."""


class MLPOptions(NamedTuple):
    """How one call runs, hashable. `fc2` keeps its original input, for the activation is quantized again."""

    norm: NormOptions
    fc1: Options
    fc2: Options
    activation: ActivationOptions


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
) -> Any:
    """act(norm(x) @ kernel1.T + bias1) @ kernel2.T + bias2, forward and backward in the low precision of `recipe`.

    Forward and backward compute, bit for bit, what `diptych.torch.LayerNormMLP` does. Norm, activation and the
    activation's gradient are quantized without being rounded to x's dtype first.

    **Arguments:**
    - `x`: [..., K]. `gamma`, `beta`: [K], of one dtype; `beta` may be None, and is for RMSNorm. `kernel1`: [F, K], or
      [2F, K] for a gated activation, whose first half is activated. `bias1`: its rows, or None. `kernel2`: [N, F].
      `bias2`: [N] or None. All float32, bfloat16 or float16.
    - `recipe`: None gives everything in x's dtype, with the same norm and activation. It is asked for two linear
      layers, named `name` and ".fc1" or ".fc2".
    - `activation`: "gelu" (the tanh form), "relu", "silu", "srelu", "qgelu", or gated "geglu", "reglu", "swiglu",
      "sreglu", "qgeglu".
    - `eps`, `normalization`, `zero_centered_gamma`: as in `layernorm_dense`.
    - `state`: from `init_layernorm_mlp_state`. `return_state`, `record`: as in `dense`.
    - `rng`: as in `dense`; one call uses `MLP_OFFSETS` offsets.
    - `copies`, `main_grads`: of both kernels, each as in `dense`.

    **Returns:** [..., N] of x's dtype, or (that, state) with `return_state`. Gradients have the dtypes of what they
    belong to.

    **Raises:** as `layernorm_dense`; ValueError for an unknown activation, or kernels that do not follow each other.
    """
    op = "layernorm_mlp"
    if recipe is not None and not isinstance(recipe, Recipe):
        raise DTypeError(f"{op}: recipe must be a diptych Recipe or None, got {type(recipe).__name__}")
    norm, act = norm_options(op, normalization, eps, zero_centered_gamma), activation_options(op, activation)
    x, kernel1, bias1, rng = check_operands(x, kernel1, bias1, rng)
    gamma, beta = fused.check_parameters(op, x, gamma, beta, norm)
    kernel2, bias2 = _check_second(op, x, kernel1, kernel2, bias2, act)
    if recipe is None:
        of_kernels = {"copies": copies, "main_grads": main_grads}
        given = {k: next((v for v in pair if v is not None), None) for k, pair in of_kernels.items()}
        refuse_without_recipe(op, state=state, **given)
        x, gamma, beta = linear._same_axes(x, gamma, beta)  # type: ignore[assignment]
        h = plain(fused.layernorm(norm, x, gamma, beta), kernel1, bias1)
        y = plain(fused.activate(*act, h), kernel2, bias2)
        return (y, {}) if return_state else y
    group = group_axes(recipe)
    fc1, fc2 = (
        Options(recipe, module, part_name(name, part), part == "fc2", record, return_state, group) for part in PARTS
    )
    states = _check_states(op, state, recipe, fc1, fc2)
    array1, copies1, main1 = prepare(kernel1, fc1, copies[0], main_grads[0])
    array2, copies2, main2 = prepare(kernel2, fc2, copies[1], main_grads[1])
    args = linear._same_axes(x, gamma, beta, array1, bias1, main1, array2, bias2, main2)
    views: Any = {part: viewed(own, args) for part, own in states.items()}
    out: Any = _mlp(MLPOptions(norm, fc1, fc2, act), *args, copies1, copies2, views, rng)
    y, news = out
    news = {part: returned(own, news[part]) for part, own in states.items()}
    return (y, news) if return_state else y


def part_name(name: str, part: str) -> str:
    """The roles' name of one linear layer of a module."""
    return f"{name}.{part}" if name else part


def init_layernorm_mlp_state(
    recipe: Recipe, *, module: str = "layernorm_mlp", name: str = ""
) -> dict[str, dict[str, ScaleState]]:
    """The states that one `layernorm_mlp` needs, {"fc1": {slot: ScaleState}, "fc2": ...}, both empty where no tensor
    has delayed scales.

    **Arguments:** `module`, `name`: as `layernorm_mlp` gets them.
    """
    return {part: init_state(recipe, module=module, name=part_name(name, part)) for part in PARTS}


# --- checks ---


def _check_second(
    op: str, x: Array, kernel1: Any, kernel2: Any, bias2: Any, act: ActivationOptions
) -> tuple[Any, Array | None]:
    """kernel2 and bias2 as arrays that take what the activation gives. **Raises** TypeError, ValueError."""
    if not isinstance(kernel2, QuantizedArray):
        kernel2 = functional._array(op, "kernel2", kernel2)
    bias2 = None if bias2 is None else functional._array(op, "bias2", bias2)
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
    """The states of both layers. **Raises** TypeError, ValueError."""
    if states is None:
        states = {}
    if not isinstance(states, Mapping) or not all(isinstance(of_part, Mapping) for of_part in states.values()):
        raise TypeError(f"{op}: state must be {{layer: {{slot: ScaleState}}}}, as init_layernorm_mlp_state makes it")
    if not any(states.values()) and (fc1.plan.states or fc2.plan.states):
        raise TypeError(
            f"{op}: {type(recipe).__name__} scales by earlier steps' amaxes and needs state=; "
            "init_layernorm_mlp_state(recipe, module=, name=) makes it"
        )
    if wrong := sorted(str(k) for k in states.keys() - set(PARTS)):
        raise ValueError(f"{op}: the layers of the state are {' and '.join(PARTS)}, got {wrong}")
    return {p: check_states(op, states.get(p), o.plan, recipe) for p, o in zip(PARTS, (fc1, fc2), strict=True)}


# --- forward and backward ---


def _activation(options: MLPOptions, h: Array) -> Array | FusedInput:
    """The input of fc2: unstored, with its amax where one amax serves forward and backward, or an array."""
    if not input_fusable(options.fc2):
        return fused.activation(h, *options.activation)
    a = fused.activated(h, *options.activation)
    uses = (options.fc2.plan.input.rowwise, options.fc2.plan.input.columnwise)
    shared = any(q is not None and q.format.per_tensor and not q.needs_scale for q in uses)
    return a.with_amax(options.fc2.group) if shared else a


def _second_rng(rng: Array | None) -> Array | None:
    return None if rng is None else rng_at(rng, OFFSETS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    options: MLPOptions, x: Any, gamma: Any, beta: Any, kernel1: Any, bias1: Any, main1: Any, kernel2: Any, bias2: Any,
    main2: Any, copies1: Any, copies2: Any, states: Any, rng: Any,
) -> Any:  # fmt: skip
    fc1, fc2 = options.fc1, options.fc2
    states1, states2 = states["fc1"], states["fc2"]
    z, _, _ = norm_primal(options.norm, fc1, x, gamma, beta)
    h, _, _, amaxes1 = linear.fprop(fc1, False, False, z, kernel1, bias1, states1, rng, copies1)
    a = _activation(options, h)
    y, _, _, amaxes2 = linear.fprop(fc2, False, False, a, kernel2, bias2, states2, _second_rng(rng), copies2)
    return y, {"fc1": linear.recorded(states1, amaxes1, fc1), "fc2": linear.recorded(states2, amaxes2, fc2)}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("norm", "h", "fc1", "fc2"), meta_fields=("recompute", "need_dh")
)
@dataclasses.dataclass(frozen=True)
class _Saved:
    """`norm`: of the norm, or None. `fc1`, `fc2`: of the linear layers. `h`: the activation's input, or None.

    `recompute`: fc2's input is the activation in high precision, made again from h. `need_dh`: h's gradient is wanted.
    """

    norm: Any
    h: Array | None
    fc1: linear.Saved
    fc2: linear.Saved
    recompute: bool
    need_dh: bool


def _forward(
    options: MLPOptions, x: Any, gamma: Any, beta: Any, kernel1: Any, bias1: Any, main1: Any, kernel2: Any, bias2: Any,
    main2: Any, copies1: Any, copies2: Any, states: Any, rng: Any,
) -> Any:  # fmt: skip
    # Each leaf comes with `.perturbed`: whether its gradient is wanted.
    z, of_norm, _ = norm_forward(options.norm, options.fc1, x, gamma, beta)
    (h, news1), saved1 = linear._forward(options.fc1, z, kernel1, bias1, states["fc1"], rng, copies1, main1)
    need_dh = saved1.need_dx or saved1.need_dw or saved1.bias_dtype is not None
    a = jax.tree.map(lambda v: CustomVJPPrimal(v, need_dh), _activation(options, h))
    rng2 = constant(_second_rng(linear._values(rng)))
    (y, news2), saved2 = linear._forward(options.fc2, a, kernel2, bias2, states["fc2"], rng2, copies2, main2)
    recompute = isinstance(saved2.x, jax.Array)
    saved = _Saved(
        norm=of_norm if saved1.need_dx else None,
        h=h if need_dh or recompute else None,
        fc1=saved1,
        fc2=dataclasses.replace(saved2, x=None) if recompute else saved2,
        recompute=recompute,
        need_dh=need_dh,
    )
    return (y, {"fc1": news1, "fc2": news2}), saved


def _backward(options: MLPOptions, saved: _Saved, grads: Any) -> Any:
    dy, later = grads
    fc1, fc2, h = saved.fc1, saved.fc2, saved.h
    if saved.recompute and not isinstance(dy, SymbolicZero):
        fc2 = dataclasses.replace(fc2, x=fused.activation(h, *options.activation))  # type: ignore[arg-type]
    da, *of_fc2 = linear._backward(options.fc2, fc2, (dy, later["fc2"]))
    dh: Any = _NOTHING if da is None else _dh(options, da, h)  # type: ignore[arg-type]
    dbias1 = None
    if isinstance(dh, FusedInput) and not (fc1.need_dx or fc1.need_dw):  # bias1 alone: the sum comes with a copy
        s = options.fc1.schedule(True, False)
        dbias1 = quantize_summed(dh, s.dy, options.fc1, fc1.states, fc1.rng, fc1.bias_dtype or "")[2]
        dh = _NOTHING
    dz, *of_fc1 = linear._backward(options.fc1, fc1, (dh, later["fc1"]))
    of_norm = (None, None, None) if saved.norm is None else norm_backward(options.norm, saved.norm, dz)
    (dk1, db1, states1, _, _, dmain1), (dk2, db2, states2, _, _, dmain2) = of_fc1, of_fc2
    db1 = dbias1 if db1 is None else db1
    states = {"fc1": states1, "fc2": states2}
    return *of_norm, dk1, db1, dmain1, dk2, db2, dmain2, None, None, states, None


def _dh(options: MLPOptions, da: Array, h: Array) -> Array | FusedInput:
    """The gradient of fc1's output: unstored where both products read a copy of it that the core makes."""
    if fusable(options.fc1.plan.grad_output):
        return fused.activated_grad(da, h, *options.activation)
    return fused.activation_grad(da, h, *options.activation)


_mlp.defvjp(_forward, _backward, symbolic_zeros=True)
