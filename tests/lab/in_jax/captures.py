"""Helpers of the tests of `capture`: recorded calls, and the checks that hold for any trace."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen

from diptych.jax import lab
from diptych.jax.jaxprs.flat import INLINE, flat
from diptych.lab.jax import functions
from diptych.lab.jax.adapter import frontend
from diptych.lab.jax.forward import forward_code
from diptych.lab.replay import table
from diptych.lab.replay.op import Bits, Op
from diptych.lab.traces import DTYPES, Meta, Observation, Trace, statistics_of
from oracle.hash import hash_bits


class Deep(linen.Module):
    """Equal layers, which are called as `layer(x, None)` and return (x, None), as one scan."""

    layer: type[linen.Module]
    length: int
    remat: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        layer = linen.remat(self.layer, prevent_cse=False) if self.remat else self.layer
        axes: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return linen.scan(layer, length=self.length, **axes)(name="h")(x, None)[0]


class Recorded(NamedTuple):
    """The results of calls, and the trace: each step's observations by key."""

    results: list[Any]
    steps: list[dict[str, Observation]]
    meta: Meta
    retraces: int

    def value(self, key: str) -> np.ndarray:
        """The whole tensor at a site of the first step."""
        tensor = self.steps[0][key].values.tensor
        return tensor.bits.view(tensor.dtype.name if tensor.dtype.name != "bfloat16" else "u2")

    def names(self, kind: str) -> list[str]:
        """The names and calls of one kind, in order."""
        return [key.partition(":")[2] for key in self.steps[0] if key.startswith(f"{kind}:")]


def recorded(folder: Any, fn: Any, *calls: tuple[Any, ...], **options: Any) -> Recorded:
    """Captures calls with whole values, and checks hashes, statistics and the order of ancestors."""
    with lab.capture(fn, out=folder / "trace", **({"values": "full"} | options)) as run:
        results = [run(*args) for args in calls]
    trace = Trace.open(folder / "trace")
    rank = trace.ranks[0]
    steps = [{o.site.key: o for o in rank.step(i)} for i in rank.steps]
    for step in steps:
        check(step)
    return Recorded(results, steps, trace.meta, run.retraces)


def check(step: dict[str, Observation]) -> None:
    seen: set[str] = set()
    for key, o in step.items():
        assert set(o.site.inputs) <= seen, key
        seen.add(key)
        if o.values is None or not o.values.whole:
            continue
        bits = o.values.tensor.bits
        assert bytes.fromhex(o.record.hash) == hash_bits(bits).tobytes(), key
        if (got := o.record.statistics) is not None:
            want = statistics_of(bits, o.site.dtype)
            for name in ("zero", "nan", "inf", "subnormal", "amax"):
                assert getattr(got, name) == getattr(want, name), (key, name)
            for name in ("mean", "rms"):
                np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-5 * want.rms)


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-5, atol=2e-6)


def same_bits(a: Any, b: Any) -> None:
    """Whether two trees have the same arrays, bit by bit."""
    assert [_bytes(x) for x in jax.tree.leaves(a)] == [_bytes(x) for x in jax.tree.leaves(b)]


def _bytes(x: Any) -> bytes:
    key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x).tobytes()


# --- JAX's own operations ---


def captured(folder: Any, fn: Any, args: tuple[Any, ...], **options: Any) -> Recorded:
    return recorded(folder / "all", fn, args, **{"ops": "all", "statistics": False, "check": False} | options)


def operations(got: Recorded, step: int = 0) -> dict[str, Op]:
    """The recorded operations by their results' names, with whole values."""
    found, seen = {}, got.steps[step]
    bits = lambda key: Bits(seen[key].site.dtype, seen[key].values.tensor.bits)  # noqa: E731
    for key, o in seen.items():
        if (made := o.site.operation) is not None:
            path = o.site.name.removesuffix(".out")
            operands = {key.partition(":")[2].partition("#")[0].removeprefix(f"{path}."): key for key in o.site.inputs}
            row = table.TABLE[made.name]
            assert path.rsplit("/", 1)[-1] == made.name and not row.own and set(row.operands) <= operands.keys()
            inputs = {name: bits(key) for name, key in operands.items()}
            options = table.decoded(made.name, made.options)
            found[key.removeprefix("result:")] = Op(made.name, inputs, options, {"out": bits(key)})
    return found


def replays(got: Recorded) -> list[str]:
    """Checks all operations of the first step, of which most have the recorded bits. Returns their names."""
    exact, ops = 0, operations(got)
    for name, op in ops.items():
        want, again = op.outputs["out"], frontend.replay(op, "cpu")["out"]
        assert (again.dtype, again.data.shape) == (want.dtype, want.data.shape), name
        dtype = DTYPES[want.dtype]
        a, b = dtype.decode(again.data), dtype.decode(want.data)
        assert np.abs(a - b).max(initial=0) <= 8 * dtype.half_ulp * np.abs(b).max(initial=0), name
        exact += again.digest == want.digest
    assert exact > len(ops) / 2
    of_functions = [k for k, o in got.steps[0].items() if o.site.kind == "operand" and "." in o.site.name]
    assert of_functions == [key for o in got.steps[0].values() if o.site.operation for key in o.site.inputs]
    return list(ops)


def outs(names: list[str]) -> list[str]:
    return [f"{name.partition('#')[0]}.out{''.join(name.partition('#')[1:])}" for name in names]


def found(fn: Any, *args: Any) -> list[tuple[str, dict[str, Any], dict[str, int | None]]]:
    """The rows that a function's equations are recognized as, in order, without a capture."""
    closed = jax.make_jaxpr(fn)(*args)
    jaxpr, _ = flat(closed.jaxpr, closed.consts, lambda eqn: eqn.primitive.name in (*INLINE, "jit"))
    ops = functions.recognized(jaxpr, forward_code(jaxpr, (), ()).equations, {})
    inputs = {v: i for i, v in enumerate(jaxpr.invars)}
    return [
        (f.name, json.loads(f.operation.options), {k: inputs.get(v) for k, v in f.operands.items()})
        for _, f in sorted(ops.items())
    ]


def names_of(fn: Any, *args: Any) -> list[str]:
    return [name for name, _, _ in found(fn, *args)]
