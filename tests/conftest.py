"""Fixtures that all tests share. Every CUDA case carries the `cuda` marker and says why where it cannot run."""

import pytest

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
