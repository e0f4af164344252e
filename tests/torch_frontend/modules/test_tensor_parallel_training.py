"""Modules that are cut over ranks in each way to train them: compiled, recomputed, by microbatches, in high precision.
Each rank holds its own results to those of the plain way."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import diptych.torch as dt
import oracle
from diptych.torch.functional import activation as activation_verbs
from diptych.torch.functional import norm as norm_verbs
from oracle import parallel
from torch_frontend.cut_layers import RECIPES, Fused, Plain, collectives, dtypes_of
from torch_frontend.layer_cases import slow
from torch_frontend.ranks import needs_gloo
from torch_frontend.tools import same, to_numpy, to_torch

pytestmark = needs_gloo
KINDS = ("column", "row", "linear", "linear rms", "mlp gelu", "mlp swiglu")


def case_of(kind: str, recipe: str, sequence: bool, **more: Any) -> Fused:
    made = (Plain if kind in ("column", "row") else Fused)(kind, recipe, sequence, dtypes_of(recipe)[-1], steps=4)
    return dataclasses.replace(made, **more)


def _cells(*now: tuple[str, str, bool]) -> Any:
    """(kind, recipe, sequence) that always run; a long sweep runs the others."""
    every = itertools.product(KINDS, ("delayed", "current", "block", "mxfp8", "nvfp4"), (False, True))
    return pytest.mark.parametrize(("kind", "recipe", "sequence"), [c if c in now else slow(*c) for c in every])


def trajectory(case: Fused, module: Any, rank: int, fn: Any = None) -> list[dict[str, torch.Tensor]]:
    """Results of some steps, and the states that they end with."""
    made = [case.run(module, i, rank, fn) for i in range(case.steps)]
    return [*made, {k: v.clone() for k, v in module.state_dict().items() if "scale_states" in k}]


def all_same(got: Any, want: Any, label: Any) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.keys() == b.keys()
        for key in b:
            same(a[key], b[key], f"{label} {i} {key}")


# --- compiled, recomputed ---


def compiled(rank: int, groups: Any, case: Fused, backend: str) -> int:
    """Returns the number of graphs."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    eager = case.cut(groups["data"])
    module = copy.deepcopy(eager)
    want = trajectory(case, eager, rank)
    fn, seen = torch.compile(module, fullgraph=True, backend=backend), []

    def run(x: torch.Tensor) -> torch.Tensor:
        y = fn(x)
        seen.append(counters["stats"]["unique_graphs"])
        return y

    got = trajectory(case, module, rank, run)
    all_same(got, want, f"{case} compiled")
    assert len(set(seen[1:])) == 1, seen
    return seen[-1]


@_cells(("row", "delayed", True), ("linear", "mxfp8", True))
def test_one_graph_with_eagers_bits(kind, recipe, sequence, pool, tmp_path):
    case = case_of(kind, recipe, sequence)
    assert pool.run(f"{__name__}:compiled", case, "aot_eager", into=tmp_path / "made") == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("kind", "recipe"), [("row", "delayed"), ("column", "nvfp4"), ("linear", "current"), ("mlp swiglu", "mxfp8")]
)
def test_inductor(kind, recipe, sequence, pool, tmp_path):
    case = case_of(kind, recipe, sequence)
    assert pool.run(f"{__name__}:compiled", case, "inductor", into=tmp_path / "made") == [1, 1]


WAYS = ("checkpoint", "reentrant", "keeps", "module's own", "compiled")


def recomputed(rank: int, groups: Any, case: Fused, way: str) -> bool:
    plain = case.cut(groups["data"])
    module = copy.deepcopy(plain)
    if way == "module's own":
        module.checkpoint = True
    if way == "keeps":
        module.save_original_input = module.save_original_weight = not module.save_original_input

    def fn(x: torch.Tensor) -> torch.Tensor:
        return dt.checkpoint(module, x, use_reentrant=way == "reentrant")

    if way == "compiled":
        torch._dynamo.reset()
        fn = torch.compile(fn, fullgraph=True, backend="aot_eager")
    want = trajectory(case, plain, rank)
    all_same(trajectory(case, module, rank, None if way in ("module's own", "keeps") else fn), want, f"{case} {way}")
    return True


@pytest.mark.parametrize("way", [w if w != "compiled" else slow(w) for w in WAYS])
@_cells(
    ("row", "delayed", True),
    ("column", "nvfp4", True),
    ("linear", "block", True),
    ("mlp swiglu", "delayed", True),
    ("mlp gelu", "nvfp4", False),
)
def test_recomputed(kind, recipe, sequence, way, pool, tmp_path):
    if way == "module's own" and "mlp" not in kind:
        return
    case = case_of(kind, recipe, sequence, steps=3)
    assert pool.run(f"{__name__}:recomputed", case, way, into=tmp_path / "made") == [True, True]


# --- microbatches ---


def microbatches(case: Fused, module: Any, rank: int, flags: tuple[Any, ...]) -> list[dict[str, torch.Tensor]]:
    """Gradients add up over microbatches of one region."""
    module.zero_grad(set_to_none=True)
    case.fill(module, 0, rank)
    made = []
    with dt.autocast(recipe=RECIPES[case.recipe]):
        for i, first in enumerate(flags):
            x, dy = (case.part(n, t, rank).contiguous() for n, t in zip(("x", "dy"), case.data(i), strict=True))
            x.requires_grad_()
            y = module(x, is_first_microbatch=first)
            y.backward(dy)
            made.append({"y": y.detach(), "dx": x.grad})
    return [*made, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}]


def cached(rank: int, groups: Any, case: Fused) -> list[int]:
    """Returns how many amaxes were reduced with and without kept weights."""
    plain = case.cut(groups["data"])
    module = copy.deepcopy(plain)
    counts = []
    runs = []
    for each, flags in ((module, (True, False, False)), (plain, (None, None, None))):
        with collectives() as seen:
            runs.append(microbatches(case, each, rank, flags))
        counts.append(sum(name == "all_reduce" for name, *_ in seen))
    all_same(runs[0], runs[1], case)
    again = [microbatches(case, each, rank, flags) for each, flags in ((module, (True, False)), (plain, (None, None)))]
    all_same(*again, f"{case} again")
    return counts


@_cells(
    ("row", "delayed", True),
    ("column", "current", True),
    ("linear", "nvfp4", True),
    ("mlp swiglu", "current", True),
    ("mlp gelu", "mxfp8", False),
)
def test_weights_that_are_kept_across_microbatches(kind, recipe, sequence, pool, tmp_path):
    for kept, plain in pool.run(f"{__name__}:cached", case_of(kind, recipe, sequence), into=tmp_path / "made"):
        if recipe in ("current", "nvfp4"):
            assert kept < plain


def elsewhere(rank: int, groups: Any, case: Fused, fuse: bool, delay: bool) -> bool:
    """Weight gradients in main_grad and in `backward_dw` against autograd's: of float32 weights, whose sums are the
    same; 0 + -0 is 0 in main_grad alone."""
    plain = case.cut(groups["data"])
    module = dataclasses.replace(
        case, options={**case.options, "fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}
    ).cut(groups["data"])
    weights = {n: p for n, p in module.named_parameters() if p.dim() == 2}
    for p in weights.values():
        if fuse:
            p.main_grad = torch.zeros(p.shape)
    want = microbatches(case, plain, rank, (None, None))
    got = microbatches(case, module, rank, (None, None))
    assert not any(n in got[-1] for n in weights)
    if delay:
        with collectives() as seen:
            module.backward_dw()
        assert not seen or case.sequence
    for n, p in weights.items():
        got[-1][n] = (p.main_grad if fuse else p.grad) + 0.0
        want[-1][n] = want[-1][n] + 0.0
    all_same(got, want, case)
    return True


@pytest.mark.parametrize(("fuse", "delay"), [(True, False), (False, True), (True, True)])
@_cells(
    ("row", "delayed", True), ("column", "mxfp8", True), ("linear", "current", False), ("mlp swiglu", "nvfp4", True)
)
def test_weight_gradients_elsewhere(kind, recipe, sequence, fuse, delay, pool, tmp_path):
    case = case_of(kind, recipe, sequence, dtypes=(dtypes_of(recipe)[-1][0], "float32"))
    assert pool.run(f"{__name__}:elsewhere", case, fuse, delay, into=tmp_path / "made") == [True, True]


# --- in high precision ---


def summed(parts: list[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
    return to_torch(parallel.sum_partials([to_numpy(p) for p in parts], None if bias is None else to_numpy(bias)))


class HighPrecision:
    """A module's products on each rank's part, by torch alone, summed by the oracle."""

    def __init__(self, case: Fused) -> None:
        self.case, self.whole = case, case.make()
        case.fill(self.whole, 0)
        self.p = {n: p.detach() for n, p in self.whole.named_parameters()}

    def parts(self, name: str) -> list[torch.Tensor]:
        return [self.case.part(name, self.p[name], r).contiguous() for r in range(self.case.size)]

    def expected(self) -> list[dict[str, torch.Tensor]]:
        case, size = self.case, self.case.size
        x, dy = case.data(0)
        dy2, norm = dy.flatten(0, -2), "layer_norm_weight" in self.p
        affine = [self.p.get(f"layer_norm_{name}") for name in ("weight", "bias")]
        z = (norm_verbs.layernorm(x, *affine, self.whole.norm) if norm else x).flatten(0, -2)
        out: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]
        if case.module == "row":
            self.row(z, dy2, "weight", "bias", out, [c.contiguous() for c in z.chunk(size, 1)])
            dz = None
        elif "mlp" in case.module:
            hs = [F.linear(z, w, b) for w, b in zip(self.parts("fc1_weight"), self.parts("fc1_bias"), strict=True)]
            leaves = [h.requires_grad_() for h in hs]
            acts = [activation_verbs.activate(h, self.whole.activation_options) for h in leaves]
            das = self.row(z, dy2, "fc2_weight", "fc2_bias", out, [a.detach() for a in acts])
            for a, da in zip(acts, das, strict=True):
                a.backward(da)
            dz = self.column(z, [h.grad for h in leaves], "fc1_weight", "fc1_bias", out)
        else:
            dys = [d.contiguous() for d in dy2.chunk(size, 1)]
            for r, (w, b) in enumerate(zip(self.parts("weight"), self.parts("bias"), strict=True)):
                out[r]["y"] = F.linear(z, w, b)
            dz = self.column(z, dys, "weight", "bias", out)
        if dz is not None and norm:
            self.norm(x, dz.view(x.shape), out)
        elif dz is not None:
            for r in range(size):
                out[r]["dx"] = case.part("dx", dz.view(x.shape), r)
        for r in range(size):
            y = out[r]["y"].view(*dy.shape[:-1], -1)
            out[r]["y"] = y if y.shape != dy.shape else case.part("y", y, r)
            out[r]["dx"] = out[r]["dx"].reshape(case.part("x", x, r).shape)
        return out

    def column(self, z: torch.Tensor, dys: list[Any], weight: str, bias: str, out: list[Any]) -> torch.Tensor:
        for r, dy in enumerate(dys):
            out[r][weight] = dy.t() @ z
            out[r][bias] = to_torch(oracle.bias_grad(to_numpy(dy), to_numpy(self.p[bias]).dtype))
        return summed([dy @ w for dy, w in zip(dys, self.parts(weight), strict=True)])

    def row(
        self, z: torch.Tensor, dy: torch.Tensor, weight: str, bias: str, out: list[Any], xs: list[Any]
    ) -> list[Any]:
        y = summed([F.linear(x, w) for x, w in zip(xs, self.parts(weight), strict=True)], self.p[bias])
        parts = dy.chunk(self.case.size) if self.case.sequence else [dy]
        dtype = to_numpy(self.p[bias]).dtype
        db = parallel.sum_partials([oracle.bias_grad(to_numpy(d), dtype) for d in parts])
        grads = [dy @ w for w in self.parts(weight)]
        for r, x in enumerate(xs):
            out[r] |= {"y": y, weight: dy.t() @ x, bias: to_torch(db), "dx": grads[r]}
        return grads

    def norm(self, x: torch.Tensor, dz: torch.Tensor, out: list[Any]) -> None:
        case, names = self.case, ("layer_norm_weight", "layer_norm_bias")
        for r in range(case.size):
            leaves: list[Any] = [case.part("x", x, r), self.p[names[0]], self.p.get(names[1])]
            leaves = [None if t is None else t.detach().clone().requires_grad_() for t in leaves]
            norm_verbs.layernorm(*leaves, self.whole.norm).backward(case.part("dx", dz, r))
            out[r]["dx"] = leaves[0].grad
            out[r] |= {n: t.grad for n, t in zip(names, leaves[1:], strict=True) if t is not None}
        if case.sequence:
            for name in names:
                if name in out[0]:
                    total = summed([o[name] for o in out])
                    for o in out:
                        o[name] = total


def plain(rank: int, groups: Any, case: Fused) -> bool:
    module = case.cut(groups["data"])
    got = case.run(module, 0, rank)
    want = HighPrecision(case).expected()[rank]
    all_same([got], [want], case)
    return True


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_outside_of_regions(kind, sequence, dtypes, pool, tmp_path):
    case = case_of(kind, "current", sequence, dtypes=dtypes, quantized=False)
    assert pool.run(f"{__name__}:plain", case, into=tmp_path / "made") == [True, True]


# --- prepared weights ---


def prepared(rank: int, groups: Any, case: Fused) -> None:
    """A layer that is whole enters each region first: its joint update leaves out layers whose amaxes are reduced."""
    found = []
    for prepare in (False, True):
        torch.manual_seed(0)
        module, whole = case.cut(groups["data"]), dt.Linear(32, 32)
        model = torch.nn.ModuleList([whole, module])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if prepare:
            dt.prepare_weights(model, optimizer, max_bytes=1 << 20)
        made = []
        for i in range(case.steps):

            def both(x: torch.Tensor, whole: Any = whole, module: Any = module) -> torch.Tensor:
                whole(torch.ones(16, 32)).sum().backward()
                return module(x)

            made.append(case.run(module, i, rank, both))
            optimizer.step()
        made.append({k: v.clone() for k, v in model.state_dict().items() if "scale_states" in k})
        found.append(made)
    all_same(found[1], found[0], f"{case} prepared")


@pytest.mark.filterwarnings("ignore:prepare_weights")
def test_joint_updates_leave_out_cut_layers(pool, tmp_path):
    pool.run(f"{__name__}:prepared", case_of("row", "delayed", False), into=tmp_path / "made")
