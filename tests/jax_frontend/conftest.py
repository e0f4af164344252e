"""Eight CPU devices for the sharding tests, requested before any backend starts, and the CPU as default device."""

import os

import pytest

FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=8".strip()


@pytest.fixture(autouse=True)
def default_device(request):
    """Runs a test on the CPU, or on the GPU if its `device` fixture is "cuda"."""
    import jax

    from jax_frontend import tools

    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    with jax.default_device(tools.gpu() if device == "cuda" else jax.local_devices(backend="cpu")[0]):
        yield


@pytest.fixture
def mesh():
    """Two CPU devices, along "i"."""
    import jax
    import numpy as np

    devices = jax.devices("cpu")
    assert len(devices) >= 2, "a backend started before conftest.py asked for several CPU devices"
    return jax.sharding.Mesh(np.asarray(devices[:2]), ("i",))
