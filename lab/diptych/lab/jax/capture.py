"""`capture` wraps a function: the wrapper computes the same results and records the arrays in a trace on disk."""

from __future__ import annotations

import builtins
import pathlib
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
from jax.core import Tracer

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.jax.jaxprs.arguments import Call
from diptych.lab import capture as common
from diptych.lab.jax import plain_bits
from diptych.lab.jax.compiled import Program
from diptych.lab.jax.taps import Tracing
from diptych.lab.traces import Meta, Options, Writer


def capture(
    fn: Callable[..., Any],
    out: str | pathlib.Path,
    sites: str = "**",
    every: int = 1,
    values: str = "hash",
    budget: float = 2**30,
    statistics: bool = True,
    check: bool = True,
    ops: str = "own",
) -> Capture:
    """Returns a function that is called like `fn` and returns its results; each call is a step of a trace.

    In the first step `fn` also runs on its own, and the trace notes whether its results had the same bits.

    **Arguments:** `fn`: a function of arrays, such as a training step, with or without `jax.jit` or `nnx.jit`; it is
    traced as under `jax.jit`. `out`: a new folder. `sites`: a pattern of names, as in `convert`. `every`: the interval
    between recorded calls; the others call `fn` itself. `values`: "hash", "sample" or "full"; see `Options`. `budget`:
    bytes of all values. `statistics`: whether they are computed. `check`: whether the first step runs `fn` on its own
    too. `ops`: "own" records diptych's operations, "all" also JAX's own in the forward pass, "none" neither; see
    `diptych.lab.replay.table`.

    **Raises** TypeError if an argument has another type, ValueError if it has an invalid value, TraceError if `out` has
    a trace, NotImplementedError if there are several processes.
    """
    options = common.options(sites, every, values, budget, ops)
    if not callable(fn):
        raise ArgumentError(f"capture: fn must be a function, got {type(fn).__name__}")
    if "cached_partial.<locals>" in getattr(getattr(fn, "__code__", None), "co_qualname", ""):  # nnx.cached_partial
        raise UnsupportedError(
            "capture: a function of nnx.cached_partial cannot be captured, since it refuses modules on which a capture "
            "has noted their paths; capture the function given to cached_partial, with the modules as arguments"
        )
    for name, value in (("statistics", statistics), ("check", check)):
        if not isinstance(value, bool):
            raise ArgumentError(f"capture: {name} must be bool, got {type(value).__name__}")
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"capture: a capture records one process, and JAX runs in {jax.process_count()}; run the program in one"
        )
    return Capture(fn, pathlib.Path(out), options, statistics, check)


class Capture:
    """The function that `capture` returns. Close it, or use it as a context manager.

    `step`: the number of the next call. `retraces`: the number of times that `fn` has been traced.
    """

    def __init__(
        self, fn: Callable[..., Any], out: pathlib.Path, options: Options, statistics: bool, check: bool
    ) -> None:
        self.step = self.retraces = 0
        self._fn, self._options, self._statistics, self._check = fn, options, statistics, check
        self._tracing = Tracing(options.sites, options.ops == "all")
        self._traced: dict[Any, Any] = {}
        self._programs: dict[int, Program] = {}
        self._closed = False
        versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
        self._writer = Writer(out, Meta("jax", versions, _device(), 1, None, common.HASH, True, None, options))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function. **Raises** ValueError after `close`, NotImplementedError if a part of the function cannot
        be recorded or if JAX is tracing the call, TypeError if an argument is neither an array nor hashable."""
        if self._closed:
            raise ValueError("capture: it is closed; make a new one by capture(...)")
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise UnsupportedError(
                "capture: the function that it returned was called inside of a transformation of JAX; capture what "
                "jax.jit, jax.grad, jax.vmap or the like return, not what they transform"
            )
        step = self.step
        self.step += 1
        if step % self._options.every:
            return self._fn(*args, **kwargs)
        plain = plain_bits.of_run(self._fn, args, kwargs) if self._check else None
        with Call(args, kwargs) as call:
            program = self._program(call)
            result, observed = program(call.arrays, self._writer)
            returned = call.returned(result)
        self._writer.note(device=_name(next(iter(observed.packed.devices()))))
        entries = program.entries(observed, self._writer)
        if not entries:
            message = f"capture: step {step} records nothing, since no site matches {self._options.sites!r}"
            warnings.warn(message, common.CaptureWarning, stacklevel=2)
        self._writer.step(step, entries)
        if plain is not None:
            self._check = False
            self._writer.note(plain_bits=plain_bits.are_equal(plain, plain_bits.bits(returned, args, kwargs)))
        return returned

    def close(self) -> None:
        """Ends the trace. Later calls raise ValueError."""
        self._closed = True
        self._writer.close()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _program(self, call: Call) -> Program:
        key = call.key
        for _, x in call.static:
            try:
                builtins.hash(x)
            except TypeError as e:
                raise ArgumentError(
                    f"capture: an argument that is no array must have a hash, since the function is traced for each "
                    f"value of it; got {type(x).__name__}"
                ) from e
        if key not in self._traced:
            self._traced[key] = jax.jit(call.flat(self._fn, self._tracing, self._report))
        with self._tracing():
            traced = self._traced[key].trace(*call.arrays)
            if (found := self._programs.get(id(traced.jaxpr))) is None:
                found = Program(traced.jaxpr, self._results, not self._tracing.modules, self._options, self._statistics)
                self._programs[id(traced.jaxpr)] = found
        return found

    def _report(self, results: Any) -> None:
        self._results = results
        self.retraces += 1


def _device() -> str:
    """Returns the default device's name in traces. The first step replaces it by the device of the results."""
    return _name(jax.config.jax_default_device or jax.devices()[0])  # type: ignore[attr-defined]


def _name(device: Any) -> str:
    platform = device if isinstance(device, str) else device.platform
    return {"gpu": "cuda"}.get(platform, platform)
