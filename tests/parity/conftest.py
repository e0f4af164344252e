"""Both frameworks in one process: JAX must leave GPU memory for torch. Set before JAX makes its first client."""

import os

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture
def cuda():
    """Skips with the reason where CUDA cannot run."""
    from hardware import cuda_missing

    if reason := cuda_missing():
        pytest.skip(reason)
