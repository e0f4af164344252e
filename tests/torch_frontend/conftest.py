"""Fixtures of torch's tests."""

import pytest


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """Of each of two gloo processes: what `on_rank(rank, groups)` of the test's module returned there."""
    from torch_frontend.ranks import results

    return results(request, tmp_path_factory)
