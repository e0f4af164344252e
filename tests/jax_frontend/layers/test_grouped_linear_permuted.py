"""`grouped_dense` with a map of rows: the bits of permuting first, whatever the recipe, under every transformation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.permute.test_permute import top_k
from core.permute.test_permute_misuse import lie
from jax.sharding import PartitionSpec as P
from sweeps import others_slow

import cases
import diptych.jax as dj
from diptych.common import (
    ArgumentError,
    CustomRecipe,
    DelayedScaling,
    DTypeError,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    Recipe,
    ShapeError,
    UnsupportedError,
)
from jax_frontend import tools
from jax_frontend.grouped_layers import EVERY, RNG, G, K, N, dtypes_for, given
from jax_frontend.layers.test_grouped_linear import ROLES, _but, _own, _results

pytestmark = pytest.mark.sampled

T, ALIGN = 52, 16
MX, DELAYED = MXFP8BlockScaling(), DelayedScaling(amax_history_len=4)
ROWS = (None, 96, 160)  # as many as any routing needs; too few, so that some are dropped; some to spare
PLAIN = {n: r for n, r in tools.PLAIN_RECIPES.items() if n in EVERY}


def map_for(name: str, rows: int | None = None, tokens: int = T) -> dj.RowMap:
    """Returns a row map of two experts for each token, of which one in eight is absent."""
    rng = cases.rng_for(f"routing-{name}")
    ids = top_k(rng, tokens, G, 2)
    ids[rng.random(ids.shape) < 0.125] = -1
    return dj.moe_map(ids, G, map_type="index", num_out_tokens=rows, align_size=ALIGN)


def operands(name: str, m: dj.RowMap, dtypes: tuple[str, str, str] = ("float32",) * 3, front: Any = (T,)) -> list[Any]:
    """x, kernel, bias and dy."""
    x, kernel, bias, dy = (
        tools.normal(f"permuted-{name}-{i}", shape, dtype)
        for i, (shape, dtype) in enumerate(
            zip(((*front, K), (G, N, K), (G, N), (len(m.row_source), N)), (*dtypes, dtypes[0]), strict=True)
        )
    )
    return [x, kernel, bias, dy]


def composed(x: Any, kernel: Any, bias: Any, m: dj.RowMap, **options: Any) -> Any:
    """Computes the composition that a row map stands for."""
    return dj.grouped_dense(dj.moe_permute(x, m)[0], kernel, bias, m.expert_offsets, align=ALIGN, **options)


def permuting(x: Any, kernel: Any, bias: Any, m: dj.RowMap, **options: Any) -> Any:
    return dj.grouped_dense(x, kernel, bias, row_map=m, align=ALIGN, **options)


def step(layer: Any, recipe: Recipe | None, x: Any, kernel: Any, bias: Any, dy: Any, m: Any, **options: Any) -> Any:
    """y, the gradients and the new state."""
    options = given(recipe) | {"recipe": recipe} | options
    state = options.pop("state", None)
    y, pull = jax.vjp(lambda *a: layer(*a[:3], m, state=a[3], **options), x, kernel, bias, state)
    return y, pull(dy)


def compiled(layer: Any, recipe: Recipe | None, *args: Any, **options: Any) -> Any:
    return jax.jit(lambda *a: step(layer, recipe, *a, **options))(*args)


@pytest.mark.parametrize("keep", [False, True], ids=["copies", "original"])
@pytest.mark.parametrize("name", EVERY)
def test_bits_of_permuting_first(name, keep, device):
    """Three steps, each with another map, and the states that they leave."""
    recipe = EVERY[name]
    turn = list(EVERY).index(name) + keep
    results = []
    for layer in (composed, permuting):
        states, made = dj.init_state(recipe, module="grouped_linear"), []
        for i, rows in enumerate(ROWS):
            m = map_for(f"{name}-{i}", rows)
            x, *rest = operands(f"{name}-{i}", m, dtypes_for(recipe, turn + i))
            states = dj.update_state(states, recipe)
            run = compiled if i or layer is composed else step
            y, grads = run(layer, recipe, x * (i + 1), *rest, m, state=states, save_original_input=keep)
            states = dj.overwrite_states(states, grads[3])
            made.append((y, grads))
        results.append(made)
    tools.same_tree(results[1], results[0], name)
    assert float(jnp.abs(results[1][0][1][0].astype(jnp.float32)).max()) > 0


OTHERS: dict[str, Recipe | None] = {
    "no recipe": None,
    **{"-".join(role): CustomRecipe(_but(*role)) for role in ROLES},
    "a quantizer of the user's own": _own("input"),
    "results": CustomRecipe(_results, quantize_results=True),
    "high precision backward": MX.replace(backward_override="high_precision"),
    "dequantized backward": MX.replace(backward_override="dequantized"),
    "delayed, dequantized backward": DELAYED.replace(backward_override="dequantized"),
}


NOW = ("input-fprop", "weight-dgrad", "grad_output-wgrad", "a quantizer of the user's own", "results")


@pytest.mark.parametrize("name", others_slow(OTHERS, (*NOW, "delayed, dequantized backward")))
def test_roles_in_high_precision_and_other_recipes(name):
    """Permuted rows are stored where a product, or the user's own code, reads them."""
    recipe, m = OTHERS[name], map_for("others")
    args = [*operands("others", m), m]
    want = compiled(composed, recipe, *args)
    for keep in (False, True):
        tools.same_tree(compiled(permuting, recipe, *args, save_original_input=keep), want, (name, keep))


def test_leading_dimensions_and_no_bias():
    m = map_for("leading", tokens=60)
    x, kernel, _, dy = operands("leading", m, front=(3, 4, 5))
    want = step(composed, MX, x, kernel, None, dy, m)
    tools.same_tree(step(permuting, MX, x, kernel, None, dy, m), want)
    assert want[1][0].shape == x.shape
    host = dj.RowMap(*(np.asarray(part) for part in m))
    tools.same_tree(step(permuting, MX, x, kernel, None, dy, host), want)


def test_one_compiled_step_serves_all_maps():
    run = jax.jit(lambda *a: step(permuting, MX, *a))
    for i in range(3):
        m = map_for(f"maps-{i}", 128)
        args = [*operands("maps", m), m]
        tools.same_tree(run(*args), step(composed, MX, *args), i)
    assert run._cache_size() == 1


# --- what it costs ---


@pytest.mark.parametrize("keep", [False, True], ids=["copies", "original"])
def test_permuted_rows_are_never_stored(keep):
    m = map_for("calls")
    args = [*operands("calls", m), m]
    ops = ("permute", "unpermute", "grouped_gemm", "gemm", "quantize")
    before = [tools.calls(op) for op in ops]
    jax.block_until_ready(step(permuting, MX, *args, save_original_input=keep))
    assert [tools.calls(op) - n for op, n in zip(ops, before, strict=True)] == [0, 1, 3, 0, 1 + G + 1 + keep]
    rows = f"{len(m.row_source)}x{K}xf32"
    texts = [
        tools.hlo(lambda x, kernel, m, fn=fn: fn(x, kernel, None, m, recipe=MX), *args[:2], m)
        for fn in (composed, permuting)
    ]
    assert rows in texts[0] and rows not in texts[1]


def test_backward_keeps_what_it_keeps_of_permuted_rows_or_the_tokens():
    m = map_for("saved")
    x, kernel, bias, _ = operands("saved", m)
    kept = x.size, len(m.row_source) * K
    for keep, recipe in ((False, MX), (True, MX), (False, CustomRecipe(_but("input", "wgrad")))):
        found = []
        for layer in (composed, permuting):
            fn = functools.partial(layer, m=m, recipe=recipe, save_original_input=keep)
            leaves = jax.tree.leaves(jax.vjp(fn, x, kernel, bias)[1])
            found.append(sorted((v.dtype.name, v.size) for v in leaves if v.size >= K * 16))
        plain, got = found
        if keep or recipe is not MX:
            plain[plain.index(("float32", kept[1]))] = ("float32", kept[0])
        assert got == sorted(plain)


@pytest.mark.parametrize("argnums", [0, 1, 2, (0, 1)], ids=str)
def test_only_what_is_differentiated_is_computed(argnums):
    m = map_for("needs")
    x, kernel, bias, dy = operands("needs", m)

    def loss(layer, *args):
        return (layer(*args, m, recipe=MX) * dy).sum()

    got, want = (jax.jit(jax.grad(functools.partial(loss, f), argnums))(x, kernel, bias) for f in (permuting, composed))
    tools.same_tree(got, want)
    jaxpr = jax.make_jaxpr(jax.grad(functools.partial(loss, permuting), argnums))(x, kernel, bias).jaxpr
    assert len(tools.eqns(jaxpr, "diptych_unpermute")) == (argnums in (0, (0, 1)))
    assert not tools.eqns(jaxpr, "diptych_permute")


# --- states, gradients that go elsewhere, calibration ---


@tools.WRAP
def test_ways_of_states(wrap):
    m = map_for("states", 128)
    x, kernel, bias, dy = operands("states", m)
    states = dj.init_state(DELAYED, module="grouped_linear")
    want = step(composed, DELAYED, x, kernel, bias, dy, m)[1][3]
    for keep in (False, True):
        layer = functools.partial(permuting, m=m, recipe=DELAYED, save_original_input=keep)

        def loss(params, states, layer=layer):
            return (layer(*params, bias, state=states) * dy).sum()

        tools.same_tree(wrap(dj.value_and_grad_with_state(loss))((x, kernel), states)[2], want)
        forward = wrap(lambda s, layer=layer: layer(x, kernel, bias, state=s, return_state=True)[1])(states)
        tools.same_tree((forward["input"], forward["weight"]), (want["input"], want["weight"]))
        refs = dj.state_refs(states)
        wrap(jax.grad(lambda p, refs=refs, loss=loss: loss(p, refs)))((x, kernel))
        tools.same_tree(dj.read_states(refs), want)
    assert float(want["input"].amax_history[0]) == float(jnp.abs(dj.moe_permute(x, m)[0]).max())


def test_calibration():
    m = map_for("calibration", 96)
    args = [*operands("calibration", m), m]
    want = step(composed, DELAYED, *args, calibrate=True)
    tools.same_tree(step(permuting, DELAYED, *args, calibrate=True), want)
    rows = dj.moe_permute(args[0], m)[0]
    assert float(want[1][3]["input"].amax_history[0]) == float(jnp.abs(rows).max())


@pytest.mark.parametrize("name", others_slow(EVERY, ("fp8-delayed", "mxfp8", "nvfp4")))
def test_gradients_into_main_grad(name):
    recipe, m = EVERY[name], map_for("main")
    args = operands("main", m, ("bfloat16",) * 3)
    x, kernel, bias, dy = args
    main = tools.normal("main", kernel.shape)
    options = given(recipe) | {"recipe": recipe}
    state = options.pop("state", None)

    def loss(layer, x, main, state):
        y = layer(x, kernel, bias, m, state=state, main_grad=main, **options)
        return (y * dy).astype(jnp.float32).sum()

    argnums = (0, 1, 2) if state else (0, 1)
    got, want = (jax.jit(jax.grad(functools.partial(loss, f), argnums))(x, main, state) for f in (permuting, composed))
    tools.same_tree(got, want)


# --- transformations ---


@pytest.mark.parametrize("name", others_slow(EVERY, ("fp8-delayed", "nvfp4")))
def test_remat(name):
    recipe, m = EVERY[name], map_for("remat")
    x, kernel, bias, dy = operands("remat", m, ("bfloat16",) * 3)
    options = given(recipe) | {"recipe": recipe}
    state = options.pop("state", None)

    def loss(layer, x, kernel, bias, state):
        y = layer(jnp.sin(x), kernel, bias, m, state=state, **options)
        return (y.astype(jnp.float32) * dy).sum()

    argnums = (0, 1, 2, 3) if state else (0, 1, 2)
    want = jax.jit(jax.grad(functools.partial(loss, composed), argnums))(x, kernel, bias, state)
    for policy in (None, jax.checkpoint_policies.save_only_these_names(dj.CHECKPOINT_NAME)):
        fn = jax.checkpoint(functools.partial(loss, permuting), policy=policy)
        tools.same_tree(jax.jit(jax.grad(fn, argnums))(x, kernel, bias, state), want, name)


@pytest.mark.parametrize("name", others_slow(PLAIN, ("fp8-current", "mxfp8")))
def test_vmap_is_a_loop_bit_for_bit(name):
    recipe = PLAIN[name]
    maps = jax.tree.map(lambda *a: jnp.stack(a), *(map_for(f"vmap {i}", 96) for i in range(3)))
    one = operands("vmap", map_for("vmap 0", 96))
    front = jnp.asarray([1.0, 64.0, 0.01])[:, None, None]  # amaxes differ between examples
    xs, kernels, dys = one[0] * front, one[1] * front[:, None], one[3] * front[::-1]

    def run(x, kernel, dy, m, keep=False):
        return step(permuting, recipe, x, kernel, one[2], dy, m, save_original_input=keep)

    for axes in ((0, None, 0, None), (0, 0, 0, 0), (None, 0, None, 0)):
        args = [
            v if a == 0 else jax.tree.map(lambda t: t[0], v)
            for v, a in zip((xs, kernels, dys, maps), axes, strict=True)
        ]
        got = jax.jit(jax.vmap(functools.partial(run, keep=axes[1] == 0), axes))(*args)
        for i in range(3):
            x, kernel, dy, m = (
                jax.tree.map(lambda t, i=i: t[i], v) if a == 0 else v for v, a in zip(args, axes, strict=True)
            )
            want = step(composed, recipe, x, kernel, one[2], dy, m)
            tools.same_tree(jax.tree.map(lambda t, i=i: t[i], got), want, (axes, i))


def test_scan_over_layers():
    m = map_for("scan", 128)
    x, kernels = tools.normal("scan", (T, 32)), tools.normal("layers", (3, G, 32, 32)) / 6
    states = jax.tree.map(lambda v: jnp.broadcast_to(v, (3, *v.shape)), dj.init_state(DELAYED, module="grouped_linear"))

    def layer(fn, x, kernel, state):
        y = fn(x, kernel, None, m, recipe=DELAYED, state=state)
        return dj.moe_unpermute(y, m)

    def looped(x, kernels, states):
        for i in range(3):
            x = layer(composed, x, kernels[i], jax.tree.map(lambda v, i=i: v[i], states))
        return x.sum()

    def scanned(x, kernels, states):
        return jax.lax.scan(lambda x, s: (layer(permuting, x, *s), None), x, (kernels, states))[0].sum()

    want, got = (jax.jit(jax.grad(f, (0, 1, 2)))(x, kernels, states) for f in (looped, scanned))
    tools.same_tree(got, want)


def test_sizes_that_are_not_known_before():
    """Exported once for any number of tokens and rows."""
    m = map_for("export")
    x, kernel, bias, _ = operands("export", m)
    t, r = jax.export.symbolic_shape("t, r")
    maps = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((t, 2), (G,), (G + 1,), (r,))]
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((t, K), kernel.shape, bias.shape)]
    for recipe in (EVERY["fp8-current"], None):
        f = jax.jit(functools.partial(permuting, recipe=recipe))
        exported = jax.export.export(f, disabled_checks=dj.export_safety_checks())(*shapes, dj.RowMap(*maps))
        for tokens in (T, 33):
            args = x[:tokens], kernel, bias, map_for("export", tokens=tokens)
            tools.same(exported.call(*args), f(*args))


def grads_of(layer: Any, recipe: Any, x: Any, kernel: Any, bias: Any, dy: Any, m: Any, **options: Any) -> Any:
    def loss(x, kernel, bias):
        return (layer(x, kernel, bias, m, recipe=recipe, **options) * dy).sum()

    return jax.grad(loss, (0, 1, 2))(x, kernel, bias)


@pytest.mark.parametrize("shared", [False, True], ids=["tokens", "maps"])
@pytest.mark.parametrize("name", ["fp8-current", "mxfp8", "no recipe"])
def test_shard_map(mesh, name, shared):
    """Each device has a map of its own, and tokens of its own or (`shared`) all of them, with summed gradients."""
    recipe = PLAIN.get(name)
    maps = [map_for(f"mesh {i}", 96) for i in range(2)]
    parts = [operands(f"mesh {i}", maps[0]) for i in range(2)]
    kernel, bias = parts[0][1:3]
    x = parts[0][0] if shared else jnp.concatenate([p[0] for p in parts])
    dy, m = jnp.concatenate([p[3] for p in parts]), jax.tree.map(lambda *a: jnp.concatenate(a), *maps)
    of_x = P() if shared else P("i")
    f = jax.shard_map(
        functools.partial(grads_of, permuting, recipe, save_original_input=shared and recipe is not None), mesh=mesh,
        in_specs=(of_x, P(), P(), P("i"), P("i")), out_specs=(of_x, P(), P()),
    )  # fmt: skip
    got = jax.jit(f)(x, kernel, bias, dy, m)
    halves = [
        grads_of(composed, recipe, parts[0 if shared else i][0], kernel, bias, parts[i][3], maps[i]) for i in range(2)
    ]
    check = tools.same if recipe is not None else functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3)
    check(got[0], halves[0][0] + halves[1][0] if shared else jnp.concatenate([h[0] for h in halves]))
    for i in (1, 2):
        check(got[i], halves[0][i] + halves[1][i])


def _current_but_kernels(role: Any) -> Any:
    return MXFP8Quantizer() if role.tensor == "weight" else Float8CurrentScalingQuantizer()


@pytest.mark.parametrize("keep", [False, True], ids=["copies", "original"])
def test_amaxes_over_a_group(keep):
    """The group's amax is that of the rows which move."""
    recipe = CustomRecipe(_current_but_kernels, amax_group="i")
    maps = jax.tree.map(lambda *a: jnp.stack(a), *(map_for(f"group {i}", 96) for i in range(2)))
    x, kernel, bias, dy = operands("group", map_for("group 0", 96))
    xs, dys = jnp.stack([x, x * 50]), jnp.stack([dy, dy / 7])

    def run(layer, x, dy, m):
        return step(layer, recipe, x, kernel, bias, dy, m, save_original_input=keep)

    got, want = (
        jax.vmap(functools.partial(run, layer), axis_name="i")(xs, dys, maps) for layer in (permuting, composed)
    )
    tools.same_tree(got, want)


# --- misuse ---


@pytest.mark.parametrize("name", ["fp8-delayed", "mxfp8", "fp8-block"])
def test_maps_that_lie(name, device):
    """Whatever stands in row_id_map and row_source, nothing breaks; dx is the sum of the rows that a token names."""
    recipe, m = EVERY[name], map_for("lie", 96)
    x, kernel, bias, dy = operands("lie", m)
    honest = grads_of(
        lambda x, kernel, bias, m, **o: dj.grouped_dense(x, kernel, bias, m.expert_offsets, align=ALIGN, **o),
        recipe, dj.moe_permute(x, m)[0], kernel, bias, dy, m, record=False, **given(recipe),
    )  # fmt: skip
    for turn in range(3):
        liar = lie(f"layer-{turn}", tokens=T, slots=(3, 1, 40)[turn], rows=96)
        wild = m._replace(row_id_map=jnp.asarray(liar.row_id_map), row_source=jnp.asarray(liar.row_source))
        y, grads = step(permuting, recipe, x, kernel, bias, dy, wild, save_original_input=turn == 1)
        assert y.shape == (96, N)
        # CPUs ask `row_source` where a row comes from. GPUs ask row_id_map where it goes: rows may be left out then.
        assert device == "cuda" or bool(jnp.isfinite(y).all())
        tools.same(grads[0], dj.moe_unpermute(honest[0], wild.row_id_map))


@pytest.mark.parametrize("tokens, rows", [(0, 32), (5, 0), (16, 32)])
def test_nothing_to_move(tokens, rows):
    m = dj.moe_map(np.full((tokens, 2), -1, np.int32), G, map_type="index", num_out_tokens=rows or None)
    m = m if rows else dj.RowMap(m.row_id_map, m.tokens_per_expert, m.expert_offsets, m.row_source[:0])
    x, kernel, bias, dy = operands("nothing", m, front=(tokens,))
    for recipe in (MX, EVERY["fp8-current"], None):
        y, (dx, dkernel, dbias, _) = step(permuting, recipe, x, kernel, bias, dy, m)
        assert (y.shape, dx.shape) == ((rows, N), (tokens, K))
        assert not any(np.asarray(v).any() for v in (y, dx, dkernel, dbias))


X, KERNEL, BIAS, MAP = (
    np.ones((T, K), np.float32),
    np.ones((G, N, K), np.float32),
    np.ones((G, N), np.float32),
    map_for("bad"),
)
OUTSIDE = MAP._replace(expert_offsets=MAP.expert_offsets + 4096)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "both": ({"offsets": MAP.expert_offsets}, ValueError, "give the groups once, as offsets or by a row_map"),
    "neither": ({"row_map": None}, ValueError, "give the groups once, as offsets or by a row_map"),
    "no RowMap": ({"row_map": MAP.row_id_map}, ArgumentError, "row_map must be a RowMap, got .*; moe_map"),
    "row_source": ({"row_map": MAP._replace(row_source=np.zeros(9, np.int64))}, DTypeError, "row_source must be int32"),
    "tokens": (
        {"row_map": map_for("bad", tokens=T + 1)},
        ShapeError,
        "x must have a row for each of row_map's tokens, 53",
    ),
    "experts": ({"row_map": MAP._replace(expert_offsets=MAP.expert_offsets[1:])}, ShapeError, r"offsets must be \[5\]"),
    "no offsets": ({"row_map": MAP._replace(expert_offsets=None)}, ArgumentError, "offsets must be .*got NoneType"),
    "K": ({"x": X[:, :64]}, ShapeError, "do not fit"),
    "a vector": ({"x": X[0]}, ShapeError, r"x must be \[\.\.\., H\]"),
    "float64": ({"x": X.astype(np.float64)}, DTypeError, "x must be float32"),
}


@pytest.mark.parametrize("recipe", [None, MX], ids=["plain", "mxfp8"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, recipe):
    case, error, match = BAD[name]
    before = tools.calls("permute") + tools.calls("quantize")
    with pytest.raises(error, match=match):
        dj.grouped_dense(**{"x": X, "kernel": KERNEL, "bias": BIAS, "row_map": MAP, "recipe": recipe} | case)
    assert tools.calls("permute") + tools.calls("quantize") == before


def test_what_a_recipe_refuses():
    x, odd = jnp.asarray(X, "bfloat16"), dj.moe_map(np.zeros((T, 1), np.int32), G, map_type="index", num_out_tokens=T)
    with pytest.raises(ValueError, match="rotates 16 rows"):
        jax.grad(lambda k: dj.grouped_dense(x, k, recipe=NVFP4BlockScaling(), row_map=MAP, rng=RNG).sum())(KERNEL)
    with pytest.raises(ShapeError, match="rows in multiples of 16, got"):
        options = {"recipe": NVFP4BlockScaling(), "row_map": odd, "rng": RNG, "align": 16}
        jax.grad(lambda k: dj.grouped_dense(x, k, **options).sum())(KERNEL)
    with pytest.raises(TypeError, match="needs state="):
        permuting(X, KERNEL, BIAS, MAP, recipe=DELAYED)
    with pytest.raises(tools.MET, match=r"outside of the tensor's|rows 4096 to"):
        jax.block_until_ready(jax.jit(lambda m: permuting(X, KERNEL, BIAS, m, recipe=MX))(OUTSIDE))
    with pytest.raises(UnsupportedError, match="no derivative"):
        jax.hessian(lambda x: permuting(x, KERNEL, BIAS, MAP, recipe=MX).sum())(X)
