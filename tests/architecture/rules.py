"""The architecture as functions: each takes the project's root and returns what breaks one rule."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

MAX_LINES = 500

PACKAGES = {
    "common": "common/diptych/common",
    "lab": "common/diptych/lab",
    "core": "core_cuda/diptych/core",
    "torch": "torch_frontend/diptych/torch",
    "jax": "jax_frontend/diptych/jax",
}
ARROWS = {
    "common": set(),
    "core": {"common"},
    "lab": {"common", "core"},
    "torch": {"common", "core"},
    "jax": {"common", "core"},
}
# A panel's adapter registers with the lab; nothing else in a panel knows it.
ADAPTERS = {"lab.py", "gpt.py"}
# What each package may import from outside, beyond the standard library.
THIRD_PARTY = {
    "common": set(),
    "core": {"numpy", "ml_dtypes"},
    "lab": {"numpy", "ml_dtypes", "jinja2", "matplotlib", "tqdm"},
    "torch": {"torch", "numpy", "ml_dtypes"},
    "jax": {"jax", "jaxlib", "numpy", "ml_dtypes", "optax"},
}
# Only one framework has it; the reason stands beside.
UNPAIRED = {
    "torch": {
        "checkpoint.py": "saves states and random numbers for a recomputation; JAX's remat replays pure functions",
        "convert.py": "swaps modules in place; JAX injects a dot_general (injection.py)",
        "module.py": "modules with buffers; JAX's layers are functions",
        "autocast.py": "a dynamically scoped recipe, which a jit cache would make stale",
        "custom_op.py": "ops of graphs from dataclasses; JAX traces the layers' functions as they stand",
        "flops.py": "counts our ops for torch's FLOP counter; XLA's cost analysis asks the compiled program",
        "weight_gradients.py": "gradients that go elsewhere in backward; JAX returns them (weights.py's Pullback)",
        "experts.py": "layers of other libraries that convert.py takes",
        "fx.py": "modules as nodes of torch.fx's graphs; JAX has one way to trace",
        "op_fields.py": "how custom_op.py takes arguments apart",
        "replay.py": "repeats the nodes' ops of custom_op.py",
        "tracing.py": "makes what a graph reads before it is traced and before it runs; JAX's states are arguments",
        "earlier_names.py": "names in pickled modules; what JAX pickles has stayed where it was",
        "eager_only.py": "parts of compiled code that run eagerly; jit has none",
        "delayed.py": "delayed scaling's update inside of graphs; JAX's state is a value",
        "stateful.py": "what modules keep as buffers; JAX's states are arguments",
        "check_states.py": "looks through a model's buffers; JAX's states are values to look at",
        "prepare.py": "makes a model's states at once; JAX's init_state makes them as values",
        "late.py": "states that a module makes late; JAX's are arguments",
        "graphs.py": "CUDA graphs of modules; XLA captures them itself",
        "held.py": "weights that optimizers change in place; JAX's parameters are values",
        "held_state.py": "state dicts of modules; JAX's parameters are pytrees of arrays",
        "model_init.py": "a region for modules' constructors; JAX quantizes a tree of parameters (weights.py)",
        "quantized_ops.py": "torch's operators on a tensor subclass; JAX's arrays are pytrees",
        "operands.py": "operands as the tensors that autograd saves; JAX saves pytrees as they are",
        "proto.py": "tensors without data; JAX has ShapeDtypeStruct",
        "layer.py": "the linear layer as an op; JAX's is linear.py itself",
        "layer_node.py": "linear layers inside of a graph's node; JAX has no nodes of its own",
        "grouped_layer.py": "the grouped layer as an op; JAX's is grouped_linear.py itself",
        "te.py": "TransformerEngine's functions and state dicts of torch modules",
        "te_arguments.py": "arguments of TransformerEngine's torch modules; JAX's layers are functions",
        "te_states.py": "reads the states of TransformerEngine's torch modules",
        "opaque.py": "recipes as torch.compile constants; JAX takes any hashable as a static argument",
    },
    "jax": {
        "amax_check.py": "tells averaged states, which travel as gradients; torch mutates buffers",
        "ffi.py": "XLA calls the core through a handler library; torch calls the bindings",
        "injection.py": "a dot_general for unmodified models; torch swaps modules (convert.py)",
        "residuals.py": "what custom_vjp rules save; torch's autograd functions keep it themselves",
        "transport.py": "ways to carry state out of a gradient; torch mutates buffers",
    },
}
# C++: which folders a folder's files may include from, besides their own.
INCLUDES = {
    "include": {"include"},
    "cpu": {"include"},
    "cuda": {"include"},
    "src": {"include"},
    "bindings": {"include", "src", "cpu", "cuda"},
}
# Files of src that may look into a backend: the kernel table, and what makes a device current.
BACKEND_USERS = {"registry.cpp", "dispatch.cpp"}
FORMAT_TABLES = {"core_cuda/include/diptych/format.h", "common/diptych/common/formats.py"}
RECIPE_NAMES = "common/diptych/common/recipes.py"
SOURCE = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".cc")
CODE_FOLDERS = ("common", "core_cuda", "torch_frontend", "jax_frontend", "tests", "benchmarks", "examples")


def sources(root: Path, *suffixes: str) -> list[Path]:
    return sorted(
        p for d in CODE_FOLDERS for p in (root / d).rglob("*") if p.suffix in (suffixes or SOURCE) and p.is_file()
    )


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                names.add("relative import")
            elif node.module == "diptych":
                names.update(f"diptych.{alias.name}" for alias in node.names)
            else:
                names.add(node.module or "")
    return names


def python_arrows(root: Path) -> list[str]:
    """Imports that go against the arrows."""
    broken = []
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).glob("*.py")):
            for name in _imports(path):
                parts = name.split(".")
                where = f"{folder}/{path.name} imports {name}"
                if parts[0] == "diptych":
                    target = parts[1] if len(parts) > 1 else ""
                    adapter = target == "lab" and package in ("torch", "jax") and path.name in ADAPTERS
                    if target != package and target not in ARROWS[package] and not adapter:
                        broken.append(where)
                elif parts[0] not in sys.stdlib_module_names and parts[0] not in THIRD_PARTY[package]:
                    broken.append(where)
    return broken


def namespace(root: Path) -> list[str]:
    """`diptych` is a namespace package: no folder of that name may hold an __init__.py."""
    return [str(p.relative_to(root)) for p in root.glob("*/diptych/__init__.py")]


def cpp_arrows(root: Path) -> list[str]:
    """Includes that go against the arrows inside the core."""
    broken = []
    core = root / "core_cuda"
    for path in sources(root, ".h", ".cpp", ".cu", ".cuh"):
        if core not in path.parents:
            continue
        folder = path.relative_to(core).parts[0]
        for target in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M):
            top = target.split("/")[0]
            to = "include" if top == "diptych" else top if top in INCLUDES else folder
            allowed = to == folder or to in INCLUDES[folder]
            if folder == "src" and to in ("cpu", "cuda"):
                allowed = path.name in BACKEND_USERS
            if not allowed:
                broken.append(f"{path.relative_to(root)} includes {target}")
    return broken


def file_sizes(root: Path) -> list[str]:
    lengths = {p: len(p.read_text().splitlines()) for p in sources(root)}
    return [f"{p.relative_to(root)}: {n} lines" for p, n in lengths.items() if n > MAX_LINES]


def format_names(root: Path) -> list[str]:
    """A format's name written anywhere but in the two tables, and as the name of a recipe."""
    names = re.findall(r'FormatRow\("([^"]+)"', (root / "common/diptych/common/formats.py").read_text())
    assert names, "the format table was not found"
    pattern = re.compile(r"\b(" + "|".join(names) + r")\b")
    broken = []
    for path in sources(root):
        relative = str(path.relative_to(root))
        if relative in FORMAT_TABLES or relative.startswith("tests/"):
            continue
        text = path.read_text()
        if relative == RECIPE_NAMES:
            text = text[: text.index("RECIPES: dict")]  # commands may call a recipe by the name of its format
            text = re.sub(r"def \w+\(self\) -> bool", "", text)  # so may the question which recipe it is
        broken += [f"{relative} names {m}" for m in sorted(set(pattern.findall(text)))]
    return broken


def kernels_named_once(root: Path) -> list[str]:
    """A kernel's entry point mentioned in src outside of the registry."""
    broken = []
    for path in sorted((root / "core_cuda/src").glob("*.cpp")):
        if path.name == "registry.cpp":
            continue
        named = re.findall(r"\b(?:cpu|cuda)::(?:amax|quantize|dequantize|gemm\w*|bias_grad\w*)\b", path.read_text())
        broken += [f"{path.name} names {n}" for n in named]
    return broken


def mirrored(root: Path) -> list[str]:
    """Files that one panel has and the other does not, beyond the listed exceptions."""
    files = {p: {f.name for f in (root / PACKAGES[p]).glob("*.py")} for p in ("torch", "jax")}
    broken = []
    for one, other in (("torch", "jax"), ("jax", "torch")):
        alone = files[one] - files[other] - set(UNPAIRED[one])
        broken += [f"{PACKAGES[one]}/{name} has no twin in {PACKAGES[other]}" for name in sorted(alone)]
    return broken


ALL = (python_arrows, namespace, cpp_arrows, file_sizes, format_names, kernels_named_once, mirrored)
