"""The three products of a linear layer under a recipe.

    y  = quantize(x)  @ quantize(w).T + bias      fprop  [M, K] @ [N, K].T
    dx = quantize(dy) @ quantize(w)               dgrad  [M, N] @ [N, K]
    dw = quantize(dy).T @ quantize(x)             wgrad  [M, N].T @ [M, K]
    db = bias_grad(dy)

Invariants:

- What is quantized how is `common.plan.linear_plan`'s to say; a `Schedule` is that plan cut down to what one call
  needs: a columnwise copy of x only where the kernel is differentiated, one of the kernel only where x is.
- An operand is a `QuantizedArray` that holds the one copy its product reads, or an array in high precision. Two
  quantized ones multiply in the core; a product with any other runs in high precision on what a copy stands for.
- Copies are made as bytes, so that no remat policy rounds them; see `functional.quantize`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from diptych.common import shapes
from diptych.common.errors import DTypeError
from diptych.common.plan import LinearPlan, TensorPlan, linear_plan
from diptych.common.quantizers import Quantizer
from diptych.common.recipes import Recipe
from diptych.jax import functional
from diptych.jax.fused import FusedInput
from diptych.jax.quantized import QuantizedArray
from diptych.jax.state import ScaleState

Array = jax.Array
Operand = Any  # QuantizedArray or Array
Copies = tuple[QuantizedArray | None, QuantizedArray | None]  # rowwise, columnwise

OFFSETS = 18
"""Offsets of the random generator that one forward and backward of a linear layer use: nine calls of two."""

CHECKPOINT_NAME = "diptych_q"
"""Name of the quantized copies: `jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("diptych_q"))`
keeps those that the backward pass needs; other policies quantize a second time, to the same bits."""


class Call(NamedTuple):
    """One quantize call: with which quantizer, scale state and number of random draw."""

    quantizer: Quantizer
    state: str
    number: int


class Schedule(NamedTuple):
    """The calls of one forward and backward; see the module's docstring.

    `x_late`: the calls on the original x that backward makes. `x_kept`, `w_kept`: which operand backward reads,
    "columnwise", "rowwise", or "original"; empty: none.
    """

    plan: LinearPlan
    x: tuple[Call, ...]
    w: tuple[Call, ...]
    dy: tuple[Call, ...]
    x_late: tuple[Call, ...]
    x_kept: str
    w_kept: str
    results: tuple[Call | None, Call | None, Call | None]


class Options(NamedTuple):
    """How one call of `dense` runs, hashable: the static argument of its custom_vjp."""

    recipe: Recipe
    module: str = "linear"
    name: str = ""
    save_original_input: bool = False
    record: bool = True
    returns: bool = False
    group: tuple[str, ...] = ()

    @property
    def plan(self) -> LinearPlan:
        return linear_plan(self.recipe, self.module, self.name)

    def schedule(self, need_dx: bool, need_dw: bool) -> Schedule:
        return make_schedule(self.recipe, self.module, self.name, need_dx, need_dw, self.save_original_input)


# --- what to do ---


def _calls(plan: TensorPlan, number: int, rowwise: bool, columnwise: bool) -> tuple[Call, ...]:
    """A quantizer that serves both copies takes its tensor's first number."""
    second = 0 if plan.shared else 1
    return tuple(Call(q, state, number + (0 if q.rowwise else second)) for q, state in plan.calls(rowwise, columnwise))


@functools.lru_cache(maxsize=1024)
def make_schedule(recipe: Recipe, module: str, name: str, need_dx: bool, need_dw: bool, original: bool) -> Schedule:
    """The schedule of one call. `original`: keep the input, not its copy."""
    plan = linear_plan(recipe, module, name)
    side = "rowwise" if plan.dequantized_backward else "columnwise"
    kept = [
        "" if not needed else "original" if getattr(tensor, side) is None else side
        for tensor, needed in ((plan.input, need_dw), (plan.weight, need_dx))
    ]
    x_late: tuple[Call, ...] = ()
    if original and kept[0] not in ("", "original"):
        x_late = _calls(plan.input, 0, kept[0] == "rowwise", kept[0] == "columnwise")
    results = [None if q is None else Call(q, "", 6 + i) for i, q in enumerate(plan.results)]
    return Schedule(
        plan,
        x=_calls(plan.input, 0, True, kept[0] == "columnwise" and not x_late),
        w=_calls(plan.weight, 2, True, kept[1] == "columnwise"),
        dy=_calls(plan.grad_output, 4, need_dx, need_dw),
        x_late=x_late,
        x_kept=kept[0],
        w_kept=kept[1],
        results=(results[0], results[1], results[2]),
    )


# --- quantizing ---


def rng_at(rng: Array, offset: int) -> Array:
    """The state of the random generator `offset` draws later: int32 [4], the offset added in 64 bits."""
    words = jax.lax.bitcast_convert_type(rng, jnp.uint32)
    low = words[2] + jnp.uint32(offset & 0xFFFFFFFF)
    high = words[3] + jnp.uint32(offset >> 32 & 0xFFFFFFFF) + (low < words[2]).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.stack([words[0], words[1], low, high]), jnp.int32)


def quantize_calls(
    x: Array | FusedInput, calls: tuple[Call, ...], options: Options, states: dict[str, ScaleState], rng: Array | None
) -> tuple[Copies, dict[str, list[Array]]]:
    """The copies of one tensor, and the amaxes that its delayed-scaling states are to record."""
    return quantize_summed(x, calls, options, states, rng, "")[:2]


def quantize_summed(
    x: Array | FusedInput,
    calls: tuple[Call, ...],
    options: Options,
    states: dict[str, ScaleState],
    rng: Array | None,
    dtype: str,
) -> tuple[Copies, dict[str, list[Array]], Array | None]:
    """`quantize_calls`, and of a FusedInput the sum over rows in `dtype`, if one is named; of an array None."""
    rowwise = columnwise = total = None
    amaxes: dict[str, list[Array]] = {}
    for call in calls:
        fmt, given = call.quantizer.format, {}
        if call.state:
            given["scale"] = states[call.state].scale
        if call.quantizer.needs_rng:
            if rng is None:
                raise DTypeError(
                    f"dense: {call.quantizer} rounds stochastically and needs rng=; rng_state(seed) makes one"
                )
            given["rng"] = rng_at(rng, 2 * call.number) if call.number else rng
        if options.group and not call.state and (fmt.per_tensor or fmt.two_level):
            given["amax_group"] = options.group
        if isinstance(x, FusedInput):
            q, summed = x.quantize(call.quantizer, as_bytes=True, column_sum=dtype if total is None else "", **given)
            total = summed if total is None else total
        else:
            q = functional.quantize(x, call.quantizer, as_bytes=True, **given)
        if call.state and q.amax is not None:
            amaxes.setdefault(call.state, []).append(q.amax)
        rowwise = only(q, False) if call.quantizer.rowwise else rowwise
        columnwise = only(q, True) if call.quantizer.columnwise else columnwise
    return (rowwise, columnwise), amaxes, total


def only(q: QuantizedArray, columnwise: bool) -> QuantizedArray:
    """A tensor with one of its copies. **Raises** ValueError if that was not made."""
    copy = q.copy_of(columnwise, "dense")
    side = "columnwise" if columnwise else "rowwise"
    fields: dict[str, Any] = {f"{side}_data": copy.data, f"{side}_scale_inv": copy.scale_inv}
    if copy.amax is not None:
        fields["columnwise_amax" if columnwise else "amax"] = copy.amax
    quantizer = q.quantizer.with_usage(rowwise=not columnwise, columnwise=columnwise)
    return QuantizedArray(quantizer, q.leading, q.dtype, **fields)


def named(copies: Copies) -> Copies:
    """Copies with the name that remat policies know."""
    return tuple(None if q is None else checkpoint_name(q, CHECKPOINT_NAME) for q in copies)  # type: ignore[return-value]


def rounded(x: Array, call: Call | None, options: Options, rng: Array | None) -> Array:
    """A result as its quantized copy stands for it."""
    if call is None:
        return x
    single = call._replace(quantizer=call.quantizer.with_usage(rowwise=True, columnwise=False))
    (copy, _), _ = quantize_calls(x, (single,), options, {}, rng)
    return functional.dequantize(copy, x.dtype)  # type: ignore[arg-type]


# --- operands and products ---


def pick(kept: str, copies: Copies, original: Operand) -> Operand:
    """What backward reads of a tensor."""
    if kept in ("", "original"):
        return original if kept else None
    return copies[kept == "columnwise"]


def _values(operand: Operand, dtype: Any) -> Array:
    """An operand in high precision, as a matrix."""
    x = operand.astype(dtype) if isinstance(operand, jax.Array) else functional.dequantize(operand, dtype)
    return x.reshape(shapes.rows_cols(x.shape))


def product(gemm: str, a: Operand, b: Operand, bias: Array | None, dtype: Any, fast_accum: bool) -> Array:
    """op(a) @ op(b) + bias in `dtype`; fprop and dgrad with a's leading dimensions, wgrad [rows, cols]."""
    trans_a, trans_b = gemm == "wgrad", gemm == "fprop"
    if isinstance(a, QuantizedArray) and isinstance(b, QuantizedArray):
        return functional.gemm(
            a, b, trans_a=trans_a, trans_b=trans_b, bias=bias, out_dtype=dtype, fast_accum=fast_accum
        )
    inner = a.dtype if isinstance(a, jax.Array) else b.dtype
    left, right = _values(a, inner), _values(b, inner)
    out: Array = (left.T if trans_a else left) @ (right.T if trans_b else right)
    if bias is not None:
        out = out + bias.astype(inner)
    return out.astype(dtype).reshape(shapes.gemm_out_shape(a.shape, out.shape[0], out.shape[1], trans_a))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("dy", "x", "rng"), meta_fields=("dtype", "options", "schedule")
)
@dataclasses.dataclass(frozen=True, eq=False)
class WeightGradient:
    """wgrad, ready to run: a pytree of its operands, which may wait, or leave a compiled function."""

    dy: Operand
    x: Operand
    rng: Array | None
    dtype: str
    options: Options
    schedule: Schedule

    def compute(self, dtype: Any = None) -> Array:
        """The gradient [N, K], in the kernel's dtype or another."""
        dtype = self.dtype if dtype is None else dtype
        dw = product("wgrad", self.dy, self.x, None, dtype, self.schedule.plan.fast_accum[2])
        return rounded(dw, self.schedule.results[2], self.options, self.rng)

    def accumulate(self, acc: Array) -> Array:
        """acc + the gradient, in acc's memory where XLA may reuse it; `acc`: [N, K], usually float32."""
        quantized = isinstance(self.dy, QuantizedArray) and isinstance(self.x, QuantizedArray)
        if not quantized or self.schedule.results[2] is not None:
            return acc + self.compute(acc.dtype)
        fast = self.schedule.plan.fast_accum[2]
        dy: Any = self.dy
        return functional.gemm_into(acc, dy, self.x, trans_a=True, trans_b=False, fast_accum=fast)
