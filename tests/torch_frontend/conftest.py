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


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """The results of `on_rank(rank, groups)` of the test's module from two gloo processes."""
    from torch_frontend.ranks import results

    return results(request, tmp_path_factory)
