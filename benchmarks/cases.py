"""The case table: sections, what each measures, and the goals. It imports no framework."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from diptych.common import FORMATS, RECIPES


class Section(NamedTuple):
    """A part of the suite, measured by the module of its name in `benchmarks.sections`.

    `device`: "cuda", "gpus" (two GPUs of one host) or "cpu".
    `sources`: patterns of files whose code decides the figures; a file brings those that it includes or imports.
    `ops`: the ops whose rows of the kernel table decide which kernel runs.
    `seconds`: the time after which the section starts no further case.
    """

    name: str
    device: str
    sources: tuple[str, ...]
    ops: tuple[str, ...] = ()
    seconds: int = 60
    default: bool = True


class Case(NamedTuple):
    """Calls that are measured in turns. `names`: the project's own; peers join them. `quick`: --quick runs it too."""

    section: str
    what: str
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    quick: bool = True

    def __str__(self) -> str:
        return f"{self.what} {'x'.join(map(str, self.shape))}".strip()


CUDA = "core_cuda/cuda"
PRODUCTS = (f"{CUDA}/gemm/*", f"{CUDA}/grouped/*", f"{CUDA}/products/*")
QUANTIZE = (f"{CUDA}/quantize/*",)
LAYER = (*PRODUCTS, *QUANTIZE, f"{CUDA}/norm/*", f"{CUDA}/activation/*", f"{CUDA}/source/*", f"{CUDA}/scale_update/*")
LAYER_OPS = ("gemm", "quantize", "amax", "norm", "norm_grad", "activation", "activation_grad", "scale_update")
MORE_OPS = ("bias_grad", "dequantize", "grouped_gemm", "quantize_many", "quantize_stack", "scale_update_many")
STEP_OPS = (*LAYER_OPS, *MORE_OPS)
FAMILIES = ("activation", "gemm", "grouped", "norm", "permute", "quantize", "scale_update")  # of the ops in a step
SEEN = ("hash", "statistics")  # ops of captures


def host(*families: str) -> tuple[str, ...]:
    """Returns the files of the core's host side that belong to families of ops."""
    return tuple(f"core_cuda/{folder}/{name}.cpp" for folder in ("bindings", "src/contracts") for name in families)


CORE = (
    *host(*FAMILIES, "errors", "interrupt", "many", "operand", "parts", "program", "source", "stack"),
    "core_cuda/src/*.cpp",
)
CPU = (*(f"core_cuda/cpu/{name}/*" for name in (*FAMILIES, "base", "source")), "core_cuda/cpu/isa/*.cpp")
TORCH = (
    "torch_frontend/diptych/torch/modules/*.py",
    *(f"torch_frontend/diptych/torch/functional/{name}.py" for name in ("gemm", "permute_quantize", "scale_update")),
    *CORE,
)
JAX = (
    *(f"jax_frontend/diptych/jax/{room}/*.py" for room in ("layers", "state")),
    *(f"jax_frontend/csrc/{name}.cpp" for name in (*FAMILIES, "call")),
)
GATHERS = ("torch_frontend/diptych/torch/distributed/gather_quantized.py", *host("transpose"), f"{CUDA}/transpose/*")
CAPTURES = (
    *host(*SEEN),
    "lab/diptych/lab/torch/*.py",
    *(f"lab/diptych/lab/{name}.py" for name in ("capture", "files", "frontend", "job")),
    "lab/diptych/lab/traces/*.py",
)

SECTIONS = {
    s.name: s
    for s in (
        Section("quantize", "cuda", QUANTIZE, ("quantize", "amax"), 30),
        Section("gemm", "cuda", PRODUCTS, ("gemm",), 60),
        Section("grouped", "cuda", PRODUCTS, ("grouped_gemm",), 40),
        Section("fused", "cuda", LAYER[2:6], ("quantize", "amax", *LAYER_OPS[3:7]), 20),
        Section("linear", "cuda", (*LAYER, *TORCH), STEP_OPS, 40),
        Section("host", "cuda", (*LAYER, *TORCH), STEP_OPS, 30),
        Section(
            "permute",
            "cuda",
            (f"{CUDA}/permute/*", *QUANTIZE, f"{CUDA}/quantize/permuted/*"),
            ("permute", "permute_map", "unpermute", "unpermute_grad", "quantize"),
            30,
        ),
        Section("compiled", "cuda", (*LAYER, *TORCH), STEP_OPS, 60),
        Section("llama", "cuda", (*LAYER, *TORCH), LAYER_OPS, 150),
        Section("jax", "cuda", (*LAYER, *JAX), LAYER_OPS, 120),
        Section("several", "gpus", (*LAYER, *TORCH, *GATHERS), (*STEP_OPS, "transpose"), 260),
        Section("sharded", "gpus", (*LAYER, *JAX, "jax_frontend/diptych/jax/sharding/*.py"), LAYER_OPS, 150),
        Section(
            "captures",
            "cuda",
            (*LAYER, *TORCH, *CAPTURES, *(f"{CUDA}/{op}/*" for op in SEEN)),
            (*STEP_OPS, *SEEN),
            90,
        ),
        Section("rule", "cuda", PRODUCTS, ("gemm",), 600, default=False),
        Section("cpu", "cpu", (*CPU, *TORCH), STEP_OPS, 600),
        Section(
            "jax_cpu",
            "cpu",
            (*CPU, *JAX, "jax_frontend/diptych/jax/sharding/*.py"),
            STEP_OPS,
            600,
        ),
        Section("memory", "cpu", (*CPU, *TORCH), STEP_OPS, 600),
        Section(
            "lab",
            "cpu",
            (*CPU, *TORCH, *CAPTURES, *(f"core_cuda/cpu/{op}/*" for op in SEEN), "lab/diptych/lab/diff/*.py"),
            (*STEP_OPS, *SEEN),
            600,
        ),
        Section(
            "noise",
            "cpu",
            (*CPU, *TORCH, *CAPTURES, *(f"core_cuda/cpu/{op}/*" for op in SEEN), "lab/diptych/lab/data.py"),
            (*STEP_OPS, *SEEN),
            900,
            default=False,
        ),
    )
}

ISSUE = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 7168, 16384), (8192, 28672, 4096), (16384, 4096, 4096),
         (4096, 24576, 1536))  # fmt: skip
NINE = (*ISSUE[:4], (4096, 24576, 1536), (4096, 7168, 2048), (4096, 4096, 7168), (8192, 4096, 14336),
        (16384, 8192, 8192))  # DeepGEMM's own  # fmt: skip
DENSE = tuple(dict.fromkeys((*ISSUE, *NINE)))
WGRAD = tuple((n, k, m) for m, n, k in NINE)  # of the same layers
SMALL = ((1, 4096, 4096), (16, 4096, 7168), (64, 7168, 2048), (128, 4096, 4096), (1001, 1531, 1024), (4097, 4097, 4096))
GROUPS = ((8, 4096, 4096, 7168), (64, 512, 2816, 2048), (4, 8192, 7168, 2048), (32, 1024, 4096, 7168),
          (128, 256, 1536, 4096))  # groups, rows of each, N, K  # fmt: skip
QUANTIZED = ((8192, 8192), (16384, 7168), (4096, 4096))
NORM, SWIGLU = (16384, 4096), (16384, 28672)
LINEARS = ((16384, 4096, 4096), (8192, 8192, 8192))
TINY = (128, 256, 256)
ROUTED = ((16384, 4096, 64, 4), (16384, 7168, 256, 8), (8192, 2048, 128, 8))  # tokens, width, experts, choices

PACKED = next(name for name, r in RECIPES.items() if (q := r.operands("fprop")[0]) and q.format.pack > 1)
FP8 = ("fp8-current", "fp8-block")
DECODED = ("mxfp8", PACKED)
TRAINED = (*FP8, "fp8-delayed", *DECODED)
STACKS = ("fp8-current fused", "fp8-block fused", "fp8-current linears", "mxfp8 fused", "fp8-delayed fused",
          "fp8-block linears", f"{PACKED} fused")  # fmt: skip
RANKS = 2  # of the sections `several` and `sharded`
ALONE, PLAIN_GATHER = "one GPU", "bf16 gather"
DATA_PARALLEL, SHARDED = "data parallel", "FSDP"
CUT, SEQUENCE, HALF = "tensor parallel", "sequence parallel", "half, one GPU"
MOVES = ("permute", "permute, map built before", "permute, padded, probs", "unpermute", "gradient of permute",
         "gradient of unpermute")  # fmt: skip
MEASURES = ("hash", "statistics", "errors")
E5M2 = tuple(f.name for f in FORMATS if f.element == "float8_e5m2")
PLAIN = tuple(f.name for f in FORMATS if f.name not in E5M2)  # per tensor, 1x128, 128x128, MXFP8, NVFP4
DELAYED = f"{PLAIN[0]} delayed"
SPECIAL = (f"{PLAIN[3]} 2d", *(f"{PLAIN[4]} {options}" for options in ("2d", "rht", "rht stochastic")))


def _cases() -> Iterable[Case]:
    for shape, what in itertools.product(QUANTIZED, ("both", "rowwise")):
        yield Case("quantize", what, shape, (*PLAIN, DELAYED, *SPECIAL))
        yield Case("quantize", f"{what} e5m2", shape, E5M2, quick=False)
    for shape in DENSE:
        for what in ("fprop", "dgrad", "wgrad"):
            yield Case("gemm", what, shape, FP8 + DECODED)
    for shape in dict.fromkeys((*WGRAD, *ISSUE)):
        yield Case("gemm", "wgrad float32", shape, FP8 + DECODED)
        yield Case("gemm", "wgrad added", shape, FP8, quick=shape in WGRAD[:4])
    for shape in SMALL:  # NVFP4 weights have whole blocks of 16 rows
        yield Case("gemm", "fprop", shape, FP8 + DECODED[: 1 if shape[1] % 16 else 2])
    for shape, cut in itertools.product(GROUPS, ("", " random")):
        for what in ("fprop", "dgrad", "wgrad"):
            yield Case("grouped", what + cut, shape, ("fp8-delayed", "fp8-block", *DECODED), quick=not cut)
    for what, shape in itertools.product(("norm", "gradient of norm"), (NORM,)):
        yield Case("fused", what, shape, TRAINED)
    for what in ("swiglu", "gradient of swiglu"):
        yield Case("fused", what, SWIGLU, TRAINED)
    for shape in LINEARS:
        yield Case("linear", "Linear", shape, TRAINED)
    for shape in GROUPS:
        yield Case("linear", "GroupedLinear", shape, TRAINED, quick=shape in GROUPS[:2])
    for what in ("forward", "forward and backward"):
        yield Case("host", what, TINY, TRAINED)
    yield Case("host", "verbs", (16, 32))
    for shape in ROUTED:
        for what in ("mask", "index"):
            yield Case("permute", what, shape, MOVES)
        yield Case("permute", "FP8 planes", shape, quick=False)
        for what in ("quantize rowwise", "quantize both"):
            yield Case("permute", what, shape, (*PLAIN, DELAYED))
    for mode, names in (("default", TRAINED), ("reduce-overhead", TRAINED[:3])):
        yield Case("compiled", mode, TINY, names)
    yield Case("llama", "torch", (4, 4096, 4096), STACKS)
    yield Case("several", "gathers", (1, 1024, 4096), (*FP8, DECODED[0]))
    yield Case("several", "reductions", (1, 1024, 4096))
    yield Case("several", "weak scaling", (4, 4096, 4096), ("bf16", *FP8, DECODED[0]), quick=False)
    yield Case("several", "tensor parallel", (4, 4096, 4096), (*FP8, DECODED[0]), quick=False)
    yield Case("jax", "fprop", (8192, 8192, 8192), ("fp8-current", "fp8-block"))
    yield Case("jax", "stack", (4, 4096, 4096), FP8)
    for layout in (DATA_PARALLEL, SHARDED):
        yield Case("sharded", layout, (4, 4096, 4096), ("bf16", *FP8, DECODED[0]), quick=layout == SHARDED)
    for recipe, what in itertools.product(FP8, ("fprop", "dgrad", "wgrad", "wgrad float32")):
        yield Case("rule", what, names=(recipe,))
    for what in ("quantize", "gemm", "permute", "linear", "compiled"):
        yield Case("cpu", what)
    yield Case("jax_cpu", "eager dense", (512, 1024, 1024), TRAINED[:4])
    yield Case("jax_cpu", "trace and compile", (24,), ("mxfp8", "fp8-current", "fp8-delayed"))
    yield Case("memory", "batches of changing length", names=("mxfp8",))
    yield Case("lab", "hash", (2**28,))
    yield Case("lab", "capture", (128, 5, 16, 128))
    yield Case("lab", "diff", (2**30,))
    yield Case("lab", "page", (30, 100))
    yield Case("noise", "payloads", (512, 6, 4, 256), tuple(RECIPES))
    yield Case("captures", "ops", (2**28,), MEASURES)
    yield Case("captures", "step", (512, 6, 32, 256))


CASES = tuple(_cases())


class Goal(NamedTuple):
    """A bound on `name` as a multiple of `of` in the cases of these shapes (all, if none are given): of its speed, or
    with `less` of its time or memory. `mean`: the geometric mean over the cases counts, otherwise the worst case."""

    title: str
    section: str
    what: tuple[str, ...]
    name: str
    of: str
    must: float
    aim: float
    shapes: tuple[tuple[int, ...], ...] = ()
    less: str = ""
    mean: bool = False


def _goals() -> Iterable[Goal]:
    for name, must in zip(DECODED, (0.90, 0.88), strict=True):
        yield Goal(f"{name} dense, fprop, of bfloat16", "gemm", ("fprop",), name, "bf16", must, 0.97, ISSUE[1:])
        yield Goal(f"{name} dense 4096³, fprop, of bfloat16", "gemm", ("fprop",), name, "bf16", 0.85, 0.97, ISSUE[:1])
        yield Goal(f"{name} grouped, fprop, of bfloat16", "grouped", ("fprop",), name, "bf16", 0.85, 0.95, GROUPS[:2])
        yield Goal(
            f"Llama stack in torch, {name}, of bfloat16", "llama", ("torch",), f"{name} fused", "bf16", 0.85, 0.95
        )
    dense = ("gemm", ("fprop", "dgrad"), "fp8-block")
    yield Goal("dense blocks, fprop and dgrad, of DeepGEMM", *dense, "DeepGEMM", 0.97, 1.03, NINE, mean=True)
    yield Goal("dense blocks, fprop and dgrad, of cuBLASLt", *dense, "fp8-block cuBLASLt", 1.08, 1.08, NINE, mean=True)
    yield Goal("dense blocks, wgrad added in float32, of DeepGEMM", "gemm", ("wgrad added",), "fp8-block", "DeepGEMM",
               1.12, 1.25, WGRAD, mean=True)  # fmt: skip
    for name, must, aim in (("fp8-current", 1.40, 1.47), ("fp8-block", 1.35, 1.42)):
        yield Goal(f"Linear step, {name}, of bfloat16", "linear", ("Linear",), name, "bf16", must, aim, LINEARS[:1])
    for name, must, aim in (("fp8-current", 1.55, 1.60), ("fp8-block", 1.42, 1.50)):
        yield Goal(
            f"Llama stack in torch, {name}, of bfloat16", "llama", ("torch",), f"{name} fused", "bf16", must, aim
        )
    for name, must, aim in (("fp8-current", 1.48, 1.53), ("fp8-block", 1.32, 1.42)):
        yield Goal(f"Llama stack in JAX, {name}, of bfloat16", "jax", ("stack",), name, "bf16", must, aim)
    yield Goal("memory of the Llama stack, of torchao tensorwise", "llama", ("torch",), "fp8-current fused",
               "torchao tensorwise", 1.05, 0.95, less="GiB")  # fmt: skip
    for name in TRAINED:
        loose = name in ("fp8-delayed", PACKED)
        for what, must, aim in (("forward", 4.5 if loose else 3.5, 2.5),
                                ("forward and backward", 4.0 if loose else 3.0, 2.3)):  # fmt: skip
            yield Goal(f"host time, {name}, {what}, of nn.Linear", "host", (what,), name, "nn.Linear", must, aim,
                       less="us")  # fmt: skip
        yield Goal(
            f"compiled step, {name}, of nn.Linear", "compiled", ("default",), name, "nn.Linear", 1.6, 1.3, less="us"
        )
    for name in (*PLAIN[:4], DELAYED):
        yield Goal(f"quantize, both copies, {name}, of copy", "quantize", ("both",), name, "copy", 0.82, 0.92,
                   QUANTIZED[:2])  # fmt: skip
    yield Goal(f"quantize, both copies, {SPECIAL[-1]}, of copy", "quantize", ("both",), SPECIAL[-1], "copy", 0.50,
               0.70, QUANTIZED[:2])  # fmt: skip
    for what in ("mask", "index"):
        for shapes, must in ((ROUTED[:2], 0.85), (ROUTED[2:], 0.75)):
            for name in ("permute", "unpermute"):
                title = f"{name} by {what}, {shapes[0][1]} elements{' or more' * (must > 0.8)}, of copy"
                yield Goal(title, "permute", (what,), name, "copy", must, must, shapes)
        yield Goal(f"permute by {what}, padded, probabilities, of copy", "permute", (what,), MOVES[2], "copy", 0.8, 0.8)
    for name in (*PLAIN[:4], DELAYED):
        yield Goal(f"permute and quantize, {name}, of copy", "permute", ("quantize rowwise", "quantize both"), name,
                   "copy", 0.75, 0.75)  # fmt: skip
    for name in TRAINED[:3]:
        yield Goal(f"compiled step, captured, {name}, of nn.Linear", "compiled", ("reduce-overhead",), name,
                   "nn.Linear", 1.3, 1.3, less="us")  # fmt: skip
    for name in ("bf16", *FP8, DECODED[0]):
        yield Goal(f"two GPUs, {name}, of {ALONE}", "several", ("weak scaling",), name, f"{name} {ALONE}", 0.95, 0.95)
    for name, layout in itertools.product(("bf16", *FP8, DECODED[0]), (DATA_PARALLEL, SHARDED)):
        yield Goal(
            f"two GPUs in JAX, {layout}, {name}, of {ALONE}", "sharded", (layout,), name, f"{name} {ALONE}", 0.95, 0.95
        )
    for name in (*FP8, DECODED[0]):
        yield Goal(f"two GPUs, few tokens, {name}, of a {PLAIN_GATHER}", "several", ("gathers",), name,
                   f"{name} {PLAIN_GATHER}", 1.05, 1.05)  # fmt: skip
    for name in TRAINED[:4]:
        yield Goal(f"JAX on the CPU, eager dense, {name}, of the plain product", "jax_cpu", ("eager dense",), name,
                   "plain", 2.0, 2.0, less="us")  # fmt: skip
    for name, must in (("mxfp8", 1.5), ("fp8-current", 1.5), ("fp8-delayed", 2.5)):
        yield Goal(f"JAX on the CPU, tracing and compiling 24 blocks, {name}, of plain jnp", "jax_cpu",
                   ("trace and compile",), name, "plain", must, must, less="us")  # fmt: skip
    for name in TRAINED[:4]:
        yield Goal(f"SwiGLU or norm and quantize, {name}, of copy", "fused", ("norm", "swiglu", "gradient of swiglu"),
                   name, "copy", 0.75, 0.88)  # fmt: skip


GOALS = tuple(_goals())


def width(name: str) -> float:
    """Returns the bytes of an element of a product's operands, with its scales."""
    return 2.0 if name == "bf16" else 0.56 if name == PACKED else 1.03 if name == DECODED[0] else 1.0


def chosen(device: str, only: Iterable[str] = ()) -> tuple[Section, ...]:
    """Returns the device's sections: those named, or all that run by default."""
    names = tuple(only)
    return tuple(s for s in SECTIONS.values() if s.device == device and (s.name in names if names else s.default))


def cases_of(section: str, quick: bool = False) -> tuple[Case, ...]:
    return tuple(c for c in CASES if c.section == section and (c.quick or not quick))
