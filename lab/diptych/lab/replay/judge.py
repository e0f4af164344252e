"""Judges whether an operation that was computed again agrees with the recorded one.

Diptych's own operations have the same bits in both frameworks on one device, and most of them across devices
(docs/numerics.md). On two devices, products, sums, norms and activations may differ in rounding. Operations of the
frameworks may differ in rounding too: the recorded and the replayed result must each be within `reference`'s bound of
the exact result. Integers must be equal.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from diptych.lab.replay import table
from diptych.lab.replay.op import Bits, Op
from diptych.lab.replay.reference import TF32, Reference, reference
from diptych.lab.traces import DTYPES, DType, tensor_distance

ROUNDED = {
    "gemm", "grouped_gemm", "bias_grad", "grouped_bias_grad", "norm", "norm_grad", "activation", "activation_grad",
}  # fmt: skip
"""Diptych's operations whose bits may differ between devices."""
_ACCUMULATED = 2.0**-12
"""The relative rms by which products and sums of two devices may differ, beyond the result's rounding. Hopper's tensor
cores keep 14 bits of the partial sums of FP8 products."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The comparison of a recorded result with the one that was computed again.

    `elements`, `differing`, `max_ulp`, `relative`: the distance from the recorded to the replayed result
    (`traces.Distance`). `recorded_error`, `replayed_error`: the largest distance from the float64 result, in units of
    its bound; None without a float64 result. `agrees`: whether the results agree. `why`: the reason, as a clause.
    """

    result: str
    elements: int
    differing: int
    max_ulp: int | None
    relative: float | None
    recorded_error: float | None
    replayed_error: float | None
    agrees: bool
    why: str


def judged(op: Op, again: dict[str, Bits], same_device: bool) -> list[Outcome]:
    """Returns an outcome for each recorded result of `op`. `again`: the replayed results by name. `same_device`:
    whether they were computed on the kind of device of the recording."""
    exact = None if table.TABLE[op.kind].own or DTYPES[op.outputs["out"].dtype].kind != "float" else reference(op)
    return [_judged(op, name, bits, again[name], exact, same_device) for name, bits in op.outputs.items()]


def _judged(op: Op, name: str, bits: Bits, again: Bits, exact: Reference | None, same_device: bool) -> Outcome:
    if (bits.dtype, bits.data.shape) != (again.dtype, again.data.shape):
        held, got = (f"{b.dtype}{list(b.data.shape)}" for b in (bits, again))
        return Outcome(name, bits.data.size, bits.data.size, None, None, None, None, False, f"{held} became {got}")
    dtype = DTYPES[bits.dtype]
    d = tensor_distance(bits.tensor, again.tensor)
    differing = d.differing or 0
    if exact is None:
        agrees, why = _own_verdict(op.kind, differing, d.relative, dtype, same_device)
        return Outcome(name, d.elements, differing, d.max_ulp, d.relative, None, None, agrees, why)
    recorded, replayed = _error(bits, exact), _error(again, exact)
    far = [which for which, error in (("recorded", recorded), ("replayed", replayed)) if error > 1]
    why = "both results are within rounding of the exact one" if differing else "the same bits"
    if far:
        why = f"the {' and the '.join(far)} result is further from the exact one than rounding leads"
        why += _tf32(exact, [bits, again])
    return Outcome(name, d.elements, differing, d.max_ulp, d.relative, recorded, replayed, not far, why)


def _own_verdict(
    kind: str, differing: int, relative: float | None, dtype: DType, same_device: bool
) -> tuple[bool, str]:
    if not differing:
        return True, "the same bits"
    if kind not in ROUNDED:
        return False, "its bits must be the same on all devices"
    if same_device:
        return False, "its bits must be the same in both frameworks on one device"
    limit = 2 * dtype.half_ulp + _ACCUMULATED
    return relative is not None and relative <= limit, f"two devices may differ by {limit:.1e} in relative rms"


def _error(bits: Bits, exact: Reference) -> float:
    """Returns the largest error in units of its bound; inf if an element is finite or NaN in the result alone, or in
    the reference alone."""
    dtype = DTYPES[bits.dtype]
    found = dtype.decode(bits.data)
    if not found.size:
        return 0.0
    with np.errstate(all="ignore"):
        error = np.abs(found - exact.value) / exact.bound
    same = (found == exact.value) | (np.isnan(found) & np.isnan(exact.value))
    limit = dtype.decode(np.asarray(dtype.largest, dtype.bits))
    overflowed = np.isinf(found) & (np.sign(found) == np.sign(exact.value))
    overflowed &= np.abs(exact.value) + exact.bound >= limit
    error = np.where(same | overflowed, 0, np.where(np.isnan(error), np.inf, error))
    return float(error.max())


def _tf32(exact: Reference, results: list[Bits]) -> str:
    """Returns a remark that names TF32 if rounding the operands to TF32 explains the error, else ""."""
    if exact.products is None or results[0].dtype != "float32":
        return ""
    wider = exact._replace(bound=exact.bound + 2 * TF32 * exact.products)
    return "; operands that are rounded to TF32 explain it" if all(_error(b, wider) <= 1 for b in results) else ""
