"""Settings for both frameworks in one process: JAX leaves GPU memory for torch, set before its first client exists."""

import os

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture
def cuda():
    """Skips with the reason if CUDA cannot run."""
    from hardware import cuda_missing

    if reason := cuda_missing():
        pytest.skip(reason)
