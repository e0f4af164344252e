"""The schema of a trace: its settings, the sites that it observed, and the records of each step.

These classes are also the schema on disk: an object of JSON has exactly the fields of its class. Reading is strict: a
missing, unknown or repeated field, a value of another type and a number that is not finite raise TraceError.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from diptych.common.errors import ExplainedError
from diptych.lab.traces.dtypes import DTYPES, is_recorded

FORMAT, VERSION = "diptych-trace", 2
Kind = Literal["activation", "activation_grad", "parameter", "parameter_grad", "operand", "result"]
Kept = Literal["whole", "sampled", "none"]
T = TypeVar("T")

_MOST_AXES, _MOST_BYTES, _LONGEST_NAME, _LONGEST_OPTIONS = 32, 2**62, 1000, 10_000


class TraceError(ExplainedError, ValueError):
    """The error for a trace that cannot be read or written. Its message names the file and the field or tensor.

    **Cause:** A folder that is no trace, one that was damaged, or one that another program or version wrote.

    **Remedy:** Capture again, or correct the field; docs/traces.md specifies the files.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """The operation that computed a result from the operands in its site's `inputs`, for `diptych.lab.replay`.

    `name`: a row of `replay.table`. `options`: the row's options as a JSON object with sorted keys.
    """

    name: str
    options: str

    def __post_init__(self) -> None:
        _check(bool(re.fullmatch("[a-z0-9_]{1,40}", self.name)), "name", "must be a name of an operation")
        _check(len(self.options) <= _LONGEST_OPTIONS, "options", f"must have at most {_LONGEST_OPTIONS} characters")


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A place in a model whose tensor is observed in a step.

    `name`: the path of a module or parameter as its framework spells it. `call`: how often the name has occurred before
    in the same step as a site of this kind. `dtype`: a name in `DTYPES`. `inputs`: the keys of the sites that this one
    is computed from, or None if only the order of sites is known. `operation`: the operation that computed a result,
    None if it cannot be computed again.
    """

    name: str
    kind: Kind
    call: int
    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[str, ...] | None = None
    operation: Operation | None = None

    def __post_init__(self) -> None:
        printable = 0 < len(self.name) <= _LONGEST_NAME and self.name.isprintable()
        _check(printable, "name", f"must be 1 to {_LONGEST_NAME} printable characters")
        _check(".." not in self.name.split("/"), "name", 'must have no part ".."')
        _check(self.call >= 0, "call", "must not be negative")
        _check(is_recorded(self.dtype), "dtype", f"is unknown: {self.dtype[:40]!r}")
        check_shape(self.shape, DTYPES[self.dtype].nbytes)
        possible = self.operation is None or (self.kind == "result" and self.inputs is not None)
        _check(possible, "operation", "belongs to results with known inputs")

    @property
    def key(self) -> str:
        """The site's name within a step, and that of its tensor in the step's file: "kind:name", followed by "#call" if
        `call` > 0."""
        return f"{self.kind}:{self.name}" + (f"#{self.call}" if self.call else "")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Quantization:
    """The loss of a quantized tensor against its original.

    `clipped`: the share of elements that were beyond their block's largest value and lost more than rounding takes.
    `flushed`: the share of nonzero elements that became zero. `sqnr`: the signal-to-quantization-noise ratio in
    decibels, over the elements that were finite before. It is inf without noise; -inf with noise alone, or if a value
    became NaN or infinite; None with neither signal nor noise.
    """

    clipped: float
    flushed: float
    sqnr: float | None

    def __post_init__(self) -> None:
        _check_shares(self, "clipped", "flushed")
        _check(self.sqnr is None or not math.isnan(self.sqnr), "sqnr", "must be a number")


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of one tensor. `amax`, `mean` and `rms` are over its finite elements, None if there are none.
    `zero`, `nan`, `inf` and `subnormal` are shares of all elements, 0 for an empty tensor."""

    amax: float | None
    mean: float | None
    rms: float | None
    zero: float
    nan: float
    inf: float
    subnormal: float
    quantized: Quantization | None = None

    def __post_init__(self) -> None:
        _check_shares(self, "zero", "nan", "inf", "subnormal")
        for name in ("amax", "mean", "rms"):
            value = getattr(self, name)
            _check(value is None or math.isfinite(value), name, "must be finite")
            _check(value is None or name == "mean" or value >= 0, name, "must not be negative")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The record of a site in a step.

    `site`: its position among the rank's sites, in order of first occurrence. `hash`: the hash of the tensor's bits, 32
    hexadecimal digits. `values`: whether the step's file has the tensor "whole", "sampled" (`count` elements, at
    `places(size, count)`) or not at all ("none"). `cut`: whether fewer values are kept than `Options.values` asks for,
    because the budget had no room.
    """

    site: int
    statistics: Statistics | None
    hash: str | None
    values: Kept
    count: int
    cut: bool

    def __post_init__(self) -> None:
        _check(self.site >= 0, "site", "must not be negative")
        _check(self.hash is None or bool(re.fullmatch("[0-9a-f]{32}", self.hash)), "hash", "must be 32 of 0-9a-f")
        _check(self.count >= 0, "count", "must not be negative")
        _check(self.values != "none" or not self.count, "count", "must be 0 where no values are kept")


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A line of steps.jsonl: the sites that occur in this step for the first time, and all of the step's records, in
    the order of computation."""

    step: int
    sites: tuple[Site, ...]
    records: tuple[Record, ...]

    def __post_init__(self) -> None:
        _check(0 <= self.step < 2**63, "step", "must be from 0 to 2^63 - 1")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options of a capture. `sites`: a pattern of names. `every`: the interval between recorded steps. `values`:
    whether values are kept beside hashes. `budget`: the bytes of values that all steps of all ranks may keep together.
    `ops`: the operations whose operands and results are recorded: none, diptych's own, or the framework's too."""

    sites: str = "**"
    every: int = 1
    values: Literal["hash", "sample", "full"] = "hash"
    budget: int = 2**30
    ops: Literal["none", "own", "all"] = "own"

    def __post_init__(self) -> None:
        _check(self.every >= 1, "every", "must be at least 1")
        _check(self.budget >= 0, "budget", "must not be negative")


@dataclasses.dataclass(frozen=True, slots=True)
class Meta:
    """The settings of a whole trace.

    `versions`: the versions of the framework and other packages, by name. `ranks`: the number of processes that record.
    `recipe`: the recipe as the run spells it, or None. `hash`: the name of the function that made the hashes; hashes of
    different functions are not compared. `instrumented`: whether the recorded steps ran with taps. `plain_bits`:
    whether these steps had the same bits as steps without taps, None if that was not tried.
    """

    framework: str
    versions: Mapping[str, str]
    device: str
    ranks: int
    recipe: str | None
    hash: str
    instrumented: bool
    plain_bits: bool | None
    options: Options
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        _check(self.format == FORMAT, "format", f"must be {FORMAT}")
        _check(self.version == VERSION, "version", f"must be {VERSION}")
        _check(1 <= self.ranks <= 2**20, "ranks", "must be from 1 to 2^20")
        for name in ("framework", "device", "recipe", "hash"):
            _check((getattr(self, name) or "").isprintable(), name, "must be printable text")
        _check(
            all(x.isprintable() for pair in self.versions.items() for x in pair), "versions", "must be printable text"
        )


def check_shape(shape: tuple[int, ...], nbytes: int) -> None:
    """**Raises** ValueError if no array of elements of `nbytes` bytes can have this shape."""
    extents = [n for n in shape if n]
    _check(len(shape) <= _MOST_AXES, "shape", f"has more than {_MOST_AXES} axes")
    _check(all(0 <= n <= _MOST_BYTES for n in shape), "shape", f"is impossible: {str(list(shape))[:80]}")
    _check(math.prod(extents) * nbytes <= _MOST_BYTES, "shape", f"is impossible: {str(list(shape))[:80]}")


def _check(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}: {rule}")


def _check_shares(of: Any, *names: str) -> None:
    for name in names:
        _check(0 <= getattr(of, name) <= 1, name, "must be from 0 to 1")


# --- JSON ---


def to_json(value: Any) -> Any:
    """Returns an object of this module as values that `json.dumps` takes: dictionaries, lists and scalars."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is float:
        return value if not math.isinf(value) else "inf" if value > 0 else "-inf"
    if kind is tuple:
        return [to_json(v) for v in value]
    if isinstance(value, Mapping):
        return dict(value)
    return {n: to_json(getattr(value, n)) for n in _names(kind)} if dataclasses.is_dataclass(kind) else value


def dump(value: Any) -> bytes:
    """Returns an object of this module as a line of JSON. **Raises** TraceError if `load` would refuse it."""
    plain = to_json(value)
    from_json(type(value), plain, type(value).__name__)
    return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def load(kind: type[T], text: bytes, where: str) -> T:
    """Reads an object of class `kind` from JSON. **Raises** TraceError that begins with `where` and names the field."""
    return from_json(kind, parse(text, where), where)


def parse(text: bytes, where: str) -> Any:
    """Parses JSON strictly. **Raises** TraceError whose message begins with `where`."""
    try:
        return json.loads(text.decode(), parse_constant=_no_constant, object_pairs_hook=_no_repetition)
    except (ValueError, RecursionError) as e:
        raise TraceError(f"{where}: is no JSON: {str(e)[:200]}") from None


def from_json(kind: type[T], value: Any, where: str) -> T:
    """Reads an object of class `kind` from parsed JSON. **Raises** TraceError whose message begins with `where`."""
    if kind is Meta and isinstance(value, dict) and value.get("format") == FORMAT and value.get("version") != VERSION:
        raise TraceError(f"{where}: version: is {str(value.get('version'))[:40]}, this diptych reads {VERSION}")
    try:
        return _reader(kind)(value)
    except _Fault as e:
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in e.path).removeprefix(".")
        raise TraceError(": ".join(filter(None, (where, path, e.rule)))) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _no_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(n for n in names if names.count(n) > 1)[:100]!r} twice in an object")
    return found


class _Fault(Exception):
    def __init__(self, rule: str) -> None:
        self.path: list[str | int] = []
        self.rule = rule


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Returns the function that reads a value of type `kind` from parsed JSON, or raises _Fault."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _object_reader(kind)
    if origin is Literal:
        return _scalar(str, lambda v: v in args, f"must be one of {', '.join(args)}")
    if origin is types.UnionType:  # X | None
        read = _reader(args[0])
        return lambda v: None if v is None else read(v)
    if origin is tuple:
        read_each = _reader(args[0])
        return lambda v: tuple(_each(read_each, enumerate(_scalar(list)(v))).values())
    if origin is Mapping:
        read_each = _reader(args[1])
        return lambda v: _each(read_each, _scalar(dict)(v).items())
    if kind is float:
        return _float
    return _scalar(kind)


def _shown(value: Any) -> str:
    return _TYPES[type(value)] if isinstance(value, list | dict) else repr(value)[:40]


_TYPES = {bool: "true or false", int: "an integer", str: "text", list: "a list", dict: "an object"}


def _scalar(kind: type, test: Callable[[Any], bool] | None = None, rule: str = "") -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _Fault(f"must be {_TYPES[kind]}, is {_shown(value)}")
        if test is not None and not test(value):
            raise _Fault(f"{rule}, is {_shown(value)}")
        return value

    return read


def _float(value: Any) -> float:
    if type(value) is int or type(value) is float:
        if abs(value) > 1.7976931348623157e308:
            raise _Fault("must be finite")
        return float(value)
    if value in ("inf", "-inf"):
        return float(value)
    raise _Fault(f"must be a number, is {_shown(value)}")


def _each(read: Callable[[Any], Any], items: Any) -> dict[Any, Any]:
    found = {}
    for name, value in items:
        try:
            found[name] = read(value)
        except _Fault as e:
            e.path.insert(0, name if isinstance(name, int) else name[:100])
            raise
    return found


def _object_reader(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    readers = {name: _reader(hints[name]) for name in _names(kind)}

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _Fault(f"must be an object, is {_shown(value)}")
        if value.keys() != readers.keys():
            missing, unknown = readers.keys() - value.keys(), value.keys() - readers.keys()
            what = f"lacks {', '.join(sorted(missing))}" if missing else f"has an unknown field {min(unknown)[:40]!r}"
            raise _Fault(what)
        given = {}
        for name, read_field in readers.items():
            try:
                given[name] = read_field(value[name])
            except _Fault as e:
                e.path.insert(0, name)
                raise
        try:
            return kind(**given)
        except ValueError as e:
            raise _Fault(str(e)) from None

    return read
