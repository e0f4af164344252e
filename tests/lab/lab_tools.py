"""The tiny job that the lab's tests train."""

from diptych.common import RECIPES
from diptych.lab.job import Job, ModelConfig, OptimConfig

TINY = ModelConfig(width=32, layers=2, heads=2, seq=16)


def job(recipe: str = "mxfp8", steps: int = 6, **more) -> Job:
    """One thread: xdist's workers have a core each."""
    optim = OptimConfig(steps=steps, warmup=2)
    return Job(model=TINY, optim=optim, recipe=RECIPES.get(recipe), compile=False, threads=1, **more)
