"""scale_update, delayed scaling's step, against the oracle, bit for bit."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych import core
from diptych.common.errors import ArgumentError, DTypeError
from diptych.common.quantizers import Float8Quantizer
from diptych.core import _core

# (n tensors, L entries)
SHAPES = ((1, 1), (3, 1), (1, 2), (7, 2), (1, 16), (5, 33), (2, 1024), (300, 20), (1, 70000), (0, 4))
FP8_MAX, MARGINS = (448.0, 57344.0), (0, 3, -2, 64, -64)


def floats(rng: np.random.Generator, shape: tuple[int, ...], odd: bool) -> np.ndarray:
    """Amaxes of all magnitudes; among them zeros, and where `odd` infinities, subnormals and the largest."""
    x = np.exp2(rng.uniform(-20, 20, shape)).astype(np.float32)
    some = [0.0, np.inf, 1e-45, 2.0**-126, 1.3e-36, 3.4028235e38] if odd else [0.0]
    return np.where(rng.random(shape) < 0.25, rng.choice(np.array(some, np.float32), shape), x).astype(np.float32)


def check(be, history, scale, label, **options) -> None:
    old = history.copy(), scale.copy()
    known = {k: v for k, v in options.items() if k not in ("in_place", "offset", "poison")}
    want = oracle.scale_update(history, scale, **known)
    got = runner.scale_update(be, history, scale, **options)
    runner.same_bits(got[0], want[0], f"{label} {options} history", nan_free=True)
    runner.same_bits(got[1], want[1], f"{label} {options} scale")
    assert (history == old[0]).all() and (scale == old[1]).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits(device, shape):
    be = runner.backend(device)
    turns = itertools.product((False, True), (False, True), (None, "reduced", "amax", "both"), range(2))
    for turn, (odd, most_recent, given, draw) in enumerate(turns):
        if most_recent and given in ("amax", "both"):
            continue  # two algorithms at once are refused
        label = f"update-{shape}-{turn}-{draw} ({cases.report_header()})"
        rng = cases.rng_for(label)
        history, scale = floats(rng, shape, odd), np.exp2(rng.uniform(-30, 30, shape[:1])).astype(np.float32)
        options = {"fp8_max": FP8_MAX[turn % 2], "margin": MARGINS[turn % 5], "most_recent": most_recent}
        if given in ("reduced", "both"):
            options["reduced"] = floats(rng, shape[:1], odd)
        if given in ("amax", "both"):
            options["amax"] = floats(rng, shape[:1], odd)
        check(be, history, scale, label, **options, offset=turn % 3)
        check(be, history, scale, label, **options, in_place=True, offset=turn % 2, poison=0x5A)


def arr(*values) -> np.ndarray:
    return np.array(values, np.float32)


# history, options, then what must come out (NUMERICS 2); the scale was 5
KNOWN = [
    ([3, 1, 8, 2], {}, [0, 8, 2, 3], 56),
    ([3, 1, 8, 2], {"most_recent": True}, [0, 8, 2, 3], np.float32(448) / np.float32(3)),
    ([9, 8, 1, 2], {"margin": 2}, [0, 1, 2, 9], np.float32(112) / np.float32(9)),
    ([0, 1, 8, 2], {}, [0, 1, 8, 2], 5),
    ([0, 1, 8, 2], {"amax": 7.0}, [0, 1, 8, 2], 5),
    ([0, 1, 8, 2], {"reduced": 4.0}, [0, 8, 2, 4], 56),
    ([3, 1, 8, 2], {"reduced": 0.0}, [0, 8, 2, 3], 56),
    ([3, 1, 8, 2], {"amax": 7.0}, [0, 8, 2, 3], 64),
    ([3, 1, 8, 2], {"amax": 0.0}, [0, 8, 2, 3], 5),
    ([3, 1, 8, 2], {"amax": -1.0}, [0, 8, 2, 3], 5),
    ([3, 1, 8, 2], {"amax": np.nan}, [0, 8, 2, 3], 5),
    ([3, 1, 8, 2], {"amax": np.inf}, [0, 8, 2, 3], 5),
    ([3, 1, 8, 2], {"reduced": np.nan, "most_recent": True}, [0, 8, 2, np.nan], 5),
    ([3, 1, 8, 2], {"reduced": np.nan}, [0, 8, 2, np.nan], 56),  # a maximum ignores NaN
    ([3, 1, np.nan, 2], {}, [0, np.nan, 2, 3], np.float32(448) / np.float32(3)),
    ([np.nan, 0, np.nan], {}, [0, np.nan, np.nan], 5),
    ([np.inf, 1, 8, 2], {}, [0, 8, 2, np.inf], 5),
    ([3, 1, np.inf, 2], {}, [0, np.inf, 2, 3], 5),
    ([1e-45, 0, 0], {}, [0, 0, 1e-45], oracle.FLT_MAX),
    ([3, 8], {}, [0, 3], 56),
    ([4], {}, [0], 112),
    ([4], {"most_recent": True, "margin": 1}, [0], 56),
    ([4], {"reduced": 8.0}, [0], 56),
    ([0], {}, [0], 5),
]


@pytest.mark.parametrize("history, options, new_history, new_scale", KNOWN, ids=range(len(KNOWN)))
def test_known_answers(device, history, options, new_history, new_scale):
    be = runner.backend(device)
    named = {k: arr(v) if k in ("reduced", "amax") else v for k, v in options.items()}
    for in_place in (False, True):
        got = runner.scale_update(be, arr(*history)[None], arr(5), in_place=in_place, **named)
        np.testing.assert_array_equal(got[0], arr(*new_history)[None])
        assert got[1].tolist() == [float(new_scale)]
        runner.same_bits(got[0][:, 0], arr(0), "the slot that waits is +0")


def test_tensors_do_not_mix(device):
    """n tensors at once are n tensors one by one."""
    be, rng = runner.backend(device), cases.rng_for("mix")
    history, scale = floats(rng, (40, 7), True), np.exp2(rng.uniform(-5, 5, 40)).astype(np.float32)
    together = runner.scale_update(be, history, scale)
    for i in range(40):
        alone = runner.scale_update(be, history[i : i + 1], scale[i : i + 1])
        for a, b in zip(together, alone, strict=True):
            runner.same_bits(a[i : i + 1], b, f"tensor {i} {cases.report_header()}")


def int64(be, *values) -> Any:
    """An operand of int64 [len(values)]."""
    if isinstance(be, runner.Numpy):
        return np.array(values, np.int64), runner.CODES["int64"]
    return be.torch.tensor(values, dtype=be.torch.int64, device=be.device)


class Call:
    """A call of `_core.scale_update` with a `seen` and a `step`; `aliased` are the outputs that are the inputs."""

    def __init__(self, be, history, scale, *, aliased=(), offset=0, **options):
        self.out = runner.Outputs(be, offset=offset)
        given = {"history": history, "scale": scale}
        new = {name: self.out.new(f"new_{name}", value.shape, "float32", value if name in aliased else None)
               for name, value in given.items()}  # fmt: skip
        old = {name: new[name] if name in aliased else be.put(value, "float32") for name, value in given.items()}
        self.args = {**old, **{f"new_{name}": value for name, value in new.items()}, "reduced": None, "amax": None}
        self.args |= {"fp8_max": 448.0, "margin": 0, "most_recent": False, **options}

    def run(self, **changes) -> tuple[np.ndarray, np.ndarray]:
        _core.scale_update(**{**self.args, **changes})
        read = self.out.read()
        return read["new_history"], read["new_scale"]


STEPS = (0, 1, -1, 2**31, 2**32 + 1, 2**63 - 1, -(2**63))


@pytest.mark.parametrize("aliased", [(), ("history",), ("scale",), ("history", "scale")], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_seen_and_step(device, shape, aliased):
    """Where they are equal every bit stays, NaN's too, and the amaxes given do not matter; else a plain update."""
    be, rng = runner.backend(device), cases.rng_for(f"seen-{shape}")
    history, scale = floats(rng, shape, True), np.exp2(rng.uniform(-30, 30, shape[:1])).astype(np.float32)
    amaxes = be.put(floats(rng, shape[:1], False), "float32")
    for turn, step in enumerate(STEPS):
        label = f"{shape} {aliased} step {step} ({cases.report_header()})"
        odd = history.copy()
        odd.reshape(-1)[turn::11] = np.array([0x7FA00001], np.uint32).view(np.float32)  # a signalling NaN
        given = {"reduced": amaxes} if turn % 2 else {"amax": amaxes} if turn % 3 else {}
        got = Call(be, odd, scale, aliased=aliased, offset=turn % 3, **given).run(
            seen=int64(be, step), step=int64(be, step)
        )
        runner.same_bits(got[0].view(np.uint32), odd.view(np.uint32), f"{label} history")
        runner.same_bits(got[1], scale, f"{label} scale")
        other = STEPS[turn - 1] if turn % 2 else step ^ (1 << 32)  # 2^32 apart: the low words are equal
        want = oracle.scale_update(history, scale, margin=turn)
        got = Call(be, history, scale, aliased=aliased, offset=turn % 3, margin=turn).run(
            seen=int64(be, other), step=int64(be, step)
        )
        runner.same_bits(got[0], want[0], f"{label} after {other} history")
        runner.same_bits(got[1], want[1], f"{label} after {other} scale")


def test_one_update_a_step(device):
    """The caller's protocol: two slots share `seen`, and several passes make up a step."""
    be, rng = runner.backend(device), cases.rng_for("protocol")
    slots = [(floats(rng, shape, False), np.ones(shape[0], np.float32)) for shape in ((3, 4), (2, 16))]
    calls = [Call(be, *slot, aliased=("history", "scale")) for slot in slots]
    seen = -1
    for passed, step in enumerate((0, 0, 0, 1, 1, 2, 2)):
        words = int64(be, seen), int64(be, step)
        for i, call in enumerate(calls):
            got = call.run(seen=words[0], step=words[1])
            if seen != step:
                slots[i] = oracle.scale_update(*slots[i])
            for g, w in zip(got, slots[i], strict=True):
                runner.same_bits(g, w, f"pass {passed} slot {i}")
        held = [w[0] if device == "cpu" else w.cpu().numpy() for w in words]
        assert [w.tolist() for w in held] == [[seen], [step]]  # read, not written
        seen = step


@pytest.mark.cuda
def test_a_captured_graph_reads_seen_and_step_when_it_runs(cuda):
    be, rng = runner.Torch(), cases.rng_for("graph")
    history, scale = floats(rng, (5, 8), False), np.ones(5, np.float32)
    call, torch = Call(be, history, scale, aliased=("history", "scale")), be.torch
    seen, step = int64(be, 0), int64(be, 0)
    call.run(seen=seen, step=step)  # loads the module, which a capture could not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _core.scale_update(**call.args, seen=seen, step=step)
        seen.copy_(step)
    want = history, scale
    for now, replays in ((0, 2), (1, 3), (2, 1), (3, 2)):
        step.fill_(now)
        for _ in range(replays):
            graph.replay()
        want = oracle.scale_update(*want) if now else want
        read = call.out.read()
        runner.same_bits(read["new_history"], want[0], f"step {now} history")
        runner.same_bits(read["new_scale"], want[1], f"step {now} scale")
        assert seen.item() == now


def float_word(be) -> Any:
    return be.put(np.ones(1, np.float32), "float32")


# change of a call with seen [1] and step [1], error, words that the message must hold
BAD_STEPS = [
    (lambda be, call: {"seen": None}, ValueError, ["seen", "step", "nothing"]),
    (lambda be, call: {"step": None}, ValueError, ["seen", "step", "nothing"]),
    (lambda be, call: {"seen": float_word(be)}, TypeError, ["seen must be int64", "float32[1]"]),
    (lambda be, call: {"step": be.put(np.ones(1, np.int32), "int32")}, TypeError, ["step must be int64", "int32[1]"]),
    (lambda be, call: {"seen": int64(be, 1, 2)}, ValueError, ["seen", "int64[2]"]),
    (lambda be, call: {"step": int64(be)}, ValueError, ["step", "int64[0]"]),
    (lambda be, call: {"scale": int64(be, 1, 2, 3)}, TypeError, ["scale must be float32", "int64[3]"]),
]


@pytest.mark.parametrize("change, error, words", BAD_STEPS, ids=range(len(BAD_STEPS)))
def test_bad_seen_and_step(device, change, error, words):
    be = runner.backend(device)
    call = Call(be, np.ones((3, 4), np.float32), np.ones(3, np.float32))
    with pytest.raises(error) as caught:
        call.run(**{"seen": int64(be, 1), "step": int64(be, 1), **change(be, call)})
    for word in ["scale_update", *words]:
        assert word in str(caught.value)
    assert call.out.untouched()


def test_outputs_over_seen_or_step_are_refused():
    memory = np.arange(8, dtype=np.float32)
    words, code = memory[4:6].view(np.int64), runner.CODES["int64"]
    call = Call(runner.Numpy(), np.ones((1, 2), np.float32), np.ones(1, np.float32))
    f32, apart = runner.CODES["float32"], int64(runner.Numpy(), 1)
    before = memory.copy()
    for output in ({"new_history": (memory[5:7].reshape(1, 2), f32)}, {"new_scale": (memory[4:5], f32)}):
        for steps in ({"seen": (words, code), "step": apart}, {"seen": apart, "step": (words, code)}):
            with pytest.raises(ValueError, match=r"scale_update: .*overlaps"):
                _core.scale_update(**{**call.args, **output, **steps})
    assert (memory == before).all() and call.out.untouched()


@pytest.mark.cuda
def test_seen_and_step_on_another_device_are_refused(cuda):
    be, host = runner.Torch(), runner.Torch("cpu")
    call = Call(be, np.ones((3, 4), np.float32), np.ones(3, np.float32))
    for seen, step in ((int64(host, 1), int64(be, 1)), (int64(be, 1), int64(host, 1))):
        with pytest.raises(ValueError, match=r"scale_update: (seen|step) is on cpu"):
            call.run(seen=seen, step=step)
    assert call.out.untouched()


def test_callers_float_mode_does_not_matter():
    if platform.machine() != "x86_64":
        pytest.skip("sets FTZ through glibc's x86-64 fenv_t")
    history = arr(1e-45, 2e-38, 1e-40, 0, 3e38, 2e38, 0, 5, 1e4, 1e3).reshape(5, 2)
    scale = arr(1e-40, 1e-40, 1e-40, 1e-40, 1e-40)
    reduced = arr(1e-45, 0, 1e-39, 1e-42, 0)
    for options in ({}, {"most_recent": True}, {"margin": 126}, {"reduced": reduced}, {"amax": reduced}):
        want = oracle.scale_update(history, scale, **options)
        with runner.flushed():
            got = runner.scale_update(runner.Numpy(), history, scale, **options)
        for g, w in zip(got, want, strict=True):
            runner.same_bits(g, w, f"{options} FTZ+DAZ")


def test_numpy_face():
    """A training loop in small: quantize with the scale, keep the amax, update."""
    rng = cases.rng_for("loop")
    history, scale = np.zeros((1, 4), np.float32), np.ones(1, np.float32)
    seen = []
    quantizer = Float8Quantizer(columnwise=False)
    for step in range(10):
        top = np.float32(2.0 ** rng.integers(-5, 6))
        x = np.array([[top, -top / 2]], np.float32)
        q = core.quantize(x, quantizer, scale=scale)
        history[0, 0] = max(history[0, 0], q.amax[0])
        want = oracle.scale_update(history, scale, margin=1)
        history, scale = core.scale_update(history, scale, margin=1)
        runner.same_bits(history, want[0], f"step {step}")
        runner.same_bits(scale, want[1], f"step {step}")
        seen.append(top)
        assert scale[0] == 224 / max(seen[-4:])


def test_numpy_face_seen_and_step():
    history, scale = arr(3, 1, 8, 2)[None], arr(5)
    one, two = np.array([1]), np.array([2])
    kept = core.scale_update(history, scale, seen=one, step=np.array([1]))
    assert all((g == w).all() and g is not w for g, w in zip(kept, (history, scale), strict=True))
    moved = core.scale_update(history, scale, seen=one, step=two)
    assert moved[0].tolist() == [[0, 8, 2, 3]] and moved[1].tolist() == [56]
    assert one.tolist() == [1] and two.tolist() == [2]
    wrong = {ArgumentError: (1, [1]), DTypeError: (np.array([1], np.int32), arr(1))}
    for error, bad in [(error, bad) for error, given in wrong.items() for bad in given]:
        with pytest.raises(error, match="scale_update: step must be "):
            core.scale_update(history, scale, seen=one, step=bad)
    with pytest.raises(ValueError, match="scale_update: seen and step come together"):
        core.scale_update(history, scale, seen=one)
    with pytest.raises(ValueError, match=r"scale_update: seen .*int64\[2\]"):
        core.scale_update(history, scale, seen=np.array([1, 2]), step=one)


def floats32(be, value: np.ndarray) -> Any:
    """An operand that may be written, and read with `values`."""
    if isinstance(be, runner.Numpy):
        return value.copy(), runner.CODES["float32"]
    return be.torch.tensor(value, device=be.device)


def values(operand: Any) -> np.ndarray:
    return operand[0] if isinstance(operand, tuple) else operand.cpu().numpy()


@pytest.mark.parametrize("n, columns", ((1, 1), (3, 4), (2, 100)), ids=str)
def test_amaxes_recorded_elsewhere(device, n, columns):
    """A writer logs amaxes, another keeps `pending`, updates take both in: as if they had gone into the history."""
    be, rng = runner.backend(device), cases.rng_for(f"elsewhere-{n}-{columns}")
    history, scale = floats(rng, (n, 5), False), np.ones(n, np.float32)
    held = {"history": floats32(be, history), "scale": floats32(be, scale), "pending": floats32(be, 0 * scale)}
    held |= {"log": floats32(be, np.zeros((n, columns), np.float32)), "scale_out": floats32(be, 0 * scale)}
    held |= {"written": int64(be, 0), "taken": int64(be, *[0] * n), "seen": int64(be, -1)}
    for step in range(12):
        new_step = step // 2  # each second update is of the same step and takes in alone
        pending = floats(rng, (n,), False)
        held["pending"] = floats32(be, pending)
        history[:, 0] = np.maximum(history[:, 0], pending)
        for _ in range(int(rng.integers(0, columns + 1))):
            amax = floats(rng, (n,), False)
            _core.log_amax(floats32(be, amax), held["log"], held["written"])
            history[:, 0] = np.maximum(history[:, 0], amax)
        same = {"new_history": held["history"], "new_scale": held["scale"], "reduced": None, "amax": None}
        numbers = {"fp8_max": 448.0, "margin": 0, "most_recent": False}
        _core.scale_update(**held, **same, **numbers, step=int64(be, new_step))
        if step % 2 == 0:
            history, scale = oracle.scale_update(history, scale)
        held["seen"] = int64(be, new_step)
        runner.same_bits(values(held["history"]), history, f"history at {step}")
        runner.same_bits(values(held["scale"]), scale, f"scale at {step}")
        runner.same_bits(values(held["scale_out"]), scale, f"copy of the scale at {step}")
        assert (values(held["pending"]) == 0).all() and (values(held["taken"]) == values(held["written"])).all()


def test_a_log_that_ran_over():
    be = runner.backend("cpu")
    state = {"history": floats32(be, arr(1, 2)[None]), "scale": floats32(be, arr(1))}
    log, written = floats32(be, arr(0)[None]), int64(be, 0)
    for amax in (3, 4):
        _core.log_amax(floats32(be, arr(amax)), log, written)
    given = {"reduced": None, "amax": None, "fp8_max": 448.0, "margin": 0, "most_recent": False}
    given |= {"new_history": state["history"], "new_scale": state["scale"]}
    with pytest.raises(RuntimeError, match="2 amaxes were logged since the last update, and the log holds 1"):
        _core.scale_update(**state, **given, log=log, written=written, taken=int64(be, 0))
    assert values(state["history"]).tolist() == [[1, 2]]


BEYOND = {
    "negative written": (-1, 0, "written is -1"),
    "negative taken": (3, -1, "taken is -1"),
    "taken ahead": (3, 4, "taken is 4, and counts of logged amaxes lie in 0..3"),
    "a difference that wraps around": (2**63 - 1, -(2**63), f"taken is -{2**63}"),
    "both below 0": (-4, -5, "written is -4"),
}


@pytest.mark.parametrize("case", BEYOND)
def test_counters_outside_of_a_log(case):
    """Numbers that would index what lies around a log, whose own memory and surroundings stay as they were."""
    written, taken, message = BEYOND[case]
    memory = np.full(4096, 99.0, np.float32)
    memory[2048:2080] = 0
    history, scale, number = np.zeros((2, 4), np.float32), np.ones(2, np.float32), np.array([written])
    log = memory[2048:2080].reshape(2, 16), 0
    state = {"history": (history, 0), "scale": (scale, 0), "new_history": (history, 0), "new_scale": (scale, 0)}
    given = {"reduced": None, "amax": None, "fp8_max": 448.0, "margin": 0, "most_recent": False}
    pending = np.full(2, 5.0, np.float32)
    given |= {"log": log, "written": (number, 8), "taken": (np.array([taken, taken]), 8), "pending": (pending, 0)}
    with pytest.raises(ValueError, match=f"scale_update: {message}"):
        _core.scale_update(**state, **given)
    assert not history.any() and (scale == 1).all() and (pending == 5).all()
    if written < 0:
        with pytest.raises(ValueError, match=f"log_amax: {message}"):
            _core.log_amax((arr(7, 8), 0), log, (number, 8))
    assert number == written and not memory[2048:2080].any() and (memory == 99).sum() == 4096 - 32


def test_a_log_whose_count_would_wrap_around():
    log, number = np.zeros((1, 16), np.float32), np.array([2**63 - 1])
    with pytest.raises(ValueError, match=f"log_amax: written is {2**63 - 1}"):
        _core.log_amax((arr(7), 0), (log, 0), (number, 8))
    assert number == 2**63 - 1 and not log.any()


TRAP = """
import sys, torch
from diptych.core import _core

written, taken = int(sys.argv[1]), int(sys.argv[2])
log, history, scale = torch.zeros(1, 16, device="cuda"), torch.zeros(1, 4, device="cuda"), torch.ones(1, device="cuda")
written, taken = (torch.tensor([n], device="cuda") for n in (written, taken))
state = history, scale, None, None, history, scale, 448.0, 0, False
if sys.argv[3] == "log_amax":
    _core.log_amax(torch.ones(1, device="cuda"), log, written)
else:
    _core.scale_update(*state, log=log, written=written, taken=taken)
torch.cuda.synchronize()
"""


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("written", "taken", "op"),
    [
        (-5, 0, "log_amax"),
        (2**63 - 1, 0, "log_amax"),
        (-4, -5, "scale_update"),
        (3, 4, "scale_update"),
        (2**63 - 1, -(2**63), "scale_update"),
    ],
)
def test_counters_outside_of_a_log_trap_on_cuda(cuda, written, taken, op):
    # A trap ends all work of the process on the device.
    command = [sys.executable, "-c", TRAP, str(written), str(taken), op]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and f"diptych: {op}: " in done.stdout and "counts of logged amaxes" in done.stdout
