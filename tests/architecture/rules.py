"""The architecture as functions: each takes the project's root and returns what breaks one rule."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_LINES = 500

PACKAGES = {
    "common": "common/diptych/common",
    "lab": "lab/diptych/lab",
    "core": "core_cuda/diptych/core",
    "torch": "torch_frontend/diptych/torch",
    "te": "torch_frontend/diptych/te",
    "jax": "jax_frontend/diptych/jax",
    "lab.torch": "lab/diptych/lab/torch",
    "lab.jax": "lab/diptych/lab/jax",
}
ARROWS = {
    "common": set(),
    "core": {"common"},
    "lab": {"common", "core"},
    "torch": {"common", "core"},
    "te": {"common", "torch"},
    "jax": {"common", "core"},
    "lab.torch": {"common", "core", "lab", "torch"},
    "lab.jax": {"common", "core", "lab", "jax"},
}
LAB_FACE = "lab.py"  # a panel's only file that imports from the lab: it re-exports what the lab has for the framework
# A panel's rooms: a file imports from its own room and from those before it.
ROOMS = {
    "torch": (
        "private", "primitives", "tensors", "graph", "functional", "state", "layers", "modules", "distributed",
        "integrations",
    ),
    "jax": ("private", "primitives", "tensors", "jaxprs", "functional", "state", "layers", "sharding", "modules"),
}  # fmt: skip
PRIVATE = "private"  # the room that alone names a framework's private API
# Attributes with an underscore that are no framework's private API: of tensors and modules, which their subclasses
# use; of named tuples; and of Python, transformers and flax.
OPEN_ATTRIBUTES = frozenset({
    "_version", "_base", "_parameters", "_buffers", "_modules", "_fields", "_replace", "_asdict",
    "_initializing", "_getframe", "_apply_gate", "_get_bias_shape", "_init_weights", "_state",
})  # fmt: skip
# What each package may import from outside, beyond the standard library.
THIRD_PARTY = {
    "common": set(),
    "core": {"numpy", "ml_dtypes"},
    "lab": {"numpy", "ml_dtypes", "jinja2", "matplotlib", "tqdm", "shtab"},
    "torch": {"torch", "numpy", "ml_dtypes"},
    "te": {"torch"},
    "jax": {"jax", "jaxlib", "numpy", "ml_dtypes", "flax", "equinox"},
    "lab.torch": {"torch", "numpy", "ml_dtypes"},
    "lab.jax": {"jax", "numpy", "optax"},
}
# The same for common's rooms, which also import from its single files.
_VALUES = {"errors", "formats", "gemm_options", "quantizers", "value"}
COMMON_ROOMS = {"ops": _VALUES, "layers": {*_VALUES, "arguments", "layer_options", "recipes", "ops"}}
# Rooms and files that only one framework has, with the reason.
UNPAIRED_ROOMS = {
    "graph": "torch.compile traces layers and verbs as nodes; JAX traces them into jaxprs by itself",
    "jaxprs": "JAX's traced functions are evaluated again, equation by equation; torch's captures hook eager calls",
    "distributed": "torch shards modules, and gathers their parameters; JAX shards arrays under jit",
    "integrations": "trainers of other projects that need glue; loops of optax and orbax need none",
    "sharding": "XLA partitions JAX's primitives by rules; torch's layers call collectives themselves",
    "modules": "torch's modules hold parameters and buffers; JAX's are those of flax and equinox, by framework",
}
# Rooms that both frameworks have, with files of their own in each.
OWN_FILES = {PRIVATE: "the private API of one framework is not that of the other"}
UNPAIRED = {
    "torch": {
        "parallel.py": "the public face of `distributed`",
        "primitives/constants.py": "recipes as constants of torch.compile; JAX takes any hashable as a static argument",
        "tensors/quantized_ops.py": "torch's operators on a tensor subclass; JAX's arrays are pytrees",
        "layers/tensor_parallel.py": "torch's layers call collectives themselves; XLA partitions JAX's",
        "state/autocast.py": "a dynamically scoped recipe, which a jit cache would make stale",
        "state/checkpoint.py": "keeps states and random numbers to recompute with; JAX's remat repeats pure functions",
    },
    "jax": {
        "primitives/ffi.py": "XLA calls the core through a handler library; torch calls the bindings",
        "state/amax_check.py": "recognizes averaged states, which travel as gradients; torch mutates buffers",
        "state/carry.py": "ways to carry state out of a gradient; torch mutates buffers",
        "layers/calibrate.py": "layers in high precision that record amaxes; torch's modules do it where they run",
        "layers/general.py": "products over any axes, as flax's layers have them; torch's layers contract the last",
        "layers/inject.py": "a dot_general for unmodified models; torch swaps modules (modules/convert.py)",
    },
    "lab.torch": {},
    "lab.jax": {
        "observe.py": "evaluates a traced function with observations; torch's captures observe calls as they happen",
        "tap_primitives.py": "taps as primitives, which grad and vmap transform; torch's are ops and hooks",
        "forward.py": "finds the forward pass in differentiated code; torch's runs before backward does",
        "walk.py": "follows equations backward; torch's functions are recognized as they are called",
        "picks.py": "recognizes cross entropy by its equations; torch has it as one function",
    },
}
# Folders of tests: the rooms of their sources, with their base names. Tests of a whole panel are above its rooms.
TESTS = {
    "torch": "tests/torch_frontend",
    "te": "tests/te",
    "jax": "tests/jax_frontend",
    "lab.torch": "tests/lab/in_torch",
    "lab.jax": "tests/lab/in_jax",
}
WHOLE_PANEL = {
    "torch": {
        "test_compiled_matrix": "every module under every mode of torch.compile",
        "test_defaults": "torch's defaults and modes, under which verbs and modules run alike",
        "test_export": "torch.export and torch's compile caches, with all that graphs hold",
        "test_interrupt": "a training step of any room's functions, interrupted",
        "test_memory": "what a training step keeps, from the allocator to modules",
        "test_moe_example": "an example, which uses verbs and modules",
        "test_llama_example": "an example, which uses modules and distributed",
        "test_llama_parallel": "an example, which uses modules and distributed",
        "test_ranks": "the processes in which tests of several ranks run",
        "test_states_matrix": "every module, wherever its states come from",
    },
    "jax": {
        "test_llama_example": "an example, which uses layers and modules",
        "test_modes": "JAX's modes, under which verbs and layers run alike",
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
# Lists of all ops, on which no kernel may depend: a new op changes them.
OP_LISTS = {"diptych/ops.h", "diptych/ops.def"}
# Files of src that may look into a backend: the kernel table, and what makes a device current.
BACKEND_USERS = {"registry.cpp", "dispatch.cpp"}
FORMAT_TABLES = {"core_cuda/include/diptych/format.h", "common/diptych/common/formats.py"}
RECIPE_NAMES = "common/diptych/common/recipes.py"
SOURCE = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".cc")
CODE_FOLDERS = ("common", "core_cuda", "torch_frontend", "jax_frontend", "lab", "tests", "benchmarks", "examples")


def sources(root: Path, *suffixes: str) -> list[Path]:
    return sorted(
        p for d in CODE_FOLDERS for p in (root / d).rglob("*") if p.suffix in (suffixes or SOURCE) and p.is_file()
    )


class _Facts(NamedTuple):
    """The facts of a Python file that rules read. `defined`: names of its functions, classes, variables and attributes
    of `self`. `dotted`: names that begin with a framework's, in code or as whole strings; `attributes`: those of other
    objects."""

    imports: list[ast.Import | ast.ImportFrom]
    defined: set[str]
    dotted: set[str]
    attributes: set[str]


@functools.cache  # most rules read most files, and keeping their nodes would cost more than reading them
def _facts(text: str) -> _Facts:
    nodes = list(ast.walk(ast.parse(text)))
    facts = _Facts([n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)], set(), set(), set())
    roots = {framework: framework for framework in ROOMS}
    for node in facts.imports:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = f"{module}.{alias.name}" if module else alias.name
            if name.split(".")[0] in ROOMS:
                facts.dotted.add(name)
                if module or alias.asname:
                    roots[alias.asname or alias.name] = name
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _dotted(node.value, roots):
            roots[node.targets[0].id] = _dotted(node.value, roots)
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            facts.defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            facts.defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            name = _dotted(node, roots)
            of_self = isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"
            (facts.dotted if name else facts.defined if of_self else facts.attributes).add(name or node.attr)
        elif isinstance(node, ast.Constant) and _NAME.fullmatch(str(node.value)):
            facts.dotted.add(str(node.value))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            facts.attributes.add(str(getattr(node.args[1], "value", "")))
    return facts


_NAME = re.compile(rf"(?:{'|'.join(ROOMS)})(?:\.\w+)+")
_BORROWED = re.compile(r"(?:\w+\.)*_(?!_)[\w.]+")


def _dotted(node: ast.expr, roots: dict[str, str]) -> str:
    """Returns the dotted name that an expression is, or "" for one that begins with no name of a framework."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, roots)
        return f"{owner}.{node.attr}" if owner else ""
    return roots.get(node.id, "") if isinstance(node, ast.Name) else ""


def _imports(path: Path) -> set[str]:
    names = set()
    for node in _facts(path.read_text()).imports:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                names.add("relative import")
            elif node.module in ("diptych", "diptych.lab"):
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            else:
                names.add(node.module or "")
    return names


def python_arrows(root: Path) -> list[str]:
    """Returns imports between packages that are not allowed."""
    broken = []
    for package, folder in PACKAGES.items():
        for file in sorted(package_files(root, package)):
            broken += [
                f"{folder}/{file} imports {name}"
                for name in _imports(root / folder / file)
                if not _may_import(package, file, name.split("."))
            ]
    return broken


def _may_import(package: str, file: str, parts: Sequence[str]) -> bool:
    """Returns whether a package's file may import a module, given by the parts of its name."""
    if parts[0] != "diptych":
        glue = file == f"integrations/{parts[0]}.py"  # for the project whose name the file has
        return parts[0] in sys.stdlib_module_names or parts[0] in THIRD_PARTY[package] or glue
    target = _package(parts[1:])
    face = package in ROOMS and file == LAB_FACE and target == f"lab.{package}"
    return target == package or target in ARROWS[package] or face


def _package(parts: Sequence[str]) -> str:
    """Returns the package that a name below `diptych` belongs to: "lab.torch" for lab/torch/taps."""
    inner = ".".join(parts[:2])
    return inner if inner in PACKAGES else parts[0] if parts else ""


def namespace(root: Path) -> list[str]:
    """Returns each __init__.py in a folder `diptych`, which must be a namespace package."""
    return [str(p.relative_to(root)) for p in root.glob("*/diptych/__init__.py")]


def cpp_arrows(root: Path) -> list[str]:
    """Returns includes inside the core that are not allowed."""
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
            if folder in ("cpu", "cuda") and target in OP_LISTS:
                allowed = False
            if not allowed:
                broken.append(f"{path.relative_to(root)} includes {target}")
    return broken


def file_sizes(root: Path) -> list[str]:
    lengths = {p: len(p.read_text().splitlines()) for p in sources(root)}
    return [f"{p.relative_to(root)}: {n} lines" for p, n in lengths.items() if n > MAX_LINES]


def format_names(root: Path) -> list[str]:
    """Returns places, other than the two format tables, where a format's name is written and does not name a recipe."""
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
    """Returns places in src, outside of the registry, that mention a kernel's entry point."""
    broken = []
    for path in sorted((root / "core_cuda/src").glob("*.cpp")):
        if path.name == "registry.cpp":
            continue
        named = re.findall(r"\b(?:cpu|cuda)::(?:amax|quantize|dequantize|gemm\w*|bias_grad\w*)\b", path.read_text())
        broken += [f"{path.name} names {n}" for n in named]
    return broken


def remembered_nowhere(root: Path) -> list[str]:
    """Returns places where torch's modules or states remember the last call. What a later call needs is recorded by the
    tape, the graph or an argument; memory may refuse a call, but never decides about one."""
    broken = []
    for room in ("modules", "state", "layers"):
        for path in sorted((root / PACKAGES["torch"] / room).glob("*.py")):
            found = re.findall(r"(?m)^[ \t]+_last_\w+(?=\s*[:=])|\w\._last_\w+", path.read_text())
            broken += [f"{room}/{path.name} remembers {name.strip()}" for name in found]
    return broken


@functools.cache  # planted violations read all files again
def _docstrings(text: str) -> list[tuple[int, str]]:
    """Returns the line and the text of a Python file's docstrings, including those of constants."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    strings = [(node.lineno, node.value.value) for node in found if isinstance(node.value, ast.Constant)]
    return [(line, value) for line, value in strings if isinstance(value, str)]


def docstring_subjects(root: Path) -> list[str]:
    """Returns docstrings that begin with "What" or "Of", which leave their sentence without a subject."""
    broken = []
    for path in sources(root, ".py"):
        for line, value in _docstrings(path.read_text()):
            if begins := re.match(r"\s*(what|of)\b", value, re.IGNORECASE):
                broken.append(f"{path.relative_to(root)}:{line}: a docstring begins with {begins[1]!r}")
    return broken


def private_users(root: Path, framework: str) -> dict[str, set[str]]:
    """Returns the files of a panel, and of the lab's part for it, that name the framework's private API, with what they
    name: dotted names with a part that begins with an underscore, and attributes that begin with one and that the
    project does not define."""
    packages = [path for folder in PACKAGES.values() for path in (root / folder).rglob("*.py")]
    own = OPEN_ATTRIBUTES.union(*[_facts(path.read_text()).defined for path in packages])
    found = {}
    for folder in (PACKAGES[framework], PACKAGES[f"lab.{framework}"]):
        for path in sorted((root / folder).rglob("*.py")):
            facts = _facts(path.read_text())
            names = {name for name in facts.dotted if name.split(".")[0] == framework} | (facts.attributes - own)
            found[path.relative_to(root).as_posix()] = {name for name in names if _BORROWED.fullmatch(name)}
    return {file: names for file, names in found.items() if names}


def private_names(root: Path) -> list[str]:
    """Returns names of a framework's private API outside of the room for them."""
    return [
        f"{file} names {name}"
        for framework in ROOMS
        for file, names in private_users(root, framework).items()
        for name in sorted(names)
        if not file.startswith(f"{PACKAGES[framework]}/{PRIVATE}/")
    ]


def package_files(root: Path, package: str) -> set[str]:
    """Returns a package's files, without those of packages inside of it."""
    folder = root / PACKAGES[package]
    files = {p.relative_to(folder) for p in folder.rglob("*.py")}
    return {f.as_posix() for f in files if _package((*package.split("."), *f.parts)) == package}


def mirrored(root: Path) -> list[str]:
    """Returns files that only one framework's package has and that are not listed as exceptions."""
    files = {package: package_files(root, package) for package in UNPAIRED}
    broken = []
    for one, other in (("torch", "jax"), ("jax", "torch"), ("lab.torch", "lab.jax"), ("lab.jax", "lab.torch")):
        alone = {f for f in files[one] - files[other] if f.split("/")[0] not in {*UNPAIRED_ROOMS, *OWN_FILES}}
        alone -= {f for f in alone if f"modules/{f}" in files[one]}  # the public face of a framework's modules
        broken += [f"{PACKAGES[one]}/{f} has no twin in {PACKAGES[other]}" for f in sorted(alone - set(UNPAIRED[one]))]
        broken += [f"{f} is listed as an exception of {one} and is none" for f in sorted(set(UNPAIRED[one]) - alone)]
    return broken


def tests_mirrored(root: Path) -> list[str]:
    """Returns tests that are in no room of a panel, or whose name does not begin with that of a file of the room."""
    broken = []
    for panel, folder in TESTS.items():
        sources = package_files(root, panel)
        for path in sorted((root / folder).rglob("test_*.py")):
            *room, _ = path.relative_to(root / folder).parts
            if not room and panel in ROOMS:
                if path.stem not in WHOLE_PANEL[panel]:
                    broken.append(f"{folder}/{path.name} is in no room")
            elif not any(f"{path.stem}_".startswith(f"test_{name}_") for name in _names_in(sources, "/".join(room))):
                broken.append(f"{path.relative_to(root)} has the name of no file of that room")
        gone = [name for name in WHOLE_PANEL.get(panel, ()) if not (root / folder / f"{name}.py").exists()]
        broken += [f"{folder}/{name}.py is listed and does not exist" for name in gone]
    return broken


def _names_in(files: set[str], room: str) -> set[str]:
    return {Path(f).stem for f in files if f.startswith(f"{room}/" if room else "") and Path(f).stem != "__init__"}


def _file_imports(root: Path) -> dict[str, set[str]]:
    """Returns the project's files that each file imports, by names below `diptych`: {"torch.layers.linear": {...}}."""
    files = {}
    for package, folder in PACKAGES.items():
        for path in sorted([*(root / folder).rglob("*.py"), *(root / folder).rglob("*.pyi")]):
            name = ".".join((package, *path.relative_to(root / folder).with_suffix("").parts))
            files[name.removesuffix(".__init__")] = path
    edges: dict[str, set[str]] = {}
    for file, path in files.items():
        names: list[tuple[str, str]] = []  # the module that is named, and what it is asked for
        for node in _facts(path.read_text()).imports:
            if isinstance(node, ast.Import):
                names += [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names += [(node.module or "", alias.name) for alias in node.names]
        inside = [(m.removeprefix("diptych."), n) for m, n in names if m.startswith("diptych.")]
        edges[file] = {f"{m}.{n}" if f"{m}.{n}" in files else m for m, n in inside}
    return edges


def import_circles(root: Path) -> list[str]:
    """Returns cycles of imports between files, including imports inside of functions."""
    return [" imports ".join(circle) for circle in _circles(_file_imports(root))]


def room_arrows(root: Path) -> list[str]:
    """Returns imports inside a panel from a later room, from the panel's own `__init__.py`, or of the lab's face, which
    must stay unloaded until a user imports it."""
    broken, edges = [], _file_imports(root)
    for panel, rooms in ROOMS.items():
        for file, found in edges.items():
            package, _, inside = file.partition(".")
            room = inside.split(".")[0]
            if package != panel:
                continue
            later = rooms[rooms.index(room) + 1 :] if room in rooms else ()  # a face imports from all rooms
            for target in sorted(t for t in found if t.split(".")[0] == panel):
                to = target.partition(".")[2].split(".")[0]
                if to in later or (room in rooms and to not in rooms) or f"{to}.py" == LAB_FACE:
                    broken.append(f"{file} imports {target}")
    return broken


def common_arrows(root: Path) -> list[str]:
    """Returns imports inside `common` of a room from a later room, or of a single file from a room."""
    broken = []
    for file, found in _file_imports(root).items():
        package, _, inside = file.partition(".")
        if package != "common" or not inside:  # the face, which imports from all of them
            continue
        room = inside.split(".")[0]
        for target in sorted(t for t in found if t.startswith("common.")):
            to = target.split(".")[1]
            if to != room and (to in COMMON_ROOMS if room not in COMMON_ROOMS else to not in COMMON_ROOMS[room]):
                broken.append(f"{file} imports {target}")
    return broken


def _circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Returns one cycle for each edge that closes one."""
    found, done = [], set()

    def visit(file: str, trail: list[str]) -> None:
        if file in trail:
            found.append([*trail[trail.index(file) :], file])
        elif file not in done:
            for target in sorted(edges.get(file, ())):
                visit(target, [*trail, file])
            done.add(file)

    for file in edges:
        visit(file, [])
    return found


ALL = (
    python_arrows,
    namespace,
    cpp_arrows,
    file_sizes,
    format_names,
    kernels_named_once,
    remembered_nowhere,
    private_names,
    docstring_subjects,
    mirrored,
    tests_mirrored,
    room_arrows,
    common_arrows,
    import_circles,
)
