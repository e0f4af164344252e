"""Value objects as constants of compiled graphs: registration, guards on equality, users' own quantizers."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys

import pytest
import torch
from torch._library.opaque_object import is_opaque_type, is_opaque_value_type

import diptych.torch as dt
from diptych.common import RECIPES, Float8BlockScaling, MXFP8Quantizer, NVFP4Quantizer, QuantizerRole, find_format
from diptych.common.quantizers import Quantizer
from diptych.common.recipes import QParams, Recipe
from diptych.common.value import Value
from diptych.torch.primitives import constants as opaque
from diptych.torch.private.opaque import OpaqueMeta
from torch_frontend.tools import normal, same


class Clipping:
    """quantize_impl of the quantizers below: what is left after `limit`, in a built-in format."""

    def quantize_impl(self, x, quantize):
        inner = MXFP8Quantizer(rowwise=self.rowwise, columnwise=self.columnwise)
        return quantize(x.clamp(-self.limit, self.limit), inner)

    @functools.cached_property
    def format(self):
        return find_format("float8_e4m3fn", "float8_e8m0fnu", (1, 32))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ByValue(Clipping, Quantizer):
    """Defined after diptych.torch was imported; no default for one field."""

    limit: float

    def _value_fields(self):
        return ("rowwise", "columnwise", "limit")


class ByIdentity(Clipping, Quantizer):
    def __init__(self, limit: float, **usage: bool):
        super().__init__(**usage)
        object.__setattr__(self, "limit", limit)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DerivedByValue(Clipping, MXFP8Quantizer):
    limit: float = 1.0


class DerivedByIdentity(Clipping, MXFP8Quantizer):
    limit: float  # declared, because torch 2.11 lets Dynamo read nothing else

    def __init__(self, limit: float, **usage: bool):
        super().__init__(**usage)
        object.__setattr__(self, "limit", limit)


CUSTOM = {
    "value": lambda limit: ByValue(limit=limit),
    "identity": ByIdentity,
    "derived value": lambda limit: DerivedByValue(limit=limit),
    "derived identity": DerivedByIdentity,
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plain(Quantizer):
    """No quantize_impl, only a format: an own name for what the core does."""

    label: str

    def _value_fields(self):
        return ("rowwise", "columnwise", "label")

    @functools.cached_property
    def format(self):
        return find_format("float8_e5m2", "float8_e8m0fnu", (1, 32))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MyRecipe(Recipe):
    limit: float = 1.0

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return ByValue(limit=self.limit)


def test_classes_compared_by_value_are_registered():
    # The lab's own values enter no graph: a dataclass right below Value is registered on request only.
    classes = [c for c in opaque.tree(Value) if opaque.by_value(c) and not c.__module__.startswith("diptych.lab")]
    names = {c.__name__ for c in classes}
    assert {"MXFP8Quantizer", "QParams", "MMParams", "QuantizerRole", "Float8BlockScaling"} <= names
    assert {"ByValue", "DerivedByValue", "Plain", "MyRecipe"} <= names
    assert not {"Value", "Quantizer", "ByIdentity"} & names
    for cls in classes:
        assert is_opaque_value_type(cls), cls
    assert not is_opaque_type(Quantizer) and not is_opaque_type(ByIdentity)


def test_members_are_the_public_attributes():
    names = set(opaque.members(ByValue))
    assert {"format", "spec", "with_usage", "rowwise", "columnwise", "limit"} <= names
    assert not {"quantize_impl", "fingerprint"} & names
    assert {n for n in names if n.startswith("_")} == {"__eq__"}


@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_quantizers(kind, device):
    x = normal("custom", (2, 8, 64), device=device)
    quant = CUSTOM[kind](0.5)
    assert quant.custom
    q = dt.quantize(x, quant)
    want = dt.quantize(x.clamp(-0.5, 0.5), MXFP8Quantizer())
    assert q.quantizer == want.quantizer and torch.equal(q, want)
    one = dt.quantize(x, quant.with_usage(columnwise=False))
    assert one.columnwise_data is None
    same(one.rowwise_data, want.rowwise_data)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_quantizers_compile(kind, backend):
    """From a closure and as an argument; another value is another graph, an equal one is not."""
    x = normal("custom", (4, 64))
    quant = CUSTOM[kind](0.5)
    torch._dynamo.reset()
    closed = torch.compile(lambda x: dt.quantize(x, quant), fullgraph=True, backend=backend)
    passed = torch.compile(lambda x, quant: dt.quantize(x, quant).dequantize(), fullgraph=True, backend=backend)
    assert torch.equal(closed(x), dt.quantize(x, quant))
    for limit in (0.5, 0.25):
        other = CUSTOM[kind](limit)
        same(passed(x, other), dt.quantize(x, other).dequantize())
    torch._dynamo.utils.counters.clear()
    again = CUSTOM[kind](0.25)
    same(passed(x, again), dt.quantize(x, again).dequantize())
    if "value" in kind:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("kind", ("identity", "derived identity"))
def test_state_of_a_quantizer_is_not_baked_in(kind):
    x, quant = normal("custom", (4, 64)), CUSTOM[kind](0.5)
    torch._dynamo.reset()
    step = torch.compile(lambda x: dt.quantize(x, quant).dequantize(), fullgraph=True, backend="aot_eager")
    for limit in (0.5, 0.25):
        object.__setattr__(quant, "limit", limit)
        same(step(x), dt.quantize(x, quant).dequantize())


def test_custom_quantizers_are_made_inside_of_a_graph_too():
    x = normal("custom", (4, 64))

    def step(x, recipe):
        inner = recipe.quantizer(QuantizerRole())
        return dt.quantize(x, inner).dequantize() + dt.quantize(x, ByValue(limit=2.0)).dequantize()

    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x, MyRecipe())
    same(got, step(x, MyRecipe()))


class Passing(Quantizer):
    """Hands the options of its call to a built-in quantizer."""

    def __init__(self, inner: Quantizer):
        object.__setattr__(self, "inner", inner)
        super().__init__()

    @functools.cached_property
    def format(self):
        return self.inner.format

    def quantize_impl(self, x, quantize):
        return quantize(x, self.inner)


def test_options_reach_the_quantizer_inside():
    x = normal("options", (16, 64), "bfloat16")
    one, rng = torch.full((1,), 9.0), dt.rng_state(3, 4)
    inner = NVFP4Quantizer(stochastic_rounding=True)
    options = {"amax": one, "columnwise_amax": one * 2, "rng": rng}
    assert torch.equal(dt.quantize(x, Passing(inner), **options), dt.quantize(x, inner, **options))
    torch._dynamo.reset()
    outer = Passing(inner)
    step = torch.compile(lambda x: dt.quantize(x, outer, **options), fullgraph=True, backend="aot_eager")
    assert torch.equal(step(x), dt.quantize(x, inner, **options))
    assert torch.equal(dt.quantize(x, Passing(Passing(inner)), rng=rng), dt.quantize(x, inner, rng=rng))
    with pytest.raises(ValueError, match="rng is for stochastic rounding"):
        dt.quantize(x, Passing(NVFP4Quantizer()), rng=rng)
    with pytest.raises(ValueError, match="has none"):
        dt.quantize(x, Passing(MXFP8Quantizer()), amax_group="a group")


def test_quantize_impl_must_quantize():
    class Forgetful(Clipping, Quantizer):
        def quantize_impl(self, x, quantize):
            quantize(x, MXFP8Quantizer())

    with pytest.raises(TypeError, match=r"Forgetful\.quantize_impl returned NoneType"):
        dt.quantize(torch.zeros(4, 64), Forgetful())


def test_a_format_under_an_own_name_compiles():
    x, quant = normal("plain", (4, 64)), Plain(label="a")
    assert not quant.custom
    torch._dynamo.reset()
    q = torch.compile(lambda x: dt.quantize(x, quant), fullgraph=True, backend="aot_eager")(x)
    assert q.quantizer == quant and torch.equal(q, dt.quantize(x, quant))


def test_graphs_guard_on_the_value():
    x = normal("x", (4, 64))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    role = QuantizerRole(tensor="input")
    step = torch.compile(lambda x, recipe: dt.quantize(x, recipe.quantizer(role)), fullgraph=True, backend="aot_eager")
    changed = Float8BlockScaling(fp8_quant_fwd_inp=QParams(power_2_scale=False))
    same_again = Float8BlockScaling()
    for recipe, graphs in ((Float8BlockScaling(), 1), (same_again, 1), (changed, 2), (same_again, 2)):
        same(step(x, recipe).rowwise_data, dt.quantize(x, recipe.quantizer(role)).rowwise_data)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_recipes_are_built_inside_of_a_graph_too():
    x = normal("x", (4, 64))

    def step(x):
        recipe = Float8BlockScaling(x_block_scaling_dim=2)
        return dt.quantize(x, recipe.quantizer(QuantizerRole(tensor="input")).with_usage(columnwise=False))

    torch._dynamo.reset()
    same(torch.compile(step, fullgraph=True, backend="aot_eager")(x).rowwise_data, step(x).rowwise_data)


def test_swap_reaches_the_whole_tree():
    """Classes that exist take torch 2.11's metaclass, later ones inherit it, and values stay as they were."""

    class OwnMeta(type):
        pass

    class Base(metaclass=OwnMeta):
        def __init__(self, n):
            self.n = n

        def __eq__(self, other):
            return type(other) is type(self) and self.n == other.n

        def __hash__(self):
            return hash(self.n)

    class Child(Base):
        pass

    class Grandchild(Child):
        pass

    class Sibling(Base):
        pass

    before = Grandchild(3)
    opaque.swap_metaclass(Base, OpaqueMeta)
    metas = {type(c) for c in (Base, Child, Grandchild, Sibling)}
    assert len(metas) == 1 and issubclass(metas.pop(), (OpaqueMeta,))
    assert isinstance(Base, OwnMeta)
    assert isinstance(before, Child) and not isinstance(before, Sibling) and not isinstance(3, Base)
    assert before == Grandchild(3) and hash(before) == hash(3) and before != Child(3)

    class Both(Grandchild, Sibling):
        pass

    assert isinstance(Both, OpaqueMeta) and Both(1) == Both(1)
    opaque.swap_metaclass(Base, OpaqueMeta)  # a second time changes nothing
    assert len({type(c) for c in (Base, Child, Grandchild, Sibling, Both)}) == 1


def test_plain_metaclasses_cannot_be_swapped():
    class Plain:
        pass

    with pytest.raises(TypeError):
        opaque.swap_metaclass(Plain, OpaqueMeta)


def test_values_keep_their_meaning():
    for recipe in RECIPES.values():
        assert isinstance(recipe, Recipe) and isinstance(recipe.quantizer(QuantizerRole()), Quantizer)
        assert eval(*_evaluable(recipe)) == recipe
    for kind in ("value", "derived value"):
        assert eval(*_evaluable(CUSTOM[kind](0.5))) == CUSTOM[kind](0.5)


def _evaluable(value):
    text, names = value.__fx_repr__()
    return text, dict(names)


@pytest.mark.slow
def test_without_opaque_types_everything_still_runs_eagerly():
    code = """
import sys, warnings
import torch
hidden = sys.modules["torch._opaque_base"]
sys.modules["torch._opaque_base"] = None
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as seen:
    import diptych.torch as dt
sys.modules["torch._opaque_base"] = hidden  # torch itself needs it; only diptych is to miss it
assert any("no opaque types" in str(w.message) for w in seen), seen
x = torch.randn(4, 64)
layer = dt.Linear(64, 32)
with dt.autocast():
    eager = layer(x)
    assert torch.equal(torch.compile(layer, backend="eager")(x), eager)
eager.sum().backward()
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "fine" in done.stdout, done.stderr
