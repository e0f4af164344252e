"""Products with block scales on an H100 or H200, against DeepGEMM's kernels and torch's products:
`python -m benchmarks.deepgemm --source DEEPGEMM --cutlass CUTLASS [--only PART ...] [--out FILE]`, both paths of
checkouts. Needs nvcc, unless `--library FILE` names what `--compile-only FILE` made before, also without a GPU.

- grouped: fprop of equal groups, beside torch's FP8 product by row.
- dense: fprop, beside cuBLASLt's block scales (`torch._scaled_mm`) and bfloat16 `torch.mm`.
- wgrad: dense, float32, overwriting its result and adding to it. DeepGEMM's kernel always adds.

fprop runs DeepGEMM's 1d2d kernel, compiled for each shape as DeepGEMM does it, with tiles of 128 x 192; wgrad runs its
1d1d kernel with tiles of 128 x 152. Two thread blocks share each tile of B. DeepGEMM's own choice of tiles may differ
for some shapes. Results are compared before they are timed: those of diptych's own kernels must have DeepGEMM's bits in
fprop and a relative error below 1e-5 in wgrad; those of cuBLASLt, which may sum in another order, one below 4e-3. All
run in turns. At the end come the geometric means of each part.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import diptych.torch as dt
from benchmarks import common
from benchmarks.dense import SHAPES as DENSE
from benchmarks.gpu import device_seconds_of_each
from benchmarks.grouped import ALIGN, SHAPES, grouped, normal, scaled, sizes_of, tensors
from diptych import core
from diptych.common import RECIPES

RECIPE = "fp8-block"
WGRAD = tuple((n, k, m) for m, n, k in DENSE)  # M, N, K of the weight gradients of fprops of M, N, K
WGRAD_BOUND, BOUND = 1e-5, 4e-3  # relative errors; BOUND is for kernels that sum in another order
KERNELS = ("deepgemm_1d2d", "deepgemm_1d1d")  # functions of the library
ERRORS = {-1: "the driver has no tensor maps", -2: "the library was compiled for other shapes"}


class Operands(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "a_scale", "b", "b_scale", "d", "group_of_row")),
        *((name, ctypes.c_int) for name in ("groups", "m", "n", "k")),
        ("stream", ctypes.c_void_p),
    )


def compiled(nvcc: str, source: Path, cutlass: Path, library: Path) -> None:
    """Compiles deepgemm.cu to `library`.

    **Raises** RuntimeError with the compiler's output."""
    compiled_in = [(groups, n, k) for groups, _, n, k in SHAPES] + [(1, n, k) for _, n, k in DENSE]
    shapes = " ".join(f"SHAPE({groups}, {n}, {k})" for groups, n, k in dict.fromkeys(compiled_in))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "shapes.h").write_text(f"#define SHAPES {shapes}\n")
        done = subprocess.run(
            [nvcc, "-std=c++20", "-O3", "-shared", "-Xcompiler", "-fPIC", "-gencode=arch=compute_90a,code=sm_90a", "-w",
             "--expt-relaxed-constexpr", "-I", folder, "-I", source / "deep_gemm/include",
             "-I", cutlass / "include", "-o", library, Path(__file__).with_suffix(".cu")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"nvcc failed:\n{done.stdout}{done.stderr}")


def loaded(library: Path) -> ctypes.CDLL:
    """Loads a library that `compiled` made.

    **Raises** OSError for a file that is no library, or another one."""
    found = ctypes.CDLL(str(library.resolve()))
    for name in KERNELS:
        if not hasattr(found, name):
            raise OSError(f"{library} has no {name}")
    return found


def launcher(
    kernel: Any,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    d: torch.Tensor,
    group_of_row: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """Returns a call of DeepGEMM's kernel that returns d [M, N], of a [M, K] and b [N, K] or [groups, N, K]."""
    for t in (a, a_scale, b, b_scale, d):
        assert t.is_contiguous()

    def launch() -> torch.Tensor:
        pointers = [None if t is None else t.data_ptr() for t in (a, a_scale, b, b_scale, d, group_of_row)]
        m, (n, k) = a.shape[0], b.shape[-2:]
        stream = torch.cuda.current_stream().cuda_stream
        if error := kernel(ctypes.byref(Operands(*pointers, b.numel() // (n * k), m, n, k, stream))):
            raise RuntimeError(f"DeepGEMM's kernel did not start: {ERRORS.get(error, f'CUDA error {error}')}")
        return d

    return launch


def transposed(scale: torch.Tensor) -> torch.Tensor:
    return scale.t().contiguous()


def copies(product: str, *operands: torch.Tensor) -> list[Any]:
    """Quantizes the operands of a dense product, each to the copy that it reads."""
    made = []
    for t, quantizer in zip(operands, RECIPES[RECIPE].operands(product), strict=True):
        assert quantizer is not None
        made.append(dt.quantize(t, quantizer.with_usage(rowwise=product == "fprop", columnwise=product == "wgrad")))
    return made


def kernel_of(run: Callable[[], torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Returns the name of the kernel that the product ran, and its result."""
    core.reset_calls()
    result = run()
    return " ".join(r["kernel"] for r in core.kernel_table() if r["op"] == "gemm" and r["calls"]), result


def is_own(kernel: str) -> bool:
    """Returns whether it sums in DeepGEMM's order, as diptych's own kernels do and cuBLASLt's need not."""
    return kernel.startswith("cuda.native")


def check_bits(case: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got.view(torch.int16), want.view(torch.int16)):
        raise AssertionError(f"{case}: other bits than DeepGEMM's")


def check_error(case: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < bound:
        raise AssertionError(f"{case}: {error:.3g} from DeepGEMM's result, which may be {bound:.3g} at most")


def grouped_rows(library: ctypes.CDLL, shape: tuple[int, int, int, int]) -> Iterator[dict[str, Any]]:
    groups, size, n, k = shape
    case = f"{RECIPE} fprop {groups}x{size}x{n}x{k} equal"
    a, b = tensors("fprop", *shape)
    offsets = sizes_of(groups, size)["equal"]
    made = grouped("fprop", RECIPES[RECIPE], a, b)
    by_row = scaled("fprop", a, b, offsets[1:])
    assert made is not None and by_row is not None
    (*_, fast_accum), x, y = made
    ours = functools.partial(
        dt.grouped_gemm, x, y, offsets, trans_b=True, out_dtype=torch.bfloat16, align=ALIGN, fast_accum=fast_accum
    )
    theirs = launcher(
        library.deepgemm_1d2d, x.rowwise_data, transposed(x.rowwise_scale_inv), y.rowwise_data, y.rowwise_scale_inv,
        torch.empty(groups * size, n, dtype=torch.bfloat16, device="cuda"),
        torch.arange(groups, dtype=torch.int32, device="cuda").repeat_interleave(size),
    )  # fmt: skip
    check_bits(case, ours(), theirs())
    flops = 2 * groups * size * n * k / 1e12
    mine, their, torchs = (flops / t for t in device_seconds_of_each([ours, theirs, by_row], repeat=21))
    yield {"op": "grouped_gemm", "case": case, "TFLOP/s": mine, "DeepGEMM": their, "torch FP8 by row": torchs,
           "of DeepGEMM": mine / their, "of torch": mine / torchs}  # fmt: skip


def dense_rows(library: ctypes.CDLL, shape: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    m, n, k = shape
    case = f"{RECIPE} fprop {m}x{n}x{k}"
    a, b = normal(m, k), normal(n, k)
    x, y = copies("fprop", a, b)
    a_scale = transposed(x.rowwise_scale_inv)
    ours = functools.partial(dt.gemm, x, y, out_dtype=torch.bfloat16)
    theirs = launcher(
        library.deepgemm_1d2d, x.rowwise_data, a_scale, y.rowwise_data, y.rowwise_scale_inv,
        torch.empty(m, n, dtype=torch.bfloat16, device="cuda"),
    )  # fmt: skip
    cublaslt = functools.partial(
        torch.ops.aten._scaled_mm, x.rowwise_data, y.rowwise_data.t(), scale_a=a_scale.t(),
        scale_b=y.rowwise_scale_inv.t(), out_dtype=torch.bfloat16,
    )  # fmt: skip
    kernel, got = kernel_of(ours)
    want = theirs()
    if is_own(kernel):
        check_bits(case, got, want)
    else:
        check_error(case, got, want, BOUND)
    check_error(f"{case} of torch._scaled_mm", cublaslt(), want, BOUND)
    flops = 2 * m * n * k / 1e12
    runs = [ours, theirs, cublaslt, functools.partial(torch.mm, a, b.t())]
    mine, their, torchs, bf16 = (flops / t for t in device_seconds_of_each(runs, repeat=21))
    yield {"op": "gemm", "case": case, "kernel": kernel, "TFLOP/s": mine, "DeepGEMM": their,
           "torch._scaled_mm": torchs, "bf16": bf16, "of DeepGEMM": mine / their,
           "of torch._scaled_mm": mine / torchs}  # fmt: skip


def wgrad_rows(library: ctypes.CDLL, shape: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """A row for the product that overwrites its result, and one for the product that adds to it."""
    m, n, k = shape
    x, y = copies("wgrad", normal(k, m), normal(k, n))
    added, d = (torch.zeros(m, n, device="cuda") for _ in range(2))
    ours: dict[str, Callable[[], torch.Tensor]] = {
        "gemm": functools.partial(dt.gemm, x, y, trans_a=True, trans_b=False, out_dtype=torch.float32),
        "gemm_into": functools.partial(dt.gemm_into, added, x, y, trans_a=True, trans_b=False, beta=1.0),
    }
    theirs = launcher(
        library.deepgemm_1d1d, x.columnwise_data, transposed(x.columnwise_scale_inv), y.columnwise_data,
        transposed(y.columnwise_scale_inv), d,
    )  # fmt: skip
    want = theirs()
    case = f"{RECIPE} wgrad {m}x{n}x{k} float32"
    kernels = {}
    for op, run in ours.items():
        kernels[op], got = kernel_of(run)
        check_error(f"{op} {case}", got, want, WGRAD_BOUND if is_own(kernels[op]) else BOUND)
    flops = 2 * m * n * k / 1e12
    *mine, their = (flops / t for t in device_seconds_of_each([*ours.values(), theirs], repeat=21))
    for (op, kernel), speed in zip(kernels.items(), mine, strict=True):
        yield {"op": op, "case": case, "kernel": kernel, "TFLOP/s": speed, "DeepGEMM": their,
               "of DeepGEMM": speed / their}  # fmt: skip


PARTS: dict[str, tuple[Callable[[ctypes.CDLL, Any], Iterator[dict[str, Any]]], tuple[Any, ...]]] = {
    "grouped": (grouped_rows, SHAPES),
    "dense": (dense_rows, DENSE),
    "wgrad": (wgrad_rows, WGRAD),
}


def measured(library: ctypes.CDLL, only: list[str]) -> list[dict[str, Any]]:
    """Runs the parts named, prints their rows as they come and then their means, and returns the rows."""
    rows: list[dict[str, Any]] = []
    means = []
    for name in (name for name in PARTS if name in only):
        part, shapes = PARTS[name]
        speeds: dict[str, list[float]] = {}
        for shape in shapes:
            fresh = list(part(library, shape))
            print(common.table(fresh), end="\n\n", flush=True)
            rows += fresh
            for row in fresh:
                speeds.setdefault(row["op"], []).append(row["of DeepGEMM"])
            torch.cuda.empty_cache()
        means += [
            {"part": name, "op": op, "shapes": len(s), "geometric mean of DeepGEMM": statistics.geometric_mean(s)}
            for op, s in speeds.items()
        ]
    print(common.table(means))
    return rows


def arguments(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deepgemm", description=__doc__)
    parser.add_argument("--source", type=Path, help="a checkout of DeepGEMM")
    parser.add_argument("--cutlass", type=Path, help="a checkout of CUTLASS")
    parser.add_argument("--compile-only", type=Path, metavar="FILE", help="compile the library to FILE and exit")
    parser.add_argument("--library", type=Path, metavar="FILE", help="a library compiled before, instead of checkouts")
    parser.add_argument("--only", nargs="+", action="extend", choices=PARTS, help="parts to run; all by default")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    if args.library:
        if args.source or args.cutlass or args.compile_only:
            parser.error(
                "--library stands for a library compiled before: give no --source, --cutlass or --compile-only"
            )
        if not args.library.is_file():
            parser.error(f"--library: {args.library} is no file")
        return parser, args
    if not (args.source and args.cutlass):
        parser.error("give --source and --cutlass to compile DeepGEMM's kernels, or --library")
    for folder, file in ((args.source, "deep_gemm/include/deep_gemm"), (args.cutlass, "include/cutlass")):
        if not (folder / file).is_dir():
            parser.error(f"{folder} has no {file}")
    if args.compile_only:
        if args.only or args.out:
            parser.error("--compile-only measures nothing: give no --only or --out")
        if args.compile_only.is_dir():
            parser.error(f"--compile-only: {args.compile_only} is a folder")
        if not args.compile_only.parent.is_dir():
            parser.error(f"--compile-only: there is no folder {args.compile_only.parent}")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    parser, args = arguments(argv)
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None and not args.library:
        print("benchmarks.deepgemm: no nvcc on PATH or in /usr/local/cuda/bin", file=sys.stderr)
        return 1
    if args.compile_only:
        compiled(str(nvcc), args.source, args.cutlass, args.compile_only)
        return 0
    if not (core.build_info()["cuda"] and torch.cuda.is_available()):
        print("benchmarks.deepgemm: needs a GPU and a build with CUDA; see `diptych doctor`", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        file = args.library or Path(folder) / "deepgemm.so"
        if not args.library:
            compiled(str(nvcc), args.source, args.cutlass, file)
        try:
            library = loaded(file)
        except OSError as error:
            parser.error(str(error))
    rows = measured(library, args.only or list(PARTS))
    if args.out:
        common.save(args.out, rows, gpu=torch.cuda.get_device_name(0), cuda=dict(core.cuda_info()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
