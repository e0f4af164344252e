"""Runs tests of TransformerEngine against `diptych.te`, and counts why those that fail do.

    python tests/te_suite.py PATH [FILE ...] [--json OUT] [-k WORDS]

PATH is a checkout of TransformerEngine's source (its tests were read at commit d0067d0da), which stays outside of this
project. FILE: names below tests/pytorch; without them, those of `FILES`. Each runs in a process of its own, in which
`transformer_engine` is a stand-in: public names are those of `diptych.te`, and names that are absent there, and
TransformerEngine's internals, raise when they are used. Tests may assign recipes' fields, read the buffers of
quantized tensors under the private names that these have there, and get the parts of a GroupedLinear's stacks as its
parameters, so that results are compared. On a machine without a
GPU "cuda" means the CPU.

A test that fails is counted in one of these classes, by its exception (`KNOWN`) or, where that says nothing, by its
name (`TESTS`):

    absent, said so             a name or argument that diptych refuses by name
    reads TE's internals        the test reads attributes or functions that are not public there
    other meaning, documented   what docs/transformer_engine.md says differs, such as arithmetic of quantized tensors
    other                       anything else
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

FILES = (
    "test_numerics.py",
    "test_quantized_tensor.py",
    "test_float8blockwisetensor.py",
    "test_grouped_linear.py",
    "test_recipe.py",
    "test_custom_recipe.py",
)
ABSENT, INTERNALS, MEANING, OTHER = (
    "absent, said so", "reads TE's internals", "other meaning, documented", "other",
)  # fmt: skip
# --- the stand-in ----------------------------------------------------------------------------------------------------


class AbsentName(Exception):
    """A use of a public name that diptych.te does not have."""


class Internal(Exception):
    """A use of a name that is not public in TransformerEngine."""


class _Placeholder(type):
    """The class of names that are not here: importing one works, and using it raises."""

    error: type[Exception]
    where: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls.error(f"{cls.where} is used")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"{cls.where}.{name}")

    def __instancecheck__(cls, it: Any) -> bool:
        import diptych.te as te

        return cls.__name__.endswith(("Tensor", "Storage")) and isinstance(it, te.QuantizedTensor)


def from_tests() -> bool:
    """Returns whether the caller's caller is a file of TransformerEngine's tests."""
    return "tests/pytorch" in sys._getframe(2).f_code.co_filename.replace(os.sep, "/")


def placeholder(where: str) -> Any:
    from diptych.te.absent import ABSENT as WORDS

    parts = where.split(".")
    name, error = parts[-1], AbsentName if any(part in WORDS for part in parts) else Internal
    return _Placeholder(name, (), {"error": error, "where": where})


def module(name: str, names: dict[str, Any], of: Any = None) -> types.ModuleType:
    """Makes a module with names of its own, those of another module, and placeholders for all others."""
    made = types.ModuleType(name)
    made.__path__ = []  # type: ignore[attr-defined]
    made.__dict__.update(names)

    def __getattr__(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if of is not None and hasattr(of, attribute):
            return getattr(of, attribute)
        below = sys.modules.get(f"{name}.{attribute}")
        return placeholder(f"{name}.{attribute}") if below is None else below

    made.__getattr__ = __getattr__  # type: ignore[method-assign]
    sys.modules[name] = made
    return made


class _Finder:
    """Makes modules of TransformerEngine that nobody has made yet."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        from importlib.machinery import ModuleSpec

        own = name.partition(".")[0] in ("transformer_engine", "transformer_engine_torch", "nvdlfw_inspect")
        return ModuleSpec(name, self, is_package=True) if own else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return module(spec.name, {})

    def exec_module(self, made: Any) -> None:
        pass


def changeable(cls: Any) -> Any:
    """Returns a recipe class whose fields may be assigned and read as TransformerEngine's tests do. A value that
    diptych refuses raises when a layer asks for its quantizers."""
    from diptych.common import QParams, UnsupportedError

    class Made(cls):
        def __init__(self, *args: Any, **given: Any) -> None:
            if args:
                given |= {"qfactory": args[0]}
            self.__dict__.clear()
            object.__setattr__(self, "_given", dict(given))
            try:
                cls.__init__(self, **given)
            except UnsupportedError as error:
                cls.__init__(self, **({"qfactory": given["qfactory"]} if "qfactory" in given else {}))
                object.__setattr__(self, "_refused", error)

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            return None if name == "backward_override" and value == "" and from_tests() else value

        def __setattr__(self, name: str, value: Any) -> None:
            self.__init__(**self._given | {name: value})

        def __getattr__(self, name: str) -> Any:
            given = self.__dict__.get("_given", {})
            if name in given:
                return given[name]
            if name.startswith("fp4_quant_"):
                rht = "weight" not in name and not self.disable_rht
                return QParams(random_hadamard_transform=rht, fp4_2d_quantization="weight" in name)
            defaults = {"fp8_dpa": False, "fp8_mha": False, "nvfp4_4over6": "none", "fp4_format": None}
            if name in defaults:
                return defaults[name]
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

        def quantizer(self, role: Any) -> Any:
            if "_refused" in self.__dict__:
                raise self.__dict__["_refused"]
            return super().quantizer(role)

        def __reduce__(self) -> Any:
            return _remade, (cls.__name__, self._given)

    Made.__name__ = Made.__qualname__ = cls.__name__
    Made.__module__ = "transformer_engine.common.recipe"
    return Made


def _remade(name: str, given: dict[str, Any]) -> Any:
    return getattr(sys.modules["transformer_engine.common.recipe"], name)(**given)


class _State:
    """`FP8GlobalStateManager`: there is no state to reset."""

    @staticmethod
    def reset() -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return placeholder(f"transformer_engine.pytorch.quantization.FP8GlobalStateManager.{name}")


def show_buffers() -> None:
    """Lets tests read the buffers of quantized tensors under the names that they have there, elements as bytes."""
    import torch

    import diptych.te as te

    def as_bytes(t: Any) -> Any:
        return t.view(torch.uint8) if t is not None and t.dtype.itemsize == 1 else t

    for theirs, ours in {
        "_data": "rowwise_data", "_scale_inv": "rowwise_scale_inv",
        "_rowwise_data": "rowwise_data", "_rowwise_scale_inv": "rowwise_scale_inv",
        "_columnwise_data": "columnwise_data", "_columnwise_scale_inv": "columnwise_scale_inv",
    }.items():  # fmt: skip
        setattr(te.QuantizedTensor, theirs, property(lambda self, ours=ours: as_bytes(getattr(self, ours))))

    def transpose(self: Any) -> Any:
        return as_bytes(self.columnwise_data).view(self.shape[-1], *self.shape[:-1])

    of: Any = te.QuantizedTensor
    of._transpose, of._nvfp4_use_4over6 = property(transpose), False
    of._amax_rowwise, of._amax_columnwise = property(lambda q: q.amax), property(lambda q: q.columnwise_amax)
    of._row_scaled_nvfp4 = property(lambda self: self.quantizer.row_scaled_nvfp4)


def parts_of(cls: Any) -> Any:
    """Returns a `GroupedLinear` whose `parameters()` are the parts of its stacks, weight and bias by group, and whose
    stack gets the `main_grad`s that tests assign to parts."""
    import torch

    class GroupedLinear(cls):
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("weight") or not name[6:].isdigit() or hasattr(self.weight, "main_grad"):
                return super().__getattr__(name)
            parts = self.__dict__.setdefault("_parts_shown", {})
            return parts.setdefault(name, super().__getattr__(name))

        def parameters(self, recurse: bool = True) -> Any:
            names = [name for name in ("weight", "bias") if getattr(self, name) is not None]
            for g in range(self.num_gemms):
                yield from (getattr(self, f"{name}{g}") for name in names)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            parts = [getattr(p, "main_grad", None) for p in self.__dict__.pop("_parts_shown", {}).values()]
            if len(parts) == self.num_gemms and all(part is not None for part in parts):
                self.weight.main_grad = torch.stack(parts)
            return super().forward(*args, **kwargs)

    return GroupedLinear


def install() -> None:
    """Puts the stand-in for TransformerEngine into `sys.modules`."""
    import torch
    from torch import nn

    import diptych.te as te
    from diptych.te.common import recipe

    show_buffers()
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]
    recipes = {n: changeable(c) for n, c in vars(recipe).items() if n.endswith("Scaling") and n[0] != "_"}
    recipes["CustomRecipe"] = changeable(recipe.CustomRecipe)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    helpers = {
        "get_device_compute_capability": lambda: capability,
        "init_method_normal": lambda sigma: lambda t: nn.init.normal_(t, 0.0, sigma),
        "scaled_init_method_normal": lambda sigma, n: lambda t: nn.init.normal_(t, 0.0, sigma / (2.0 * n) ** 0.5),
        "attention_mask_func": lambda scores, mask: scores.masked_fill_(mask, -10000.0),
        "is_non_tn_fp8_gemm_supported": lambda: False,
    }
    state = {"FP8GlobalStateManager": _State()}
    root, common = "transformer_engine", "transformer_engine.common"
    module(root, {})
    module(common, {})
    module(f"{common}.recipe", recipes, recipe)
    grouped = parts_of(te.GroupedLinear)
    public = {"GroupedLinear": grouped, "get_device_compute_capability": helpers["get_device_compute_capability"]}
    module(f"{root}.pytorch", public, te)
    module(f"{root}.pytorch.module", {"GroupedLinear": grouped}, te.module)
    for name in ("quantization", "fp8", "distributed", "graph", "permutation", "tensor", "constants"):
        own = state if name in ("quantization", "fp8") else {}
        module(f"{root}.pytorch.{name}", own, importlib.import_module(f"diptych.te.{name}"))
    for name in ("float8_tensor", "mxfp8_tensor", "nvfp4_tensor", "float8_blockwise_tensor"):
        module(f"{root}.pytorch.tensor.{name}", {}, te.tensor)
    legacy = {"is_module_grouped_tensor_path_supported": lambda *args, **kwargs: False}
    module(f"{root}.pytorch.module.grouped_linear", legacy)
    module(f"{root}.pytorch.utils", helpers, te.utils)
    for name in ("attention", "attention.dot_product_attention"):
        module(f"{root}.pytorch.{name}", {})
    windows = {"check_set_window_size": lambda mask_type, window: window}
    module(f"{root}.pytorch.attention.dot_product_attention.utils", windows)
    module(f"{root}.pytorch.custom_recipes", {})
    factories = importlib.import_module("diptych.te.custom_recipes.quantizer_factories")
    module(f"{root}.pytorch.custom_recipes.quantizer_factories", {}, factories)
    module(f"{root}.pytorch._extra_state", {"UNSAFE_PICKLE_EXTRA_STATE_ENV": "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"})
    tex = {"DType": te.DType, "quantize": lambda x, quantizer, out, noop: quantizer.quantize(x, out=out)}
    module("transformer_engine_torch", tex)


# --- a machine without a GPU -----------------------------------------------------------------------------------------


def cuda_is_the_cpu() -> None:
    """Makes torch's factories and moves take "cuda" as the CPU, and TransformerEngine's tests find a GPU."""
    import torch

    def here(device: Any) -> Any:
        if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
            return torch.device("cpu")
        return device

    def mapped(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                kwargs["device"] = here(kwargs["device"])
            return function(*args, **kwargs)

        return call

    for name in (
        "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "tensor", "arange", "as_tensor",
        "linspace", "eye", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "empty_strided",
    ):  # fmt: skip
        setattr(torch, name, mapped(getattr(torch, name)))
    for cls in (torch.Tensor, torch.nn.Module):
        plain = cls.to

        def to(self: Any, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            args = tuple(here(a) if isinstance(a, (str, torch.device)) else a for a in args)
            if kwargs.get("device") is not None:
                kwargs["device"] = here(kwargs["device"])
            return plain(self, *args, **kwargs)

        cls.to = to  # type: ignore[method-assign]
        cls.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    cuda: Any = torch.cuda
    asked = cuda.is_available
    cuda.is_available = lambda: from_tests() or asked()
    cuda.get_rng_state, cuda.set_rng_state = torch.get_rng_state, torch.set_rng_state
    for name in ("synchronize", "manual_seed", "manual_seed_all", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *args: (9, 0)
    torch.version.cuda = "12.9"


# --- classes of failures ---------------------------------------------------------------------------------------------

# By class: patterns of "module.Error: message" of an exception, or of one that caused it, in the order in which they
# are tried.
KNOWN: tuple[tuple[str, str], ...] = (
    (ABSENT, r"AbsentName: "),
    (INTERNALS, r"Internal: "),
    (ABSENT, r"UnsupportedError: "),
    (ABSENT, r"AttributeError: .* which TransformerEngine has: "),
    (INTERNALS, r"AttributeError: .* has no attribute '(_\w+|fp8_\w+|quantizers|\w*quantizer\w*|set_meta_tensor|"
                r"init_fp8_metadata|get_\w+|is_\w+|tensors|wgrad_store|noop_cat|need_backward_dw|fp8_meta\w*)'"),
    (MEANING, r"FrozenInstanceError: "),
    (MEANING, r"(ShapeError|ValueError): .*(multiple|scalar|must be \[|at least one of rowwise)"),
    (MEANING, r"(ArgumentError|TypeError): .*(QuantizedTensor|quantized)"),
    (MEANING, r"DTypeError: "),
    (ABSENT, r"ValueError: LayerNormMLP: activation must be one of "),
    (ABSENT, r"ValueError: QuantizerRole.tensor must be one of "),
    (INTERNALS, r"TypeError: .*_Placeholder"),
    (ABSENT, r"TypeError: .* unexpected keyword argument '(noop_flag|quantize_master_weights)'"),
)  # fmt: skip
# By the name of a test: the class of a failure that no exception tells, and why.
TESTS: dict[str, tuple[str, str]] = {
    "test_custom_recipe_quantization_alignment_contract": (MEANING, "a factory is asked when its recipe is made, too"),
    "test_detach_preserves_subclass": (MEANING, "there is one class of quantized tensors, QuantizedTensor"),
    **dict.fromkeys(
        (
            "test_grouped_linear_accuracy",
            "test_grouped_linear_accuracy_save_original_input",
            "test_grouped_linear_row_scaled_quantized_backward",
            "test_padding_grouped_linear_accuracy",
            "test_padding_grouped_linear_accuracy_save_original_input",
        ),
        (MEANING, "the input has one amax, over the rows of all groups"),
    ),
    "test_grouped_linear_delay_wgrad_rejects_implicit_fallback": (INTERNALS, "it patches the module's file"),
    "test_set_data": (MEANING, "assigning .data of a quantized tensor keeps its kind"),
    "test_quantizer_update": (MEANING, "a module keeps no quantizers, and adapts its histories"),
    "test_custom_recipe_factory_invocation_counts_and_cycling": (MEANING, "answers are kept, and asked by product"),
    "test_grouped_linear_module_type_dispatch": (MEANING, "a factory is asked when its recipe is made, too"),
    "test_check_for_weight_tensor_and_recipe_correspondence": (MEANING, "the error is a ValueError with other words"),
    "test_skip_quantization_with_noop_flag": (ABSENT, "noop_flag; it needs CUDA streams to begin with"),
    "test_checkpoint_with_mixed_fp8_regions_saves_only_fp8_recompute_state": (INTERNALS, "it reads fp8_meta"),
}


def class_of(error: BaseException | None) -> tuple[str, str]:
    """Returns the class of a failure and the words of the exception that decides."""
    said = []
    while error is not None and len(said) < 8:
        said.append(f"{type(error).__name__}: {error}".split("\n")[0][:300])
        error = error.__cause__ or error.__context__
    for words in said:
        for kind, pattern in KNOWN:
            if re.search(pattern, words):
                return kind, words
    return OTHER, said[0] if said else ""


class Counts:
    """A plugin of pytest that notes each test's outcome."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[str, str]] = {}

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is None:
            if call.when == "call":
                self.tests.setdefault(item.nodeid, ("passed", ""))
            return
        kind = type(call.excinfo.value).__name__
        if kind == "Skipped":
            self.tests[item.nodeid] = ("skipped", str(call.excinfo.value)[:100])
        elif call.when != "teardown" or self.tests.get(item.nodeid, ("passed",))[0] == "passed":
            kind, words = class_of(call.excinfo.value)
            known = TESTS.get(getattr(item, "originalname", item.name)) if kind == OTHER else None
            self.tests[item.nodeid] = known or (kind, words)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.tests[report.nodeid] = (OTHER, "collection: " + str(report.longrepr)[-300:])


def run_one(path: Path, file: str, words: str, out: Path) -> None:
    """Runs one file of tests in this process, and writes the outcomes to `out`."""
    import pytest
    import torch

    folder = path / "tests" / "pytorch"
    sys.path.insert(0, str(folder))
    if not torch.cuda.is_available():
        cuda_is_the_cpu()
    install()
    counts = Counts()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "--rootdir", str(folder), "-c", os.devnull]
    pytest.main([*options, *(["-k", words] if words else []), str(folder / file)], plugins=[counts])
    out.write_text(json.dumps(counts.tests))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="TransformerEngine's source")
    parser.add_argument("files", nargs="*", help=f"below tests/pytorch; {', '.join(FILES)}")
    parser.add_argument("--json", type=Path, help="writes each test's outcome and why to a file")
    parser.add_argument("-k", default="", help="tests to run, as pytest takes them")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not (given.path / "tests" / "pytorch").is_dir():
        parser.error(f"{given.path} has no tests/pytorch: give the root of TransformerEngine's source")
    if given.here is not None:
        run_one(given.path, given.files[0], given.k, given.here)
        return
    everything: dict[str, dict[str, tuple[str, str]]] = {}
    for file in given.files or FILES:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            words = ["-k", given.k] if given.k else []
            made = subprocess.run(
                [sys.executable, __file__, str(given.path), file, "--here", str(out), *words],
                capture_output=True, text=True,
            )  # fmt: skip
            if not out.exists():
                print(f"{file}: the process ended without results\n{made.stdout[-2000:]}{made.stderr[-2000:]}")
                continue
            everything[file] = json.loads(out.read_text())
        kinds = collections.Counter(kind for kind, _ in everything[file].values())
        ran = sum(kinds.values()) - kinds["skipped"]
        print(f"{file}: {kinds['passed']} of {ran} pass, {kinds['skipped']} are skipped", flush=True)
        for kind in (ABSENT, INTERNALS, MEANING, OTHER):
            print(f"    {kinds[kind]:5d} {kind}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
