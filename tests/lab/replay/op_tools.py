"""Traces of operations, made with NumPy, for the tests of replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import trace_tools

from diptych.lab.replay import table
from diptych.lab.replay.op import Bits, Op
from diptych.lab.traces import Entry, Options, bits_of
from diptych.lab.traces.schema import Operation


def op(kind: str, inputs: dict[str, np.ndarray], out: Any, **options: Any) -> Op:
    """An operation with one result."""
    bits = {k: bits_of(np.asarray(v)) for k, v in inputs.items()}
    given = {k: Bits(d.name, b) for k, (d, b) in bits.items()}
    dtype, found = bits_of(np.asarray(out))
    return Op(kind, given, options, {"out": Bits(dtype.name, found)})


def entries(made: Op, path: str = "h.0", call: int = 0) -> list[Entry]:
    """Returns the entries that a capture records of an operation."""
    found, operation = [], Operation(made.kind, table.encoded(made.kind, made.options))
    for name, bits in made.inputs.items():
        found.append(trace_tools.entry(f"{path}/{made.kind}.{name}", bits.data, bits.dtype, "operand", call=call))
    keys = tuple(e.site.key for e in found)
    for name, bits in made.outputs.items():
        more: dict[str, Any] = {"call": call, "inputs": keys, "operation": operation}
        found.append(trace_tools.entry(f"{path}/{made.kind}.{name}", bits.data, bits.dtype, "result", **more))
    return found


def trace(folder: Path, steps: list[list[Entry]], values: str = "full", budget: int = 2**30, **changes: Any) -> Path:
    return trace_tools.write(folder, steps, options=Options(values=values, budget=budget, ops="all"), **changes)
