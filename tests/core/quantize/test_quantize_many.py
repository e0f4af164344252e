"""quantize_many: each of many tensors of any shapes gets the bits that it gets alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych.core import _core

SHAPES = ((33, 65), (130, 144), (16, 16), (1, 208), (256, 128), (3, 16, 32), (48,), (128, 384))
ENTRIES = ("x", "amax", "columnwise_amax", "scale", "rng", "rowwise_data", "rowwise_scale", "columnwise_data",
           "columnwise_scale")  # fmt: skip


class Calls:
    """Calls of one kind: their operands, by which `_core.quantize_many` takes them, and their outputs."""

    def __init__(self, device: str, fmt: str, options: dict[str, Any], mode: int = runner.COMPUTE) -> None:
        self.be, self.fmt, self.options, self.mode = runner.Torch(device), fmt, options, mode
        self.tuples: list[tuple[Any, ...]] = []
        self.made: list[tuple[runner.Outputs, oracle.Quantized]] = []

    def add(self, x: np.ndarray, want: oracle.Quantized, offset: int = 0, **given: Any) -> None:
        out, row = runner.Outputs(self.be, offset=offset), runner.ROWS[self.fmt]
        held: dict[str, Any] = {"x": self.be.put(x, x.dtype.name, offset)}
        for name, dtype in (("amax", "float32"), ("columnwise_amax", "float32")):
            if getattr(want, name) is not None:
                held[name] = out.new(name, getattr(want, name).shape, dtype, given.pop(name, None))
        for side in ("rowwise", "columnwise"):
            for part, entry, dtype in (
                ("data", "data", runner.payload(self.fmt)),
                ("scale_inv", "scale", row["scale"]),
            ):
                if (array := getattr(want, f"{side}_{part}")) is not None:
                    held[f"{side}_{entry}"] = out.new(f"{side}_{part}", array.shape, dtype)
        held |= {name: self.be.put(value, value.dtype.name) for name, value in given.items()}
        self.tuples.append(tuple(held.get(name) for name in ENTRIES))
        self.made.append((out, want))

    def run(self) -> None:
        for amax in (one[i] for one in self.tuples for i in (1, 2) if self.mode == runner.COMPUTE):
            if amax is not None:
                amax.fill_(3e38)  # shows where an op joins an amax to what was there
        eps = self.options.get("eps", 0.0)
        _core.quantize_many(self.tuples, runner.IDS[self.fmt], runner.flags(self.options), eps, self.mode)
        for i, (out, want) in enumerate(self.made):
            runner.same_quantized(out.read(), want, f"{self.fmt} {self.options} tensor {i}")


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_bits(device, fmt):
    shapes = [s for s in SHAPES if fmt not in cases.PACKED_FORMATS or (oracle.fold(np.empty(s)).shape[0] % 16 == 0)]
    shapes = [s for s in shapes if fmt not in cases.PACKED_FORMATS or s[-1] % 16 == 0]
    for turn, dtype in enumerate(cases.INPUT_DTYPES):
        usages: tuple[dict[str, Any], ...] = ({}, {"columnwise": False}, {"rowwise": False})
        for usage in usages:
            calls = Calls(device, fmt, {})
            for i, shape in enumerate(shapes):
                x = cases.draw(f"many-{fmt}-{dtype}-{i}", ("normal", "outlier", "inf_nan_mix")[i % 3], shape, dtype)
                calls.add(x, oracle.quantize(x, fmt, **usage), offset=(i + turn) % 3)
            calls.run()


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_options(device, fmt):
    for case in cases.quantize_cases([fmt], ["bfloat16"], [(32, 48)], ["normal"], every_option=True, variants=True):
        if "rng" in case.options:
            continue
        calls = Calls(device, fmt, case.options)
        for i, rows in enumerate((32, 64, 16)):
            x = cases.draw(f"many-{case}-{i}", "outlier", (rows, 48), "bfloat16")
            calls.add(x, oracle.quantize(x, fmt, **case.options))
        calls.run()


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_scales_and_amaxes_of_each(device, fmt):
    """Delayed scaling's: each tensor has a scale of its own, and an amax that is its own or grows."""
    for mode in (runner.COMPUTE, runner.ACCUMULATE):
        calls = Calls(device, fmt, {}, mode)
        for i, shape in enumerate(SHAPES):
            x = cases.draw(f"many-scaled-{fmt}-{i}", "outlier", shape, "bfloat16")
            scale, before = np.array([0.25 * (i + 1)], np.float32), np.array([[0.0, 1e9, 0.5][i % 3]], np.float32)
            joined: dict[str, Any] = {"accumulate": before} if mode == runner.ACCUMULATE else {}
            want = oracle.quantize(x, fmt, scale=scale, **joined)
            given: dict[str, Any] = {"amax": before} if joined else {}
            calls.add(x, want, scale=scale, **given)
        calls.run()


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3"])
def test_more_tensors_than_a_table_holds_and_empty_ones(device, fmt):
    if fmt not in cases.FORMATS:
        fmt = next(name for name in cases.FORMATS if name.startswith(fmt))
    for empty in (False, True):
        calls = Calls(device, fmt, {})
        for i in range(100):
            x = cases.draw(
                f"many-table-{fmt}-{i}", "normal", (0 if empty and i % 7 == 3 else i % 5 + 1, 160), "float32"
            )
            calls.add(x, oracle.quantize(x, fmt))
        calls.run()


@pytest.mark.cuda
def test_one_call_runs_one_kernel(cuda):
    for fmt in cases.FORMATS:
        together = "cuda.quantize_each" if fmt in cases.PACKED_FORMATS else "cuda.quantize_many"
        calls, before = Calls("cuda", fmt, {}), runner.want_calls(together)
        for i in range(5):
            x = cases.draw(f"many-kernel-{fmt}-{i}", "normal", (16 * (i + 1), 272), "bfloat16")
            calls.add(x, oracle.quantize(x, fmt))
        calls.run()
        assert runner.want_calls(together) == before + 1, fmt


def _calls(count: int = 2) -> Calls:
    calls = Calls("cpu", cases.TENSOR_FORMATS[0], {})
    for _ in range(count):
        x = np.ones((4, 16), np.float32)
        calls.add(x, oracle.quantize(x, calls.fmt))
    return calls


def test_refuses():
    def run(calls: Calls, tuples: Any, mode: int = runner.COMPUTE) -> None:
        _core.quantize_many(tuples, runner.IDS[calls.fmt], 0, 0.0, mode)

    calls = _calls()
    first, second = calls.tuples
    half = (first[0].to(calls.be.torch.bfloat16), *second[1:])
    for tuples, error, words in (
        ([], ValueError, "quantize_many: give at least one call"),
        ([first, first], ValueError, "calls 0 and 1 share memory that one of them writes"),
        ([first, (second[0], first[1], *second[2:])], ValueError, "calls 0 and 1 share memory"),
        ([first, half], ValueError, "call 1 differs from the first"),
        ([first, second[:-1]], TypeError, "tuple of 9 entries"),
        ([first, (second[0][:2], *second[1:])], ValueError, r"quantize_many: call 1: quantize: .*\[2, 16\]"),
    ):
        with pytest.raises(error, match=words):
            run(calls, tuples)
    with pytest.raises(ValueError, match="quantize_many: amax_mode must be 0"):
        run(calls, [first], 3)
    assert all(out.untouched() for out, _ in calls.made)
