"""Helpers for tests of grouped layers: a seeded layer, sizes of groups, and a step from products of single groups."""

from __future__ import annotations

from typing import Any

import torch

import diptych.torch as dt
from diptych.common import NVFP4BlockScaling, QuantizerRole, Recipe
from diptych.torch.tensors.quantized import BUFFERS
from torch_frontend.layer_cases import NAMED, SEED, dtype_of
from torch_frontend.tools import normal

K, N = 96, 64
# rows, offsets, and what all of them are multiples of
GROUPS: dict[str, tuple[int, tuple[int, ...], int]] = {
    "even": (128, (0, 32, 64, 96, 128), 32),
    "empty": (96, (0, 0, 48, 48, 80), 16),
    "one huge": (288, (0, 0, 256, 256, 256), 128),
    "later": (160, (16, 16, 64, 128, 144), 16),
    "unaligned": (80, (3, 8, 8, 41, 75), 1),
    "none": (32, (0, 0, 0, 0, 0), 128),
}


def recipe_for(name: str, align: int = 16) -> Recipe:
    """Returns the recipe of a name, without a Hadamard transform if `align` is not a multiple of 16."""
    recipe = NAMED[name]
    return recipe.replace(disable_rht=True) if isinstance(recipe, NVFP4BlockScaling) and align % 16 else recipe


def layer(k: int = K, n: int = N, groups: int = 4, *, device: str = "cpu", **kw: Any) -> dt.GroupedLinear:
    """Returns a layer whose parameters and random state are fixed by its sizes."""
    made = dt.GroupedLinear(groups, k, n, device=device, **kw)
    with torch.no_grad():
        for key, p in made.named_parameters():  # experts that differ in magnitude
            grow = torch.arange(1, groups + 1, device=device).view(-1, *[1] * (p.dim() - 1))
            p.copy_(normal(f"grouped-{key}", tuple(p.shape), device=device) * grow)
    return made


def input_for(name: str, rows: int, k: int = K, device: str = "cpu") -> torch.Tensor:
    return normal("grouped-x", (rows, k), dtype_of(name), device)


def offsets_of(offsets: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def run(fn: Any, model: Any, x: torch.Tensor, recipe: Recipe | None, dy: torch.Tensor, **groups: Any) -> dict[str, Any]:
    """y, dx and the parameters' gradients of one step from a fresh random state."""
    model.zero_grad(set_to_none=True)
    if isinstance(recipe, NVFP4BlockScaling):
        model.seed_rng(SEED)
    x = x.detach().clone().requires_grad_()
    with dt.autocast(recipe=recipe, enabled=recipe is not None):
        y = fn(x, **groups)
    y.backward(dy)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


def _rows_alone(q: dt.QuantizedTensor, first: int, last: int) -> dt.QuantizedTensor:
    """A quantized tensor whose columnwise copy holds zeros but for some rows: scales lie where they did."""
    fmt, data = q.quantizer.format, q.columnwise_data.view(torch.uint8)
    flat = data if fmt.columnwise == "transposed" else data.t()  # [columns, rows / pack]
    each = torch.stack([flat & 15, flat >> 4], -1).flatten(1) if fmt.pack == 2 else flat.clone()
    each[:, :first] = 0
    each[:, last:] = 0
    flat = each[:, ::2] | each[:, 1::2] << 4 if fmt.pack == 2 else each
    made = (flat if fmt.columnwise == "transposed" else flat.t()).contiguous().view(q.columnwise_data.dtype)
    parts = {n: getattr(q, n) for n in BUFFERS} | {"columnwise_data": made}
    return dt.QuantizedTensor(q.quantizer, q.shape, q.dtype, **parts)


def reference(
    recipe: Recipe, model: Any, x: torch.Tensor, dy: torch.Tensor, offsets: tuple[int, ...], scales: Any = None
) -> dict[str, torch.Tensor]:
    """The same step group by group: products of whole tensors, of which a group's rows are kept.

    `scales`: of delayed scaling, by tensor; 1 where there is none.
    """
    weight, bias, groups = model.weight.detach(), model.bias.detach(), len(offsets) - 1

    def quantize(tensor: str, t: torch.Tensor, number: int) -> dt.QuantizedTensor:
        q = recipe.quantizer(QuantizerRole("grouped_linear", tensor))
        given: dict[str, Any] = {}
        if q.needs_scale:
            given["scale"] = torch.tensor([(scales or {}).get(tensor, 1.0)])
        if q.needs_rng:
            given["rng"] = dt.rng_state(SEED, 2 * number)
        return dt.quantize(t, q, **given)

    qx, qdy = quantize("input", x, 0), quantize("grad_output", dy, 4)
    made = {
        "y": torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype),
        "dx": torch.zeros_like(x),
        "weight": torch.zeros_like(weight),
        "bias": torch.zeros_like(bias),
    }
    fast = [recipe.fast_accum(g) for g in ("fprop", "dgrad", "wgrad")]
    for g in range(groups):
        first, last = offsets[g], offsets[g + 1]
        qw = quantize("weight", weight[g], 2)
        y = dt.gemm(qx, qw, bias=bias[g], fast_accum=fast[0])
        dx = dt.gemm(qdy, qw, trans_b=False, fast_accum=fast[1])
        made["y"][first:last], made["dx"][first:last] = y[first:last], dx[first:last]
        if last > first:
            of_g = _rows_alone(qdy, first, last), _rows_alone(qx, first, last)
            made["weight"][g] = dt.gemm(*of_g, trans_a=True, trans_b=False, out_dtype=weight.dtype, fast_accum=fast[2])
            made["bias"][g] = dt.bias_grad(dy[first:last], bias.dtype)
    return made
