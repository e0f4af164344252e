"""The working directory, from which factories are imported, and files of inputs."""

import bisect_models as models
import numpy as np
import pytest
from bisect_tools import HERE


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(HERE)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    np.savez(folder / "tokens.npz", tokens=models.tokens())
    np.savez(folder / "rows.npz", arg0=models.rows())
    return folder
