"""layernorm and rmsnorm: within a derived bound of float64, with bits that no thread count or instruction set moves."""

from __future__ import annotations

import numpy as np
import pytest

import cases
from core import fused_runner, runner
from core.quantize.test_quantize import calls_of
from diptych.core import _core
from oracle import fused

SHAPES = ((1, 1), (3, 7), (5, 31), (2, 3, 96), (33, 65), (130, 257), (7, 2048), (4, 5000), (300, 512))


def drawn(name: str, shape: tuple[int, ...], dtype: str, shift: float = 0.0) -> np.ndarray:
    return (cases.draw(name, "normal", shape, dtype).astype(np.float32) + np.float32(shift)).astype(
        cases.INPUT_DTYPES[dtype]
    )


def near(got: np.ndarray, want: fused.Bounded, label: str) -> None:
    exact, allowed = want
    error = np.abs(got.astype(np.float64).reshape(exact.shape) - exact)
    worst = np.unravel_index(np.argmax(error - allowed), error.shape)
    assert (error <= allowed).all(), f"{label}: {worst} is off by {error[worst]:g}, may be by {allowed[worst]:g}"


def every_call(device: str, size: int, call, label: str) -> dict[str, np.ndarray]:
    """The results of a call, the same bits whatever the thread count, the instruction set, alignment and poison."""
    be, first = runner.backend(device), None
    for turn, (isa, threads) in enumerate([*calls_of(device, size), (None, None)]):
        with runner.setting(isa, threads):
            got = call(be, offset=turn % 2, poison=(runner.POISON, 0x5A)[turn % 2])
        first = got if first is None else first
        for name, array in got.items():
            runner.same_bits(array, first[name], f"{label} {name} isa={isa} threads={threads}", nan_free=True)
    assert first is not None
    return first


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_bound(dtype, kind, zero_centered, device):
    names = list(cases.INPUT_DTYPES)
    for turn, shape in enumerate(SHAPES):
        label = f"{kind} {dtype}{shape} {cases.report_header()}"
        y_dtype, g_dtype, k = names[turn % 3], names[turn // 3 % 3], shape[-1]
        x = drawn(f"{label}-x", shape, dtype, shift=(0.0, 3.0)[turn % 2])
        gamma = drawn(f"{label}-g", (k,), g_dtype)
        beta = drawn(f"{label}-b", (k,), g_dtype) if kind == "layernorm" and turn % 3 else None
        got = every_call(
            device, x.size,
            lambda be, **more: fused_runner.norm(
                be, x, gamma, beta, kind=kind, zero_centered=zero_centered, dtype=y_dtype, **more  # noqa: B023
            ),
            label,
        )  # fmt: skip
        want = fused.norm(x, gamma, beta, 1e-5, centered=kind == "layernorm", zero_centered=zero_centered,
                          dtype=cases.INPUT_DTYPES[y_dtype])  # fmt: skip
        for name, array in got.items():
            near(array, want[name], f"{label} {name}")
        alone = fused_runner.norm(runner.backend(device), x, None, None, kind=kind, dtype=None)
        for name, array in alone.items():
            runner.same_bits(array, got[name], f"{label}: statistics alone, {name}")

        dy = drawn(f"{label}-dy", shape, names[(turn + 1) % 3])
        mu, rsigma = got.get("mu"), got["rsigma"]
        grads = every_call(
            device, x.size,
            lambda be, **more: fused_runner.norm_grad(
                be, dy, x, gamma, mu, rsigma, zero_centered=zero_centered, **more  # noqa: B023
            ),
            label,
        )  # fmt: skip
        bounds = fused.norm_grad(dy, x, gamma, mu, rsigma, zero_centered=zero_centered)
        assert grads.keys() == bounds.keys()
        for name, array in grads.items():
            near(array, bounds[name], f"{label} {name}")


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_of_many_long_rows(dtype, kind, cuda):
    """CUDA computes these in one kernel if operands are aligned, else in two."""
    shape, label = (16 * 1024 - 3, 2056), f"long rows {kind} {dtype}"
    x, dy = (drawn(f"{label}-{name}", shape, dtype) for name in ("x", "dy"))
    gamma = drawn(f"{label}-g", shape[1:], dtype)
    got = fused_runner.norm(runner.Torch(), x, gamma, None, kind=kind)
    mu, rsigma = got.get("mu"), got["rsigma"]
    grads = every_call("cuda", x.size, lambda be, **more: fused_runner.norm_grad(be, dy, x, gamma, mu, rsigma, **more),
                       label)  # fmt: skip
    bounds = fused.norm_grad(dy, x, gamma, mu, rsigma, zero_centered=False)
    for name, array in grads.items():
        near(array, bounds[name], f"{label} {name}")


def test_gradient_is_that_of_the_norm(device):
    """The formulas themselves, against differences of the norm in float64."""
    x, gamma = drawn("slope-x", (3, 40), "float32"), drawn("slope-g", (40,), "float32")
    dy, beta = drawn("slope-dy", (3, 40), "float32"), np.zeros(40, np.float32)
    for kind in ("layernorm", "rmsnorm"):
        centered = kind == "layernorm"
        got = fused_runner.norm(runner.backend(device), x, gamma, beta if centered else None, kind=kind, eps=1e-3)
        grads = fused_runner.norm_grad(runner.backend(device), dy, x, gamma, got.get("mu"), got["rsigma"])

        def loss(v, g, centered=centered):
            d = v - (v.mean(1, keepdims=True) if centered else 0)
            return (dy * d / np.sqrt((d * d).mean(1, keepdims=True) + np.float64(np.float32(1e-3))) * g).sum()

        step = 1e-5
        for at in np.ndindex(x.shape):
            move = np.zeros(x.shape)
            move[at] = step
            slope = (loss(x + move, gamma) - loss(x - move, gamma)) / (2 * step)
            assert abs(grads["dx"][at] - slope) < 1e-4 * max(1, np.abs(grads["dx"]).max()), (kind, at)
        for i in range(40):
            move = np.zeros(40)
            move[i] = step
            slope = (loss(x.astype(np.float64), gamma + move) - loss(x.astype(np.float64), gamma - move)) / (2 * step)
            assert abs(grads["dgamma"][i] - slope) < 1e-4 * max(1, np.abs(grads["dgamma"]).max()), (kind, i)


def test_no_rows_and_no_columns(device):
    be = runner.backend(device)
    for shape in ((0, 16), (2, 0, 16), (3, 0)):
        x, gamma = np.zeros(shape, np.float32), np.ones(shape[-1], np.float32)
        for kind in ("layernorm", "rmsnorm"):
            got = fused_runner.norm(be, x, gamma, None, kind=kind)
            assert got["y"].shape == shape
            grads = fused_runner.norm_grad(be, x, x, gamma, got.get("mu"), got["rsigma"])
            assert (grads["dgamma"] == 0).all()


def test_nan_stays_in_its_row(device):
    x = drawn("nan-row", (4, 100), "bfloat16")
    x[2, 17] = np.nan
    got = fused_runner.norm(runner.backend(device), x, np.ones(100, np.float32), None, kind="layernorm")
    assert np.isnan(got["y"][2]).all() and np.isfinite(got["y"][[0, 1, 3]]).all()
    assert np.isnan(got["rsigma"][2]) and np.isnan(got["mu"][2])


def test_refusals():
    be = runner.Numpy()
    x, g = np.ones((4, 8), np.float32), np.ones(8, np.float32)

    def call(error, match, **more):
        given = {"x": x, "gamma": g, "beta": None, "mu": np.zeros(4, np.float32), "rsigma": np.zeros(4, np.float32),
                 "y": np.zeros((4, 8), np.float32)} | more  # fmt: skip
        scalars = {name: given.pop(name) for name in ("norm", "eps") if name in given}
        tensors = {name: fused_runner.put(be, value) for name, value in given.items()}
        with pytest.raises(error, match=match):
            _core.norm(**tensors, zero_centered_gamma=False, **{"norm": 0, "eps": 1e-5} | scalars)

    call(ValueError, "unknown norm 2", norm=2)
    call(ValueError, "mu was given", norm=1)
    call(ValueError, "rmsnorm has no beta", norm=1, mu=None, beta=g)
    call(TypeError, "mu is missing", mu=None)
    call(ValueError, "eps must be finite", eps=-1.0)
    call(ValueError, "eps must be finite", eps=float("nan"))
    call(ValueError, r"gamma must be \[8\]", gamma=g[:7])
    call(ValueError, "gamma was given", y=None)
    call(TypeError, "gamma is missing", gamma=None)
    call(ValueError, r"y must be \[4, 8\]", y=np.zeros((8, 4), np.float32))
    call(ValueError, "at least one dimension", x=np.ones((), np.float32))
    call(TypeError, "rsigma", rsigma=np.zeros(4, np.float16))
