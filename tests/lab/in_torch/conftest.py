"""Fixtures for tests of the lab in torch: those of the frontend's tests, and one for captures of compiled code.

The folder is not named `torch`, since tests/lab is on sys.path, where `import torch` would find it.
"""

import pytest
import torch
from torch._dynamo.utils import counters
from torch_frontend.conftest import guards_are_not_timed, on, pool  # noqa: F401


@pytest.fixture
def fresh():
    """No code is compiled before or after a test, and graphs are counted from 0."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
