"""`prepare` on ranks that differ, and of weights that cannot be gathered quantized, beside others that can."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import Float8CurrentScaling
from torch_frontend.distributed.gather_cases import RECIPES
from torch_frontend.layer_cases import dtype_of
from torch_frontend.ranks import here, needs_gloo
from torch_frontend.tools import normal, same

pytestmark = needs_gloo
CURRENT = Float8CurrentScaling()
D = 256


def mesh_of(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(here(), shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def sharded(net: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in net:  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def blocks(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(layer) for layer in layers])


def on_rank(rank: int, groups: Any) -> dict[str, Any]:
    mesh = mesh_of(2)
    return {"errors": differing(rank, mesh), "tied": tied(mesh)}


# --- ranks that differ ---


def differing(rank: int, mesh: Any) -> dict[str, str]:
    """Returns what each way of preparing raises on this rank; rank 0 does it as usual."""
    names, said = list(RECIPES), {}

    def tried(case: str, net: nn.Module, recipe: Any, **options: Any) -> None:
        try:
            dt.parallel.prepare(sharded(net, mesh), mesh, recipe, **options)
            said[case] = "prepared"
        except Exception as error:
            said[case] = f"{type(error).__name__}: {error}"

    for i, name in enumerate(names):
        tried(name, blocks(dt.Linear(D, D)), RECIPES[names[(i + rank) % len(names)]])
    tried("recompute", blocks(dt.Linear(D, D), dt.Linear(D, D)), CURRENT, recompute=rank == 1)
    own: Any = blocks(dt.Linear(D, D), dt.Linear(D, D))
    own[1][0].recipe = RECIPES["mxfp8"] if rank else None
    tried("own recipe", own, CURRENT)
    tried("module", blocks(dt.LayerNormLinear(D, D) if rank else dt.Linear(D, D)), CURRENT)
    tried("more", blocks(*[dt.Linear(D, D) for _ in range(1 + rank)]), CURRENT)
    tried("shape", blocks(dt.Linear(2 * D if rank else D, D)), CURRENT)
    tried("error", blocks(dt.Linear(D, D)), "fp8" if rank else CURRENT)
    tried("left", blocks(dt.Linear(D, D), dt.Linear(D, 97 if rank else 96)), CURRENT)
    tried("alike", blocks(dt.Linear(D, D)), CURRENT)
    return said


SAID = {
    "recompute": "recompute of 0.0.weight: False (rank 0), True (rank 1)",
    "own recipe": "the recipe of 1.0.weight: Float8CurrentScaling",
    "module": "the module of 0.0.weight: Linear (rank 0), LayerNormLinear (rank 1)",
    "more": "the module of 1.0.weight: nothing (rank 0), Linear (rank 1)",
    "shape": "the shape of 0.0.weight: [256, 256] (rank 0), [256, 512] (rank 1)",
    "left": "the module of 1.0.weight: Linear (rank 0), nothing (rank 1)",
}


@pytest.mark.parametrize("case", [*RECIPES, *SAID])
def test_ranks_that_differ(ranks, case):
    said = f"RankMismatchError: parallel.prepare: ranks differ in {SAID.get(case, 'the recipe of 0.0.weight: ')}"
    for made in ranks:
        assert said in made["errors"][case], made["errors"][case]
        assert "(rank 0)" in made["errors"][case] and "(rank 1)" in made["errors"][case]


def test_an_error_of_one_rank_reaches_the_others(ranks):
    said = "RankMismatchError: parallel.prepare: ranks differ in an error: none (rank 0), ArgumentError"
    assert ranks[0]["errors"]["error"].startswith(said)
    assert ranks[1]["errors"]["error"].startswith("ArgumentError: parallel.prepare: recipe")
    assert all(made["errors"]["alike"] == "prepared" for made in ranks)


def replicas_differ(rank: int, groups: Any) -> str:
    """The last of 2 × 2 ranks differs from the others, which learn of it over both dimensions of the mesh."""
    mesh = mesh_of(2, 2)
    net = sharded(blocks(dt.Linear(D, D)), mesh)
    try:
        dt.parallel.prepare(net, mesh, CURRENT, recompute=rank == 3)
    except Exception as error:
        return str(error)
    return "prepared"


def parts_differ(rank: int, groups: Any) -> str:
    """Likewise of a rank that differs from others along the tensor-parallel group."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("dp", "tp"))
    layer = dt.Linear(D, 2 * D, parallel_mode="column", tp_group=mesh["tp"].get_group(), sequence_parallel=rank == 3)
    net = sharded(blocks(layer), mesh["dp"])
    try:
        dt.parallel.prepare(net, mesh["dp"], CURRENT)
    except Exception as error:
        return str(error)
    return "prepared"


def number(rank: int, groups: Any) -> str:
    net = sharded(blocks(dt.Linear(D, D), dt.Linear(D, D)), mesh_of(4), reshard_after_forward=2)
    try:
        dt.parallel.prepare(net, mesh_of(4), CURRENT)
    except NotImplementedError as error:
        return str(error)
    return "prepared"


FOUR = {
    "replicas_differ": "ranks differ in recompute of 0.0.weight: False (rank 0, 1, 2), True (rank 3)",
    "parts_differ": "ranks differ in sequence_parallel of 0.0.weight: False (rank 0, 1, 2), True (rank 3)",
    "number": "0.0.weight is sharded with reshard_after_forward=2",
}


@pytest.mark.parametrize("function", FOUR)
def test_four_ranks(function, pool, tmp_path):
    for said in pool.run(f"{__name__}:{function}", into=tmp_path / "made", size=4):
        assert FOUR[function] in said, said


# --- weights that stay in high precision ---


class Experts(nn.Module):
    """A stack of an odd number of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = dt.GroupedLinear(3, D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, [64, 32, 32])


class Shared(nn.Module):
    """A head that is tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.body, self.head = nn.Embedding(512, D), dt.Linear(D, D), dt.Linear(D, 512, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.emb(tokens)))


def _trained(net: Any, mesh: Any, x: torch.Tensor, recipe: Any, prepared: bool) -> dict[str, Any]:
    """Returns results of a sharded model's step, the warnings of `prepare`, and the weights that travel quantized."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if prepared:
            dt.parallel.prepare(net, mesh, recipe)
    with dt.autocast(recipe=recipe):
        y = net(x)
    y.float().square().sum().backward()
    weights = {n: type(p._local_tensor).__name__ for n, p in net.named_parameters() if n.endswith("weight")}
    return {
        "made": [y.detach(), *[p.grad.full_tensor() for p in net.parameters()]],
        "said": [f"{w.category.__name__}: {w.message}" for w in seen],
        "quantized": [n for n, kind in weights.items() if kind == "ShardedWeight"],
    }


def tied(mesh: Any) -> list[dict[str, Any]]:
    from torch.distributed.fsdp import fully_shard

    made = []
    for prepared in (False, True):
        net = fully_shard(Shared().to(here()), mesh=mesh)
        made.append(_trained(net, mesh, torch.arange(64, device=here()), CURRENT, prepared))
    return made


def beside_others(rank: int, groups: Any, name: str) -> list[dict[str, Any]]:
    """A factor of few rows, odd rows, and a layer of usual ones."""
    made = []
    for prepared in (False, True):
        torch.manual_seed(0)
        net = blocks(dt.Linear(D, D), dt.Linear(D, 32), dt.Linear(32, D), Experts())
        net = sharded(dt.prepare(net.to(here()), RECIPES[name]), mesh_of(2))
        dt.seed_rng(net, 3)
        x = normal("x", (128, D), dtype_of(RECIPES[name]), here())
        made.append(_trained(net, mesh_of(2), x, RECIPES[name], prepared))
    return made


LONGER_BLOCKS = ("fp8-block", "fp8-block-1d", "mxfp8", "mxfp8-2d")  # than half of 32 rows


@pytest.mark.parametrize("name", RECIPES)
def test_weights_that_ranks_cannot_share(name, pool, tmp_path):
    """The step has the bits of plain FSDP2, except for delayed scales of weights, which `prepare` exchanges for current
    ones."""
    for usual, prepared in pool.run(f"{__name__}:beside_others", name, into=tmp_path / "made"):
        (said,) = prepared["said"]
        assert said.startswith("GatherWarning: parallel.prepare: FSDP2 gathers these weights in high precision: ")
        assert "3.0.layer.weight [3, 256, 256] stacks 3 weights" in said and "0.0.weight" not in said
        left = ["1.0.weight"] if name in LONGER_BLOCKS else []
        assert ("1.0.weight has 32 rows, and 2 ranks with blocks of" in said) == bool(left), said
        gathered = [n for n in ("0.0.weight", "1.0.weight", "2.0.weight") if n not in left]
        assert prepared["quantized"] == gathered and not usual["quantized"]
        for got, want in zip(prepared["made"], usual["made"], strict=True):
            if name != "fp8-delayed":
                same(got, want)
            assert want.any() and got.isfinite().all()


def test_a_weight_that_an_embedding_shares(ranks):
    for made in ranks:
        usual, prepared = made["tied"]
        (said,) = prepared["said"]
        assert "head.weight is the same as emb.weight (Embedding), which reads it in high precision" in said
        assert prepared["quantized"] == ["body.weight"]
        for got, want in zip(prepared["made"], usual["made"], strict=True):
            same(got, want)
