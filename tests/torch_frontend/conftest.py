"""Fixtures of torch's tests."""

import pytest


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


def pytest_generate_tests(metafunc):
    """`ranks` is tried in each world that the module names, else in one of two."""
    if "ranks" in metafunc.fixturenames and hasattr(metafunc.module, "WORLD_SIZES"):
        metafunc.parametrize("ranks", metafunc.module.WORLD_SIZES, indirect=True, scope="module")


@pytest.fixture(scope="module")
def ranks(request, pool):
    """The results of `on_rank(rank, groups)` of the test's module, by rank."""
    from torch_frontend.ranks import RankError

    try:
        return pool.once(request.module, getattr(request, "param", 2))
    except RankError as error:
        said = str(error)
    pytest.fail(said, pytrace=False)
