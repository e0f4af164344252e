"""Evidence in recorded bits: whether a tensor is constant, and whether two tensors are equal in some order of axes."""

from __future__ import annotations

import hashlib

import numpy as np

from diptych.lab.diff.layout import Axes
from diptych.lab.traces import Observation


def constant(o: Observation) -> bool:
    """Returns whether all elements are known to have one value, as biases and scales have before training."""
    if o.record.values == "whole" and o.values is not None:
        bits = o.values.tensor.bits
        return bool(bits.size) and bool((bits == bits.flat[0]).all())
    found = o.record.statistics
    return found is not None and found.amax is not None and abs(found.mean or 0.0) == found.amax


def are_flipped(weight: Observation, kernel: Observation) -> bool:
    """Returns whether flax's square `kernel` is torch's `weight` of a transposed convolution with reversed spatial
    axes, and is not the weight of an ordinary convolution."""
    shape = weight.site.shape
    if shape[0] != shape[1] or not weight.record.values == kernel.record.values == "whole":
        return False
    space = tuple(range(2, len(shape)))
    held = digest(kernel, None)
    return held == digest(weight, (*space, 0, 1), flipped=len(space)) and held != digest(weight, (*space, 1, 0))


def digest(o: Observation, axes: Axes | None, flipped: int = 0) -> bytes:
    """Returns a hash of whole values after a transposition to `axes`, with the first `flipped` axes reversed."""
    values = o.values
    assert values is not None
    bits = values.tensor.bits if axes is None else np.transpose(values.tensor.bits, axes)
    bits = np.flip(bits, tuple(range(flipped)))
    return hashlib.blake2b(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data, digest_size=16).digest()
