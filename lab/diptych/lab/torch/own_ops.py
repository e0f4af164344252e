"""diptych's operations as rows of the lab's table: descriptions of recorded calls, and their replay on given operands.

Operands, options and results have the table's names, which sometimes differ from those of torch's ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.errors import UnsupportedError
from diptych.common.formats import FORMATS, format_by_name
from diptych.common.gemm_options import GemmOptions
from diptych.common.ops.activation import ActivationOptions
from diptych.common.ops.norm import NormOptions
from diptych.common.quantizers import Quantizer
from diptych.core import _core
from diptych.lab import capture as rules
from diptych.lab.replay.op import Op, Operands, require_results
from diptych.lab.replay.table import TABLE
from diptych.lab.torch import statistics
from diptych.torch.functional import source as source_ops
from diptych.torch.functional.source import FusedInput
from diptych.torch.primitives import activation as activation_ops
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import norm as norm_ops
from diptych.torch.primitives import permute as permute_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives import register
from diptych.torch.primitives import scale_update as scale_update_ops
from diptych.torch.primitives.checks import ACTIVATION_IDS, NORM_IDS, Copy, dtype_name
from diptych.torch.private.dispatch import without_function_modes
from diptych.torch.state import update

UNRECORDED = {"hash", "statistics", "rounding_errors", "rng_take", "empty", "log_amax"}
"""Ops that compute no tensor of the model."""
_ROWS = {
    "quantize_delayed": "quantize",
    "quantize_again": "quantize",
    "quantize_fused": "quantize",
    "quantize_fused_delayed": "quantize",
    "amax_fused": "amax",
    "gemm_into": "gemm",
    "grouped_gemm_into": "grouped_gemm",
}
_SOURCES: dict[str, int] = _core.fused_table()["source"]


# --- recording -------------------------------------------------------------------------------------------------------


class Observer:
    """An observer of `register` that records calls of diptych's ops.

    **Arguments:** `where`: returns the name of the calling module and the call's ticket, None if nothing is to be
    recorded. `see`: records the tensors of one call, given (kind of site, module, row, tensors by name, ticket), and
    returns those that it recorded. `warn`: receives a message about each call that cannot be recorded. `measure`:
    whether payloads are compared with their originals.
    """

    def __init__(
        self,
        where: Callable[[], tuple[str, int] | None],
        see: Callable[..., list[Any]],
        warn: Callable[[str], None],
        measure: bool,
    ) -> None:
        self._where, self._see, self._warn, self._measure = where, see, warn, measure

    def __call__(self, name: str, arguments: list[str], real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        real = self._observed_too(name, arguments, real)
        place = None if name in UNRECORDED else self._where()
        if place is None:
            return real(*args, **kwargs)
        given = dict(zip(arguments, args, strict=False)) | kwargs
        if name == "update_scales":
            return self._update_scales(place, given, lambda: real(*args, **kwargs))
        call = described(name, given)
        operands = self._operands(place, call)
        out = real(*args, **kwargs)
        self._results(place, call, operands, results(name, given, out))
        return out

    def _observed_too(self, name: str, arguments: list[str], real: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function that runs an op for the preceding observer, of another capture, or the op if there is
        none."""
        at = register.OBSERVERS.index(self)
        if not at:
            return real
        return lambda *args, **kwargs: register.OBSERVERS[at - 1](name, arguments, real, args, kwargs)

    def _operands(self, place: tuple[str, int], call: Call) -> list[Any]:
        return self._see("operand", place[0], call.row, call.operands, place[1])

    def _results(self, place: tuple[str, int], call: Call, operands: list[Any], made: dict[str, Tensor]) -> list[Any]:
        whole = call.options is not None and len(operands) == len(call.operands)
        operation = rules.operation(call.row, call.options) if whole else None  # type: ignore[arg-type]
        found = errors(call, made) if self._measure else {}
        seen = self._see("result", place[0], call.row, made, place[1])
        for result in seen:
            result.operands, result.operation = operands, operation
            result.errors = found.get(result.name.rpartition(".")[2])
        return seen

    def _update_scales(self, place: tuple[str, int], given: dict[str, Any], run: Callable[[], Tensor]) -> Tensor:
        """Records the updates in a graph as calls of `scale_update`. The graph first collects amaxes in a log, and the
        device decides whether it updates at all."""
        with torch.no_grad():
            histories, scales = ([t.clone() for t in given[name]] for name in ("histories", "scales"))
            update.collect(histories, scales, [given[name].clone() for name in update.LOG])
            happens = given["seen"] != given["step"]
        out = run()
        quantizers = given["quantizers"].items
        whole = given["group"] is None and not any([callable(q.amax_compute_algo) for q in quantizers])
        if not whole:
            self._warn(
                f"scale_update of {place[0]} is recorded without its operation: compiled code reduces amaxes over a "
                "group, or computes them by a function of your own, inside of the update"
            )
        for i, q in enumerate(quantizers):
            old, new = (
                {"history": h[i], "scale": s[i]}
                for h, s in ((histories, scales), (given["histories"], given["scales"]))
            )
            options = {"fp8_max": update.fp8_max(q), "margin": q.margin}
            call = described("scale_update", old | options | {"most_recent": q.amax_compute_algo == "most_recent"})
            call = call if whole else call._replace(options=None)
            operands = self._operands(place, call)
            seen = self._results(place, call, operands, new)
            for one in (*operands, *seen):
                one.happens = happens
        return out


# --- description -----------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call as a row of the table. `options`: the row's options, None if the call cannot be computed again."""

    row: str
    options: dict[str, Any] | None
    operands: dict[str, Tensor]


def described(op: str, given: dict[str, Any]) -> Call:
    """Returns the description of a call, without copies. `op`: the op's name in torch. `given`: its arguments by
    name."""
    row = _ROWS.get(op, op)
    several = {f"{k}[{i}]": t for k, v in given.items() if isinstance(v, (list, tuple)) for i, t in enumerate(v)}
    operands = {k: t for k, t in {**given, **several}.items() if isinstance(t, Tensor)}
    if op.endswith("_delayed"):
        operands["pending"] = operands.pop("history")[:1]
    options = _options(row, given) if row in TABLE and TABLE[row].own else None
    return Call(row, options, operands)


def results(op: str, given: dict[str, Any], out: Any) -> dict[str, Tensor]:
    """Returns a call's results by name. `out`: the returned value."""
    found = list(out) if isinstance(out, (tuple, list)) else [out]
    if op.endswith("gemm_into"):
        return {"d": given["acc"]}
    if op == "scale_update":
        return {name: given[name] for name in ("history", "scale")}
    if "quantizer" in given:
        return _quantized(op, given, found)
    names = [f"out[{i}]" for i in range(len(found))] if len(found) > 1 else ["d" if op.endswith("gemm") else "out"]
    return dict(zip(names, found, strict=True))


@torch.no_grad()
def errors(call: Call, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the result of `statistics.errors` for each payload that a call of quantize made, by name. `made`: the
    call's results."""
    # This observer hides the lab's own ops from the capture.
    register.OBSERVERS.append(lambda name, names, real, args, kwargs: real(*args, **kwargs))
    try:
        with without_function_modes():
            copies = list(_copies(call, made))
            return statistics.errors(call.operands["x"], copies) if copies else {}
    finally:
        register.OBSERVERS.pop()


def _copies(call: Call, made: dict[str, Tensor]) -> Iterator[tuple[str, Copy]]:
    """Yields the copies that a call made, with the names of their payloads. It yields none for a source, whose values
    were never stored, and no copy that was transformed before it was quantized."""
    if call.row != "quantize" or call.options is None or call.options["source"] is not None:
        return
    quantizer: Quantizer = call.options["quantizer"]
    form, amaxes = quantizer.format, {"rowwise": "amax", "columnwise": "columnwise_amax"}
    for side, amax in amaxes.items():
        if f"{side}_data" in made and not (side == "columnwise" and getattr(quantizer, "with_rht", False)):
            parts = made[f"{side}_data"], made[f"{side}_scale_inv"], made[amax] if form.two_level else None
            yield f"{side}_data", (*parts, form.id, side == "columnwise")


def _quantized(op: str, given: dict[str, Any], found: list[Tensor]) -> dict[str, Tensor]:
    quantizer = given["quantizer"]
    names = [*quantizer.buffer_names(), "column_sum"]
    if op.endswith("_delayed"):  # `found` has both copies, empty if they are not made, and the column sum
        made = (*[quantizer.rowwise] * 2, *[quantizer.columnwise] * 2, given.get("sum_dtype") is not None)
        found = [t for t, there in zip(found, made, strict=False) if there]
        found.insert(len(names) - 2, given["history"][:1])
    return dict(zip(names, found, strict=False))


def _options(row: str, given: dict[str, Any]) -> dict[str, Any]:
    options = {name: given[name] for name in TABLE[row].options if name in given}
    options = {k: dtype_name(v) if isinstance(v, torch.dtype) else v for k, v in options.items()}
    return options | _translated(row, given)


def _translated(row: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that torch's op lacks, or has under another name or number."""
    if row == "quantize":
        total = given.get("sum_dtype")
        return {"source": _source(given), "column_sum": "" if total is None else dtype_name(total)}
    if row == "amax":
        return {"source": _source(given), "flags": given.get("flags", 0), "columnwise": given.get("columnwise", False)}
    if row == "dequantize":
        return {"format": FORMATS[given["format"]].name}
    if row in ("gemm", "grouped_gemm"):
        found = {s: (FORMATS[given[f"{s}_format"]].name, given[f"{s}_columnwise"]) for s in "ab"}
        found |= {"alpha": given.get("alpha", 1.0)} | ({"beta": given.get("beta", 0.0)} if row == "gemm" else {})
        return found | ({"out_dtype": dtype_name(given["acc"].dtype)} if "acc" in given else {})
    if row == "permute_map":
        return {"kind": "mask" if given["mask"] else "index"}
    if row == "permute":
        return {"fills": tuple(given["fills"])}
    if row == "norm_grad":
        return {"which": "rmsnorm" if given["mu"] is None else "layernorm"}
    if "which" in given:
        return {"which": _name(NORM_IDS if row == "norm" else ACTIVATION_IDS, given["which"])}
    return {}


def _source(given: dict[str, Any]) -> tuple[str, str, bool, bool] | None:
    if "kind" not in given:
        return None
    kind = _name(_SOURCES, given["kind"])
    ids = {"norm": NORM_IDS, "permuted": {"": 0}}.get(kind, ACTIVATION_IDS)
    return kind, _name(ids, given["which"]), given["flag"], given["beta"] is not None


def _name(ids: dict[str, int], number: int) -> str:
    return next(name for name, n in ids.items() if n == number)


# --- replay ----------------------------------------------------------------------------------------------------------


def replayed(op: Op, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Computes an operation on these operands. Returns all of its results by name.

    An op that writes to operands writes to these. **Raises** ReplayError if operands are missing or a recorded result
    is not computed, the operation's own errors if the operands do not fit, and NotImplementedError for a product that
    torch's ops do not support.
    """
    return require_results(op, _REPLAYS[op.kind](op.options, Operands(x)))


def _several(found: Any) -> dict[str, Tensor]:
    return results("", {}, [t for t in found if t is not None])


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _copy(x: dict[str, Tensor], prefix: str, format: str, columnwise: bool) -> Copy:
    return x[f"{prefix}data"], x[f"{prefix}scale_inv"], x.get(f"{prefix}amax"), format_by_name(format).id, columnwise


def _fused(source: tuple[str, str, bool, bool], x: dict[str, Tensor]) -> FusedInput:
    kind, which, flag, _ = source
    ids = {"norm": NORM_IDS, "permuted": {"": 0}}.get(kind, ACTIVATION_IDS)
    operands = {name: x[name] for name in FusedInput._fields[4:] if name in x}
    return FusedInput(x["x"], _SOURCES[kind], ids[which], flag, **operands)


def _quantize(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    quantizer, total = o["quantizer"], _dtype(o["column_sum"]) if o["column_sum"] else None
    given: Any = [x.get(name) for name in ("amax", "columnwise_amax", "scale", "rng")]
    if o["source"] is None:
        if total is not None:
            raise UnsupportedError(
                "quantize: torch sums columns only where a norm or an activation is quantized; replay it in JAX"
            )
        if "pending" not in x:
            return _quantized("quantize", o, quantize_ops.quantize(x["x"], quantizer, *given))
        made = quantize_ops.quantize_delayed(x["x"], quantizer, x["scale"], x["pending"])
    else:
        f = _fused(o["source"], x)
        if "pending" not in x:
            return _quantized("quantize", o, source_ops.quantize(f, quantizer, *given, sum_dtype=total))
        made = source_ops.quantize_delayed(f, quantizer, x["scale"], x["pending"], total)
    made.insert(len(quantizer.buffer_names()) - 1, x["pending"])
    return _quantized("quantize", o, made)


def _quantize_stack(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    given: Any = [x.get(name) for name in ("amax", "columnwise_amax", "scale", "rng")]
    return _quantized("quantize", o, grouped_ops.quantize_stack(x["x"], o["quantizer"], *given))


def _amax(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    if o["source"] is not None:
        found = source_ops.amax(_fused(o["source"], x), o["flags"], columnwise=o["columnwise"])
    else:
        found = quantize_ops.amax(x["x"], o["flags"], columnwise=o["columnwise"])
    return _several(found if o["columnwise"] else [found])


def _dequantize(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    copy = _copy(x, "", o["format"], o["columnwise"])
    return {"out": quantize_ops.dequantize(copy, _dtype(o["dtype"]))}


def _scale_update(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    scale_update_ops.scale_update(x["history"], x["scale"], x.get("reduced"), x.get("amax"), **o)
    return {name: x[name] for name in ("history", "scale")}


def _gemm(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    (a, b), bias, options = (_copy(x, f"{s}_", *o[s]) for s in "ab"), x.get("bias"), GemmOptions.named(o)
    if "acc" not in x:
        return {"d": gemm_ops.gemm(a, b, bias, o["alpha"], _dtype(o["out_dtype"]), options)}
    gemm_ops.gemm_into(x["acc"], a, b, bias, o["alpha"], o["beta"], options)
    return {"d": x["acc"]}


def _grouped_gemm(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    (a, b), options = (_copy(x, f"{s}_", *o[s]) for s in "ab"), GemmOptions.named(o)
    each = o["align"], o["rotated"]
    if "acc" not in x:
        dtype = _dtype(o["out_dtype"])
        product = grouped_ops.grouped_gemm(a, b, x["offsets"], x.get("bias"), *each, o["alpha"], dtype, options)
        return {"d": product}
    if o["alpha"] != 1.0:
        raise UnsupportedError(
            f"grouped_gemm: torch adds a product to acc without a factor, and the call has alpha={o['alpha']}; "
            "replay it in JAX"
        )
    grouped_ops.grouped_gemm_into(x["acc"], a, b, x["offsets"], *each, options)
    return {"d": x["acc"]}


def _norm(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    mu, rsigma, y = norm_ops.norm(x["x"], x.get("gamma"), x.get("beta"), NormOptions(**o))
    return _several([rsigma, mu, y])


def _norm_grad(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    options = NormOptions(o["which"], 0.0, o["zero_centered_gamma"])
    operands = x["dy"], x["x"], x["gamma"], x.get("mu"), x["rsigma"]
    return _several(norm_ops.norm_grad(*operands, options, o["has_beta"]))


def _activation_grad(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    options = ActivationOptions(o["which"], o["gated"])
    return {"out": activation_ops.activation_grad(x["dy"], x["x"], options, _dtype(o["dtype"]))}


def _permute_map(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = o["kind"] == "mask"
    return _several(permute_ops.permute_map(x["routing"], mask, o["experts"], o["rows"], o["align"]))


def _permute(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    planes, maps = [x[f"planes[{i}]"] for i in range(len(o["fills"]))], (x["row_id_map"], x["row_source"])
    return _several(permute_ops.permute(planes, list(o["fills"]), *maps, x.get("probs"), o["zero_prob_is_padding"]))


def _permute_columns(o: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"out": permute_ops.permute_columns(x["x"], x["row_source"], o["slots"])}


def _unpermute(_: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    return _several(permute_ops.unpermute(x["x"], x["row_id_map"], x.get("probs"), x.get("permuted_dprobs")))


def _unpermute_grad(_: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    maps = x["row_id_map"], x["row_source"]
    return _several(permute_ops.unpermute_grad(x["dy"], *maps, x["probs"], x.get("x")))


_REPLAYS: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], dict[str, Tensor]]] = {
    "quantize": _quantize,
    "quantize_stack": _quantize_stack,
    "amax": _amax,
    "dequantize": _dequantize,
    "scale_update": _scale_update,
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "bias_grad": lambda o, x: {"out": gemm_ops.bias_grad(x["dy"], _dtype(o["dtype"]))},
    "grouped_bias_grad": lambda o, x: {"out": grouped_ops.grouped_bias_grad(x["dy"], x["offsets"], _dtype(o["dtype"]))},
    "norm": _norm,
    "norm_grad": _norm_grad,
    "activation": lambda o, x: {"out": activation_ops.activation(x["x"], ActivationOptions(**o))},
    "activation_grad": _activation_grad,
    "permute_map": _permute_map,
    "chunk_map": lambda o, x: _several(permute_ops.chunk_map(x["split_sizes"], x["sorted_index"], o["tokens"])),
    "invert_map": lambda o, x: _several(permute_ops.invert_map(x["row_id_map"], o["rows"])),
    "permute": _permute,
    "permute_columns": _permute_columns,
    "unpermute": _unpermute,
    "unpermute_grad": _unpermute_grad,
}
