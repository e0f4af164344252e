"""Builds CUDA sources for the CPU, with stand-ins for what lies in cuda/ptx (tests/simulated)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diptych.core import _core

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "tests" / "simulated"
CUDA = ROOT / "core_cuda"


class Tensor(ctypes.Structure):
    """The struct `Tensor` of tests/simulated/tensor.h. Tensors without elements are at address 0, as those of torch."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("given", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 3),
    )

    @classmethod
    def of(cls, operand: Any) -> Tensor:
        if operand is None:
            return cls()
        if isinstance(operand, tuple):
            array, dtype = operand
            start = array.ctypes.data if array.size else None  # as torch has it
        else:  # a torch tensor on the CPU
            array, dtype = operand, _core.dtype_table()[str(operand.dtype).removeprefix("torch.")]
            start = operand.data_ptr()
        return cls(start, dtype, array.ndim, True, (ctypes.c_int64 * 3)(*array.shape))


def toolkit() -> Path | None:
    """Returns the path of CUDA's cuda_bf16.h, or None if it is not found."""
    nvcc = shutil.which("nvcc")
    roots = ["/usr/local/cuda", *([Path(nvcc).resolve().parents[1]] if nvcc else [])]
    return next((p for root in roots if (p := Path(root) / "include" / "cuda_bf16.h").exists()), None)


def built(source: str, kernels: Sequence[str] = (), patch: tuple[str, str, str] | None = None) -> ctypes.CDLL:
    """The library of a source of tests/simulated and of `kernels`, files of core_cuda. `patch`: a header of core_cuda,
    what stands in it once, and what shall stand there."""
    header = toolkit()
    if header is None:
        pytest.skip("simulating a kernel needs CUDA's headers")
    if not shutil.which("g++"):
        pytest.skip("simulating a kernel needs g++")
    folder = Path(tempfile.mkdtemp(prefix="diptych-simulated-"))
    if patch is not None:
        path, old, new = patch
        text = (CUDA / path).read_text()
        assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times, not once"
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text.replace(old, new))
    library = folder / "simulated.so"
    folders = [folder, CUDA, CUDA / "include", CUDA / "src", header.parent]
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-psabi", "-I", str(OWN)]
    command += ["-include", str(OWN / "simulated.h")]
    command += [word for f in folders for word in ("-isystem", str(f))]
    sources = [str(OWN / source), "-x", "c++", *(str(CUDA / k) for k in kernels)]
    done = subprocess.run([*command, *sources, "-o", str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    shutil.rmtree(folder)
    return loaded
