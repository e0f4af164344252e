"""Functions that all benchmarks share: quantize cases, medians, the machine's description, result files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from diptych.common import (
    FORMATS,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from diptych.common.quantizers import FP8_DTYPES, RHT

RESULTS = Path(__file__).parent / "results"


class QuantizeCase(NamedTuple):
    """A quantizer to measure. `name`: its format's name, and the options that differ from the default call."""

    name: str
    quantizer: Quantizer

    @property
    def plain(self) -> bool:
        return self.name == self.quantizer.format.name

    @property
    def bfloat16(self) -> bool:
        """Whether the input must be bfloat16."""
        return bool(self.quantizer.spec.flags & RHT)

    @property
    def reads(self) -> int:
        """Number of passes over the input: two if the scale rule needs the amax of the whole tensor first."""
        fmt = self.quantizer.format
        return 2 if fmt.two_level or (fmt.per_tensor and not self.quantizer.needs_scale) else 1

    def with_usage(self, *copies: str) -> QuantizeCase:
        usage = {c: c in copies for c in ("rowwise", "columnwise")}
        return QuantizeCase(self.name, self.quantizer.with_usage(**usage))

    def arguments(self, made: Any, operand: Callable[[Any, str], Any], scale: Any, rng: Any) -> list[Any]:
        """Returns the arguments after the input of a `_core.quantize` that overwrites the buffers of `made`.

        **Arguments:** `operand`: maps (tensor, dtype name) to the core's operand. `scale`, `rng`: tensors, if needed.
        """
        q = self.quantizer
        parts = [
            (f"{side}_{part}", dtype)
            for side in ("rowwise", "columnwise")
            for part, dtype in (("data", q.format.data), ("scale_inv", q.format.scale))
        ]
        amaxes = [("amax", "float32"), ("columnwise_amax", "float32")]

        def buffers(names: list[tuple[str, str]]) -> list[Any]:
            held = [(getattr(made, name), dtype) for name, dtype in names]
            return [None if t is None else operand(t, dtype) for t, dtype in held]

        state = [operand(scale, "float32") if q.needs_scale else None, operand(rng, "int32") if q.needs_rng else None]
        return [*q.spec, 0, *buffers(amaxes), *state, *buffers(parts)]


def quantize_cases() -> list[QuantizeCase]:
    """The default quantizer of each row of the format table, and quantizers with options that change the cost."""
    rows: list[Quantizer] = []
    for fp8 in FP8_DTYPES:
        rows += [
            Float8CurrentScalingQuantizer(fp8_dtype=fp8),
            Float8BlockQuantizer(fp8_dtype=fp8, block_scaling_dim=1),
            Float8BlockQuantizer(fp8_dtype=fp8, block_scaling_dim=2),
            MXFP8Quantizer(fp8_dtype=fp8),
        ]
    rows.append(NVFP4Quantizer())
    assert {q.format for q in rows} == set(FORMATS)
    more = (
        ("delayed", Float8Quantizer()),
        ("2d", MXFP8Quantizer(with_2d_quantization=True)),
        ("2d", NVFP4Quantizer(with_2d_quantization=True)),
        ("rht", NVFP4Quantizer(with_rht=True)),
        ("rht stochastic", NVFP4Quantizer(with_rht=True, stochastic_rounding=True)),
    )
    options = [QuantizeCase(f"{q.format.name} {said}", q) for said, q in more]
    return [QuantizeCase(q.format.name, q) for q in rows] + options


def seconds(fn: Callable[[], object], *, repeat: int = 15, calls: int = 1) -> float:
    """Median seconds of one call, over `repeat` timings of `calls` calls each, after a warm-up."""
    fn()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def usages() -> tuple[tuple[str, ...], ...]:
    """The sets of copies that a call may make."""
    return ("rowwise",), ("columnwise",), ("rowwise", "columnwise")


def paired(
    ours: Callable[[], object], peer: Callable[[], object], *, rounds: int = 15, calls: int = 1
) -> tuple[float, float]:
    """Median seconds of both calls, measured in turns, so that changes of the machine's speed affect both alike."""
    ours(), peer()
    a, b = [], []
    for _ in range(rounds):
        a.append(seconds(ours, repeat=1, calls=calls))
        b.append(seconds(peer, repeat=1, calls=calls))
    return statistics.median(a), statistics.median(b)


def environment() -> dict[str, Any]:
    """Commit (of the checkout, or DIPTYCH_COMMIT if there is no git), versions and machine of this run."""
    from diptych import core

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=RESULTS.parent)
    return {
        "commit": git.stdout.strip() or os.environ.get("DIPTYCH_COMMIT", "unknown"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {p: version(p) for p in ("diptych", "numpy", "torch", "jax", "jaxlib")},
        "build": dict(core.build_info()),
        "threads": core.get_num_threads(),
    }


def save(path: Path, rows: list[dict[str, Any]], **extra: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **extra, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    if not rows:
        return "(nothing)"
    head = list(rows[0])
    cells = [head] + [[f"{r[k]:.3g}" if isinstance(r[k], float) else str(r[k]) for k in head] for r in rows]
    widths = [max(len(c[i]) for c in cells) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
