"""Modules for linen against the functions that they wrap."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import diptych.jax as dj
from diptych.common import RECIPES, ArgumentError, CustomRecipe, ShapeError, UnsupportedError
from jax_frontend import tools

nn = pytest.importorskip("flax.linen")
from flax.training.train_state import TrainState  # noqa: E402

import diptych.jax.linen as dl  # noqa: E402

pytestmark = pytest.mark.sampled

X = tools.normal("x", (2, 32, 64), "bfloat16")  # which a Hadamard transform needs
DELAYED = dj.DelayedScaling(amax_history_len=4)
NVFP4 = dj.NVFP4BlockScaling(disable_rht=True)
KEY, BITS = jax.random.key(0), {"rngs": {dl.RNG: jax.random.key(5)}}
seam = functools.partial


class Drawn(nn.Module):
    """The random state that a module at the root draws first."""

    @nn.compact
    def __call__(self):
        return dj.rng_state(self.make_rng(dl.RNG))


def loss_of(model, variables, x, **options):
    return jnp.square(model.apply(variables, x, **options)).mean()


def given(recipe, variables):
    """States and random bits of a module at the root."""
    out = {"recipe": recipe}
    if dl.STATES in variables:
        out["state"] = variables[dl.STATES]["states"]
    if tools.linear_plan(recipe).needs_rng:
        out["rng"] = Drawn().apply({}, **BITS)
    return out


def compare(model, variables, x, function, **options):
    """Bits of the loss and of all gradients, with states. `function`: of the parameters, with a call's options."""

    def by_hand(variables):
        return jnp.square(function(variables["params"], **given(model.recipe, variables), **options)).mean()

    got = jax.jit(jax.value_and_grad(lambda v: loss_of(model, v, x, **BITS)))(variables)
    tools.same_tree(got, jax.jit(jax.value_and_grad(by_hand))(variables))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_dense_is_the_function_with_the_initial_values_of_flax(recipe):
    model, plain = dl.Dense(32, recipe=recipe), nn.Dense(32)
    variables = model.init(KEY, X)
    tools.same_tree(variables["params"], plain.init(KEY, X)["params"])
    compare(model, variables, X, lambda p, **o: dj.dense(X, p["kernel"].T, p["bias"], **o))


SHAPES = {  # module, and the same product of matrices
    "general": (
        seam(dl.DenseGeneral, (2, 32), axis=(-1, 0)),
        lambda x, p, **o: dj.dense(
            x.transpose(1, 0, 2).reshape(32, 128), p["kernel"].reshape(128, 64).T, p["bias"].reshape(64), **o
        ).reshape(32, 2, 32),
    ),
    "einsum": (
        seam(dl.Einsum, (2, 64, 32), "btd, hdk -> bthk"),
        lambda x, p, **o: dj.dense(
            x, p["kernel"].transpose(0, 2, 1).reshape(64, 64), p["bias"].reshape(64), **o
        ).reshape(2, 32, 2, 32),
    ),
    "batched": (
        seam(dl.DenseGeneral, 32, batch_dims=(0,)),
        lambda x, p, **o: jax.vmap(
            lambda x, k, b, state: dj.dense(x, k.T, b, **{**o, "state": state}), in_axes=(0, 0, 0, 0)
        )(x, p["kernel"], p["bias"], o.get("state")),
    ),
    "batched einsum": (
        seam(dl.Einsum, (64, 32, 2), "btd,dkb->tkb"),
        lambda x, p, **o: jax.vmap(
            lambda x, k, b, state: dj.dense(x, k.T, b, **{**o, "state": state}), in_axes=(0, 2, 1, 0), out_axes=2
        )(x, p["kernel"], p["bias"], o.get("state")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", [*RECIPES.values()], ids=[*RECIPES])
@pytest.mark.parametrize("kind", SHAPES)
def test_general_products_are_those_of_matrices(kind, recipe):
    make, function = SHAPES[kind]
    model = make(recipe=recipe, bias_init=nn.initializers.normal())
    variables = model.init(KEY, X)
    compare(model, variables, X, seam(function, X))


@pytest.mark.parametrize("recipe", [None, DELAYED, NVFP4], ids=["plain", "delayed", "nvfp4"])
@pytest.mark.parametrize("kind", ["general", "batched", "einsum"])
def test_shapes_and_initial_values_are_those_of_flax(kind, recipe):
    plain = {
        "general": nn.DenseGeneral((2, 32), axis=(-1, 0)), "batched": nn.DenseGeneral(32, batch_dims=(0,)),
        "einsum": nn.Einsum((2, 64, 32), "btd, hdk -> bthk"),
    }[kind]  # fmt: skip
    model = SHAPES[kind][0](recipe=recipe)
    got, want = model.init(KEY, X)["params"], plain.init(KEY, X)["params"]
    tools.same_tree(got, want)
    y = plain.apply({"params": want}, X)
    assert model.apply(model.init(KEY, X), X).shape == y.shape
    if recipe is None:
        x = X.astype(jnp.float32)
        assert jnp.allclose(model.apply({"params": got}, x), plain.apply({"params": want}, x), atol=1e-5)


@pytest.mark.parametrize("recipe", [dj.MXFP8BlockScaling(), DELAYED, NVFP4], ids=["mxfp8", "delayed", "nvfp4"])
def test_the_layers_of_flax_run_through_their_seams(recipe):
    op = seam(dl.DotGeneral, recipe=recipe)
    model, own = nn.Dense(32, use_bias=False, dot_general_cls=op), dl.Dense(32, use_bias=False, recipe=recipe)
    variables, of_own = model.init(KEY, X), own.init(KEY, X)
    assert variables.keys() == of_own.keys()
    if recipe is not NVFP4:  # whose random bits depend on the module's place
        x = X.astype(jnp.float32)  # as flax promotes it
        tools.same(jax.jit(model.apply)(variables, x), jax.jit(own.apply)(of_own, x))
    grads = jax.grad(lambda v: loss_of(model, v, X, **BITS))(variables)
    news = dl.update_states(variables, grads)
    assert jax.tree.structure(news) == jax.tree.structure(variables)
    if recipe is DELAYED:
        x = X.astype(jnp.float32)
        want = dl.update_states(of_own, jax.grad(lambda v: loss_of(own, v, x))(of_own))
        tools.same_tree(news[dl.STATES]["DotGeneral_0"], want[dl.STATES])
    batched = nn.DenseGeneral(32, batch_dims=(0,), dot_general_cls=op)
    variables = batched.init(KEY, X)
    dl.update_states(variables, jax.grad(lambda v: loss_of(batched, v, X, **BITS))(variables))


@pytest.mark.kept
def test_the_seam_of_an_einsum():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (64, 32))
            return dl.EinsumOp(recipe=DELAYED)("btd,dk->btk", x, kernel)

    model = Model()
    variables = model.init(KEY, X)
    states = variables[dl.STATES]["EinsumOp_0"]["states"]
    tools.same(model.apply(variables, X), dj.dense(X, variables["params"]["kernel"].T, recipe=DELAYED, state=states))


class Model(nn.Module):
    """A model of two layers. `twice`: the first is called again."""

    recipe: object
    twice: bool = False

    @nn.compact
    def __call__(self, x):
        first = dl.Dense(64, recipe=self.recipe, name="first")
        x = first(first(x)) if self.twice else first(x)
        return dl.LayerNormMLP(intermediate_dim=64, activations="swiglu", recipe=self.recipe)(x)


@pytest.mark.parametrize("recipe", [DELAYED, dj.NVFP4BlockScaling()], ids=["delayed", "nvfp4"])
def test_training_with_the_train_state_of_flax(recipe):
    model = Model(recipe)
    variables = model.init(KEY, X)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2))

    @jax.jit
    def step(state, key):
        traces.append(0)

        def loss(variables):
            return jnp.square(state.apply_fn(variables, X, rngs={dl.RNG: key}) - 1).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        news = dl.update_states(state.params, grads)
        given = {name: news[name] if name == dl.STATES else grads[name] for name in grads}
        return state.apply_gradients(grads=given), value

    losses, traces = [], []
    for i in range(5):
        state, value = step(state, jax.random.key(i))
        losses.append(float(value))
    assert losses[-1] < losses[0] and len(traces) == 1
    assert jax.tree.structure(state.params) == jax.tree.structure(variables)
    if recipe is DELAYED:
        scales = [
            s.scale for s in jax.tree.leaves(state.params[dl.STATES], is_leaf=lambda s: isinstance(s, dj.ScaleState))
        ]
        assert len(scales) == 9 and all(float(s[0]) not in (0, 1) for s in scales)


def test_states_that_would_be_lost_or_summed_are_refused():
    model = Model(DELAYED)
    variables = model.init(KEY, X)
    params, states = ({name: variables[name]} for name in ("params", dl.STATES))
    with pytest.raises(ValueError, match="would be lost"):
        jax.grad(lambda p: loss_of(model, p | states, X))(params)
    with pytest.raises(ArgumentError, match="variables lack their states"):
        model.apply(params, X)
    grads = jax.grad(lambda v: loss_of(model, v, X))(variables)
    with pytest.raises(ArgumentError, match="gradients lack states of the model"):
        dl.update_states(variables, {"params": grads["params"]})
    with pytest.raises(ValueError, match="adding 2 states up"):
        dl.update_states(variables, jax.grad(lambda v: loss_of(Model(DELAYED, True), v, X))(variables))
    assert dl.update_states(params, {"params": grads["params"]}) == params


def test_random_bits_are_those_of_the_stream():
    model = Model(NVFP4)
    variables = model.init(KEY, X)
    dense = dl.Dense(64, recipe=NVFP4)

    def grads(key):
        return jax.jit(jax.grad(lambda v: loss_of(model, v, X, rngs={dl.RNG: key})))(variables)["params"]["first"][
            "kernel"
        ]

    tools.same(grads(jax.random.key(1)), grads(jax.random.key(1)))
    assert (grads(jax.random.key(1)) != grads(jax.random.key(2))).any()
    tools.same(grads(jax.random.key(1)), grads(jax.random.PRNGKey(1)))
    model.apply(variables, X)  # forward rounds nothing stochastically
    alone = dense.init(KEY, X)
    with pytest.raises(ArgumentError, match=r"pass rngs=.*stochastic_rounding"):
        jax.grad(lambda v: loss_of(dense, v, X))(alone)


@pytest.mark.parametrize("recipe", [DELAYED, NVFP4], ids=["delayed", "nvfp4"])
@pytest.mark.parametrize("remat", [False, True], ids=["scan", "remat"])
def test_a_scan_over_layers_is_the_layers_in_a_row(remat, recipe):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(dl.Dense(64, recipe=recipe)(x)), None

    axes = {"params": 0, dl.STATES: 0}
    model = nn.scan(
        nn.remat(Block, prevent_cse=False) if remat else Block,
        variable_axes=axes, split_rngs={"params": True, dl.RNG: True}, length=3,
    )()  # fmt: skip
    variables = model.init(KEY, X, None)
    grad = jax.jit(jax.grad(lambda v, bits: jnp.square(model.apply(v, X, None, rngs=bits)[0]).mean()))
    grads, other = (grad(variables, {dl.RNG: jax.random.key(i)}) for i in range(2))
    if recipe is NVFP4:
        differ = [(g != o).any() for g, o in zip(*map(jax.tree.leaves, (grads, other)), strict=True)]
        assert all(differ)
        plain = nn.scan(Block, variable_axes=axes, split_rngs={"params": True, dl.RNG: True}, length=3)()
        bits = {dl.RNG: jax.random.key(0)}
        want = jax.jit(jax.grad(lambda v: jnp.square(plain.apply(v, X, None, rngs=bits)[0]).mean()))(variables)
        return tools.same_tree(grads, want)

    def in_a_row(variables):
        x = X
        for i in range(3):
            x, _ = Block().apply(jax.tree.map(lambda v: v[i], variables), x, None)  # noqa: B023
        return jnp.square(x).mean()

    tools.same_tree(grads, jax.jit(jax.grad(in_a_row))(variables))
    news = dl.update_states(variables, grads)
    row = [jax.tree.map(lambda v: v[i], (variables, grads)) for i in range(3)]  # noqa: B023
    want = jax.tree.map(lambda *v: jnp.stack(v), *(dl.update_states(*pair) for pair in row))
    tools.same_tree(news, want)


def test_vmap_stacks_layers_and_refuses_to_add_states_of_examples():
    stack = nn.vmap(dl.Dense, variable_axes={"params": 0, dl.STATES: 0}, split_rngs={"params": True})
    model = stack(32, recipe=DELAYED)
    variables = model.init(KEY, X)
    grads = jax.jit(jax.grad(lambda v: loss_of(model, v, X)))(variables)
    for i in range(2):
        own, want = (jax.tree.map(lambda v: v[i], tree) for tree in (variables, grads))  # noqa: B023
        got = jax.grad(lambda v: jnp.square(dl.Dense(32, recipe=DELAYED).apply(v, X[i])).sum() / X[..., :32].size)(own)  # noqa: B023
        tools.same_tree(dl.update_states(own, got)[dl.STATES], dl.update_states(own, want)[dl.STATES])
    shared = dl.Dense(32, recipe=DELAYED)
    variables = shared.init(KEY, X)
    summed = jax.grad(lambda v: jnp.square(jax.vmap(lambda x: shared.apply(v, x))(X)).mean())(variables)
    with pytest.raises(ValueError, match="adding 2 states up"):
        dl.update_states(variables, summed)


def test_dimensions_have_logical_names():
    names = {"kernel_axes": ("embed", "heads", "mlp"), "bias_axes": ("heads", "mlp")}
    model = dl.DenseGeneral((2, 32), recipe=DELAYED, **names)
    variables = model.init(KEY, X)
    spec = nn.get_partition_spec(variables)
    P = jax.sharding.PartitionSpec
    assert spec["params"] == {"kernel": P("embed", "heads", "mlp"), "bias": P("heads", "mlp")}
    assert nn.logical_to_mesh(spec, [("embed", None), ("heads", None), ("mlp", "tp")])["params"]["bias"] == P(
        None, "tp"
    )
    grads = jax.grad(lambda v: loss_of(model, v, X))(variables)
    assert jax.tree.structure(dl.update_states(variables, grads)) == jax.tree.structure(variables)
    own = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    assert nn.get_partition_spec(dl.Dense(32, recipe=None, kernel_init=own).init(KEY, X))["params"]["kernel"] == P(
        "embed", "mlp"
    )


def test_the_place_in_the_model_is_the_name_of_the_roles():
    found = set()

    def factory(role):
        found.add((role.module, role.name))
        return None

    Model(CustomRecipe(factory)).init(KEY, X)
    assert {name for _, name in found} >= {"first", "LayerNormMLP_0.fc1", "LayerNormMLP_0.fc2"}
    found.clear()
    nn.Sequential([nn.Dense(32, dot_general_cls=seam(dl.DotGeneral, recipe=CustomRecipe(factory)))]).init(KEY, X)
    names = {name for _, name in found}
    assert "layers_0" in names and not any("DotGeneral" in name for name in names)


@pytest.mark.parametrize("make", [dj.MXFP8BlockScaling, dj.DelayedScaling])
def test_equal_modules_share_compiled_code(make):
    traces = []

    @seam(jax.jit, static_argnums=0)
    def f(model, variables):
        traces.append(0)
        return model.apply(variables, X)

    for _ in range(3):
        model = dl.Dense(32, recipe=make(), kernel_axes=("embed", "mlp"))
        f(model, model.init(KEY, X))
    assert len(traces) == 1


def test_dtypes():
    model = dl.Dense(32, recipe=dj.MXFP8BlockScaling(), dtype=jnp.bfloat16, param_dtype=jnp.float16)
    variables = model.init(KEY, X)
    assert (model.apply(variables, X).dtype, variables["params"]["kernel"].dtype) == ("bfloat16", "float16")
    assert dl.Dense(32, recipe=dj.MXFP8BlockScaling()).apply(variables, X).dtype == X.dtype


def test_misuse_is_named():
    with pytest.raises(TypeError, match="recipe"):
        dl.Dense(32)
    with pytest.raises(ArgumentError, match="must be a diptych Recipe"):
        dl.Dense(32, recipe="mxfp8").init(KEY, X)
    with pytest.raises(ValueError, match="leading axes"):
        dl.DenseGeneral(32, batch_dims=(1,), recipe=None).init(KEY, X)
    with pytest.raises(ValueError, match="must be 2 letters"):
        dl.Einsum((64, 32), "...d,...dk->...k", recipe=None).init(KEY, X)
    with pytest.raises(ShapeError):
        dl.Einsum((32, 32), "btd,dk->btk", recipe=None).init(KEY, X)
    with pytest.raises(ValueError, match="recipe decides on precision"):
        seamed = nn.Dense(32, precision="highest", dot_general_cls=seam(dl.DotGeneral, recipe=dj.MXFP8BlockScaling()))
        seamed.init(KEY, X)
    model = dl.Dense(64, recipe=dj.MXFP8BlockScaling())
    variables = dj.quantize_params(model.init(KEY, X), model.recipe, lambda path, _: path == "params.kernel")
    with pytest.raises(UnsupportedError, match="held in high precision"):
        model.apply(variables, X)
