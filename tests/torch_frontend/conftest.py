"""Fixtures of torch's tests."""

import itertools

import pytest

import hardware


@pytest.fixture(scope="session", autouse=True)
def guards_are_not_timed():
    """Disables Dynamo's timing of each graph's guards, which flushes the processor's caches for a debug log only and
    takes a thirtieth of compile time."""
    from torch._dynamo import guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Processes that compute together: see `Pool.run`."""
    from torch_frontend.ranks import pool_of_run

    return pool_of_run(tmp_path_factory)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def on(request):
    """The type of the devices on which two ranks compute."""
    if request.param == "cuda" and (reason := hardware.cuda_missing(2)):
        pytest.skip(reason)
    return request.param


def pytest_generate_tests(metafunc):
    """`ranks` is tried in each world of the module's WORLD_SIZES and DEVICES, else in one of two on the CPU."""
    if "ranks" in metafunc.fixturenames:
        module = metafunc.module
        worlds = itertools.product(getattr(module, "WORLD_SIZES", (2,)), getattr(module, "DEVICES", ("cpu",)))
        params = [
            pytest.param(world, id=f"{world[0]} on {world[1]}", marks=[pytest.mark.cuda] if "cuda" in world else [])
            for world in worlds
        ]
        metafunc.parametrize("ranks", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def ranks(request, pool):
    """The results of `on_rank(rank, groups)` of the test's module, by rank."""
    from torch_frontend.ranks import RankError

    size, device = request.param
    if device == "cuda" and (reason := hardware.cuda_missing(size)):
        pytest.skip(reason)
    try:
        return pool.once(request.module, size, device)
    except RankError as error:
        said = str(error)
    pytest.fail(said, pytrace=False)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    yield
    dist.destroy_process_group()
