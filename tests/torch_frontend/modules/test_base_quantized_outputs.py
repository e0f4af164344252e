"""Quantized tensors between modules, and as outputs that train, eagerly and compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    Quantizer,
    QuantizerRole,
    linear_plan,
)
from diptych.core import reset_calls
from torch_frontend import composed
from torch_frontend import layer_cases as layers
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same, values

pytestmark = pytest.mark.sampled

MX = MXFP8BlockScaling()
K, N = 96, 64
ROWS = 32
MODES = ("eager", "aot_eager")
DELAYED = [n for n, r in RECIPES.items() if isinstance(r, DelayedScaling)]


def input_quantizer(name: str, module: str = "linear") -> Quantizer:
    return RECIPES[name].quantizer(QuantizerRole(module, "input"))


def as_result(q: Quantizer) -> Quantizer:
    """A result has no delayed scale."""
    return Float8CurrentScalingQuantizer(fp8_dtype=q.fp8_dtype) if q.needs_scale else q  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Between:
    """A recipe whose outputs are quantized as its inputs are, but for modules called "last"."""

    name: str

    def __call__(self, role: QuantizerRole) -> Quantizer | None:
        if role.tensor not in role.RESULTS:
            return RECIPES[self.name].quantizer(role)
        wanted = role.tensor == "output" and not role.name.startswith("last")
        return as_result(input_quantizer(self.name, role.module)) if wanted else None


def between(name: str) -> CustomRecipe:
    return CustomRecipe(Between(name), quantize_results=True)


def compiled(fn: Any, mode: str, **options: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode, **options)


def chain(**last: Any) -> torch.nn.Sequential:
    first = layers.layer(K, N, name="first")
    return torch.nn.Sequential(first, layers.layer(N, K, name="second", **last))


def named(model: torch.nn.Sequential) -> torch.nn.Sequential:
    model[-1].name = "last"
    return model


def x_for(name: str, k: int = K) -> torch.Tensor:
    return layers.x_for(name, ROWS, k)


def run(fn: Any, model: Any, x: torch.Tensor, recipe: Any, dy: Any = None) -> dict[str, torch.Tensor]:
    """`layers.run`, also of mixtures from a fresh random state."""
    if linear_plan(recipe).needs_rng:
        dt.seed_rng(model, layers.SEED)
    return layers.run(fn, model, x, recipe, dy)


# --- a quantized output into the next module -------------------------------------------------------------------------


def _modes(names: Any, compiled: Any) -> list[Any]:
    """(recipe, mode): all eagerly, some compiled; a long sweep compiles the others."""
    cells = [(n, "eager") for n in names]
    return cells + [(n, "aot_eager") if n in compiled else layers.slow(n, "aot_eager") for n in names]


@pytest.mark.parametrize(("name", "mode"), _modes(layers.STATELESS, ("fp8-block", "nvfp4")))
def test_a_chain_is_that_of_plain_outputs(name, mode):
    """The first module quantizes what the second one would: no other bits, no quantizing more, no round trip."""
    x, dy, model, plain = x_for(name), normal("dy", (ROWS, K), layers.dtype_of(name)), named(chain()), named(chain())
    want = run(plain, plain, x, RECIPES[name], dy)
    reset_calls()
    got = run(compiled(model, mode), model, x, between(name), dy)
    assert (calls("quantize"), calls("dequantize"), calls("gemm")) == (6, 0, 6)
    layers.same_step(got, want)


@pytest.mark.parametrize(("name", "mode"), _modes(RECIPE_NAMES, ("fp8-delayed", "mxfp8", "nvfp4")))
def test_a_chain_step_by_step(name, mode):
    """Against the same modules with the quantizing between them written out; states go on alike."""
    model, apart, recipe = named(chain()), named(chain()), between(name)
    fn = compiled(model, mode)

    def written_out(x):
        y = apart[0](x)
        return apart[1](dt.quantize(y, as_result(input_quantizer(name))))

    plain = CustomRecipe(RECIPES[name].quantizer)
    for i in range(3):
        x = x_for(name) * (i + 1)
        layers.same_step(run(fn, model, x, recipe), run(written_out, apart, x, plain))
    states = {k: t for k, t in model.state_dict().items() if "scale_states" in k}
    assert bool(states) == (name in DELAYED)
    for key, t in states.items():
        same(t, apart.state_dict()[key], key)
        if key == "1.scale_states.input.amax_history":  # recorded by whoever quantizes it: here nobody
            assert not t.any()


@pytest.mark.parametrize("name", ("mxfp8", layers.slow(DELAYED[0])))
def test_a_chain_through_inductor(name):
    model, other, x = named(chain()), named(chain()), x_for(name)
    fn = compiled(model, "inductor", dynamic=True)
    for rows in (ROWS, ROWS // 2):
        layers.same_step(run(fn, model, x[:rows], between(name)), run(other, other, x[:rows], between(name)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("name", "mode"),
    [*[(n, "eager") for n in RECIPE_NAMES], layers.slow("nvfp4", "aot_eager"), (DELAYED[0], "aot_eager")],
)
def test_every_module_gives_and_takes(name, mode):
    """LayerNormLinear into Linear into LayerNormMLP into Linear; the norm takes what its input stands for."""
    x = x_for(name, N)

    def made():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            dt.LayerNormLinear(N, K), dt.Linear(K, N), dt.LayerNormMLP(N, K), dt.Linear(N, N, name="last")
        )

    model, apart = made(), made()
    seen: list[type] = []
    for layer in apart[:3]:
        layer.register_forward_hook(lambda *args: seen.append(type(args[2])))

    def eager(x):
        return apart[3](apart[2](values(apart[1](apart[0](x)))))

    got = run(compiled(model, mode), model, x, between(name))
    layers.same_step(got, run(eager, apart, x, between(name)))
    assert seen == [dt.QuantizedTensor] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("kind", ("linear", "layernorm_linear", "layernorm_mlp"))
def test_an_output_is_of_one_type(kind, training, mode):
    model = {
        "linear": lambda: layers.layer(K, K),
        "layernorm_linear": lambda: composed.linear(K, K),
        "layernorm_mlp": lambda: composed.mlp(K, N),
    }[kind]()
    fn, x = compiled(model, mode), normal("x", (2, 16, K)).requires_grad_()
    with dt.autocast(recipe=between("mxfp8")), torch.set_grad_enabled(training):
        q = fn(x)
    assert isinstance(q, dt.QuantizedTensor) and q.requires_grad == training and q.shape == x.shape
    assert q.quantizer == MXFP8Quantizer() and q.columnwise_data is not None
    with pytest.raises(NotImplementedError, match=r"dequantize\(\) on it first"):
        q + 1
    if training:
        q.backward(torch.ones(2, 16, K))
        assert type(x.grad) is torch.Tensor and x.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", MODES)
def test_only_the_norms_output_is_used(mode):
    def step(fn, model):
        x = normal("x", (ROWS, K)).requires_grad_()
        with dt.autocast(recipe=between("mxfp8")):
            y, z = fn(x)
        assert isinstance(y, dt.QuantizedTensor) and type(z) is torch.Tensor
        z.square().sum().backward()
        return x.grad, model.layer_norm_weight.grad

    results = []
    for way in (mode, "eager"):
        model = composed.linear(K, N, return_layernorm_output=True)
        results.append(step(compiled(model, way), model))
    for a, b in zip(*results, strict=True):
        same(a, b)
        assert a.abs().sum() > 0


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("mode", MODES)
def test_checkpoints(mode, reentrant):
    model, other, x = named(chain()), named(chain()), x_for("mxfp8")

    def fn(x):
        return dt.checkpoint(model[1], dt.checkpoint(model[0], x, use_reentrant=reentrant), use_reentrant=reentrant)

    layers.same_step(run(compiled(fn, mode), model, x, between("mxfp8")), run(other, other, x, between("mxfp8")))


@pytest.mark.parametrize("mode", MODES)
def test_a_chain_broken_by_the_region_of_a_graph(mode):
    """Each module a graph of its own: a quantized tensor that needs grad leaves one and enters the other."""
    model, other, x = named(chain()), named(chain()), x_for("fp8-current")
    first, second = compiled(model[0], mode), compiled(model[1], mode)
    recipe = between("fp8-current")
    layers.same_step(run(lambda x: second(first(x)), model, x, recipe), run(other, other, x, recipe))


# --- quantizers of the user's own ------------------------------------------------------------------------------------


class Halving(MXFP8Quantizer):
    """Quantizes half of what it is given."""

    def quantize_impl(self, x, quantize):
        return quantize(x * 0.5, MXFP8Quantizer(rowwise=self.rowwise, columnwise=self.columnwise))


class Other(MXFP8Quantizer):
    """Makes another format than it says."""

    def quantize_impl(self, x, quantize):
        return quantize(x, Float8CurrentScalingQuantizer())


@dataclasses.dataclass(frozen=True)
class Outputs:
    kind: type[Quantizer]

    def __call__(self, role):
        return None if role.name == "last" else self.kind() if role.tensor == "output" else MXFP8Quantizer()


@pytest.mark.parametrize("mode", MODES)
def test_an_output_by_a_quantizer_of_the_users_own(mode):
    recipe = CustomRecipe(Outputs(Halving), quantize_results=True)
    layer, model, x = layers.layer(), named(chain()), x_for("mxfp8")
    y = run(layer, layer, x, MX)["y"]
    fn = compiled(layer, mode)
    for grad in (True, False):
        with dt.autocast(recipe=recipe), torch.set_grad_enabled(grad):
            q = fn(x)
        assert q.quantizer == Halving() and q.requires_grad == grad
        same(q.dequantize(), dt.quantize(y * 0.5, MXFP8Quantizer()).dequantize())
    eager = run(model, model, x, recipe)
    layers.same_step(run(compiled(model, mode), model, x, recipe), eager)
    wrong = CustomRecipe(Outputs(Other), quantize_results=True)
    message = r"has the format .*, and its quantize_impl made QuantizedTensor"
    with dt.autocast(recipe=wrong), pytest.raises(Exception, match=message):
        compiled(layers.layer(), mode)(x)


class Block(dt.QuantizedModule):
    """Two layers of a module of the user's own, the first's output quantized."""

    layers = ("fc1", "last")

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(normal(n, s)) for n, s in (("a", (N, K)), ("b", (K, N))))

    def forward(self, x):
        return self.quantized_linear(self.quantized_linear(x, self.a, None, "fc1"), self.b, None, "last")


@pytest.mark.parametrize("name", layers.STATELESS[:1] + tuple(DELAYED[:1]))
def test_between_the_layers_of_a_module_of_the_users_own(name):
    block, other, x = Block(), Block(), x_for(name)
    fn = compiled(block, "aot_eager")
    for _ in range(2):
        got, want = (run(f, m, x, between(name)) for f, m in ((fn, block), (other, other)))
        layers.same_step(got, want)
