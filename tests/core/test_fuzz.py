"""Random calls: bad ones raise one of four errors and never end the process; good ones equal the oracle."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cases
import oracle
from core import runner
from core.test_quantize import one_sided
from diptych import core
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from diptych.core import _core

TESTS = Path(__file__).resolve().parents[1]
ALLOWED = (ValueError, TypeError, NotImplementedError, BufferError)
SETTINGS = settings(
    max_examples=250, deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
FORMAT_IDS = list(runner.IDS.values())
DTYPES = list(runner.NUMPY)

shapes = st.one_of(
    st.lists(st.integers(0, 6), max_size=4).map(tuple),
    st.sampled_from([(4, 40), (40, 4), (4, 4), (1,), (40,), (4, 1), (1, 40), (4, 2), (129, 3), (1,) * 9, (0, 2**40)]),
    st.sampled_from([(16, 48), (48, 16), (16, 24), (48, 8), (16, 3), (48, 1), (16,), (48,), (4,)]),
)


@st.composite
def arrays(draw, shape=None, dtype=None):
    """A (buffer, code) pair over finite memory; sometimes strided, frozen or with a code that does not fit."""
    shape = draw(shapes) if shape is None else shape
    dtype = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    bits = np.dtype(dtype) if dtype in ("float32", "int32") else np.dtype(f"u{runner.NUMPY[dtype].itemsize}")
    array = np.full(shape, draw(st.integers(0, 255)), bits)
    match draw(st.integers(0, 15)):
        case 0 if array.ndim:
            array = array[..., ::-1]
        case 1:
            array = array.T
        case 2:
            array.flags.writeable = False
        case 3 if array.ndim:
            array = np.broadcast_to(array[:1], array.shape)
        case 4:
            return (array, draw(st.integers(-2, 12)))
        case 5:
            return (memoryview(array), runner.CODES[dtype])
    return (array, runner.CODES[dtype])


garbage = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.floats(), st.binary(max_size=5), st.just(()), st.just((1, 2, 3)),
    st.just(object()), st.just(np.ones(3)), st.just((b"abcd", 6)), st.just((np.ones(2), "f")), st.just([1.0]),
    st.just((np.array(["a"]), 0)), st.just((np.array([None]), 0)), st.just(({}, 0)), st.just((1 << 70, 0)),
)  # fmt: skip
operand = st.one_of(arrays(), arrays(), arrays(), garbage)
scalar = st.one_of(
    st.booleans(), st.integers(-3, 12), st.floats(), st.sampled_from([2**31, -(2**63), 2**70, None, "x"])
)
format_id = st.one_of(
    st.sampled_from(FORMAT_IDS), st.sampled_from([-1, len(FORMAT_IDS), 2**31 - 1, -(2**31), 2**33, 0.5])
)
flag = st.one_of(st.booleans(), scalar)
flags = st.one_of(st.integers(0, 63), st.integers(0, 63), scalar)
mode = st.one_of(st.integers(0, 2), scalar)

CALLS = {
    "amax": (operand, operand, operand, flags),
    "quantize": (operand, format_id, flags, scalar, mode, operand, operand, operand, operand, operand, operand, operand,
                 operand),
    "dequantize": (operand, operand, operand, format_id, flag, operand),
    "gemm": (operand, operand, operand, format_id, flag, operand, operand, operand, format_id, flag, operand, operand,
             operand, operand, scalar, scalar, flag),
    "scale_update": (operand, operand, operand, operand, operand, operand, scalar, scalar, flag),
    "bias_grad": (operand, operand, operand),
    "gemm_workspace_bytes": (scalar, scalar, scalar, flag),
    "bias_grad_workspace_bytes": (scalar, scalar),
    "gemm_row": (format_id, flag, format_id, flag, scalar, scalar, scalar, st.sampled_from(["float32", "x"]),
                 st.sampled_from(["cpu", "cuda", ""]), scalar),
    "set_isa": (st.one_of(st.text(max_size=8), scalar),),
}  # fmt: skip


@SETTINGS
@given(st.sampled_from(list(CALLS)).flatmap(lambda name: st.tuples(st.just(name), st.tuples(*CALLS[name]))))
def test_bad_calls_of_the_binding(call):
    name, args = call
    with runner.setting(), contextlib.suppress(ALLOWED):
        getattr(_core, name)(*args)


@SETTINGS
@given(st.data())
def test_nearly_good_calls_of_the_binding(data):
    """A good call with one argument replaced: the checks behind the first ones."""
    fmt = data.draw(st.sampled_from(cases.FORMATS))
    packed, f32, ident = fmt in cases.PACKED_FORMATS, runner.CODES["float32"], runner.IDS[fmt]
    x = np.ones((16, 48) if packed else (4, 40), np.float32)
    q, be = oracle.quantize(x, fmt), runner.Numpy()
    good = []
    for side in ("rowwise", "columnwise"):
        for part, dtype in (("data", runner.payload(fmt)), ("scale_inv", runner.ROWS[fmt]["scale"])):
            good.append(be.put(getattr(q, f"{side}_{part}"), dtype))
    amaxes = [None if a is None else be.put(a, "float32") for a in (q.amax, q.columnwise_amax)]
    rowwise = list(runner.copy_operands(be, q.copy(), fmt))
    delayed, noisy = (data.draw(st.booleans()) for _ in range(2))
    scale = be.put(np.ones(1, np.float32), "float32") if fmt in cases.TENSOR_FORMATS and delayed else None
    noisy = packed and noisy
    rng = be.put(oracle.rng_words(1, 2), "int32") if noisy else None
    update = [(np.ones(shape, np.float32), f32) for shape in ((3, 4), (3,), (3,), (3, 4), (3,))]
    out, product = (np.empty(x.shape, np.float32), f32), (np.empty((x.shape[0],) * 2, np.float32), f32)
    calls = {
        "quantize": [(x, f32), ident, runner.FLAGS["stochastic"] * noisy, 0.0, 0, *amaxes, scale, rng, *good],
        "dequantize": [*rowwise, out],
        "gemm": [*rowwise, *rowwise, product, None, None, None, 1.0, 0.0, False],
        "amax": [(x, f32), (np.ones(1, np.float32), f32), (np.ones(1, np.float32), f32), 0],
        "scale_update": [*update[:3], None, *update[3:], 448.0, 0, False],
    }
    name = data.draw(st.sampled_from(list(calls)))
    args = calls[name]
    getattr(_core, name)(*args)
    at = data.draw(st.integers(0, len(args) - 1))
    args[at] = data.draw(CALLS[name][at])
    with contextlib.suppress(ALLOWED):
        getattr(_core, name)(*args)


QUANTIZERS = (
    Float8CurrentScalingQuantizer(),
    Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2", columnwise=False),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(block_scaling_dim=2, rowwise=False),
    MXFP8Quantizer(),
    MXFP8Quantizer(with_2d_quantization=True),
    Float8Quantizer(),
    NVFP4Quantizer(),
    NVFP4Quantizer(with_rht=True, row_scaled_nvfp4=True),
    NVFP4Quantizer(columnwise=False, stochastic_rounding=True),
)
anything = st.one_of(
    garbage,
    st.builds(
        lambda shape, dtype, value: np.full(shape, value, dtype),
        shapes.filter(lambda s: len(s) < 9 and max(s, default=0) < 1000),  # verbs allocate: [0, 2**40] has 2**40 sums
        st.sampled_from([*cases.INPUT_DTYPES.values(), np.int32, np.float64, np.bool_, np.complex64]),
        st.integers(0, 3),
    ),
)


@SETTINGS
@given(anything, anything, st.sampled_from(QUANTIZERS), st.sampled_from(QUANTIZERS), st.data())
def test_public_verbs(x, y, qx, qy, data):
    """Whatever is passed as a tensor, a dtype or an option."""
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16", "int8", "what", None, np.float64, 3]))
    flags = st.booleans()
    with contextlib.suppress(ALLOWED):
        maybe = st.one_of(st.none(), st.none(), st.just(np.ones(1, np.float32)), anything)
        rng = data.draw(st.one_of(maybe, st.just(oracle.rng_words(3, 4))))
        given = {name: data.draw(maybe) for name in ("amax", "columnwise_amax", "scale")}
        a = core.quantize(x, qx, rng=rng, **given)
        core.dequantize(a, dtype)
        b = core.quantize(y, qy)
        core.gemm(a, b, trans_a=data.draw(flags), trans_b=data.draw(flags), bias=data.draw(anything),
                  alpha=data.draw(scalar), out_dtype=dtype, fast_accum=data.draw(flags))  # fmt: skip
    for verb in (core.amax, core.bias_grad):
        with contextlib.suppress(ALLOWED):
            verb(x)
    with contextlib.suppress(ALLOWED):
        core.amax(x, per_row=data.draw(flags), rht=data.draw(flags), random_signs=data.draw(flags))
    with contextlib.suppress(ALLOWED):
        core.scale_update(x, y, reduced=data.draw(st.one_of(st.none(), anything)), margin=data.draw(scalar))


formats, pairs = st.sampled_from(cases.FORMATS), st.sampled_from(cases.GEMM_PAIRS + cases.MIXED_PAIRS)
value_sets, options = st.sampled_from(list(cases.VALUE_SETS)), st.sampled_from(cases.OPTIONS)
epilogues = st.sampled_from(cases.GEMM_EPILOGUES)
sizes = st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 129, 255, 256, 257]))
amaxes = st.floats(0, width=32)


@st.composite
def good_options(draw, fmt: str, dtype: str, m: int):
    """(extent factor, keyword arguments of `oracle.quantize`, its usage included) of a call that a format takes."""
    usage = draw(st.sampled_from([{}, {"columnwise": False}, {"rowwise": False}]))
    more: dict[str, Any] = {}
    rule = cases.rule_of(fmt)
    if rule == "divide":
        more["pow2"], more["eps"] = draw(options)
    if fmt in cases.TENSOR_FORMATS:
        match draw(st.integers(0, 2)):
            case 1:
                more["amax"] = np.float32(draw(amaxes))
            case 2:
                more = {"scale": np.float32(draw(amaxes))}
                more |= {"accumulate": np.float32(draw(amaxes))} if draw(st.booleans()) else {}
    elif draw(st.booleans()) and rule == "e8m0_ceil":
        more["square"] = True
    if rule != "two_level":
        return {**more, **usage}
    if draw(st.integers(0, 3)) == 0:
        more["square"] = True
    else:
        more |= {"row_amax": True} if draw(st.booleans()) else {}
        more |= {"rng": oracle.rng_words(draw(words), draw(words))} if draw(st.booleans()) else {}
        more |= {"rht": True, "rht_signs": draw(st.booleans())} if dtype == "bfloat16" and draw(st.booleans()) else {}
    if draw(st.integers(0, 3)) == 0:
        rows = m if more.get("row_amax") else 1
        more["amax"] = np.array([draw(amaxes) for _ in range(rows)], np.float32)
        more["columnwise_amax"] = more["amax"][:1] if more.get("square") else np.float32(draw(amaxes))
        if not rows:
            more.pop("amax"), more.pop("columnwise_amax")
    for side, name in enumerate(("columnwise", "rowwise")):
        if name in usage:
            return one_sided(more, side)
    return more


words = st.integers(0, 2**64 - 1)


@SETTINGS
@given(formats, st.sampled_from(list(cases.INPUT_DTYPES)), sizes, sizes, value_sets, st.integers(0, 3), st.data())
def test_good_quantize_equals_the_oracle(fmt, dtype, m, k, values, offset, data):
    if fmt in cases.PACKED_FORMATS:
        m, k = m // 16 * 16, k // 16 * 16
    want_options = data.draw(good_options(fmt, dtype, m))
    x = cases.draw(f"fuzz-{fmt}-{dtype}-{m}-{k}-{values}", values, (m, k), dtype)
    want = oracle.quantize(x, fmt, **want_options)
    isa, threads = data.draw(st.sampled_from(runner.isas())), data.draw(st.integers(1, 5))
    with runner.setting(isa, threads):
        got = runner.quantize(runner.Numpy(), x, want, fmt, **want_options, offset=offset % 4)
    label = f"{fmt} {dtype} {m}x{k} {values} {want_options} isa={isa} threads={threads} {cases.report_header()}"
    runner.same_quantized(got, want, label)


@SETTINGS
@given(pairs, sizes, sizes, sizes, st.booleans(), st.booleans(), epilogues, st.data())
def test_good_gemm_equals_the_oracle(pair, m, n, k, a_columnwise, b_columnwise, epilogue, data):
    values = data.draw(st.sampled_from(["normal", "outlier", "inf_nan_mix"]))
    if {*pair} & {*cases.PACKED_FORMATS}:  # the kept extent of a rowwise operand alone may be ragged
        k = k // 16 * 16
        m = m // 16 * 16 if a_columnwise else m
        n = n // 16 * 16 if b_columnwise else n
    case = cases.GemmCase(*pair, (m, n, k), a_columnwise, b_columnwise, *epilogue, values=values)
    a, b, bias, c = case.make()
    copies = []
    for x, fmt, columnwise in ((a, pair[0], a_columnwise), (b, pair[1], b_columnwise)):
        rows = {"row_amax": True} if fmt in cases.PACKED_FORMATS and not columnwise and data.draw(st.booleans()) else {}
        copies.append(oracle.quantize(x, fmt, rowwise=not columnwise, columnwise=columnwise, **rows).copy(columnwise))
    qa, qb = copies
    more = {"alpha": case.alpha, "beta": case.beta, "bias": bias, "c": c}
    want = oracle.gemm_cpu(qa, qb, out_dtype=cases.INPUT_DTYPES[case.out_dtype], **more)
    isa, threads = data.draw(st.sampled_from(runner.isas())), data.draw(st.integers(1, 5))
    with runner.setting(isa, threads):
        got = runner.gemm(runner.Numpy(), qa, pair[0], qb, pair[1], case.mnk, out_dtype=case.out_dtype, **more)
    runner.same_bits(got, want, f"{case} isa={isa} threads={threads}", nan_free=True)


history_floats = st.one_of(st.floats(0, width=32), st.floats(0, 8, width=32), st.sampled_from([0.0, np.nan]))


@SETTINGS
@given(st.integers(0, 5), st.integers(1, 9), st.booleans(), st.integers(-64, 64), st.booleans(), st.data())
def test_good_scale_update_equals_the_oracle(n, length, most_recent, margin, in_place, data):
    def some(count: int, floats=history_floats) -> np.ndarray:
        return np.array(data.draw(st.lists(floats, min_size=count, max_size=count)), np.float32)

    history, scale = some(n * length).reshape(n, length), some(n, st.floats(2.0**-20, 2.0**20, width=32))
    given = {"reduced": some(n)} if data.draw(st.booleans()) else {}
    given |= {"amax": some(n)} if not most_recent and data.draw(st.booleans()) else {}
    known = {**given, "most_recent": most_recent, "margin": margin}
    want = oracle.scale_update(history, scale, **known)
    got = runner.scale_update(runner.Numpy(), history, scale, in_place=in_place, **known)
    for g, w in zip(got, want, strict=True):
        runner.same_bits(g, w, f"{history.tolist()} {scale.tolist()} {known}", nan_free=True)


HAMMER = """
import random, sys
import numpy as np
from diptych.core import _core

rng = random.Random(int(sys.argv[1]))
codes, formats = list(_core.dtype_table().values()), len(_core.format_table())
sizes = (4, 2, 2, 1, 1, 1, 1, 4, 8, 1, 8)
bits = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}

def tensor():
    code = rng.choice(codes)
    shape = [rng.choice((0, 1, 2, 3, 4, 16, 32, 128, 130)) for _ in range(rng.randrange(4))]
    a = np.zeros(shape, np.float32 if code == 0 else bits[sizes[code]])
    return (a, code if rng.random() < 0.95 else rng.randrange(-3, 300))

junk = [None, 0, -1, 1.5, "x", b"", (), [], {}, object(), float("nan"), float("inf"), 2**31, 2**64, -(2**63), True,
        np.ones(3), (None, 0), (b"1234", 0), (np.ones(3), 1), (bytearray(8), 6), int, Exception(), ..., slice(1)]
ops = [name for name in dir(_core) if callable(getattr(_core, name)) and not name.startswith(("_", "set_"))]
args = {name: getattr(_core, name).__doc__.partition(" -> ")[0].count(": ") for name in ops if name[0].islower()}
args = {name: count for name, count in args.items() if count}
args["set_isa"] = 1
assert args["gemm"] == 17, args
done = 0
for _ in range(15000):
    name = rng.choice(list(args))
    count = args[name] if rng.random() < 0.97 else rng.randrange(22)
    picks = [rng.choice((tensor, tensor, lambda: rng.choice(junk), lambda: rng.randrange(formats), lambda: False))()
             for _ in range(count)]
    try:
        getattr(_core, name)(*picks)
        done += 1
    except (ValueError, TypeError, NotImplementedError, BufferError):
        pass
print("survived", done)
"""


def test_garbage_hammer_in_a_process_of_its_own():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-X", "faulthandler", "-c", HAMMER, str(cases.SEED)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("survived"), cases.report_header() + done.stderr[-3000:]
