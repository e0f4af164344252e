"""The contents of graphs: nothing is quantized twice, and no copy is made that is not read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition

import diptych.torch as dt
from diptych.common import RECIPES, Float8BlockScaling, Float8CurrentScaling, Recipe
from diptych.torch.graph.program import Programs
from diptych.torch.primitives import quantize as quantize_ops
from torch_frontend import tools
from torch_frontend.tools import normal, quantizer, same

pytestmark = pytest.mark.sampled

E4M3 = quantizer("fp8_e4m3_tensor")
BLOCKS = quantizer("fp8_e4m3_1x128")


def graphs(
    fn: Any, *args: Any, backend: str = "inductor", inference_cse: bool = False
) -> tuple[Any, list[Counter[str]]]:
    """Returns fn's compiled result, and diptych's ops in each graph after the backend's own passes.

    `inference_cse`: whether torch's elimination of common subexpressions, which it runs on training graphs only, runs
    too.
    """
    found: list[Counter[str]] = []

    def note(graph: torch.fx.Graph) -> None:
        names = [str(n.args[0] if "functionalized" in str(n.target) else n.target) for n in graph.nodes]
        found.append(Counter(n for n in names if n.startswith("diptych")))

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        note(fx_graph_cse(graph.graph) if inference_cse else graph.graph)
        return graph.forward

    torch._dynamo.reset()
    if backend == "aot":
        made_by: Any = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    else:
        made_by = "inductor"
    options = {"post_grad_custom_post_pass": _pass(note), "force_disable_caches": True}
    with torch._inductor.config.patch(options):
        made = torch.compile(fn, fullgraph=True, backend=made_by)(*args)
        if made.requires_grad:
            made.sum().backward()
    return made, found


def _pass(note: Any) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Note(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            note(graph)

        def uuid(self) -> None:
            return None

    return Note()


# --- once ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ("aot", "inductor"))
def test_the_same_tensor_is_quantized_once(backend):
    def fn(x: Tensor) -> Tensor:
        a, b = dt.quantize(x, E4M3), dt.quantize(x, quantizer("fp8_e4m3_tensor"))  # equal, and not the same object
        return dt.gemm(a, b) + dt.dequantize(dt.quantize(x, BLOCKS)).sum()

    x = normal("once", (16, 64))
    y, (forward, *_) = graphs(fn, x.clone().requires_grad_(), backend=backend)
    assert forward["diptych.quantize.default"] == 2
    torch.testing.assert_close(y, fn(x), rtol=1e-4, atol=1e-3)  # Inductor sums in another order
    if backend == "aot":
        _, (forward,) = graphs(fn, x, backend=backend, inference_cse=True)
        assert forward == {"diptych.quantize.default": 2, "diptych.gemm.default": 1, "diptych.dequantize.default": 1}


@pytest.mark.parametrize("backend", ("aot", "inductor"))
def test_projections_share_their_input_s_copies(backend):
    """q, k and v from the verbs: three weights and one input are quantized, forward and backward."""

    def fn(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = [dt.gemm(dt.quantize(x, E4M3), dt.quantize(w, E4M3)) for w in (q, k, v)]
        return y[0] * y[1] + y[2]

    x, *weights = [normal(n, (16, 16)).requires_grad_() for n in "xqkv"]
    y, found = graphs(fn, x, *weights, backend=backend)
    assert found[0]["diptych.quantize.default"] == 4 and found[0]["diptych.gemm.default"] == 3
    torch.testing.assert_close(y, fn(x, *weights), rtol=1e-4, atol=1e-3)
    # What the backward multiplies: each copy is dequantized once, wherever the partitioner puts it.
    assert sum(f["diptych.dequantize.default"] for f in found) == 4
    assert sum(f["diptych.quantize.default"] for f in found) == 4


def test_stochastic_rounding_is_not_shared():
    """Two states of the generator are two results."""
    noisy = tools.named("nvfp4 stochastic")
    rng = dt.rng_state(1)

    def fn(x: Tensor, rng: Tensor) -> Tensor:
        return dt.dequantize(dt.quantize(x, noisy, rng=rng)) - dt.dequantize(dt.quantize(x, noisy, rng=rng + 2))

    x = normal("noisy", (16, 64))
    y, (forward,) = graphs(fn, x, rng, backend="aot")
    assert forward["diptych.quantize.default"] == 2
    same(y, fn(x, rng))


# --- no copy in vain -------------------------------------------------------------------------------------------------


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """The copies of each call of the quantize kernel from now on, whoever calls it."""
    made: list[tuple[bool, bool]] = []
    real = quantize_ops._core.quantize

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(real_core, name)

        def quantize(self, *args: Any) -> Any:
            rowwise, columnwise = args[9], args[11]
            made.append((rowwise is not None, columnwise is not None))
            return real(*args)

    real_core = quantize_ops._core
    monkeypatch.setattr(quantize_ops, "_core", Spy())
    # What another test's node learned would run again as one call.
    monkeypatch.setattr(Programs, "__call__", lambda self, constants, inputs, call, *args: call(*args))
    return made


RECIPE_OF: dict[str, Recipe] = {n: RECIPES[n] for n in ("fp8-current", "fp8-block", "mxfp8")}


CELLS = [(r, False) for r in RECIPE_OF]
CELLS += [(r, True) if r == "fp8-block" else pytest.param(r, True, marks=pytest.mark.slow) for r in RECIPE_OF]


@pytest.mark.parametrize(("recipe", "compiled"), CELLS)
def test_which_copies_a_layer_makes(recipe, compiled, monkeypatch):
    """Rowwise ones alone without a backward; a columnwise one of x where the weight is trained, of w where x is."""
    both, rows = (True, True), (True, False)
    layer = dt.Linear(64, 32)
    x = normal("copies", (48, 64))
    for x_grad, w_grad, grad_mode, want in (
        (True, True, False, [rows, rows]),
        (False, False, True, [rows, rows]),
        (True, True, True, [both, both]),
        (True, False, True, [rows, both]),
        (False, True, True, [both, rows]),
    ):
        layer.weight.requires_grad_(w_grad)
        layer.bias.requires_grad_(w_grad)
        torch._dynamo.reset()
        fn = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        x = x.detach().requires_grad_(x_grad)
        with torch.set_grad_enabled(grad_mode), dt.autocast(recipe=RECIPE_OF[recipe]):
            made = spied(monkeypatch)
            fn(x)
            monkeypatch.undo()
        # A quantizer of the weight's own may take two calls; what counts is what was made, in order.
        assert _merged(made, want) == want, (x_grad, w_grad, grad_mode)


def _merged(made: list[tuple[bool, bool]], want: list[tuple[bool, bool]]) -> list[tuple[bool, bool]]:
    """Calls of one copy each, of one tensor, as one call of both."""
    calls, out = list(made), []
    for both in want:
        call = calls.pop(0)
        if both == (True, True) and call == (True, False):
            assert calls.pop(0) == (False, True)
            call = (True, True)
        out.append(call)
    assert not calls
    return out


def test_compiled_inference_computes_no_columnwise_copy():
    """Not even in fake: the node's results are those of inference, and nothing is saved."""
    model = dt.LayerNormMLP(64, 128).eval()
    x = normal("inference", (32, 64))
    with torch.no_grad(), dt.autocast(recipe=Float8BlockScaling()):
        _, (forward,) = graphs(model, x)
        assert forward == {"diptych.layernorm_mlp.default": 1}


@pytest.mark.parametrize("recipe", RECIPE_OF)
def test_autograd_saves_quantized_tensors(recipe):
    """Between forward and backward lives one byte an element of x and w, compiled as eagerly."""
    layer = dt.Linear(256, 128, bias=False)
    x = normal("saved", (512, 256)).requires_grad_()
    sizes = []
    for fn in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch._dynamo.reset()
        saved: dict[int, Tensor] = {}
        with dt.autocast(recipe=RECIPE_OF[recipe]):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, into=saved: into.setdefault(t.data_ptr(), t), lambda t: t
            ):
                y = fn(x)
            own = [t for t in saved.values() if t.data_ptr() not in (x.data_ptr(), layer.weight.data_ptr())]
            sizes.append(sum(t.nbytes for t in own))
            assert not [t for t in own if t.dtype == torch.float32 and t.numel() >= 512 * 128]
        y.sum().backward()
    elements = x.numel() + layer.weight.numel()
    assert sizes[0] == sizes[1] and elements <= sizes[0] <= elements * 1.2


def test_the_verbs_save_quantized_tensors():
    x, w = normal("vx", (512, 256)).requires_grad_(), normal("vw", (128, 256)).requires_grad_()

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return dt.gemm(dt.quantize(x, E4M3), dt.quantize(w, E4M3))

    for call in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager")):
        torch._dynamo.reset()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=saved: into.append(t) or t, lambda t: t):
            y = call(x, w)
        assert sorted(t.numel() for t in saved) == [1, 1, w.numel(), x.numel()]
        assert {t.dtype for t in saved} == {torch.float8_e4m3fn, torch.float32}
        y.sum().backward()


def test_an_equal_recipe_is_no_new_graph():
    """Equal recipes are one graph, whatever object they are."""
    layer = dt.Linear(64, 32)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        with dt.autocast(recipe=Float8CurrentScaling()):
            compiled(normal("equal", (16, 64))).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
