"""Fixtures of the core's tests."""

import pytest


@pytest.fixture
def cuda():
    """Skips with the reason where CUDA cannot run."""
    from hardware import cuda_missing

    if reason := cuda_missing():
        pytest.skip(reason)
