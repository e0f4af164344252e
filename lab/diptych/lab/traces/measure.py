"""The distance of two observations of a site: in bits, in units of last place, and relative to the first one's rms.

Several threads read tensors block by block: memory is bounded for tensors of any size, and NumPy computes without
Python's global lock.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from diptych.lab.traces.reader import Observation
from diptych.lab.traces.sampling import places
from diptych.lab.traces.statistics import BLOCK, combined_rms, rms
from diptych.lab.traces.tensor_file import Tensor

_SPAN = 64 * BLOCK  # elements of one task of a thread
_WAITING = 4  # tasks per thread that may be queued, or finished and not yet read


@dataclasses.dataclass(frozen=True, slots=True)
class Distance:
    """The distance from a to b.

    `elements`: the number of elements of the tensor. `compared`: the number of elements whose values were compared; all
    of them if the hashes are equal. `equal`: whether all bits are equal, None if neither hashes nor whole values show
    it. All other fields describe the compared elements, and are None if there are none:

    `differing`: how many elements differ, in bits if the dtypes are equal, else in value. Two NaN do not differ.
    `first`: the position of the first of these in the flat tensor, None if there is none. `max_ulp`, `mean_ulp`: the
    distance in units in the last place (`DType.ulps`), over pairs without NaN; None if the dtypes differ. `not_finite`:
    how many elements differ and are NaN or infinite in a or b. `rms_a`, `rms_b`, `rms_difference`: over pairs of finite
    values.
    """

    elements: int
    compared: int
    equal: bool | None
    differing: int | None = None
    first: int | None = None
    max_ulp: int | None = None
    mean_ulp: float | None = None
    not_finite: int | None = None
    rms_a: float | None = None
    rms_b: float | None = None
    rms_difference: float | None = None

    @property
    def relative(self) -> float | None:
        """The rms of the difference divided by the rms of a; inf if `not_finite` is not 0, or if a alone is 0."""
        if self.equal:
            return 0.0
        if self.not_finite is None or self.rms_difference is None or self.rms_a is None:
            return None
        if self.not_finite:
            return math.inf
        return 0.0 if self.rms_difference == 0 else self.rms_difference / self.rms_a if self.rms_a else math.inf


class _Part(NamedTuple):
    """The comparison of one block, or of several consecutive ones."""

    same: bool  # whether all bits are equal
    differing: int
    first: int | None
    max_ulp: int
    ulps: float
    numbers: int  # pairs without NaN
    not_finite: int
    finite: int  # pairs of finite values
    rms_a: float
    rms_b: float
    rms_difference: float


def distance(a: Observation, b: Observation) -> Distance:
    """Returns the distance of two observations. **Raises** the errors of `distances`."""
    return next(distances([(a, b)], threads=1))


def distances(pairs: Iterable[tuple[Observation, Observation]], threads: int = 2) -> Iterator[Distance]:
    """Yields the distance of each pair of observations, in order.

    Values are read only if the hashes do not show that the tensors are equal. Samples are compared at the places that
    both have.

    **Raises** ValueError if the shapes of a pair differ, TraceError if a file with values is damaged.
    """
    waiting: collections.deque[tuple[Observation, Observation, _Values | None, list[Callable[[], _Part]]] | Distance]
    waiting, tasks = collections.deque(), 0
    pool = ThreadPoolExecutor(threads)

    def finish() -> Distance:
        nonlocal tasks
        found = waiting.popleft()
        if isinstance(found, Distance):
            return found
        tasks -= len(found[-1])
        return _finished(*found)

    try:
        for a, b in pairs:
            known = _by_hash(a, b)
            if known is None:
                values = _values(a, b)
                parts = _parts(values, pool) if values else []
                waiting.append((a, b, values, parts))
                tasks += len(parts)
            else:
                waiting.append(known)
            while tasks > _WAITING * threads:
                yield finish()
        while waiting:
            yield finish()
    finally:
        pool.shutdown(cancel_futures=True)


def _parts(values: _Values, pool: ThreadPoolExecutor) -> list[Callable[[], _Part]]:
    """Returns one function for each part of a distance, which computes it or waits for it. A small tensor is compared
    by the calling thread, since handing it to another thread takes longer than the comparison."""
    size = values.a.bits.size
    if size <= BLOCK:
        return [functools.partial(_span, values, 0)] * bool(size)
    return [pool.submit(_span, values, start).result for start in range(0, size, _SPAN)]


def tensor_distance(a: Tensor, b: Tensor) -> Distance:
    """Returns the distance of two tensors in memory, in one thread. **Raises** ValueError if their shapes differ."""
    if a.bits.shape != b.bits.shape:
        raise ValueError(f"shapes differ: {list(a.bits.shape)} and {list(b.bits.shape)}")
    values = _Values(_flat(a), _flat(b), True, None)
    parts = [_span(values, start) for start in range(0, a.bits.size, _SPAN)]
    return _found(a.bits.size, values, _joined(parts), None)


class _Values(NamedTuple):
    """Two flat tensors whose elements correspond. `whole`: whether they hold every element of the site."""

    a: Tensor
    b: Tensor
    whole: bool
    at: np.ndarray | None  # positions of the elements, None if they are all


def _by_hash(a: Observation, b: Observation) -> Distance | None:
    """Returns the distance of observations with equal hashes, else None. **Raises** ValueError if the shapes differ."""
    if a.site.shape != b.site.shape:
        raise ValueError(f"{a.site.key} is {list(a.site.shape)} and {b.site.key} is {list(b.site.shape)}")
    if not _hashes(a, b) or a.record.hash != b.record.hash:
        return None
    return Distance(a.site.size, a.site.size, True, 0, None, 0, 0.0, 0, rms_difference=0.0)


def _hashes(a: Observation, b: Observation) -> bool:
    """Returns whether both have hashes that can be compared: of one function, over one dtype."""
    same_kind = (a.hash_name, a.site.dtype) == (b.hash_name, b.site.dtype)
    return same_kind and a.record.hash is not None and b.record.hash is not None


def _values(a: Observation, b: Observation) -> _Values | None:
    """Returns the values at the places that both observations have, None if one has no values."""
    have_a, have_b = a.values, b.values
    if have_a is None or have_b is None:
        return None
    if have_a.whole and have_b.whole:
        return _Values(_flat(have_a.tensor), _flat(have_b.tensor), True, None)
    size, count = a.site.size, min(a.record.count, b.record.count)
    at = places(size, count)

    def taken(tensor: Tensor, held: int) -> Tensor:
        where = at if held == size else np.searchsorted(places(size, held), at)
        return Tensor(tensor.dtype, _flat(tensor).bits[where])

    return _Values(taken(have_a.tensor, a.record.count), taken(have_b.tensor, b.record.count), False, at)


def _flat(tensor: Tensor) -> Tensor:
    return Tensor(tensor.dtype, tensor.bits.reshape(-1))


def _finished(a: Observation, b: Observation, values: _Values | None, parts: list[Callable[[], _Part]]) -> Distance:
    by_hash = False if _hashes(a, b) else None
    if values is None:
        return Distance(a.site.size, 0, by_hash)
    return _found(a.site.size, values, _joined([part() for part in parts]), by_hash)


def _found(elements: int, values: _Values, part: _Part, equal: bool | None) -> Distance:
    """Returns the distance of two tensors of `elements` elements. `equal`: whether the hashes are equal, None if they
    cannot be compared."""
    one_dtype = values.a.dtype == values.b.dtype
    if equal is None and one_dtype and (values.whole or not part.same):
        equal = part.same
    return Distance(
        elements=elements,
        compared=values.a.bits.size,
        equal=equal,
        differing=part.differing,
        first=part.first if part.first is None or values.at is None else int(values.at[part.first]),
        max_ulp=part.max_ulp if one_dtype else None,
        mean_ulp=part.ulps / max(part.numbers, 1) if one_dtype else None,
        not_finite=part.not_finite,
        rms_a=part.rms_a,
        rms_b=part.rms_b,
        rms_difference=part.rms_difference,
    )


def _joined(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]

    def total(name: str) -> int:
        return sum(getattr(p, name) for p in parts)

    def joined_rms(name: str) -> float:
        return combined_rms((getattr(p, name), p.finite) for p in parts)

    return _Part(
        same=all(p.same for p in parts),
        differing=total("differing"),
        first=next((p.first for p in parts if p.first is not None), None),
        max_ulp=max((p.max_ulp for p in parts), default=0),
        ulps=math.fsum(p.ulps for p in parts),
        numbers=total("numbers"),
        not_finite=total("not_finite"),
        finite=total("finite"),
        rms_a=joined_rms("rms_a"),
        rms_b=joined_rms("rms_b"),
        rms_difference=joined_rms("rms_difference"),
    )


def _span(values: _Values, start: int) -> _Part:
    """Returns the comparison of `_SPAN` elements from `start` on."""
    end = min(start + _SPAN, values.a.bits.size)
    room = np.empty((3, min(BLOCK, end - start)))
    with np.errstate(over="ignore", invalid="ignore"):
        return _joined([_block(values, i, min(i + BLOCK, end), room) for i in range(start, end, BLOCK)])


def _block(values: _Values, start: int, end: int, room: np.ndarray) -> _Part:
    """Returns the comparison of the elements from `start` to `end`. `room`: float64 [3, n], scratch memory for both
    values and their difference; to allocate it for each block costs more than the sums."""
    (form_a, bits_a), (form_b, bits_b), *_ = values
    bits_a, bits_b = bits_a[start:end], bits_b[start:end]
    x, y = form_a.decode(bits_a, room[0, : end - start]), form_b.decode(bits_b, room[1, : end - start])
    wide = 8 in (form_a.nbytes, form_b.nbytes)
    average = rms if wide else _narrow_rms
    found = average(x), average(y)
    unequal = bits_a != bits_b if form_a is form_b else x != y
    same, not_finite, numbers, finite = not unequal.any(), 0, x.size, x.size
    if not all(map(math.isfinite, found)):
        nan_x, nan_y = np.isnan(x), np.isnan(y)
        unequal &= ~(nan_x & nan_y)
        both_finite, both_numbers = np.isfinite(x) & np.isfinite(y), ~(nan_x | nan_y)
        not_finite, numbers = int(np.count_nonzero(unequal & ~both_finite)), int(np.count_nonzero(both_numbers))
        bits_a, bits_b = bits_a[both_numbers], bits_b[both_numbers]
        x, y = x[both_finite], y[both_finite]
        found, finite = (average(x), average(y)), x.size
    differing = int(np.count_nonzero(unequal))
    first = start + int(unequal.argmax()) if differing else None
    max_ulp, ulps = 0, 0.0
    if form_a is form_b and differing:
        steps = form_a.ulps(bits_a, bits_b)
        max_ulp = int(steps.max(initial=0))
        ulps = float(steps.sum(dtype=np.float64 if steps.itemsize == 8 else np.uint64))
    apart = average(np.subtract(y, x, out=room[2, : x.size])) if differing else 0.0
    if math.isinf(apart):  # a difference of finite float64 values overflows
        apart = 2 * average(y / 2 - x / 2)
    return _Part(same, differing, first, max_ulp, ulps, numbers, not_finite, finite, *found, apart)


def _narrow_rms(x: np.ndarray) -> float:
    """Returns `rms(x)` for values whose squares neither overflow nor underflow, such as those of float32."""
    return math.sqrt(float(np.einsum("i,i->", x, x)) / max(x.size, 1))
