"""`QuantizedParameter`: a held weight, which exists quantized and in no other precision, and its arithmetic.

Below autograd each operator on such a weight is of one of these kinds:

- **whole**: the operators in `quantized_ops` (detach, clone, to, copy_, ...) keep it quantized.
- **read**: pointwise operators, reductions and the like read its dequantized values. So do those that make plain
  tensors of its shape (zeros_like, ...), such as an optimizer's state.
- **write**: an operator in place gets the values in high precision, and its result is quantized into the same buffers
  by the weight's quantizer. With a master, `weight.main_param`, reads and writes are the master's, and the weight is
  quantized from it.
- **view**: a view of the whole weight is the weight itself; any other view is a copy of values that refuses writes.
- All else is refused by name, products above all: they run in high precision after `dequantize()` alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.errors import LostUpdateWarning, ShapeError, UnsupportedError
from diptych.torch.primitives.checks import HIGH_PRECISION, describe
from diptych.torch.private.dispatch import new_alias, no_torch_function, schema, tree_flatten, tree_map
from diptych.torch.tensors.quantized import (
    BUFFERS,
    QuantizedStack,
    QuantizedTensor,
    QuantizedTensorBase,
    called,
    in_parts,
    outside_inference,
    parts_of,
)
from diptych.torch.tensors.quantized import _rebuild as rebuild_quantized
from diptych.torch.tensors.quantized_ops import HANDLERS

aten = torch.ops.aten

_READS = frozenset({
    "sum", "mean", "prod", "std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm", "amax", "amin",
    "aminmax", "max", "min", "any", "all", "argmax", "argmin", "count_nonzero", "logsumexp", "median", "nanmedian",
    "nansum", "histc", "topk", "sort", "cumsum", "trace", "isnan", "isinf", "equal", "allclose", "cat",
    "stack", "index", "index_select", "gather", "masked_select", "nonzero", "copy", "clone", "_to_copy",
    "_local_scalar_dense", "masked_fill", "is_pinned",
})  # fmt: skip
_LIKE = frozenset({
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "empty_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided",
})  # fmt: skip
_OVERWRITES = frozenset({
    "copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "_foreach_copy_", "_foreach_zero_",
})  # fmt: skip


class QuantizedParameter(QuantizedTensorBase):
    """A quantized weight: what `nn.Parameter` holds under `quantized_model_init`; also a `QuantizedTensor`, or a
    `QuantizedStack` where the weight is one of several tensors.

    Autograd gives it a plain gradient of its logical dtype. Optimizers step it, foreach ones too; fused ones cannot.
    Arithmetic in place computes in high precision and quantizes the result by the weight's quantizer; every other
    result is plain. Small updates round away so, which a `LostUpdateWarning` says once, unless the weight has a master:

    `main_param`: None, or a float32 tensor of the weight's shape on its device, which a user sets. Arithmetic on the
    weight is then the master's: it is what operators read and write, and the weight is quantized from it; `copy_` and
    loading set it too. Products and `dequantize()` use the quantized copies, and so does compiled code.
    """

    main_param: Tensor | None = None
    _high_precision_init_val: Tensor | None = None
    _awaits_init: bool = False  # made on meta: the first values that fill it are preserved

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values that the parameter was initialized with, on the CPU; None if not preserved, or cleared."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Frees the initial value."""
        self._high_precision_init_val = None
        self._awaits_init = False

    def copy_of(self, columnwise: bool) -> Any:
        """`QuantizedTensor.copy_of`, with an error that speaks of a module's weight."""
        if columnwise and self.columnwise_data is None:
            raise ValueError(
                "the gradient of a layer's input needs the columnwise copy of its weight, which is held without: "
                "quantized_model_init makes that copy outside of torch.no_grad() and torch.inference_mode() alone, and "
                "hold with inference=False"
            )
        copy = super().copy_of(columnwise)
        gathered = columnwise or torch.compiler.is_compiling() or copy[0].untyped_storage().nbytes() >= copy[0].nbytes
        if not gathered:  # the columnwise copy may be saved in forward and gathered in backward
            raise UnsupportedError(
                "the rowwise copy of a sharded weight is read in backward, which gathered the columnwise one: where "
                "layers run again in backward (activation checkpointing), call parallel.prepare with recompute=True"
            )
        return copy

    @staticmethod
    def of(q: QuantizedTensorBase) -> Any:
        kind: Any = _StackParameter if isinstance(q, QuantizedStack) else _TensorParameter
        return kind(q.quantizer, q.shape, q.dtype, **parts_of(q))

    def quantize_(self, src: Tensor) -> Any:
        """See `QuantizedTensor.quantize_`; a master becomes `src` too."""
        with torch.no_grad():
            return self.copy_(src)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Any = self.detach().clone()
            copied._high_precision_init_val = self._high_precision_init_val
            copied = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
            copied.main_param = None if self.main_param is None else self.main_param.detach().clone()
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles a parameter with its master and initial value; in a state dict, as the quantized tensor that `copy_`
        takes."""
        if not isinstance(self, nn.Parameter):
            return super().__reduce_ex__(protocol)
        kept = {
            name: t for name in ("main_param", "_high_precision_init_val") if (t := getattr(self, name)) is not None
        }
        return _parameter, (super().__reduce_ex__(protocol)[1], self.requires_grad, kept)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class _TensorParameter(QuantizedParameter, QuantizedTensor):
    pass


class _StackParameter(QuantizedParameter, QuantizedStack):
    pass


def _parameter(parts: tuple[Any, ...], requires_grad: bool, kept: dict[str, Tensor] | None = None) -> Any:
    made = nn.Parameter(QuantizedParameter.of(rebuild_quantized(*parts)), requires_grad)
    for name, t in (kept or {}).items():
        setattr(made, name, t)
    return made


torch.serialization.add_safe_globals([_TensorParameter, _StackParameter, _parameter])


class _Values(Tensor):
    """A copy of a weight's values that stands for a view of it. Reads work as for any tensor. Writes, which would not
    reach the weight, are refused, except by collectives: DistributedDataParallel copies the received values back."""

    plain: Tensor

    @staticmethod
    def of(plain: Any) -> Any:
        if not isinstance(plain, Tensor):
            return plain
        made: Any = new_alias(_Values, plain)
        made.plain = plain
        return made

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


# --- the kinds of operators ------------------------------------------------------------------------------------------

_kinds: dict[Any, str] = {}


def _kind(func: Any) -> str:
    if func not in _kinds:
        name, given = func.overloadpacket.__name__, schema(func)
        if func.namespace == "c10d":
            kind = "collective"
        elif name.startswith("_fused_"):
            kind = "fused"
        elif name in _LIKE:
            kind = "like"
        elif torch.Tag.inplace_view in func.tags:
            kind = "refused"
        elif given.is_mutable:
            kind = "write"
        elif any(r.alias_info is not None for r in given.returns):
            kind = "view"
        else:
            kind = "read" if _reads(func) else "refused"
        _kinds[func] = kind
    return _kinds[func]


def _reads(func: Any) -> bool:
    """Whether an operator may read a weight's values: no product does."""
    name = func.overloadpacket.__name__
    return torch.Tag.pointwise in func.tags or name.startswith("_foreach_") or name.rstrip("_") in _READS


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    first = args[0] if args else None
    if isinstance(first, QuantizedParameter):
        if func is aten.copy_.default:
            return _overwritten(first, *args[1:], **kwargs)
        if func in HANDLERS and func is not aten.equal.default and _keeps(func, args):
            with outside_inference():
                return _carried(func, HANDLERS[func](func, *args, **kwargs), args)
    parts = in_parts(func, args, kwargs)
    if parts is not NotImplemented:
        return parts
    kind = _kind(func)
    run = _RUNS.get(kind)
    if run is None or not all(_arithmetical(t) for t in tree_flatten((args, kwargs))[0]):
        raise UnsupportedError(_refusal(func, kind))
    return run(func, args, kwargs)


def _keeps(func: Any, args: Any) -> bool:
    """Whether a handler's result stays quantized: a part of a weight does only if the weight is a stack, and a view
    only if it is of the weight's own shape."""
    if func is aten.view.default:
        return tuple(args[1]) == tuple(args[0].shape)
    return func not in (aten.select.int, aten.unbind.int) or (
        isinstance(args[0], QuantizedStack) and (args[1] if len(args) > 1 else 0) == 0
    )


def _arithmetical(t: Any) -> bool:
    return not isinstance(t, QuantizedTensorBase) or isinstance(t, QuantizedParameter)


def _refusal(func: Any, kind: str) -> str:
    if kind == "fused":
        return (
            "a fused optimizer writes weights where they lie in high precision, and a QuantizedParameter is nowhere "
            "so: make the optimizer with fused=False (foreach=True works)"
        )
    return (
        f"{called(func)} is not defined on a weight that is held quantized: products of it run in the layers of this "
        "package; for its values in high precision call dequantize() on it first"
    )


def _carried(func: Any, out: Any, args: Any) -> Any:
    """Makes a handler's results parameters, which take over the attributes of their weight."""
    if not isinstance(out, QuantizedTensorBase):
        return tuple([_carried(aten.select.int, q, (args[0], 0, g)) for g, q in enumerate(out)]) if out else out
    weight, made = args[0], QuantizedParameter.of(out)
    if func is aten.select.int:
        made.main_param = None if weight.main_param is None else weight.main_param[args[2]]
        return made
    beside = {name: t for name, t in vars(weight).items() if name not in (*BUFFERS, "quantizer", "main_param")}
    if func is not aten.clone.default and not _traced(weight):
        vars(made).update(beside)  # module.to() swaps a weight for this one, and users' attributes must not get lost
    made._high_precision_init_val, made._awaits_init = weight._high_precision_init_val, weight._awaits_init
    if weight.main_param is not None and func not in (aten.clone.default, aten.empty_like.default):
        made.main_param = weight.main_param.to(made.device)  # the master itself, unless the weight moves
    return made


# --- values ----------------------------------------------------------------------------------------------------------


def _placeholder(q: Tensor) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _master(q: QuantizedParameter) -> Tensor | None:
    master = q.main_param
    if master is None:
        return None
    if not isinstance(master, Tensor) or isinstance(master, QuantizedTensorBase) or master.dtype != torch.float32:
        raise ValueError(
            f"weight.main_param must be a float32 tensor, got "
            f"{describe(master) if isinstance(master, Tensor) else type(master).__name__}"
        )
    if master.shape != q.shape or master.device != q.device:
        raise ShapeError(f"weight.main_param must be {list(q.shape)} on {q.device}, got {describe(master)}")
    return master.detach()


def _values(t: Any) -> Any:
    """The values of a weight in its logical dtype, for an operator to read; other arguments stay as they are."""
    if isinstance(t, _Values):
        return t.plain
    if not isinstance(t, QuantizedParameter):
        return t
    if t.is_meta:
        return _placeholder(t)
    master = _master(t)
    return t._values(t.dtype) if master is None else master.to(t.dtype)


def _store(q: QuantizedParameter, values: Tensor) -> None:
    """Quantizes values into a weight's buffers."""
    if q.is_meta:
        return
    if values.dtype not in HIGH_PRECISION:
        values = values.to(torch.float32)
    if q._awaits_init:
        q._high_precision_init_val, q._awaits_init = values.detach().to("cpu", copy=True), False
    made = q._made_of(values)
    for name, t in parts_of(q).items():
        t.copy_(getattr(made, name))


def _overwritten(q: QuantizedParameter, src: Any, non_blocking: bool = False) -> QuantizedParameter:
    if q.shape != src.shape:
        raise ShapeError(f"copy_ into a quantized parameter {list(q.shape)}: got {describe(src)}")
    values = src.detach()
    if isinstance(src, QuantizedTensorBase):
        values = src._values(src.dtype) if q.main_param is not None or not fits(q, src) else None
    elif isinstance(src, _Values):
        values = src.plain
    master = _master(q)
    if master is not None and values is not None:
        master.copy_(values)
    if isinstance(src, QuantizedTensorBase) and fits(q, src):
        for name, t in parts_of(q).items():
            t.copy_(getattr(src, name), non_blocking=non_blocking)
    else:
        assert values is not None
        _store(q, values.to(q.device))
    return q


def fits(q: QuantizedTensorBase, src: QuantizedTensorBase) -> bool:
    """Whether src has all copies of q, made by the same quantizer."""
    return (
        isinstance(src, q.kind)
        and src.quantizer.with_usage(rowwise=q.quantizer.rowwise, columnwise=q.quantizer.columnwise) == q.quantizer
        and all(getattr(src, name) is not None for name in parts_of(q))
    )


# --- running operators -----------------------------------------------------------------------------------------------


def _read(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*tree_map(_values, args), **tree_map(_values, kwargs))


def _like(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(_placeholder(args[0]), *tree_map(_values, args[1:]), **kwargs)


def _view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], QuantizedParameter):
        whole = torch.empty(args[0].shape, device="meta")
        seen = func(whole, *args[1:], **kwargs)
        if isinstance(seen, Tensor) and (seen.shape, seen.stride()) == (whole.shape, whole.stride()):
            return aten.alias.default(args[0])
        if func is aten.split.Tensor and args[0].main_param is not None and args[0].dtype != torch.float32:
            raise UnsupportedError(
                f"split of a weight that stands for {args[0].dtype} and has a float32 master: parts of it, such as "
                "fully_shard makes, would be the master's values rounded; make the module in float32 (FSDP's "
                "MixedPrecisionPolicy casts what is gathered), or split weight.main_param"
            )
        if _traced(args[0]):
            raise UnsupportedError(
                f"{called(func)} of a weight that is held quantized, in compiled code: its values have no views there; "
                "call dequantize() on it first"
            )
    return tree_map(_Values.of, _read(func, args, kwargs))


def _traced(q: QuantizedTensorBase) -> bool:
    return any(type(t) not in (Tensor, nn.Parameter) for t in parts_of(q).values())


def _collective(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if any(isinstance(t, QuantizedParameter) for t in tree_flatten((args, kwargs))[0]):
        raise UnsupportedError(
            f"{called(func)} of a weight that is held quantized: send its buffers, which __tensor_flatten__ names"
        )
    return _read(func, args, kwargs)


def _write(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = called(func)
    written: dict[int, tuple[QuantizedParameter, Tensor]] = {}
    read: list[Any] = []
    for i, argument in enumerate(schema(func).arguments):
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_flatten(given)[0] if isinstance(t, (QuantizedParameter, _Values))]
        if argument.alias_info is None or not argument.alias_info.is_write:
            read += tensors
            continue
        for q in tensors:
            if isinstance(q, _Values):
                raise UnsupportedError(
                    f"{name} on a view of a weight that is held quantized: the view is a copy of its values, and the "
                    "weight would not change; write to the whole weight"
                )
            if _traced(q):
                raise UnsupportedError(
                    f"{name} on a weight that is held quantized, in compiled code: step optimizers and change weights "
                    "outside of it; copy_ is compiled"
                )
            written[id(q)] = (q, _written_values(q, name))
    if read and not _reads(func):
        raise UnsupportedError(_refusal(func, "write"))

    def plain(t: Any) -> Any:
        return written[id(t)][1] if id(t) in written else _values(t)

    out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    back = {}
    for q, values in written.values():
        _store(q, values)
        if name.startswith("_foreach_"):  # torch does not increment versions of tensors in lists
            torch.autograd.graph.increment_version(q)
        back[id(values)] = q
    return tree_map(lambda t: back.get(id(t), t), out)


def _written_values(q: QuantizedParameter, name: str) -> Tensor:
    """Returns the tensor that an operator in place writes to, before it is quantized."""
    master = _master(q)
    if master is not None:
        return master
    if name in _OVERWRITES:
        return _placeholder(q)
    _warn_of_lost_updates(name)
    return _values(q)


_warned = False


def _warn_of_lost_updates(name: str) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"{name} on a weight that is held quantized and has no master: the sum is quantized again, and updates below "
        "half a step of its format are lost. Set weight.main_param to a float32 tensor, such as "
        "weight.get_high_precision_init_val().float().to(weight.device), and updates are added there; to merge "
        "adapters without this loss, call diptych.torch.unhold(model) before. Further ones are not reported",
        LostUpdateWarning,
        stacklevel=6,
    )


_RUNS = {"read": _read, "like": _like, "view": _view, "write": _write, "collective": _collective}
