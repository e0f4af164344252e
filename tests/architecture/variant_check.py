"""A short form of the oracle's checks, run against the core in PACKAGE: `variant_check.py PACKAGE CHECK`.

Prints one line of JSON: for each part, how many cases it has, how many differ, and the first that does. Parts named
after the check must differ: then only these are checked, each until a case differs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from core import runner

import cases
import oracle
from diptych import core
from diptych.common.formats import format_by_name
from diptych.common.quantizers import Quantizer
from diptych.common.recipes import recipe_by_name

SHAPES = ((33, 65), (130, 257))
VALUES = ("normal", "subnormal_input", "subnormal_result", "tiny", "huge", "inf_nan_mix", "all_nan", "ties_e4m3",
          "ties_e5m2", "powers_of_two", "scale_edges")  # fmt: skip
# Invented rows, whose names no kernel contains, and the oracle's description of each.
INVENTED = {
    "invented_4x16": oracle.Fmt("e5m2", "float32", 4, 16, "divide", True),
    "invented_mx_8x16": oracle.Fmt("e4m3", "e8m0", 8, 16, "e8m0_ceil", False),
    "invented_mx_3x5": oracle.Fmt("e5m2", "e8m0", 3, 5, "e8m0_ceil", True),
    "invented_5xall": oracle.Fmt("e5m2", "float32", 5, 0, "divide", True),
    "invented_mx_column": oracle.Fmt("e4m3", "e8m0", 0, 1, "e8m0_ceil", False),
}
# Invented rows that have a recipe.
TRAINED = {
    "invented_e8m0_1x128": oracle.Fmt("e4m3", "e8m0", 1, 128, "e8m0_ceil", True),
    "invented_rows": oracle.Fmt("e4m3", "float32", 1, 0, "divide", True),
}


class Tally:
    def __init__(self, must_differ: Collection[str] = ()):
        self.parts: dict[str, dict] = {}
        self.must_differ = must_differ

    def wants(self, *parts: str) -> bool:
        """Returns whether cases of one of these parts must still be checked."""
        return not self.must_differ or any(
            p in self.must_differ and not self.parts.get(p, {}).get("differ") for p in parts
        )

    def add(self, part: str, check, *args) -> None:
        if not self.wants(part):
            return
        row = self.parts.setdefault(part, {"cases": 0, "differ": 0, "first": ""})
        row["cases"] += 1
        try:
            check(*args)
        except AssertionError as e:
            row["differ"] += 1
            row["first"] = row["first"] or str(e)[:300]


def check_quantize(be, x, want: oracle.Quantized, fmt: str, options: dict, label) -> None:
    runner.same_quantized(runner.quantize(be, x, want, fmt, **options), want, label)


def check_dequantize(be, copy: oracle.Copy, fmt: str, dtype: str, label) -> None:
    want = np.ascontiguousarray(oracle.dequantize(copy, cases.INPUT_DTYPES[dtype]))
    runner.same_bits(runner.dequantize(be, copy, fmt, dtype), want, label, nan_free=True)


def check_gemm(case: cases.GemmCase) -> None:
    a, b, bias, c = case.make()
    qa = oracle.quantize(a, case.a_format).copy(case.a_columnwise)
    qb = oracle.quantize(b, case.b_format).copy(case.b_columnwise)
    more = {"alpha": case.alpha, "beta": case.beta, "bias": bias, "c": c}
    want = oracle.gemm_cpu(qa, qb, out_dtype=cases.INPUT_DTYPES[case.out_dtype], **more)
    got = runner.gemm(runner.Numpy(), qa, case.a_format, qb, case.b_format, case.mnk, out_dtype=case.out_dtype, **more)
    runner.same_bits(got, want, case, nan_free=True)


def oracle_checks(*must_differ: str) -> Tally:
    tally, be = Tally(must_differ), runner.Numpy()
    for case in cases.quantize_cases(dtypes=["float32", "bfloat16"], shapes=SHAPES, values=VALUES, variants=True):
        if not tally.wants("quantize", "dequantize"):
            break
        x, options = case.make(), case.options
        want = oracle.quantize(x, case.format, **options)
        tally.add("quantize", check_quantize, be, x, want, case.format, options, case)
        tally.add("dequantize", check_dequantize, be, want.copy(), case.format, "float32", case)
    pairs = cases.GEMM_PAIRS + cases.MIXED_PAIRS
    # Amaxes enter once for a product: what is one rounding of theirs takes many products to show.
    packed = [pair for pair in pairs if set(pair) & set(cases.PACKED_FORMATS)]
    shapes = [(3, 5, 16 * k) for k in range(1, 11)]
    for case in (*cases.gemm_cases(pairs, shapes=[(33, 20, 129)]), *cases.gemm_cases(packed, shapes=shapes)):
        tally.add("gemm", check_gemm, case)
    return tally


@dataclasses.dataclass(frozen=True, kw_only=True)
class InventedQuantizer(Quantizer):
    """A quantizer as a user would write it, for a row that no built-in quantizer serves."""

    name: str

    @property
    def format(self):
        return format_by_name(self.name)


def invented_checks() -> Tally:
    """Checks that quantize and dequantize work from the row alone, and that gemm raises because it has no kernel."""
    tally, be = Tally(), runner.Numpy()
    for name, fmt in INVENTED.items():
        turns = enumerate((s, d) for s in cases.SHAPES for d in cases.INPUT_DTYPES)
        for (turn, (shape, dtype)), values in itertools.product(turns, ("normal", "inf_nan_mix", "powers_of_two")):
            options = {"pow2": turn % 2 == 1} if fmt.rule == "divide" else {}
            x = cases.draw(f"{name}-{shape}-{dtype}-{values}", values, shape, dtype)
            usage = ({}, {"rowwise": False}, {"columnwise": False})[turn % 3]
            want = oracle.quantize(x, fmt, **options, **usage)
            label = f"{name} {dtype}{shape} {values} {usage}"
            for isa in runner.isas():
                with runner.setting(isa):
                    tally.add(f"{name} quantize", check_quantize, be, x, want, name, options, f"{label} {isa}")
            copy = want.copy("rowwise" in usage)
            tally.add(f"{name} dequantize", check_dequantize, be, copy, name, dtype, label)
        # The public face knows the row through the twin table and the shared shape rules alone.
        x = cases.draw(f"{name}-face", "normal", (2, 13, 50), "float32")
        q, want = core.quantize(x, InventedQuantizer(name=name)), oracle.quantize(x, fmt)
        tally.add(f"{name} face", runner.same_bits, oracle.fold(q.rowwise_data), want.rowwise_data, name)
        tally.add(f"{name} face", runner.same_bits, q.columnwise_scale_inv, want.columnwise_scale_inv, name)
        y = oracle.dequantize(want.copy()).reshape(x.shape)
        tally.add(f"{name} face", runner.same_bits, core.dequantize(q), np.ascontiguousarray(y), name)
        tally.add(f"{name} gemm", check_miss, name, q)
    return tally


def trained_checks(name: str, recipe: str) -> Tally:
    """Checks that ops give the oracle's bits, and that torch layers train with the recipe, dense and grouped."""
    import torch  # no other check needs it

    import diptych.torch as dt

    tally, be = Tally(), runner.Numpy()
    fmt = oracle.FORMATS[name] = TRAINED[name]
    for shape, values in itertools.product((*SHAPES, (0, 5), (5, 0)), VALUES):
        x = cases.draw(f"{name}-{shape}-{values}", values, shape, "float32")
        want = oracle.quantize(x, fmt)
        for isa in runner.isas():
            with runner.setting(isa):
                tally.add("quantize", check_quantize, be, x, want, name, {}, f"{shape} {values} {isa}")
        tally.add("dequantize", check_dequantize, be, want.copy(), name, "float32", f"{shape} {values}")
    for case in cases.gemm_cases([(name, name)], shapes=[(33, 20, 129), (5, 7, 300)]):
        tally.add("gemm", check_gemm, case)

    def learns(layer: Any, call: Any, kernel: str) -> None:
        target = torch.randn(256, 64)
        optimizer, losses, calls = torch.optim.SGD(layer.parameters(), lr=8.0), [], runner.want_calls(kernel)
        for _ in range(30):
            x = torch.randn(256, 256)
            with dt.autocast(recipe=recipe_by_name(recipe)):
                y = call(x)
            losses.append(torch.nn.functional.mse_loss(y, x @ target))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0] / 20, [f"{loss:.3g}" for loss in losses]
        assert runner.want_calls(kernel) > calls, "the products were not quantized"

    torch.manual_seed(0)
    eager, compiled, grouped = dt.Linear(256, 64), dt.Linear(256, 64), dt.GroupedLinear(2, 256, 64)
    compiled_call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    tally.add("eager", learns, eager, eager, "cpu.gemm")
    tally.add("compiled", learns, compiled, compiled_call, "cpu.gemm")
    tally.add("grouped", learns, grouped, lambda x: grouped(x, [128, 128]), "cpu.grouped_gemm")
    return tally


def check_miss(name: str, q) -> None:
    calls = runner.want_calls("cpu.gemm")
    try:
        core.gemm(q, q)
    except NotImplementedError as e:
        message = str(e)
    else:
        raise AssertionError(f"gemm of {name} ran")
    for word in ("gemm", name, "nearest", "cpu.gemm", "mxfp8_e4m3", "[2, 13, 50]"):
        assert word in message, f"{word!r} is not in: {message}"
    assert runner.want_calls("cpu.gemm") == calls, "a miss counted as a call"


def main() -> None:
    package, which, *parts = Path(sys.argv[1]), *sys.argv[2:]
    loaded = Path(core._core.__file__)
    assert package in loaded.parents, f"the variant in {package} was not loaded, but {loaded}"
    maps = Path("/proc/self/maps")
    if maps.exists():  # the module's kernels are those beside it
        kernels = {line.split()[-1] for line in maps.read_text().splitlines() if "libdiptych" in line}
        assert kernels == {str(loaded.with_name("libdiptych.so"))}, kernels
    if which == "oracle":
        core._core.set_isa("generic")  # mutants of a header recompile this set alone
    tally = {"oracle": oracle_checks, "invented": invented_checks, "trained": trained_checks}[which](*parts)
    print(json.dumps({"report": cases.report_header(), **tally.parts}))


if __name__ == "__main__":
    main()
