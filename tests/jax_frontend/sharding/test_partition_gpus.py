"""Two GPUs of one process: copies of cut tensors with one GPU's bits, layers and experts beside one GPU."""

from __future__ import annotations

import contextlib
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from hardware import cuda_missing
from jax_frontend import meshes, tools
from jax_frontend.layers import test_linear_partitioned as linear
from jax_frontend.sharding import test_expert_parallel as experts

pytestmark = pytest.mark.cuda

# Specs of x, kernel, bias and dy.
LAYOUTS = {
    "data": (P("d"), P(), P(), P("d")),
    "columns": (P(), P("d"), P("d"), P(None, "d")),
    "rows": (P(None, "d"), P(None, "d"), P(), P()),
    "gathered weights": (P("d"), P("d"), P("d"), P("d")),
}


@contextlib.contextmanager
def two_gpus(kind):
    """A mesh of two GPUs, the first of which is the default device."""
    if reason := cuda_missing(2):
        pytest.skip(reason)
    first = tools.gpu()
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.local_devices(backend="cuda")[:2])
    with jax.default_device(first), jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        yield mesh


def run(f, kind, specs, *args):
    """Returns f's results over two GPUs, with the collectives that it runs, and those of one GPU."""
    with two_gpus(kind) as mesh:
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        compiled = jax.jit(f).lower(*placed).compile()
        got = jax.device_get(compiled(*placed))
    with jax.default_device(tools.gpu()):
        want = jax.device_get(jax.jit(f)(*(jax.device_put(np.asarray(x), tools.gpu()) for x in args)))
    return got, meshes.counted(compiled.as_text()), want


def near(got, want, label):
    """GEMM kernels may add in another order where M or N is smaller, and parts of a sum are rounded."""
    a, b = (np.asarray(v).astype(np.float32) for v in (got, want))
    assert np.linalg.norm(a - b) <= 2.0**-7 * np.linalg.norm(b), label


@meshes.AXES
@pytest.mark.parametrize("spec", [P("d"), P(None, "d")], ids=["rows", "columns"])
@pytest.mark.parametrize("case", tools.KINDS.values(), ids=tools.KINDS)
def test_a_cut_tensor_has_the_copies_of_one_gpu(case, spec, kind):
    x, state = tools.normal("sharded", (512, 512), case.dtype).at[-1, -1].set(97), case.state()

    def f(x):
        q = dj.quantize(x, case.quantizer, **state)
        return {name: getattr(q, name) for name in tools.COPIES if getattr(q, name) is not None}, dj.dequantize(q)

    got, collectives, want = run(f, kind, (spec,), x)
    tools.same_tree(got, want, case)
    assert set(collectives) <= {"all-reduce"}, collectives


@meshes.AXES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", linear.RECIPES.values(), ids=linear.RECIPES)
def test_a_training_step_beside_one_gpu(recipe, layout, kind):
    got, collectives, want = run(linear.training_step(recipe), kind, LAYOUTS[layout], *linear.ARGS)
    for name in want:
        near(got[name], want[name], name)
    if layout != "gathered weights":  # a cut sum of y or dx is in bfloat16
        assert set(collectives) <= {"all-reduce", *(() if layout == "data" else meshes.WHOLE_SUM)}, collectives


@pytest.mark.parametrize("recipe", experts.RECIPES.values(), ids=experts.RECIPES)
def test_experts_over_two_gpus(recipe):
    args = (experts.PARAMS, experts.X, experts.IDS, experts.PROBS, experts.DY)
    with two_gpus(AxisType.Auto) as mesh, jax.set_mesh(mesh):
        f = experts.step(lambda *a: experts.spread(recipe, *a)[0])
        got = jax.device_get(jax.jit(f)(*(dj.device_put(v, NamedSharding(mesh, P("d"))) for v in args)))
    with jax.default_device(tools.gpu()):
        one = experts.step(functools.partial(experts.one_device, recipe))
        want = jax.device_get(jax.jit(one)(*jax.device_put(args, tools.gpu())))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        near(a, b, recipe)
