"""The operations that can be computed again: names of operands, options and results, equal in both frameworks.

Operands, options and results of diptych's own operations have the names that JAX's primitives give them
(`diptych.lab.jax.own_ops`). This table defines the operations of the frameworks.

| row | computes |
|---|---|
| linear | x [..., K] times weight [N, K] transposed, plus bias [N]; in `dtype` |
| matmul | the sum of products that `equation` names, as in `numpy.einsum`, without "..."; in `dtype` |
| embedding | rows of table [V, D] by integers ids |
| conv | cross-correlation. `layout`: axes of x, weight and out, such as "NC01,OI01,NC01"; `padding`: a pair for each \
spatial axis; `input_dilation`, `dilation`: of x and of weight |
| softmax, log_softmax | along `axis`, a negative number |
| layer_norm, rms_norm | over the last `axes` axes, times weight, plus bias |
| gelu, silu | `approximate`: the form of gelu with tanh |
| add, mul | elementwise, with NumPy's broadcasting |
| rotary | x * cos + rotated(x) * sin; rotated(x) is (-x2, x1) of the last axis's halves x1, x2, or of its pairs if \
`interleaved` |
| cross_entropy | -log_softmax(logits)[targets] along `axis`; `reduction` "mean", "sum" or "none"; without targets of \
`ignore_index`, an integer or None |
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diptych.common import quantizer_json
from diptych.common.errors import CheckpointError
from diptych.common.formats import FORMATS
from diptych.common.gemm_options import GemmOptions
from diptych.common.ops.activation import ACTIVATIONS
from diptych.common.ops.norm import NORMS
from diptych.common.ops.shapes import HIGH_PRECISION
from diptych.common.quantizers import Quantizer
from diptych.lab.traces import DTYPES, is_recorded
from diptych.lab.traces.schema import Operation, TraceError, parse

_MOST = 2**31 - 1
"""The largest count of rows, tokens or axes in an option."""


class Row(NamedTuple):
    """A row of the table. `operands`: the names of operands that are always there; `optional`: of those that may be
    absent. `options`: a test of the value of each option. `own`: whether it is one of diptych's own operations."""

    operands: tuple[str, ...]
    optional: tuple[str, ...]
    options: Mapping[str, Callable[[Any], bool]]
    own: bool = True


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda v: type(v) in kinds


def _one_of(*values: str) -> Callable[[Any], bool]:
    return lambda v: v in values


def _integer(least: int, most: int) -> Callable[[Any], bool]:
    return lambda v: type(v) is int and least <= v <= most


def _finite(v: Any) -> bool:
    return (type(v) is float and math.isfinite(v)) or _int(v)


def _several(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: type(v) is tuple and all(map(test, v))


def _equation(v: Any) -> bool:
    return type(v) is str and re.fullmatch("[a-zA-Z]*,[a-zA-Z]*->[a-zA-Z]*", v) is not None


def _layout(v: Any) -> bool:
    """Returns whether v names the axes of x, weight and out, each in any order, with one to three spatial axes."""
    space = "012"[: (len(v) - 8) // 3] if type(v) is str and len(v) <= 17 else ""
    return bool(space) and [sorted(axes) for axes in v.split(",")] == [sorted(c + space) for c in ("NC", "OI", "NC")]


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: v is None or test(v)


def _copy_option(v: Any) -> bool:
    return type(v) is tuple and len(v) == 2 and _format(v[0]) and type(v[1]) is bool


def _source(v: Any) -> bool:
    """Returns whether v is a source: (kind, its norm or activation, zero_centered_gamma or gated, with or without
    beta)."""
    return type(v) is tuple and [type(i) for i in v] == [str, str, bool, bool] and v[1] in _SOURCES.get(v[0], ())


_NORMS, _ACTIVATIONS = tuple(NORMS.values()), tuple({o.which for o in ACTIVATIONS.values()})
_SOURCES = {"norm": _NORMS, "activation": _ACTIVATIONS, "activation_grad": _ACTIVATIONS, "permuted": ("",)}
_format, _result = _one_of(*[f.name for f in FORMATS]), _one_of(*HIGH_PRECISION)
_flag, _int, _count, _positive = _is(bool), _integer(-(2**63), 2**63 - 1), _integer(0, _MOST), _integer(1, _MOST)
_dtype = _one_of(*filter(is_recorded, DTYPES))
_OF_SOURCE = ("gamma", "beta", "mu", "rsigma", "dy", "row_id_map", "row_source")
_COPIES = ("a_data", "a_scale_inv", "b_data", "b_scale_inv"), ("a_amax", "b_amax", "bias", "acc")
_QUANTIZER: dict[str, Callable[[Any], bool]] = {"quantizer": lambda v: isinstance(v, Quantizer)}
_PRODUCT = {
    "a": _copy_option, "b": _copy_option, "alpha": _finite, "beta": _finite, "out_dtype": _result,
    **dict.fromkeys(GemmOptions._fields, _flag),
}  # fmt: skip
_GROUPED = {k: v for k, v in _PRODUCT.items() if k != "beta"} | {"align": _count, "rotated": _flag}
_NORM = {"which": _one_of(*_NORMS), "eps": _finite, "zero_centered_gamma": _flag}
_ACTIVATION = {"which": _one_of(*_ACTIVATIONS), "gated": _flag}

TABLE: dict[str, Row] = {
    "quantize": Row(
        ("x",),
        ("amax", "columnwise_amax", "pending", "scale", "rng", *_OF_SOURCE),
        _QUANTIZER | {"source": _or_none(_source), "column_sum": _one_of("", *HIGH_PRECISION)},
    ),
    "quantize_stack": Row(("x",), ("amax", "columnwise_amax", "scale", "rng"), _QUANTIZER),
    "amax": Row(("x",), _OF_SOURCE, {"flags": _int, "columnwise": _flag, "source": _or_none(_source)}),
    "dequantize": Row(("data", "scale_inv"), ("amax",), {"format": _format, "columnwise": _flag, "dtype": _result}),
    "scale_update": Row(
        ("history", "scale"), ("reduced", "amax"), {"fp8_max": _finite, "margin": _int, "most_recent": _flag}
    ),
    "gemm": Row(*_COPIES, _PRODUCT),
    "grouped_gemm": Row((*_COPIES[0], "offsets"), _COPIES[1], _GROUPED),
    "bias_grad": Row(("dy",), (), {"dtype": _result}),
    "grouped_bias_grad": Row(("dy", "offsets"), (), {"dtype": _result}),
    "norm": Row(("x",), ("gamma", "beta"), _NORM),
    "norm_grad": Row(
        ("dy", "x", "gamma", "rsigma"), ("mu",),
        {"which": _one_of(*_NORMS), "zero_centered_gamma": _flag, "has_beta": _flag},
    ),
    "activation": Row(("x",), (), _ACTIVATION),
    "activation_grad": Row(("dy", "x"), (), _ACTIVATION | {"dtype": _result}),
    "permute_map": Row(
        ("routing",), (), {"kind": _one_of("mask", "index"), "experts": _count, "rows": _count, "align": _count}
    ),
    "chunk_map": Row(("split_sizes", "sorted_index"), (), {"tokens": _count}),
    "invert_map": Row(("row_id_map",), (), {"rows": _count}),
    "permute": Row(
        ("row_id_map", "row_source", "planes[0]"), ("planes[1]", "planes[2]", "planes[3]", "probs"),
        {"fills": _several(_int), "zero_prob_is_padding": _flag},
    ),
    "permute_columns": Row(("x", "row_source"), (), {"slots": _count}),
    "unpermute": Row(("x", "row_id_map"), ("probs", "permuted_dprobs"), {}),
    "unpermute_grad": Row(("dy", "row_id_map", "row_source", "probs"), ("x",), {}),
    "linear": Row(("x", "weight"), ("bias",), {"dtype": _dtype}, own=False),
    "matmul": Row(("a", "b"), (), {"equation": _equation, "dtype": _dtype}, own=False),
    "embedding": Row(("ids", "table"), (), {}, own=False),
    "conv": Row(
        ("x", "weight"), ("bias",),
        {
            "layout": _layout,
            **dict.fromkeys(("strides", "dilation", "input_dilation"), _several(_positive)),
            "groups": _positive,
            "padding": _several(lambda v: _several(_int)(v) and len(v) == 2),
        },
        own=False,
    ),
    "softmax": Row(("x",), (), {"axis": _int}, own=False),
    "log_softmax": Row(("x",), (), {"axis": _int}, own=False),
    "layer_norm": Row(("x",), ("weight", "bias"), {"axes": _positive, "eps": _finite}, own=False),
    "rms_norm": Row(("x",), ("weight",), {"axes": _positive, "eps": _finite}, own=False),
    "gelu": Row(("x",), (), {"approximate": _flag}, own=False),
    "silu": Row(("x",), (), {}, own=False),
    "add": Row(("a", "b"), (), {}, own=False),
    "mul": Row(("a", "b"), (), {}, own=False),
    "rotary": Row(("x", "cos", "sin"), (), {"interleaved": _flag}, own=False),
    "cross_entropy": Row(
        ("logits", "targets"), (),
        {"axis": _int, "reduction": _one_of("mean", "sum", "none"), "ignore_index": _or_none(_int)},
        own=False,
    ),
}  # fmt: skip


def encoded(name: str, options: Mapping[str, Any]) -> str:
    """Returns the options of a row as the JSON text of a trace.

    **Raises** ValueError if the row does not have these options, TypeError if a quantizer cannot be written.
    """
    check(name, options)
    plain = {k: quantizer_json.to_json(v) if isinstance(v, Quantizer) else v for k, v in options.items()}
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def decoded(name: str, text: str) -> dict[str, Any]:
    """Returns the options of a row from a trace's JSON text. **Raises** ValueError if the row does not have them."""
    found = parse(text.encode(), f"{name}: options")
    if not isinstance(found, dict):
        raise ValueError(f"{name}: options: must be a JSON object")
    try:
        options = {k: _read(k, v) for k, v in found.items()}
    except CheckpointError as e:
        raise ValueError(f"{name}: options: {str(e)[:200]}") from None
    check(name, options)
    return options


def options_apart(a: Operation | None, b: Operation | None) -> tuple[str, ...]:
    """Returns the options in which two calls of one operation differ, as "name: value in a, value in b", unchecked."""
    if a is None or b is None or a == b or a.name != b.name:
        return ()
    try:
        of_a, of_b = (parse(o.options.encode(), o.name) for o in (a, b))
    except TraceError:
        return ()
    if not isinstance(of_a, dict) or not isinstance(of_b, dict):
        return ()
    both = [(k, of_a.get(k), of_b.get(k)) for k in sorted(of_a.keys() | of_b.keys())]
    return tuple(f"{k}: {json.dumps(x)}, {json.dumps(y)}" for k, x, y in both if x != y)


def _read(name: str, value: Any) -> Any:
    return quantizer_json.from_json(value) if name == "quantizer" else _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def check(name: str, options: Mapping[str, Any]) -> None:
    """**Raises** ValueError if the table has no row `name`, or if the row does not have these options."""
    if name not in TABLE:
        raise ValueError(f"{name[:40]!r} is no operation that can be computed again; there are {', '.join(TABLE)}")
    tests = TABLE[name].options
    if options.keys() != tests.keys():
        raise ValueError(
            f"{name}: its options are {', '.join(tests) or 'none'}, got {', '.join(options)[:200] or 'none'}"
        )
    wrong = next((k for k, test in tests.items() if not test(options[k])), None)
    if wrong is not None:
        raise ValueError(f"{name}: option {wrong} cannot be {str(options[wrong])[:80]!r}")
