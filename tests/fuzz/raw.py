"""Calls of the raw binding, valid and randomly changed, on memory between inaccessible pages.

A call succeeds with every byte of its outputs written and no other, or it raises one of four errors with no byte
written. Anything else is a finding; an access outside of an operand, or a write to an input, ends the process.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
from core import fused_runner, grouped_runner, permute_runner, runner
from core.grouped import test_grouped_bias_grad

from diptych.core import _core
from fuzz import good
from fuzz.draw import Draw
from fuzz.memory import Guarded, Output, Pool

ALLOWED = (ValueError, TypeError, NotImplementedError, BufferError)
CHANGES = 6
"""Changed calls for each good one."""
RUNNERS = (runner, fused_runner, grouped_runner, permute_runner, test_grouped_bias_grad)
BYTES = 0xA5, 0x5A

# What each op writes, by the names of its arguments; of `planes` the second of each.
WRITTEN: dict[str, tuple[str, ...]] = {
    "amax": ("out", "columnwise_out"),
    "quantize": ("amax", "columnwise_amax", "rowwise_data", "rowwise_scale_inv", "columnwise_data",
                 "columnwise_scale_inv", "column_sum"),
    "dequantize": ("out",),
    "gemm": ("d",),
    "grouped_gemm": ("d",),
    "bias_grad": ("out",),
    "grouped_bias_grad": ("out",),
    "scale_update": ("new_history", "new_scale"),
    "norm": ("mu", "rsigma", "y"),
    "norm_grad": ("dx", "dgamma", "dbeta"),
    "activation": ("y",),
    "activation_grad": ("dx",),
    "permute_map": ("row_id_map", "tokens_per_expert", "expert_offsets", "row_source"),
    "chunk_map": ("row_id_map", "row_source"),
    "permute": ("permuted_probs",),
    "permute_columns": ("out",),
    "transpose": ("out",),
    "hash": ("out",),
    "statistics": ("out",),
    "unpermute": ("y", "dprobs"),
    "unpermute_grad": ("dx", "dprobs"),
}  # fmt: skip


def parameters(name: str) -> list[str]:
    """Names of a binding's arguments, from the signature that pybind11 writes into its docstring."""
    signature = (getattr(_core, name).__doc__ or "").partition("(")[2].partition(") -> ")[0]
    depth, names, word = 0, [], ""
    for letter in signature + ",":
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            names.append(word.partition(":")[0].strip())
            word = ""
        else:
            word += letter
    return names


OPS = {name: parameters(name) for name in dir(_core) if callable(getattr(_core, name)) and name[0].islower()}
OPS = {name: names for name, names in OPS.items() if names != [""] and not name.startswith("set_")}


class _Recorder:
    """The binding, as the runners see it, that keeps every call of an op."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(_core, name)
        if name not in WRITTEN:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, dict(zip(OPS[name], args, strict=False)) | kwargs))
            return function(*args, **kwargs)

        return call


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    recorder = _Recorder()
    for module in RUNNERS:
        module._core = recorder  # type: ignore[attr-defined]
    try:
        yield recorder.calls
    finally:
        for module in RUNNERS:
            module._core = _core  # type: ignore[attr-defined]


# --- what takes an argument's place ---


def operand(d: Draw, be: Guarded, like: Any = None) -> Any:
    """A (buffer, code) pair: `like` but for one thing, or any shape, to be written or frozen."""
    if like is not None and d.maybe(0.6):
        array, code = like
        match d.randrange(6):
            case 0:
                return (array, d.randrange(-1, 13))
            case 1:
                return (array.T, code)
            case 2:
                return (array[..., ::-1] if array.ndim else array, code)
            case 3:
                return (array[1:] if array.ndim else array, code)
            case 4:
                return (array[..., :-1] if array.ndim else array, code)
        return (array.reshape(-1), code)
    dtype = d.choice(list(runner.NUMPY))
    size = runner.NUMPY[dtype].itemsize
    shape = tuple(d.extent(most=130) for _ in range(d.randrange(4)))
    if d.maybe(0.03):  # no bytes at all, of any extent
        shape = d.choice(((0, 2**40), (2**20, 0), (0,) * 8, (0,) * 9, (1,) * 8))
    nbytes = int(np.prod([int(s) for s in shape], dtype=object)) * size
    if nbytes > 1 << 20:
        shape, nbytes = (7, 5), 35 * size
    region, start = be.place(nbytes)
    if d.maybe(0.5):
        region.writable[start : start + nbytes] = d.numpy.integers(0, 256, nbytes, np.uint8)
        return be._pair(region.readable[start : start + nbytes], shape, dtype)
    out = Output(region, start, nbytes)
    out.poison(BYTES[0])
    be.outputs.append(out)
    return be._pair(out.bytes, shape, dtype)


GARBAGE: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: (), lambda: (1, 2, 3), object, lambda: np.ones(3), lambda: (b"abcd", 6), lambda: b"",
    lambda: (np.ones(2), "f"), lambda: [1.0], lambda: (np.array(["a"]), 0), lambda: (np.array([None]), 0),
    lambda: ({}, 0), lambda: (1 << 70, 0), lambda: (None, 0), lambda: "x", lambda: (bytearray(8), 6), lambda: ...,
    lambda: (np.ones((3, 4), ">f4"), 0), lambda: {}, lambda: int, lambda: slice(1), lambda: (memoryview(b"12"), 3),
)  # fmt: skip


def is_operand(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and isinstance(value[0], np.ndarray) and type(value[1]) is int


def changed(d: Draw, be: Guarded, value: Any, others: list[Any]) -> Any:
    """Another value for one argument."""
    if d.maybe(0.1):
        return d.choice(GARBAGE)()
    if is_operand(value) or value is None:
        if others and d.maybe(0.15):
            return d.choice(others)  # overlaps, and wrong places
        return None if d.maybe(0.1) else operand(d, be, value)
    if type(value) in (tuple, list) and value:  # planes and sources
        at = d.randrange(len(value))
        parts = list(value)
        parts[at] = changed(d, be, value[at], others)
        return type(value)(parts)
    return d.scalar()


def operands_in(value: Any) -> Iterator[Any]:
    if is_operand(value):
        yield value
    elif type(value) in (tuple, list):
        for part in value:
            yield from operands_in(part)


# --- one call, checked ---


def shown(value: Any) -> str:
    if is_operand(value):
        array, code = value
        names = {c: n for n, c in runner.CODES.items()}
        frozen = "" if array.flags.writeable else " frozen"
        return f"{names.get(code, code)}{list(array.shape)}{'' if array.flags.c_contiguous else ' strided'}{frozen}"
    if type(value) in (tuple, list):
        return f"({', '.join(map(shown, value))})"
    return repr(value)[:40]


def described(name: str, args: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{k}={shown(v)}' for k, v in args.items())})"


def outputs_of(name: str, args: dict[str, Any]) -> list[np.ndarray]:
    """The arrays that a successful call has written whole."""
    written = set(WRITTEN.get(name, ()))
    mode = args.get("amax_mode")
    if name == "quantize" and not (type(mode) in (int, bool) and mode == runner.COMPUTE):
        written -= {"amax", "columnwise_amax"}  # given, or updated
    found = [args[parameter] for parameter in written & args.keys()]
    if type(planes := args.get("planes")) in (list, tuple):
        found += [plane[1] for plane in planes if type(plane) is tuple and len(plane) == 3]
    return [value[0] for value in found if is_operand(value)]


def check(name: str, args: dict[str, Any], be: Guarded) -> bool:
    """Whether the call succeeded. **Raises** AssertionError for what no call may do.

    It is made twice, over different bytes in its outputs: what is left of them shows.
    """
    function = getattr(_core, name)
    known = [args[p] for p in OPS[name] if p in args] if len(args) == len(OPS[name]) else None
    whole = outputs_of(name, args)
    given = [array for array, _ in operands_in(list(args.values()))]
    shared = {id(out): [a for a in given if np.may_share_memory(a, out.bytes)] for out in be.outputs}
    # An output that is an input too, or twice an output, holds what it held.
    fresh = [out for out in be.outputs if len(found := shared[id(out)]) == 1 and any(found[0] is a for a in whole)]
    held = {id(out): out.bytes.copy() for out in be.outputs if out not in fresh}
    results: list[list[bytes]] = []
    for byte in BYTES:
        for out in be.outputs:
            out.poison(byte, held.get(id(out)))
        before = [out.bytes.copy() for out in be.outputs]
        try:
            function(*known) if known is not None else function(**args)
        except ALLOWED:
            for out, old in zip(be.outputs, before, strict=True):
                assert not out.stray(byte), f"{described(name, args)} is refused, and has written beside an output"
                assert np.array_equal(out.bytes, old), f"{described(name, args)} is refused, and has written"
            return False
        for out, old in zip(be.outputs, before, strict=True):
            assert not out.stray(byte), f"{described(name, args)} has written beside an output"
            untouched = bool(shared[id(out)]) or np.array_equal(out.bytes, old)
            assert untouched, f"{described(name, args)} has written to memory that it was not given"
        results.append([a.tobytes() for a in whole if any(a is found for o in fresh for found in shared[id(o)])])
    assert results[0] == results[1], f"{described(name, args)} has left bytes of an output as they were"
    return True


def good_and_changed(d: Draw, be: Guarded, count: Callable[[bool], None]) -> None:
    name = d.choice(list(good.CALLS))
    with recording() as calls, contextlib.suppress(MemoryError):
        good.CALLS[name](d, be)
    for op, args in calls:
        args.pop("workspace", None) if d.maybe(0.1) else None
        others = [o for value in args.values() for o in operands_in(value)]
        for turn in range(CHANGES // len(calls) + 1):
            mine, outputs = copy.copy(args), len(be.outputs)
            for _ in range(d.choice((0, 1, 1, 1, 2, 3)) if turn else 0):
                parameter = d.choice(list(mine))
                with contextlib.suppress(MemoryError):
                    mine[parameter] = changed(d, be, mine[parameter], others)
            with good.settings(d):
                count(check(op, mine, be))
            del be.outputs[outputs:]


def hammer(d: Draw, be: Guarded, count: Callable[[bool], None]) -> None:
    """Any function with any arguments."""
    name = d.choice(list(OPS))
    given = len(OPS[name]) if d.maybe(0.97) else d.randrange(22)
    makers = (lambda: operand(d, be), lambda: operand(d, be), d.scalar, lambda: d.choice(GARBAGE)(),
              lambda: d.randrange(len(runner.IDS)))  # fmt: skip
    args = dict(zip(OPS[name], (d.choice(makers)() for _ in range(given)), strict=False))
    with good.settings(d):
        if name in WRITTEN:
            count(check(name, args, be))
            return
        try:
            getattr(_core, name)(**args)
        except ALLOWED:
            count(False)
        else:
            count(True)


def counters(d: Draw, be: Guarded, count: Callable[[bool], None]) -> None:
    """Logs of amaxes, indexed by counters that can hold anything."""
    n, entries, length = d.randint(1, 3), d.randint(1, 16), d.randint(1, 5)
    number = lambda: d.choice((0, 1, entries, entries + 1, -1, -5, d.randrange(40), 2**31, 2**62, 2**63 - 1, -(2**63)))  # noqa: E731
    out = runner.Outputs(be)

    def held(name: str, *values: int) -> Any:
        return out.new(name, (len(values),), "int64", np.array(values, np.int64))

    log = out.new("log", (entries, n) if d.maybe(0.5) else (n, entries), "float32", np.ones(n * entries, np.float32))
    written, taken = number(), number()
    if d.maybe(0.5):
        taken = written - d.randint(0, entries)
        taken = max(-(2**63), taken)
    try:
        if d.maybe(0.4):
            _core.log_amax(be.put(np.ones(n, np.float32), "float32"), log, held("written", written))
        else:
            history = out.new("history", (n, length), "float32", np.ones((n, length), np.float32))
            scale = out.new("scale", (n,), "float32", np.ones(n, np.float32))
            _core.scale_update(history, scale, None, None, history, scale, 448.0, 0, False, log=log,
                               written=held("written", written), taken=held("taken", taken))  # fmt: skip
    except ALLOWED:
        count(False)
        return
    except RuntimeError as e:
        assert "amaxes were logged since the last update" in str(e), e
        count(False)
        return
    for o in be.outputs:
        assert not o.stray(runner.POISON), f"counters {written}, {taken}: bytes beside an operand were written"
    count(True)


def programs(d: Draw, be: Guarded, count: Callable[[bool], None]) -> None:
    """Programs whose steps come in any order, and that go while they record."""
    x, y = (
        be.put(np.ones((4, 4), np.float32), "float32"),
        be._pair(np.zeros(1, np.uint32).view(np.uint8), (1,), "float32"),
    )
    held = [_core.Program()]
    for _ in range(d.randint(1, 6)):
        program = d.choice(held)
        steps: tuple[Callable[[], Any], ...] = (
            program.start,
            program.stop,
            lambda: program.run(d.choice(([], [x], [x, y], [None]))),  # noqa: B023
            lambda: program.seal([x], [y], [], [], [], lambda n: None),  # noqa: B023
            lambda: _core.amax(x, y, None, 0),
            lambda: held.append(_core.Program()),
            lambda: held.clear() or held.append(_core.Program()),
        )
        try:
            d.choice(steps)()
            count(True)
        except (*ALLOWED, RuntimeError):
            count(False)
    for program in held:
        with contextlib.suppress(*ALLOWED, RuntimeError):
            program.stop()


FAMILIES: dict[str, Callable[[Draw, Guarded, Callable[[bool], None]], None]] = {
    "changed": good_and_changed,
    "hammer": hammer,
    "counters": counters,
    "programs": programs,
}
WEIGHTS = (12, 12, 2, 1)
_POOL = Pool()


def run(d: Draw, count: Callable[[bool], None], families: Collection[str] = tuple(FAMILIES)) -> None:
    """One round: a number of calls, each of which `count` is told with whether it succeeded."""
    family = d.choices(list(FAMILIES), WEIGHTS)[0]
    if family not in families:
        return
    be = Guarded(_POOL, d)
    try:
        FAMILIES[family](d, be, count)
    finally:
        _POOL.reset()
