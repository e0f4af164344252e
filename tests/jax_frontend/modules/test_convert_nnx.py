"""convert: unmodified nnx models, trained under every recipe, and the products of their layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import diptych.jax as dj
from diptych.common import CustomRecipe
from jax_frontend import tools

nnx = pytest.importorskip("flax.nnx")
import diptych.jax.nnx as dnnx  # noqa: E402
from jax_frontend.modules.models_nnx import Language, Mixer, Perceptron  # noqa: E402

pytestmark = pytest.mark.sampled

MX, FP8, NVFP4 = dj.MXFP8BlockScaling(), dj.Float8CurrentScaling(), dj.NVFP4BlockScaling()
DELAYED = dj.DelayedScaling(amax_history_len=4)
RECIPES = tools.RECIPES | {
    "custom": CustomRecipe(
        lambda role: (MX if role.name.endswith("down") else dj.Float8CurrentScaling()).quantizer(role)
    )
}
TOKENS = jnp.arange(64).reshape(2, 32) * 7 % 96
IMAGES = tools.normal("images", (2, 32, 32, 3))
WRT = nnx.DiffState(0, dnnx.DIFFERENTIATED)


def language(rules, **options):
    return dj.convert(Language(rngs=nnx.Rngs(0)), rules, verbose=False, **options)


def language_loss(model):
    target = jnp.roll(TOKENS, -1, 1)
    return optax.softmax_cross_entropy_with_integer_labels(model(TOKENS), target).mean()


def mixer_loss(model):
    return optax.softmax_cross_entropy_with_integer_labels(model(IMAGES), jnp.asarray([1, 7])).mean()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind, loss_of", [(Language, language_loss), (Mixer, mixer_loss)], ids=["language", "mixer"])
def test_models_train(kind, loss_of, recipe):
    model = dj.convert(kind(depth=1, rngs=nnx.Rngs(0)), {"head": None, "**": RECIPES[recipe]}, verbose=False)
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_of, argnums=WRT)(model)
        optimizer.update(model, grads)
        dnnx.update_states(model, grads)
        return nnx.state((model, optimizer)), loss

    step = jax.jit(step, donate_argnums=0)
    losses = []
    for _ in range(4):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] and all(map(jnp.isfinite, losses)), losses


def test_parameters_keep_their_objects_and_paths():
    model = Language(rngs=nnx.Rngs(0))
    before = dict(nnx.iter_graph(model))
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    want = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert dj.convert(model, {"blocks/0/**": DELAYED, "**": NVFP4}, verbose=False) is model
    assert [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))] == paths
    tools.same_tree(nnx.to_pure_dict(nnx.state(model, nnx.Param)), want)
    after = dict(nnx.iter_graph(model))
    assert all(after[path] is node for path, node in before.items() if isinstance(node, nnx.Param | nnx.Linear))
    states = [path for path, _ in nnx.to_flat_state(nnx.state(model, dnnx.ScaleStates))]
    assert len(states) == 6 and all(
        path[:2] == ("blocks", 0) and path[-2:] == ("dot_general", "states") for path in states
    )
    random = [path for path, _ in nnx.to_flat_state(nnx.state(model, dnnx.RandomState))]
    assert len(random) == 7 and ("head", "dot_general", "random") in random


@pytest.mark.parametrize("recipe", [MX, DELAYED, NVFP4])
def test_a_layer_has_the_bits_of_dense(recipe):
    layer, plain = nnx.Linear(64, 32, rngs=nnx.Rngs(1)), nnx.Linear(64, 32, rngs=nnx.Rngs(1))
    model = dj.convert(nnx.Dict({"up": layer}), recipe, verbose=False, rngs=nnx.Rngs(5))
    if recipe is NVFP4:  # whose rotation takes bfloat16
        layer.dtype = plain.dtype = jnp.bfloat16
    x = tools.normal("x", (32, 64), "bfloat16" if recipe is NVFP4 else "float32")
    state = None if recipe is not DELAYED else dj.init_state(recipe)
    rng = None if layer.dot_general.random is None else layer.dot_general.random.get_value()
    kernel, bias = (v.get_value().astype(x.dtype) for v in (plain.kernel, plain.bias))
    options = {"recipe": recipe, "name": "up", "state": state, "rng": rng}

    def by_hand(x, kernel):
        return jnp.square(dj.dense(x, kernel.T, record=False, **options) + bias).sum()

    def converted(x, model):
        return jnp.square(model["up"](x)).sum()

    want = by_hand(x, kernel)
    if recipe is DELAYED:  # its gradient needs the states', which training has
        tools.same(converted(x, model), want)
        return
    of_x, of_kernel = jax.grad(by_hand, (0, 1))(x, kernel)
    loss, grads = nnx.value_and_grad(converted, argnums=(0, nnx.DiffState(1, nnx.Param)))(x, model)
    tools.same(loss, want)
    tools.same(grads[0], of_x)
    tools.same(grads[1]["up"]["kernel"].get_value(), of_kernel.astype(jnp.float32))


def test_layers_of_any_axes():
    rngs = nnx.Rngs(0)
    model = nnx.Dict({
        "heads": nnx.Einsum("btd,dhk->bthk", (64, 4, 16), (4, 16), rngs=rngs),
        "each": nnx.Einsum("...hk,hkj->...hj", (4, 16, 32), rngs=rngs),
        "back": nnx.LinearGeneral((4, 32), 64, axis=(-2, -1), rngs=rngs),
        "batch": nnx.LinearGeneral(64, 32, batch_axis={0: 2}, rngs=rngs),
        "lora": nnx.LoRALinear(64, 32, lora_rank=4, rngs=rngs),
    })  # fmt: skip
    kept = nnx.clone(model)
    model["back"].precision = kept["back"].precision = "default"  # which is no wish
    _, report = dj.convert(model, DELAYED, verbose=False, return_report=True)
    assert [m.name for m in report.modules if not m.converted] == ["lora/lora"]
    x = tools.normal("x", (2, 32, 64))
    recipe = {"recipe": DELAYED, "state": dj.init_state(DELAYED), "record": False}
    y = model["heads"](x)
    tools.same(
        y,
        dj.dense_general(x, kept["heads"].kernel[...], contraction="btd,dhk->bthk", **recipe) + kept["heads"].bias[...],
    )
    z = model["each"](y)
    assert model["each"].einsum_op.states.get_value()["input"].scale.shape == (4, 1)
    model["back"](z), model["batch"](x)
    want = dj.dense(x, kept["lora"].kernel[...].T, **recipe) + kept["lora"].bias[...]
    tools.same(model["lora"](x), want + kept["lora"].lora(x))
    assert abs(model["back"](z) - kept["back"](kept["each"](kept["heads"](x)))).max() < 0.5


def test_what_departs_from_flax_is_left_and_named():
    class Doubled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    rngs = nnx.Rngs(0)
    parts = {
        "a": Doubled(32, 32, rngs=rngs), "b": nnx.Linear(32, 32, precision="highest", rngs=rngs),
        "c": nnx.Linear(32, 32, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k), rngs=rngs),
        "d": nnx.Einsum("ab,bc->c", (32, 32), rngs=rngs), "e": nnx.Linear(30, 32, rngs=rngs),
        "f": nnx.LinearGeneral(32, 32, dot_general_cls=lambda: jax.lax.dot_general, rngs=rngs),
    }  # fmt: skip
    with pytest.warns(dj.ConvertWarning) as said:
        _, report = dj.convert(
            nnx.Dict(parts | {"g": nnx.Linear(32, 32, rngs=rngs)}), NVFP4, verbose=False, return_report=True
        )
    why = {m.name: m.why for m in report.modules}
    assert len(said) == len(parts) and not why.pop("g") and said[0].filename == __file__
    for name, words in {
        "a": "overrides __call__", "b": "asks for precision highest", "c": "has a product of its own as dot_general",
        "d": "sums an axis of one operand", "e": "does not fit NVFP4BlockScaling: ",
        "f": "has a dot_general_cls of its own",
    }.items():  # fmt: skip
        assert words in why[name] and any(f"convert: {name} (" in str(w.message) for w in said), why[name]


def test_tied_and_shared_modules_count_once():
    shared = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    tied = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    tied.kernel = shared.kernel
    model = nnx.Dict({"a": shared, "b": nnx.Dict({"again": shared}), "c": tied})
    _, report = dj.convert(model, {"c": None, "**": MX}, verbose=False, return_report=True)
    assert [(m.name, m.parameters) for m in report.modules] == [("a", 64 * 64 + 64), ("c", 64)]
    assert model["b"]["again"].dot_general is model["a"].dot_general


def test_parameters_in_containers_are_counted():
    class Model(nnx.Module):
        def __init__(self):
            self.listed = nnx.List([nnx.Param(jnp.ones((3, 5)))])
            self.plain = nnx.data({"w": nnx.Param(jnp.ones((7, 2))), "more": (nnx.Param(jnp.ones(4)),)})
            self.layer = nnx.Linear(64, 32, rngs=nnx.Rngs(0))

    _, report = dj.convert(Model(), MX, verbose=False, return_report=True)
    assert {m.name: m.parameters for m in report.modules} == {"": 18, "layer": 64 * 32 + 32, "listed": 15}


def test_this_librarys_modules_are_left_and_count_as_converted():
    model = nnx.Dict({"a": dnnx.Linear(64, 64, recipe=MX, rngs=nnx.Rngs(0)), "b": nnx.Linear(64, 64, rngs=nnx.Rngs(0))})
    _, report = dj.convert(model, {"b": DELAYED}, verbose=False, return_report=True)
    assert [m.recipe for m in report.modules] == [MX, DELAYED] and report.left == 0
    with pytest.raises(ValueError, match="matches only 'a'"):
        dj.convert(model, {"a": DELAYED})


def test_what_is_converted_is_not_converted_again():
    model = language({"head": MX})
    with pytest.raises(ValueError, match="'head' is converted already, by MXFP8BlockScaling; give all rules at once"):
        dj.convert(model, {"**": DELAYED})
    assert model.blocks[0].mlp.up.dot_general is jax.lax.dot_general  # nothing was changed
    _, report = dj.convert(model, {"blocks/**": DELAYED}, verbose=False, return_report=True)
    assert {m.recipe for m in report.modules if m.name == "head"} == {MX}


def test_inputs_and_other_rngs_are_refused():
    with pytest.raises(TypeError, match="takes rngs and no inputs"):
        dj.convert(Language(rngs=nnx.Rngs(0)), MX, TOKENS)
    with pytest.raises(TypeError, match=r"rngs must be an nnx\.Rngs, got int"):
        dj.convert(Language(rngs=nnx.Rngs(0)), MX, rngs=3)


def test_a_conversion_that_fails_changes_nothing():
    model = Language(rngs=nnx.Rngs(0))
    with pytest.raises(AttributeError, match="params"):
        dj.convert(model, {"blocks/**": MX, "head": NVFP4}, rngs=nnx.Rngs(dropout=0), verbose=False)
    assert model.blocks[0].mlp.up.dot_general is jax.lax.dot_general


@pytest.mark.parametrize("recipe", [DELAYED, NVFP4])
def test_stacked_layers_have_stacked_states(recipe):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return Perceptron(64, 64, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return x + layer(x)

    stack, x = make(nnx.Rngs(0)), tools.normal("x", (32, 64), "bfloat16")
    dj.convert(stack, recipe, verbose=False)
    loss = lambda stack: jnp.square(run(x, stack).astype(jnp.float32)).mean()  # noqa: E731
    grads = nnx.jit(nnx.grad(loss, argnums=WRT))(stack)
    dnnx.update_states(stack, grads)
    if recipe is DELAYED:
        scale = stack.up.dot_general.states.get_value()["input"].scale
        assert scale.shape == (3, 1) and len(set(scale.ravel().tolist())) == 3
    else:
        random = stack.up.dot_general.random.get_value()
        assert random.shape == (3, 4) and len({tuple(r) for r in random.tolist()}) == 3


def test_names_are_the_roles_and_in_profiles():
    names = set()

    def factory(role):
        names.add(role.name)
        return MX.quantizer(role)

    model = language({"blocks/*/mlp/*": CustomRecipe(factory)})
    assert names - {""} == {f"blocks.{i}.mlp.{part}" for i in range(2) for part in ("up", "down")}
    text = jax.jit(lambda: model(TOKENS)).lower().as_text(debug_info=True)
    assert "blocks.1.mlp.up" in text
