"""Walks: the project's files that a call enters. `python tests/architecture/walks.py` prints three walks.

A walk is that of a third call, whose plan, buffer shapes and program are cached, as in training. Files that only
earlier calls of a fresh process enter are its preparation. `sys.setprofile` finds the Python files. It does not see the
core's files, which are listed by hand.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

FOLDERS = {"common": "common", "core": "core_cuda", "torch": "torch_frontend", "jax": "jax_frontend", "lab": "lab"}
# The core's files for each op, from the binding to the kernel table and the CPU kernel.
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
# XLA calls a handler for each op.
HANDLER = ["jax_frontend/csrc/quantize.cpp", "jax_frontend/csrc/call.cpp"]
DENSE = [*HANDLER, *QUANTIZE[2:], "jax_frontend/csrc/gemm.cpp", *GEMM[1:]]
PROGRAM = ["core_cuda/bindings/program.cpp", *QUANTIZE[1:], *GEMM[1:]]
# The files among them whose functions are not on the call stack when the kernel runs: operands, checks, the table.
RETURNED = ("operand.cpp", "call.cpp", "contracts/quantize.cpp", "registry.cpp", "csrc/gemm.cpp")


class Walk(NamedTuple):
    """`files`: those that a third call enters, in order of first entry. `way`: those of them that are on the call
    stack when the first kernel runs. `preparation`: those that only the first two calls enter."""

    files: list[str]
    way: list[str]
    preparation: list[str]


def _file(frame: FrameType) -> str | None:
    _, found, inside = frame.f_code.co_filename.rpartition("/diptych/")
    package = inside.partition("/")[0]
    return f"{FOLDERS[package]}/diptych/{inside}" if found and package in FOLDERS else None


def walk(fn: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Calls `fn`. **Returns** the project's Python files whose functions it entered, in order of first entry, and those
    on the call stack when it first called the core, or in JAX bound the first primitive."""
    files: dict[str, None] = {}
    way: dict[str, None] = {}

    def see(frame: FrameType, event: str, arg: Any) -> None:
        file = _file(frame)
        if file is not None and event == "call":
            files.setdefault(file)
        core = event == "c_call" and getattr(arg, "__module__", None) == "diptych.core._core"
        calls = file is not None and core and arg.__name__ in ("quantize", "run")
        binds = event == "call" and frame.f_code.co_name == "bind" and frame.f_back and _file(frame.f_back)
        if (calls or binds) and not way:
            at: FrameType | None = frame
            while at is not None:
                if (passed := _file(at)) is not None:
                    way.setdefault(passed)
                at = at.f_back

    sys.setprofile(see)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return list(files), list(way)


def thrice(fn: Callable[[], Any], core: list[str]) -> Walk:
    """Returns the walk of a call that was not made before; `core`: the files of the core that it enters."""
    earlier = [*walk(fn)[0], *walk(fn)[0]]
    files, way = walk(fn)
    to_kernel = [f for f in core if f not in GEMM and not f.endswith(RETURNED)]
    prepared = dict.fromkeys(f for f in earlier if f not in files)
    return Walk(files + core, [f for f in files if f in way] + to_kernel, list(prepared))


def all_walks() -> dict[str, Walk]:
    """Returns the walks of `dt.quantize` and `Linear.forward` in torch and of `dj.dense` in JAX, on the CPU."""
    import jax
    import torch

    import diptych.jax as dj
    import diptych.torch as dt
    from diptych.common import Float8CurrentScaling, MXFP8Quantizer

    x, quantizer = torch.randn(32, 64), MXFP8Quantizer()
    verb = thrice(lambda: dt.quantize(x, quantizer), QUANTIZE)
    layer = dt.Linear(64, 32)
    with dt.autocast(recipe=Float8CurrentScaling()):
        forward = thrice(lambda: layer(x), PROGRAM)
    tokens, kernel, recipe = jax.numpy.ones((32, 64)), jax.numpy.ones((16, 64)), Float8CurrentScaling()
    dense = thrice(lambda: dj.dense(tokens, kernel, recipe=recipe), DENSE)
    return {"dt.quantize": verb, "Linear.forward": forward, "dj.dense": dense}


@functools.cache
def in_a_fresh_process() -> dict[str, Walk]:
    """Returns the result of `all_walks` from a process in which nothing was called before."""
    done = subprocess.run([sys.executable, Path(__file__)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: Walk(**found) for name, found in json.loads(done.stdout).items()}


if __name__ == "__main__":
    print(json.dumps({name: found._asdict() for name, found in all_walks().items()}, indent=1))
