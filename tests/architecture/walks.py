"""The way of a call through the project's files: `python tests/architecture/walks.py` prints two of them.

Each is a first call in a fresh process, because later calls find what they need in caches and enter fewer files.
Python's part is what `sys.setprofile` sees. The core's part does not show there and is listed by hand.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

FOLDERS = {"common": "common", "core": "core_cuda", "torch": "torch_frontend", "jax": "jax_frontend"}
# From the binding to the table of kernels and the CPU kernel, for each op.
QUANTIZE = [
    "core_cuda/bindings/quantize.cpp",
    "core_cuda/bindings/operand.cpp",
    "core_cuda/src/dispatch.cpp",
    "core_cuda/src/contracts/quantize.cpp",
    "core_cuda/src/registry.cpp",
    "core_cuda/cpu/quantize/quantize.cpp",
    "core_cuda/cpu/isa/simd_quantize.h",
]
GEMM = [
    "core_cuda/bindings/gemm.cpp",
    "core_cuda/src/contracts/gemm.cpp",
    "core_cuda/cpu/gemm/gemm.cpp",
    "core_cuda/cpu/gemm/product.cpp",
    "core_cuda/cpu/isa/simd_gemm.h",
]


def walk(fn: Callable[[], Any]) -> list[str]:
    """Calls `fn`. **Returns** the project's Python files whose functions it entered, in order of first entry."""
    files: dict[str, None] = {}

    def see(frame: FrameType, event: str, arg: Any) -> None:
        _, found, inside = frame.f_code.co_filename.rpartition("/diptych/")
        package = inside.partition("/")[0]
        if event == "call" and found and package in FOLDERS:
            files.setdefault(f"{FOLDERS[package]}/diptych/{inside}")

    sys.setprofile(see)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return list(files)


def both() -> dict[str, list[str]]:
    """The walks of `dt.quantize` and of `Linear.forward` in torch, on the CPU."""
    import torch

    import diptych.torch as dt
    from diptych.common import Float8CurrentScaling, MXFP8Quantizer

    x, quantizer = torch.randn(32, 64), MXFP8Quantizer()
    verb = walk(lambda: dt.quantize(x, quantizer))
    layer = dt.Linear(64, 32)
    with dt.autocast(recipe=Float8CurrentScaling()):
        forward = walk(lambda: layer(x))
    return {"dt.quantize": verb + QUANTIZE, "Linear.forward": forward + QUANTIZE + GEMM}


@functools.cache
def in_a_fresh_process() -> dict[str, list[str]]:
    """What `both` returns in a process in which nothing was called before."""
    done = subprocess.run([sys.executable, Path(__file__)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(both(), indent=1))
