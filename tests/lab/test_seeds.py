import math

import numpy as np
import pytest

from diptych.lab.seeds import Pairs, overall, t_probability, t_quantile

# Two-sided quantiles of Student's t by degrees of freedom, as tables print them.
TABLE_95 = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 7: 2.364624, 9: 2.262157, 10: 2.228139,
            15: 2.131450, 30: 2.042272, 60: 2.000298, 120: 1.979930}  # fmt: skip
TABLE_99 = {1: 63.656741, 2: 9.924843, 7: 3.499483, 30: 2.749996}


def pairs(*percent: float) -> Pairs:
    """Pairs whose low precision is so many percent above a high precision of 2 nats."""
    return Pairs(tuple(range(len(percent))), (2.0,) * len(percent), tuple(2 * (1 + p / 100) for p in percent))


@pytest.mark.parametrize(("confidence", "table"), [(0.95, TABLE_95), (0.99, TABLE_99)])
def test_quantiles_are_those_of_the_table(confidence, table):
    for freedom, t in table.items():
        assert t_quantile(freedom, confidence) == pytest.approx(t, abs=1e-6), freedom


@pytest.mark.parametrize("freedom", [1, 2, 3, 6, 11, 40])
def test_the_probability_is_the_integral_of_the_density(freedom):
    t, step = np.linspace(0, 2.5, 200_001, retstep=True)
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(scale) * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    area = 2 * step * (density.sum() - (density[0] + density[-1]) / 2)
    assert t_probability(2.5, freedom) == pytest.approx(area, abs=1e-9)


@pytest.mark.parametrize(("freedom", "confidence"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_there_is_no_quantile_without_freedom_or_certainty(freedom, confidence):
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(freedom, confidence)


def test_the_interval_is_the_one_that_numpy_gives():
    rng = np.random.default_rng(0)
    for n in (2, 3, 8, 20):
        high = rng.uniform(1.4, 1.7, n)
        low = high * (1 + rng.normal(0.003, 0.01, n))
        found = Pairs(tuple(range(n)), tuple(high.tolist()), tuple(low.tolist()))
        off = (low - high) / high
        half = t_quantile(n - 1) * np.sqrt(np.square(off - off.mean()).sum() / (n - 1) / n)
        assert found.mean == pytest.approx(off.mean(), rel=1e-9)
        assert found.interval == pytest.approx((off.mean() - half, off.mean() + half), rel=1e-9)


def test_nineteen_of_twenty_intervals_hold_the_true_mean():
    rng, held, repeats = np.random.default_rng(1), 0, 2000
    for off in rng.normal(0.01, 0.02, (repeats, 4)):
        low, high = pairs(*(100 * off)).interval or (0.0, 0.0)
        held += low <= 0.01 <= high
    assert abs(held / repeats - 0.95) < 0.015  # three standard deviations


@pytest.mark.parametrize(
    ("percent", "verdict"),
    [
        ((0.1, -0.1, 0.2, 0.0), True),  # the interval lies inside of the tolerance of 1 %
        ((3.0, 3.1, 2.9, 3.0), False),  # outside of it, above
        ((-3.0, -3.1, -2.9, -3.0), False),  # outside of it, below
        ((0.9, 1.0, 1.1, 1.0), None),  # across its upper bound
        ((-0.9, -1.0, -1.1, -1.0), None),  # across its lower bound
        ((5.0, -5.0, 4.0, -4.0), None),  # around all of it
        ((0.1, 0.2), True),  # two pairs: t is 12.7
        ((0.0, 0.2), None),
        ((0.9,), True),  # a single pair is judged by itself
        ((1.1,), False),
        ((-1.1,), False),
    ],
)
def test_verdicts(percent, verdict):
    found = pairs(*percent)
    assert found.verdict(0.01) is verdict
    said = found.said(0.01)
    assert "allowed ±1 %" in said and f"{np.mean(percent):+.2f} %" in said
    assert ("more seeds are needed" in said) == (verdict is None)
    assert ("does not tell this from the noise of seeds" in said) == (len(percent) == 1)


def test_many_pairs_decide_what_few_do_not():
    off = np.random.default_rng(2).normal(0, 1, 200)
    assert pairs(*off[:4]).verdict(0.005) is None
    assert pairs(*off).verdict(0.005) is True


def test_data_are_plain(tmp_path):
    data = pairs(0.0, 1.0).data()
    assert data["seeds"] == [0, 1] and data["high"] == [2.0, 2.0] and data["low"] == [2.0, 2.02]
    assert data["differences"] == pytest.approx([0, 0.01]) and data["mean"] == pytest.approx(0.005)
    assert list(data["interval"]) == pytest.approx([0.005 - 12.706205 * 0.005, 0.005 + 12.706205 * 0.005], rel=1e-6)
    assert pairs(1.0).data()["interval"] is None


def test_a_failure_outweighs_what_is_undecided():
    assert overall([True, True]) is True
    assert overall([True, None]) is None
    assert overall([None, False, True]) is False


@pytest.mark.parametrize("low", [(2.0, 2.0, math.nan), (2.0, math.inf), (-math.inf, math.inf), (math.nan,)])
def test_a_loss_that_is_not_finite_fails(low):
    found = Pairs(tuple(range(len(low))), (2.0,) * len(low), low)
    assert found.verdict(0.01) is False and found.interval is None
    assert "not finite from seed" in found.said(0.01) and not math.isfinite(found.mean)
