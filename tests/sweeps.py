"""Functions that choose which tests always run, and which part of the sweeps the slow others belong to."""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def others_slow(each: Iterable[str], now: Collection[str]) -> list[Any]:
    """Returns each name as a parameter, marked slow except those in `now`."""
    return [name if name in now else pytest.param(name, marks=pytest.mark.slow) for name in each]


def kept(each: Iterable[str], now: Collection[str]) -> list[Any]:
    """Returns each name as a parameter: those in `now` always run, also in a file that is sampled; others are slow."""
    return [pytest.param(n, marks=pytest.mark.kept if n in now else pytest.mark.slow) for n in each]


def named(each: Mapping[str, Any], now: Collection[str]) -> list[Any]:
    """Returns each value as a parameter under its name, marked slow except those in `now`."""
    return [pytest.param(v, id=name, marks=() if name in now else pytest.mark.slow) for name, v in each.items()]


def one_in(n: int, each: Iterable[Any]) -> list[Any]:
    """Returns each value as a parameter, marked slow except every n-th."""
    return [v if i % n == 0 else pytest.param(v, marks=pytest.mark.slow) for i, v in enumerate(each)]


def in_turn(each: Iterable[tuple[Any, ...]], parts: int) -> list[Any]:
    """Returns each case with each part's number appended, marked slow except one part of each case, in turn."""
    return [
        pytest.param(*case, part, marks=() if part == i % parts else pytest.mark.slow)
        for i, case in enumerate(each)
        for part in range(parts)
    ]


PARTS = 12  # of the slow tests
ONE_IN = 32  # of the tests that are marked sampled always runs


def part(nodeid: str) -> int:
    """Returns a slow test's part, from 0: a checksum of its id, so it is the same in every run."""
    return zlib.crc32(nodeid.encode()) % PARTS


def always_runs(nodeid: str) -> bool:
    """Whether a test that is marked sampled runs with the others; likewise the same in every run."""
    return zlib.crc32(nodeid.encode()) // 16 % ONE_IN == 0  # by other bits than `part`


class Deadline:
    """A plugin: once `seconds` have passed since the run began, it begins no test and prints how many it left out."""

    def __init__(self, config: pytest.Config, seconds: float):
        self.config, self.seconds, self.left = config, seconds, 0
        self.end = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        if time.monotonic() < self.end:
            return None
        self.left += 1
        return True  # as if it had run

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["left"] = self.left

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left += getattr(node, "workeroutput", {}).get("left", 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left and not hasattr(self.config, "workeroutput"):
            terminalreporter.section(f"{self.left} tests were left out, since {self.seconds:g} seconds had passed")
