"""Which shapes hold the same tensor, against NumPy's transpose and reshape."""

import numpy as np
import pytest

from diptych.lab.diff import layout
from diptych.lab.traces import Site


def parameter(name: str, *shape: int) -> Site:
    return Site(name, "parameter", 0, shape, "float32")


def activation(*shape: int) -> Site:
    return Site("x", "activation", 0, shape, "float32")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ((2, 3, 4), (6, 4), True),
        ((24,), (2, 3, 4), True),
        ((2, 3, 4), (2, 12), True),
        ((1, 1, 5), (5,), True),
        ((), (1,), True),
        ((2, 3), (3, 2), False),
        ((2, 8), (4, 4), False),
        ((2, 3, 4), (3, 8), False),
        ((2, 3), (2, 3, 2), False),
        ((0, 3), (0, 3), True),
        ((0, 3), (0, 4), False),
    ],
)
def test_merged(a, b, same):
    assert layout.merged(a, b) == layout.merged(b, a) == same


@pytest.mark.parametrize("shape", [(5, 3), (6, 5, 2), (6, 5, 2, 3), (6, 5, 2, 3, 4)])
def test_weights_of_both_frameworks(shape):
    torch = np.arange(np.prod(shape)).reshape(shape)
    flax = torch.transpose((*range(2, len(shape)), 1, 0))
    a, b = parameter("w.weight", *shape), parameter("w/kernel", *flax.shape)
    (axes,), (back,) = layout.ways(a, b), layout.ways(b, a)
    assert axes is not None and back is not None
    np.testing.assert_array_equal(flax.transpose(axes), torch)
    np.testing.assert_array_equal(torch.transpose(back), flax)


def test_images():
    torch = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    flax = torch.transpose(0, 2, 3, 1)
    (axes,) = layout.ways(activation(*torch.shape), activation(*flax.shape))
    assert axes is not None
    np.testing.assert_array_equal(flax.transpose(axes), torch)
    (back,) = layout.ways(activation(*flax.shape), activation(*torch.shape))
    assert back is not None
    np.testing.assert_array_equal(torch.transpose(back), flax)


def test_what_does_not_fit():
    assert layout.ways(activation(2, 3), activation(3, 2)) == []
    assert layout.ways(activation(2, 3, 4), activation(3, 4, 2)) == []
    assert layout.ways(parameter("a.weight", 2, 3), parameter("a/kernel", 2, 4)) == []
    assert layout.ways(parameter("a.w", 2, 3, 4), parameter("a/v", 4, 3, 2)) == []


def test_held_otherwise():
    """A transposed convolution's weight is [in, out, ...] in PyTorch, and its kernel [..., in, out] in flax."""
    for a, b, may in (
        ((4, 6, 3, 3), (3, 3, 4, 6), True),
        ((4, 6, 3, 3), (3, 3, 4, 5), False),
        ((4, 6), (4, 7), False),
        ((4, 6), (2, 2, 6), True),
    ):
        assert layout.held_otherwise(parameter("up.weight", *a), parameter("up/kernel", *b)) is may, (a, b)


def test_square():
    a = parameter("w.weight", 4, 4)
    assert layout.ways(a, parameter("w/kernel", 4, 4)) == [None, (1, 0)]
    for other, says in (("w/kernel", True), ("w.weight", False), ("w/embedding", False), ("w/matrix", None)):
        assert layout.by_names(a, parameter(other, 4, 4)) is says, other
    assert layout.by_names(activation(2, 3, 3, 3), activation(2, 3, 3, 3)) is None
