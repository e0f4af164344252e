"""Checks an installed wheel: `check.py numpy|torch|jax` in an environment with that package and nothing else of ours.

No compiler is on PATH. Each check computes a product by the quantized kernels and compares it with NumPy's.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

import diptych
from diptych import core
from diptych.common import Float8CurrentScaling, Float8CurrentScalingQuantizer, MXFP8Quantizer

OTHERS = {"numpy": ("torch", "jax"), "torch": ("jax",), "jax": ("torch",)}


def drawn() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng()
    return rng.standard_normal((48, 64), np.float32), rng.standard_normal((32, 64), np.float32)


def check_core() -> None:
    x, w = drawn()
    for quantizer in (Float8CurrentScalingQuantizer(), MXFP8Quantizer()):
        a, b = core.quantize(x, quantizer), core.quantize(w, quantizer)
        want = core.dequantize(a) @ core.dequantize(b).T
        assert np.allclose(core.gemm(a, b), want, rtol=1e-4, atol=1e-4), quantizer


def check_torch() -> None:
    import torch

    import diptych.torch as dt

    layer, x = dt.Linear(64, 32), torch.randn(48, 64)
    with dt.autocast(recipe=Float8CurrentScaling()):
        y = layer(x)
    y.square().mean().backward()
    assert (y - torch.nn.functional.linear(x, layer.weight, layer.bias)).norm() < 0.06 * y.norm()
    assert layer.weight.grad is not None and layer.weight.grad.isfinite().all()


def check_jax() -> None:
    import jax

    import diptych.jax as dj

    x, w = map(jax.numpy.asarray, drawn())
    loss = jax.jit(lambda x, w: jax.numpy.square(dj.dense(x, w, recipe=Float8CurrentScaling())).mean())
    y = dj.dense(x, w, recipe=Float8CurrentScaling())
    assert np.linalg.norm(y - x @ w.T) < 0.06 * np.linalg.norm(y)
    assert np.isfinite(jax.grad(loss, argnums=1)(x, w)).all()


def check_command(home: Path) -> None:
    done = subprocess.run([home / "diptych", "--version"], capture_output=True, text=True)
    assert done.stdout == f"diptych {version('diptych')}\n" == f"diptych {diptych.__version__}\n", done


def main(framework: str) -> None:
    assert not any(shutil.which(tool) for tool in ("cc", "gcc", "g++", "clang", "c++", "nvcc", "cmake")), "a compiler"
    assert not any(importlib.util.find_spec(other) for other in OTHERS[framework]), f"more than {framework}"
    packages = Path(np.__file__).resolve().parents[1]
    assert packages in Path(core.__file__).resolve().parents, f"{core.__file__} is not of the wheel"
    check_core()
    {"numpy": lambda: None, "torch": check_torch, "jax": check_jax}[framework]()
    calls = {row["kernel"]: row["calls"] for row in core.kernel_table()}
    assert calls["cpu.gemm"] >= (2 if framework == "numpy" else 4), calls
    maps = Path("/proc/self/maps").read_text().splitlines()
    libraries = {Path(line.split()[-1]).name for line in maps if ".so" in line}
    if framework == "numpy":
        assert not any(name.startswith(("libcud", "libnv", "libtorch", "libjax")) for name in libraries), libraries
    check_command(Path(sys.executable).parent)
    print(f"{framework}: CPython {sys.version.split()[0]}, diptych {diptych.__version__}: kernels ran")


if __name__ == "__main__":
    main(sys.argv[1])
