"""DeepGEMM's kernels for block scales, compiled ahead, also without a GPU, from checkouts of DeepGEMM and CUTLASS:
`python -m benchmarks.peers.deepgemm --source DEEPGEMM --cutlass CUTLASS --compile-only FILE`. Needs nvcc. Then
`python -m benchmarks --library FILE` measures them.

fprop and dgrad run DeepGEMM's 1d2d kernel, compiled for each shape as DeepGEMM does it, with tiles of 128 x 192; wgrad
runs its 1d1d kernel with tiles of 128 x 152, which always adds to its result. Two thread blocks share each tile of B.
DeepGEMM's own choice of tiles may differ for some shapes.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cases import GROUPS, NINE
from benchmarks.peers import Absent

SOURCE = Path(__file__).resolve().parents[1] / "deepgemm.cu"
KERNELS = ("deepgemm_1d2d", "deepgemm_1d1d")  # functions of the library
ERRORS = {-1: "the driver has no tensor maps", -2: "the library was compiled for other shapes"}


class Operands(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "a_scale", "b", "b_scale", "d", "group_of_row")),
        *((name, ctypes.c_int) for name in ("groups", "m", "n", "k")),
        ("stream", ctypes.c_void_p),
    )


class DeepGEMM:
    """The library's kernels, as calls."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def call(self, kernel: str, a: Any, a_scale: Any, b: Any, b_scale: Any, d: Any, rows: Any = None) -> Callable:
        """Returns a call of a kernel that returns d [M, N], of a [M, K] and b [N, K] or [groups, N, K].

        **Arguments:** scales of blocks of 1 x 128 are [K / 128, rows]. `rows`: the group of each row of a."""
        import torch

        for t in (a, a_scale, b, b_scale, d):
            assert t.is_contiguous()
        function = getattr(self.library, kernel)

        def launch() -> Any:
            pointers = [None if t is None else t.data_ptr() for t in (a, a_scale, b, b_scale, d, rows)]
            m, (n, k) = a.shape[0], b.shape[-2:]
            stream = torch.cuda.current_stream().cuda_stream
            if error := function(ctypes.byref(Operands(*pointers, b.numel() // (n * k), m, n, k, stream))):
                raise RuntimeError(f"DeepGEMM's kernel did not start: {ERRORS.get(error, f'CUDA error {error}')}")
            return d

        return launch


def load(library: Path | None) -> DeepGEMM:
    if library is None:
        raise Absent("no --library with its kernels was given")
    try:
        found = ctypes.CDLL(str(library.resolve()))
    except OSError as error:
        raise Absent(str(error)) from error
    if missing := [name for name in KERNELS if not hasattr(found, name)]:
        raise Absent(f"{library} has no {missing[0]}")
    return DeepGEMM(found)


def compiled(nvcc: str, source: Path, cutlass: Path, library: Path) -> None:
    """Compiles deepgemm.cu to `library`. **Raises** RuntimeError with the compiler's output."""
    compiled_in = [(groups, n, k) for groups, _, n, k in GROUPS] + [(1, n, k) for _, n, k in NINE]
    shapes = " ".join(f"SHAPE({groups}, {n}, {k})" for groups, n, k in dict.fromkeys(compiled_in))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "shapes.h").write_text(f"#define SHAPES {shapes}\n")
        done = subprocess.run(
            [nvcc, "-std=c++20", "-O3", "-shared", "-Xcompiler", "-fPIC", "-gencode=arch=compute_90a,code=sm_90a", "-w",
             "--expt-relaxed-constexpr", "-I", folder, "-I", source / "deep_gemm/include",
             "-I", cutlass / "include", "-o", library, SOURCE],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"nvcc failed:\n{done.stdout}{done.stderr}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.deepgemm", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of DeepGEMM")
    parser.add_argument("--cutlass", type=Path, required=True, help="a checkout of CUTLASS")
    parser.add_argument("--compile-only", type=Path, required=True, metavar="FILE", help="the library to write")
    args = parser.parse_args(argv)
    for folder, file in ((args.source, "deep_gemm/include/deep_gemm"), (args.cutlass, "include/cutlass")):
        if not (folder / file).is_dir():
            parser.error(f"{folder} has no {file}")
    if args.compile_only.is_dir():
        parser.error(f"--compile-only: {args.compile_only} is a folder")
    if not args.compile_only.parent.is_dir():
        parser.error(f"--compile-only: there is no folder {args.compile_only.parent}")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        print("benchmarks.peers.deepgemm: no nvcc on PATH or in /usr/local/cuda/bin", file=sys.stderr)
        return 1
    compiled(nvcc, args.source, args.cutlass, args.compile_only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
