"""Fixtures that all tests share. Every CUDA case carries the `cuda` marker and says why where it cannot run."""

import gc
import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers are as many as the cores. Threads of torch's own would wait for each other's cores in every small op,
    # and Inductor's processes cost more to start than they compile. The core keeps its threads: they are tested.
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, "1")

import cases
from hardware import cuda_missing


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda" and (reason := cuda_missing()):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def cuda():
    if reason := cuda_missing():
        pytest.skip(reason)
    return "cuda"


def pytest_report_header(config):
    return cases.report_header()


def pytest_collection_finish():
    """Compiling makes many small objects that live: collecting seldom, and not what was imported, saves a tenth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)
