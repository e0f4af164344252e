"""scale_update_many's CUDA kernel, without hardware, against the oracle."""

from __future__ import annotations

import ctypes

import pytest

from core import simulation
from core.scale_update import test_scale_update_many as many
from diptych.core import _core

pytestmark = pytest.mark.simulated

OPERANDS = ("history", "scale", "reduced", "amax", "seen", "step", "pending", "log", "written", "taken", "scale_out")


class Call(ctypes.Structure):
    """The arguments of one update, field for field the struct `UpdateCall` of tests/simulated/scale_update.cpp."""

    _fields_ = (
        *((name, simulation.Tensor) for name in OPERANDS),
        ("fp8_max", ctypes.c_float),
        ("margin", ctypes.c_int32),
        ("most_recent", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def library():
    return simulation.built("scale_update.cpp", ["cuda/scale_update/scale_update.cu"])


@pytest.mark.parametrize(("driver", "most"), [(12000, 28), (12010, 220)])
@pytest.mark.parametrize("count", [1, 28, 29, 230])
def test_bits(library, monkeypatch, driver, most, count):
    """`most`: updates that fit a launch's arguments."""
    launches = []

    def simulated(tuples):
        calls = (Call * len(tuples))()
        for call, (history, scale, reduced, amax, fp8_max, margin, most_recent, *others) in zip(
            calls, tuples, strict=True
        ):
            for name, operand in zip(OPERANDS, (history, scale, reduced, amax, *others), strict=True):
                setattr(call, name, simulation.Tensor.of(operand))
            call.fp8_max, call.margin, call.most_recent = fp8_max, margin, most_recent
        message = ctypes.create_string_buffer(256)
        launches.append(library.scale_update_many(calls, len(calls), driver, message, len(message)))
        assert launches[-1] > 0, message.value.decode()

    monkeypatch.setattr(_core, "scale_update_many", simulated)
    many.test_bits("cpu", count)
    assert launches == [-(-count // most)]
