"""`Linear`: nn.Linear whose three products run quantized inside `autocast`.

    qx, qw = quantize(x), quantize(w);  y = gemm(qx, qw) + bias                    fprop  [M, K] @ [N, K].T
    qdy    = quantize(dy);              dx = gemm(qdy, qw, trans_b=False)          dgrad  [M, N] @ [N, K]
                                        dw = gemm(qdy, qx, trans_a=True, ...)      wgrad  [M, N].T @ [M, K]
                                        db = bias_grad(dy)

Only what is needed is computed: a columnwise copy of x where the weight is trained, one of w where x needs a gradient.
Backward keeps these copies, and neither x nor w.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diptych.common import shapes
from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.quantizers import Quantizer, QuantizerRole
from diptych.common.recipes import Recipe
from diptych.torch import primitives
from diptych.torch.autocast import STATE
from diptych.torch.primitives import describe, require_device, require_high_precision

INPUT, WEIGHT, GRAD_OUTPUT = (QuantizerRole(module="linear", tensor=t) for t in QuantizerRole.TENSORS)


class _Plan(NamedTuple):
    """A recipe's quantizers by what is needed of them, and its accumulation."""

    x: tuple[Quantizer, Quantizer]  # rowwise; rowwise and columnwise
    w: tuple[Quantizer, Quantizer]
    dy: tuple[Quantizer, Quantizer, Quantizer]  # rowwise; columnwise; both
    fast_accum: tuple[bool, bool, bool]  # fprop, dgrad, wgrad


def _make_plan(recipe: Recipe) -> _Plan:
    x, w, dy = recipe.quantizer(INPUT), recipe.quantizer(WEIGHT), recipe.quantizer(GRAD_OUTPUT)
    return _Plan(
        (x.with_usage(rowwise=True, columnwise=False), x.with_usage(rowwise=True, columnwise=True)),
        (w.with_usage(rowwise=True, columnwise=False), w.with_usage(rowwise=True, columnwise=True)),
        (
            dy.with_usage(rowwise=True, columnwise=False),
            dy.with_usage(rowwise=False, columnwise=True),
            dy.with_usage(rowwise=True, columnwise=True),
        ),
        (recipe.fast_accum("fprop"), recipe.fast_accum("dgrad"), recipe.fast_accum("wgrad")),
    )


_cached_plan = functools.lru_cache(maxsize=256)(_make_plan)
_last: tuple[Recipe | None, Any] = (None, None)  # by identity, since hashing a recipe costs a microsecond


def _plan(recipe: Recipe) -> _Plan:
    if torch.compiler.is_compiling():  # a constant of the graph
        return _make_plan(recipe)
    global _last
    known, plan = _last
    if known is not recipe:
        plan = _cached_plan(recipe)
        _last = (recipe, plan)
    return plan


def _fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, need_dx: bool, need_dw: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """y, and the buffers of x and w."""
    x_quantizer, w_quantizer = plan.x[int(need_dw)], plan.w[int(need_dx)]
    qx = primitives.quantize(x, x_quantizer)
    qw = primitives.quantize(weight, w_quantizer)
    y = primitives.gemm(
        (qx[0], qx[1], x_quantizer.spec[0], False),
        (qw[0], qw[1], w_quantizer.spec[0], False),
        bias,
        1.0,
        x.dtype,
        plan.fast_accum[0],
    )
    if x.dim() != 2:
        y = y.view(shapes.gemm_out_shape(x.shape, y.shape[0], y.shape[1], False))
    return y, qx, qw


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, need_dx: bool, need_dw: bool
    ) -> Tensor:
        y, qx, qw = _fprop(x, weight, bias, _plan(recipe), need_dx, need_dw)
        saved: list[Tensor] = []
        if need_dw:
            saved += qx[2:4]
        if need_dx:
            saved += qw[2:4]
        ctx.save_for_backward(*saved)
        bias_dtype = None if bias is None else bias.dtype
        ctx.call = (recipe, need_dx, need_dw, x.shape, x.dtype, weight.dtype, bias_dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedError(
                "diptych.torch.Linear has no second derivative (backward ran with create_graph=True); "
                "run this part under autocast(enabled=False)"
            )
        recipe, need_dx, need_dw, x_shape, x_dtype, w_dtype, bias_dtype = ctx.call
        plan = _plan(recipe)
        saved = ctx.saved_tensors
        dx = dw = db = None
        if need_dx or need_dw:
            quantizer = plan.dy[need_dx + 2 * need_dw - 1]
            qdy = primitives.quantize(dy, quantizer)
            format_id = quantizer.spec[0]
            if need_dx:
                w = (saved[-2], saved[-1], plan.w[1].spec[0], True)
                dx = primitives.gemm((qdy[0], qdy[1], format_id, False), w, None, 1.0, x_dtype, plan.fast_accum[1])
                dx = dx.view(x_shape)
            if need_dw:
                i = 2 if need_dx else 0
                x = (saved[0], saved[1], plan.x[1].spec[0], True)
                dw = primitives.gemm((qdy[i], qdy[i + 1], format_id, True), x, None, 1.0, w_dtype, plan.fast_accum[2])
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            db = primitives.bias_grad(dy, bias_dtype)
        return dx, dw, db, None, None, None


def _require_fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Everything that the three products ask for, before the first kernel."""
    require_high_precision("linear", "input", x)
    require_high_precision("linear", "weight", weight)
    if x.dim() == 0 or weight.dim() != 2 or x.size(-1) != weight.size(1):
        raise ShapeError(f"linear: input [..., K] and weight [N, K] do not fit: {describe(x)}, {describe(weight)}")
    if bias is not None:
        require_high_precision("linear", "bias", bias)
        if bias.dim() != 1 or bias.size(0) != weight.size(0):
            raise ShapeError(f"linear: bias [N] and weight [N, K] do not fit: {describe(bias)}, {describe(weight)}")
    require_device("linear", x, weight, "weight")
    require_device("linear", x, bias, "bias")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """x @ weight.T + bias with quantized operands, differentiable once.

    **Arguments:** `x`: [..., K]; under `torch.amp.autocast` it is cast to its dtype first. `weight`: [N, K], quantized
    from its own dtype. `bias`: [N]. All float32, bfloat16 or float16, in any mixture.

    **Returns:** [..., N] in x's (or autocast's) dtype.

    **Raises:** TypeError for dtypes, ValueError for shapes or mixed devices, NotImplementedError for a second
    derivative.
    """
    device_type = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    _require_fit(x, weight, bias)
    if torch.is_grad_enabled():
        need_dx, need_dw = x.requires_grad, weight.requires_grad
        if need_dx or need_dw or (bias is not None and bias.requires_grad):
            return _Linear.apply(x, weight, bias, recipe, need_dx, need_dw)
    return _fprop(x, weight, bias, _plan(recipe), False, False)[0]


class Linear(nn.Linear):
    """nn.Linear that quantizes inside `autocast`, and is nn.Linear itself outside.

    **Arguments:** as nn.Linear, with the same initialization, attributes and state_dict. `recipe`: used instead of the
    region's wherever a region is enabled; None takes the region's.

    **Raises:** TypeError if `recipe` is not a recipe; see `linear` for the forward.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"Linear: recipe must be a diptych.common.Recipe or None, got {type(recipe).__name__}")
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.recipe = recipe
        self._last_region: Recipe | None = None

    def forward(self, input: Tensor) -> Tensor:
        recipe = STATE.recipe
        if not torch.compiler.is_compiling():
            recipe = self._recomputed(recipe)
        if recipe is None:
            return F.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias, recipe if self.recipe is None else self.recipe)

    def _recomputed(self, region: Recipe | None) -> Recipe | None:
        """The region to run in: that of the last forward where a checkpoint recomputes it outside of any region."""
        if torch._C._current_graph_task_id() == -1:  # not inside a backward pass
            if region is not self._last_region:
                self._last_region = region
        elif region is None:
            return self._last_region
        return region

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.recipe is None else f", recipe={self.recipe}")
