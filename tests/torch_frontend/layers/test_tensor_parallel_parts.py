"""Cut layers of which a part is trained, with other recipes, or with more results: one process's bits where nothing is
summed over ranks, and its values elsewhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    CustomRecipe,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    QuantizerRole,
    Recipe,
)
from torch_frontend.cut_layers import RECIPES, Fused, Plain, collectives, dtypes_of
from torch_frontend.layer_cases import slow
from torch_frontend.ranks import needs_gloo
from torch_frontend.tools import same

pytestmark = needs_gloo


def by_product(role: QuantizerRole) -> Any:
    """A format for each product, so that each tensor is quantized twice."""
    if role.gemm == "fprop":
        return MXFP8Quantizer()
    if role.gemm == "dgrad":
        return Float8Quantizer(fp8_dtype="float8_e5m2", amax_history_len=2)
    return Float8BlockQuantizer(block_scaling_dim=2)


def partly(role: QuantizerRole) -> Any:
    """wgrad in high precision, and dgrad with one operand quantized."""
    if role.gemm == "wgrad" or (role.gemm == "dgrad" and role.tensor == "grad_output"):
        return None
    return Float8Quantizer(amax_history_len=2)


def mixed(role: QuantizerRole) -> Any:
    return {
        "input": Float8CurrentScalingQuantizer(),
        "weight": Float8BlockQuantizer(block_scaling_dim=2),
        "grad_output": MXFP8Quantizer(fp8_dtype="float8_e5m2"),
    }[role.tensor]


def results(role: QuantizerRole) -> Any:
    """Results are rounded too, by amaxes of whole tensors."""
    return MXFP8Quantizer() if role.tensor in role.OPERANDS else Float8CurrentScalingQuantizer()


OTHERS: dict[str, Recipe] = {
    "by product": CustomRecipe(by_product),
    "partly": CustomRecipe(partly),
    "mixed": CustomRecipe(mixed),
    "results": CustomRecipe(results, quantize_results=True),
    **{
        f"{name} {how}": RECIPES[name].replace(backward_override=how)
        for name, how in itertools.product(("current", "block"), ("high_precision", "dequantized"))
    },
}
KINDS = ("column", "row", "linear", "mlp swiglu")
ALL = ("x", "weight", "bias")


def case_of(kind: str, recipe: str, sequence: bool, **options: Any) -> Fused:
    of = recipe if recipe in RECIPES else "block"
    return (Plain if kind in ("column", "row") else Fused)(kind, of, sequence, dtypes_of(of)[-1], options=options)


def run(rank: int | None, groups: Any, case: Fused, recipe: str, trained: tuple[str, ...]) -> dict[str, Any]:
    """The second of two steps, of a whole module or a rank's part."""
    module = case.make() if rank is None else case.cut(groups["data"])
    for p in module.parameters():
        p.requires_grad_(("weight" if p.dim() == 2 else "bias") in trained)
    for i in range(2):
        case.fill(module, i, rank)
        module.zero_grad()
        x, dy = case.data(i)
        if rank is not None:
            x, dy = (case.part(n, t, rank).contiguous() for n, t in (("x", x), ("dy", dy)))
        x.requires_grad_("x" in trained)
        with collectives() as seen:
            with dt.autocast(recipe=RECIPES.get(recipe) or OTHERS[recipe]):
                y = module(x)
            parts = y if isinstance(y, tuple) else (y,)
            first = parts[0].dequantize() if isinstance(parts[0], dt.QuantizedTensor) else parts[0]
            first.backward(dy)
    made = {"y": first.detach(), "dx": x.grad} | {n: p.grad for n, p in module.named_parameters()}
    if len(parts) == 3:
        made |= {"the bias": parts[1].detach(), "z": parts[2].detach()}
    return {k: v for k, v in made.items() if v is not None} | {"gathers": sum(n == "allgather_base" for n, *_ in seen)}


def is_summed(case: Fused, name: str) -> bool:
    if name in ("bias", "fc2_bias"):
        return case.sequence and (case.module == "row" or name == "fc2_bias")
    if name == "y":
        return case.module == "row" or "mlp" in case.module
    return name.startswith("layer_norm") or (name == "dx" and case.module != "row")


def require_one_process(case: Fused, recipe: str, trained: tuple[str, ...], pool: Any, into: Any) -> list[Any]:
    whole = run(None, None, case, recipe, trained)
    ranks = pool.run(f"{__name__}:run", case, recipe, trained, into=into / "made")
    whole.pop("gathers")
    for rank, made in enumerate(ranks):
        assert made.keys() - {"gathers"} == whole.keys()
        for name, t in whole.items():
            want = case.part({"z": "x", "the bias": "bias"}.get(name, name), t, rank)
            if is_summed(case, name):
                off = (made[name].float() - want.float()).norm() / want.float().norm()
                assert off < (0.1 if recipe == "results" else 0.03), (name, off)
            else:
                same(made[name], want, f"{case} {recipe}, rank {rank}: {name}")
    return ranks


def _in_turn(*lists: Any) -> list[Any]:
    """Every combination with and without sequence parallelism; one in two of the former always runs."""
    cells = []
    for numbered in itertools.product(*(enumerate(each) for each in lists)):
        cell, now = [v for _, v in numbered], sum(i for i, _ in numbered) % 2 == 0
        cells += [(*cell, True) if now else slow(*cell, True), slow(*cell, False)]
    return cells


@pytest.mark.parametrize(("kind", "recipe", "sequence"), _in_turn(KINDS, OTHERS))
def test_other_recipes(kind, recipe, sequence, pool, tmp_path):
    require_one_process(case_of(kind, recipe, sequence), recipe, ALL, pool, tmp_path)


@pytest.mark.parametrize(
    ("kind", "trained", "recipe", "sequence"), _in_turn(KINDS, ALL, ["delayed", "mxfp8", "nvfp4", "block"])
)
def test_a_part_is_trained(kind, recipe, trained, sequence, pool, tmp_path):
    """Only tokens that a product reads are gathered."""
    made = require_one_process(case_of(kind, recipe, sequence), recipe, (trained,), pool, tmp_path)
    if sequence and kind in ("column", "row"):
        scales = 1 if recipe == "delayed" else 2
        forward = scales * (kind == "column")
        gathers = {"x": scales * (kind == "row"), "weight": scales, "bias": kind == "row"}
        assert [m["gathers"] for m in made] == [forward + gathers[trained]] * 2


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_the_norms_output_and_the_bias(recipe, sequence, pool, tmp_path):
    """A rank returns the norm of its own tokens, in high precision, and its part of the bias."""
    case = case_of("linear", recipe, sequence, return_bias=True, return_layernorm_output=True)
    require_one_process(case, recipe, ALL, pool, tmp_path)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["column", "row", "mlp gelu"])
def test_no_tokens(kind, sequence, pool, tmp_path):
    for made in pool.run(f"{__name__}:empty", case_of(kind, "mxfp8", sequence), into=tmp_path / "made"):
        assert made == (0, 0, 0)


def empty(rank: int, groups: Any, case: Fused) -> tuple[int, ...]:
    module = case.cut(groups["data"])
    x = case.part("x", case.data(0)[0], rank)[:0].contiguous().requires_grad_()
    with dt.autocast(recipe=RECIPES[case.recipe]):
        y = module(x)
    y.sum().backward()
    return y.shape[0], x.grad.shape[0], int(torch.stack([p.grad.abs().max() for p in module.parameters()]).max())
