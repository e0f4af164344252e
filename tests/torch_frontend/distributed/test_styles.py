"""`ParallelStyle`s: modules that they cut compute what modules made with a tensor-parallel group do, in bits."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import diptych.torch as dt
from torch_frontend.cut_layers import RECIPES, Fused, Plain, collectives, dtypes_of, error_of
from torch_frontend.layer_cases import slow
from torch_frontend.ranks import here, needs_gloo
from torch_frontend.tools import same

pytestmark = needs_gloo
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
        module = case.make()
        case.fill(module, 0)
    return parallelize_module(module.to(here()), mesh_of(groups), style_of(case, dim, **options))


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
        (kind, recipe, dim) if (kind, recipe, dim) in (("mlp swiglu", "delayed", 1), ("row", "current", 0))
        else slow(kind, recipe, dim)
        for kind, recipe, dim in itertools.product(KINDS, ("delayed", "current", "mxfp8"), DIMS)
    ],
)  # fmt: skip
def test_compiled(kind, recipe, dim, pool, tmp_path):
    """One graph for each module, with eager's bits."""
    case = case_of(kind, recipe, DIMS[dim], steps=3)
    assert pool.run(f"{__name__}:as_arguments", case, dim, "aot_eager", into=tmp_path / "made") == [1, 1]
