"""Values that layers pass on: what both panels have is named alike in both."""

from diptych.common.layer_options import NO_ORIGINALS
from diptych.jax.layers import options as of_jax
from diptych.torch.layers import options as of_torch


def test_values_have_one_name():
    assert of_torch.CallState._fields[:2] == of_jax.CallState._fields == ("states", "rng")
    both = [of_torch.Options._fields, of_jax.Options._fields]
    shared = ("module", "name", "originals", "record", "group")
    assert [tuple(f for f in fields if f in shared) for fields in both] == [shared, shared]
    assert of_torch.Options().originals is of_jax.Options(None).originals is NO_ORIGINALS
