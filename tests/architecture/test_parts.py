"""--part N runs a twelfth of the slow tests: each slow test is in exactly one. Most sampled tests are slow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sweeps


class Item:
    def __init__(self, nodeid: str, *marks: str):
        self.nodeid, self.marks = nodeid, list(marks)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def kept(plugin, items: list[Item], part: int | None) -> list[Item]:
    dropped, left = [], list(items)
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    plugin.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: part, hook=hook), left)
    assert sorted(i.nodeid for i in (*left, *dropped)) == sorted(i.nodeid for i in items)
    return left


@pytest.fixture
def plugin(pytestconfig):
    (found,) = [p for p in pytestconfig.pluginmanager.get_plugins() if getattr(p, "cuda_missing", None)]
    return found


def test_the_parts_are_all_slow_tests_once(plugin):
    slow = [Item(f"tests/test_some.py::test_it[{i}]", "slow", "variants") for i in range(800)]
    now = Item("tests/test_some.py::test_now")
    parts = [kept(plugin, [now, *slow], n) for n in range(sweeps.PARTS)]
    assert all(p.pop(0) is now and 40 < len(p) < 95 for p in parts)
    assert sorted(i.nodeid for p in parts for i in p) == sorted(i.nodeid for i in slow)
    assert parts[1] == kept(plugin, [now, *slow], 1)[1:]


def test_one_in_32_sampled_tests_always_runs(plugin):
    """The others are spread over all parts of the slow tests; a file's first test always runs."""
    items = [Item(f"tests/test_some.py::test_it[{i}]", "sampled") for i in range(800)]
    kept(plugin, items, None)
    slow = [i for i in items if "slow" in i.marks]
    files = [Item(f"tests/test_{i}.py::test_it", "sampled") for i in range(9)]
    kept(plugin, files, None)
    assert not any("slow" in i.marks for i in files)
    assert 12 < len(items) - len(slow) < 40
    assert {sweeps.part(i.nodeid) for i in slow} == set(range(sweeps.PARTS))


def test_without_the_option_all_stay(plugin):
    items = [Item(f"{i}", "slow") for i in range(9)]
    assert kept(plugin, items, None) == items
