"""The pairs need Flax's models, which transformers had until its version 4: `make lab-pairs` installs it."""

import importlib.metadata
import pathlib

import pytest


def _missing():
    """Returns why the tests cannot run here, or None."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version.startswith("4."):
        return None
    found = f"transformers {version} has no Flax models" if version else "transformers is not installed"
    return f"{found}; `make lab-pairs` runs these tests"


class _Skipped(pytest.File):
    def collect(self):
        pytest.skip(_missing(), allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skips a file before its imports, which would fail."""
    if _missing() and module_path.is_relative_to(pathlib.Path(__file__).parent):
        return _Skipped.from_parent(parent, path=module_path)
    return None
