"""Reports which recipes and kernels run natively, emulated or not at all on this machine, and why."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
from typing import Any

from diptych import core
from diptych.common import FORMATS, RECIPES, Recipe
from diptych.core import _kernels
from diptych.lab.frontend import discover
from diptych.lab.job import linear_dtype

SHAPES = {"aligned": (512, 512, 512), "unaligned": (509, 251, 127)}
_PACKAGES = ("diptych", "numpy", "ml_dtypes", "torch", "jax", "jaxlib", "optax")


def diagnose() -> dict[str, Any]:
    """Returns all data that `diptych doctor` prints. It works without frontends and without a GPU."""
    frontends: dict[str, Any] = {}
    for name, found in discover().items():  # frameworks come first, because they load the cuBLASLt that the core finds
        if isinstance(found, Exception):
            frontends[name] = {"usable": False, "why": f"{type(found).__name__}: {found}"}
        else:
            devices = {d: found.device_problem(d) for d in ("cpu", "cuda")}
            frontends[name] = {"usable": True, "versions": found.versions(), "devices": devices}
    build = dict(core.build_info())
    cuda, problem = _cuda()
    devices = [("cpu", 0, "CPU")] + [("cuda", i, f"GPU {i} (sm_{a})") for i, a in enumerate(cuda["archs"])]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "build": build,
        "cuda": cuda | {"driver": _driver(), "problem": problem},
        "threads": core.get_num_threads(),
        "frontends": frontends,
        "recipes": [_recipe(n, r, device) for device in devices for n, r in RECIPES.items()],
        "formats": [row.name for row in FORMATS],
        "kernels": [dict(row) for row in core.kernel_table()],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> tuple[dict[str, Any], str | None]:
    """Returns the GPUs that the core finds, and the reason if it finds none."""
    try:
        info = dict(core.cuda_info())
    except RuntimeError as e:
        return {"archs": [], "cublaslt": ""}, str(e)
    if not core.build_info()["cuda"]:
        return info, "this build has no CUDA backend; it is built where nvcc is found (DIPTYCH_CUDA=on insists)"
    if not info["archs"]:
        return info, "the driver reports no GPU, or there is no driver"
    return info, None


def _driver() -> str | None:
    """Returns the CUDA version that the installed driver supports, None if there is no driver."""
    try:
        version = ctypes.c_int()
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def _recipe(name: str, recipe: Recipe, device: tuple[str, int, str]) -> dict[str, Any]:
    """Returns how a recipe's three products run on one device, for an aligned and an unaligned shape."""
    backend, index, label = device
    products: dict[str, dict[str, Any]] = {}
    arch = _kernels.arch_of(backend, index)
    dtype, ops = linear_dtype(recipe), set()
    for product in _kernels.PRODUCTS:
        for quantizer in recipe.operands(product):
            if quantizer is not None:
                ops |= {("quantize", quantizer.format.name)}
                ops |= {("scale_update", quantizer.format.name)} if quantizer.needs_scale else set()
        for kind, mnk in SHAPES.items():
            found = _product(product, recipe, mnk, dtype, backend, index)
            products.setdefault(product, {})[kind] = {**found, "mnk": list(mnk)}
    others = [{"op": op, "format": fmt, **_kernels.any_shape(op, (fmt,), backend, arch)} for op, fmt in sorted(ops)]
    formats = sorted({fmt for _, fmt in ops})
    return {"recipe": name, "device": label, "formats": formats, "products": products, "ops": others}


def _product(
    product: str, recipe: Recipe, mnk: tuple[int, int, int], dtype: str, backend: str, index: int
) -> dict[str, Any]:
    """Returns the kernel of one product, or the reason why there is none."""
    a, b = recipe.operands(product)
    if a is not None and b is not None and max(a.format.pack, b.format.pack) > 1:
        block = max(q.format.block_cols or q.format.pack for q in (a, b))
        if any(extent % block for extent in mnk):
            return {"level": "refused", "kernel": "", "note": f"extents must be multiples of {block}"}
    return _kernels.product(product, (a, b), mnk, dtype, backend, index, recipe.gemm_options(product))


def as_text(found: dict[str, Any]) -> str:
    """Returns the result of `diagnose()` as text for the terminal."""
    packages = ", ".join(f"{k} {v or 'not installed'}" for k, v in found["packages"].items())
    build = found["build"]
    lines = [
        f"Python {found['python']} on {found['platform']}",
        packages,
        "",
        "Core",
        f"  compiler {build['compiler']}; CPU kernels for {build['isa']}; {found['threads']} threads",
        f"  CUDA backend: {_cuda_text(found)}",
        f"  formats: {', '.join(found['formats'])}",
        "",
        "Frontends",
    ]
    for name, f in found["frontends"].items():
        if not f["usable"]:
            lines.append(f"  {name}: not usable: {f['why']}")
            continue
        versions = ", ".join(f"{k} {v}" for k, v in f["versions"].items())
        lines.append(f"  {name}: {versions}")
        lines += [f"    {d}: {'usable' if why is None else 'not usable: ' + why}" for d, why in f["devices"].items()]
    if not found["frontends"]:
        lines.append("  none is registered; diptych.core works on NumPy arrays all the same")
    lines += ["", "Recipes: how a linear's products run, for extents in multiples of 16 and others, what feeds them"]
    for r in found["recipes"]:
        lines.append(f"  {r['recipe']} on {r['device']}: {', '.join(r['formats'])}")
        for product, kinds in r["products"].items():
            parts = [f"{kind}: {_how(k)}" for kind, k in kinds.items()]
            differ = len({(k["level"], k["kernel"]) for k in kinds.values()}) > 1
            lines.append(f"    {product}: " + ("; ".join(parts) if differ else _how(kinds["aligned"])))
        others: dict[tuple[str, str], list[str]] = {}
        for o in r["ops"]:
            others.setdefault((o["op"], _how(o)), []).append(o["format"])
        several = len({op for op, _ in others}) < len(others)
        lines += [f"    {op}: {how}{' for ' + ', '.join(f) if several else ''}" for (op, how), f in others.items()]
    lines += ["", "Kernels of this build, in order of preference"]
    for row in found["kernels"]:
        first, alone = row["min_arch"], row["min_arch"] == row["max_arch"]
        arch = "" if row["backend"] != "cuda" else f" on sm_{first}" if alone else f" from sm_{first}"
        lines.append(f"  {row['op']:<15} {row['kernel']:<22} {row['level']}{arch}{_note(row['note'])}")
    return "\n".join(lines)


def _how(found: dict[str, Any]) -> str:
    return f"{found['level']} {found['kernel']}".strip() + _note(found["note"])


def _note(note: str) -> str:
    return f" ({note})" if note else ""


def _cuda_text(found: dict[str, Any]) -> str:
    cuda, build = found["cuda"], found["build"]
    built = f"built with toolkit {build['cuda_toolkit']} for {build['cuda_archs']}" if build["cuda"] else "not built"
    built += f"; driver for CUDA {cuda['driver']}" if cuda["driver"] else "; no driver"
    if cuda["problem"]:
        return f"{built}; {cuda['problem']}"
    lt = f"cuBLASLt {cuda['cublaslt']}" if cuda["cublaslt"] else "no cuBLASLt found"
    return f"{built}; {', '.join(f'sm_{a}' for a in cuda['archs'])}; {lt}"
