"""Each frontend in turn, and small data that a tiny model learns at once."""

import pathlib

import numpy as np
import pytest

from diptych.lab import data, frontend


@pytest.fixture(params=["torch", "jax"])
def frontend_(request):
    """Each frontend in turn; not there means failed, not skipped: both are part of the test environment."""
    return frontend.require(request.param, "cpu")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> pathlib.Path:
    """A Markov chain over 16 bytes: unigram entropy ln 16, of which ln 2 a byte remain with context."""
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
