"""The three products of a linear layer under a recipe, and its forward and backward made of them.

    y  = quantize(x)  @ quantize(w).T + bias      fprop  [M, K] @ [N, K].T
    dx = quantize(dy) @ quantize(w)               dgrad  [M, N] @ [N, K]
    dw = quantize(dy).T @ quantize(x)             wgrad  [M, N].T @ [M, K]
    db = bias_grad(dy)

Invariants:

- `linear_plan` of `common.layers.plan` gives each operand's quantizer. A `Schedule` is that plan reduced to one call: a
  columnwise copy of x only if the kernel is differentiated, one of the kernel only if x is.
- An operand is a `QuantizedArray` that holds the one copy its product reads, or an array in high precision. Two
  quantized operands multiply in the core; any other product runs in high precision on dequantized values.
- Copies are made as bytes, so that no remat policy rounds them; see the verb `quantize`.
- A `Products` computes products and the bias gradient; grouped layers have their own, and their kernel is a stack.
- `forward` and `backward` take arrays. A custom_vjp's arguments, whose leaves have a flag `perturbed`, are converted to
  arrays and `Needs`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from diptych.common.errors import UnsupportedError
from diptych.common.gemm_options import GemmOptions
from diptych.common.layers.schedule import OFFSETS as OFFSETS
from diptych.common.layers.schedule import Schedule
from diptych.common.ops import shapes
from diptych.jax.functional import gemm as gemm_verbs
from diptych.jax.functional.source import FusedInput
from diptych.jax.layers.options import Amaxes, CallState, Options, States
from diptych.jax.layers.quantize import quantize_calls, quantize_operand, quantize_weight, requantized_result, verb_of
from diptych.jax.state.scales import ScaleState, gradient, record
from diptych.jax.tensors.copies import Operand, add_bias, matmul, named, pick, values
from diptych.jax.tensors.quantized import QuantizedArray

Array = jax.Array


# --- operands and products ---


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class Products:
    """Computes the products and the bias gradient of a layer with one kernel; a pytree."""

    def product(self, gemm: str, a: Operand, b: Operand, bias: Array | None, dtype: Any, options: GemmOptions) -> Array:
        """op(a) @ op(b) + bias in `dtype`; fprop and dgrad with a's leading dimensions, wgrad as the kernel."""
        trans_a, trans_b = gemm == "wgrad", gemm == "fprop"
        if isinstance(a, QuantizedArray) and isinstance(b, QuantizedArray):
            taken = {"trans_a": trans_a, "trans_b": trans_b, "bias": bias, "out_dtype": dtype}
            return gemm_verbs.gemm(a, b, **taken, **options._asdict())
        inner = a.dtype if isinstance(a, jax.Array) else b.dtype
        left, right = values(a, inner), values(b, inner)
        out: Array = matmul(left, right, trans_a, trans_b)
        if bias is not None:
            out = add_bias(out, bias)
        return out.astype(dtype).reshape(shapes.gemm_out_shape(a.shape, out.shape[0], out.shape[1], trans_a))

    def bias_grad(self, dy: Array, dtype: str) -> Array:
        return gemm_verbs.bias_grad(dy, dtype)


LINEAR = Products()


class WeightGradient(NamedTuple):
    """The operands of a wgrad, which `cotangents` computes once the gradients of a layer's inputs are there."""

    dy: Operand
    x: Operand
    dtype: str
    schedule: Schedule
    options: Options
    state: CallState
    products: Products

    def compute(self) -> Array:
        """Returns the gradient, of the kernel's shape, in `dtype`."""
        dw = self.products.product("wgrad", self.dy, self.x, None, self.dtype, self.schedule.plan.options[2])
        return requantized_result(dw, self.schedule.results[2], self.options.of_kernels, self.state, verb_of(dw))


# --- forward ---


class LayerArrays(NamedTuple):
    """The arrays of one linear layer's call beside its input; in a custom_vjp's cotangents, their gradients.

    `kernel`: None if it is quantized; `copies` then are its own. `main_grad`: receives the kernel's gradient, or None.
    """

    kernel: Any
    bias: Any
    state: CallState
    copies: Any
    main_grad: Any = None


def perturbed(tree: Any) -> bool:
    """Returns whether any leaf of a custom_vjp's arguments needs a gradient."""
    return any(p.perturbed for p in jax.tree.leaves(tree))


def primals(tree: Any) -> Any:
    """Returns the arrays of a custom_vjp's arguments, without their flags `perturbed`."""
    return jax.tree.map(lambda p: p.value, tree)


class Needs(NamedTuple):
    """The gradients that a call needs, and their dtypes.

    `kernel_dtype`: of dkernel. `bias_dtype`: None if no gradient is needed. `states`: names of states whose gradient is
    needed, which records the amaxes. `to_main_grad`: dkernel is the gradient of main_grad.
    """

    dx: bool
    dw: bool
    kernel_dtype: str
    bias_dtype: str | None
    states: tuple[str, ...]
    to_main_grad: bool = False

    @staticmethod
    def of(x: Any, layer: LayerArrays, op: str = "dense") -> Needs:
        """Returns the needs of a custom_vjp's arguments. `x`: all arguments that the input depends on.

        **Raises** UnsupportedError if a gradient of `copies` is needed.
        """
        kernel, bias, (states, _), copies, main_grad = layer
        if perturbed(copies):
            raise UnsupportedError(
                f"{op}: a quantized kernel has no gradient of its own; pass main_grad= and differentiate with respect "
                "to it"
            )
        return Needs(
            dx=perturbed(x),
            dw=perturbed(kernel if main_grad is None else main_grad),
            kernel_dtype="float32" if main_grad is not None else "" if kernel is None else kernel.value.dtype.name,
            bias_dtype=bias.value.dtype.name if perturbed(bias) else None,
            states=tuple(name for name, state in states.items() if perturbed(state)),
            to_main_grad=main_grad is not None,
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "w", "state", "amaxes", "products"),
    meta_fields=("options", "needs"),
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """The residuals of the backward pass.

    `x`, `w`: operands of wgrad and dgrad, None if not needed; an x that is to be quantized again is the original.
    `amaxes`: the forward's, for states whose gradient is wanted.
    """

    x: Operand
    w: Operand
    state: CallState
    amaxes: Amaxes
    options: Options
    needs: Needs
    products: Products = LINEAR


def fprop(
    options: Options,
    need_dx: bool,
    need_dw: bool,
    x: Array | FusedInput,
    layer: LayerArrays,
    products: Products = LINEAR,
) -> tuple[Array, Operand, Operand, Amaxes]:
    """Returns y, the operands of x and kernel that backward reads, and the amaxes to record."""
    kernel, bias, state, copies, _ = layer
    s = options.schedule(need_dx, need_dw)
    copies_x, amaxes = quantize_calls(x, s.x, options, state)
    original = kernel
    if copies is None:
        assert kernel is not None
        copies, of_kernel = quantize_weight(kernel, s.w, options, state)
        amaxes |= of_kernel
    elif kernel is None:
        original = copies[0] if copies[0] is not None else copies[1]
    copies_x, copies = named(copies_x), named(copies)
    a = x if copies_x[0] is None else copies_x[0]
    b = original if s.plan.weight.rowwise is None else _there(copies[0], "rowwise", "fprop", options.op)
    y = products.product("fprop", a, b, bias, x.dtype, s.plan.options[0])
    w = pick(s.w_kept, copies, original)
    w = _there(w, s.w_kept, "dgrad", options.op) if s.w_kept else w
    kept = (x if s.x_late else pick(s.x_kept, copies_x, x), w)
    return requantized_result(y, s.results[0], options, state), *kept, amaxes


def _there(copy: Operand, side: str, gemm: str, op: str) -> Operand:
    if copy is None:
        raise ValueError(f"{op}: {gemm} reads the {side} copy of the kernel, which was not made; quantize it with both")
    return copy


def recorded(states: States, amaxes: Amaxes, options: Options) -> States:
    """Returns the states with a call's amaxes recorded."""
    if not options.record:
        return states
    return {name: record(s, *amaxes[name]) if name in amaxes else s for name, s in states.items()}


def forward(
    options: Options, needs: Needs, x: Array | FusedInput, layer: LayerArrays, products: Products = LINEAR
) -> tuple[tuple[Array, States], Saved]:
    """Returns (y, new states), and the residuals. **Raises** ValueError if amaxes would be lost."""
    y, kept_x, kept_w, amaxes = fprop(options, needs.dx, needs.dw, x, layer, products)
    states = layer.state.states
    s = options.schedule(needs.dx, needs.dw)
    check_transport(options, needs.states, amaxes, [c.state for c in (*s.dy, *s.x_late) if c.state])
    kept = {name: found for name, found in amaxes.items() if name in needs.states and options.record}
    return (y, recorded(states, amaxes, options)), Saved(kept_x, kept_w, layer.state, kept, options, needs, products)


def check_transport(options: Options, wanted: tuple[str, ...], forward: Any, backward: list[str]) -> None:
    """**Raises** ValueError if amaxes of a differentiated forward or backward pass would be lost."""
    lost = [*backward, *(() if options.returns else forward)] if options.record else []
    if missing := [name for name in lost if name not in wanted]:
        raise ValueError(
            f"{options.op}: the amax of {', '.join(missing)} would be lost: differentiate with respect to the state "
            "too (its gradient is the new state; value_and_grad_with_state does it, for nnx argnums=nnx.DiffState(0, "
            "diptych.jax.nnx.DIFFERENTIATED), for linen all variables), pass references (state_refs), or record=False"
        )


# --- backward ---


class DenseGradients(NamedTuple):
    """The gradients of a linear layer, None where they are not needed.

    `kernel` is not computed yet. `states`: the states with the amaxes of forward and backward.
    """

    x: Any
    bias: Any
    kernel: WeightGradient | None
    states: Any


def bprop(saved: Saved, dy: Array | FusedInput) -> tuple[Array | None, WeightGradient | None, Array | None, Amaxes]:
    """Returns dx, a wgrad that is not computed yet, dbias, and the amaxes to record."""
    options, needs, state, products, dx, wgrad = saved.options, saved.needs, saved.state, saved.products, None, None
    s = options.schedule(needs.dx, needs.dw)
    (rowwise, columnwise), amaxes, dbias = quantize_operand(dy, s.dy, options, state, needs.bias_dtype or "")
    if needs.dx:
        a = dy if rowwise is None else rowwise
        dx = products.product("dgrad", a, saved.w, None, dy.dtype, s.plan.options[1])
        dx = requantized_result(dx, s.results[1], options, state)
    if needs.dw:
        b = saved.x
        if s.x_late:
            copies, late = quantize_calls(b, s.x_late, options, state)
            b, amaxes = pick(s.x_kept, copies, b), amaxes | late
        a = dy if columnwise is None else columnwise
        wgrad = WeightGradient(a, b, needs.kernel_dtype, s, options, state, products)
    if needs.bias_dtype is not None and dbias is None:
        assert isinstance(dy, jax.Array)  # the sum of a FusedInput comes with its copies
        dbias = products.bias_grad(dy, needs.bias_dtype)
    return dx, wgrad, dbias, amaxes


def state_gradients(saved: Saved, amaxes: Amaxes, later: States | None) -> dict[str, ScaleState | None]:
    """Returns the gradients of the states: the states with all amaxes. `later`: gradients of the returned states."""
    out: dict[str, ScaleState | None] = {}
    for name, state in saved.state.states.items():
        found = [*saved.amaxes.get(name, ()), *amaxes.get(name, ())] if saved.options.record else []
        after = None if later is None else later[name]
        out[name] = gradient(state, found, after) if name in saved.needs.states else None
    return out


def backward(saved: Saved, dy: Any, later: States | None = None) -> DenseGradients:
    """Returns the gradients; None for those not needed. `dy` and the leaves of `later` may be symbolic zeros."""
    dx = wgrad = dbias = None
    amaxes: Amaxes = {}
    if not isinstance(dy, SymbolicZero):
        dx, wgrad, dbias, amaxes = bprop(saved, dy)
    return DenseGradients(dx, dbias, wgrad, state_gradients(saved, amaxes, later))


def cotangents(saved: Saved, made: DenseGradients) -> LayerArrays:
    """Returns the cotangents of a custom_vjp's `LayerArrays`; computes wgrad."""
    dw = None if made.kernel is None else made.kernel.compute()
    dkernel, dmain = (None, dw) if saved.needs.to_main_grad else (dw, None)
    return LayerArrays(dkernel, made.bias, CallState(made.states), None, dmain)
