"""--quarter N runs a quarter of the slow tests; each slow test is in exactly one quarter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


class Item:
    def __init__(self, nodeid: str, *marks: str):
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks


def kept(plugin, items: list[Item], quarter: int | None) -> list[Item]:
    dropped, left = [], list(items)
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    plugin.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: quarter, hook=hook), left)
    assert sorted(i.nodeid for i in (*left, *dropped)) == sorted(i.nodeid for i in items)
    return left


@pytest.fixture
def plugin(pytestconfig):
    (found,) = [p for p in pytestconfig.pluginmanager.get_plugins() if getattr(p, "cuda_missing", None)]
    return found


def test_four_quarters_are_all_slow_tests_once(plugin):
    slow = [Item(f"tests/test_some.py::test_it[{i}]", "slow", "variants") for i in range(400)]
    now = Item("tests/test_some.py::test_now")
    quarters = [kept(plugin, [now, *slow], n) for n in range(4)]
    assert all(q.pop(0) is now and 60 < len(q) < 140 for q in quarters)
    assert sorted(i.nodeid for q in quarters for i in q) == sorted(i.nodeid for i in slow)
    assert quarters[1] == kept(plugin, [now, *slow], 1)[1:]


def test_without_the_option_all_stay(plugin):
    items = [Item(f"{i}", "slow") for i in range(9)]
    assert kept(plugin, items, None) == items
