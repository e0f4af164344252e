"""The distance of two precisions' final losses against the noise of seeds: pairs of runs, mean difference, interval."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

CONFIDENCE = 0.95


def t_probability(t: float, freedom: int) -> float:
    """Returns the probability that |T| <= t for Student's T with `freedom` degrees of freedom, a whole number.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4: finite sums in the angle atan(t/√ν).
    """
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for i in range(2 + odd, freedom - 1, 2):
        term *= (i - 1) / i * math.cos(angle) ** 2
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Returns the t for which |T| <= t has the probability `confidence`, to about 12 digits.

    **Raises** ValueError for fewer than one degree of freedom, or a confidence that is not between 0 and 1.
    """
    if freedom < 1 or not 0 < confidence < 1:
        raise ValueError(f"no quantile for {freedom} degrees of freedom at a confidence of {confidence}")
    low, high = 0.0, math.pi / 2  # bounds of the angle atan(t / sqrt(freedom)); t itself has no upper bound
    for _ in range(60):
        middle = (low + high) / 2
        below = t_probability(math.sqrt(freedom) * math.tan(middle), freedom) < confidence
        low, high = (middle, high) if below else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The final losses of pairs of runs, one in high precision and one with a recipe for each seed. The runs of a pair
    have equal initial weights and batches."""

    seeds: tuple[int, ...]
    high: tuple[float, ...]
    low: tuple[float, ...]

    @property
    def differences(self) -> list[float]:
        """The relative distance of each pair's low-precision loss from its high-precision loss."""
        return [low / high - 1 for high, low in zip(self.high, self.low, strict=True)]

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.differences))

    @property
    def mean(self) -> float:
        return sum(self.differences) / len(self.seeds)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The bounds of the mean difference at a confidence of 95 %, by Student's t over the pairs; None for one pair,
        or if a difference is not finite."""
        n = len(self.seeds)
        if n < 2 or not self.finite:
            return None
        half = t_quantile(n - 1) * statistics.stdev(self.differences) / math.sqrt(n)
        return self.mean - half, self.mean + half

    def verdict(self, tolerance: float) -> bool | None:
        """Returns whether the recipe trains as high precision does. The result is True if the whole interval lies
        within ±`tolerance`, False if no part of it does or a difference is not finite, None if more seeds are needed. A
        single pair has no interval and is judged by its difference."""
        if not self.finite:
            return False
        low, high = self.interval or (self.mean, self.mean)
        if -tolerance <= low and high <= tolerance:
            return True
        apart = low > tolerance or high < -tolerance
        return False if apart or self.interval is None else None

    def said(self, tolerance: float) -> str:
        """Returns the result in words, with the tolerance that applies."""
        allowed = f"allowed ±{100 * tolerance:g} %"
        if not self.finite:
            lost = [str(s) for s, off in zip(self.seeds, self.differences, strict=True) if not math.isfinite(off)]
            return f"a final loss is not finite from seed {', '.join(lost)}, {allowed}"
        if self.interval is None:
            return (
                f"{self.low[0]:.4f} against {self.high[0]:.4f} nats: {100 * self.mean:+.2f} %, {allowed}; one seed "
                "does not tell this from the noise of seeds"
            )
        low, high = (100 * bound for bound in self.interval)
        found = f"mean of {len(self.seeds)} pairs {100 * self.mean:+.2f} %, 95 % interval {low:+.2f} to {high:+.2f} %, "
        return found + allowed + ("; more seeds are needed" if self.verdict(tolerance) is None else "")

    def data(self) -> dict[str, Any]:
        """Returns the pairs as plain data, with "differences", "mean" and "interval" as shares of one."""
        found = {"differences": self.differences, "mean": self.mean, "interval": self.interval}
        return {k: list(v) for k, v in dataclasses.asdict(self).items()} | found


def overall(verdicts: Iterable[bool | None]) -> bool | None:
    """Returns the verdict of several checks: False if any fails, else None if any is undecided, else True."""
    found = set(verdicts)
    return False if False in found else None if None in found else True
