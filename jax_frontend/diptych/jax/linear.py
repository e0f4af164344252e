"""`dense`: a linear layer whose three products run on quantized operands; `products.py` says how."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from diptych.common.errors import DTypeError, ShapeError, UnsupportedError
from diptych.common.recipes import Recipe
from diptych.jax import functional
from diptych.jax.fused import FusedInput
from diptych.jax.products import (
    CHECKPOINT_NAME,
    Copies,
    Operand,
    Options,
    WeightGradient,
    named,
    only,
    pick,
    product,
    quantize_calls,
    quantize_summed,
    rounded,
)
from diptych.jax.quantized import QuantizedArray
from diptych.jax.state import ScaleState, check_states, gradient, group_axes, record
from diptych.jax.transport import returned, viewed

Array = jax.Array
States = dict[str, ScaleState]
Amaxes = dict[str, list[Array]]

__all__ = ["CHECKPOINT_NAME", "dense"]


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
    itself. A product that nobody differentiates is not computed, and its copies are not made. A product with an operand
    that the recipe leaves unquantized runs by XLA, in that operand's dtype and at `jax_default_matmul_precision`.

    The recipe is an argument, not a context: `jax.jit` caches by argument, so a function that was traced under one
    global recipe would go on running it, silently, after a switch. Recipes are frozen and hashable; close over one or
    name it in `static_argnames`.

    **Arguments:**
    - `x`: [..., K]. `kernel`: [N, K], as in torch. `bias`: [N]. All float32, bfloat16 or float16; dtypes may differ,
      and the kernel is quantized from its own. A kernel may be a `QuantizedArray` with the copies that the recipe
      needs; its gradient then goes to `main_grad`.
    - `recipe`: None gives the plain product in x's dtype.
    - `module`, `name`: the roles that the recipe is asked about.
    - `state`: scales of delayed scaling, from `init_state`; `transport.py` says how their amaxes come back.
      `return_state`: return the state too, with the forward's amaxes. `record=False`: the scales are used as they are,
      and no amax is recorded.
    - `rng`: int32 [4] from `rng_state`, read where the recipe rounds stochastically. One call uses `OFFSETS` offsets;
      the next gets `rng_at(rng, OFFSETS)`, or an `rng` of its own.
    - `copies`: of the kernel, from `quantize_kernel`, to be used instead of quantizing it.
    - `main_grad`: float32 [N, K], where the kernel's gradient goes to, in float32, instead of to the kernel. An array:
      as the gradient with respect to it. A reference (`jax.new_ref`): it is added there, by the backward pass.
    - `save_original_input`: backward keeps x and quantizes it again, to the same bits, instead of keeping a copy.
    - `calibrate`: run in high precision, and record the amaxes that the recipe's delayed scales will come from.

    **Returns:** [..., N] of x's dtype, or (that, state) with `return_state`. Where the recipe quantizes the output, the
    values that it stands for. Gradients have the dtypes of what they belong to. Inside shard_map they are summed over
    the mesh axes that an argument does not vary over, as JAX does for its own operations; scales are each shard's own,
    unless the recipe's `amax_group` names mesh axes.

    **Raises:** TypeError for other dtypes, a recipe that is none, or a missing `state` or `rng`; ValueError for shapes
    that do not fit, a state of another recipe, or amaxes that would be lost; all while tracing.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise DTypeError(f"dense: recipe must be a diptych Recipe or None, got {type(recipe).__name__}")
    x, kernel, bias, rng = check_operands(x, kernel, bias, rng)
    if recipe is None:
        given = {"state": state, "copies": copies, "main_grad": main_grad, "calibrate": calibrate or None}
        if wrong := [k for k, v in given.items() if v is not None and v != {}]:
            raise ValueError(f"dense: {', '.join(wrong)} given without a recipe")
        y = _plain(x, kernel.dequantize(x.dtype) if isinstance(kernel, QuantizedArray) else kernel, bias)
        return (y, {}) if return_state else y
    options = Options(recipe, module, name, save_original_input, record, return_state, group_axes(recipe))
    states = check_states("dense", state, options.plan, recipe)
    if calibrate:
        if copies is not None or main_grad is not None or not record:
            raise ValueError("dense: calibrate runs in high precision; copies, main_grad and record=False do not apply")
        views = viewed(states, (x, None if isinstance(kernel, QuantizedArray) else kernel, bias))
        y, news = _calibrated(options, x, kernel, bias, views)
        news = returned(states, news)
        return (y, news) if return_state else y
    trained: Array | None = None if isinstance(kernel, QuantizedArray) else kernel
    if isinstance(kernel, QuantizedArray):
        copies = held_copies(kernel, options, copies)
    main_grad = _main_grad(main_grad, trained, kernel.shape)
    operands = _same_axes(x, trained, bias, main_grad)
    views = viewed(states, operands)
    y, news = _dense(options, *operands[:3], views, rng, copies, operands[3])  # type: ignore[misc]
    news = returned(states, news)
    return (y, news) if return_state else y


def check_operands(x: Any, kernel: Any, bias: Any, rng: Any) -> tuple[Array, Any, Array | None, Array | None]:
    """The operands as arrays; kernel as it is where it is quantized. **Raises** TypeError, ValueError."""
    x = functional._array("dense", "x", x)
    if not isinstance(kernel, QuantizedArray):
        kernel = functional._array("dense", "kernel", kernel)
    bias = None if bias is None else functional._array("dense", "bias", bias)
    rng = functional._state("dense", "rng", rng)
    if rng is not None and (rng.dtype != jnp.int32 or rng.shape != (4,)):
        raise DTypeError(f"dense: rng must be int32 [4], as rng_state makes it, got {rng.dtype}{list(rng.shape)}")
    if kernel.ndim != 2:
        raise ShapeError(f"dense: kernel must be [N, K], got {list(kernel.shape)}")
    if x.ndim == 0 or x.shape[-1] != kernel.shape[1]:
        raise ShapeError(f"dense: x {list(x.shape)} and kernel {list(kernel.shape)} must share their last dimension")
    if bias is not None and bias.shape != kernel.shape[:1]:
        raise ShapeError(
            f"dense: bias must be [{kernel.shape[0]}] for kernel {list(kernel.shape)}, got {list(bias.shape)}"
        )
    return x, kernel, bias, rng


def _plain(x: Array, kernel: Any, bias: Array | None) -> Array:
    y = x @ kernel.astype(x.dtype).T
    return y if bias is None else y + bias.astype(x.dtype)


def _same_axes(*arrays: Array | None) -> list[Array | None]:
    """Lets all operands vary over the same mesh axes; the transpose sums the gradient of those that did not."""
    axes = [frozenset() if x is None else jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*axes)
    missing = [tuple(sorted(union - own, key=str)) for own in axes]
    return [
        x if x is None or not m else jax.lax.pcast(x, m, to="varying") for x, m in zip(arrays, missing, strict=True)
    ]


# --- kernels that are quantized already, and gradients that go elsewhere ---


def as_bytes(q: QuantizedArray) -> QuantizedArray:
    """Payloads and one-byte scales as uint8; see `functional.quantize`."""

    def convert(x: Array) -> Array:
        return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 and x.dtype != jnp.uint8 else x

    return jax.tree.map(convert, q)


def held_copies(kernel: QuantizedArray, options: Options, copies: Any) -> Copies:
    """Both copies of a kernel that is quantized, as far as it has them."""
    if copies is not None:
        raise ValueError("dense: kernel is quantized already, and copies of one were given too")
    plan = options.plan.weight
    for quantizer in (plan.rowwise, plan.columnwise):
        if quantizer is not None and quantizer.format is not kernel.format:
            raise ValueError(
                f"dense: the kernel is held as {kernel.format.name}, and {type(options.recipe).__name__} asks for "
                f"{quantizer.format.name}: run it by the recipe that it was quantized with"
            )
    kernel = as_bytes(kernel)
    rowwise = None if kernel.rowwise_data is None else only(kernel, False)
    return rowwise, None if kernel.columnwise_data is None else only(kernel, True)


def _main_grad(main_grad: Any, kernel: Array | None, shape: tuple[int, ...]) -> Array | None:
    """The array whose gradient is the kernel's; for a reference one that adds its gradient there."""
    if main_grad is None:
        return None
    reference = isinstance(main_grad, jax.Ref)
    if not reference and not isinstance(main_grad, jax.Array):
        raise DTypeError(f"dense: main_grad must be a JAX array or reference, got {type(main_grad).__name__}")
    if main_grad.dtype != jnp.float32 or main_grad.shape != shape:
        raise ShapeError(
            f"dense: main_grad must be float32 {list(shape)}, got {main_grad.dtype}{list(main_grad.shape)}"
        )
    if not reference:
        return main_grad
    if kernel is None:
        raise ValueError(
            "dense: a reference as main_grad asks for a kernel that is differentiated, and a quantized one is not; "
            "pass main_grad as an array and differentiate with respect to it"
        )
    return _sink(main_grad, kernel)


@jax.custom_vjp
def _sink(main_grad: Any, kernel: Array) -> Array:
    return jnp.zeros(main_grad.shape, main_grad.dtype)


def _sink_backward(main_grad: Any, grad: Array) -> tuple[None, None]:
    main_grad[...] = main_grad[...] + grad
    return None, None


_sink.defvjp(lambda main_grad, kernel: (_sink(main_grad, kernel), main_grad), _sink_backward)


# --- forward and backward ---


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "w", "states", "amaxes", "rng"),
    meta_fields=("options", "need_dx", "need_dw", "kernel_dtype", "bias_dtype", "to_main_grad", "recorded"),
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """What the backward pass needs.

    `x`, `w`: operands of wgrad and dgrad, None if not needed. `amaxes`: the forward's, for states whose gradient is
    wanted (`recorded`). `kernel_dtype`: of dkernel. `bias_dtype`: None if no gradient is wanted.
    """

    x: Operand
    w: Operand
    states: States
    amaxes: Amaxes
    rng: Array | None
    options: Options
    need_dx: bool
    need_dw: bool
    kernel_dtype: str
    bias_dtype: str | None
    to_main_grad: bool
    recorded: tuple[str, ...]


def fprop(
    options: Options,
    need_dx: bool,
    need_dw: bool,
    x: Array | FusedInput,
    kernel: Array | None,
    bias: Array | None,
    states: States,
    rng: Array | None,
    copies: Copies | None,
) -> tuple[Array, Operand, Operand, Amaxes]:
    """y, the operands that backward reads of x and kernel, and the amaxes to record."""
    s = options.schedule(need_dx, need_dw)
    copies_x, amaxes = quantize_calls(x, s.x, options, states, rng)
    original = kernel
    if copies is None:
        assert kernel is not None
        copies, of_kernel = quantize_calls(kernel, s.w, options, states, rng)
        amaxes |= of_kernel
    elif kernel is None:
        original = copies[0] if copies[0] is not None else copies[1]
    copies_x, copies = named(copies_x), named(copies)
    a = x if copies_x[0] is None else copies_x[0]
    b = original if s.plan.weight.rowwise is None else _there(copies[0], "rowwise", "fprop")
    y = product("fprop", a, b, bias, x.dtype, s.plan.fast_accum[0])
    w = pick(s.w_kept, copies, original)
    kept = (x if s.x_late else pick(s.x_kept, copies_x, x), w if not s.w_kept else _there(w, s.w_kept, "dgrad"))
    return rounded(y, s.results[0], options, rng), *kept, amaxes


def _there(copy: Operand, side: str, gemm: str) -> Operand:
    if copy is None:
        raise ValueError(
            f"dense: {gemm} reads the {side} copy of the kernel, which was not made; quantize it with both"
        )
    return copy


def bprop(saved: Saved, dy: Array | FusedInput) -> tuple[Array | None, WeightGradient | None, Array | None, Amaxes]:
    """dx, wgrad that has not run yet, dbias, and the amaxes to record."""
    options, rng, dx, wgrad = saved.options, saved.rng, None, None
    s = options.schedule(saved.need_dx, saved.need_dw)
    (rowwise, columnwise), amaxes, dbias = quantize_summed(dy, s.dy, options, saved.states, rng, saved.bias_dtype or "")
    if saved.need_dx:
        a = dy if rowwise is None else rowwise
        dx = rounded(product("dgrad", a, saved.w, None, dy.dtype, s.plan.fast_accum[1]), s.results[1], options, rng)
    if saved.need_dw:
        b = saved.x
        if s.x_late:
            copies, late = quantize_calls(b, s.x_late, options, saved.states, rng)
            b, amaxes = pick(s.x_kept, copies, b), amaxes | late
        wgrad = WeightGradient(dy if columnwise is None else columnwise, b, rng, saved.kernel_dtype, options, s)
    if saved.bias_dtype is not None and dbias is None:
        assert isinstance(dy, jax.Array)  # the sum of a FusedInput comes with its copies
        dbias = functional.bias_grad(dy, saved.bias_dtype)
    return dx, wgrad, dbias, amaxes


def recorded(states: States, amaxes: Amaxes, options: Options) -> States:
    """The states with a call's amaxes."""
    if not options.record:
        return states
    return {name: record(s, *amaxes[name]) if name in amaxes else s for name, s in states.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(
    options: Options,
    x: Array,
    kernel: Array | None,
    bias: Array | None,
    states: States,
    rng: Array | None,
    copies: Copies | None,
    main_grad: Array | None,
) -> tuple[Array, States]:
    y, _, _, amaxes = fprop(options, False, False, x, kernel, bias, states, rng, copies)
    return y, recorded(states, amaxes, options)


def _any(perturbed: Any) -> bool:
    return any(p.perturbed for p in jax.tree.leaves(perturbed))


def _values(tree: Any) -> Any:
    return jax.tree.map(lambda p: p.value, tree)


def _forward(options: Options, *args: Any) -> tuple[tuple[Array, States], Saved]:
    # Each leaf comes with `.perturbed`: whether its gradient is wanted.
    x, kernel, bias, states, _, copies, main_grad = args
    need_dx, need_dw = _any(x), _any(main_grad) if main_grad is not None else _any(kernel)
    if _any(copies):
        raise UnsupportedError(
            "dense: a quantized kernel has no gradient of its own; pass main_grad= and differentiate with respect to it"
        )
    wanted = tuple(name for name, state in states.items() if _any(state))
    values = _values(args)
    x, kernel, bias, states, rng, copies, _ = values
    y, kept_x, kept_w, amaxes = fprop(options, need_dx, need_dw, x, kernel, bias, states, rng, copies)
    s = options.schedule(need_dx, need_dw)
    _check_transport(options, wanted, amaxes, [c.state for c in (*s.dy, *s.x_late) if c.state])
    saved = Saved(
        x=kept_x,
        w=kept_w,
        states=states,
        amaxes={name: found for name, found in amaxes.items() if name in wanted and options.record},
        rng=rng,
        options=options,
        need_dx=need_dx,
        need_dw=need_dw,
        kernel_dtype="float32" if main_grad is not None else "" if kernel is None else kernel.dtype.name,
        bias_dtype=None if bias is None or not _any(args[2]) else bias.dtype.name,
        to_main_grad=main_grad is not None,
        recorded=wanted,
    )
    return (y, recorded(states, amaxes, options)), saved


def _check_transport(options: Options, wanted: tuple[str, ...], forward: Any, backward: list[str]) -> None:
    """Refuses to lose amaxes of a forward or backward pass that is differentiated. **Raises** ValueError."""
    lost = [*backward, *(() if options.returns else forward)] if options.record else []
    if missing := [name for name in lost if name not in wanted]:
        raise ValueError(
            f"dense: the amax of {', '.join(missing)} would be lost: differentiate with respect to the state too "
            "(its gradient is the new state; value_and_grad_with_state does it), pass references (state_refs), or "
            "record=False"
        )


def _state_gradients(saved: Any, amaxes: Amaxes, later: States) -> dict[str, ScaleState | None]:
    """Gradients of the states: themselves, with all amaxes; `later`: those of the states that the call returned."""
    out: dict[str, ScaleState | None] = {}
    for name, state in saved.states.items():
        found = [*saved.amaxes.get(name, ()), *amaxes.get(name, ())] if saved.options.record else []
        out[name] = gradient(state, found, later[name]) if name in saved.recorded else None
    return out


def _backward(options: Options, saved: Saved, grads: tuple[Any, States]) -> tuple[Any, ...]:
    dy, later = grads
    dx = dkernel = dbias = None
    amaxes: Amaxes = {}
    if not isinstance(dy, SymbolicZero):
        dx, wgrad, dbias, amaxes = bprop(saved, dy)
        dkernel = None if wgrad is None else wgrad.compute()
    dmain = None
    if saved.to_main_grad:
        dkernel, dmain = None, dkernel
    return dx, dkernel, dbias, _state_gradients(saved, amaxes, later), None, None, dmain


_dense.defvjp(_forward, _backward, symbolic_zeros=True)


# --- calibration ---


def _calibrated(options: Options, x: Array, kernel: Any, bias: Any, states: States) -> tuple[Array, States]:
    """The plain product, with amaxes recorded under the names of its operands."""
    if isinstance(kernel, QuantizedArray):
        kernel = kernel.dequantize(x.dtype)
    amaxes: Amaxes = {}
    for name in states:
        tensor = {"input": x, "weight": kernel}.get(name.partition(".")[0])
        if tensor is not None:
            amaxes[name] = [functional.amax(jax.lax.stop_gradient(tensor))]
    return _observe(options, _plain(x, kernel, bias), states, amaxes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe(options: Options, y: Array, states: States, amaxes: Amaxes) -> tuple[Array, States]:
    return y, recorded(states, amaxes, options)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("states", "amaxes"), meta_fields=("options", "recorded")
)
@dataclasses.dataclass(frozen=True)
class _Observed:
    states: States
    amaxes: Amaxes
    options: Options
    recorded: tuple[str, ...]


def _observe_forward(options: Options, *args: Any) -> tuple[tuple[Array, States], _Observed]:
    wanted = tuple(name for name, state in args[1].items() if _any(state))
    y, states, amaxes = _values(args)
    _check_transport(options, wanted, amaxes, [n for n in states if n.startswith("grad_output")])
    return (y, recorded(states, amaxes, options)), _Observed(states, amaxes, options, wanted)


def _observe_backward(options: Options, saved: _Observed, grads: tuple[Any, States]) -> tuple[Any, ...]:
    dy, later = grads
    if isinstance(dy, SymbolicZero):
        return None, _state_gradients(saved, {}, later), None
    amax = functional.amax(dy)
    amaxes = {name: [amax] for name in saved.states if name.startswith("grad_output")}
    return dy, _state_gradients(saved, amaxes, later), None


_observe.defvjp(_observe_forward, _observe_backward, symbolic_zeros=True)
