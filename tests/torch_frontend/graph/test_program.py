"""Programs: a node that runs again as a program gives the bits and the kernels of the call that it repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import RECIPES, QuantizerRole
from diptych.core import _core
from diptych.torch.functional import quantize as quantize_verbs
from diptych.torch.graph import program
from diptych.torch.layers.linear import _linear
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.constants import Constants

pytestmark = pytest.mark.sampled


def kernel_calls() -> dict[str, int]:
    return {f"{row['op']} {row['kernel']}": row["calls"] for row in _core.kernel_table()}


def counted(call: Any) -> tuple[Any, dict[str, int]]:
    _core.reset_calls()
    out = call()
    return out, {k: n for k, n in kernel_calls().items() if n}


def programs(held: program.Programs | None) -> int:
    assert held is not None
    return sum(len(runs) for known in held._known.values() for runs in known.runs.values())


CELLS = [pytest.param(name, graded, marks=() if i % 2 == graded else pytest.mark.slow)
         for i, name in enumerate(RECIPES) for graded in (False, True)]  # fmt: skip


@pytest.mark.parametrize(("name", "graded"), CELLS)
def test_calls_that_run_again(name: str, graded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other values, other shapes and a transposed input, each as often as it takes to run from a program.

    With the tests each recipe in one way; the other waits for a long sweep.
    """
    for held in ("_programs", "_backward_programs"):  # none of other tests, which would give way to new ones
        monkeypatch.setattr(_linear, held, program.Programs())
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, other = dt.Linear(32, 48), dt.Linear(32, 48)
    other.load_state_dict(eager.state_dict())
    dt.seed_rng(eager, 1)
    dt.seed_rng(other, 1)
    compiled = torch.compile(other, fullgraph=True, dynamic=True)
    dtype = torch.bfloat16 if name == "nvfp4" else torch.float32
    for i in range(12):
        x = torch.randn((16, 32), dtype=dtype) if i % 4 else torch.randn((2, 16, 32), dtype=dtype)
        x = x.t().contiguous().t() if i % 4 == 3 else x
        with torch.set_grad_enabled(graded), dt.autocast(recipe=RECIPES[name]):
            y, wanted = counted(lambda x=x: eager(x))
            z, calls = counted(lambda x=x: compiled(x))
        assert torch.equal(y, z) and (calls == wanted or i == 0)
        if graded:
            for layer, out in ((eager, y), (other, z)):
                layer.zero_grad()
                out.float().square().sum().backward()
            assert eager.weight.grad is not None and other.weight.grad is not None
            assert torch.equal(eager.weight.grad, other.weight.grad)
    assert programs(_linear._programs) > 0
    # Stochastic rounding computes a random state for each call, and delayed scaling logs amaxes.
    repeated = graded and name not in ("nvfp4", "fp8-delayed")
    assert (programs(_linear._backward_programs) > 0) == repeated


def test_held_weights_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose weight is held quantized gets the weight's shape beside its tensors."""
    for held in ("_programs", "_backward_programs"):
        monkeypatch.setattr(_linear, held, program.Programs())
    torch._dynamo.reset()
    with dt.quantized_model_init(recipe=RECIPES["mxfp8"]):
        layer = dt.Linear(32, 64, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)
    for i in range(4):
        x = torch.randn(32, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(i))
        made = []
        for net in (layer, compiled):
            own = x.clone().requires_grad_()
            layer.zero_grad()
            with dt.autocast(recipe=RECIPES["mxfp8"]):
                y = net(own)
            y.float().square().sum().backward()
            made.append((y, own.grad, layer.weight.grad))
        assert all(map(torch.equal, *made))
    assert programs(_linear._programs) == programs(_linear._backward_programs) == 1


def double(x: torch.Tensor, quantizer: Any) -> list[torch.Tensor]:
    buffers = quantize_ops.quantize(x, quantizer)
    return [quantize_ops.dequantize(quantize_ops.copies(quantizer, buffers)[0], x.dtype), buffers[0]]  # type: ignore[arg-type]


def test_a_program() -> None:
    quantizer = RECIPES["mxfp8"].quantizer(QuantizerRole("linear", "input")).with_usage(columnwise=False)
    runs, constants = program.Programs(), Constants(("a",))
    for shape in ((4, 32), (3, 5, 64), (4, 32)):
        for _ in range(4):
            x = torch.randn(shape)
            for mine, theirs in zip(runs(constants, [x], double, x, quantizer), double(x, quantizer), strict=True):
                assert mine.shape == theirs.shape and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert len(runs._known[id(constants)].runs) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda x: [x + 1],  # other ops
        lambda x: [x],  # an argument
        lambda x: [*2 * [quantize_verbs.rng_state(1)]],
        lambda x: program.refuse() or [x.new_empty(3)],
    ],
)
def test_no_program(call: Any) -> None:
    x = torch.ones(4)
    results, run, _ = program.record(lambda: call(x), [x])
    assert run is None and len(results) in (1, 2)


def test_errors_stop_recording() -> None:
    x = torch.ones(4, 32)
    with pytest.raises(ZeroDivisionError):
        program.record(lambda: [x.new_empty(1 // 0)], [x])
    assert torch.equal(quantize_ops.amax(x), torch.ones(1))
