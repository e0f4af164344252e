"""Tests that run in an environment of their own: elsewhere their files are skipped with the reason."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest


def skipped_here(folder: pathlib.Path, missing: Callable[[], str | None]) -> Any:
    """Returns a folder's `pytest_pycollect_makemodule`, which skips a file before its imports, which would fail.

    `missing`: returns why the tests cannot run in this environment, or None.
    """

    class Skipped(pytest.File):
        def collect(self):
            pytest.skip(missing(), allow_module_level=True)

    def pytest_pycollect_makemodule(module_path, parent):
        if missing() and module_path.is_relative_to(folder):
            return Skipped.from_parent(parent, path=module_path)
        return None

    return pytest_pycollect_makemodule
