"""A program that several processes run together, which cut one training step: `python processes.py NUMBER COUNT PORT
FILE`, where NUMBER is this process among COUNT.

Every process has four CPU devices. The first one writes the step's whole results to FILE (.npz).
"""

from __future__ import annotations

import os
import sys

import numpy as np

DEVICES = 4  # of a process
M, N, K = 512, 256, 256


def operands() -> dict[str, np.ndarray]:
    """x [M, K], a kernel [N, K], a bias [N], dy [M, N], and two of eight experts with probabilities for each row."""
    rng = np.random.default_rng(7)
    shapes = {"x": (M, K), "kernel": (N, K), "bias": (N,), "dy": (M, N)}
    made = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    made["x"][-1, -1] = 50  # the amax is in one shard alone
    ids = rng.permuted(np.tile(np.arange(8, dtype=np.int32), (M, 1)), axis=1)[:, :2]
    return made | {"ids": ids, "probs": rng.random((M, 2), np.float32)}


def step(recipe, x, kernel, bias, dy, **_):
    """Returns y and all gradients of `dense`."""
    import jax

    import diptych.jax as dj

    y, vjp = jax.vjp(lambda *args: dj.dense(*args, recipe=recipe), x, kernel, bias)
    return dict(zip(("y", "dx", "dkernel", "dbias"), (y, *vjp(dy)), strict=True))


def experts(recipe, x, kernel, dy, ids, probs, axis=None, **_):
    """Returns y and the gradient of x of a layer of eight experts, on one device or spread over a mesh axis."""
    import jax

    import diptych.jax as dj

    kernels = kernel.reshape(8, -1, K)

    def layer(kernels, x, rows):
        return dj.grouped_dense(x, kernels, row_map=rows, recipe=recipe, align=32, row_axes=axis or ())

    def moe(x):
        if axis:
            return dj.expert_parallel(layer, kernels, x, ids, probs, num_experts=8, axis=axis, align=32)[0]
        rows = dj.moe_map(ids, 8, map_type="index", align_size=32)
        return dj.moe_unpermute(layer(kernels, x, rows), rows, probs)

    y, vjp = jax.vjp(moe, x)
    return {"moe y": y, "moe dx": vjp(dy[:, : y.shape[1]])[0]}


def recipes():
    import diptych.jax as dj

    return {"fp8-current": dj.Float8CurrentScaling(), "mxfp8": dj.MXFP8BlockScaling()}


def main(number: int, count: int, port: str, file: str) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    assert len(jax.local_devices()) == DEVICES and jax.device_count() == DEVICES * count
    mesh = jax.make_mesh((DEVICES * count,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("d"))  # data parallel, with weights that are cut over the same axis
    placed = {
        name: jax.make_array_from_callback(v.shape, rows, lambda index, v=v: v[index]) for name, v in operands().items()
    }
    out = {}
    for name, recipe in recipes().items():
        both = lambda args, recipe=recipe: step(recipe, **args) | experts(recipe, **args, axis="d")  # noqa: E731
        with jax.set_mesh(mesh):
            made = jax.jit(both, out_shardings=rows)(placed)
        for part, value in made.items():
            out[f"{name} {part}"] = multihost_utils.process_allgather(value, tiled=True)
    if number == 0:
        np.savez(file, **out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
