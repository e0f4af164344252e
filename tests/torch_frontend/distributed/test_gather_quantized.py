"""FSDP2 with weights that are gathered quantized: ranks against one process that runs each rank's microbatches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sweeps import kept
from torch import nn

import diptych.torch as dt
from diptych.common import Float8CurrentScaling, NVFP4BlockScaling, NVFP4Quantizer, QuantizerRole
from diptych.common.errors import ArgumentError, ShapeError, UnsupportedError
from torch_frontend.distributed.gather_cases import RECIPES, TRAIN, Case, backward, check, model, sharded
from torch_frontend.ranks import here, needs_gloo
from torch_frontend.tools import normal

pytestmark = [needs_gloo, pytest.mark.sampled]
D = 256
DEVICES = ("cpu", "cuda")
CASES = {
    **{f"{name}, resharded": Case(name) for name in RECIPES},
    **{f"{name}, kept": Case(name, reshard=False) for name in ("fp8-current", "mxfp8", "nvfp4-1d")},
    **{f"{name}, float32 masters": Case(name, mixed=True) for name in ("fp8-current", "mxfp8", "fp8-block")},
    "fp8-current, two microbatches": Case("fp8-current", microbatches=2),
    "mxfp8, two microbatches": Case("mxfp8", microbatches=2),
    "fp8-current, compiled": Case("fp8-current", compiled=True),
    "mxfp8, compiled": Case("mxfp8", compiled=True),
    "fp8-block-1d, compiled": Case("fp8-block-1d", compiled=True),
    "nvfp4-1d, compiled": Case("nvfp4-1d", compiled=True),
    "fp8-delayed, checkpointed": Case("fp8-delayed", how="checkpoint"),
    "mxfp8, checkpointed": Case("mxfp8", how="checkpoint"),
    "mxfp8, gathered by hand": Case("mxfp8", how="unshard"),
    "fp8-current, gathered by hand": Case("fp8-current", how="unshard"),
    "mxfp8, kept after backward": Case("mxfp8", how="keep", microbatches=2),
    "fp8-block, kept after backward": Case("fp8-block", how="keep", microbatches=2),
    "fp8-block, compiled, kept": Case("fp8-block", compiled=True, reshard=False),
    **{f"{name}, held with masters": Case(name, held="master") for name in ("fp8-delayed", "fp8-block", "mxfp8")},
    "fp8-current, held with masters, compiled": Case("fp8-current", held="master", compiled=True),
    **{f"{name}, held": Case(name, held="values") for name in ("fp8-current", "nvfp4")},
}


def on_rank(rank: int, groups: Any) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(here(), (2,))
    made: dict[str, Any] = {"device": here(), "errors": errors(mesh), "bytes": gathered_bytes(mesh)}
    made["calls"], made["tied"] = quantize_calls(mesh), tied(mesh)
    made["made on meta"], made["held on meta"] = made_on_meta(mesh, False), made_on_meta(mesh, True)
    return made


# Each way once, and each kind of recipe: with states, with one scale, with scales of blocks, with random bits.
NOW = ("fp8-delayed, resharded", "fp8-current, two microbatches", "nvfp4-1d, compiled", "mxfp8, checkpointed")
NOW += ("fp8-block, held with masters",)


@pytest.mark.parametrize("name", kept(CASES, NOW))
def test_same_bits_as_one_process(name, on, pool, tmp_path):
    check(CASES[name], pool.run(TRAIN, CASES[name], into=tmp_path / "made", device=on), on)


def made_on_meta(mesh: Any, held: bool) -> dict[str, Any]:
    """Made on the meta device, and filled after `prepare`, or before it where weights are held: `to_empty` replaces the
    local tensors and the parameters."""
    from torch.distributed.fsdp import fully_shard

    from diptych.torch import parallel

    recipe = RECIPES["fp8-current"]
    with dt.quantized_model_init(held, recipe):
        net = nn.Sequential(dt.Linear(D, D, bias=False, device="meta"))
    fully_shard(net, mesh=mesh, reshard_after_forward=True)
    if held:
        net.to_empty(device=here())
    parallel.prepare(net, mesh, recipe)
    if not held:
        net.to_empty(device=here())
    full = normal("meta", (D, D), device=here())
    net[0].weight.data.copy_(torch.distributed.tensor.distribute_tensor(full, mesh))
    with dt.autocast(recipe=recipe):
        y = net(normal("x", (64, D), device=here()))
    net[0].weight.data.mul_(2.0)  # a write that no version counter shows
    with dt.autocast(recipe=recipe):
        doubled = net(normal("x", (64, D), device=here()))
    return {"y": y.detach(), "doubled": doubled.detach(), "type": type(net[0].weight._local_tensor).__name__}


@pytest.mark.parametrize("made_on", ["made on meta", "held on meta"])
def test_made_on_meta_and_written_through_data(ranks, made_on):
    device = ranks[0]["device"]
    layer = dt.Linear(D, D, bias=False, device=device)
    for factor, key in ((1.0, "y"), (2.0, "doubled")):
        layer.weight.data.copy_(normal("meta", (D, D)) * factor)
        with dt.autocast(recipe=RECIPES["fp8-current"]):
            want = layer(normal("x", (64, D), device=device))
        for made in ranks:
            assert torch.equal(made[made_on][key], want.cpu())
            assert made[made_on]["type"] == "ShardedWeight"


# --- weights that are gathered together ---


def quantize_calls(mesh: Any) -> list[int]:
    """Returns how many weights each quantizing call of a step takes, forward and backward, of four in two groups."""
    from torch.distributed.fsdp import fully_shard

    from diptych.torch.distributed import quantized_parts

    recipe = RECIPES["mxfp8"]
    blocks = [
        nn.Sequential(dt.Linear(64, 64), dt.Linear(64, 128)),
        nn.Sequential(dt.Linear(128, 64), dt.Linear(64, 64)),
    ]
    net = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    dt.parallel.prepare(net, mesh, recipe)
    counts, quantize_many = [], quantized_parts.quantize_ops.quantize_many

    def counting(xs: list[torch.Tensor], *args: Any) -> Any:
        counts.append(len(xs))
        return quantize_many(xs, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_parts.quantize_ops, "quantize_many", counting)
        with dt.autocast(recipe=recipe):
            y = net(normal("x", (64, 64), "float32", here()).requires_grad_())
        y.sum().backward()
    return counts


def tied(mesh: Any) -> list[torch.Tensor]:
    """Returns the results and the gradient's part of two layers that have one weight, which FSDP2 gathers once."""
    from torch.distributed.fsdp import fully_shard

    net = tied_layers(here())
    fully_shard(net, mesh=mesh)
    dt.parallel.prepare(net, mesh, RECIPES["fp8-current"])
    with dt.autocast(recipe=RECIPES["fp8-current"]):
        y = net(normal("x", (64, D), "float32", here()))
    y.sum().backward()
    return [y.detach(), net[1].weight.grad.full_tensor()]


def tied_layers(device: str) -> Any:
    net: Any = nn.Sequential(*[dt.Linear(D, D, bias=False, device=device) for _ in range(2)])
    net[1].weight = net[0].weight
    with torch.no_grad():
        net[0].weight.copy_(normal("tied", (D, D), device=device))
    return net


def test_a_group_is_quantized_in_one_call(ranks):
    for made in ranks:
        assert made["calls"] == [2, 2, 2, 2]


def test_modules_that_share_a_weight(ranks):
    net = tied_layers(ranks[0]["device"])
    with dt.autocast(recipe=RECIPES["fp8-current"]):
        y = net(normal("x", (64, D), "float32", ranks[0]["device"]))
    y.sum().backward()
    for made in ranks:
        assert torch.equal(made["tied"][0], y.cpu()) and torch.equal(made["tied"][1], net[0].weight.grad.cpu())


# --- bytes ---

# Of an element, by recipe: in the gather for forward and in that for backward.
BYTES = {
    "fp8-current": (1, 1),
    "fp8-block": (1 + 4 / 128**2, 1 + 4 / 128**2),
    "fp8-block-1d": (1 + 4 / 128, 1 + 4 / 128),
    "mxfp8": (1 + 1 / 32, 1 + 1 / 32),
    "mxfp8-2d": (1 + 1 / 32, 1 + 1 / 32),
    "nvfp4": (1 / 2 + 1 / 16, 1 / 2 + 1 / 16),
    "nvfp4-1d": (1 / 2 + 1 / 16, 1 / 2 + 1 / 16),
    "mxfp8, kept": (2 + 2 / 32,),
    "mxfp8, checkpointed": (1 + 1 / 32, 2 + 2 / 32),
}


def gathered_bytes(mesh: Any) -> dict[str, tuple[float, ...]]:
    """Returns what one step receives for each element of a weight, in each gather."""
    from torch.distributed.fsdp import fully_shard

    made = {}
    for case in BYTES:
        name, _, how = case.partition(", ")
        net = nn.Sequential(dt.Linear(D, D, bias=False, dtype=torch.bfloat16))
        fully_shard(net, mesh=mesh, reshard_after_forward=how != "kept")
        dt.parallel.prepare(net, mesh, RECIPES[name], recompute=how == "checkpointed")
        of_param = net[0].weight._local_tensor.gather.param
        sizes = []
        unshard = of_param.init_unsharded_param

        def counted(of_param: Any = of_param, sizes: list[float] = sizes, unshard: Any = unshard) -> None:
            sizes.append(sum(t.numel() for t in of_param.all_gather_outputs) / D**2)
            unshard()

        of_param.init_unsharded_param = counted
        with dt.autocast(recipe=RECIPES[name]):
            y = net(normal("x", (64, D), "bfloat16", here()).requires_grad_())
        y.sum().backward()
        made[case] = tuple(sizes)
    return made


@pytest.mark.parametrize("case", BYTES)
def test_bytes_gathered(ranks, case):
    for made in ranks:
        assert made["bytes"][case] == BYTES[case]


# --- bad input ---


def errors(mesh: Any) -> dict[str, str]:
    """Returns the error messages of `prepare` for models whose weights it cannot gather, by case."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from diptych.torch import parallel

    said = {}

    def tried(name: str, net: nn.Module, recipe: Any, shard: bool = True, to: Any = mesh) -> None:
        try:
            if shard:
                fully_shard(net, mesh=mesh)
            parallel.prepare(net, to, recipe)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    current = Float8CurrentScaling()
    tried("not sharded", nn.Sequential(dt.Linear(64, 64)), current, shard=False)
    tried("rows", nn.Sequential(dt.Linear(64, 96)), RECIPES["fp8-block"])
    tried("odd", nn.Sequential(dt.Linear(64, 63)), current)
    tried("stack", nn.Sequential(dt.GroupedLinear(3, 64, 64)), current)
    tried("mesh", nn.Sequential(dt.Linear(64, 64)), current, to=None)
    another = init_device_mesh(mesh.device_type, (mesh.size(), 1))
    tried("another mesh", nn.Sequential(dt.Linear(64, 64)), current, to=another)
    tried("recipe", nn.Sequential(dt.Linear(64, 64)), "fp8")
    twice = nn.Sequential(dt.Linear(64, 64))
    fully_shard(twice, mesh=mesh)
    parallel.prepare(twice, mesh, current)
    tried("twice", twice, current, shard=False)
    with dt.quantized_model_init(recipe=current):
        held = nn.Sequential(dt.Linear(64, 64, dtype=torch.bfloat16))
    held[0].weight.main_param = torch.zeros(64, 64)
    tried("rounded master", held, current)
    two = nn.Sequential(dt.Linear(64, 64), dt.Linear(64, 64))
    two[1].weight, two[1].recipe = two[0].weight, RECIPES["mxfp8"]
    tried("two ways", two, current)
    tried("rht", nn.Sequential(dt.Linear(64, 64)), TransformedWeights())
    for name, compiled in (("recomputed", False), ("recomputed, compiled", True)):
        case = Case("mxfp8", how="checkpoint", compiled=compiled)
        net = sharded(model(case, here()), RECIPES["mxfp8"], mesh, replace(case, how=""))
        try:
            backward(net, case, RECIPES["mxfp8"], 0, 0, 0)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


class TransformedWeights(NVFP4BlockScaling):
    def quantizer(self, role: QuantizerRole) -> Any:
        return NVFP4Quantizer(with_rht=True) if role.tensor == "weight" else super().quantizer(role)


SAID = {
    "not sharded": (ArgumentError, "call torch.distributed.fsdp.fully_shard"),
    "rows": (
        ShapeError,
        "0.weight has 96 rows, and 2 ranks with blocks of 128 rows (fp8_e4m3_128x128) need a multiple of 256",
    ),
    "odd": (ShapeError, "0.weight has 63 rows"),
    "stack": (ShapeError, "0.weight [3, 64, 64] stacks 3 weights, which 2 ranks cannot share evenly"),
    "mesh": (ArgumentError, "mesh must be a DeviceMesh, got NoneType"),
    "another mesh": (UnsupportedError, "it must be cut along dimension 0 over DeviceMesh("),
    "recipe": (ArgumentError, "recipe"),
    "twice": (ArgumentError, "0.weight is prepared already"),
    "rounded master": (UnsupportedError, "stands for torch.bfloat16 and has a float32 master"),
    "recomputed": (UnsupportedError, "call parallel.prepare with recompute=True"),
    "recomputed, compiled": (ValueError, "has no memory"),
    "two ways": (ValueError, "0.weight and 1.weight are one weight, which the recipe quantizes in two ways"),
    "rht": (UnsupportedError, "amaxes of rows or of a transform"),
}


@pytest.mark.parametrize("case", SAID)
def test_bad_input(ranks, case):
    kind, text = SAID[case]
    for made in ranks:
        assert made["errors"][case].startswith(kind.__name__) and text in made["errors"][case], made["errors"][case]
