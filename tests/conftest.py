"""Fixtures that all tests share. Every CUDA case carries the `cuda` marker and says why where it cannot run."""

import pytest

import cases


def cuda_missing() -> str:
    """Why CUDA cases cannot run here, or an empty string."""
    from diptych import core

    if not core.build_info()["cuda"]:
        return "this build has no CUDA backend"
    if not core.cuda_info()["archs"]:
        return "this machine has no GPU"
    return ""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda" and (reason := cuda_missing()):
        pytest.skip(reason)
    return request.param


def pytest_report_header(config):
    return cases.report_header()
