"""convert: unmodified linen models, trained under every recipe, under flax's transformations, and called in any way."""

from __future__ import annotations

import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import optax
import pytest

import diptych.jax as dj
from diptych.common import CustomRecipe, UnsupportedError
from jax_frontend import tools

nn = pytest.importorskip("flax.linen")
import diptych.jax.linen as dl  # noqa: E402
from jax_frontend.modules.models_linen import Language, Mixer, Perceptron, Scanned  # noqa: E402

pytestmark = pytest.mark.sampled

MX, FP8, NVFP4 = dj.MXFP8BlockScaling(), dj.Float8CurrentScaling(), dj.NVFP4BlockScaling()
DELAYED = dj.DelayedScaling(amax_history_len=4)
RECIPES = tools.RECIPES | {
    "custom": CustomRecipe(lambda role: (MX if role.name.endswith("Dense_1") else FP8).quantizer(role))
}


class Holds(nn.Module):
    """Runs a module that it got as a field."""

    inner: nn.Module

    def __call__(self, x):
        return self.inner(x)


KEY = jax.random.key(0)
TOKENS = jnp.arange(64).reshape(2, 32) * 7 % 96
IMAGES = tools.normal("images", (2, 32, 32, 3))
X = tools.normal("x", (32, 64), "bfloat16")


def convert(model, rules, *inputs, **options):
    return dj.convert(model, rules, *inputs, verbose=False, **options)


def language_loss(model, variables, rngs):
    logits = model.apply(variables, TOKENS, rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(TOKENS, -1, 1)).mean()


def mixer_loss(model, variables, rngs):
    logits = model.apply(variables, IMAGES, rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray([1, 7])).mean()


def products(model, variables, *args, **kwargs):
    """The number of products on quantized operands in a call."""
    jaxpr = jax.make_jaxpr(lambda variables: model.apply(variables, *args, **kwargs))(variables)
    return len(tools.eqns(jaxpr, "diptych_gemm"))


@pytest.mark.slow  # test_convert_nnx.py trains such a model with the tests
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "model, x, loss_of",
    [(Language(depth=1), TOKENS, language_loss), (Mixer(depth=1), IMAGES, mixer_loss)], ids=["language", "mixer"],
)  # fmt: skip
def test_models_train(model, x, loss_of, recipe):
    made = convert(model, {"head": None, "**": RECIPES[recipe]}, x)
    variables, adam = made.init(KEY, x), optax.adam(3e-3)
    tools.same_tree(variables["params"], model.init(KEY, x)["params"])

    def step(variables, moments, key):
        rngs = {dl.RNG: key, "dropout": key}
        loss, grads = jax.value_and_grad(lambda variables: loss_of(made, variables, rngs))(variables)
        updates, moments = adam.update(grads["params"], moments)
        variables = dl.update_states(variables, grads)
        return variables | {"params": optax.apply_updates(variables["params"], updates)}, moments, loss

    step, moments, losses = jax.jit(step, donate_argnums=(0, 1)), adam.init(variables["params"]), []
    for i in range(4):
        variables, moments, loss = step(variables, moments, jax.random.key(i))
        losses.append(float(loss))
    assert losses[-1] < losses[0] and all(map(jnp.isfinite, losses)), losses


@pytest.mark.parametrize("recipe", [MX, DELAYED, NVFP4])
def test_a_layer_has_the_bits_of_dense(recipe):
    """The layer of a whole model, by what goes in and comes out of it."""
    made = convert(Language(), {"**/Dense_0": recipe}, TOKENS)
    variables = made.init(KEY, TOKENS)
    rngs = {dl.RNG: jax.random.key(3)}
    _, seen = made.apply(variables, TOKENS, rngs=rngs, capture_intermediates=True, mutable=["intermediates"])
    block, params = seen["intermediates"]["blocks_1"], variables["params"]["blocks_1"]["Dense_0"]
    x, y = block["LayerNorm_1"]["__call__"][0], block["Dense_0"]["__call__"][0]
    state = dj.init_state(recipe) or None
    rng = dj.rng_state(0) if recipe is NVFP4 else None  # forward rounds to nearest
    kernel, bias = (params[name].astype(x.dtype) for name in ("kernel", "bias"))
    tools.same(y, dj.dense(x, kernel.T, recipe=recipe, state=state, rng=rng, record=False) + bias)


def test_the_report_is_there_before_any_parameter():
    shape = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    with pytest.warns(dj.ConvertWarning, match="head.*does not fit NVFP4BlockScaling.*left as it is") as said:
        model, report = dj.convert(Mixer(), {"**/places/*": FP8, "**": NVFP4}, shape, train=False, verbose=False,
                                   return_report=True)  # fmt: skip
    assert said[0].filename == __file__
    recipes = {m.name: m.recipe for m in report.modules}
    assert recipes["MixerBlock_1/places/Dense_0"] == FP8 and recipes["MixerBlock_1/channels/Dense_0"] == NVFP4
    assert recipes["head"] is recipes["stem"] is None
    params = model.init(KEY, IMAGES, train=False)["params"]
    assert report.converted + report.left == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_every_way_to_call_a_model_is_converted():
    model = Language(depth=1)
    made = convert(model, {"**/Dense_*": MX}, TOKENS)
    variables = made.init(KEY, TOKENS)
    plain, want = model.apply(variables, TOKENS, method="encode"), made.apply(variables, TOKENS, method="encode")
    assert (plain != want).any()
    tools.same(made.apply(variables, TOKENS, method=Language.encode), want)
    tools.same(made.bind(variables).encode(TOKENS), want)
    tools.same(nn.apply(lambda m: m.encode(TOKENS), made)(variables), want)
    bound = made.bind(variables)
    assert bound.blocks[0].width == 64
    tools.same(bound.encode(TOKENS), want)  # after its setup has run
    tools.same(made.clone().apply(variables, TOKENS, method="encode"), want)
    tools.same(model.apply(variables, TOKENS, method="encode"), plain)  # the original is as it was
    results = []
    thread = threading.Thread(target=lambda: results.append(made.apply(variables, TOKENS, method="encode")))
    thread.start()
    thread.join()
    tools.same(results[0], want)

    class Outer(nn.Module):
        inner: nn.Module

        def __call__(self, tokens):
            return self.inner.encode(tokens)

    inside = {"params": {"inner": variables["params"]}}
    tools.same(Outer(made).apply(inside, TOKENS), want)
    tools.same(Outer(model).apply(inside, TOKENS), plain)
    assert isinstance(made, Language) and type(made).__name__ == "Language"
    assert made == convert(model, {"**/Dense_*": MX}, TOKENS) and hash(made) == hash(made.clone())


def test_other_models_that_a_model_applies_are_not_converted():
    teacher = nn.Dense(64, name="teacher")
    of_teacher = teacher.init(KEY, X)

    class Student(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64)(x) + teacher.apply(of_teacher, x)

    made = convert(Student(), MX, X)
    assert products(made, made.init(KEY, X), X) == 1


@pytest.mark.parametrize("recipe", [MX, DELAYED, NVFP4])
def test_layers_under_scan_and_remat(recipe):
    """A scan hands on the collections and streams that it names."""
    model = Scanned(axes=(dl.STATES,), streams=(dl.RNG,))
    made, report = convert(model, recipe, X, return_report=True)
    names = [m.name for m in report.modules]
    assert names == [f"ScanCheckpointStep_0/Perceptron_0/Dense_{i}" for i in range(2)] and report.left == 0
    variables = made.init(KEY, X)
    tools.same_tree(variables["params"], model.init(KEY, X)["params"])

    def loss(variables):
        return jnp.square(made.apply(variables, X, rngs={dl.RNG: KEY}).astype(jnp.float32)).mean()

    grads = jax.jit(jax.grad(loss))(variables)
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(grads["params"]))
    if recipe is DELAYED:
        news = dl.update_states(variables, grads)[dl.STATES]["ScanCheckpointStep_0"]["Perceptron_0"]["Dense_0"]
        scale = news["DotGeneral_0"]["states"]["input"].scale
        assert scale.shape == (2, 1) and scale[0] != scale[1]


@pytest.mark.parametrize("recipe", [MX, DELAYED, NVFP4])
@pytest.mark.parametrize("make", [
    lambda: nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64)]), lambda: Holds(Holds(nn.Dense(64))),
    lambda: Holds(nn.remat(Perceptron)(32)), lambda: nn.remat(Perceptron)(32), lambda: nn.jit(Perceptron)(32),
], ids=["sequential", "field", "field-remat", "remat", "jit"])  # fmt: skip
def test_layers_in_fields_and_models_of_transformed_classes(make, recipe):
    model = make()
    made, report = convert(model, recipe, X, return_report=True)
    assert report.left == 0 and len({m.name for m in report.modules}) == len(report.modules)
    variables = made.init(KEY, X)
    tools.same_tree(variables["params"], model.init(KEY, X)["params"])
    for again in (made, made.clone()):
        assert products(again, variables, X) == len(report.modules)
    assert products(model, {"params": variables["params"]}, X) == 0


def test_a_converted_model_in_a_field_keeps_its_own_rules():
    inner = convert(Perceptron(32), {"Dense_0": MX}, X)
    outer = Holds(inner)
    variables = outer.init(KEY, X)
    assert products(outer, variables, X) == 1


def test_converted_models_are_pickled_and_copied():
    made = convert(Perceptron(32), {"Dense_0": MX}, X)
    variables = made.init(KEY, X)
    want = made.apply(variables, X)
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert again == made
        tools.same(again.apply(variables, X), want)


def test_an_error_of_the_trace_says_where_it_was():
    with pytest.raises(TypeError) as said:
        convert(Perceptron(32), MX, X, rngs=KEY)
    assert any("raised while model.init was traced" in note for note in said.value.__notes__)


def test_a_scan_without_the_states_is_refused():
    with pytest.raises(TypeError, match=f"variables lack their states: pass the collection '{dl.STATES}'"):
        convert(Scanned(), DELAYED, X)


def test_layers_under_vmap_and_jit():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            many = nn.vmap(
                nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
            )
            return nn.jit(Perceptron)(32)(many(64, name="many")(x)).sum(0)

    made, report = convert(Model(), MX, X, return_report=True)
    assert report.left == 0 and {m.kind for m in report.modules} == {"Dense"}
    assert products(made, made.init(KEY, X), X) == 3


Jitted = nn.jit(Perceptron)  # which keeps compiled code for all models


class UsesJitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Jitted(32, name="part")(x)


def test_compiled_code_of_another_conversion_is_not_run():
    plain = UsesJitted()
    variables = plain.init(KEY, X)
    results = [plain.apply(variables, X)]
    for rules in (MX, FP8, {"part/Dense_0": MX}):
        made = convert(UsesJitted(), rules, X)
        results += [made.apply(variables, X), made.apply(variables, X)]
        tools.same(results[-1], results[-2])
        with jax.disable_jit():
            tools.same(results[-1], made.apply(variables, X))
    tools.same(plain.apply(variables, X), results[0])
    assert len({r.tobytes() for r in map(tools.bits, results)}) == 4


class UsesJittedTwice(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Jitted(32, name="a")(x) + Jitted(32, name="b")(x)


def test_modules_that_share_compiled_code_are_all_found():
    reports = [convert(UsesJittedTwice(), MX, X, return_report=True)[1] for _ in range(2)]
    want = [f"{part}/Dense_{i}" for part in "ab" for i in range(2)]
    for report in reports:
        assert [m.name for m in report.modules if m.converted and m.kind == "Dense"] == want
    with pytest.raises(UnsupportedError, match=r"nn\.jit runs one compiled code .* 'b/Dense_0' and 'a/Dense_0' diff"):
        convert(UsesJittedTwice(), {"a/**": MX, "b/**": None}, X)


def test_layers_of_any_axes():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Einsum((64, 4, 16), "btd,dhk->bthk", name="heads")(x)
            y = nn.Einsum((4, 16, 16), use_bias=False, name="each")(y, "bthk,hkj->bthj")
            y = nn.DenseGeneral(64, axis=(-2, -1), name="back")(y)
            return nn.DenseGeneral(32, batch_dims=0, name="batch")(y)

    x = tools.normal("x", (2, 32, 64))
    made, report = convert(Model(), DELAYED, x, return_report=True)
    assert report.left == 0
    variables = made.init(KEY, x)
    tools.same_tree(variables["params"], Model().init(KEY, x)["params"])
    want, got = Model().apply(variables, x), made.apply(variables, x)
    assert 0 < abs(want - got).max() < 1
    _, seen = made.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    kernel, bias = (variables["params"]["heads"][name] for name in ("kernel", "bias"))
    product = dj.dense_general(x, kernel, contraction="btd,dhk->bthk", recipe=DELAYED, state=dj.init_state(DELAYED),
                               record=False)  # fmt: skip
    tools.same(seen["intermediates"]["heads"]["__call__"][0], product + bias)


def test_what_departs_from_flax_is_left_and_named():
    class Doubled(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Own(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", self.kernel_init, (64, self.features), x.dtype)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Doubled(64, name="a")(x)  # its product is flax's
            x = Own(64, name="b")(x)
            x = nn.Dense(64, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k), name="c")(x)
            x = nn.Dense(64, precision="highest", name="d")(x)
            x = dl.Dense(64, recipe=FP8, name="e")(x)
            return nn.Dense(30, name="f")(x) + self.param("g", nn.initializers.zeros, (30, 1)).sum()

    with pytest.warns(dj.ConvertWarning) as said:
        made, report = convert(Model(), NVFP4, X, return_report=True)
    rows = {m.name: m for m in report.modules}
    assert rows["a"].recipe == NVFP4 and rows["e"].recipe == FP8
    assert (
        rows["b"].why == rows["c"].why == "has a product of its own" and rows["d"].why == "asks for precision highest"
    )
    assert (
        rows["f"].why.startswith("does not fit NVFP4BlockScaling: ") and rows[""].why == "no layer that convert knows"
    )
    assert len(said) == 4 and products(made, made.init(KEY, X), X) == 2


def test_misuse_is_named():
    model = Perceptron(64)
    with pytest.raises(TypeError, match=r"pass the arguments of model\.init after the rules"):
        convert(model, MX)
    made = convert(model, MX, X)
    with pytest.raises(ValueError, match="the model is converted already; convert the original"):
        convert(made, FP8, X)
    with pytest.raises(TypeError, match="the model is bound to variables"):
        convert(model.bind(model.init(KEY, X)), MX, X)


def test_names_are_the_roles():
    names = set()

    def factory(role):
        names.add(role.name)
        return MX.quantizer(role)

    convert(Language(), {"blocks_*/Dense_?": CustomRecipe(factory)}, TOKENS)
    assert names - {""} == {f"blocks_{i}.Dense_{j}" for i in range(2) for j in range(2)}
