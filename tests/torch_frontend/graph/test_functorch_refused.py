"""Calls that transforms of torch.func cannot take are refused by name, and compiled transforms run eagerly."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import diptych.torch as dt
from diptych.common import RECIPES, MXFP8Quantizer
from diptych.common.errors import UnsupportedError
from diptych.torch.graph import eager_only
from torch_frontend.graph.test_functorch import MODULES, Called, equal, grad, vjp, vmap
from torch_frontend.graph.test_traced import ROW_MAP, ROWS, K, N, of
from torch_frontend.layer_cases import slow


def refusals() -> dict[str, tuple[Any, str]]:
    x, recipe = of((ROWS, K)), RECIPES["fp8-current"]
    model = dt.Linear(K, N).bfloat16()

    def region(run: Any, recipe: Any = recipe) -> Any:
        def call(*tensors: Tensor) -> Any:
            with dt.autocast(recipe=recipe):
                return run(*tensors)

        return call

    def twice(kind: str) -> Any:
        call = Called(kind, "mxfp8" if kind in MODULES else None)

        def total(x: Tensor) -> Tensor:
            return call(x, *call.tensors[1:])[0].float().square().sum()

        return lambda: grad(lambda x: grad(total)(x).float().sum())(call.tensors[0])

    def mixed(kind: str, place: int) -> Any:
        """By another operand, which reaches the gradient by nothing but what was saved."""
        call = Called(kind, "mxfp8" if kind in MODULES else None)

        def dx(*others: Tensor) -> Tensor:
            return grad(lambda x: call(x, *others)[0].float().sum())(call.tensors[0]).float().sum()

        return lambda: grad(dx, argnums=place - 1)(*call.tensors[1:])

    ways = ("fuse_wgrad_accumulation", "delay_wgrad_compute")
    options: list[Any] = [{how: True} for how in ways]
    fused, delayed = [dt.Linear(K, N, **given).bfloat16() for given in options]
    fused.weight.main_grad = torch.zeros(N, K)  # type: ignore[assignment]
    states = dt.prepare(dt.Linear(K, N).bfloat16(), RECIPES["fp8-delayed"])
    both = {n: t.detach() for n, t in (*states.named_parameters(), *states.named_buffers()) if t.is_floating_point()}
    drawn = dt.Linear(K, N).bfloat16()
    q = MXFP8Quantizer()
    operand = dt.quantize(x, q)

    def calibrated(x: Tensor) -> Tensor:
        with dt.autocast(enabled=False, calibrating=True, recipe=RECIPES["fp8-delayed"]):
            return model(x).float().sum()

    return {
        **{
            f"second derivative of {kind}": (twice(kind), "has no second derivative")
            for kind in (*MODULES, "norm", "activation", "moe_permute")
        },
        **{
            f"mixed second derivative of {kind} by {place}": (mixed(kind, place), "has no second derivative")
            for kind, places in {**dict.fromkeys(MODULES, (1, 2)), "norm": (1,), "moe_unpermute": (1,)}.items()
            for place in places
        },
        "jvp": (lambda: torch.func.jvp(region(model), (x,), (x,)), "forward-mode"),
        "jacfwd": (lambda: torch.func.jacfwd(region(model))(x[:16]), "forward-mode"),
        "hessian": (lambda: torch.func.hessian(lambda x: region(model)(x).float().sum())(x[:16]), "forward-mode"),
        "jvp of grad": (
            lambda: torch.func.jvp(grad(lambda x: region(model)(x).float().sum()), (x,), (x,)), "forward-mode",
        ),
        "random bits": (
            lambda: vmap(region(drawn, RECIPES["nvfp4"]))(torch.stack([x, x])),
            r"stochastic rounding.*randomness=\"different\"",
        ),
        "the same random bits": (
            lambda: vmap(region(drawn, RECIPES["nvfp4"]), randomness="same")(torch.stack([x, x])),
            "stochastic rounding",
        ),
        "main_grad": (lambda: vjp(region(fused), x)[1](of((ROWS, N))), "fuse_wgrad_accumulation"),
        "main_grad of a weight of the transform": (
            lambda: grad(region(lambda w: functional_call(fused, {"weight": w}, (x,)).float().sum()))(fused.weight),
            "passes.*make the module without fuse_wgrad_accumulation",
        ),
        "backward_dw": (lambda: vjp(region(delayed), x)[1](of((ROWS, N))), "delay_wgrad_compute"),
        "microbatches": (
            lambda: vmap(region(lambda x: model(x, is_first_microbatch=True)))(torch.stack([x, x])),
            "is_first_microbatch",
        ),
        "calibration": (lambda: grad(calibrated)(x), "calibration"),
        "states as arguments": (
            lambda: grad(
                region(lambda t: functional_call(states, t, (x,)).float().sum(), RECIPES["fp8-delayed"])
            )(both),
            "parameters alone",
        ),
        "quantize": (
            lambda: grad(lambda x: dt.quantize(x, q).dequantize().float().sum())(x), "quantized tensors have no place",
        ),
        "quantize under vmap": (
            lambda: vmap(lambda x: dt.quantize(x, q).dequantize())(torch.stack([x, x])), "have no place",
        ),
        "quantize_stack": (
            lambda: vmap(lambda x: dt.quantize_stack(x, q).dequantize())(torch.stack([x, x])[None]),
            "take its class away",
        ),
        "gemm": (lambda: grad(lambda b: dt.gemm(operand, operand, bias=b).float().sum())(of((ROWS,), "b")), "no place"),
        "moe_permute_and_quantize": (
            lambda: grad(lambda x: dt.moe_permute_and_quantize(x, ROW_MAP, q).dequantize().float().sum())(x),
            "a quantized result",
        ),
        "quantized results": (
            lambda: vmap(region(lambda x: model(x, fp8_output=True)))(torch.stack([x, x])), "a quantized result",
        ),
        "no example": (lambda: vmap(region(model))(x.new_empty(0, ROWS, K)), "size 0"),
        "gemm_into": (
            lambda: vmap(lambda acc: dt.gemm_into(acc, operand, operand))(torch.zeros(2, ROWS, ROWS)),
            "writes to an argument",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("what", refusals())
def test_what_has_no_place_is_refused_by_name(what):
    call, said = refusals()[what]
    with pytest.raises((UnsupportedError, ValueError), match=said):
        call()


# --- compiled --------------------------------------------------------------------------------------------------------


@pytest.fixture
def unwarned():
    torch._dynamo.reset()
    eager_only.TRANSFORMS.warned = False


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("inside", "fp8-current"), ("around", "fp8-delayed"),
        slow("inside", "fp8-delayed"), slow("around", "fp8-current"),
    ],
)  # fmt: skip
def test_transforms_leave_graphs(where, name, unwarned):
    """Dynamo runs the transform eagerly, with one warning; under fullgraph it says why not. Before, it made a graph
    whose gradients were zeros."""
    calls = [Called("Linear", name) for _ in range(3)]
    x = calls[0].tensors[0]

    def step(call: Called, make: Any = lambda fn: fn) -> Any:
        others = call.tensors[1:]
        names = [n for n, _ in call.model.named_parameters()]

        def around(x: Tensor) -> Tensor:
            return functional_call(call.model, dict(zip(names, others, strict=True)), (x,)).float().sum()

        def inside(x: Tensor) -> Tensor:
            return call(x, *others)[0].float().sum()

        if where == "inside":
            return make(grad(inside))(x)
        with dt.autocast(recipe=RECIPES[name]):
            return make(grad(around))(x)

    want = step(calls[0])
    with pytest.warns(eager_only.EagerWarning, match=r"torch\.func.*runs eagerly"):
        got = step(calls[1], lambda fn: torch.compile(fn, backend="aot_eager"))
    equal([got], [want])
    assert got.any()
    equal(calls[1].states(), calls[0].states())
    torch._dynamo.reset()
    with warnings.catch_warnings(), pytest.raises(Exception, match=r"torch\.func(.|\n)*torch\.compiler\.disable"):
        warnings.simplefilter("error", eager_only.EagerWarning)  # it was given
        step(calls[2], lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True))


def test_high_precision_stays_in_the_graph(unwarned):
    call = Called("Linear", "fp8-current")
    x, *others = call.tensors
    names = [n for n, _ in call.model.named_parameters()]

    def loss(x: Tensor) -> Tensor:
        with dt.autocast(enabled=False):
            return functional_call(call.model, dict(zip(names, others, strict=True)), (x,)).float().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error", eager_only.EagerWarning)
        equal([torch.compile(grad(loss), backend="aot_eager", fullgraph=True)(x)], [grad(loss)(x)])


def test_compiled_code_inside_of_a_transform(unwarned):
    """Dynamo leaves compiled functions out there, by itself or because the layer does."""
    call = Called("Linear", "fp8-current")
    x, model = call.tensors[0], call.model
    compiled = torch.compile(model, backend="aot_eager")
    with dt.autocast(recipe=RECIPES["fp8-current"]):
        for run in (lambda fn: grad(lambda x: fn(x).float().sum())(x), lambda fn: vmap(fn)(torch.stack([x, x]))):
            equal([run(compiled).detach()], [run(model).detach()])
