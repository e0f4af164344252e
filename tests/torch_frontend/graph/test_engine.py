"""Backward passes that ask for some gradients compute the products of those alone, with the bits of a whole pass."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import diptych.torch as dt
from diptych.common import RECIPES, MXFP8Quantizer
from torch_frontend.cut_layers import EVERY, Case, linear
from torch_frontend.cut_layers import step as cut_step
from torch_frontend.graph.test_traced import IDS, ROWS, K, N, of
from torch_frontend.layer_cases import SEED
from torch_frontend.ranks import needs_gloo
from torch_frontend.tools import calls, to_torch

KINDS: dict[str, Any] = {
    "Linear": lambda: dt.Linear(K, N),
    "Linear, original": lambda: dt.Linear(K, N, save_original_input=True, save_original_weight=True),
    "LayerNormLinear": lambda: dt.LayerNormLinear(K, N),
    "LayerNormLinear, original": lambda: dt.LayerNormLinear(K, N, save_original_input=True, save_original_weight=True),
    "LayerNormMLP": lambda: dt.LayerNormMLP(K, N, activation="swiglu", normalization="RMSNorm"),
    "LayerNormMLP, original": lambda: dt.LayerNormMLP(K, N, save_original_input=True, save_original_weight=True),
    "GroupedLinear": lambda: dt.GroupedLinear(3, K, N),
    "GroupedLinear, original": lambda: dt.GroupedLinear(3, K, N, save_original_input=True),
}
# Products that a pass for one gradient runs: those of a norm's parameters need dgrad, and so do those of the layer in
# front of another one.
PRODUCTS = {
    "Linear": {"x": 1, "weight": 1, "bias": 0},
    "GroupedLinear": {"x": 1, "weight": 1, "bias": 0},
    "LayerNormLinear": {"x": 1, "layer_norm_weight": 1, "layer_norm_bias": 1, "weight": 1, "bias": 0},
    "LayerNormMLP": {
        "x": 2, "layer_norm_weight": 2, "layer_norm_bias": 2, "fc1_weight": 2, "fc1_bias": 1, "fc2_weight": 1,
        "fc2_bias": 0,
    },
}  # fmt: skip
# Both halves of a pass that is split into the input's gradient and the parameters', norms included or frozen.
HALVES = {"Linear": (1, 1, 1), "GroupedLinear": (1, 1, 1), "LayerNormLinear": (1, 2, 1), "LayerNormMLP": (2, 4, 3)}


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy


def takes_functions() -> bool:
    """Whether `autograd.grad` starts at an edge to an autograd.Function, as a schedule's W does."""
    x = torch.ones(1, requires_grad=True)
    edge = torch.autograd.graph.GradientEdge(Same.apply(x).grad_fn, 0)
    try:
        return bool(torch.autograd.grad([edge], x, [torch.ones(1)]))
    except RuntimeError:
        return False


splits = pytest.mark.skipif(not takes_functions(), reason="this torch splits no backward of an autograd.Function")


def products() -> int:
    return calls("gemm") + calls("gemm_into") + calls("grouped_gemm") + calls("grouped_gemm_into")


def made(kind: str, recipe: Any) -> Any:
    torch.manual_seed(0)
    model = dt.prepare(KINDS[kind]().bfloat16(), recipe)
    dt.seed_rng(model, SEED)
    return model


def forward(model: Any, recipe: Any, x: Tensor) -> Tensor:
    groups = {}
    if isinstance(model, dt.GroupedLinear):
        groups = {"row_map": dt.moe_map(IDS, 3, map_type="index", align_size=16), "align": 16}
    with dt.autocast(recipe=recipe):
        return model(x, **groups)


def whole(model: Any, recipe: Any) -> dict[str, Tensor]:
    x = of((ROWS, K)).requires_grad_()
    y = forward(model, recipe, x)
    y.backward(of(tuple(y.shape), "dy"))
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}  # type: ignore[dict-item]


def states(model: Any, recipe: Any) -> list[Tensor]:
    """Returns the states after another region has updated them."""
    forward(model, recipe, of((ROWS, K)))
    return [t for name, t in model.state_dict().items() if "states" in name or "rng" in name]


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in KINDS for n in RECIPES])
def test_each_gradient_alone(kind, name):
    """Each gradient by a pass of its own; amaxes of delayed scaling, and random bits, are those of one whole pass."""
    recipe = RECIPES[name]
    model = made(kind, recipe)
    other = copy.deepcopy(model)
    want = whole(model, recipe)
    x = of((ROWS, K)).requires_grad_()
    y = forward(other, recipe, x)
    leaves = {"x": x, **dict(other.named_parameters())}
    for leaf, t in leaves.items():
        before = products()
        (got,) = torch.autograd.grad(y, t, of(tuple(y.shape), "dy"), retain_graph=True)
        assert torch.equal(got, want[leaf]), leaf
        ran = products() - before
        assert ran == PRODUCTS[kind.split(",")[0]].get(leaf, ran), leaf
    for i, (a, b) in enumerate(zip(states(other, recipe), states(model, recipe), strict=True)):
        assert torch.equal(a, b), i


@splits
@pytest.mark.parametrize(
    ("kind", "name", "frozen"),
    [(k, n, f) for k in KINDS for n in RECIPES for f in (False, True) if not f or "LayerNorm" in k],
)
def test_halves_of_zero_bubble_schedules(kind, name, frozen):
    """torch's own halves over two layers: input's gradients first, then parameters'."""
    recipe, of_kind = RECIPES[name], kind.split(",")[0]
    model = made(kind, recipe)
    for norm, p in model.named_parameters():
        p.requires_grad_(not (frozen and norm.startswith("layer_norm")))
    other = copy.deepcopy(model)
    want = whole(model, recipe)
    x = of((ROWS, K)).requires_grad_()
    y = forward(other, recipe, x)
    counts, given = [products()], of(tuple(y.shape), "dy")
    trained = [p for p in other.parameters() if p.requires_grad]
    (dx,), groups = stage_backward_input([y], [given], [x], iter(trained))
    counts.append(products())
    stage_backward_weight(iter(trained), groups)
    counts.append(products())
    of_input, *of_weights = HALVES[of_kind]
    assert (counts[1] - counts[0], counts[2] - counts[1]) == (of_input, of_weights[int(frozen)])
    assert torch.equal(dx, want["x"])  # type: ignore[arg-type]
    for leaf, p in other.named_parameters():
        assert (p.grad is None) == (want[leaf] is None) and (p.grad is None or torch.equal(p.grad, want[leaf])), leaf
    for i, (a, b) in enumerate(zip(states(other, recipe), states(model, recipe), strict=True)):
        assert torch.equal(a, b), i


@splits
@pytest.mark.parametrize("kind", ("Linear", "LayerNormMLP", "GroupedLinear"))
def test_halves_with_a_main_grad(kind):
    """torch's schedules refuse parameters without a gradient; the attribute is what gives weights one, of zeros."""
    recipe = RECIPES["fp8-current"]
    model = getattr(dt, kind)(*((3, K, K) if kind == "GroupedLinear" else (K, K)), fuse_wgrad_accumulation=True)
    weights = [p for name, p in model.bfloat16().named_parameters() if name.endswith("weight") and "norm" not in name]
    for p in weights:
        p.main_grad = torch.zeros(p.shape)
        p.grad_added_to_main_grad = False
    whole(model, recipe)
    want = [p.main_grad.clone() for p in weights]
    for p in model.parameters():
        p.grad = None
    for p in weights:
        p.main_grad.zero_()
    x = of((ROWS, K)).requires_grad_()
    y = forward(model, recipe, x)
    _, groups = stage_backward_input([y], [of(tuple(y.shape), "dy")], [x], model.parameters())
    assert not any(p.main_grad.any() for p in weights)
    stage_backward_weight(model.parameters(), groups)
    for p, w in zip(weights, want, strict=True):
        assert torch.equal(p.main_grad, w) and not p.grad.any()


# --- several layers, and what stands between them and the engine -----------------------------------------------------


def four(kind: str, recipe: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[getattr(dt, kind)(K, K, bias=i % 2 == 0) for i in range(4)]).bfloat16()
    dt.seed_rng(dt.prepare(model, recipe), SEED)
    return model


@splits
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear", "LayerNormMLP"))
def test_halves_of_four_layers(kind, name):
    """The two halves of a backward multiply as often together as a whole backward does, for layers without a norm."""
    recipe = RECIPES[name]
    model, x, given = four(kind, recipe), of((ROWS, K)).requires_grad_(), of((ROWS, K), "dy")
    other, counts = copy.deepcopy(model), []
    want = whole(model, recipe)
    y = forward(other, recipe, x)
    counts.append(products())
    _, groups = stage_backward_input([y], [given], [x], other.parameters())
    counts.append(products())
    stage_backward_weight(other.parameters(), groups)
    counts.append(products())
    of_input, of_weights, _ = HALVES[kind]
    assert (counts[1] - counts[0], counts[2] - counts[1]) == (4 * of_input, 4 * of_weights)
    assert torch.equal(x.grad, want["x"])  # type: ignore[arg-type]
    for leaf, p in other.named_parameters():
        assert torch.equal(p.grad, want[leaf]), leaf
    for i, (a, b) in enumerate(zip(states(other, recipe), states(model, recipe), strict=True)):
        assert torch.equal(a, b), i


def selective(run: Any, x: Tensor) -> Tensor:
    """A checkpoint that recomputes all ops, under a dispatch mode."""
    make = create_selective_checkpoint_contexts
    return dt.checkpoint(run, x, context_fn=lambda: make([]))


class Mode(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(run: Any, x: Tensor) -> Tensor:
    with Mode():
        return run(x)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "how", (dt.checkpoint, selective, under_a_mode), ids=("checkpoint", "selective checkpoint", "dispatch mode")
)
@pytest.mark.parametrize("kind", ("Linear", "LayerNormMLP"))
def test_halves_behind_a_checkpoint_or_a_mode(kind, how, name):
    """Each half recomputes, and multiplies for its own gradients; states and random bits are those of one step."""
    recipe = RECIPES[name]
    model = four(kind, recipe)
    other = copy.deepcopy(model)
    want = whole(model, recipe)
    x = of((ROWS, K)).requires_grad_()
    with dt.autocast(recipe=recipe):
        y = how(other, x)
    given, counts = of((ROWS, K), "dy"), [products()]
    (dx,) = torch.autograd.grad(y, x, given, retain_graph=True)
    counts.append(products())
    weights = dict(other.named_parameters())
    made = torch.autograd.grad(y, list(weights.values()), given)
    assert torch.equal(dx, want["x"])
    for leaf, got in zip(weights, made, strict=True):
        assert torch.equal(got, want[leaf]), leaf
    of_input = counts[1] - counts[0] - 4 * HALVES[kind][0]
    if how is under_a_mode:
        assert of_input == 0
    else:  # and those of the recomputation, which may stop where all that was saved is there
        assert 0 <= 4 * PRODUCTS[kind]["x"] - of_input <= PRODUCTS[kind]["x"]
    for i, (a, b) in enumerate(zip(states(other, recipe), states(model, recipe), strict=True)):
        assert torch.equal(a, b), i


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_and_a_weight_that_is_a_result(kind, name):
    """Backward hooks of modules and tensors see the gradients of a whole pass, and a weight may be no leaf."""
    recipe = RECIPES[name]
    model = made(kind, recipe)
    other = copy.deepcopy(model)
    want = whole(model, recipe)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
    results = {n: t * 1 for n, t in leaves.items()}
    x, seen = of((ROWS, K)).requires_grad_(), {}
    for n, t in results.items():
        t.register_hook(lambda grad, n=n: seen.__setitem__(n, grad))
    other.register_full_backward_hook(lambda _, dx, dy: seen.__setitem__("x", dx[0]))
    holder = torch.nn.Module()
    holder.inner = other
    holder.forward = lambda x: forward(other, recipe, x)  # type: ignore[method-assign]
    y = torch.func.functional_call(holder, {f"inner.{n}": t for n, t in results.items()}, (x,))
    given = of(tuple(y.shape), "dy")
    for _ in range(2):
        torch.autograd.backward(y, given, inputs=[x], retain_graph=True)
        assert set(seen) == {"x"} and torch.equal(seen.pop("x"), want["x"])
    name_of_weight = next(n for n in leaves if n.endswith("weight") and "norm" not in n)
    (got,) = torch.autograd.grad(y, results[name_of_weight], given, retain_graph=True)
    assert torch.equal(got, want[name_of_weight])
    seen.clear()
    torch.autograd.backward(y, given, inputs=list(leaves.values()))
    seen.pop("x", None)
    assert set(seen) == set(leaves)
    for n, t in leaves.items():
        assert torch.equal(t.grad, want[n]) and torch.equal(seen[n], want[n]), n  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ("Linear", "LayerNormMLP", "GroupedLinear"))
def test_a_main_grad_is_written_by_the_pass_that_asks_for_the_weight(kind):
    recipe = RECIPES["fp8-current"]
    extents = (3, K, N) if kind == "GroupedLinear" else (K, N)
    model = getattr(dt, kind)(*extents, fuse_wgrad_accumulation=True).bfloat16()
    weights = [p for name, p in model.named_parameters() if name.endswith("weight") and "norm" not in name]
    for p in weights:
        p.main_grad = torch.zeros(p.shape)
    whole(model, recipe)
    want = [p.main_grad.clone() for p in weights]
    for p in weights:
        p.main_grad.zero_()
    x = of((ROWS, K)).requires_grad_()
    y = forward(model, recipe, x)
    given = of(tuple(y.shape), "dy")
    torch.autograd.backward(y, given, retain_graph=True, inputs=[x])
    assert not any(p.main_grad.any() for p in weights)
    torch.autograd.backward(y, given, inputs=weights)
    for p, w in zip(weights, want, strict=True):
        assert torch.equal(p.main_grad, w)


@pytest.mark.parametrize(
    ("a", "b", "how"),
    (
        ((ROWS, K), (N, K), {}),
        ((ROWS, N), (N, K), {"trans_b": False}),
        ((ROWS, N), (ROWS, K), {"trans_a": True, "trans_b": False}),
    ),
    ids=("fprop", "dgrad", "wgrad"),
)
def test_products_of_quantized_tensors(a, b, how):
    """`gemm` as a verb multiplies for the gradients that are asked for."""
    qa, qb = [dt.quantize(of(shape, name).requires_grad_(), MXFP8Quantizer()) for shape, name in ((a, "a"), (b, "b"))]
    bias = of((N if how == {} else K,), "bias").requires_grad_()
    y = dt.gemm(qa, qb, bias=bias, **how)
    every, given = (qa, qb, bias), of(tuple(y.shape), "dy")
    want = torch.autograd.grad(y, every, given, retain_graph=True)
    for t, expected in zip(every, want, strict=True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            (got,) = torch.autograd.grad(y, t, given, retain_graph=True)
        assert torch.equal(got, expected)
        assert sum(e.count for e in profile.key_averages() if e.key == "aten::mm") == (t is not bias)


def test_a_node_that_is_called_outside_of_a_pass_computes_everything():
    x = of((ROWS, K)).requires_grad_()
    model = made("Linear", RECIPES["mxfp8"])
    want = whole(copy.deepcopy(model), RECIPES["mxfp8"])
    y = forward(model, RECIPES["mxfp8"], x)
    with torch.no_grad():
        found: Any = y.grad_fn.apply(of(tuple(y.shape), "dy"))  # type: ignore[union-attr]
    found = [t for t in found if t is not None]
    for got, name in zip(found, ("x", "weight", "bias"), strict=True):
        assert torch.equal(got, want[name])


@dataclasses.dataclass
class Product:
    a: Tensor
    b: Tensor | None
    c: Tensor


def test_a_users_op_learns_what_is_asked_for():
    """`asked` names fields in their order, with None among them and fields without a gradient between."""
    seen: list[Any] = []

    def backward(a: Any, needs: Any, saved: Any, grads: Any, asked: Any = None) -> Any:
        seen.append(asked)
        made = {"a": grads[0] * a.c, "c": grads[0] * a.a}
        return [made[name] for name in (asked or needs)]

    op = dt.CustomOp(
        "diptych_test::parts", Product,
        lambda a, needs: ((a.a * a.c,), []),
        lambda a, needs: (dt.to_tensor_proto(a.a, True),),
        backward, keeps=lambda a, needs: ("a", "c"), parts=True,
    )  # fmt: skip
    a, c = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    for b in (None, torch.ones(4)):
        (y,) = op(Product(a, b, c))
        for given in ([a], [c], [a, c]):
            made = torch.autograd.grad(y.sum(), given, retain_graph=True)
            for t, grad in zip(given, made, strict=True):
                assert torch.equal(grad, c if t is a else a)
        assert seen[-3:] == [("a",), ("c",), None]
    (y,) = torch.compile(lambda a, c: op(Product(a, None, c)), fullgraph=True, backend="aot_eager")(a, c)
    assert torch.equal(torch.autograd.grad(y.sum(), c)[0], a)


def test_torch_can_be_asked():
    assert takes_functions() or torch.__version__.startswith("2.11.")


# --- layers that are cut over ranks ----------------------------------------------------------------------------------


def on_rank(rank: int, groups: Any) -> dict[str, list[bool]]:
    found = {}
    for recipe, mode, sequence in itertools.product(
        ("delayed", "current", "mxfp8", "nvfp4 drawn"), ("column", "row"), (False, True)
    ):
        case = Case(recipe, mode, sequence)
        layer, other = [linear(case, groups["data"]) for _ in range(2)]
        for each in (layer, other):
            each.seed_rng(SEED)
        want = cut_step(case, layer, rank, 0)
        part = {k: case.part(k, to_torch(v), rank).contiguous() for k, v in case.tensors(0).items()}
        with torch.no_grad():
            for p, q in zip(other.parameters(), layer.parameters(), strict=True):
                p.copy_(q)
        x = part["x"].requires_grad_()
        with dt.autocast(recipe=EVERY[recipe]):
            y = other(x)
        leaves = {"dx": x, "dw": other.weight, "db": other.bias}
        made = {n: torch.autograd.grad(y, t, part["dy"], retain_graph=True)[0] for n, t in leaves.items()}
        found[str(case)] = [torch.equal(made[n], want[n]) for n in leaves]
        found[f"{case} in a transform"] = transformed(case, groups["data"], other, part, want)
    return found


def transformed(case: Case, group: Any, like: Any, part: Any, want: Any) -> list[bool]:
    """A step by torch.func.vjp, whose collectives run below the transform."""
    layer = linear(case, group)
    layer.seed_rng(SEED)
    parameters = {"weight": like.weight.detach(), "bias": like.bias.detach()}

    def run(x: Tensor, parameters: Any) -> Tensor:
        with dt.autocast(recipe=EVERY[case.recipe]):
            return torch.func.functional_call(layer, parameters, (x,))

    back = torch.func.vjp(run, part["x"].detach(), parameters)[1]
    dx, of_parameters = back(part["dy"])
    got = {"dx": dx, "dw": of_parameters["weight"], "db": of_parameters["bias"]}
    return [torch.equal(got[n], want[n]) for n in got]


@needs_gloo
def test_cut_layers(ranks):
    for rank in ranks:
        assert all(all(equal) for equal in rank.values()), rank
