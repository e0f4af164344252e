"""Products of groups on a GPU, against torch's in bfloat16 and FP8: `python -m benchmarks.grouped [--out FILE]`.

Before it is timed, each of diptych's results is compared with torch's bfloat16 product of the dequantized operands.
Peers: `torch.nn.functional.grouped_mm` and, for fprop and dgrad, `torch._scaled_grouped_mm` with a scale for each row.
All run in turns. Groups are equal, or cut at random multiples of 128. A layer's step is forward and backward, including
quantizing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

import diptych.torch as dt
from benchmarks.gpu import device_seconds, device_seconds_of_each, quantized, run_parts, state_of
from diptych import core
from diptych.common import RECIPES, Quantizer, Recipe

# groups, rows of each, N, K
SHAPES = (
    (8, 4096, 4096, 7168),
    (4, 8192, 7168, 2048),
    (32, 1024, 4096, 7168),
    (64, 512, 2816, 2048),
    (128, 256, 1536, 4096),
)
PRODUCTS = ("fprop", "dgrad", "wgrad")
ALIGN = 128


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def sizes_of(groups: int, rows: int) -> dict[str, torch.Tensor]:
    """Offsets int32 [groups + 1] for a way of cutting rows into groups."""
    cuts = torch.randint(0, groups * rows // ALIGN + 1, (groups - 1,), device="cuda").sort().values * ALIGN
    ends = torch.tensor([0, groups * rows], device="cuda")
    equal = torch.arange(groups + 1, device="cuda") * rows
    return {"equal": equal.int(), "random": torch.cat([ends[:1], cuts, ends[1:]]).int()}


def tensors(product: str, groups: int, rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both operands of a product: for wgrad two tensors of rows, else rows and a stack of weights."""
    total = groups * rows
    if product == "fprop":
        return normal(total, k), normal(groups, n, k)
    return normal(total, n), normal(groups, n, k) if product == "dgrad" else normal(total, k)


def stack_of(w: torch.Tensor, quantizer: Quantizer, scale: torch.Tensor, rng: torch.Tensor) -> dt.QuantizedStack:
    state = state_of(quantizer, scale, rng)
    return dt.quantize_stack(w, quantizer, **{name: t.expand(len(w), -1).squeeze(-1) for name, t in state.items()})


def plain(product: str, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """torch's product in the tensors' dtype."""
    if product == "wgrad":
        return F.grouped_mm(a.t(), b, offs=ends)
    return F.grouped_mm(a, b.transpose(1, 2) if product == "fprop" else b, offs=ends)


def scaled(product: str, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """torch's FP8 product with a scale for each row of a and each column of b; None for wgrad, which sums rows."""
    if product == "wgrad":
        return None
    b = b if product == "fprop" else b.transpose(1, 2)  # [G, out, reduced]
    sa, sb = (t.abs().amax(-1).float() / 448 for t in (a, b))
    fa, fb = ((t / s[..., None]).to(torch.float8_e4m3fn).contiguous() for t, s in ((a, sa), (b, sb)))
    return lambda: torch.ops.aten._scaled_grouped_mm(
        fa, fb.transpose(1, 2), sa, sb, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def grouped(product: str, recipe: Recipe, a: torch.Tensor, b: torch.Tensor) -> tuple[tuple[Any, ...], Any, Any] | None:
    """Returns a key of the recipe's product, and its operands; None if an operand is not quantized."""
    qa, qb = recipe.operands(product, "grouped_linear")
    if qa is None or qb is None:
        return None
    scale, rng = torch.full((1,), 64.0, device="cuda"), dt.rng_state(0, device="cuda")
    side = {"rowwise": product != "wgrad", "columnwise": product == "wgrad"}
    x = quantized(a, qa.with_usage(**side), scale, rng)
    if product == "wgrad":
        y: Any = quantized(b, qb.with_usage(**side), scale, rng)
    else:
        y = stack_of(b, qb.with_usage(rowwise=product == "fprop", columnwise=product == "dgrad"), scale, rng)
    return (qa.format, qb.format, recipe.fast_accum(product)), x, y


def product_rows(product: str, shape: tuple[int, int, int, int]) -> Iterator[dict[str, Any]]:
    """A product of each recipe whose formats differ from those of earlier recipes."""
    groups, rows, n, k = shape
    flops = 2 * groups * rows * n * k / 1e12
    a, b = tensors(product, *shape)
    for cut, offsets in sizes_of(groups, rows).items():
        ends = offsets[1:]
        theirs = scaled(product, a, b, ends)
        runs: dict[str, Callable[[], object]] = {"bf16": lambda e=ends: plain(product, a, b, e)}
        if theirs:
            runs["torch FP8 by row"] = theirs
        kernels: dict[str, Any] = {}
        seen = set()
        for name, recipe in RECIPES.items():
            made = grouped(product, recipe, a, b)
            if made is None or made[0] in seen:
                continue
            known, x, y = made
            seen.add(known)

            run = functools.partial(
                dt.grouped_gemm, x, y, offsets, trans_a=product == "wgrad", trans_b=product == "fprop",
                out_dtype=torch.bfloat16, align=ALIGN, fast_accum=known[2],
            )  # fmt: skip
            core.reset_calls()
            got = run()
            kernel = next(r for r in core.kernel_table() if r["op"] == "grouped_gemm" and r["calls"])
            want = plain(product, x.dequantize(torch.bfloat16), y.dequantize(torch.bfloat16), ends)
            error = float((got.float() - want.float()).norm() / want.float().norm())
            if not error < 1e-2:
                raise AssertionError(f"{name} {product} {shape} {cut}: {error:.3g} from the bfloat16 product")
            if kernel["level"] == "emulated" and (shape != SHAPES[0] or cut != "equal"):
                continue  # one shape says enough
            runs[name], kernels[name] = run, kernel
        # Emulated products take so long that the chip would cool down, to the others' advantage.
        alone = [name for name, kernel in kernels.items() if kernel["level"] == "emulated"]
        beside = [name for name in runs if name not in alone]
        speeds = dict(zip(beside, device_seconds_of_each([runs[name] for name in beside], repeat=21), strict=True))
        speeds |= {name: device_seconds(runs[name], repeat=5) for name in alone}
        speeds = {name: flops / t for name, t in speeds.items()}
        best = max(speeds["bf16"], speeds.get("torch FP8 by row", 0.0))
        for name, kernel in kernels.items():
            yield {"op": "grouped_gemm", "case": f"{name} {product} {groups}x{rows}x{n}x{k} {cut}",
                   "kernel": kernel["kernel"], "TFLOP/s": speeds[name], "bf16": speeds["bf16"],
                   "torch FP8 by row": speeds.get("torch FP8 by row"),
                   "of torch's best": speeds[name] / best}  # fmt: skip


def layer_rows(shape: tuple[int, int, int, int]) -> Iterator[dict[str, Any]]:
    """GroupedLinear's step against torch's in bfloat16, with rows in expert order. "Weights kept": an earlier
    microbatch of the same step quantized the weights."""
    groups, rows, n, k = shape
    offsets = sizes_of(groups, rows)["random"]
    x, dy = normal(groups * rows, k).requires_grad_(), normal(groups * rows, n)
    layer = dt.GroupedLinear(groups, k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    dt.seed_rng(layer, 0)

    def peer() -> None:
        x.grad = layer.weight.grad = None
        F.grouped_mm(x, layer.weight.transpose(1, 2), offs=offsets[1:]).backward(dy)

    bf16 = device_seconds(peer, repeat=11)
    for name, recipe in RECIPES.items():

        def step(recipe: Recipe = recipe, first: bool | None = None) -> None:
            x.grad = layer.weight.grad = None
            with dt.autocast(recipe=recipe):
                layer(x, offsets=offsets, align=ALIGN, is_first_microbatch=first).backward(dy)

        t = device_seconds(step, repeat=11)
        step(first=True)
        kept = device_seconds(functools.partial(step, first=False), repeat=11)
        yield {"op": "GroupedLinear", "case": f"{name} {groups}x{rows}x{n}x{k}", "ms": t * 1e3,
               "weights kept ms": kept * 1e3, "bf16 ms": bf16 * 1e3, "times as fast": bf16 / t,
               "weights kept": bf16 / kept}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parts = [(functools.partial(product_rows, product), SHAPES) for product in PRODUCTS]
    return run_parts("benchmarks.grouped", __doc__, [*parts, (layer_rows, SHAPES)], argv)


if __name__ == "__main__":
    sys.exit(main())
