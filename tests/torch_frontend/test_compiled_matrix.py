"""Layers under torch.compile, every way at once: module x recipe x shapes x use, equal to eager to the bit.

All cells run on aot_eager (marked slow). There is a sample in which every pair of values meets, and another, with
modes of torch.compile, for Inductor; of both, the cells that bring a value run with the tests, so that every module,
recipe, shape and use does.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

import pytest
import torch

import diptych.torch as dt
from diptych.common import RECIPES, QuantizerRole
from torch_frontend import layer_cases as layers

pytestmark = pytest.mark.sampled

allpairs = pytest.importorskip("allpairspy").AllPairs

K, N = 112, 160  # no number of rows: equal sizes would be one symbol
MODULES = {
    "Linear": lambda **kw: dt.Linear(K, N, **kw),
    "LayerNormLinear": lambda **kw: dt.LayerNormLinear(K, N, normalization="RMSNorm", **kw),
    "LayerNormMLP": lambda **kw: dt.LayerNormMLP(K, N, activation="swiglu", **kw),
}
SHAPES = ("static", "dynamic", "marked")
USES = (
    "inference", "training", "checkpoint", "reentrant checkpoint", "microbatches", "main_grad", "offload",
    "quantized weights", "quantized input",
)  # fmt: skip
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


class Cell(NamedTuple):
    module: str
    recipe: str
    shapes: str
    use: str
    mode: str = "default"

    def __str__(self) -> str:
        return "-".join(v.replace(" ", "_") for v in self)


AXES = (list(MODULES), list(RECIPES), list(SHAPES), list(USES))
EVERY = [Cell(*values) for values in itertools.product(*AXES)]
PAIRS = [Cell(*values) for values in allpairs(AXES)]
INDUCTOR = [Cell(*values) for values in allpairs([*AXES, list(MODES)])]


def always(cells: list[Cell]) -> list[Any]:
    """Returns the cells as parameters: those with a value that no cell before them has always run."""
    seen: set[str] = set()
    params = []
    for cell in cells:
        params.append(pytest.param(cell, marks=() if seen.issuperset(cell) else pytest.mark.kept))
        seen.update(cell)
    return params


def test_the_samples_are_what_they_claim():
    assert len(PAIRS) <= 60 and len(INDUCTOR) <= 60
    for sample, axes in ((PAIRS, AXES), (INDUCTOR, (*AXES, MODES))):
        for i, j in itertools.combinations(range(len(axes)), 2):
            met = {(cell[i], cell[j]) for cell in sample}
            assert met == set(itertools.product(axes[i], axes[j]))


def dtype_of(cell: Cell) -> torch.dtype:
    return getattr(torch, layers.dtype_of(cell.recipe))


def made(cell: Cell, device: str) -> Any:
    torch.manual_seed(0)
    recipe, options = RECIPES[cell.recipe], {"fuse_wgrad_accumulation": True} if cell.use == "main_grad" else {}
    with dt.quantized_model_init(enabled=cell.use == "quantized weights", recipe=recipe):
        model = MODULES[cell.module](device=device, dtype=dtype_of(cell), **options)
    dt.seed_rng(model, 1)
    for p in model.parameters():
        if cell.use != "inference" and not isinstance(p, dt.QuantizedTensor):
            p.grad = torch.zeros_like(p)
        if cell.use == "main_grad" and p.dim() == 2:
            p.grad = None
            p.main_grad = torch.zeros(p.shape, dtype=torch.float32, device=device)
    return model.eval() if cell.use == "inference" else model


def quantized(cell: Cell, x: torch.Tensor) -> dt.QuantizedTensor:
    """The input by the recipe's quantizer."""
    quantizer = RECIPES[cell.recipe].quantizer(QuantizerRole(tensor="input"))
    scale = torch.ones(1, device=x.device) if cell.recipe == "fp8-delayed" else None
    return dt.quantize(x, quantizer, scale=scale)


def call(cell: Cell, model: Any, fn: Any, x: torch.Tensor, first: bool) -> torch.Tensor:
    if cell.use == "quantized input" and (fn is model or cell.shapes != "marked"):
        x = quantized(cell, x)
    given = (first,) if cell.use == "microbatches" else ()
    if cell.use == "offload":
        with torch.autograd.graph.save_on_cpu():
            return fn(x)
    return fn(x, *given)


def steps(cell: Cell, model: Any, fn: Any, device: str) -> list[torch.Tensor]:
    """Returns the results of three steps of two microbatches."""
    seen = []
    for i in range(3):
        rows = 16 * (4 + i) if cell.shapes != "static" else 64  # two blocks: a size of 1 is a graph of its own
        with dt.autocast(recipe=copy.deepcopy(RECIPES[cell.recipe])):
            for microbatch in range(2):
                generator = torch.Generator().manual_seed(10 * i + microbatch)
                x = (torch.randn(rows, K, generator=generator) * (i + 1)).to(device, dtype_of(cell))
                if cell.shapes == "marked":
                    torch._dynamo.mark_dynamic(x, 0)
                if cell.use == "inference":
                    torch.compiler.cudagraph_mark_step_begin()
                    with torch.no_grad():
                        seen.append(call(cell, model, fn, x, microbatch == 0).clone())
                    continue
                x.requires_grad_()
                torch.compiler.cudagraph_mark_step_begin()
                y = call(cell, model, fn, x, microbatch == 0)
                y.float().pow(2).mean().backward()
                seen += [y.detach().clone(), x.grad.clone()]
                for p in model.parameters():
                    if isinstance(p, dt.QuantizedTensor) and p.grad is not None:
                        p.grad = (
                            p.grad.clone()
                        )  # it has none to add to beforehand, and a captured graph's is overwritten
        for p in model.parameters():
            seen += [] if p.grad is None else [p.grad.clone()]
            seen += [p.main_grad.clone()] if hasattr(p, "main_grad") else []
            if p.grad is not None:  # kept: what a captured graph returns does not outlive its next run
                p.grad.zero_()
    return [*seen, *[t.clone() for name, t in model.state_dict().items() if "state" in name]]


def run(cell: Cell, backend: str, device: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, model = made(cell, device), made(cell, device)
    fn: Any = model
    if "checkpoint" in cell.use:

        def fn(x: torch.Tensor) -> torch.Tensor:
            return dt.checkpoint(model, x, use_reentrant=cell.use == "reentrant checkpoint")

    elif cell.use == "quantized input" and cell.shapes == "marked":  # its rows: there is no marking of its buffers

        def fn(x: torch.Tensor) -> torch.Tensor:
            return model(quantized(cell, x))

    mode = None if cell.mode == "default" else cell.mode
    dynamic = True if cell.shapes == "dynamic" else None
    compiled = torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic, mode=mode)
    want = steps(cell, eager, eager, device)
    got = steps(cell, model, compiled, device)
    for a, b in zip(want, got, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= (2 if cell.use == "microbatches" else 1)
    if device == "cuda" and cell.mode == "reduce-overhead":
        assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("cell", always(PAIRS), ids=str)
def test_pairs(cell):
    run(cell, "aot_eager", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("cell", [c for c in EVERY if c not in PAIRS], ids=str)
def test_every_cell(cell):
    run(cell, "aot_eager", "cpu")


@pytest.mark.parametrize("cell", [pytest.param(INDUCTOR[0], marks=pytest.mark.kept), *INDUCTOR[1:4]], ids=str)
def test_inductor(cell):
    run(cell, "inductor", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("cell", INDUCTOR[4:], ids=str)
def test_inductor_pairs(cell):
    run(cell, "inductor", "cpu")


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("cell", INDUCTOR, ids=str)
def test_inductor_pairs_on_cuda(cell, cuda):
    run(cell, "inductor", cuda)
