"""The region: nesting, exceptions, threads, and compiled code that reads it or enters it."""

from __future__ import annotations

import threading

import pytest
import torch

import diptych.torch as dt
from diptych.common import DEFAULT_RECIPE, ArgumentError, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from diptych.torch.state.autocast import STATE
from torch_frontend.tools import normal, same

BLOCK, MX = Float8BlockScaling(), MXFP8BlockScaling()


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_regions_nest_and_end():
    assert dt.get_autocast_recipe() is None and not dt.is_autocast_enabled()
    with dt.autocast() as outer:
        assert dt.get_autocast_recipe() == DEFAULT_RECIPE == outer.recipe
        with dt.autocast(recipe=BLOCK):
            assert dt.get_autocast_recipe() is BLOCK
            with dt.autocast(enabled=False):
                assert not dt.is_autocast_enabled()
            with dt.autocast(False, recipe=MX):
                assert dt.get_autocast_recipe() is None
            assert dt.get_autocast_recipe() is BLOCK
        assert dt.is_autocast_enabled()
    assert dt.get_autocast_recipe() is None


def test_exceptions_end_the_region():
    with pytest.raises(KeyError), dt.autocast(recipe=MX):
        raise KeyError
    assert dt.get_autocast_recipe() is None


def test_one_object_may_be_entered_again():
    region = dt.autocast(recipe=MX)
    for _ in range(2):
        with region, dt.autocast(enabled=False), region:
            assert dt.get_autocast_recipe() is MX
        assert dt.get_autocast_recipe() is None


def test_the_state_is_one_object_per_process():
    before = id(STATE)
    with dt.autocast():
        from diptych.torch import autocast as found

        assert found is dt.autocast
    import sys

    assert id(sys.modules["diptych.torch.state.autocast"].STATE) == before


def test_decorator():
    @dt.autocast(recipe=BLOCK)
    def run(n: int):
        """Doc."""
        return [dt.get_autocast_recipe()] + (run(n - 1) if n else [])

    assert run(2) == [BLOCK] * 3
    assert (run.__name__, run.__doc__) == ("run", "Doc.")
    assert dt.get_autocast_recipe() is None
    assert dt.autocast(enabled=False)(dt.get_autocast_recipe)() is None

    with pytest.raises(TypeError, match="its body runs after the region has ended"):
        dt.autocast()(lambda: (yield))

    async def coroutine(): ...

    with pytest.raises(TypeError, match="'coroutine'"):
        dt.autocast()(coroutine)


@pytest.mark.parametrize("recipe", ("fp8-block", Float8BlockScaling, 1))
def test_what_is_no_recipe(recipe):
    with pytest.raises(TypeError, match=r"recipe must be a diptych Recipe or None, got"):
        dt.autocast(recipe=recipe)
    x, model = torch.ones(32, 32), dt.Linear(32, 32)
    takers = {
        "Linear": lambda: dt.Linear(4, 4, recipe=recipe),
        "GroupedLinear": lambda: dt.GroupedLinear(2, 4, 4, recipe=recipe),
        "LayerNormLinear": lambda: dt.LayerNormLinear(4, 4, recipe=recipe),
        "LayerNormMLP": lambda: dt.LayerNormMLP(4, 4, recipe=recipe),
        "quantized_model_init": lambda: dt.quantized_model_init(recipe=recipe),
        "convert": lambda: dt.convert(model, recipe),
        "linear": lambda: dt.linear(x, x, None, recipe),
    }
    for name, take in takers.items():
        with pytest.raises(ArgumentError, match=f"^{name}: recipe must be"):
            take()


@pytest.mark.parametrize("region", (dt.autocast, dt.quantized_model_init))
@pytest.mark.parametrize("recipe", (Float8BlockScaling(), Float8BlockScaling))
def test_a_recipe_in_the_place_of_enabled_is_told_its_name(region, recipe):
    with pytest.raises(ArgumentError, match=r"enabled must be a bool, got Float8BlockScaling, a recipe; pass it"):
        region(recipe)
    with pytest.raises(ArgumentError, match="enabled must be a bool, got str"):
        region("mxfp8")


def test_threads_have_their_own_regions():
    seen, inside, leave = [], threading.Event(), threading.Event()

    def other():
        seen.append(dt.get_autocast_recipe())
        with dt.autocast(recipe=MX):
            inside.set()
            leave.wait(20)

    with dt.autocast(recipe=BLOCK):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(20)
        assert dt.get_autocast_recipe() is BLOCK
        leave.set()
        thread.join()
        assert dt.get_autocast_recipe() is BLOCK
    assert seen == [None]


def test_compiled_code_follows_the_region_around_it(fresh_dynamo):
    """A graph per recipe, one for regions that are disabled and one outside of regions; an equal recipe that is built
    anew compiles nothing."""
    layer = dt.Linear(64, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = normal("x", (4, 64))

    def check(graphs: int, **region):
        with dt.autocast(**region):
            same(compiled(x), layer(x))
        assert _graphs() == graphs, region

    for _ in range(3):
        check(1, recipe=Float8BlockScaling())
    check(2, recipe=MXFP8BlockScaling())
    check(3, enabled=False)
    same(compiled(x), layer(x))
    for recipe in (Float8BlockScaling(), MXFP8BlockScaling()):
        check(4, recipe=recipe)
    check(5)


def test_compiled_code_follows_its_thread(fresh_dynamo):
    layer = dt.Linear(64, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = normal("x", (4, 64))
    high = layer(x)
    with dt.autocast(recipe=MX):
        low = compiled(x)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(compiled(x)))
        thread.start()
        thread.join()
    assert not torch.equal(low, high)
    same(seen[0], high)


def test_regions_inside_of_compiled_code(fresh_dynamo):
    layers = torch.nn.ModuleList(dt.Linear(64, 64) for _ in range(3))

    def step(x):
        with dt.autocast(recipe=Float8BlockScaling()):
            x = layers[0](x)
            with dt.autocast(enabled=False):
                x = layers[1](x)
            x = layers[2](x)
        return x, decorated(x)

    @dt.autocast(recipe=MXFP8BlockScaling())
    def decorated(x):
        return layers[1](x)

    x = normal("x", (4, 64))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for outer in (None, Float8CurrentScaling(), Float8CurrentScaling()):
        with dt.autocast(enabled=outer is not None, recipe=outer):
            before = dt.get_autocast_recipe()
            for got, want in zip(compiled(x), step(x), strict=True):
                same(got, want)
            assert dt.get_autocast_recipe() is before
    assert _graphs() <= 2
