"""The tiny job that the lab's tests train."""

from diptych.common import RECIPES
from diptych.lab.job import Job, ModelConfig, OptimConfig

TINY = ModelConfig(width=32, layers=2, heads=2, seq=16)


def job(recipe: str = "mxfp8", steps: int = 6, **more) -> Job:
    """The job. It uses one thread, since each of xdist's workers has one core."""
    optim = OptimConfig(steps=steps, warmup=2)
    return Job(model=TINY, optim=optim, recipe=RECIPES.get(recipe), compile=False, threads=1, **more)
