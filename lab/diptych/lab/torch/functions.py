"""Records the torch functions that a model calls, as operations of `diptych.lab.replay.table`.

A function mode receives each call of a torch function or method in eager code, but not the calls inside of it. `_KNOWN`
maps a function to its description as a row of the table. A call that the table cannot express is not recorded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import string
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diptych.lab import capture as rules
from diptych.lab.replay import table
from diptych.lab.torch import statistics
from diptych.lab.torch.table_ops import FUNCTIONS
from diptych.torch.private.dispatch import (
    default_device_mode,
    function_modes,
    pop_function_mode,
    push_function_mode,
    without_function_modes,
)
from diptych.torch.private.functorch import is_wrapped

_ROTARY = "apply_rotary_pos_emb"
_PRODUCTS = ("linear", "matmul", "conv")
_WRITING = (Tensor.add_, Tensor.mul_, Tensor.multiply_, F.silu)
"""Functions that may write to an operand."""
_Described = tuple[str, dict[str, Any], dict[str, Any]]
"""(row, operands, options): optional operands may be None, and `dtype` is not among the options."""


class Functions(TorchFunctionMode):
    """A function mode that records calls of torch functions while it is active.

    **Arguments:** `path`: returns the name of the running module, None if nothing is to be recorded. `see`: records the
    tensors of one call, given (kind of site, module, row, tensors by name), and returns those that it recorded.
    """

    def __init__(self, path: Callable[[], str | None], see: Callable[..., list[Any]]) -> None:
        self.path, self._see = path, see
        self._inside = False  # whether a function that is recorded as a whole is running
        self._forms: dict[Any, bool | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # compilers trace these two lines and nothing behind them
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward and all(t in (Tensor, nn.Parameter) for t in types):
            with self:
                return _opened(func)(*args, **kwargs)
        describe = None if self._inside else _KNOWN.get(func)
        path = None if describe is None else self.path()
        found = None if describe is None or path is None else describe(args, kwargs)
        if found is None or not all(_plain(t) for t in found[1].values() if t is not None):
            return func(*args, **kwargs)
        row, operands, options = found
        operands = {k: t for k, t in operands.items() if t is not None}
        if func in _WRITING:
            if len(operands) == 2 and torch.result_type(*operands.values()) != operands["a"].dtype:
                return func(*args, **kwargs)  # the result is rounded once more, to the operand's dtype
            seen = self._see("operand", path, row, operands)
            out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
            seen = self._see("operand", path, row, _as_computed(row, operands, out))
        if "dtype" in table.TABLE[row].options:
            options = options | {"dtype": statistics.dtype_name(out.dtype)}
        self._result(path, row, options, seen, len(operands), out)
        return out

    def _result(
        self, path: Any, row: str, options: dict[str, Any], seen: list[Any], operands: int, out: Tensor
    ) -> None:
        for result in self._see("result", path, row, {"out": out}):
            result.inputs = tuple([operand.key for operand in seen])
            if len(seen) == operands:  # a pattern of sites may exclude operands
                result.operation = rules.operation(row, options)

    def rotate(self, real: Callable[..., Any], given: inspect.BoundArguments) -> Any:
        """Runs a function that applies rotary embeddings, and records it as a whole if it is the table's operation."""
        path, named = self.path(), given.arguments
        tensors = [named[k] for k in ("q", "k", "cos", "sin")]
        rest = {k: v for k, v in named.items() if not isinstance(v, Tensor)}
        if path is None or self._inside or len(rest) + 4 != len(named) or not all(map(_plain, tensors)):
            return real(*given.args, **given.kwargs)
        key = (real, *[(t.dtype, t.shape) for t in tensors], repr(rest))
        if key not in self._forms:
            self._forms[key] = _form(real, named)
        interleaved = self._forms[key]
        if interleaved is None:
            return real(*given.args, **given.kwargs)
        self._inside = True
        try:
            out = real(*given.args, **given.kwargs)
        finally:
            self._inside = False
        cos, sin = _broadcast(named)
        for x, turned in zip(tensors, out, strict=False):
            seen = self._see("operand", path, "rotary", {"x": x, "cos": cos, "sin": sin})
            self._result(path, "rotary", {"interleaved": interleaved}, seen, 3, turned)
        return out


@contextlib.contextmanager
def recorded(modules: Iterable[nn.Module], mode: Functions) -> Iterator[None]:
    """Returns a context in which a mode records the functions that modules call, and the functions for rotary
    embeddings in the files of these modules."""
    files = {sys.modules.get(type(m).__module__) for m in modules}
    with contextlib.ExitStack() as stack:
        for file in files:
            if file is not None and _is_rotary(vars(file).get(_ROTARY)):
                stack.enter_context(_wrapped(file, mode))
        default = default_device_mode()  # torch requires the default device's mode at the bottom
        first = [m for m in function_modes() if m is default]
        # `mode` goes below all other modes, since these may be left earlier, in any step.
        _restack([*first, mode, *[m for m in function_modes() if m is not default]])
        stack.callback(lambda: _restack([m for m in function_modes() if m is not mode]))
        yield


def _restack(modes: list[TorchFunctionMode]) -> None:
    for _ in function_modes():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def _opened(func: Any) -> Callable[..., Any]:
    """Returns a copy of one of torch's Python functions that does not dispatch to modes itself, so that modes receive
    the calls inside of it."""
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    known = func.__globals__ | dict.fromkeys(asks, lambda *_: False)
    made = types.FunctionType(func.__code__, known, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _plain(t: Any) -> bool:
    """Returns whether a trace can hold a tensor without conversion."""
    return (
        type(t) in (Tensor, nn.Parameter)
        and t.layout is torch.strided
        and not (t.is_nested or t.is_meta or is_wrapped(t))
        and statistics.dtype_name(t.dtype) is not None
    )


def _as_computed(row: str, operands: dict[str, Tensor], out: Tensor) -> dict[str, Tensor]:
    """Returns the operands in the dtype in which the function computed, which autocast or the function itself chose."""
    if row in ("add", "mul"):
        return operands
    numbers = {k: t.detach() for k, t in operands.items() if k not in ("ids", "targets")}
    differs = next(iter(numbers.values())).dtype != out.dtype
    if torch.is_autocast_enabled(out.device.type) if row in _PRODUCTS else differs:
        numbers = {k: t.to(out.dtype) for k, t in numbers.items()}
    return operands | numbers


# --- rotary embeddings, by the convention of Hugging Face's transformers ---


_WRAPPED: dict[types.ModuleType, tuple[Callable[..., Any], list[Functions]]] = {}
"""Modules whose function has a wrapper at present, each with the function and the modes that record it."""


def _is_rotary(function: Any) -> bool:
    first = ["q", "k", "cos", "sin"]
    return isinstance(function, types.FunctionType) and list(inspect.signature(function).parameters)[:4] == first


@contextlib.contextmanager
def _wrapped(file: types.ModuleType, mode: Functions) -> Iterator[None]:
    if file not in _WRAPPED:
        real = vars(file)[_ROTARY]
        _WRAPPED[file] = real, []
        setattr(file, _ROTARY, _wrapper(real, _WRAPPED[file][1]))
    real, modes = _WRAPPED[file]
    modes.append(mode)
    try:
        yield
    finally:
        modes.remove(mode)
        if not modes:
            setattr(file, _ROTARY, real)
            del _WRAPPED[file]


def _wrapper(real: Callable[..., Any], modes: list[Functions]) -> Callable[..., Any]:
    signature = inspect.signature(real)

    @functools.wraps(real)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        mode = None if torch.compiler.is_compiling() else next((m for m in modes if m.path() is not None), None)
        if mode is None:
            return real(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return mode.rotate(real, given)

    return rotated


def _broadcast(named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns cos and sin with the axis that the function adds to them."""
    cos, sin, axis = named["cos"].detach(), named["sin"].detach(), named.get("unsqueeze_dim")
    return (cos, sin) if axis is None else (cos.unsqueeze(axis), sin.unsqueeze(axis))


@torch.no_grad()
def _form(real: Callable[..., Any], named: dict[str, Any]) -> bool | None:
    """Returns whether a function rotates pairs of neighbors (`interleaved`), judged by its results for small tensors of
    the same dtypes and ranks on the CPU; None if it is not the table's operation."""
    if len({named[name].shape[-1] for name in ("q", "k", "cos", "sin")}) > 1:
        return None  # the function rotates only a part of each head
    small = dict(named)
    for i, name in enumerate(("q", "k", "cos", "sin")):
        shape = [min(n, 8) for n in named[name].shape]
        values = torch.arange(i, i + math.prod(shape), dtype=torch.float64, device="cpu").sin()
        small[name] = values.reshape(shape).to(named[name].dtype)
    with without_function_modes():
        try:
            out = real(**small)
        except Exception:  # small tensors may violate an assumption of the function that the user's call meets
            return None
        if not (isinstance(out, tuple) and len(out) == 2 and all(map(_plain, out))):
            return None
        cos, sin = _broadcast(small)
        for interleaved in (False, True):
            want = [FUNCTIONS["rotary"](small[k], cos, sin, interleaved=interleaved) for k in ("q", "k")]
            if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(out, want, strict=True)):
                return interleaved
    return None


# --- descriptions of calls as rows of the table ---


_KNOWN: dict[Any, Callable[[Any, Any], _Described | None]] = {}


def _describes(*functions: Any) -> Callable[[Any], Any]:
    """Registers the description of calls of some functions. The description has the functions' argument names. Calls
    with other arguments, or without tensors for parameters annotated as `Tensor`, are not recorded."""

    def register(describe: Callable[..., _Described | None]) -> Callable[..., _Described | None]:
        signature = inspect.signature(describe)
        tensors = [p.name for p in signature.parameters.values() if p.annotation == "Tensor"]

        def bound(args: Any, kwargs: Any) -> _Described | None:
            try:
                given = signature.bind(*args, **kwargs)
                known = all(isinstance(given.arguments[name], Tensor) for name in tensors)
                return describe(*given.args, **given.kwargs) if known else None
            except (TypeError, ValueError):  # the arguments are invalid; torch raises the error
                return None

        _KNOWN.update(dict.fromkeys(functions, bound))
        return describe

    return register


@_describes(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Any = None) -> _Described | None:
    return ("linear", {"x": input, "weight": weight, "bias": bias}, {}) if weight.ndim == 2 else None


@_describes(torch.addmm, Tensor.addmm)
def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> _Described | None:
    if (beta, alpha) != (1, 1) or input.shape != mat2.shape[1:]:
        return None
    return "linear", {"x": mat1, "weight": mat2.detach().T, "bias": input}, {}


@_describes(torch.matmul, Tensor.matmul)
def _matmul(input: Tensor, other: Tensor) -> _Described | None:
    left, m = ("...mk", "m") if input.ndim > 1 else ("k", "")
    right, n = ("...kn", "n") if other.ndim > 1 else ("k", "")
    return _product(f"{left},{right}->{'...' if m or n else ''}{m}{n}", input, other)


@_describes(torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
def _mm(input: Tensor, mat2: Tensor) -> _Described | None:
    return _matmul(input, mat2)


@_describes(Tensor.__rmatmul__)
def _rmatmul(input: Tensor, other: Tensor) -> _Described | None:
    return _matmul(other, input)


@_describes(torch.einsum)
def _einsum(equation: Any, *operands: Any) -> _Described | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    known = isinstance(equation, str) and len(operands) == 2 and all(isinstance(t, Tensor) for t in operands)
    return _product(equation, *operands) if known else None


def _product(equation: str, a: Tensor, b: Tensor) -> _Described | None:
    """Describes a product of two tensors with their axes in memory order, which may determine the order of
    summation."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        return None
    if not arrow:
        once = sorted(c for c in inputs if c.isalpha() and inputs.count(c) == 1)
        out = "".join(["..." * ("..." in inputs), *once])
    letters = iter([c for c in string.ascii_letters if c not in equation])
    more = [t.ndim - len(term.replace("...", "")) for t, term in zip((a, b), terms, strict=True)]
    if any(n < 0 or (n and "..." not in term) for n, term in zip(more, terms, strict=True)):
        return None
    common = "".join([next(letters) for _ in range(max(more))])
    terms = [term.replace("...", common[len(common) - n :]) for term, n in zip(terms, more, strict=True)]
    sizes: dict[str, set[int]] = {}
    for t, term in zip((a, b), terms, strict=True):
        for n, c in zip(t.shape, term, strict=True):
            sizes.setdefault(c, set()).add(n)
    # An axis of extent 1 in one operand is repeated along the other operand's axis.
    for c in [c for c, found in sizes.items() if len(found) > 1]:
        own = next(letters)
        terms = [
            "".join([own if x == c and n == 1 else x for n, x in zip(t.shape, term, strict=True)])
            for t, term in zip((a, b), terms, strict=True)
        ]
    (a, left), (b, right) = (_as_stored(t, term) for t, term in zip((a, b), terms, strict=True))
    return "matmul", {"a": a, "b": b}, {"equation": f"{left},{right}->{out.replace('...', common)}"}


def _as_stored(x: Tensor, axes: str) -> tuple[Tensor, str]:
    order = sorted(range(x.ndim), key=lambda i: -x.stride(i))
    stored = x.detach().permute(order)
    if x.is_contiguous() or not stored.is_contiguous():
        return x, axes
    return stored, "".join([axes[i] for i in order])


@_describes(F.embedding)
def _embedding(
    input: Tensor, weight: Tensor, padding_idx: Any = None, max_norm: Any = None, norm_type: Any = 2.0,
    scale_grad_by_freq: Any = False, sparse: Any = False,
) -> _Described | None:  # fmt: skip
    return ("embedding", {"ids": input, "table": weight}, {}) if max_norm is None else None


def _conv(
    axes: int, input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> _Described | None:  # fmt: skip
    def each(value: Any) -> tuple[int, ...]:
        given = (value,) if isinstance(value, int) else tuple([int(v) for v in value])
        return given * axes if len(given) == 1 else given

    if input.ndim != axes + 2 or weight.ndim != axes + 2:
        return None
    strides, dilation = each(stride), each(dilation)
    if padding == "same":
        both = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pairs = tuple([(n // 2, n - n // 2) for n in both])
    else:
        pairs = tuple([(n, n) for n in each(0 if padding == "valid" else padding)])
    spatial = "012"[:axes]
    options = {
        "layout": f"NC{spatial},OI{spatial},NC{spatial}", "strides": strides, "padding": pairs, "dilation": dilation,
        "input_dilation": (1,) * axes, "groups": groups,
    }  # fmt: skip
    return "conv", {"x": input, "weight": weight, "bias": bias}, options


for _axes, _functions in enumerate(
    ((torch.conv1d, F.conv1d), (torch.conv2d, F.conv2d), (torch.conv3d, F.conv3d)), start=1
):
    _describes(*_functions)(functools.partial(_conv, _axes))


def _along(row: str, input: Tensor, dim: Any) -> _Described | None:
    if not isinstance(dim, int):
        return None
    return row, {"x": input}, {"axis": dim if dim < 0 else dim - max(input.ndim, 1)}


@_describes(torch.softmax, Tensor.softmax, torch.special.softmax)
def _softmax(input: Tensor, dim: Any, dtype: Any = None) -> _Described | None:
    return _along("softmax", input, dim)


@_describes(torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax)
def _log_softmax(input: Tensor, dim: Any, dtype: Any = None) -> _Described | None:
    return _along("log_softmax", input, dim)


@_describes(F.softmax)
def _f_softmax(input: Tensor, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> _Described | None:
    return _along("softmax", input, dim)


@_describes(F.log_softmax)
def _f_log_softmax(input: Tensor, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> _Described | None:
    return _along("log_softmax", input, dim)


def _length(shape: Any) -> int:
    return 1 if isinstance(shape, int) else len(shape)


@_describes(F.layer_norm, torch.layer_norm)
def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enable: Any = True,
) -> _Described:  # fmt: skip
    return (
        "layer_norm",
        {"x": input, "weight": weight, "bias": bias},
        {"axes": _length(normalized_shape), "eps": float(eps)},
    )


@_describes(F.rms_norm, torch.rms_norm)
def _rms_norm(input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> _Described | None:
    if eps is None and not input.is_floating_point():
        return None
    if eps is None:  # torch takes the eps of the dtype in which it computes
        eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
    return "rms_norm", {"x": input, "weight": weight}, {"axes": _length(normalized_shape), "eps": float(eps)}


@_describes(F.gelu)
def _gelu(input: Tensor, *, approximate: str = "none") -> _Described:
    return "gelu", {"x": input}, {"approximate": approximate == "tanh"}


@_describes(F.silu)
def _silu(input: Tensor, inplace: bool = False) -> _Described:
    return "silu", {"x": input}, {}


@_describes(torch.add, Tensor.add, Tensor.add_)
def _add(input: Tensor, other: Tensor, *, alpha: Any = 1) -> _Described | None:
    return _elementwise("add", input, other) if alpha == 1 else None


@_describes(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.mul_, Tensor.multiply_)
def _mul(input: Tensor, other: Tensor) -> _Described | None:
    return _elementwise("mul", input, other)


def _elementwise(row: str, a: Tensor, b: Tensor) -> _Described | None:
    """Describes an elementwise operation. Returns None if the result's dtype depends on the number of axes, since other
    frameworks promote by dtypes alone."""
    return (row, {"a": a, "b": b}, {}) if torch.result_type(a, b) == torch.promote_types(a.dtype, b.dtype) else None


@_describes(F.cross_entropy)
def _cross_entropy(
    input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> _Described | None:  # fmt: skip
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not plain or target.is_floating_point():
        return None
    options = {"axis": min(1, input.ndim - 1) - input.ndim, "reduction": reduction, "ignore_index": ignore_index}
    return "cross_entropy", {"logits": input, "targets": target}, options
