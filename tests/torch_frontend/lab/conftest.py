"""A fixture for tests of captures of compiled code."""

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def fresh():
    """No code is compiled before or after a test, and graphs are counted from 0."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
