"""Places of samples, which are the same in all traces, and the budget, which no value decides."""

import numpy as np
import pytest
from trace_tools import STORED, rng

from diptych.lab.traces import DTYPES, SAMPLES, Options, Site, places
from diptych.lab.traces.sampling import Budget


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 16, 17, 1000, 4096, 4097, 10**6, 2**31 + 1, 2**40])
def test_places_are_different_ordered_and_nested(size):
    counts = sorted({0, min(size, 1), min(size, 7), min(size, 1000), min(size, 4097)})
    before: set[int] = set()
    for count in counts:
        found = places(size, count)
        assert found.dtype == np.int64 and found.shape == (count,)
        assert (np.diff(found) > 0).all()
        assert count == 0 or (found[0] >= 0 and found[-1] < size)
        assert before <= set(found.tolist())
        before = set(found.tolist())


def test_all_places_are_all_elements():
    for size in range(70):
        assert places(size, size).tolist() == list(range(size))


@pytest.mark.parametrize("size", [2**20, 2**20 + 1, 3 * 2**20, 10**7])
def test_places_are_spread_over_rows_and_columns(size):
    """Chi-squared over 64 parts in each of three directions; by chance it exceeds 130 once in 10^6."""
    found = places(size, 6400)
    for part in (found * 64 // size, found % 64, found // 64 % 64):
        counts = np.bincount(part, minlength=64)
        assert ((counts - 100.0) ** 2 / 100).sum() < 130


def test_places_never_change():
    """Traces of different versions are compared at these places."""
    assert places(1000, 8).tolist() == [170, 197, 246, 263, 506, 523, 655, 799]
    assert places(2**33, 4).tolist() == [2701377245, 5774407553, 6996690624, 7622900514]


def test_more_places_than_elements_are_refused():
    with pytest.raises(ValueError, match="no 4 places in 3"):
        places(3, 4)
    with pytest.raises(ValueError):
        places(3, 1)[0] = 0  # the array is shared


def sites(*key: object, most: int = 5000) -> list[Site]:
    gen = rng(*key)
    shapes = [tuple(int(n) for n in gen.integers(0, most ** (1 / axes) + 1, axes)) for axes in gen.integers(1, 4, 30)]
    return [
        Site(f"s{i}", "activation", 0, shape, str(gen.choice(STORED))) for i, shape in enumerate([(), (0, 5), *shapes])
    ]


def nbytes(site: Site, count: int) -> int:
    return count * DTYPES[site.dtype].nbytes


@pytest.mark.parametrize("values", ["hash", "sample", "full"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_budget_is_never_exceeded_and_used_while_something_fits(values, ranks):
    for budget in (0, 1, 999, 10**4, 10**5, 10**6, 10**8):
        options = Options(values=values, budget=budget)
        left = Budget(options, ranks)
        used = whole_used = 0
        for step in range(4):
            places_ = sites(values, step)
            plans = left.plan(places_)
            assert plans == left.plan(places_)  # a plan takes nothing
            left.take(places_, plans)
            for site, plan in zip(places_, plans, strict=True):
                sample = min(SAMPLES, site.size)
                assert plan.count in (0, sample, site.size)
                assert plan.values == (
                    "none" if plan.count < sample else "sampled" if plan.count < site.size else "whole"
                ) or (not site.size and plan.values in ("whole", "none"))
                want = {"hash": 0, "sample": sample, "full": site.size}[values]
                assert plan.cut == (plan.count < want)
                used += nbytes(site, plan.count)
                whole_used += nbytes(site, plan.count - sample) if plan.count > sample else 0
            room = budget // ranks - used
            assert room >= 0 and whole_used <= budget // ranks // 2
            if values != "hash":
                assert all(
                    nbytes(s, min(SAMPLES, s.size)) > room
                    for s, p in zip(places_, plans, strict=True)
                    if p.values == "none"
                )
            assert left.left == room


def test_samples_come_before_whole_tensors():
    """The first tensor is not kept whole at the cost of the last one's sample."""
    both = [Site(n, "activation", 0, (10 * SAMPLES,), "float32") for n in "ab"]
    sample = 4 * SAMPLES

    def kept(budget: int) -> list[tuple[str, bool]]:
        return [(p.values, p.cut) for p in Budget(Options(values="full", budget=budget), 1).plan(both)]

    assert kept(sample - 1) == [("none", True), ("none", True)]
    assert kept(2 * sample - 1) == [("sampled", True), ("none", True)]
    assert kept(12 * sample) == [("sampled", True), ("sampled", True)]
    assert kept(18 * sample) == [("whole", False), ("sampled", True)]
    assert kept(36 * sample) == [("whole", False), ("whole", False)]
