"""Which cases of a sweep run each time; the others wait for the slow marker."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def others_slow(each: Iterable[str], now: Collection[str]) -> list[Any]:
    """Each name as a parameter, slow but for those of `now`."""
    return [name if name in now else pytest.param(name, marks=pytest.mark.slow) for name in each]


def named(each: Mapping[str, Any], now: Collection[str]) -> list[Any]:
    """Each value as a parameter under its name, slow but for those of `now`."""
    return [pytest.param(v, id=name, marks=() if name in now else pytest.mark.slow) for name, v in each.items()]


def one_in(n: int, each: Iterable[Any]) -> list[Any]:
    """Each value as a parameter, slow but for each n-th."""
    return [v if i % n == 0 else pytest.param(v, marks=pytest.mark.slow) for i, v in enumerate(each)]


def in_turn(each: Iterable[tuple[Any, ...]], parts: int) -> list[Any]:
    """Each case with each number of a part appended, one part of each case, in turn, not slow."""
    return [
        pytest.param(*case, part, marks=() if part == i % parts else pytest.mark.slow)
        for i, case in enumerate(each)
        for part in range(parts)
    ]


def quarter(nodeid: str) -> int:
    """The quarter that a slow test belongs to, 0 to 3: the same in every run, and for its cases by chance."""
    return zlib.crc32(nodeid.encode()) % 4
