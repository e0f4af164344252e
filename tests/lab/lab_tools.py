"""The tiny job that the lab's tests train, and the equality of recorded bits."""

import dataclasses

import numpy as np

from diptych.common import RECIPES
from diptych.lab.job import Job, ModelConfig, OptimConfig
from diptych.lab.replay.op import Bits

TINY = ModelConfig(width=32, layers=2, heads=2, seq=16)


def job(recipe: str = "mxfp8", steps: int = 6, high_blocks: int = 0, **more) -> Job:
    """The job. It uses one thread, since each of xdist's workers has one core."""
    model, optim = dataclasses.replace(TINY, high_blocks=high_blocks), OptimConfig(steps=steps, warmup=2)
    return Job(model=model, optim=optim, recipe=RECIPES.get(recipe), compile=False, threads=1, **more)


def same_bits(a: Bits, b: Bits) -> bool:
    """Whether dtypes, shapes and bits are equal. NaN of float32, float16 and bfloat16 may differ in theirs."""
    nan = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}.get(a.dtype)
    if a.dtype != b.dtype or a.data.shape != b.data.shape:
        return False
    equal = a.data == b.data
    if nan is not None:
        both = [(x.data & (np.iinfo(x.data.dtype).max >> 1)) > nan for x in (a, b)]
        equal |= both[0] & both[1]
    return bool(equal.all())
