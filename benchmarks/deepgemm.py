"""Products of groups with block scales on an H100 or H200, against DeepGEMM's kernel and torch's FP8 by row:
`python -m benchmarks.deepgemm --source DEEPGEMM --cutlass CUTLASS [--out FILE]`, both paths of checkouts. Needs nvcc.

The kernel is compiled as DeepGEMM compiles it, for these shapes, with tiles of 128 x 192 whose B two thread blocks
share, which are its fastest tiles here. The benchmark checks that both give the same bits, and runs all in turns.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import diptych.torch as dt
from benchmarks import common
from benchmarks.gpu import device_seconds_of_each
from benchmarks.grouped import ALIGN, SHAPES, grouped, scaled, sizes_of, tensors
from diptych import core
from diptych.common import RECIPES

RECIPE = "fp8-block"


class Operands(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "a_scale_t", "b", "b_scale", "d", "group_of_row")),
        ("rows", ctypes.c_int),
        ("stream", ctypes.c_void_p),
    )


def compiled(nvcc: str, source: Path, cutlass: Path, folder: Path) -> Path:
    """Compiles deepgemm.cu and loads the library.

    **Raises** RuntimeError with the compiler's output."""
    library = folder / "deepgemm.so"
    shapes = " ".join(f"SHAPE({groups}, {n}, {k})" for groups, _, n, k in SHAPES)
    (folder / "shapes.h").write_text(f"#define SHAPES {shapes}\n")
    done = subprocess.run(
        [nvcc, "-std=c++20", "-O3", "-shared", "-Xcompiler", "-fPIC", "-gencode=arch=compute_90a,code=sm_90a", "-w",
         "--expt-relaxed-constexpr", "-I", folder, "-I", source / "deep_gemm/include",
         "-I", cutlass / "include", "-o", library, Path(__file__).with_suffix(".cu")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"nvcc failed:\n{done.stderr}")
    return library


def rows(library: ctypes.CDLL) -> Iterator[dict[str, Any]]:
    for number, (groups, size, n, k) in enumerate(SHAPES):
        a, b = tensors("fprop", groups, size, n, k)
        offsets = sizes_of(groups, size)["equal"]
        made = grouped("fprop", RECIPES[RECIPE], a, b)
        assert made is not None
        (*_, fast_accum), x, y = made
        d = torch.empty(groups * size, n, dtype=torch.bfloat16, device="cuda")
        a_scale_t = x.rowwise_scale_inv.t().contiguous()
        group_of_row = torch.arange(groups, dtype=torch.int32, device="cuda").repeat_interleave(size)
        operands = Operands(
            x.rowwise_data.data_ptr(), a_scale_t.data_ptr(), y.rowwise_data.data_ptr(),
            y.rowwise_scale_inv.data_ptr(), d.data_ptr(), group_of_row.data_ptr(), groups * size,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

        def theirs(number: int = number, operands: Operands = operands) -> None:
            if error := library.deepgemm(number, ctypes.byref(operands)):
                raise RuntimeError(f"DeepGEMM's kernel did not start: error {error}")

        def ours(x: Any = x, y: Any = y, offsets: torch.Tensor = offsets, fast: bool = fast_accum) -> torch.Tensor:
            return dt.grouped_gemm(x, y, offsets, trans_b=True, out_dtype=torch.bfloat16, align=ALIGN, fast_accum=fast)

        theirs()
        if not torch.equal(ours().view(torch.int16), d.view(torch.int16)):
            raise AssertionError(f"{groups}x{size}x{n}x{k}: other bits than DeepGEMM's")
        by_row = scaled("fprop", a, b, offsets[1:])
        assert by_row is not None
        flops = 2 * groups * size * n * k / 1e12
        mine, their, torchs = (flops / t for t in device_seconds_of_each([ours, theirs, by_row], repeat=21))
        yield {"op": "grouped_gemm", "case": f"{RECIPE} fprop {groups}x{size}x{n}x{k} equal", "TFLOP/s": mine,
               "DeepGEMM": their, "torch FP8 by row": torchs, "of DeepGEMM": mine / their,
               "of torch": mine / torchs}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deepgemm", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of DeepGEMM")
    parser.add_argument("--cutlass", type=Path, required=True, help="a checkout of CUTLASS")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    for folder, file in ((args.source, "deep_gemm/include/deep_gemm"), (args.cutlass, "include/cutlass")):
        if not (folder / file).is_dir():
            parser.error(f"{folder} has no {file}")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        print("benchmarks.deepgemm: no nvcc on PATH or in /usr/local/cuda/bin", file=sys.stderr)
        return 1
    if not (core.build_info()["cuda"] and torch.cuda.is_available()):
        print("benchmarks.deepgemm: needs a GPU and a build with CUDA; see `diptych doctor`", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(str(compiled(nvcc, args.source, args.cutlass, Path(folder))))
    measured = list(rows(library))
    print(common.table(measured))
    if args.out:
        common.save(args.out, measured, gpu=torch.cuda.get_device_name(0), cuda=dict(core.cuda_info()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
