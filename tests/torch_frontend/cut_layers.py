"""Linear layers that are cut over ranks: what each rank computes, and what the oracle makes of the whole tensors
(NUMERICS 9)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cases
import diptych.torch as dt
import oracle
from diptych.common import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    QParams,
    QuantizerRole,
    Recipe,
)
from diptych.common.layers.schedule import OFFSETS
from oracle import parallel
from quantizers import oracle_options
from torch_frontend.tools import to_torch

EPS = QParams(power_2_scale=True, amax_epsilon=2.0**-10)
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "current pow2": Float8CurrentScaling(fp8_quant_fwd_inp=EPS, fp8_quant_fwd_weight=EPS, fp8_quant_bwd_grad=EPS),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 2d": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4 2d": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True),
    "nvfp4 1d": NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True
    ),
    "square": Float8BlockScaling(wgrad_input_square=True),
}  # fmt: skip


def drawn(role: QuantizerRole) -> NVFP4Quantizer:
    return NVFP4Quantizer(stochastic_rounding=True)


# Stochastic rounding of gradients, and of every operand: by the whole tensor's random bits.
DRAWN: dict[str, Recipe] = {"nvfp4 drawn": NVFP4BlockScaling(), "nvfp4 all drawn": CustomRecipe(drawn)}
EVERY = RECIPES | DRAWN
SEED = 2**33 + 7
NUMBERS = {"input": 0, "weight": 2, "grad_output": 4}  # of the quantize calls of a layer, each with two offsets
UNITS = {"delayed": 6, "current": 6, "current pow2": 6, "block": 128, "square": 128, "mxfp8": 32, "mxfp8 2d": 32}
NO_RAGGED = ("nvfp4", "nvfp4 2d", "nvfp4 1d", *DRAWN)


def dtypes_of(recipe: str) -> tuple[tuple[str, str], ...]:
    """(of activations, of parameters); the Hadamard transform takes bfloat16 alone."""
    every = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
    return every[1:] if recipe in ("nvfp4", "nvfp4 drawn") else every


@dataclass(frozen=True)
class Case:
    """One layer and some steps of it. Extents that are not cut are ragged where the format takes that."""

    recipe: str
    mode: str
    sequence: bool = False
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16")
    values: str = "normal"
    size: int = 2
    steps: int = 1

    def __str__(self) -> str:
        sequence = "sequence-" if self.sequence else ""
        return f"{self.recipe}-{self.mode}-{sequence}{'-'.join(self.dtypes)}-{self.values}-{self.size}"

    @property
    def unit(self) -> int:
        return UNITS.get(self.recipe, 16)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dimensions of the whole activations."""
        if self.sequence:
            return self.size * self.unit // 2, 2
        return (16,) if self.recipe in NO_RAGGED else (5,)

    @property
    def nk(self) -> tuple[int, int]:
        """The whole weight's shape."""
        whole, cut = self.unit + (0 if self.recipe in NO_RAGGED else 7), self.size * self.unit
        return (cut, whole) if self.mode == "column" else (whole, cut)

    def draw(self, what: str, step: int, shape: tuple[int, ...], dtype: str, values: str = "") -> np.ndarray:
        made = cases.draw(f"cut {self} {what} {step}", values or self.values, shape, dtype)
        with np.errstate(all="ignore"):
            return (made.astype(np.float32) * 4**step).astype(made.dtype)  # growing, so that delayed scales follow

    def tensors(self, step: int) -> dict[str, np.ndarray]:
        """The whole tensors of a step."""
        (n, k), (of_x, of_w) = self.nk, self.dtypes
        return {
            "x": self.draw("x", step, (*self.lead, k), of_x),
            "w": self.draw("w", step, (n, k), of_w),
            "b": self.draw("b", step, (n,), of_w, "normal"),
            "dy": self.draw("dy", step, (*self.lead, n), of_x),
        }

    def part(self, name: str, t: Any, rank: int) -> Any:
        """A rank's part of a tensor of a step or of its results."""
        column = self.mode == "column"
        axis: int | None
        if name in ("w", "dw"):
            axis = 0 if column else 1
        elif name in ("b", "db"):
            axis = 0 if column else None
        elif (name in ("x", "dx")) == column:  # outside of a pair of layers
            axis = 0 if self.sequence else None
        else:
            axis = -1
        if axis is None:
            return t
        return t.chunk(self.size, axis)[rank] if isinstance(t, torch.Tensor) else np.split(t, self.size, axis)[rank]


# --- what ranks run ---


def linear(case: Case, group: Any, **options: Any) -> dt.Linear:
    n, k = case.nk
    cut = {"parallel_mode": case.mode, "tp_group": group, "sequence_parallel": case.sequence}
    return dt.Linear(k, n, dtype=getattr(torch, case.dtypes[1]), **cut, **options)


def step(case: Case, layer: Any, rank: int, number: int, fn: Any = None, **call: Any) -> dict[str, torch.Tensor]:
    """y, dx, dw and db of one step on a rank; gradients add up where the caller does not clear them."""
    parts = {k: case.part(k, to_torch(v), rank).contiguous() for k, v in case.tensors(number).items()}
    with torch.no_grad():
        layer.weight.copy_(parts["w"])
        if layer.bias is not None:
            layer.bias.copy_(parts["b"])
    x = parts["x"].requires_grad_()
    with dt.autocast(recipe=EVERY[case.recipe]):
        y = (layer if fn is None else fn)(x, **call)
    y.backward(parts["dy"])
    made = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}
    return made | ({} if layer.bias is None else {"db": layer.bias.grad})


def steps(rank: int, groups: Any, case: Case, compiled: bool = False) -> list[dict[str, torch.Tensor]]:
    layer = linear(case, groups["data"])
    if case.recipe in DRAWN:
        layer.seed_rng(SEED)
    fn = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else None
    made = []
    for i in range(case.steps):
        layer.zero_grad(set_to_none=True)
        made.append(step(case, layer, rank, i, fn))
    return made


# --- modules ---

MODULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "linear rms": {"normalization": "RMSNorm", "zero_centered_gamma": True, "save_original_input": False},
    "mlp gelu": {"activation": "gelu", "zero_centered_gamma": True},
    "mlp swiglu": {"activation": "swiglu", "normalization": "RMSNorm", "save_original_weight": False},
}


@dataclass(frozen=True)
class Fused:
    """A module with a norm and some steps of it: K features, of which it makes F that are cut."""

    module: str
    recipe: str
    sequence: bool
    dtypes: tuple[str, str]
    size: int = 2
    steps: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    quantized: bool = True

    def __str__(self) -> str:
        sequence = "sequence-" if self.sequence else ""
        return f"{self.module}-{self.recipe}-{sequence}{'-'.join(self.dtypes)}-{self.size}"

    @property
    def of(self) -> Case:
        return Case(self.recipe, "column", self.sequence, self.dtypes, size=self.size)

    @property
    def gated(self) -> bool:
        return "glu" in self.module

    def make(self, **cut: Any) -> Any:
        """The module, whole or a rank's part of it."""
        f, k = self.of.nk
        given = {"dtype": getattr(torch, self.dtypes[1]), **MODULES[self.module], **self.options, **cut}
        return (dt.LayerNormMLP if "mlp" in self.module else dt.LayerNormLinear)(k, f, **given)

    def cut(self, group: Any) -> Any:
        how = {"set_parallel_mode": True} if "mlp" in self.module else {"parallel_mode": "column"}
        return self.make(tp_group=group, sequence_parallel=self.sequence, **how)

    def fill(self, module: Any, step: int, rank: int | None = None) -> None:
        """Draws whole parameters, and gives the module these or a rank's parts. The names and shapes are those of a
        module that is whole."""
        shapes = {n: tuple(p.shape) for n, p in self.make(device="meta").named_parameters()}
        with torch.no_grad():
            for name, p in module.named_parameters():
                t = to_torch(self.of.draw(f"{self} {name}", 0, shapes[name], self.dtypes[1], "normal")) * (1 + step)
                p.copy_(t if rank is None else self.part(name, t, rank))

    def part(self, name: str, t: Any, rank: int) -> Any:
        """A rank's part of a parameter or its gradient, of the input or of a result."""
        if name in ("y", "dy", "x", "dx"):
            if name in ("y", "dy") and "mlp" not in self.module:
                return t.chunk(self.size, -1)[rank]
            return t.chunk(self.size, 0)[rank] if self.sequence else t
        if name.startswith("layer_norm") or name == "fc2_bias":
            return t
        if name == "fc2_weight":
            return t.chunk(self.size, 1)[rank]
        return torch.cat([half.chunk(self.size, 0)[rank] for half in t.chunk(1 + self.gated, 0)])

    def data(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole input and the gradient of the result."""
        f, k = self.of.nk
        x = self.of.draw(f"{self} x", step, (*self.of.lead, k), self.dtypes[0])
        dy = self.of.draw(f"{self} dy", step, (*self.of.lead, k if "mlp" in self.module else f), self.dtypes[0])
        return to_torch(x), to_torch(dy)

    def run(self, module: Any, step: int, rank: int | None = None, fn: Any = None) -> dict[str, torch.Tensor]:
        self.fill(module, step, rank)
        module.zero_grad(set_to_none=True)
        x, dy = self.data(step)
        if rank is not None:
            x, dy = self.part("x", x, rank).contiguous(), self.part("dy", dy, rank).contiguous()
        x.requires_grad_()
        with dt.autocast(enabled=self.quantized, recipe=EVERY[self.recipe]):
            y = (fn or module)(x)
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad} | {n: p.grad for n, p in module.named_parameters()}


class Plain(Fused):
    """A case of dt.Linear. `module`: its parallel_mode."""

    @property
    def of(self) -> Case:
        return Case(self.recipe, self.module, self.sequence, self.dtypes, size=self.size)

    def make(self, **cut: Any) -> Any:
        n, k = self.of.nk
        return dt.Linear(k, n, **{"dtype": getattr(torch, self.dtypes[1]), **self.options, **cut})

    def cut(self, group: Any) -> Any:
        return self.make(tp_group=group, sequence_parallel=self.sequence, parallel_mode=self.module)

    def part(self, name: str, t: Any, rank: int) -> Any:
        return self.of.part({"weight": "w", "bias": "b"}.get(name, name), t, rank)

    def data(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.of.tensors(step)
        return to_torch(made["x"]), to_torch(made["dy"])


def module_steps(rank: int, groups: Any, case: Fused) -> list[dict[str, torch.Tensor]]:
    module = case.cut(groups["data"])
    if case.recipe in DRAWN:
        module.seed_rng(SEED)
    return [case.run(module, i, rank) for i in range(case.steps)]


# --- what is sent ---

NOT_SENT = ("wait_tensor", "wrap_tensor_autograd")


class Collectives(TorchDispatchMode):
    """Notes each collective and the bytes that this rank gives it; `allgather_base` and the like are c10d's names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and name not in NOT_SENT:
            given = list(_tensors(args[1] if "base_" in func.__name__ else args[0]))
            size = sum(t.numel() * t.element_size() for t in given)
            self.seen.append((name, str(given[0].dtype), size))
        return func(*args, **(kwargs or {}))


def _tensors(of: Any) -> Iterator[torch.Tensor]:
    if isinstance(of, torch.Tensor):
        yield of
    elif isinstance(of, list | tuple):
        for each in of:
            yield from _tensors(each)


@contextlib.contextmanager
def collectives() -> Iterator[list[tuple[str, str, int]]]:
    """(name, dtype, bytes that this rank gives) of each collective of a region."""
    with Collectives() as mode:
        yield mode.seen


@contextlib.contextmanager
def profiled() -> Iterator[list[int]]:
    """The elements that this rank gives to each collective of a region, as torch's profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    seen: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield seen
    for event in profiler.events():
        if event.name.startswith(("gloo:", "nccl:")):
            seen.append(sum(math.prod(shape) for shape in event.input_shapes))


# --- what the oracle expects ---


class Reference:
    """A quantized layer of whole tensors, with the histories of delayed scaling, whose products are cut."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.offset = recipe, 0
        self.history: dict[str, np.ndarray] = {}
        self.scale: dict[str, np.ndarray] = {}

    def update(self) -> None:
        for tensor, history in self.history.items():
            q: Any = self.recipe.quantizer(QuantizerRole("linear", tensor))
            top = float(oracle.FP8_MAX[oracle.FORMATS[q.format.name].element])
            self.history[tensor], self.scale[tensor] = oracle.scale_update(
                history, self.scale[tensor], fp8_max=top, margin=q.margin, most_recent=False
            )

    def quantized(self, tensor: str, value: np.ndarray) -> oracle.Quantized:
        q: Any = self.recipe.quantizer(QuantizerRole("linear", tensor))
        given = {}
        if q.needs_scale:
            given["scale"] = self.scale.setdefault(tensor, np.ones(1, np.float32))
        if q.needs_rng:
            given["rng"] = oracle.rng_words(SEED, self.offset + 2 * NUMBERS[tensor])
        made = oracle.quantize(value, q.format.name, **oracle_options(q), **given)
        if q.needs_scale:
            history = self.history.setdefault(tensor, np.zeros((1, q.amax_history_len), np.float32))
            history[:, :1] = np.maximum(history[:, :1], made.amax)
        return made


def expected(case: Case, reference: Reference, number: int) -> list[dict[str, np.ndarray]]:
    """Each rank's y, dx, dw and db of a step."""
    whole, size = case.tensors(number), case.size
    x, w, dy = whole["x"], whole["w"], whole["dy"]
    reference.update()
    reference.offset = OFFSETS * number
    qx, qw, qdy = (reference.quantized(t, v) for t, v in (("input", x), ("weight", w), ("grad_output", dy)))
    columns = {"columnwise": True}
    if case.mode == "column":
        y = parallel.column_forward(qx.copy(), qw.copy(), size, whole["b"], x.dtype)
        dx, dw = parallel.column_backward(qdy, qx.copy(**columns), qw.copy(**columns), size, x.dtype, w.dtype)
        db = np.split(oracle.bias_grad(dy, w.dtype), size)
        made = [
            {"y": y[r], "dx": case.part("dx", dx.reshape(x.shape), r), "dw": dw[r], "db": db[r]} for r in range(size)
        ]
    else:
        y = parallel.row_forward(qx.copy(), qw.copy(), size, whole["b"], x.dtype).reshape(dy.shape)
        dxs, dw = parallel.row_backward(qdy, qx.copy(**columns), qw.copy(**columns), size, x.dtype, w.dtype)
        total = oracle.bias_grad(dy, w.dtype)
        if case.sequence:  # each rank's tokens, rounded, then added in rank order
            total = parallel.sum_partials([oracle.bias_grad(case.part("dy", dy, r), w.dtype) for r in range(size)])
        made = [{"y": case.part("y", y, r), "dx": dxs[r], "dw": dw[r], "db": total} for r in range(size)]
    for rank, parts in enumerate(made):
        lead = {"y": case.part("dy", dy, rank).shape, "dx": case.part("x", x, rank).shape}
        made[rank] = {k: v.reshape(lead.get(k, v.shape)) for k, v in parts.items()}
    return made


def error_of(call: Any, recipe: Any = None, **region: Any) -> tuple[str, str, list[Any]]:
    """Returns the classes and the text of the error that a call in a region raises, and the collectives before it."""
    with collectives() as seen:
        try:
            with dt.autocast(recipe=recipe, enabled=recipe is not None, **region):
                call()
        except Exception as error:
            return " ".join(c.__name__ for c in type(error).__mro__), str(error), seen
    return "", "no error", seen
