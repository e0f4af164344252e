"""Rules of captures that both frameworks share: options, the choice of recorded sites, and the numbering of calls.

A frontend numbers the tensors of a step by `Calls`, in the order of computation, and hands them to
`diptych.lab.traces.Writer`.
"""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diptych.common.conversion import matches
from diptych.common.errors import ArgumentError, ExplainedWarning
from diptych.common.ops.statistics import NAMES, OF_ERRORS
from diptych.lab.replay import table
from diptych.lab.traces import DTYPES, Options, Site, Statistics
from diptych.lab.traces.schema import Kind, Operation, Quantization
from diptych.lab.traces.statistics import decibels, logarithm

HASH = "diptych-128"
"""The name of the core's hash in a trace's meta.json."""
MODEL = "(model)"
"""The name of a whole model, whose path is empty. Parentheses distinguish it from a child that is called "model"."""
EVERYTHING: dict[str, Any] = {"values": "full", "budget": 2**61, "ops": "all", "statistics": False}
"""Options of a capture after which every operation can be computed again."""


class CaptureWarning(ExplainedWarning):
    """A tensor of a step that is not recorded.

    **Cause:** A module that was added after the capture began, a tensor of a kind that no site holds, or code that
    the taps cannot see into.

    **Remedy:** The message names it. Begin the capture after the model is complete; docs/captures.md lists what a
    capture cannot record.
    """


def options(sites: Any, every: Any, values: Any, budget: Any, ops: Any = "own") -> Options:
    """Returns the checked options of a capture.

    **Raises** TypeError if an argument has another type, ValueError if `sites` is empty, `every` is below 1, `budget`
    is negative, `values` is not "hash", "sample" or "full", or `ops` is not "none", "own" or "all".
    """
    for name, value, kind in (("sites", sites, str), ("every", every, int), ("values", values, str), ("ops", ops, str)):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ArgumentError(f"capture: {name} must be {kind.__name__}, got {type(value).__name__}")
    if not isinstance(budget, int | float) or isinstance(budget, bool):
        raise ArgumentError(f"capture: budget must be a number of bytes, got {type(budget).__name__}")
    if not sites:
        raise ValueError('capture: sites is empty; "**" matches every name')
    if every < 1:
        raise ValueError(f"capture: every must be at least 1, got {every}")
    if values not in ("hash", "sample", "full"):
        raise ValueError(f'capture: values must be "hash", "sample" or "full", got {values!r}')
    if not 0 <= budget < 2**62:
        raise ValueError(f"capture: budget must be from 0 to 2^62 bytes, got {budget}")
    if ops not in ("none", "own", "all"):
        raise ValueError(f'capture: ops must be "none", "own" or "all", got {ops!r}')
    return Options(sites, every, values, int(budget), ops)


@functools.lru_cache(2**16)
def wanted(pattern: str, name: str) -> bool:
    """Returns whether a pattern of sites matches a name.

    Patterns are compared part by part, as the rules of `convert` are. Parts end at "." or "/", so that one pattern
    serves both frameworks.
    """
    return matches(pattern.replace(".", "/"), name.replace(".", "/"))


def named(path: str, place: str = "") -> str:
    """Returns the name of a module's output. `place`: its place in a structure of outputs, such as "[0]"."""
    return (path or MODEL) + place


class Calls:
    """Counts how often each name of a kind has occurred in a step."""

    def __init__(self) -> None:
        self._seen: collections.Counter[tuple[Kind, str]] = collections.Counter()

    def site(
        self, kind: Kind, name: str, shape: tuple[int, ...], dtype: str, inputs: tuple[str, ...] | None = None
    ) -> Site:
        """Returns the site of the next tensor with this kind and printable name."""
        name = printable(name)
        call = self._seen[kind, name]
        self._seen[kind, name] += 1
        return Site(name, kind, call, tuple(shape), dtype, inputs)


def operation(name: str, options: Mapping[str, Any]) -> Operation | None:
    """Returns an operation of `replay.table` for a result's site, None if its quantizer cannot be written to a file."""
    try:
        return Operation(name, table.encoded(name, options))
    except ArgumentError:
        return None


@functools.lru_cache(2**16)
def printable(name: str) -> str:
    """Returns a name that a trace accepts: unprintable characters and parts that are ".." are replaced."""
    text = "".join(c if c.isprintable() else "?" for c in name)[:1000]
    return re.sub(r"(^|/)\.\.(?=/|$)", r"\1__", text)


def digits(words: np.ndarray) -> str:
    """Returns the core's hash, four words of 32 bits, as 32 hexadecimal digits."""
    return words.astype("<u4").tobytes().hex()


def statistics(row: Sequence[float], size: int, quantized: Quantization | None = None) -> Statistics:
    """Returns the statistics of a tensor of `size` elements. `row`: the seven numbers that the core's op computes."""
    zero, nan, inf, subnormal = (n / max(size, 1) for n in row[3:])
    amax, mean, rms = row[:3] if row[4] + row[5] < size else (None, None, None)  # no element is finite
    return Statistics(amax, mean, rms, zero, nan, inf, subnormal, quantized)


def quantization(row: Sequence[float], size: int) -> Quantization:
    """Returns the loss of a quantized tensor with `size` elements. `row`: the statistics that the core's op computes,
    seven numbers of the original and nine of the errors."""
    before = dict(zip(NAMES, row, strict=False))
    errors = dict(zip(OF_ERRORS, row[len(NAMES) :], strict=True))
    overflown = errors["nan"] + errors["inf"] > before["nan"] + before["inf"]  # finite elements became infinite or NaN
    noise = math.inf if overflown else errors["rms"]
    clipped, flushed = errors["clipped"] / max(size, 1), errors["flushed"] / max(size, 1)
    return Quantization(clipped, flushed, decibels(logarithm(before["rms"]), logarithm(noise)))


def elements(payload: Site) -> int:
    """Returns the number of elements in a payload: formats with 4-bit elements have two in a byte."""
    return payload.size * (2 if payload.dtype == "uint8" else 1)


def largest_byte(element: str) -> int:
    """Returns the payload's byte in which all elements are the format's largest value."""
    code = DTYPES[element].largest
    return code * 17 if element == "float4_e2m1fn" else code


def beyond(element: str) -> float:
    """Returns the smallest multiple of a format's largest value that rounding alone does not reduce to that value.
    `element`: the payload's dtype, such as "float8_e4m3fn"."""
    form = DTYPES[element]
    codes = np.array([form.largest - 1, form.largest], np.uint8)
    below, largest = form.decode(codes)
    return 1 + (largest - below) / 2 / largest
