"""`ParallelStyle`s: modules that they cut compute what modules made with a tensor-parallel group do, in bits."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import diptych.torch as dt
from torch_frontend.cut_layers import RECIPES, Fused, Plain, collectives, dtypes_of, error_of
from torch_frontend.layer_cases import slow
from torch_frontend.ranks import here, needs_gloo
from torch_frontend.tools import same

pytestmark = [needs_gloo, pytest.mark.sampled]
KINDS = ("column", "row", "linear", "linear rms", "mlp gelu", "mlp swiglu")
DIMS = {None: False, 0: True, 1: True}  # of tokens that are cut, and whether that is sequence parallelism


def case_of(kind: str, recipe: str, sequence: bool, **more: Any) -> Fused:
    made = (Plain if kind in ("column", "row") else Fused)(kind, recipe, sequence, dtypes_of(recipe)[-1])
    return dataclasses.replace(made, **more)


def mesh_of(groups: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(groups["data"], here())


def style_of(case: Fused, dim: int | None, **options: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    layout = Replicate() if dim is None else Shard(dim)
    if "mlp" in case.module:
        return dt.parallel.PairwiseParallel(layouts=layout, **options)
    if case.module == "row":
        return dt.parallel.RowwiseParallel(output_layouts=layout, **options)
    return dt.parallel.ColwiseParallel(input_layouts=layout, **options)


def styled(case: Fused, groups: Any, dim: int | None, module: Any = None, **options: Any) -> Any:
    from torch.distributed.tensor.parallel import parallelize_module

    if module is None:
        module = case.make(device=here())
        case.fill(module, 0)
    return parallelize_module(module, mesh_of(groups), style_of(case, dim, **options))


class Locals:
    """Gives a case's `fill` and `run` the local parts of DTensors, and tokens along dimension 0."""

    def __init__(self, module: Any, fn: Any = None, swaps: bool = False) -> None:
        self.module, self.swaps = module, swaps
        self.fn = module if fn is None else fn

    def named_parameters(self) -> Any:
        for name, p in self.module.named_parameters():
            part = p.detach().to_local()
            part.grad = None if p.grad is None else p.grad.to_local()
            yield name, part

    def zero_grad(self, set_to_none: bool) -> None:
        self.module.zero_grad(set_to_none=set_to_none)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x.transpose(0, 1)).transpose(0, 1) if self.swaps else self.fn(x)


def as_arguments(rank: int, groups: Any, case: Fused, dim: int | None, how: str) -> int:
    """Steps of a module that a style cut against those of one that was made with the group. Returns the number of
    graphs."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain, module = case.cut(groups["data"]), styled(case, groups, dim)
    # Dynamo compiles the hooks of an outermost module apart; those of a block's modules are in the block's graph.
    fn = torch.compile(nn.Sequential(module), fullgraph=True, backend=how) if how else module
    each = Locals(module, fn, dim == 1)
    graphs = []
    for i in range(case.steps):
        want, got = case.run(plain, i, rank), case.run(each, i, rank)
        assert got.keys() == want.keys()
        for name in want:
            same(got[name], want[name], f"{case}, step {i}: {name}")
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs[1:])) == 1, graphs
    return graphs[-1]


def _cells() -> list[Any]:
    """Each kind with each layout, and recipes in turn; a long sweep runs the others."""
    cells = []
    for i, (kind, dim) in enumerate(itertools.product(KINDS, DIMS)):
        for j, recipe in enumerate(("delayed", "current", "block", "mxfp8", "nvfp4")):
            runs = (i + 2 * (i // 5)) % 5 == j
            cells.append((kind, recipe, dim) if runs else slow(kind, recipe, dim))
    return cells


@pytest.mark.parametrize(("kind", "recipe", "dim"), _cells())
def test_the_bits_of_modules_made_with_a_group(kind, recipe, dim, pool, tmp_path):
    case = case_of(kind, recipe, DIMS[dim], steps=3)
    pool.run(f"{__name__}:as_arguments", case, dim, "", into=tmp_path / "made")


@pytest.mark.parametrize(
    ("kind", "recipe", "dim"),
    [
        slow("column", "mxfp8", 1),
        ("row", "current", 0),
        slow("linear", "delayed", 0),
        slow("linear rms", "mxfp8", None),
        slow("mlp gelu", "current", None),
        ("mlp swiglu", "delayed", 1),
    ],
)
def test_compiled(kind, recipe, dim, pool, tmp_path):
    """One graph for each module, with eager's bits."""
    case = case_of(kind, recipe, DIMS[dim], steps=3)
    assert pool.run(f"{__name__}:as_arguments", case, dim, "aot_eager", into=tmp_path / "made") == [1, 1]


# --- parameters ---


def parameters(rank: int, groups: Any, kind: str) -> dict[str, torch.Tensor]:
    """The whole parameters of a styled module after drawing, filling and loading; all ranks have the first one's."""
    case, made = case_of(kind, "current", True), {}
    torch.manual_seed(3 + rank)
    module = styled(case, groups, 0, case.make(device=here()))
    made["other ranks"] = {n: p.full_tensor() for n, p in module.named_parameters()}
    with collectives() as seen:
        late = styled(case, groups, 0, case.make(device="meta"))
    assert not seen and all(p.is_meta for p in late.parameters())
    late.to_empty(device=here())
    torch.manual_seed(3)
    late.reset_parameters()
    made["late"] = {n: p.full_tensor() for n, p in late.named_parameters()}
    again = copy.deepcopy(module)
    again.reset_parameters()
    again.load_state_dict(module.state_dict())
    made["loaded"] = {n: p.full_tensor() for n, p in again.named_parameters()}
    assert again.tp_group is groups["data"] and repr(again) == repr(case.cut(groups["data"]))
    x = case.part("x", case.data(0)[0], rank).contiguous().to(here())
    with dt.autocast(recipe=RECIPES[case.recipe]):
        same(again(x), module(x), "a copy")
    return {f"{way} {n}": t.detach() for way, held in made.items() for n, t in held.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_parts_of_whole_ones(kind, pool, tmp_path):
    torch.manual_seed(3)
    whole = dict(case_of(kind, "current", True).make().named_parameters())
    for made in pool.run(f"{__name__}:parameters", kind, into=tmp_path / "made"):
        for key, t in made.items():
            same(t, whole[key.rpartition(" ")[2]].detach(), key)


# --- a model and its optimizer ---


def model(width: int = 64, **cut: Any) -> nn.Sequential:
    """A pair of layers of each kind."""
    column, row, both = {}, {}, {}
    if cut:
        column, row, both = {"parallel_mode": "column"}, {"parallel_mode": "row"}, {"set_parallel_mode": True}
    return nn.Sequential(
        dt.LayerNormLinear(width, 2 * width, **column, **cut),
        dt.Linear(2 * width, width, **row, **cut),
        dt.LayerNormMLP(width, 2 * width, activation="swiglu", normalization="RMSNorm", **both, **cut),
    )


def plan(dim: int | None, **options: Any) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard

    outside = Replicate() if dim is None else Shard(dim)
    return {
        "0": dt.parallel.ColwiseParallel(input_layouts=outside, **options),
        "1": dt.parallel.RowwiseParallel(output_layouts=outside, **options),
        "2": dt.parallel.PairwiseParallel(layouts=outside, **options),
    }


def trained(rank: int, model: Any, recipe: str, width: int = 64, steps: int = 3) -> list[torch.Tensor]:
    """Steps of AdamW on this rank's tokens. Returns results and gradients."""
    optimizer, made = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True), []
    for i in range(steps):
        x = torch.randn(128, 2, width, generator=torch.Generator().manual_seed(i)).chunk(2)[rank].to(here())
        with dt.autocast(recipe=RECIPES[recipe]):
            y = model(x)
        y.square().mean().backward()
        made += [y.detach(), *[getattr(p.grad, "_local_tensor", p.grad).clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return [*made, *[getattr(p, "_local_tensor", p).detach() for p in model.parameters()]]


def total(t: torch.Tensor, group: Any) -> torch.Tensor:
    torch.distributed.all_reduce(t, group=group)
    return t


def optimized(rank: int, groups: Any, recipe: str) -> bool:
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(0)
    arguments = model(tp_group=groups["data"], sequence_parallel=True, device=here())
    torch.manual_seed(0)
    styles: Any = parallelize_module(model(device=here()), mesh_of(groups), plan(0))
    want, got = trained(rank, arguments, recipe), trained(rank, styles, recipe)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        same(a, b, f"{recipe}: {i}")
    styles(torch.ones(64, 2, 64, device=here())).square().mean().backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(styles.parameters(), 1e9)
    squares = torch.zeros(1, device=here())
    for p in styles.parameters():
        of_part = p.grad._local_tensor.square().sum()
        squares += of_part if p.placements[0].is_replicate() else total(of_part, groups["data"])
    torch.testing.assert_close(norm.full_tensor(), squares.sqrt()[0])
    return True


@pytest.mark.parametrize(
    "recipe", [r if r == "delayed" else slow(r) for r in ("delayed", "current", "mxfp8", "nvfp4 1d")]
)
def test_a_model_trains_as_one_made_with_a_group(recipe, on, pool, tmp_path):
    """Results, gradients and weights after steps of AdamW; the norm of all gradients is that of the whole ones."""
    assert pool.run(f"{__name__}:optimized", recipe, into=tmp_path / "made", device=on) == [True, True]


# --- activations ---


def boundaries(rank: int, groups: Any) -> bool:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, recipe = mesh_of(groups), RECIPES["current"]
    torch.manual_seed(0)
    local = parallelize_module(model(device=here()), mesh, plan(0))
    torch.manual_seed(0)
    placed = parallelize_module(model(device=here()), mesh, plan(0, use_local_output=False))
    torch.manual_seed(1)
    x = torch.randn(128, 2, 64, device=here())
    part = x.chunk(2)[rank].clone().requires_grad_()
    whole = DTensor.from_local(x.chunk(2)[rank].clone(), mesh, [Shard(0)]).requires_grad_()
    with dt.autocast(recipe=recipe):
        y, z = local(part), placed(whole)
    assert isinstance(z, DTensor) and z.placements == (Shard(0),) and z.shape == x.shape
    same(z.to_local(), y, "result")
    y.square().sum().backward()
    z.to_local().square().sum().backward()
    assert isinstance(whole.grad, DTensor) and whole.grad.placements == (Shard(0),)
    same(whole.grad.to_local(), part.grad, "gradient")
    for given, says in (
        (DTensor.from_local(x, mesh, [Replicate()]), "is placed (Replicate(),)"),
        (DTensor.from_local(x[:, :1], mesh, [Shard(1)]), "is placed (Shard(dim=1),)"),
    ):
        classes, text, seen = error_of(lambda: local(given), recipe)  # noqa: B023
        assert "TypeError" in classes and says in text and not seen, (classes, text, seen)
    named = parallelize_module(dt.Linear(64, 64, return_bias=True, device=here()), mesh, plan(1)["0"])
    with dt.autocast(recipe=recipe):
        y, bias = named(inp=x.chunk(2, 1)[rank])
        same(named(None, inp=x.chunk(2, 1)[rank])[0], y, "an input by its other name")
    assert (named.weight.tensor_model_parallel, named.weight.partition_dim) == (True, 0)
    assert y.shape == (128, 2, 32) and not isinstance(bias, DTensor) and bias.shape == (32,)
    return True


def alone(rank: int, groups: Any) -> bool:
    """A dimension of one rank: parameters and boundaries are as with more, and nothing is cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh(here(), (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    torch.manual_seed(0)
    plain = model(device=here())
    styles: Any = parallelize_module(copy.deepcopy(plain), mesh, plan(0, use_local_output=False))
    x = torch.randn(128, 2, 64, device=here())
    with dt.autocast(recipe=RECIPES["current"]):
        want, got = plain(x), styles(DTensor.from_local(x, mesh, [Shard(0)]))
    assert isinstance(got, DTensor)
    same(got.to_local(), want, "result")
    want.square().sum().backward()
    got.to_local().square().sum().backward()
    for p, q in zip(plain.parameters(), styles.parameters(), strict=True):
        same(q.grad.to_local(), p.grad, "gradient")
    styles[2].reset_parameters()
    return True


def test_one_rank(pool, tmp_path):
    assert pool.run(f"{__name__}:alone", into=tmp_path / "made") == [True, True]


def test_tensors_and_dtensors_at_the_boundary(on, pool, tmp_path):
    assert pool.run(f"{__name__}:boundaries", into=tmp_path / "made", device=on) == [True, True]


def norms(rank: int, groups: Any) -> dict[str, torch.Tensor]:
    """A norm of torch's on this rank's tokens, in front of a layer that gathers them."""
    from torch.distributed.tensor.parallel import parallelize_module

    made = {}
    for name, make in (("layer", nn.LayerNorm), ("rms", nn.RMSNorm)):
        torch.manual_seed(rank)
        block: Any = nn.Sequential(make(64, device=here()), dt.Linear(64, 64, device=here()))
        with torch.no_grad():
            block[0].weight.uniform_(1, 2)
        sequence = dt.parallel.SequenceParallel(sequence_dim=0)
        parallelize_module(block, mesh_of(groups), {"0": sequence, "1": plan(0)["0"]})
        torch.manual_seed(7)
        x = torch.randn(8, 2, 64).chunk(2)[rank].to(here())
        y = block(x)
        y.square().sum().backward()
        made |= {f"{name} y": y.detach(), f"{name} weight": block[0].weight.full_tensor().detach()}
        made[f"{name} grad"] = block[0].weight.grad.full_tensor()
    return made


def test_norms_of_torchs_on_each_ranks_tokens(pool, tmp_path):
    ranks = pool.run(f"{__name__}:norms", into=tmp_path / "made")
    for name, make in (("layer", nn.LayerNorm), ("rms", nn.RMSNorm)):
        torch.manual_seed(0)
        block: Any = nn.Sequential(make(64), nn.Linear(64, 64))
        with torch.no_grad():
            block[0].weight.uniform_(1, 2)
        torch.manual_seed(7)
        y = block(torch.randn(8, 2, 64))
        y.square().sum().backward()
        torch.testing.assert_close(torch.cat([r[f"{name} y"] for r in ranks], -1), y.detach())
        for made in ranks:
            same(made[f"{name} weight"], block[0].weight.detach(), name)
            torch.testing.assert_close(made[f"{name} grad"], block[0].weight.grad)


# --- with FSDP2 ---


def grid(rank: int, groups: Any, recipe: str, quantized: bool, compiled: bool) -> bool:
    """Styles on one dimension of a mesh and FSDP2 on the other, against modules made with the group. `quantized`: the
    weights are gathered in the recipe's format. Two more models are made on the meta device and filled when sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("dp", "tp"))
    runs, width = [], 256 if recipe == "block" else 64
    for styles, device in ((False, here()), (True, here()), (False, "meta"), (True, "meta")):
        torch._dynamo.reset()  # each way compiles three blocks, and Dynamo compiles a block's code eight times at most
        torch.manual_seed(0)
        made: Any
        if styles:
            with pytest.warns(UserWarning, match="stacks gate and value"):
                made = parallelize_module(model(width, device=device), mesh["tp"], plan(0))
        else:
            made = model(width, tp_group=mesh["tp"].get_group(), sequence_parallel=True, device=device)
        for i, block in enumerate(made):
            if compiled:
                made[i] = torch.compile(nn.Sequential(block), fullgraph=True, backend="aot_eager")
            fully_shard(made[i], mesh=mesh["dp"])
        fully_shard(made, mesh=mesh["dp"])
        if device == "meta":
            made.to_empty(device=here())
            torch.manual_seed(0)
            for module in made.modules():
                if isinstance(module, dt.QuantizedModule):
                    module.reset_parameters()
        if quantized:
            dt.parallel.prepare(made, mesh["dp"], RECIPES[recipe])
            weights: list[Any] = [p for n, p in made.named_parameters() if n.endswith("weight") and "norm" not in n]
            assert {type(p._local_tensor).__name__ for p in weights} == {"ShardedWeight"}
        runs.append(trained(mesh["tp"].get_local_rank(), made, recipe, width))
    for way, run in zip(("styles", "late", "late styles"), runs[1:], strict=True):
        for i, (a, b) in enumerate(zip(run, runs[0], strict=True)):
            same(a, b, f"{recipe}, {way}: {i}")
    return True


@pytest.mark.parametrize(
    ("recipe", "quantized", "compiled"),
    [
        cell if cell in (("mxfp8", False, False), ("current", True, False)) else slow(*cell)
        for cell in (
            *itertools.product(("current", "delayed", "block", "mxfp8", "nvfp4 1d"), (False, True), (False,)),
            ("current", True, True),
            ("mxfp8", True, True),
        )
    ],
)
def test_with_fsdp(recipe, quantized, compiled, pool, tmp_path):
    given = recipe, quantized, compiled
    assert pool.run(f"{__name__}:grid", *given, size=4, into=tmp_path / "made") == [True] * 4


# --- checkpoints ---


def saved(rank: int, groups: Any, folder: str) -> dict[str, torch.Tensor]:
    """A model that styles have cut is saved, and read by one that was made with the group. Returns whole weights, but
    for fc1's, of which torch 2.11 has no `full_tensor`."""
    from torch.distributed.tensor.parallel import parallelize_module

    styles = parallelize_module(model(device=here()), mesh_of(groups), plan(0))
    trained(rank, styles, "delayed")
    dt.parallel.save(folder, styles, step=3)
    dt.parallel.export(f"{folder}/model.safetensors", styles)
    arguments = model(tp_group=groups["data"], sequence_parallel=True, device=here())
    dt.parallel.load(folder, arguments)
    again = parallelize_module(model(device=here()), mesh_of(groups), plan(0))
    dt.parallel.load(folder, again)
    results = [trained(rank, each, "delayed") for each in (styles, arguments, again)]
    for other in results[1:]:
        for i, (a, b) in enumerate(zip(other, results[0], strict=True)):
            same(a, b, str(i))
    dt.parallel.load(folder, styles)
    named: Any = styles.named_parameters()
    return {n: p.full_tensor().detach() for n, p in named if "fc1" not in n}


def test_checkpoints_of_styles(on, pool, tmp_path):
    ranks = pool.run(f"{__name__}:saved", str(tmp_path / "run"), into=tmp_path / "made", device=on)
    whole = model()
    dt.parallel.load(tmp_path / "run", whole)
    exported = pytest.importorskip("safetensors.torch").load_file(tmp_path / "run" / "model.safetensors")
    assert len(ranks[0]) == len(exported) - 2
    for name, p in whole.named_parameters():
        same(ranks[0].get(name, exported[name]), p.detach(), name)
        same(exported[name], p.detach(), name)
