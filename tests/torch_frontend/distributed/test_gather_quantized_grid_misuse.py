"""`prepare` of modules that are cut over a tensor-parallel group: what it refuses, on each rank and before anything is
sent; what a forward reduces; and layers outside of regions."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import CustomRecipe, Float8CurrentScalingQuantizer, MXFP8Quantizer, QuantizerRole
from torch_frontend.cut_layers import RECIPES, collectives, error_of
from torch_frontend.distributed.grid_cases import meshes
from torch_frontend.ranks import here, needs_gloo
from torch_frontend.tools import normal

pytestmark = needs_gloo
WORLD_SIZES = (4,)
K = 256
COLUMN: dict[str, Any] = {"parallel_mode": "column"}
ROW: dict[str, Any] = {"parallel_mode": "row"}


class Refused(NamedTuple):
    make: Any  # of the tensor-parallel arguments
    recipe: str
    error: str
    says: str
    shape: tuple[int, int] = (2, 2)


REFUSED = {
    "rows of a part": Refused(
        lambda ways: dt.Linear(64, 192, **COLUMN, **ways), "mxfp8", "ShapeError",
        "weight has 96 rows, and 2 ranks with blocks of 32 rows (mxfp8_e4m3) need a multiple of 64",
    ),
    "columns of a part": Refused(
        lambda ways: dt.Linear(96, 64, **ROW, **ways), "mxfp8", "ShapeError",
        "weight has 48 columns on each rank, and mxfp8_e4m3 needs a multiple of 32",
    ),
    "128 columns": Refused(
        lambda ways: dt.Linear(384, 256, **ROW, **ways), "block", "ShapeError",
        "weight has 192 columns on each rank, and fp8_e4m3_128x128 needs a multiple of 128",
    ),
    "gate and value": Refused(
        lambda ways: dt.LayerNormMLP(128, 256, activation="swiglu", set_parallel_mode=True, **ways), "block",
        "ShapeError", "fc1_weight has 64 rows on each rank, and fp8_e4m3_128x128 needs a multiple of 128", (1, 4),
    ),
    "no group": Refused(
        lambda ways: dt.Linear(64, 64, **COLUMN, tp_size=2, device="meta"), "current", "ArgumentError",
        "there is no group",
    ),
    "one group for both": Refused(
        lambda ways: dt.Linear(64, 64, **COLUMN, tp_group=ways["other"]), "current", "ArgumentError",
        "which share the ranks",
    ),
}  # fmt: skip


def on_rank(rank: int, groups: Any) -> dict[str, Any]:
    mesh = meshes(2, 2)
    said = {name: refused(case, meshes(*case.shape)) for name, case in REFUSED.items()}
    return {"said": said, "reduced": reduced(mesh), "outside": outside(mesh), "put": put(mesh)}


def refused(case: Refused, mesh: Any) -> tuple[str, str, list[Any]]:
    from torch.distributed.fsdp import fully_shard

    group = "other" if case.says.startswith("which share") else "tp_group"
    layer = case.make({group: mesh["dp" if group == "other" else "tp"].get_group()})
    fully_shard(layer, mesh=mesh["dp"])
    return error_of(lambda: dt.parallel.prepare(layer, mesh["dp"], RECIPES[case.recipe]))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_sent(ranks, name):
    for made in ranks:
        classes, text, seen = made["said"][name]
        assert REFUSED[name].error in classes.split() and REFUSED[name].says in text and not seen, (classes, text, seen)


# --- amaxes ---


def scaled_weights(role: QuantizerRole) -> Any:
    """Weights alone have amaxes that are reduced."""
    return Float8CurrentScalingQuantizer() if role.tensor == "weight" else MXFP8Quantizer()


def model(mesh: Any, ways: dict[str, Any]) -> nn.Sequential:
    """Two layers that are cut, and one between them whose weight the ranks of the tensor-parallel group do not
    share."""
    layers = dt.Linear(K, K, **COLUMN, **ways), dt.Linear(K // 2, K // 2), dt.Linear(K, K, **ROW, **ways)
    net = nn.Sequential(*layers).to(here())
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(normal(f"whole {i} {mesh.get_local_rank('tp')}", tuple(p.shape)) * (1 + mesh.get_local_rank("tp")))
    return net


def reduced(mesh: Any) -> dict[str, Any]:
    """The reductions of a step, and the amax of each layer's gathered weight with what it should be."""
    from torch.distributed.fsdp import fully_shard

    group = mesh["tp"].get_group()
    net = model(mesh, {"tp_group": group})
    amaxes = [p.detach().abs().max() for p in net.parameters() if p.dim() == 2]
    for i in (0, 2):
        torch.distributed.all_reduce(amaxes[i], torch.distributed.ReduceOp.MAX, group)
    for layer in net:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    recipe = CustomRecipe(scaled_weights)
    dt.parallel.prepare(net, mesh["dp"], recipe)
    with collectives() as seen, dt.autocast(recipe=recipe):
        y = net(normal("x", (32, K), device=here()).requires_grad_())
    with collectives() as of_backward:
        y.square().mean().backward()
    for layer in net:
        layer.unshard()  # type: ignore[operator]
    counts = [sum(name == "all_reduce" for name, *_ in region) for region in (seen, of_backward)]
    return {"counts": counts, "amaxes": [layer.weight.amax for layer in net], "want": amaxes}


def test_one_reduction_for_each_group_finds_the_whole_weights_amaxes(ranks):
    for made in ranks:
        assert made["reduced"]["counts"] == [2, 0]
        assert [a.item() for a in made["reduced"]["amaxes"]] == [a.item() for a in made["reduced"]["want"]]


# --- outside of regions ---


def outside(mesh: Any) -> dict[str, Any]:
    """Results of a sharded layer outside of regions, and of one that holds the rounded values of the whole weight."""
    from torch.distributed.fsdp import fully_shard

    ways = {"tp_group": mesh["tp"].get_group(), **ROW, "bias": False}
    whole, x = normal("outside", (K, K)), normal("x", (32, K)).chunk(2, 1)[mesh.get_local_rank("tp")].to(here())
    quantizer: Any = RECIPES["current"].quantizer(QuantizerRole(tensor="weight"))
    made = {}
    for name, t in (("made", whole), ("want", dt.quantize(whole, quantizer).dequantize())):
        layer: Any = dt.Linear(K, K, **ways).to(here())
        with torch.no_grad():
            layer.weight.copy_(t.chunk(2, 1)[mesh.get_local_rank("tp")])
        if name == "made":
            fully_shard(layer, mesh=mesh["dp"])
            dt.parallel.prepare(layer, mesh["dp"], RECIPES["current"])
        of = x.clone().requires_grad_()
        y = layer(of)
        y.square().mean().backward()
        made[name] = y.detach(), of.grad
    return made


def test_outside_of_regions_layers_read_dequantized_values(ranks):
    for made in ranks:
        for got, want in zip(*made["outside"].values(), strict=True):
            assert torch.equal(got, want)


# --- weights that a user quantizes ---


def put(mesh: Any) -> tuple[str, str, list[Any]]:
    """A part that a user quantizes has the part's amax."""
    layer: Any = dt.Linear(64, 64, bias=False, **COLUMN, tp_group=mesh["tp"].get_group())
    quantizer: Any = RECIPES["current"].quantizer(QuantizerRole(tensor="weight"))
    layer.weight = nn.Parameter(dt.quantize(layer.weight.detach(), quantizer))
    return error_of(lambda: layer(normal("x", (32, 64))), RECIPES["current"])


def test_a_part_that_a_user_quantizes_is_refused(ranks):
    for made in ranks:
        classes, text, seen = made["put"]
        assert "UnsupportedError" in classes.split() and "held quantized cannot be cut" in text and not seen
