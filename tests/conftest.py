"""Fixtures that all tests share. Every CUDA case has the `cuda` marker and is skipped with a reason without a GPU."""

import atexit
import gc
import os
import shutil
import tempfile

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers are as many as the cores. Threads of torch's own would wait for each other's cores in every small op,
    # and Inductor's processes cost more to start than they compile. The core keeps its threads: they are tested.
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, "1")
elif "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # One for all workers of this run, which compile some of the same programs. The smallest are quicker made than kept.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="diptych-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Dynamo collects garbage after each graph that it compiles: pytest_collection_finish says how seldom that is needed.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import budget
import sweeps

import cases
from hardware import cuda_missing


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda":
        require_cuda()
    return request.param


@pytest.fixture
def cuda():
    require_cuda()
    return "cuda"


def require_cuda():
    """Skips without a GPU. Collects garbage, because a collection during a capture might free another CUDA graph."""
    if reason := cuda_missing():
        pytest.skip(reason)
    gc.collect()


def pytest_configure(config):
    if config.option.markexpr.startswith("not slow") and cuda_missing():
        # These programs take longer to compile than they run. The slow tests' are optimized.
        fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {fast}".strip()
    config.pluginmanager.register(budget.Budget(config))
    if (seconds := config.getoption("--seconds")) is not None:
        config.pluginmanager.register(sweeps.Deadline(config, seconds))


def pytest_addoption(parser):
    parser.addoption("--part", type=int, choices=range(sweeps.PARTS), help="of the slow tests run this part, from 0")
    parser.addoption("--seconds", type=float, help="begin no test after so many, and say how many were left out")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    begun = set()
    for item in items:
        if not item.get_closest_marker("sampled") or item.get_closest_marker("slow"):
            continue
        file, cuda = item.nodeid.partition("::")[0], item.get_closest_marker("cuda")
        if file not in begun and not cuda:
            begun.add(file)  # its first test always runs, so that no file waits for a sweep
        elif not (sweeps.always_runs(item.nodeid) or item.get_closest_marker("kept")):
            item.add_marker(pytest.mark.slow)
    part = config.getoption("--part")
    if part is not None:
        others = [i for i in items if i.get_closest_marker("slow") and sweeps.part(i.nodeid) != part]
        config.hook.pytest_deselected(items=others)
        gone = set(others)
        items[:] = [i for i in items if i not in gone]


def pytest_report_header(config):
    return [cases.report_header(), f"sampled tests: one in {sweeps.ONE_IN} runs, all by -m 'slow or not slow'"]


def pytest_collection_finish():
    """Makes garbage collection rare and exempts imported objects: compiling makes many long-lived objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
