"""The verbs on stacks and groups under vmap, scan, checkpoint, shard_map and export: the results of plain calls."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P
from sweeps import named

import diptych.jax as dj
from diptych.common import ShapeError, UnsupportedError
from diptych.common.quantizers import RHT
from diptych.jax.primitives import grouped as grouped_ops
from jax_frontend import tools

pytestmark = pytest.mark.sampled

KIND = tools.KIND
WGRAD = {"trans_a": True, "trans_b": False}


def at(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda v: v[i], tree)


def together(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *v: jnp.stack(v), *trees)


def given(kind: tools.Kind, front: tuple[int, ...]) -> dict[str, jax.Array]:
    """Returns the state for each tensor of stacks [*front]."""
    return {k: v[..., 0] if k == "scale" else v for k, v in kind.state(front).items()}


def offsets_of(*rows: Any) -> jax.Array:
    return jnp.asarray(rows[0] if len(rows) == 1 else rows, jnp.int32)


@KIND
@tools.WRAP
def test_vmap_of_stacks(kind, wrap):
    x, state = kind.draw("grouped-vmap", (3, 2)), given(kind, (3, 2))
    f = lambda x, state: dj.quantize_stack(x, kind.quantizer, **state)  # noqa: E731
    each = [f(x[i], at(state, i)) for i in range(3)]
    got = wrap(jax.vmap(f))(x, state)
    tools.same_tree(got, together(each))
    assert got.shape == x.shape
    shared = wrap(jax.vmap(lambda x: f(x, at(state, 0))))(x)
    tools.same_tree(shared, together([f(v, at(state, 0)) for v in x]))
    tools.same(wrap(jax.vmap(lambda q: q.dequantize()))(got), jnp.stack([e.dequantize() for e in each]))
    tools.same_tree(wrap(jax.vmap(lambda q: q[1]))(got), together([e[1] for e in each]))


@KIND
def test_nested_vmap_of_products_walks_each_operand_by_its_own_axes(kind):
    """fprop with stacks, inputs, offsets and biases of different axes; wgrad with an accumulator."""
    quantizer, (m, k) = kind.quantizer, (48, 32)
    x, w = tools.normal("gx", (3, m, k), kind.dtype), tools.normal("gw", (2, 2, 16, k), kind.dtype)
    one, many = kind.state(), given(kind, (2,))
    qx = jax.vmap(lambda v: dj.quantize(v, quantizer, **one))(x)
    qw = jax.vmap(lambda v: dj.quantize_stack(v, quantizer, **many))(w)
    offsets = offsets_of((0, 16, 48), (16, 16, 32), (0, 48, 48), (48, 48, 48))
    bias = tools.normal("gbias", (4, 2, 16))

    def product(qx, qw, offsets, bias):
        return dj.grouped_gemm(qx, qw, offsets, bias=bias, alpha=0.5)

    f = jax.vmap(product, in_axes=(0, None, None, None))  # 3
    f = jax.vmap(f, in_axes=(None, 0, None, None))  # 2
    f = jax.vmap(f, in_axes=(None, None, 0, 0))  # 4
    want = [
        [[product(at(qx, i), at(qw, j), offsets[k], bias[k]) for i in range(3)] for j in range(2)] for k in range(4)
    ]
    for got in (f(qx, qw, offsets, bias), jax.jit(f)(qx, qw, offsets, bias)):
        tools.same(got, np.asarray(want))
    (call,) = (line for line in tools.hlo(f, qx, qw, offsets, bias).splitlines() if "@diptych_grouped_gemm" in line)
    shapes, width = call.split(" : (")[1].split(") -> ")[0], k // quantizer.format.pack
    assert shapes.startswith(f"tensor<3x{m}x{width}x") and f"tensor<2x2x16x{width}x" in shapes, shapes
    assert "tensor<4x3xi32>" in shapes and "tensor<4x2x16xf32>" in shapes, shapes  # none was copied

    def grad(qx, offsets, acc):
        copy = qx.copy_of(True, "test")
        rotated = bool(quantizer.spec.flags & RHT)
        return grouped_ops.grouped_gemm(copy, copy, offsets, align=16, rotated=rotated, out_dtype="float32", acc=acc)

    acc = tools.normal("gacc", (4, 2, k, k))
    for axes, sizes in (((0, None, None), (3, 1, 1)), ((None, 0, None), (1, 4, 1)), ((None, 0, 0), (1, 4, 4)),
                        ((None, None, 0), (1, 1, 4))):  # fmt: skip
        operands = [v if a == 0 else at(v, 1) for v, a in zip((qx, offsets, acc), axes, strict=True)]
        count = max(sizes)
        want = [grad(*(at(v, i) if a == 0 else v for v, a in zip(operands, axes, strict=True))) for i in range(count)]
        for wrap in (lambda f: f, jax.jit):
            tools.same(wrap(jax.vmap(grad, in_axes=axes))(*operands), jnp.stack(want), axes)


@tools.WRAP
def test_vmap_of_sums(wrap):
    dy, offsets = tools.normal("gsums", (3, 40, 7)), offsets_of((0, 5, 40), (3, 3, 3), (0, 0, 39))
    for axes in ((0, 0), (0, None), (None, 0)):
        operands = [v if a == 0 else v[1] for v, a in zip((dy, offsets), axes, strict=True)]
        want = [
            dj.grouped_bias_grad(*(v[i] if a == 0 else v for v, a in zip(operands, axes, strict=True)))
            for i in range(3)
        ]
        tools.same(wrap(jax.vmap(dj.grouped_bias_grad, in_axes=axes))(*operands), jnp.stack(want), axes)
    turned = wrap(jax.vmap(dj.grouped_bias_grad, in_axes=(1, None), out_axes=1))(dy.swapaxes(0, 1), offsets[0])
    tools.same(turned, jnp.stack([dj.grouped_bias_grad(v, offsets[0]) for v in dy], axis=1))


def test_no_example_at_all():
    quantizer = tools.quantizer("mxfp8_e4m3")
    assert jax.vmap(lambda x: dj.quantize_stack(x, quantizer))(jnp.zeros((0, 2, 16, 32))).shape == (0, 2, 16, 32)
    assert jax.vmap(dj.grouped_bias_grad)(jnp.zeros((0, 4, 8)), jnp.zeros((0, 3), jnp.int32)).shape == (0, 2, 8)


def step(x: jax.Array, w: jax.Array, offsets: jax.Array, quantizer: dj.Quantizer) -> tuple[jax.Array, ...]:
    """The products of a layer."""
    q, weights = dj.quantize(x, quantizer), dj.quantize_stack(w, quantizer)
    y = dj.grouped_gemm(q, weights, offsets)
    dy = dj.quantize(y, quantizer)
    grads = dj.grouped_gemm(dy, weights, offsets, trans_b=False), dj.grouped_gemm(dy, q, offsets, **WGRAD, align=16)
    return y, *grads, dj.grouped_bias_grad(y, offsets)


PLAIN = {k: v for k, v in tools.KINDS.items() if not v.state() and not v.quantizer.spec.flags & RHT}
"""Quantizers that take x alone, in any dtype."""


@pytest.mark.parametrize("kind", named(PLAIN, tools.NOW))
def test_scan_and_checkpoint(kind):
    """A stack that a loop slices, layer by layer, and one that a remat policy saves."""
    x, w = tools.normal("scan-x", (48, 32)), tools.normal("scan-w", (3, 2, 32, 32))
    offsets, run = offsets_of((0, 16, 48)), functools.partial(step, quantizer=kind.quantizer)
    stacks = jax.vmap(lambda w: dj.quantize_stack(w, kind.quantizer, as_bytes=True))(w)

    def body(x, layer):
        y = dj.grouped_gemm(dj.quantize(x, kind.quantizer), layer, offsets)
        return y, y

    want, h = [], x
    for i in range(3):
        h = dj.grouped_gemm(dj.quantize(h, kind.quantizer), dj.quantize_stack(w[i], kind.quantizer), offsets)
        want.append(h)
    tools.same(jax.jit(lambda x, s: jax.lax.scan(body, x, s)[1])(x, stacks), jnp.stack(want))
    tools.same_tree(jax.jit(jax.checkpoint(run))(x, w[0], offsets), run(x, w[0], offsets))


@pytest.mark.parametrize("kind", named(PLAIN, tools.NOW))
@pytest.mark.parametrize("sharded", [(True, False, True), (True, True, True), (False, False, True)], ids=str)
def test_shard_map(kind, sharded):
    """Each shard has rows, weights or groups of its own; what all shards share is everywhere."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:2]), ("i",))
    operands = (
        tools.normal("shard-x", (2, 48, 32)),
        tools.normal("shard-w", (2, 2, 16, 32)),
        offsets_of((0, 16, 48), (16, 32, 32)),
    )
    operands = tuple(v if s else v[:1] for v, s in zip(operands, sharded, strict=True))
    specs = tuple(P("i") if s else P() for s in sharded)
    run = lambda *v: tuple(o[None] for o in step(*(a[0] for a in v), kind.quantizer))  # noqa: E731
    want = [step(*(v[i if s else 0] for v, s in zip(operands, sharded, strict=True)), kind.quantizer) for i in range(2)]
    got = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("i")))(*operands)
    tools.same_tree(jax.tree.map(np.asarray, got), tuple(np.stack(v) for v in zip(*want, strict=True)))
    # What varies over the mesh is known: a result of sharded groups is not taken for one that all shards share.
    with pytest.raises(ValueError, match=r"varying|replicat"):
        jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P()))(*operands)


@pytest.mark.parametrize("kind", named(PLAIN, tools.NOW))
def test_export_with_symbolic_sizes(kind):
    quantizer = kind.quantizer
    g, r, k, odd = export.symbolic_shape("g, 16*r, 16*k, odd")
    run = jax.jit(functools.partial(step, quantizer=quantizer))
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((r, k), "float32"), ((g, 16, k), "float32"), ((g + 1,), "int32"))
    ]
    exporting = functools.partial(export.export, run, disabled_checks=dj.export_safety_checks())
    exported = exporting(platforms=["cpu"])(*args)
    for at_ in ((0, 16, 48), (0, 0, 32, 32)):
        x, w = tools.normal("ex", (48, 32)), tools.normal("ew", (len(at_) - 1, 16, 32))
        tools.same_tree(exported.call(x, w, offsets_of(at_)), run(x, w, offsets_of(at_)))
    with pytest.raises(ShapeError, match=r"grouped_gemm: .*offsets are those of .* groups.*every symbolic size"):
        exporting(platforms=["cpu"])(*args[:2], jax.ShapeDtypeStruct((odd,), jnp.int32))
    with pytest.raises(UnsupportedError, match=r"grouped_(bias_grad|gemm): symbolic sizes"):
        exporting(platforms=["cuda"])(*args)


def test_the_workspace_is_a_result_for_cuda_alone(monkeypatch):
    """XLA gives the memory; a product needs some where its formats are decoded."""
    core = grouped_ops._core
    monkeypatch.setattr(core, "grouped_bias_grad_workspace_bytes", lambda rows, cols, groups: rows + groups)
    monkeypatch.setattr(core, "grouped_gemm_workspace_bytes", lambda *formats_kind_sizes: 7)
    run = jax.jit(lambda *v: step(*v, tools.quantizer("mxfp8_e4m3")))
    args = tools.normal("x", (48, 32)), tools.normal("w", (2, 16, 32)), offsets_of((0, 16, 48))

    def results(platform: str, op: str) -> set[str]:
        text = run.trace(*args).lower(lowering_platforms=(platform,)).as_text()
        return {line.split(" -> ")[1] for line in text.splitlines() if f"@diptych_{op}(" in line}

    assert results("cpu", "grouped_bias_grad") == {"tensor<2x16xf32>"}
    assert results("cuda", "grouped_bias_grad") == {"(tensor<2x16xf32>, tensor<50xui8>)"}
    assert results("cpu", "quantize_stack") == results("cuda", "quantize_stack") != set()
    products = results("cpu", "grouped_gemm")
    assert results("cuda", "grouped_gemm") == {f"({t}, tensor<7xui8>)" for t in products} != set()
    monkeypatch.setattr(core, "grouped_gemm_workspace_bytes", lambda *formats_kind_sizes: 0)
    jax.clear_caches()
    assert results("cuda", "grouped_gemm") == products
