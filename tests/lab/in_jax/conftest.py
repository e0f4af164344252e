"""Fixtures for tests of the lab in JAX: those of the frontend's tests. The folder is named as tests/lab/in_torch is."""

from jax_frontend.conftest import default_device, mesh  # noqa: F401
