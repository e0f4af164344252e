"""Weights between steps: copies kept across microbatches, and parameters held quantized."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.arguments import require_recipe, require_switches
from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.plan import held_quantizer
from diptych.common.quantizers import Quantizer
from diptych.common.recipes import DEFAULT_RECIPE, Recipe
from diptych.common.schedule import Call
from diptych.torch import functional, grouped_primitives, primitives
from diptych.torch.grouped import quantize_stack
from diptych.torch.operands import Copies, with_scales
from diptych.torch.products import Options, dequantized_weight, quantize_weight, schedule
from diptych.torch.quantized import QuantizedStack, QuantizedTensor, QuantizedTensorBase, aten
from diptych.torch.rules import define, describe, traced_local
from diptych.torch.state import warn_once

# --- copies kept across microbatches ---------------------------------------------------------------------------------


class WeightCache:
    """The quantized copies of one weight, or of a stack of them, from the first microbatch of a step to its last.

    Graphs write them in place, into buffers that are made while Dynamo traces: a captured graph's own memory is
    overwritten when it runs again. There E8M0 scales lie as bytes, which Inductor's backends all can store.
    """

    def __init__(self) -> None:
        self.key: tuple[Any, ...] = ()
        self.copies: Any = None  # Copies, or the buffers that graphs write
        self.bound = False  # whether graphs know the buffers
        self.content = "none"  # "stale": of another key; "kept"
        self.valid: Tensor | None = None  # the same for graphs, which skip on the device: a boolean [1]

    def get(
        self,
        weight: Tensor,
        recipe: Recipe,
        options: Options,
        rng: Tensor | None,
        need_columnwise: bool,
        first: bool | None,
        skip: Tensor | None,
    ) -> Copies:
        """The copies to use; see `QuantizedModule.quantized_linear` for `first` and `skip`.

        **Raises** ValueError for a later microbatch without a first one, or both arguments at once.
        """
        module, name = options.module, options.name
        calls = schedule(recipe, module, name, need_columnwise, False).w
        key = _key(calls, weight.device)
        weight = weight.detach()
        if skip is not None and first is not None:
            raise ValueError(
                "is_first_microbatch says on the host what skip_weight_update says on the device: give one"
            )
        compiling = torch.compiler.is_compiling()
        if compiling:
            from torch._dynamo.comptime import comptime  # importing it takes a second

            skips = skip is not None  # noqa: F841 - read below
            comptime(_bound_while_tracing)
            if self.key != key:
                raise UnsupportedError("a compiled region that keeps one weight for two recipes: give each its own")
        if skip is not None:
            if compiling or (self.content == "kept" and self.key == key):
                return self._select(weight, calls, options, rng, skip)
        elif not first:
            if self.content == "none":
                raise ValueError("is_first_microbatch=False, but no weight is kept: the first microbatch passes True")
            if self.content == "kept" and self.key == key:
                return self._copies(compiling)
            warn_once(
                (self.key, key, name),
                f"{type(recipe).__name__} cannot use the weight kept from the first microbatch; it is quantized anew",
            )
        made = quantize_weight(weight, calls, options, rng, options.replay)
        if self.bound and self.key == key:
            for old, t in _pairs(self.copies, made):
                old.copy_(_storable(t))
            if self.valid is not None:
                self.valid.fill_(True)
        else:
            self.copies, self.bound, self.key = made, False, key
        if not compiling:
            self.content = "kept"  # else from tracing on: a graph has no side effects
        return made

    def bind(self, calls: tuple[Call, ...], shape: tuple[int, ...], device: torch.device) -> None:
        """Makes buffers for graphs to write, unless there are some for these calls."""
        key = _key(calls, device)
        if self.bound and self.key == key:
            return
        buffers: list[Any] = [None, None]
        empty = grouped_primitives.empty_stack if len(shape) == 3 else primitives.empty
        for call in calls:
            copies = primitives.copies(call.quantizer, empty(shape, call.quantizer, device))
            for side, copy in enumerate(copies):
                if copy is not None:
                    buffers[side] = (copy[0], _storable(copy[1]), *copy[2:])
        before = self.copies if self.key == key else None
        self.key, self.copies, self.bound = key, tuple(buffers), True
        for copy in self.copies:
            for t in (copy or ())[:3]:
                if t is not None:
                    torch._dynamo.mark_static_address(t, guard=False)
        self.valid = None
        if before is not None:
            for old, t in _pairs(self.copies, before):
                old.copy_(_storable(t))
        elif self.content == "kept":
            self.content = "stale"

    def _copies(self, compiling: bool) -> Copies:
        return self.copies if compiling else tuple([copy and with_scales(copy) for copy in self.copies])  # type: ignore[return-value]

    def _select(
        self, weight: Tensor, calls: tuple[Call, ...], options: Options, rng: Tensor | None, skip: Tensor
    ) -> Copies:
        """New content for the kept copies where `skip` is 0, without asking the device."""
        keep = skip.reshape(1) != 0
        if self.valid is not None:
            keep = keep & self.valid
            self.valid.fill_(True)
        scales = {c.state: options.state.tensors(c.state)[0] for c in calls if c.state and options.state is not None}
        new = quantize_weight(weight, calls, options, rng, options.replay or scales)
        for old, t in _pairs(self.copies, new):
            bits = old.view(torch.uint8)
            bits.copy_(torch.where(keep, bits, _storable(t).view(torch.uint8)))
        if options.record and options.replay is None and options.state is not None:
            amax = torch.where(keep, 0.0, primitives.amax(weight))
            for call in calls:
                if call.state:
                    options.state.record(call.state, amax)
        return self._copies(torch.compiler.is_compiling())


def _pairs(into: Any, made: Copies) -> list[tuple[Tensor, Tensor]]:
    """The tensors of kept copies, each with that of the new ones."""
    found = []
    for old, new in zip(into, made, strict=True):
        for a, b in zip((old or ())[:3], (new or ())[:3], strict=True):
            if a is not None and b is not None:
                found.append((a, b))
    return found


def _storable(t: Tensor) -> Tensor:
    """A copy's tensor as its buffer holds it."""
    if t.dtype != torch.float8_e8m0fnu:
        return t
    return _bytes_op(t) if torch.compiler.is_compiling() else t.view(torch.uint8)


_bytes_op = define(
    "scale_bytes",
    "(Tensor scale_inv) -> Tensor",
    lambda scale_inv: scale_inv.view(torch.uint8).clone(),
    lambda scale_inv: torch.empty_like(scale_inv, dtype=torch.uint8),
)


def _bound_while_tracing(context: Any) -> None:
    """Runs where Dynamo traces `WeightCache.get`, on the real objects: a graph cannot make buffers."""
    cache, recipe, module, name, columnwise = (
        traced_local(context, local) for local in ("self", "recipe", "module", "name", "need_columnwise")
    )
    fake = context.get_local("weight").as_fake()
    with torch.inference_mode(False), torch.no_grad():
        calls = schedule(recipe, module, name, columnwise, False).w
        cache.bind(calls, tuple([int(n) for n in fake.shape]), fake.device)
        skips = traced_local(context, "skips")
        if skips and cache.valid is None:
            cache.valid = torch.full((1,), cache.content == "kept", device=fake.device)
            torch._dynamo.mark_static_address(cache.valid, guard=False)
    if skips or traced_local(context, "first"):
        cache.content = "kept"


def _key(calls: tuple[Call, ...], device: torch.device) -> tuple[Any, ...]:
    """What the copies depend on, in scalars: torch 2.11 keeps no constant of a graph beyond it."""
    return str(device), *tuple(
        [
            (
                *tuple(c.quantizer.spec),
                c.quantizer.rowwise,
                c.quantizer.columnwise,
                c.state,
                None if c.quantizer.implementation() is None else c.quantizer,
            )
            for c in calls
        ]
    )


# --- parameters held quantized ---------------------------------------------------------------------------------------


class QuantizedParameter(QuantizedTensorBase):
    """A quantized weight: what `nn.Parameter` holds under `quantized_model_init`; also a `QuantizedTensor`, or a
    `QuantizedStack` where the weight is one of several tensors.

    It trains with a master copy: autograd gives it a plain gradient of its logical dtype, an optimizer steps a tensor
    in high precision, and `param.copy_(master)` quantizes that again, in place. Optimizers cannot step it directly: its
    arithmetic raises, as every `QuantizedTensor`'s.
    """

    _high_precision_init_val: Tensor | None = None

    def get_high_precision_init_val(self) -> Tensor | None:
        """What the parameter was initialized with, on the CPU; None if not preserved, or cleared."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Frees the initial value."""
        self._high_precision_init_val = None

    @staticmethod
    def of(q: QuantizedTensorBase) -> Any:
        kind: Any = _StackParameter if isinstance(q, QuantizedStack) else _TensorParameter
        return kind(q.quantizer, q.shape, q.dtype, **{n: getattr(q, n) for n in q.__tensor_flatten__()[0]})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = QuantizedParameter.of(self.detach().clone())  # type: ignore[arg-type]
            copied._high_precision_init_val = self._high_precision_init_val
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickled in state dicts as what it is beside a parameter, which `copy_` takes back."""
        if not isinstance(self, nn.Parameter):
            return super().__reduce_ex__(protocol)
        return _parameter, (super().__reduce_ex__(protocol)[1], self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default and isinstance(args[0], QuantizedParameter):
            return _requantize(args[0], args[1])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        return QuantizedParameter.of(out) if type(out) is cls.kind else out


class _TensorParameter(QuantizedParameter, QuantizedTensor):
    pass


class _StackParameter(QuantizedParameter, QuantizedStack):
    pass


def _parameter(parts: tuple[Any, ...], requires_grad: bool) -> Any:
    from diptych.torch.quantized import _rebuild

    return nn.Parameter(QuantizedParameter.of(_rebuild(*parts)), requires_grad)


torch.serialization.add_safe_globals([_TensorParameter, _StackParameter, _parameter])


def _quantized(weight: Tensor, quantizer: Quantizer, stack: bool) -> Any:
    return (quantize_stack if stack else functional.quantize)(weight, quantizer)


def _requantize(q: QuantizedParameter, src: Tensor) -> QuantizedParameter:
    if q.shape != src.shape:
        raise ShapeError(f"copy_ into a quantized parameter {list(q.shape)}: got {describe(src)}")
    made: Any = src
    if not (isinstance(src, q.kind) and (q.quantizer, q.dtype) == (src.quantizer, src.dtype)):
        made = _quantized(dequantized_weight(src).detach().to(q.device), q.quantizer, isinstance(q, QuantizedStack))
    for name in q.__tensor_flatten__()[0]:
        getattr(q, name).copy_(getattr(made, name))
    return q


class _InitState(threading.local):
    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.preserve = False


_INIT = _InitState()


class quantized_model_init:
    """Region in which new modules hold their weights quantized, and in no other precision.

    **Arguments:** `enabled`: False makes plain weights, also inside an enabled region. `recipe`: which decides on the
    weights' format; None is `DEFAULT_RECIPE`. Under delayed scaling a weight's scale comes from the weight itself.
    `preserve_high_precision_init_val`: each weight keeps what it was initialized with on the CPU, for an optimizer to
    take its master weights from: `weight.get_high_precision_init_val()`, `weight.clear_high_precision_init_val()`.

    **Raises:** ArgumentError for a `recipe` that is none, and for what is no bool where one is asked for, such as a
    recipe that is given without its name; ValueError from a module whose weight the recipe quantizes in two
    ways, or stochastically.
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        op = "quantized_model_init"
        require_switches(op, enabled=enabled, preserve_high_precision_init_val=preserve_high_precision_init_val)
        require_recipe(op, recipe)
        self.recipe = (DEFAULT_RECIPE if recipe is None else recipe) if enabled else None
        self.preserve = preserve_high_precision_init_val
        self._outer: list[tuple[Recipe | None, bool]] = []

    def __enter__(self) -> quantized_model_init:
        self._outer.append((_INIT.recipe, _INIT.preserve))
        _INIT.recipe, _INIT.preserve = self.recipe, self.preserve
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _INIT.recipe, _INIT.preserve = self._outer.pop()


def initial_weight(weight: Tensor, recipe: Recipe | None, module: str, name: str) -> Any:
    """A module's new weight, quantized where a `quantized_model_init` region says so; [G, N, K] becomes a stack."""
    if _INIT.recipe is None:
        return weight
    quantizer = held_quantizer("quantized_model_init", _INIT.recipe if recipe is None else recipe, module, name)
    if quantizer is None or weight.is_meta:
        return weight
    made = QuantizedParameter.of(_quantized(weight.detach(), quantizer, weight.dim() == 3))
    param = nn.Parameter(made, weight.requires_grad)
    if _INIT.preserve:
        param._high_precision_init_val = weight.detach().cpu()  # type: ignore[attr-defined]
    return param
