"""Programs of eager layers: a call that runs as a program gives the bits, kernels and states of the call it repeats."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import diptych.torch as dt
from diptych.common import RECIPES
from diptych.common.layers.plan import linear_plan
from diptych.torch.graph import program
from diptych.torch.layers.linear import _linear
from torch_frontend.graph.test_program import counted


def runs(programs: program.Programs) -> int:
    return sum(len(runs) for known in programs._known.values() for runs in known.runs.values())


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of no other test."""
    for call in (_linear.eager_forward, _linear.eager_backward):
        monkeypatch.setattr(call, "_programs", program.Programs())


def twins(bias: bool = True, device: str = "cpu", held: str = "") -> tuple[dt.Linear, dt.Linear]:
    """Two equal layers. `held`: the name of the recipe that their weights are held quantized by, if they are."""
    torch.manual_seed(0)
    with dt.quantized_model_init(bool(held), RECIPES.get(held)):
        one, other = dt.Linear(32, 64, bias=bias, device=device), dt.Linear(32, 64, bias=bias, device=device)
    other.load_state_dict(one.state_dict())
    for layer in (one, other):
        dt.seed_rng(layer, 1)
    return one, other


def step(layer: dt.Linear, x: torch.Tensor, recipe: Any, wanted: tuple[bool, bool], grad: torch.Tensor) -> list[Any]:
    """Returns y, and the gradients of x, weight and bias. `wanted`: whether x and the weight need theirs."""
    x = x.detach().requires_grad_(wanted[0])
    layer.weight.requires_grad_(wanted[1])
    layer.zero_grad()
    with dt.autocast(recipe=recipe):
        y = layer(x)
    if y.requires_grad:
        y.backward(grad.expand(y.shape))
    return [y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad]


@pytest.mark.parametrize("held", [False, True], ids=["", "held"])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", RECIPES)
def test_programs_give_the_bits_of_single_ops(
    name: str, wanted: tuple[bool, bool], held: bool, device: str, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing values and shapes, a transposed input, and gradients that are dense or one value for all rows."""
    one, other = twins(bias=wanted[0], device=device, held=name if held else "")
    dtype = torch.bfloat16 if name == "nvfp4" else torch.float32
    for i in range(9):
        x = torch.randn((16, 32) if i % 4 < 2 else (2, 16, 32), dtype=dtype, device=device)
        x = x.t().contiguous().t() if i == 8 else x
        grad = torch.randn((16, 64) if i % 2 else (64,), dtype=dtype, device=device)
        got, kernels = counted(lambda x=x, grad=grad: step(one, x, RECIPES[name], wanted, grad))
        with monkeypatch.context() as m:
            m.setattr(_linear.eager_forward, "_replay", None)
            m.setattr(_linear.eager_backward, "_replay", None)
            want, single = counted(lambda x=x, grad=grad: step(other, x, RECIPES[name], wanted, grad))
        if device == "cpu":  # on a GPU a program quantizes small tensors together
            assert kernels == single, i
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), i
        for (key, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b), (i, key)
    assert runs(_linear.eager_forward._programs) > 0
    expected = any(wanted) or one.bias is not None
    assert (runs(_linear.eager_backward._programs) > 0) == expected


def test_histories_that_a_program_writes_count_as_written(fresh: None) -> None:
    layer, x = dt.Linear(32, 48), torch.randn(16, 32)
    for _ in range(4):
        with dt.autocast(recipe=RECIPES["fp8-delayed"]):
            y = layer(x)
        history = next(iter(layer.scale_states.slots().values())).amax_history
        before = history._version
    assert runs(_linear.eager_forward._programs) > 0
    with dt.autocast(recipe=RECIPES["fp8-delayed"]):
        y = layer(x)
    assert history._version > before and y.isfinite().all()


def test_modes_see_single_ops(fresh: None) -> None:
    """A dispatch mode sees the ops of a call that has a program."""
    layer, x, recipe = dt.Linear(32, 48), torch.randn(16, 32), RECIPES["fp8-current"]

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for _ in range(3):
        with dt.autocast(recipe=recipe):
            want = layer(x)
    assert runs(_linear.eager_forward._programs) == 1
    seen: list[str] = []
    with Names(), dt.autocast(recipe=recipe):
        got = layer(x)
    assert torch.equal(got, want) and seen.count("diptych.quantize.default") == 2 and "diptych.gemm.default" in seen


def test_layers_of_many_shapes_get_programs(fresh: None) -> None:
    """They share a schedule where they have one recipe; batches differ in length."""
    layers = [dt.Linear(32, n) for n in range(8, 136, 16)]
    for _ in range(3):
        for layer in layers:
            for rows in (16, 32):
                x = torch.randn(rows, 32)
                with dt.autocast(recipe=RECIPES["mxfp8"]):
                    many, alone = layer(x), torch.cat([layer(part) for part in x.split(16)])
                assert torch.equal(many, alone)
    assert runs(_linear.eager_forward._programs) == 2 * len(layers)


def test_batches_whose_length_keeps_changing_run_op_by_op(fresh: None) -> None:
    """Only few programs are recorded for a layer; other lengths give the same bits without."""
    layer = dt.Linear(32, 48)
    for rows in 2 * list(range(16, 16 * 13, 16)):
        x = torch.randn(rows, 32)
        with dt.autocast(recipe=RECIPES["mxfp8"]):
            many, alone = layer(x), torch.cat([layer(part) for part in x.split(16)])
        assert torch.equal(many, alone), rows
    assert 0 < runs(_linear.eager_forward._programs) <= 8


def test_an_empty_batch_gets_no_program_and_costs_others_none(fresh: None) -> None:
    layer, x = dt.Linear(32, 48), torch.randn(16, 32)
    for rows in (16, 0, 0, 16, 16):
        with dt.autocast(recipe=RECIPES["fp8-current"]):
            assert layer(x[:rows]).shape == (rows, 48)
    assert runs(_linear.eager_forward._programs) == 1


def test_a_tensor_that_is_given_twice(fresh: None) -> None:
    """A call with the same tensor as input and weight must not decide what later calls read."""
    recipe, a, b = RECIPES["fp8-current"], torch.randn(32, 32), torch.randn(32, 32)
    for _ in range(3):
        twice = dt.linear(a, a, None, recipe)
    got = dt.linear(a, b, None, recipe)
    assert not torch.equal(got, twice) and torch.equal(got, dt.linear(a, b.clone(), None, recipe))
    for _ in range(3):
        dt.linear(a, b, None, recipe)
    assert runs(_linear.eager_forward._programs) == 1 and torch.equal(dt.linear(a, a, None, recipe), twice)


def test_results_can_be_changed_in_place_in_every_call(fresh: None) -> None:
    layer = dt.Linear(32, 48)
    for _ in range(4):
        with dt.autocast(recipe=RECIPES["fp8-current"]):
            y = layer(torch.randn(2, 16, 32, requires_grad=True))
        y.add_(1).sum().backward()


def test_products_in_high_precision_take_any_strides(fresh: None) -> None:
    """A transposed gradient is not copied for products that read it as it is."""
    recipe = dataclasses.replace(RECIPES["fp8-current"], backward_override="high_precision")
    x, w = torch.randn(16, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copies.append(str(func)) if "clone" in str(func) else None
            return func(*args, **(kwargs or {}))

    for _ in range(3):
        y = dt.linear(x, w, None, recipe)
        with Copies():
            y.backward(torch.randn(48, 16).t())
    assert not copies


@pytest.mark.parametrize("kept", ["save_original_input", "save_original_weight"])
def test_states_of_the_user_share_no_program_with_those_of_a_module(kept: str, fresh: None) -> None:
    """An update overwrites the scales of states that a user holds, so forward saves them; a module's have a copy."""
    recipe: Any = RECIPES["fp8-delayed"]
    layer, x = dt.Linear(32, 48, bias=False, **{kept: True}), torch.randn(16, 32, requires_grad=True)
    for _ in range(3):
        with dt.autocast(recipe=recipe):
            layer(x).sum().backward()
    assert runs(_linear.eager_forward._programs) == 1
    gradients = []
    for late in (True, False):
        states, x.grad, layer.weight.grad = dt.ScaleStates(linear_plan(recipe, "linear", "")), None, None
        for _ in range(3):
            y = dt.linear(x, layer.weight, None, recipe, state=states, **{kept: late})
            states.update()
            y.sum().backward()
        gradients.append((x.grad, layer.weight.grad))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
