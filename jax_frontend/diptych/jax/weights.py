"""Kernels between steps: copies kept across microbatches, kernels held quantized, gradients computed later."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from diptych.common.errors import DTypeError, ShapeError
from diptych.common.plan import linear_plan
from diptych.common.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer
from diptych.common.recipes import Recipe
from diptych.jax import functional
from diptych.jax.linear import Saved, bprop, check_operands, fprop, held_copies, recorded
from diptych.jax.products import Copies, Options, WeightGradient, named, quantize_calls
from diptych.jax.quantized import QuantizedArray
from diptych.jax.state import ScaleState, check_states, group_axes
from diptych.jax.transport import has_ref, returned, viewed

Array = jax.Array
Tree = TypeVar("Tree")


# --- copies kept across microbatches ---


def quantize_kernel(
    kernel: Array,
    recipe: Recipe,
    *,
    module: str = "linear",
    name: str = "",
    state: Mapping[str, ScaleState] | None = None,
    return_state: bool = False,
    rng: Array | None = None,
) -> Any:
    """The copies of a kernel that `dense(x, kernel, copies=...)` uses in every microbatch of a step.

    They follow the kernel's value now; quantize again when it changes. No derivative goes through them: the kernel's
    gradient is that of `dense`.

    **Arguments:** as `dense`; `rng` is the one that `dense` would get, so that both round alike.

    **Returns:** (rowwise, columnwise) copies, or (those, state) with `return_state`: the kernel's amax is recorded
    here, and not by `dense`.

    **Raises:** as `dense`; ValueError where the amax would be lost.
    """
    options = Options(recipe, module, name, group=group_axes(recipe))
    kernel = jax.lax.stop_gradient(functional._array("quantize_kernel", "kernel", kernel))
    states = check_states("quantize_kernel", state, options.plan, recipe)
    s = options.schedule(True, False)
    copies, amaxes = quantize_calls(kernel, s.w, options, viewed(states, ()), rng)
    if lost := [slot for slot in amaxes if not (return_state or has_ref(states[slot]))]:
        raise ValueError(f"quantize_kernel: the amax of {', '.join(lost)} would be lost: pass return_state=True")
    news = returned(states, recorded(viewed(states, ()), amaxes, options))
    return (named(copies), news) if return_state else named(copies)


# --- kernels held quantized ---


def kernel_quantizer(recipe: Recipe, module: str = "linear", name: str = "") -> Quantizer | None:
    """The quantizer of a kernel that is held quantized; None: it stays in high precision.

    Under delayed scaling its scale comes from the kernel itself. **Raises** ValueError for a recipe that quantizes the
    kernel in two ways, or stochastically.
    """
    plan = linear_plan(recipe, module, name).weight
    if plan.rowwise is None and plan.columnwise is None:
        return None
    if plan.rowwise is None or (plan.columnwise is not None and not plan.shared):
        raise ValueError(
            f"quantize_params: {type(recipe).__name__} quantizes the kernel as {plan.rowwise} for fprop and "
            f"{plan.columnwise} for dgrad; one that is held quantized is quantized once"
        )
    quantizer = plan.rowwise.with_usage(rowwise=True, columnwise=plan.shared)
    if quantizer.needs_rng:
        raise ValueError(f"quantize_params: a kernel cannot be held by {quantizer}, which rounds stochastically")
    if isinstance(quantizer, Float8Quantizer):
        return Float8CurrentScalingQuantizer(
            fp8_dtype=quantizer.fp8_dtype, rowwise=quantizer.rowwise, columnwise=quantizer.columnwise
        )
    return quantizer


def quantize_params(
    params: Tree,
    recipe: Recipe,
    where: Callable[[str, Array], bool],
    *,
    module: str = "linear",
    name: str | Callable[[str], str] = "",
) -> Tree:
    """A tree of parameters whose kernels are held quantized, and in no other precision.

    `dense` takes such a kernel; its gradient comes through `main_grad`, for an optimizer that steps a master copy.

    **Arguments:** `where(path, leaf)`: which leaves are kernels [N, K]; paths are joined by dots. `name`: the roles'
    name, or a function of the path.

    **Returns:** the tree, with a `QuantizedArray` of bytes for each kernel that the recipe quantizes.

    **Raises:** ValueError where `where` picks nothing, or a leaf that is no matrix.
    """
    picked = 0

    def convert(path: Any, leaf: Any) -> Any:
        nonlocal picked
        where_it_is = ".".join(_part(p) for p in path)
        if not where(where_it_is, leaf):
            return leaf
        picked += 1
        if leaf.ndim != 2:
            raise ShapeError(f"quantize_params: {where_it_is} must be [N, K], got {list(leaf.shape)}")
        quantizer = kernel_quantizer(recipe, module, name(where_it_is) if callable(name) else name)
        return leaf if quantizer is None else functional.quantize(leaf, quantizer, as_bytes=True)

    out = jax.tree_util.tree_map_with_path(convert, params)
    if picked == 0:
        raise ValueError("quantize_params: `where` picked no leaf of params")
    return out


def _part(key: Any) -> str:
    return str(next(v for v in (getattr(key, a, None) for a in ("key", "name", "idx")) if v is not None))


# --- gradients computed later ---


class DenseGradients(NamedTuple):
    """What `DensePullback` returns.

    `kernel` has not run yet: `compute()` makes the gradient, `accumulate(acc)` adds it. `state`: with the amaxes of
    forward and backward.
    """

    x: Array
    bias: Array | None
    kernel: WeightGradient
    state: dict[str, ScaleState]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("saved",), meta_fields=("shape", "dtype"))
@dataclasses.dataclass(frozen=True, eq=False)
class DensePullback:
    """The backward pass of one `dense_vjp`, a pytree of what it saved. `shape`, `dtype`: of the gradient it takes."""

    saved: Saved
    shape: tuple[int, ...]
    dtype: str

    def __call__(self, dy: Array) -> DenseGradients:
        dy = functional._array("dense_vjp", "dy", dy)
        if dy.shape != self.shape or dy.dtype.name != self.dtype:
            raise ShapeError(
                f"dense_vjp: dy must be {self.dtype}{list(self.shape)}, as y, got {dy.dtype.name}{list(dy.shape)}"
            )
        dx, wgrad, dbias, amaxes = bprop(self.saved, dy)
        both = {
            name: [*self.saved.amaxes.get(name, ()), *amaxes.get(name, ())] for name in {**self.saved.amaxes, **amaxes}
        }
        assert dx is not None and wgrad is not None
        return DenseGradients(dx, dbias, wgrad, recorded(self.saved.states, both, self.saved.options))


def dense_vjp(
    x: Array,
    kernel: Array | QuantizedArray,
    bias: Array | None = None,
    *,
    recipe: Recipe,
    module: str = "linear",
    name: str = "",
    state: Mapping[str, ScaleState] | None = None,
    rng: Array | None = None,
    copies: Copies | None = None,
    save_original_input: bool = False,
) -> tuple[Array, DensePullback]:
    """`dense` and its backward pass taken apart, for schedules that compute the kernel's gradient later.

        y, pullback = dense_vjp(x, kernel, bias, recipe=recipe)
        grads = pullback(dy)                                   # grads.x is there
        main_grad = grads.kernel.accumulate(main_grad)         # when the pipeline has a bubble

    **Arguments, raises:** as `dense`. States are arrays.

    **Returns:** (y, pullback); pullback and `grads.kernel` are pytrees, and may cross `jax.jit`.
    """
    x, kernel, bias, rng = check_operands(x, kernel, bias, rng)
    if not isinstance(recipe, Recipe):
        raise DTypeError(f"dense_vjp: recipe must be a diptych Recipe, got {type(recipe).__name__}")
    options = Options(recipe, module, name, save_original_input, returns=True, group=group_axes(recipe))
    states = check_states("dense_vjp", state, options.plan, recipe)
    if any(has_ref(s) for s in states.values()):
        raise ValueError("dense_vjp: the state comes back in the gradients; pass arrays, not references")
    dtype, array = str(kernel.dtype), None if isinstance(kernel, QuantizedArray) else kernel
    if isinstance(kernel, QuantizedArray):
        copies = held_copies(kernel, options, copies)
    y, kept_x, kept_w, amaxes = fprop(options, True, True, x, array, bias, states, rng, copies)
    saved = Saved(
        kept_x, kept_w, states, amaxes, rng, options, True, True, dtype,
        None if bias is None else bias.dtype.name, False, (),
    )  # fmt: skip
    return y, DensePullback(saved, y.shape, y.dtype.name)
