"""Fixtures: each frontend in turn, and small data that a tiny model learns in few steps."""

import os
import pathlib

import numpy as np
import pytest

from diptych.lab import data, frontend, progress


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch):
    """A slow machine would print lines among the messages that tests compare."""
    monkeypatch.setattr(progress, "SECONDS", 3600.0)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Enables JAX's compilation cache on disk, since every run of a job compiles the same step, in either worker."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    base = tmp_path_factory.getbasetemp()
    options = {
        "jax_compilation_cache_dir": str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.05,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for values in (options, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is options:
            yield


@pytest.fixture(params=["torch", "jax"])
def frontend_(request):
    """Each frontend in turn. A missing one fails the test: both are part of the test environment."""
    return frontend.require(request.param, "cpu")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> pathlib.Path:
    """A Markov chain over 16 bytes: its unigram entropy is ln 16 per byte, and ln 2 with context."""
    path = tmp_path_factory.mktemp("data") / "chain.bin"
    state, chain = 0, bytearray()
    for bit in np.random.default_rng(0).integers(0, 2, 40_000):
        state = (5 * state + 3 + int(bit)) % 16
        chain.append(97 + state)
    path.write_bytes(chain)
    return path


@pytest.fixture(scope="session")
def small(text) -> data.ByteData:
    return data.load(text)
